"""Files written whole or not at all, and their digests. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

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
    # A link stays a link to what is written.
    path = Path(path).resolve()
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        # A pipe or a device stays what it is.
        with open(path, "wb") as file:
            file.write(data)
        return
    with tempfile.NamedTemporaryFile(
        dir=path.parent, suffix=".part", delete=False
    ) as part:
        try:
            part.write(data)
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
