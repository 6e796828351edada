"""Stop a process after its n-th file operation, or let the disk be full from then on.

Work is done in a process forked from this one, in which whatever Python does to files below
a folder is counted: opening to write, each write, closing, fsync, rename, deletion, new
folders and the like. Writes are made in two parts, so that files are torn in the middle.
``torch.save`` writes in C++: here its bytes are written in Python, and its errors are those
that torch raises.
"""

from __future__ import annotations

import builtins
import errno
import functools
import gc
import io
import logging
import os
import pathlib
import pickle
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

# torch starts the threads of backward passes once, here none. Where fake tensors came
# first it believes in eight GPUs, and what is forked from there can compute no gradient.
torch.ones((), requires_grad=True).backward()

#: The exit status of a process that was stopped.
STOPPED = 86
#: Functions of ``os`` that change files, and at which place paths are. Those that only give
#: back what is taken work on a full disk.
_CHANGING = {
    "mkdir": 1,
    "rename": 2,
    "replace": 2,
    "link": 2,
    "symlink": 2,
    "truncate": 1,
    "ftruncate": 1,
    "fsync": 1,
    "chmod": 1,
    "utime": 1,
}
_FREEING = {"unlink": 1, "remove": 1, "rmdir": 1}

#: A sample of all operations in the quick tests.
SOME_OR_ALL = pytest.mark.parametrize(
    "most",
    [
        pytest.param(3, id="some"),
        pytest.param(None, id="all", marks=pytest.mark.slow(drawn=False)),
    ],
)
# What the system or torch says.
_REASONS = r"No space left|File too large|iostream error|enforce fail"
FAILURES = pytest.mark.parametrize(
    "kind",
    [
        "full_from",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("fails_at", "largest")
        ),
    ],
)


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes
    ----------
    status : int
        Its exit status.
    words : str
        What it wrote to stdout and stderr.
    operations : tuple of str
        What it did to files; empty if it was stopped.
    sizes : tuple of int
        How long files were when something had been written to them; likewise.
    """

    status: int
    words: str
    operations: tuple[str, ...]
    sizes: tuple[int, ...]


def run(
    work: Callable[[], object],
    folder: Path,
    *,
    stop_after: int | None = None,
    full_from: int | None = None,
    fails_at: int | None = None,
    largest: int | None = None,
) -> Ended:
    """Do something in a process of its own, whose file operations are counted.

    Parameters
    ----------
    work : callable
        What is done. As where a script ends, ``SystemExit`` gives status and words, and
        another exception a traceback.
    folder : Path
        Only operations below it count.
    stop_after : int, optional
        The operation, counted from 1, after which the process ends as when it is killed.
    full_from : int, optional
        The operation from which on the disk takes no more.
    fails_at : int, optional
        The only operation for which there is no space.
    largest : int, optional
        Bytes that a file may have (``RLIMIT_FSIZE``).

    Returns
    -------
    Ended
    """
    words, report = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        status = 70
        try:
            # What it writes must not be stopped by the limit of a file's size.
            for number in (1, 2):
                os.dup2(words[1], number)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            for end in (*words, report[0]):
                os.close(end)
            disk = _Disk(folder, stop_after, full_from, fails_at)
            status = _ended_of(work, disk, largest)
            done = pickle.dumps((disk.operations, disk.sizes))
            disk.write_fully(report[1], done)
        finally:
            os._exit(status)
    os.close(words[1])
    os.close(report[1])
    with open(words[0], "rb") as said, open(report[0], "rb") as counted:
        text, done = said.read().decode(), counted.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    operations, sizes = pickle.loads(done) if done else ((), ())
    return Ended(status, text, tuple(operations), tuple(sizes))


@dataclass(frozen=True)
class Case:
    """Work of which every file operation is tried.

    Attributes
    ----------
    work : callable
        What is done; the same again goes on where it was.
    folder : Path
        Where it writes.
    begin : callable
        Puts into the folder, which is empty, what is there before.
    accept : callable
        Reads the folder as its users do; raises AssertionError if something half-made is
        taken for whole.
    goes_on : tuple of str
        Patterns of names that may stay where work failed, for the next time.
    read : callable, optional
        What must come out the same; by default the bytes of all files.
    """

    work: Callable[[], object]
    folder: Path
    begin: Callable[[], object] = lambda: None
    accept: Callable[[], object] = lambda: None
    goes_on: tuple[str, ...] = ()
    read: Callable[[], object] | None = None

    def fresh(self) -> None:
        """Bring the folder to what it was before."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.begin()

    def outcome(self) -> object:
        """Give what must be the same, however often it was stopped."""
        return contents(self.folder) if self.read is None else self.read()

    def undisturbed(self) -> tuple[Ended, dict[str, bytes | None], object]:
        """Do it once; give what was done, what is there and what comes out."""
        self.fresh()
        done = run(self.work, self.folder)
        assert not done.status, done.words
        files = contents(self.folder)
        self.accept()
        outcome = self.outcome()
        unseen = {Path(n).name for n in files} - set(" ".join(done.operations).split())
        fresh = Case(lambda: None, self.folder, self.begin)
        fresh.fresh()
        unseen -= {Path(name).name for name in contents(self.folder)}
        assert not unseen, f"written by nothing that is counted: {unseen}"
        return done, files, outcome


