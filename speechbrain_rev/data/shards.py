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
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from speechbrain_rev.whole_files import open_regular

from .packed import key_of

SUFFIX = ".tar"
_BLOCK = tarfile.BLOCKSIZE
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_EXTENSIONS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME)
_PASSED_OVER = (tarfile.DIRTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK)
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"(\xb5/\xfd": "unzstd",
}
# A name in an extension of a header is that of a file.
_MOST_OF_EXTENSION = 2**20
_PAX = re.compile(rb"(\d+) ([^=]+)=")


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
    with open_regular(path) as file:
        whole = os.fstat(file.fileno()).st_size
        place, instead = 0, dict[str, str]()
        while True:
            file.seek(place)
            head = file.read(_BLOCK)
            if not any(head) and len(head) == _BLOCK:
                _refuse_more(path, file)
                return
            info = _header(path, head, place)
            name, size = instead.pop("path", info.name), info.size
            size = int(instead.pop("size", size))
            begin = place + _BLOCK
            if begin + size > whole:
                raise _cut_short(path, place, f"{name!r} ends behind it")
            place = begin + size + -size % _BLOCK
            if info.type in _EXTENSIONS:
                instead |= _extension(path, file, info, name)
                continue
            instead.clear()
            if info.type in _PASSED_OVER:
                continue
            if info.type not in _FILES:
                raise ValueError(
                    f"{path}: {name!r} is a link, a device or a sparse file. Pack it again "
                    "with the files themselves: tar --dereference --hard-dereference."
                )
            name = posixpath.normpath(name)
            if name.startswith(("/", "../")) or name in ("..", "."):
                raise ValueError(
                    f"{path}: the name {name!r} leads out of the tar. Pack it again with "
                    "relative names."
                )
            yield Member(name, begin, size)


def _header(path: str | Path, head: bytes, place: int) -> tarfile.TarInfo:
    """Read a header of 512 bytes."""
    if not place:
        for magic, tool in _COMPRESSED.items():
            if head.startswith(magic):
                raise ValueError(
                    f"{path} is compressed, so that no member can be read in place. "
                    f"Decompress it ({tool} {Path(path).name}), and name the .tar."
                )
    if len(head) < _BLOCK:
        raise _cut_short(path, place, "the mark of its end is missing")
    try:
        return tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise ValueError(
            f"{path} is no tar, or is damaged, at byte {place} ({error}). Copy or pack it "
            "again."
        ) from error


def _cut_short(path: str | Path, place: int, why: str) -> ValueError:
    return ValueError(
        f"{path} is cut short: {why}, from byte {place} on. Copy or pack it again."
    )


def _refuse_more(path: str | Path, file: BinaryIO) -> None:
    """Refuse what stands behind the end of a tar, where no program reads it."""
    while block := file.read(2**20):
        if any(block):
            raise ValueError(
                f"{path} goes on behind the mark of its end, as tars that cat has joined. "
                "List each of them, or join them with tar --concatenate."
            )


def _extension(
    path: str | Path, file: BinaryIO, info: tarfile.TarInfo, name: str
) -> dict[str, str]:
    """Read the name and the size that stand before the header that they are for."""
    content = file.read(info.size) if info.size <= _MOST_OF_EXTENSION else b""
    if info.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": os.fsdecode(content.rstrip(b"\0"))}
    found, place = {}, 0
    while match := _PAX.match(content, place):
        end = place + int(match[1])
        if not match.end() < end <= len(content):
            break
        found[match[2].decode(errors="replace")] = content[match.end() : end - 1]
        place = end
    if place != len(content) or not content:
        raise ValueError(f"{path}: {name!r} is damaged. Copy or pack it again.")
    if any(key.startswith("GNU.sparse") for key in found):
        raise ValueError(
            f"{path}: {name!r} is of a sparse file. Pack it again without tar --sparse."
        )
    return {key: os.fsdecode(found[key]) for key in ("path", "size") if key in found}


