"""Files written whole or not at all, and their digests. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_BLOCK_BYTES = 2**20


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file, which takes the place of what was there when it is complete.

    Processes that write one file at once do not meet in it, and where writing fails what
    was there stays as it is.

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
        If it cannot be written.

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
        # A pipe or a device stays what it is.
        with open(path, "wb") as file:
            yield file
        return
    with tempfile.NamedTemporaryFile(
        dir=path.parent, suffix=".part", delete=False
    ) as part:
        try:
            yield part.file
            part.flush()
            # Else a loss of power may leave the name without the content.
            os.fsync(part.fileno())
            part.close()
            os.chmod(part.name, permissions(path))
            os.replace(part.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part.name)
            raise


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
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise OSError(
            f"{name}: {folder} cannot be written to ({error.strerror}). Give another one, "
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


def permissions(path: Path) -> int:
    """Give those of the file that is replaced, or those that a new one would have.

    Parameters
    ----------
    path : Path
        The file, which need not be there.

    Returns
    -------
    int
        Bits as ``os.chmod`` takes them.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "private")
    >>> file.touch(mode=0o600)
    >>> oct(permissions(file))
    '0o600'
    """
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