def check_stops(case: Case, most: int | None = None) -> None:
    """Stop after each operation and start again: nothing is lost, nothing half-made.

    Parameters
    ----------
    case : Case
        What is tried.
    most : int, optional
        How many operations are tried; by default all.
    """
    done, _, expected = case.undisturbed()
    numbers = range(1, len(done.operations) + 1)
    for number in chosen(numbers, most or len(numbers)):
        where = f"after operation {number}, {done.operations[number - 1]}"
        case.fresh()
        assert run(case.work, case.folder, stop_after=number).status == STOPPED, where
        case.accept()
        _check_end(case, expected, where)


def check_failures(case: Case, kind: str, most: int | None = None) -> None:
    """Let each operation fail: one line of error, no rest, and the next time it is done.

    Parameters
    ----------
    case : Case
        What is tried.
    kind : str
        ``full_from``, ``fails_at`` or ``largest``, as of ``run``.
    most : int, optional
        How many operations, or limits of size, are tried; by default all.
    """
    done, whole, expected = case.undisturbed()
    case.fresh()
    before = set(contents(case.folder))
    # A full disk lets files be deleted.
    numbers = [
        number
        for number, words in enumerate(done.operations, start=1)
        if words.split()[0] not in _FREEING
    ]
    if kind == "largest":
        numbers = limits(done, whole.values())
    for number in chosen(numbers, most or len(numbers)):
        where = f"{kind}={number}"
        if kind != "largest":
            where += f", {done.operations[number - 1]}"
        case.fresh()
        failed = run(case.work, case.folder, **{kind: number})
        _check_words(failed, where)
        left = contents(case.folder)
        if failed.status:
            rest = {n for n in set(left) - before if n.endswith((".part", ".lock"))}
            if case.read is None:
                rest |= set(left) - set(whole) - before
            rest = {n for n in rest if not any(fnmatch(n, p) for p in case.goes_on)}
            assert not rest, f"{where} leaves {rest}: {failed.words}"
        else:
            assert case.outcome() == expected, f"{where}: {failed.words}"
        case.accept()
        _check_end(case, expected, where)


def _check_words(ended: Ended, where: str) -> None:
    """See that a process that failed ended with one line."""
    for bad in ("Traceback", "Logging error", "Exception ignored"):
        assert bad not in ended.words, f"{where}: {ended.words}"
    assert ended.status in (0, 1, 2), f"{where}: {ended.status}, {ended.words}"
    if ended.status:
        last = ended.words.replace("\r", "\n").rstrip("\n").rpartition("\n")[2]
        assert re.match(rf"[\w.-]+: .*({_REASONS})", last), f"{where}: {ended.words}"


def _check_end(case: Case, expected: object, where: str) -> None:
    """Do it again; see that all is there, and nothing else."""
    again = run(case.work, case.folder)
    # What is done already may be refused.
    assert "Traceback" not in again.words, f"{where}: {again.words}"
    assert case.outcome() == expected, f"{where}: {again.words}"
    left = [name for name in contents(case.folder) if name.endswith(".part")]
    assert not left, f"{where}: {left}"
    case.accept()