class _Index:
    """Where the members of a tar begin, by the keys of their names: 24 bytes for each."""

    def __init__(self, found: Iterable[Member], stamp: tuple[int, int]) -> None:
        self.stamp = stamp
        rows = [array("q"), array("q"), array("q")]
        for name, *place in found:
            values = key_of(os.fsencode(name)), *place
            for column, value in zip(rows, values, strict=True):
                column.append(value)
        keys, begins, sizes = (np.frombuffer(row, np.int64) for row in rows)
        # Where two have one name the last counts, as it does for tar.
        order = np.argsort(keys, kind="stable")
        self._keys, self._begins, self._sizes = keys[order], begins[order], sizes[order]

    def find(self, name: str) -> Member | None:
        """Give a member; None if there is none of this name."""
        key = key_of(os.fsencode(name))
        at = int(self._keys.searchsorted(key, side="right")) - 1
        if at < 0 or self._keys[at] != key:
            return None
        return Member(name, int(self._begins[at]), int(self._sizes[at]))


_IN_TAR = re.compile(rf"{re.escape(SUFFIX)}(?=/)", re.IGNORECASE)
#: Those that this process has read, by path.
_INDICES: dict[str, _Index] = {}


def find_tar(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Find the tar that a path leads into.

    Parameters
    ----------
    path : str or path-like
        A path such as ``shards/shard_0.tar/key.wav``.

    Returns
    -------
    tar, name : str
        The tar, and what the path names in it.
    None
        If it leads into none: a folder may have such a name.

    Example
    -------
    >>> path = getfixture("tmp_path") / "a.tar"
    >>> path.touch()
    >>> find_tar(path / "id1/a.wav")[1], find_tar("folder.tar/a.wav")
    ('id1/a.wav', None)
    """
    text = os.fspath(path)
    for found in _IN_TAR.finditer(text):
        if os.path.isfile(text[: found.end()]):
            return text[: found.end()], posixpath.normpath(text[found.end() + 1 :])
    return None


def find_member(path: str | os.PathLike[str]) -> tuple[str, Member | None] | None:
    """Find the member of a tar that a path stands for.

    Parameters
    ----------
    path : str or path-like

    Returns
    -------
    tar : str
        The tar.
    member : Member or None
        None if the tar has none of this name.
    None
        If the path leads into no tar.

    Raises
    ------
    ValueError, OSError
        As ``members``.
    """
    inside = find_tar(path)
    if inside is None:
        return None
    tar, name = inside
    index = _INDICES.get(os.path.abspath(tar))
    if index is None or index.stamp != _stamp(tar):
        indexed(tar)
        index = _INDICES[os.path.abspath(tar)]
    return tar, index.find(name)


def indexed(path: str | Path) -> list[Member]:
    """Go through a tar as ``members``, and keep where they begin for ``find_member``.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    list of Member

    Raises
    ------
    ValueError, OSError
        As ``members``.
    """
    stamp, found = _stamp(path), list(members(path))
    _INDICES[os.path.abspath(path)] = _Index(found, stamp)
    return found


def _stamp(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


class OpenMember(io.FileIO):
    """A member of a tar as a file of its own, to be read.

    Parameters
    ----------
    tar : str
        The tar.
    member : Member
        Of it.
    """

    def __init__(self, tar: str, member: Member) -> None:
        super().__init__(tar)
        self.name = f"{tar}/{member.name}"
        self._begin, self._size = member.begin, member.size
        self.seek(0)

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, to the end of the member at most."""
        into = memoryview(buffer)[: max(0, self._size - self.tell())]
        return super().readinto(into) or 0

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes, to the end of the member at most."""
        left = max(0, self._size - self.tell())
        return (
            super().read(left if size is None or size < 0 else min(size, left)) or b""
        )

    def tell(self) -> int:
        """Give the place in the member."""
        return super().tell() - self._begin

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place in the member."""
        if whence == io.SEEK_CUR:
            offset += self.tell()
        elif whence == io.SEEK_END:
            offset += self._size
        return super().seek(self._begin + offset) - self._begin
