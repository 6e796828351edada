"""Members of tar files, read in place: `shard.tar/key.wav` is the path of one.

A tar is gone through once in a process, header by header, for where its members begin. No
file can lie in a file, so that such a path means nothing else.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .packed import PackedAudio, find_packed
from .texts import Lookup

SUFFIX = ".tar"
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"(\xb5/\xfd": "unzstd",
}


class Member(NamedTuple):
    """A file in a tar.

    Attributes
    ----------
    name : str
        As the tar has it, without ``./`` before it.
    begin, size : int
        Bytes.
    """

    name: str
    begin: int
    size: int


def members(path: str | Path) -> Iterator[Member]:
    """Go through the headers of a tar, and give its files in order.

    Parameters
    ----------
    path : str or Path
        A plain tar (ustar, GNU or pax), to its end.

    Yields
    ------
    Member

    Raises
    ------
    ValueError
        If it is compressed, no tar, cut short or damaged, goes on behind its end, or holds
        links or names that lead out of it.
    OSError
        If it cannot be read.

    Example
    -------
    >>> path = getfixture("tmp_path") / "a.tar"
    >>> with tarfile.open(path, "w") as tar:
    ...     tar.addfile(tarfile.TarInfo("a.spk"), io.BytesIO())
    >>> list(members(path))
    [Member(name='a.spk', begin=512, size=0)]
    """
    with open(path, "rb") as file:
        _refuse_compressed(path, file)
        whole = os.fstat(file.fileno()).st_size
        try:
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
                while (info := tar.next()) is not None:
                    # It would keep all, for members that are asked for by name.
                    tar.members.clear()  # type: ignore[attr-defined]
                    if not info.isdir():
                        yield _member(path, info, whole)
                end = tar.offset
        except tarfile.TarError as error:
            raise ValueError(
                f"{path} is no tar, or is cut short or damaged ({error}). Copy or pack it "
                "again."
            ) from error
        _refuse_rest(path, file, end)


def _refuse_compressed(path: str | Path, file: BinaryIO) -> None:
    head = file.read(max(map(len, _COMPRESSED)))
    file.seek(0)
    for magic, tool in _COMPRESSED.items():
        if head.startswith(magic):
            raise ValueError(
                f"{path} is compressed, so that no member can be read in place. "
                f"Decompress it ({tool} {Path(path).name}), and name the .tar."
            )


def _member(path: str | Path, info: tarfile.TarInfo, whole: int) -> Member:
    """Take a file of a tar of so many bytes, if it can be read in place."""
    if info.issparse() or not info.isreg():
        raise ValueError(
            f"{path}: {info.name!r} is a link, a device or a sparse file. Pack it again "
            "with the files themselves: tar --dereference --hard-dereference, without "
            "--sparse."
        )
    name = posixpath.normpath(info.name)
    if name.startswith(("/", "../")) or name in ("..", "."):
        raise ValueError(
            f"{path}: the name {name!r} leads out of the tar. Pack it again with "
            "relative names."
        )
    if info.offset_data + info.size > whole:
        raise _cut_short(path, f"{name!r} ends behind it")
    return Member(name, info.offset_data, info.size)


def _refuse_rest(path: str | Path, file: BinaryIO, end: int) -> None:
    """Refuse a tar without its mark of the end, and what stands behind it."""
    file.seek(end)
    mark = file.read(tarfile.BLOCKSIZE)
    if len(mark) < tarfile.BLOCKSIZE:
        raise _cut_short(path, "the mark of its end is missing")
    if any(mark):
        raise ValueError(f"{path} is damaged, at byte {end}. Copy or pack it again.")
    # No program reads what is behind the mark.
    while block := file.read(2**20):
        if any(block):
            raise ValueError(
                f"{path} goes on behind the mark of its end, as tars that cat has joined. "
                "List each of them, or join them with tar --concatenate."
            )


def _cut_short(path: str | Path, why: str) -> ValueError:
    return ValueError(f"{path} is cut short: {why}. Copy or pack it again.")


class Tar:
    """A tar, and where its members begin: 28 bytes of memory for each.

    Parameters
    ----------
    tar : str
        Its path.
    """

    def __init__(self, tar: str) -> None:
        self.tar = tar
        self._stamp: tuple[int, int] | None = None

    def index(self) -> list[Member]:
        """Go through its headers as ``members``, and keep where members begin."""
        stamp, found = stamp_of(self.tar), list(members(self.tar))
        # The last of two with one name counts, as it does for tar.
        self._lookup, order = Lookup.of(member.name for member in found)
        self._places = np.array([member[1:] for member in found], np.int64)[order]
        self._stamp = stamp
        return found

    def member(self, name: str) -> tuple[int, int] | None:
        """Give where a file begins, and its bytes; None if there is none of this name.

        Raises
        ------
        ValueError, OSError
            As ``members``.
        """
        if self._stamp != stamp_of(self.tar):
            self.index()
        row = self._lookup.find(name)
        return None if row is None else tuple(self._places[row].tolist())


_IN_TAR = re.compile(rf"{re.escape(SUFFIX)}(?=/)", re.IGNORECASE)


#: Tars that this process has read, by path.
_TARS: dict[str, Tar] = {}


def open_tar(path: str | Path) -> Tar:
    """Give the tar of a path, the same in a process."""
    # A process may go to another folder.
    path = os.path.abspath(path)
    return _TARS.setdefault(path, Tar(path))


def find_tar(path: str | os.PathLike[str]) -> tuple[Tar | PackedAudio, str] | None:
    """Find the tar that a path leads into.

    Parameters
    ----------
    path : str or path-like
        A path such as ``shards/shard_0.tar/key.wav``, or a file of a packed folder.

    Returns
    -------
    tar : Tar or PackedAudio
        What knows where its members begin.
    name : str
        What the path names in it.
    None
        If it leads into none: a folder may have such a name.

    Example
    -------
    >>> path = getfixture("tmp_path") / "a.tar"
    >>> path.touch()
    >>> find_tar(path / "id1/a.wav")[1], find_tar("folder.tar/a.wav")
    ('id1/a.wav', None)
    """
    if inside := find_packed(path):
        return inside
    text = os.fspath(path)
    for found in _IN_TAR.finditer(text):
        if os.path.isfile(tar := text[: found.end()]):
            name = posixpath.normpath(text[found.end() + 1 :])
            return open_tar(tar), name
    return None


def stamp_of(path: str | Path) -> tuple[int, int]:
    """Give what is another where a file was changed: its bytes, and when in nanoseconds."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


class FilePart(io.RawIOBase):
    """A part of a file as a file of its own, to be read, perhaps with another beginning.

    Parameters
    ----------
    file : binary file
        The whole; it is closed with its part.
    begin, size : int
        Where the part begins in it, and its bytes.
    name : str
        What the part is called in errors.
    head : bytes
        What is read in the place of as many bytes at its beginning.
    """

    def __init__(
        self,
        file: BinaryIO,
        begin: int,
        size: int,
        *,
        name: str = "",
        head: bytes = b"",
    ) -> None:
        self.name = name
        self._file, self._begin, self._size = file, begin, size
        self._head = head
        self.seek(0)

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    seekable = readable

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, to the end of the part at most."""
        begin = self.tell()
        into = memoryview(buffer)[: max(0, self._size - begin)]
        count: int = self._file.readinto(into)  # type: ignore[attr-defined]
        head = self._head[begin : begin + count]
        into[: len(head)] = head
        return count

    def tell(self) -> int:
        """Give the place in the part."""
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place in the part."""
        offset += (0, self.tell(), self._size)[whence]
        return self._file.seek(self._begin + offset) - self._begin

    def close(self) -> None:
        """Close the whole."""
        self._file.close()
        super().close()
