"""Files are written whole, by one process at a time, and are as they were written."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from speechbrain_rev.audio.packed import INDEX, JOURNAL, TAR
from speechbrain_rev.data.packing import Packing
from speechbrain_rev.files import (
    LOCK,
    SUMS,
    check_sum,
    check_writable,
    digest_of,
    folder_whole,
    locked,
    made_of,
    opened_whole,
    parse_json,
    read_rows,
    sums_in,
    write_sums,
    write_whole,
    writing_alone,
)
from speechbrain_rev.inference import embed_into

_HOLDER = """
import os, sys, time
from pathlib import Path
from speechbrain_rev.files import folder_whole, locked, opened_whole
path, work = Path(sys.argv[1]), sys.argv[2]
make = {"file": opened_whole, "folder": folder_whole}
with locked(path, "it", "writing") if "lock" in work else make[work](path) as part:
    if work == "file":
        part.write(b"half")
        part.flush()
    if work == "folder":
        (part / "weights").write_text("half")
    if work != "forked lock" or not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def holder(path, work):
    """A process that writes a file or folder or holds a lock, and the one it forked."""
    command = [sys.executable, "-c", _HOLDER, str(path), work]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def refuse(lock, message):
    with pytest.raises(ValueError, match=message), lock:
        pass


class TestWritingWhole:
    def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_the_old_one(
        self, tmp_path, monkeypatch
    ):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        path, out = tmp_path / "plan.json", tmp_path / "out"
        path.write_text("old")
        monkeypatch.setattr(os, "replace", full)
        message = (
            r"plan\.json cannot be written \(No space left on device\)\. Free some"
        )
        with pytest.raises(OSError, match=message) as error:
            write_whole(path, b"new")
        assert error.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="out cannot be written"), folder_whole(out):
            pass
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_folder_is_whole_or_not_there(self, tmp_path):
        def half_made():
            with folder_whole(tmp_path / "out") as part:
                write_whole(part / "weights", "1")
                raise ValueError("no model")

        with pytest.raises(ValueError, match="no model"):
            half_made()
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("work", ["file", "folder"])
    @pytest.mark.parametrize("name", ["out", "[a]*?"])
    def test_a_killed_writer_changes_nothing_and_the_next_one_cleans_up(
        self, tmp_path, work, name
    ):
        path = tmp_path / name
        others = {tmp_path / other for other in (".a.abcdefgh.part", ".out.x.part")}
        for other in others:
            other.touch()
        if work == "file":
            path.write_text("old")
        killed(holder(path, work)[0])
        assert path.read_text() == "old" if work == "file" else not path.exists()
        if work == "file":
            write_whole(path, "new")
        else:
            with folder_whole(path) as part:
                (part / "weights").write_text("new")
        assert set(tmp_path.iterdir()) == {path, *others}
        assert (path if work == "file" else path / "weights").read_text() == "new"

    def test_two_writers_do_not_mix_and_the_later_one_succeeds(self, tmp_path):
        path = tmp_path / "plan.json"

        def first():
            with opened_whole(path) as file:
                file.write(b"first")
                write_whole(path, "second")

        with pytest.raises(
            OSError, match=r"plan\.json cannot be written: another process writes it"
        ):
            first()
        assert path.read_text() == "second"
        assert list(tmp_path.iterdir()) == [path]

    def test_links_stay_and_permissions_are_a_new_file_s_or_the_old_one_s(
        self, tmp_path
    ):
        mask = os.umask(0)
        os.umask(mask)
        path, link = tmp_path / "file", tmp_path / "link"
        write_whole(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
        path.chmod(0o640)
        link.symlink_to(path)
        write_whole(link, "newer")
        assert (link.is_symlink(), path.read_text()) == (True, "newer")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

    def test_a_pipe_stays_one(self, tmp_path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        write_whole(pipe, "new")
        assert os.read(reader, 10) == b"new"
        os.close(reader)
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert list(tmp_path.iterdir()) == [pipe]

    @pytest.mark.parametrize("name", ["file", "file/run"])
    def test_a_folder_that_cannot_be_written_to_is_named(self, tmp_path, name):
        (tmp_path / "file").touch()
        message = r"output_folder: .*cannot be written to .*Give"
        with pytest.raises(OSError, match=message):
            check_writable("output_folder", tmp_path / name)
        check_writable("output_folder", tmp_path / "new" / "run")
        assert not list((tmp_path / "new" / "run").iterdir())


class TestLocks:
    def test_a_lock_holds_until_its_process_dies(self, tmp_path):
        lock_file = tmp_path / LOCK
        process, _ = holder(lock_file, "lock")
        try:
            refuse(
                locked(lock_file, "it", "packing"), "process is packing it. Wait for"
            )
        finally:
            killed(process)
        assert lock_file.exists()
        with locked(lock_file, "it", "packing"):
            pass
        assert not list(tmp_path.iterdir())

    def test_a_worker_that_outlives_its_process_holds_no_lock(self, tmp_path):
        process, child = holder(tmp_path / LOCK, "forked lock")
        try:
            killed(process)
            with locked(tmp_path / LOCK, "it", "packing"):
                pass
        finally:
            os.kill(child, signal.SIGKILL)

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
    def test_a_file_system_without_locks_causes_a_warning(
        self, tmp_path, monkeypatch, caplog, number
    ):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("fcntl.flock", flock)
        with locked(tmp_path / LOCK, "the run", "writing into"):
            pass
        assert "the run cannot be locked" in caplog.text
        assert os.strerror(number) in caplog.text

    def test_one_process_embeds_into_an_archive_and_packs_a_folder(self, tmp_path):
        path, begun = tmp_path / "rows.npz", tmp_path / "begun.packed"
        (tmp_path / "link.npz").symlink_to(path)
        with writing_alone(path):
            with pytest.raises(ValueError, match=r"process is writing .*rows\.npz\."):
                embed_into(path, _Embedder, {"a": "a.wav"})
            # The file that a link leads to is locked.
            refuse(writing_alone(tmp_path / "link.npz"), "process is writing .*rows")
        with (
            Packing(begun, source="a", sample_rate=16000),
            pytest.raises(ValueError, match=r"process is packing .*begun\.packed\."),
        ):
            Packing(begun, source="a", sample_rate=16000)
        assert not (begun / LOCK).exists()

    def test_a_folder_that_another_process_finished_just_now_stays_packed(
        self, tmp_path, monkeypatch
    ):
        folder = tmp_path / "a.packed"

        def finished_by_another(lock_file, *args, **kwargs):
            (folder / TAR).write_bytes(b"speech")
            (folder / INDEX).touch()
            return locked(lock_file, *args, **kwargs)

        monkeypatch.setattr("speechbrain_rev.data.packing.locked", finished_by_another)
        with pytest.raises(ValueError, match="is packed already"):
            Packing(folder, source="a", sample_rate=16000)
        assert (folder / TAR).read_bytes() == b"speech"
        assert not (folder / JOURNAL).exists()


class _Embedder:
    fingerprint = "f00d"


def test_a_file_is_compared_with_the_checksum_that_its_folder_has(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("content")
    write_sums(tmp_path, {file.name: digest_of(file), "other": "f00d"})
    check_sum(file)
    file.write_text("contenu")
    with pytest.raises(ValueError, match=r"train\.csv is not as it was"):
        check_sum(file)
    # As the error advises.
    sums = sums_in(tmp_path)
    write_sums(tmp_path, {n: d for n, d in sums.items() if n != file.name})
    check_sum(file)
    (tmp_path / SUMS).unlink()
    check_sum(file)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"epo', "Unterminated string"),
        (b"\xff", "decode byte 0xff"),
        (b'{"epoch": 3, "epoch": 4}', "'epoch' is there twice"),
        (b"3", "'int' object is not a mapping"),
        (b"", "Expecting value"),
        (b"[" * 200_000, "recursion"),
    ],
)
def test_a_line_that_is_no_object_is_refused_with_file_and_number(
    tmp_path, line, reason
):
    path = tmp_path / "train_log.jsonl"
    path.write_bytes(b'{"epoch": 1, "loss": NaN}\n{"epoch": 2}\n')
    assert [row["epoch"] for row in read_rows(path)] == [1, 2]
    path.write_bytes(path.read_bytes() + line + b"\n")
    message = rf"log\.jsonl, line 3, is no JSON object \(.*{reason}.*Bring back"
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_a_name_that_stands_twice_among_many_is_reported_at_once():
    keys = [f"k{i:05}" for i in range(80_000)]
    content = "{" + ", ".join(f'"{key}": 0' for key in [*keys, keys[-1]]) + "}"
    # Looked for key by key, it takes minutes.
    with pytest.raises(ValueError, match=f"'{keys[-1]}' is there twice"):
        parse_json(content)


@dataclass(frozen=True)
class _Pair:
    kind: Literal["a", "b"]
    bounds: tuple[float, ...] | None = field(metadata={"signed": True})
    more: Mapping[str, Any]


@dataclass(frozen=True)
class _Whole:
    pair: _Pair | None
    is_last: bool


PAIR = {"kind": "b", "bounds": [-1, 2.5], "more": {"x": [None]}}


def test_lists_and_mappings_become_the_declared_tuples_and_dataclasses():
    whole = made_of(_Whole, {"pair": PAIR, "is_last": True})
    assert whole == _Whole(_Pair("b", (-1, 2.5), {"x": [None]}), is_last=True)
    assert made_of(_Whole, {"pair": None, "is_last": False}).pair is None


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"kind": "c"}, "kind is 'c' and takes Literal"),
        ({"bounds": ["a"]}, r"bounds is \['a'\] and takes tuple.* of -1152"),
        ({"more": []}, r"more is \[\] and takes Mapping\[str, Any\]$"),
    ],
)
def test_the_field_of_an_inner_dataclass_is_refused_by_name(pair, message):
    with pytest.raises(ValueError, match=message):
        made_of(_Whole, {"pair": {**PAIR, **pair}, "is_last": True})


@dataclass(frozen=True)
class _Values:
    size: int
    text: str | None
    seconds: float = 0.0
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": -1, "text": "a"}, "size is -1 and takes int of 0 to 1152"),
        ({"size": True, "text": "a"}, "size is True and takes int"),
        ({"size": 1.0, "text": "a"}, r"size is 1\.0 and takes int"),
        ({"size": 2**61, "text": "a"}, "size is 2305"),
        ({"size": 1, "text": 2}, r"text is 2 and takes str \| None"),
        ({"size": 1, "text": "a", "seconds": float("nan")}, "seconds is nan and takes"),
        ({"size": 1, "text": "a", "names": ["a", 1]}, r"names is \['a', 1\] and takes"),
        (
            {"size": "9" * 5000, "text": "a"},
            r"size is '9{12}\.\.\.9{13}' and takes int",
        ),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(values, message):
    assert made_of(_Values, {"size": 1, "text": None, "seconds": 1}).seconds == 1
    with pytest.raises(ValueError, match=message):
        made_of(_Values, values)