class Tried:
    """The tests of a case: a subclass has a fixture of that name."""

    @SOME_OR_ALL
    def test_what_is_stopped_anywhere_is_done_the_next_time(
        self, case: Case, most: int | None
    ) -> None:
        check_stops(case, most)

    @SOME_OR_ALL
    @FAILURES
    def test_without_space_one_line_reports_it_and_nothing_half_made_stays(
        self, case: Case, kind: str, most: int | None
    ) -> None:
        check_failures(case, kind, most)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Read all files below a folder, and name the folders.

    Parameters
    ----------
    folder : Path
        It may not be there.

    Returns
    -------
    dict of str to bytes or None
        By path; folders are None.
    """
    return {
        path.relative_to(folder).as_posix(): None
        if path.is_dir()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def chosen(numbers: Iterable[int], most: int) -> list[int]:
    """Thin out, evenly; the first and the last stay."""
    ordered = sorted(set(numbers))
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def limits(done: Ended, written: Iterable[bytes | None]) -> list[int]:
    """Give sizes of files at which each write of a process would fail."""
    ends = {*done.sizes, *(len(content) for content in written if content)}
    return sorted({0} | {size - 1 for size in ends if size})


def _ended_of(work: Callable[[], object], disk: _Disk, largest: int | None) -> int:
    """Do it as the only work of a process, and give its exit status."""
    # What is here already is not collected: all of it would be copied.
    gc.freeze()
    # Threads of the process it was forked from are not here.
    torch.set_num_threads(1)
    logging.root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    disk.take_over(counts_torch=largest is None)
    if largest is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    status = 0
    try:
        work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        status = 1
        traceback.print_exc()
    # As when the interpreter ends.
    gc.collect()
    logging.shutdown()
    return status


class _Disk:
    """Counts what is done to files below a folder, and ends it where it is to end."""

    def __init__(
        self,
        folder: Path,
        stop_after: int | None,
        full_from: int | None,
        fails_at: int | None,
    ) -> None:
        self.operations: list[str] = []
        self.sizes: list[int] = []
        self._folder = os.path.realpath(folder)
        self._stop_after = stop_after
        self._full_from, self._fails_at = full_from, fails_at
        self._at_work = 0
        self._open = io.open
        self._write = os.write

    def write_fully(self, file: int, content: bytes) -> None:
        """Write to a pipe."""
        while content:
            content = content[self._write(file, content) :]

    def take_over(self, *, counts_torch: bool) -> None:
        """Let all of Python change files through this; until the process ends."""
        # Nothing here outlives a loss of power, and waiting for the disk takes long.
        os.fsync = lambda file: None
        for names, takes_space in ((_CHANGING, True), (_FREEING, False)):
            for name, paths in names.items():
                changed = self._counted(name, getattr(os, name), paths, takes_space)
                setattr(os, name, changed)
                # Python 3.10 keeps functions of its own there.
                accessor = getattr(pathlib, "_normal_accessor", None)
                if hasattr(accessor, name):
                    setattr(accessor, name, changed)
        io.open = builtins.open = self._opened
        if accessor := getattr(pathlib, "_normal_accessor", None):
            accessor.open = self._opened  # of Python 3.10, too
        opened = os.open

        def open_file(path: Any, flags: int, mode: int = 0o777, **given: Any) -> int:
            if not flags & (os.O_WRONLY | os.O_RDWR) or not self._is_ours(path, given):
                return opened(path, flags, mode, **given)
            words = f"open {self._name(path)}"
            act = functools.partial(opened, path, flags, mode, **given)
            return self.operation(words, act, named=path)

        os.open = open_file
        save = torch.save

        def save_tensors(what: Any, file: Any, *given: Any, **named: Any) -> None:
            if not isinstance(file, str | os.PathLike) or not self._is_ours(file, {}):
                save(what, file, *given, **named)
                return
            with tempfile.TemporaryDirectory() as other:
                same = Path(other, Path(file).name)
                save(what, same, *given, **named)
                content = same.read_bytes()
            self._as_torch_writes(file, content)

        if counts_torch:
            torch.save = torch.serialization.save = save_tensors
        sys.addaudithook(self._see_that_it_counts)

    def operation(
        self,
        words: str,
        act: Callable[[], Any],
        takes_space: bool = True,
        named: Any = None,
    ) -> Any:
        """Do something to a file, unless there is no space; stop if it is time."""
        self.operations.append(words)
        number = len(self.operations)
        full = self._full_from is not None and (
            number == self._full_from or (number > self._full_from and takes_space)
        )
        if full or number == self._fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), named)
        self._at_work += 1
        try:
            return act()
        finally:
            self._at_work -= 1
            if number == self._stop_after:
                os._exit(STOPPED)

    def _counted(
        self, name: str, change: Callable[..., Any], paths: int, takes_space: bool
    ) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            if not any(self._is_ours(path, named) for path in given[:paths]):
                return change(*given, **named)
            words = " ".join([name, *(self._name(path) for path in given[:paths])])
            act = functools.partial(change, *given, **named)
            path = None if isinstance(given[0], int) else os.fspath(given[0])
            return self.operation(words, act, takes_space, path)

        return counted

    def _opened(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """Open a file as ``open`` does; what is written to it is counted."""
        changes = set(mode) & set("wax+")
        if not changes or not self._is_ours(file, {}):
            return self._open(
                file, mode, buffering, encoding, errors, newline, closefd, opener
            )
        plain = mode.replace("b", "").replace("t", "")

        def begin() -> _Counted:
            return _Counted(self, file, plain, closefd, opener)

        # A descriptor or what an opener opens has been counted by os.open.
        if opener or isinstance(file, int):
            self._at_work += 1
            try:
                raw = begin()
            finally:
                self._at_work -= 1
        else:
            words = f"open {self._name(file)}"
            raw = self.operation(words, begin, named=os.fspath(file))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom if "+" in mode else io.BufferedWriter
        binary = buffered(raw)
        if "b" in mode:
            return binary
        text = io.TextIOWrapper(binary, encoding, errors, newline, buffering == 1)
        text.mode = mode
        return text

    def _as_torch_writes(self, path: Any, content: bytes) -> None:
        """Write what ``torch.save`` would; raise what it raises."""
        enforce = "[enforce fail at inline_container.cc:672] . "
        try:
            file = self._opened(path, "wb", 0)
        except OSError as error:
            words = f"open file failed with strerror: {error.strerror}"
            raise RuntimeError(enforce + words) from None
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            raise RuntimeError(f"{enforce}unexpected pos 832 vs 726") from None
        try:
            file.close()
        except OSError:
            raise RuntimeError("basic_ios::clear: iostream error") from None

    def _path(self, path: Any, given: dict[str, Any]) -> str:
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        parent = given.get("dir_fd", given.get("src_dir_fd"))
        where = os.getcwd() if parent is None else f"/proc/self/fd/{parent}"
        folder, name = os.path.split(os.path.join(where, os.fsdecode(path)))
        return os.path.join(os.path.realpath(folder), name)

    def _is_ours(self, path: Any, given: dict[str, Any]) -> bool:
        place = self._path(path, given)
        return place == self._folder or place.startswith(f"{self._folder}/")

    def _name(self, path: Any) -> str:
        return os.path.basename(self._path(path, {}) if isinstance(path, int) else path)

    def _see_that_it_counts(self, event: str, given: tuple[Any, ...]) -> None:
        """Notice what changes files and is not counted."""
        if self._at_work or not event.startswith(("os.", "open")):
            return
        changes = event.removeprefix("os.") in _CHANGING
        if event == "open":
            path, _, flags = given
            changes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            changes = changes and isinstance(path, str | bytes)
        if changes and self._is_ours(given[0], {}):
            os.write(2, f"Traceback: {event} of {given} is not counted\n".encode())


class _Counted(io.FileIO):
    """A file whose writes are counted, and made in two parts."""

    def __init__(self, disk: _Disk, file: Any, mode: str, closefd: bool, opener: Any):
        self._disk, self._rest = disk, 0
        super().__init__(file, mode, closefd, opener)
        self._called = disk._name(self.fileno())

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if len(view) != self._rest and len(view) > 1:
            view = view[: len(view) // 2]
        self._rest = len(content) - len(view)

        def act() -> int:
            written = super(_Counted, self).write(view)
            self._disk.sizes.append(os.fstat(self.fileno()).st_size)
            return written

        return self._disk.operation(f"write {self._called}", act)

    def truncate(self, size: int | None = None) -> int:
        act = super().truncate
        return self._disk.operation(f"truncate {self._called}", lambda: act(size))

    def close(self) -> None:
        if self.closed:
            return
        act = super().close
        try:
            # On some file systems a full disk is reported here.
            self._disk.operation(f"close {self._called}", act)
        except OSError:
            act()
            raise
