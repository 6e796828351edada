"""Files written whole or not at all, and their checksums. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":
    import fcntl

#: Checksums of a folder's files, as ``sha256sum -c`` reads them.
SUMS = "SHA256SUMS"

_BLOCK_BYTES = 2**20
_MOST_SUMS_BYTES = 1_000_000
_MEND = "Free some space there, or mend what is wrong"
# What the system says where a disk takes no more, whatever the file.
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# What is not finished is called by its own name with this much more.
_PART, _DRAWN = ".part", "?" * 8
# Before the checksum that ends a line of rows.
_ROW_SUM = b', "sha256": "'


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file, which takes the place of what was there when it is complete.

    Processes that write one file at once do not meet in it, and where writing fails what
    was there stays as it is. What a process that was killed left is deleted.

    Parameters
    ----------
    path : str or Path
        The file, in a folder that exists.
    content : str or bytes
        What is written; a text as UTF-8.

    Raises
    ------
    OSError
        If it cannot be written.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "plan.json")
    >>> write_whole(file, "{}")
    >>> file.read_text(), len(list(file.parent.iterdir()))
    ('{}', 1)
    """
    with opened_whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def opened_whole(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file to write, which takes its place when the block ends without an error.

    Parameters
    ----------
    path : str or Path
        As of ``write_whole``.

    Yields
    ------
    binary file

    Raises
    ------
    OSError
        If it cannot be written; nothing of it stays.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "rows")
    >>> with opened_whole(file) as opened:
    ...     _ = opened.write(b"rows")
    ...     file.exists()
    False
    >>> file.read_bytes()
    b'rows'
    """
    # A link stays a link to what is written.
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        # Renaming a file over /dev/null would destroy the device.
        with open(path, "wb") as pipe:
            yield pipe
        return
    with naming(path, f"{_MEND}; what was there is as it was."):
        part = ""
        try:
            _clear_left(path)
            part, file = _new_part(path)
            # Which holds the lock until the file has its name.
            held = os.dup(file.fileno())
            try:
                with file:
                    yield file
                    file.flush()
                    # Else a loss of power may leave the name without the content.
                    os.fsync(file.fileno())
                os.chmod(part, _permissions(path))
                os.replace(part, path)
            finally:
                os.close(held)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise


def _new_part(path: Path) -> tuple[str, IO[bytes]]:
    """Make what becomes a file: its path, and it, open and locked."""
    while True:
        made, part = tempfile.mkstemp(_PART, _unfinished(path.name), path.parent)
        file: IO[bytes] = os.fdopen(made, "wb")
        if sys.platform != "win32":
            # Where there are no locks nobody has this one's, to delete it.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(made).st_nlink:
            return part, file
        # Taken for one that a killed process left, before it was locked.
        file.close()


def _clear_left(path: Path) -> None:
    """Delete what killed processes left of a file; parts of others are locked."""
    if sys.platform == "win32":
        return
    for part in _parts_of(path.parent, path.name):
        with contextlib.suppress(OSError), open(part, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(part)


def check_path(path: object, what: str, remedy: str = "Write it to a file.") -> None:
    """Refuse an open file, bytes or anything else where the path of a file is needed.

    Parameters
    ----------
    path : object
        What was given.
    what : str
        What is read, for the error.
    remedy : str
        What to do instead, in a sentence.

    Raises
    ------
    ValueError
        If it is no path.

    Examples
    --------
    >>> check_path("a.wav", "audio")
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(
            f"{what} is read by the path of its file, and {type(path).__name__} is none. "
            f"{remedy}"
        )


