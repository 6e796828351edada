"""A packed folder: one tar of WAV files, and an index of where their samples are.

A packed folder has a name that ends in ``.packed`` and stands wherever a folder of WAV
and FLAC files may stand: ``corpus.packed/id1/a/1.wav`` is the path of a file in it. Samples
are read at their place in the tar, without a look at any header.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .texts import Lookup, Texts

SUFFIX = ".packed"
#: The files of a packed folder; the journal is there until all is packed.
TAR, INDEX, JOURNAL = "audio.tar", "index.npz", "unfinished.jsonl"
#: Samples are stored as integers where those hold them exactly, with the largest float as 2**15.
INTEGERS, FLOATS, FULL_SCALE = np.dtype("<i2"), np.dtype("<f4"), 2.0**15
_LARGEST = 2**32 - 1
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError),
    *(ValueError, LookupError, RuntimeError),
)


def wav_header(samples: int, sample_rate: int, kind: np.dtype[Any]) -> bytes:
    """Make the header of a WAV file of one channel, of RF64 where it has 4 GiB.

    Parameters
    ----------
    samples : int
        How many follow it.
    sample_rate : int
        Hz.
    kind : numpy.dtype
        Of a sample: 16-bit integers or 32-bit floats, in little-endian order.

    Returns
    -------
    bytes

    Example
    -------
    >>> len(wav_header(16000, 16000, np.dtype("<i2")))
    44
    """
    width, size = kind.itemsize, samples * kind.itemsize
    rates = sample_rate, sample_rate * width, width, 8 * width
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 3 if width == 4 else 1, 1, *rates)
    if width == 4:
        # The standard wants the number of samples of all but integers.
        head += b"fact" + struct.pack("<II", 4, min(samples, _LARGEST))
    if size < _LARGEST - len(head):
        whole = struct.pack("<I", len(head) + 8 + size)
        return b"RIFF" + whole + head + b"data" + struct.pack("<I", size)
    # RF64: the sizes that 32 bits do not hold are in a chunk of their own.
    sizes = struct.pack("<IQQQI", 28, len(head) + 44 + size, size, samples, 0)
    unknown = struct.pack("<I", _LARGEST)
    head = head.replace(b"WAVE", b"WAVEds64" + sizes, 1)
    return b"RF64" + unknown + head + b"data" + unknown


class PackedAudio:
    """Audio files of one channel and one rate, as ``data.packing`` packed them.

    Parameters
    ----------
    folder : str
        The packed folder.

    Attributes
    ----------
    tar : str
        The file in which they are.
    sample_rate : int
        Of all of them, Hz.

    Raises
    ------
    ValueError
        If it is unfinished or damaged.
    OSError
        If its tar is not there.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.tar = folder, os.path.join(folder, TAR)
        self._index = os.path.join(folder, INDEX)
        if os.path.exists(os.path.join(folder, JOURNAL)):
            raise ValueError(
                f"{folder} is not packed to its end. Give the command that packs it once "
                "more: it goes on where it was."
            )
        columns = "about", "keys", "begins", "samples", "floats"
        about, keys, *others = self._read_index(*columns)
        self.sample_rate, tar_bytes = about.tolist()
        self._lookup = Lookup(keys)
        self._begins, self._samples, self._floats = others
        if (there := os.path.getsize(self.tar)) != tar_bytes:
            raise ValueError(
                f"{self.tar} has {there} bytes, not {tar_bytes}: it is cut short. Copy or "
                "pack it again."
            )
        self._file = os.open(self.tar, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def __contains__(self, name: str) -> bool:
        return self._lookup.find(name) is not None

    @functools.cached_property
    def names(self) -> Texts:
        """All names, sorted as bytes: what lists the folder reads them, and no other."""
        return Texts(*self._read_index("names", "ends"))

    def length(self, name: str) -> int:
        """Give the length of a file in samples; ValueError if there is no such file."""
        return int(self._samples[self._row_of(name)])

    def member(self, name: str) -> tuple[int, int] | None:
        """Give where a file begins in the tar, and its bytes; None if there is none."""
        row = self._lookup.find(name)
        if row is None:
            return None
        samples, kind = int(self._samples[row]), self._kind_of(row)
        header = len(wav_header(samples, self.sample_rate, kind))
        return int(self._begins[row]) - header, header + samples * kind.itemsize

    def read(
        self,
        name: str,
        start: int,
        samples: int | None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Read a range of a file.

        Parameters
        ----------
        name : str
            The file, relative to the folder that was packed.
        start : int
            First sample, from 0.
        samples : int or None
            How many, or all that follow.
        out : numpy.ndarray, [at least as many samples], optional
            Where they are put; what comes back is a part of it.

        Returns
        -------
        numpy.ndarray, [samples]
            Fewer where the file ends before.

        Raises
        ------
        ValueError
            If there is no such file, the start is before it, or the samples end before
            it does.
        """
        row = self._row_of(name)
        if start < 0:
            raise ValueError(f"start is {start}; give the first sample, from 0.")
        length, kind = int(self._samples[row]), self._kind_of(row)
        start = min(start, length)
        count = length - start if samples is None else min(samples, length - start)
        size, begin = count * kind.itemsize, start * kind.itemsize
        place = int(self._begins[row]) + begin
        data = os.pread(self._file, size, place)
        # One call reads 2 GiB at most.
        while len(data) < size and (
            more := os.pread(self._file, size - len(data), place + len(data))
        ):
            data += more
        if len(data) != size:
            raise ValueError(f"{self.folder}/{name}: {TAR} ends before it does")
        worth = np.float32(1 / FULL_SCALE if kind == INTEGERS else 1)
        into = None if out is None else out[:count]
        scaled: NDArray[np.float32] = np.multiply(
            np.frombuffer(data, kind), worth, out=into, dtype=np.float32
        )
        return scaled

    def below(self, folder: str) -> Iterator[str]:
        """Give the names below a folder, in sorted order.

        Parameters
        ----------
        folder : str
            Relative to the folder that was packed; "" for that itself.
        """
        prefix = f"{folder}/" if folder else ""
        return (name for name in self.names if name.startswith(prefix))

    def _read_index(self, *names: str) -> list[NDArray[Any]]:
        """Read arrays, of which the file has checksums."""
        try:
            with np.load(self._index) as arrays:
                return [arrays[name] for name in names]
        except _DAMAGE as error:
            raise ValueError(
                f"{self._index} is damaged: {error}. Delete {self.folder} and pack anew."
            ) from error

    def _row_of(self, name: str) -> int:
        row = self._lookup.find(name)
        if row is None:
            raise ValueError(
                f"{self.folder}/{name} cannot be read as audio: there is no such file in "
                "that packed folder"
            )
        return row

    def _kind_of(self, row: int) -> np.dtype[Any]:
        return FLOATS if self._floats[row] else INTEGERS


_PACKED = re.compile(rf"{re.escape(SUFFIX)}(?=/|$)")
#: Packed folders that this process has open, by path.
_OPEN: dict[str, PackedAudio] = {}


def find_packed(path: str | os.PathLike[str]) -> tuple[PackedAudio, str] | None:
    """Find the packed folder that a path leads into.

    Parameters
    ----------
    path : str or path-like
        A path such as ``corpus.packed/id1/a/1.wav``, or the packed folder itself.

    Returns
    -------
    packed : PackedAudio
        Open; the same for the same folder in a process.
    name : str
        What the path names in it; "" for the folder itself.
    None
        If the path leads into no packed folder.

    Raises
    ------
    ValueError
        If it should, by its name, and there is none that can be read.
    """
    text = os.fspath(path)
    if SUFFIX not in text:
        return None
    if not text.startswith("/"):
        # A process may go to another folder.
        text = os.path.abspath(text)
    folders = [text[: match.end()] for match in _PACKED.finditer(text)]
    for folder in folders:
        if folder not in _OPEN:
            there = (os.path.join(folder, name) for name in (INDEX, JOURNAL))
            if not any(map(os.path.exists, there)):
                continue
            _OPEN[folder] = PackedAudio(folder)
        return _OPEN[folder], text[len(folder) :].strip("/")
    if not folders or os.path.exists(text):
        # Others may have such names.
        return None
    raise ValueError(
        f"{folders[-1]} is no packed folder: it has no {INDEX}. Make it with "
        "recipes/VoxCeleb/prepare.py --pack FOLDER PACKED."
    )


def forget(folder: str | os.PathLike[str]) -> None:
    """Open a packed folder anew when it is asked for: another one is there now."""
    _OPEN.pop(os.path.abspath(folder), None)
