"""Texts and numbers of millions of rows, mapped into memory from one file.

Processes that map the same file share it, and only what they touch is in memory. An
object for each row would cost hundreds of bytes of it in every process that reads.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, overload

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from speechbrain_rev.files import write_whole

_AT_ONCE = 2**16

Row = TypeVar("Row", covariant=True)


class Rows(Sequence[Row]):
    """What is read row by row: a slice of it is a list."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        places = range(len(self))[index]
        return (
            self._row(places)
            if isinstance(places, int)
            else list(map(self._row, places))
        )

    def _row(self, place: int) -> Row:
        raise NotImplementedError


class TextColumn(Rows[str]):
    """Texts, one behind another in an array of bytes.

    Parameters
    ----------
    data : numpy.ndarray, [bytes], uint8
        The texts as names of files are encoded.
    ends : numpy.ndarray, [texts], int64
        Where each ends.

    Raises
    ------
    ValueError
        If the ends are not those of texts in these bytes.

    Example
    -------
    >>> column = TextColumn.of(["id1/a", "id1/b"])
    >>> column[1], column.first_from("id1/aa")
    ('id1/b', 1)
    """

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        if (
            data.dtype != np.uint8
            or ends.dtype != np.int64
            or data.ndim + ends.ndim != 2
        ):
            raise ValueError(f"texts are {data.dtype} and their ends {ends.dtype}")
        last = int(ends[-1]) if len(ends) else 0
        # A difference of large numbers would overflow.
        if last != len(data) or (ends < 0).any() or (ends[1:] < ends[:-1]).any():
            raise ValueError(f"the ends of texts do not fit their {len(data)} bytes")
        self.data, self.ends = data, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> TextColumn:
        """Make a column of texts."""
        growing = GrowingTexts()
        for text in texts:
            growing.append(text)
        return growing.column()

    def __len__(self) -> int:
        return len(self.ends)

    def _row(self, place: int) -> str:
        return os.fsdecode(self._encoded(place))

    def first_from(self, text: str) -> int:
        """Find the first text that is this one or behind it, of texts sorted as bytes.

        Parameters
        ----------
        text : str

        Returns
        -------
        int
            Its place; the number of texts where none is behind.
        """
        return bisect_left(range(len(self)), os.fsencode(text), key=self._encoded)

    def encoded(self) -> Iterator[bytes]:
        """Give all texts as names of files are encoded; a part of them is copied at a time."""
        begin = 0
        for first in range(0, len(self), _AT_ONCE):
            ends = self.ends[first : first + _AT_ONCE].tolist()
            offset, data = begin, self.data[begin : ends[-1]].tobytes()
            for end in ends:
                yield data[begin - offset : end - offset]
                begin = end

    def _encoded(self, index: int) -> bytes:
        begin = self.ends[index - 1] if index else 0
        return self.data[begin : self.ends[index]].tobytes()


class GrowingTexts:
    """Texts to which others are added, one by one.

    Example
    -------
    >>> texts = GrowingTexts()
    >>> texts.append("a.wav")
    >>> list(texts.column())
    ['a.wav']
    """

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("q")

    def fill(self, count: int) -> None:
        """Add empty texts until there are so many."""
        self._ends.extend([len(self._data)] * (count - len(self._ends)))

    def append(self, text: str) -> None:
        """Add a text behind the others."""
        self._data += os.fsencode(text)
        self._ends.append(len(self._data))

    def column(self) -> TextColumn:
        """Give them as a column; nothing can be added any more."""
        data = np.frombuffer(self._data, np.uint8)
        return TextColumn(data, np.frombuffer(self._ends, np.int64))


def save_columns(
    path: str | Path,
    columns: Mapping[str, TextColumn | NDArray[np.generic]],
    about: Mapping[str, str],
) -> None:
    """Write columns into a file that takes the place of an earlier one in one step.

    Parameters
    ----------
    path : str or Path
        The file, in the safetensors format.
    columns : mapping of str to TextColumn or numpy.ndarray
        By name.
    about : mapping of str to str
        What else is known of them.

    Raises
    ------
    OSError
        If it cannot be written; nothing of it stays.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, column in columns.items():
        if isinstance(column, TextColumn):
            arrays[f"{name}.bytes"], arrays[f"{name}.ends"] = column.data, column.ends
        else:
            arrays[name] = column
    write_whole(path, _in_order(safetensors.numpy.save(arrays, dict(about))))


def _in_order(content: bytes) -> bytes:
    """Sort what safetensors says of a file, which it writes in any order."""
    begin = 8
    size = int.from_bytes(content[:begin], "little")
    header = json.loads(content[begin : begin + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= size
    return content[:begin] + text.ljust(size) + content[begin + size :]


def map_columns(
    path: str | Path,
) -> tuple[dict[str, TextColumn | NDArray[np.generic]], dict[str, str]]:
    """Map what ``save_columns`` wrote into memory.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    columns : dict of str to TextColumn or numpy.ndarray
        By name. They are read where they are touched.
    about : dict of str to str
        What else is known of them.

    Raises
    ------
    ValueError
        If it is no such file, or a damaged one.

    Example
    -------
    >>> path = getfixture("tmp_path") / "some.columns"
    >>> save_columns(path, {"wav": TextColumn.of(["a.wav"])}, {"rate": "16000"})
    >>> columns, about = map_columns(path)
    >>> columns["wav"][0], about
    ('a.wav', {'rate': '16000'})
    """
    try:
        # "pt" alone maps the file; "numpy" would read it.
        with safetensors.safe_open(path, framework="pt") as stored:
            about = stored.metadata() or {}
            arrays = {name: stored.get_tensor(name).numpy() for name in stored.keys()}  # noqa: SIM118 -- it is no mapping
        columns: dict[str, TextColumn | NDArray[np.generic]] = {}
        for name, array in arrays.items():
            text, _, part = name.rpartition(".")
            if part == "bytes":
                columns[text] = TextColumn(array, arrays[f"{text}.ends"])
            elif part != "ends":
                columns[name] = array
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it.") from error
    return columns, about