@contextlib.contextmanager
def folder_whole(path: str | Path) -> Iterator[Path]:
    """Make a folder, which takes its place when the block ends without an error.

    Parameters
    ----------
    path : str or Path
        The folder, which is not there or empty; the one that it is in exists. No other
        process makes it.

    Yields
    ------
    pathlib.Path
        The folder that becomes it.

    Raises
    ------
    OSError
        If it cannot be written; nothing of it stays.

    Examples
    --------
    >>> folder = Path(tempfile.mkdtemp(), "model")
    >>> with folder_whole(folder) as part:
    ...     write_whole(part / "weights", b"1")
    ...     folder.exists()
    False
    >>> [file.name for file in folder.iterdir()]
    ['weights']
    """
    path = Path(path).resolve()
    with naming(path, f"{_MEND}, and give the same command again."):
        clear_unfinished(path.parent, path.name)
        prefix = _unfinished(path.name)
        part = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix, suffix=_PART))
        try:
            yield part
            # It was made for its owner alone.
            os.chmod(part, 0o111 | _permissions(part / "new"))
            os.replace(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def clear_unfinished(folder: str | Path, name: str | None = None) -> None:
    """Delete what processes that were killed left of files and folders made whole.

    Parameters
    ----------
    folder : str or Path
        Where they are; it need not be there.
    name : str, optional
        Of the one that was to be written; by default, all. No other process writes it.

    Examples
    --------
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / ".plan.json.abcdefgh.part").touch()
    >>> clear_unfinished(folder, "plan")
    >>> clear_unfinished(folder, "plan.json")
    >>> list(folder.iterdir())
    []
    """
    for part in _parts_of(folder, name):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def _parts_of(folder: str | Path, name: str | None) -> Iterator[Path]:
    prefix = ".*." if name is None else glob.escape(_unfinished(name))
    return Path(folder).glob(f"{prefix}{_DRAWN}{_PART}")


def is_of_disk(error: BaseException) -> bool:
    """Return whether an error means that a disk is full.

    Parameters
    ----------
    error : BaseException
        Of the system, or one that ``naming`` made of it.

    Returns
    -------
    bool

    Examples
    --------
    >>> is_of_disk(OSError(errno.ENOSPC, "No space left on device"))
    True
    >>> is_of_disk(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    False
    """
    return isinstance(error, OSError) and error.errno in _OF_DISKS


@contextlib.contextmanager
def naming(path: str | Path, advice: str) -> Iterator[None]:
    """Name what cannot be written where a disk takes no more, and what to do.

    Parameters
    ----------
    path : str or Path
        What is written in the block.
    advice : str
        In whole sentences.

    Raises
    ------
    OSError
        In the place of what the system says of the disk; other errors stay as they are.

    Examples
    --------
    >>> with naming("plan.json", "Free some space."):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    OSError: plan.json cannot be written (No space left on device). Free some space.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or not is_of_disk(error):
            raise
        reason = os.strerror(error.errno)
        named = OSError(f"{path} cannot be written ({reason}). {advice}")
        named.errno = error.errno
        raise named from error


def _unfinished(name: str) -> str:
    """Give what names of files begin with that are to become this one."""
    return f".{name}."


def digest_of(path: str | Path, algorithm: str) -> str:
    """Compute a file's digest, of which a part at a time is in memory.

    Parameters
    ----------
    path : str or Path
        The file.
    algorithm : str
        A name that ``hashlib.new`` knows.

    Returns
    -------
    str
        In hexadecimal digits.

    Raises
    ------
    OSError
        If it cannot be read.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "empty")
    >>> file.touch()
    >>> digest_of(file, "sha256")[:8]
    'e3b0c442'
    """
    digest = hashlib.new(algorithm)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sums_in(folder: str | Path) -> dict[str, str]:
    """Read the checksums of a folder's files.

    Parameters
    ----------
    folder : str or Path
        The folder, which may have no ``SHA256SUMS``.

    Returns
    -------
    dict of str to str
        SHA-256 in hexadecimal digits by name, relative to the folder.

    Raises
    ------
    OSError
        If they cannot be read.
    ValueError
        If the file has more bytes than any list of checksums.

    Examples
    --------
    >>> sums_in(tempfile.mkdtemp())
    {}
    """
    path = Path(folder, SUMS)
    if not path.is_file():
        return {}
    if path.stat().st_size > _MOST_SUMS_BYTES:
        raise ValueError(
            f"{path} has more than {_MOST_SUMS_BYTES:,} bytes, and is no list of checksums. "
            "Bring back the file as it was, or delete it."
        )
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: digest for digest, _, name in (x.partition("  ") for x in lines)}


def write_sums(folder: str | Path, digests: Mapping[str, str]) -> None:
    """Write the checksums of a folder's files, whole.

    Parameters
    ----------
    folder : str or Path
        The folder.
    digests : mapping of str to str
        SHA-256 in hexadecimal digits by name, relative to the folder.

    Raises
    ------
    OSError
        If they cannot be written.

    Examples
    --------
    >>> folder = tempfile.mkdtemp()
    >>> write_sums(folder, {"train.csv": "f00d"})
    >>> sums_in(folder)
    {'train.csv': 'f00d'}
    """
    lines = (f"{digest}  {name}\n" for name, digest in digests.items())
    write_whole(Path(folder, SUMS), "".join(lines))


def check_sum(path: str | Path) -> None:
    """Refuse a file that is not as its checksum says; one without is as it is.

    Parameters
    ----------
    path : str or Path
        The file, which is there; ``SHA256SUMS`` are beside it.

    Raises
    ------
    ValueError
        If it is not as it was written.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "train.csv")
    >>> file.touch()
    >>> check_sum(file)
    >>> write_sums(file.parent, {"train.csv": digest_of(file, "sha256")})
    >>> check_sum(file)
    >>> write_whole(file, "x")
    >>> check_sum(file)
    Traceback (most recent call last):
    ValueError: ...train.csv is not as it was written: ...
    """
    folder, name = Path(path).parent, Path(path).name
    written = sums_in(folder).get(name)
    if written is not None and digest_of(path, "sha256") != written:
        raise ValueError(
            f"{path} is not as it was written: its checksum in {folder / SUMS} differs. "
            f"Bring back the file as it was. To take it as it is, delete the line of "
            f"{name} there."
        )


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of lines of JSON, whole, each with a checksum.

    Parameters
    ----------
    path : str or Path
        The file.
    rows : iterable of mapping
        Plain values without text at the top; each line gets "sha256" beside them, which
        is that of all lines to here.

    Raises
    ------
    OSError
        If it cannot be written.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "train_log.jsonl")
    >>> write_rows(file, [{"epoch": 1}])
    >>> file.read_text()[:24]
    '{"epoch": 1, "sha256": "'
    >>> read_rows(file)
    [{'epoch': 1}]
    """
    digest, lines = hashlib.sha256(), []
    for row in rows:
        begin = json.dumps(row)[:-1].encode()
        digest.update(begin)
        lines.append(begin + _ROW_SUM + digest.hexdigest().encode() + b'"}\n')
    write_whole(path, b"".join(lines))


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    r"""Read what ``write_rows`` wrote.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    list of dict
        The rows, without checksums.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is not as it was written; file and line are named.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "train_log.jsonl")
    >>> write_rows(file, [{"epoch": 1}])
    >>> write_whole(file, file.read_text() + '{"epo')
    >>> read_rows(file)
    Traceback (most recent call last):
    ValueError: ...train_log.jsonl, line 2, is not as it was written. ...
    """
    digest = hashlib.sha256()
    rows: list[dict[str, Any]] = []
    content = Path(path).read_bytes()
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        begin, _, end = line.rpartition(_ROW_SUM)
        digest.update(begin)
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        whole = end == digest.hexdigest().encode() + b'"}\n'
        if not (whole and isinstance(row, dict)):
            raise ValueError(
                f"{path}, line {number}, is not as it was written. Bring back the file as "
                "it was, or move it away: the lines of earlier epochs are then missing."
            )
        del row["sha256"]
        rows.append(row)
    return rows


