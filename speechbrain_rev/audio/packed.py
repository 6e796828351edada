"""Audio of a whole folder in one file of 16-bit samples, with an index.

A packed folder has a name that ends in ``.packed`` and stands wherever a folder of WAV
and FLAC files may stand: ``corpus.packed/id1/a/1.wav`` is the path of a file in it. Its
index is mapped into memory, where processes share it. Samples are read by position: where
a disk fails, a mapping ends the process, and reading is an error that can be met.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .columns import TextColumn, map_columns

SUFFIX = ".packed"
SAMPLES, INDEX, JOURNAL = "samples.int16", "index.columns", "unfinished.jsonl"
#: Of the index; a reader refuses others.
VERSION = "1"
SAMPLE_BYTES = 2


class PackedAudio:
    """Audio files of one channel and one rate, as ``data.packing`` packed them.

    Parameters
    ----------
    folder : str
        The packed folder.

    Raises
    ------
    ValueError
        If it is not there, unfinished, damaged or of another version.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        index, samples = Path(folder, INDEX), Path(folder, SAMPLES)
        if Path(folder, JOURNAL).exists():
            raise ValueError(
                f"{folder} is not packed to its end. Give the command that packs it once "
                "more: it goes on where it was."
            )
        if not index.is_file() or not samples.is_file():
            raise ValueError(
                f"{folder} is no packed folder: it has no {INDEX} or no {SAMPLES}. Make "
                "it with recipes/VoxCeleb/prepare.py --pack FOLDER PACKED."
            )
        columns, about = map_columns(index)
        if about.get("version") != VERSION:
            raise ValueError(
                f"{index} is of version {about.get('version')}, not {VERSION}. Pack the "
                "folder again."
            )
        try:
            self.sample_rate, count = (
                _whole(about, name) for name in ("sample_rate", "samples")
            )
            _check_types(columns)
            # Sorted by name; keys are sorted by themselves, beside the places of the names.
            self.names = cast(TextColumn, columns["names"])
            self._keys, self._places, self._begins, self._lengths, self._scales = (
                cast("NDArray[Any]", columns[name]) for name in _TYPES
            )
            _check_samples(self._begins, self._lengths, self._scales, count)
            digest = digest_of_names(self.names, self._keys, self._places)
            if about.get("names") != digest:
                raise ValueError("its names are not those that were written")
        except ValueError as error:
            raise ValueError(
                f"{index} is damaged: {error}. Delete {folder} and pack anew."
            ) from error
        status = index.stat()
        #: Distinguishes what was read from what may be packed there later.
        self.stamp = f"{status.st_size}|{status.st_mtime_ns}"
        wanted = count * SAMPLE_BYTES
        if samples.stat().st_size != wanted:
            raise ValueError(
                f"{samples} has {samples.stat().st_size} bytes, not {wanted}: it is cut "
                "short. Copy or pack it again."
            )
        self._file = os.open(samples, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def __contains__(self, name: str) -> bool:
        return self._row_of(name) is not None

    def length(self, name: str) -> int:
        """Give the length of a file in samples; ValueError if there is no such file."""
        return int(self._lengths[self._place(name)])

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
        place = self._place(name)
        if start < 0:
            raise ValueError(f"start is {start}; give the first sample, from 0.")
        length = int(self._lengths[place])
        start = min(start, length)
        count = length - start if samples is None else min(samples, length - start)
        begin = SAMPLE_BYTES * (int(self._begins[place]) + start)
        data = os.pread(self._file, SAMPLE_BYTES * count, begin)
        if len(data) != SAMPLE_BYTES * count:
            raise ValueError(f"{self.folder}/{name}: {SAMPLES} ends before it does")
        into = None if out is None else out[:count]
        values = np.frombuffer(data, "<i2")
        scaled: NDArray[np.float32] = np.multiply(
            values, self._scales[place], out=into, dtype=np.float32
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
        for place in range(self.names.first_from(prefix), len(self.names)):
            name = self.names[place]
            if not name.startswith(prefix):
                return
            yield name

    def _row_of(self, name: str) -> int | None:
        wanted = key_of(os.fsencode(name))
        at = int(self._keys.searchsorted(wanted))
        while at < len(self._keys) and self._keys[at] == wanted:
            place = int(self._places[at])
            if self.names[place] == name:
                return place
            at += 1
        return None

    def _place(self, name: str) -> int:
        place = self._row_of(name)
        if place is None:
            raise ValueError(
                f"{self.folder}/{name} cannot be read as audio: there is no such file in "
                "that packed folder"
            )
        return place


def key_of(name: bytes) -> int:
    """Give the number by which a name is looked up: among millions that is one step.

    Parameters
    ----------
    name : bytes
        As names of files are encoded.

    Returns
    -------
    int
        Of 64 bits; nearly always another one for another name.
    """
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def digest_of_names(
    names: TextColumn, keys: NDArray[np.int64], places: NDArray[np.int64]
) -> str:
    """Digest what the check of names goes through, in a hundredth of its time.

    Parameters
    ----------
    names : TextColumn
        Of the files, sorted.
    keys, places : numpy.ndarray, [files], int64
        Of the names.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    made = hashlib.blake2b(digest_size=16)
    for column in (names.data, names.ends, keys, places):
        made.update(np.ascontiguousarray(column).data)
    return made.hexdigest()


_TYPES: dict[str, type[np.generic]] = {
    "keys": np.int64,
    "places": np.int64,
    "begins": np.int64,
    "lengths": np.int64,
    "scales": np.float32,
}


def _whole(about: Mapping[str, str], name: str) -> int:
    text = about.get(name, "")
    if not re.fullmatch(r"[1-9]\d{0,17}|0", text, re.ASCII) or (
        name == "sample_rate" and text == "0"
    ):
        raise ValueError(f"{name} is {text[:40]!r}")
    return int(text)


def _check_types(columns: Mapping[str, TextColumn | NDArray[np.generic]]) -> None:
    wanted = {"names", *_TYPES}
    if set(columns) != wanted:
        raise ValueError(f"it has the columns {sorted(columns)}, not {sorted(wanted)}")
    names = columns["names"]
    if not isinstance(names, TextColumn):
        raise ValueError("names are no texts")
    for name, kind in _TYPES.items():
        column = columns[name]
        if isinstance(column, TextColumn):
            raise ValueError(f"{name} are texts")
        if column.dtype != kind or column.shape != names.ends.shape:
            raise ValueError(
                f"{name} are {list(column.shape)} of {column.dtype}, not "
                f"[{len(names)}] of {np.dtype(kind)}"
            )


def _check_samples(
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    scales: NDArray[np.float32],
    count: int,
) -> None:
    """Refuse files that do not lie one behind another, from the first sample to the last."""
    if len(lengths) and not (lengths.min() >= 0 and lengths.max() <= count):
        raise ValueError(f"lengths are {lengths.min()} to {lengths.max()} of {count}")
    order = np.lexsort((lengths, begins))
    begins, ends = begins[order], begins[order] + lengths[order]
    if not np.array_equal(begins, np.append(0, ends[:-1])[: len(begins)]):
        raise ValueError("its files overlap, or leave out samples")
    if (int(ends[-1]) if len(ends) else 0) != count:
        raise ValueError(f"its files do not end with sample {count}")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise ValueError("a scale is not finite and above 0")


_PACKED = re.compile(rf"{re.escape(SUFFIX)}(?=/|$)")
#: Those that this process has open, by path.
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