def check_writable(name: str, folder: str | Path) -> None:
    """Make a folder, and see that files can be written to it.

    Parameters
    ----------
    name : str
        What the folder is called, for the error.
    folder : str or Path
        The folder; it is made if it is not there.

    Raises
    ------
    OSError
        If it cannot be made or nothing can be written to it.

    Examples
    --------
    >>> check_writable("output_folder", Path(tempfile.mkdtemp(), "new"))
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Without a name: another process may clear what looks unfinished meanwhile.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "it is a file, or below one" if is_file else error.strerror
        raise OSError(
            f"{name}: {folder} cannot be written to ({reason}). Give another one, "
            "or make it writable."
        ) from error


def check_file(name: str, file: str | Path) -> None:
    """Refuse a place where no file can be written, before the work and not after it.

    Parameters
    ----------
    name : str
        What the file is called, for the error.
    file : str or Path
        Its path.

    Raises
    ------
    ValueError
        If there is no such folder, it may not be written to, or the path is a folder.

    Examples
    --------
    >>> check_file("--out", Path(tempfile.mkdtemp(), "rows.npz"))
    """
    path = Path(file)
    reason = ""
    if not path.parent.is_dir():
        reason = f"there is no folder {path.parent}. Make it first"
    elif path.is_dir():
        reason = "it is a folder. Give the name of a file"
    elif not os.access(path.parent, os.W_OK):
        reason = f"you may not write into the folder {path.parent}. Give another one"
    if reason:
        raise ValueError(f"{name} {path} cannot be written: {reason}.")


def _permissions(path: Path) -> int:
    """Give those of the file that is replaced, or those that a new one would have."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
