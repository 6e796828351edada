"""Texts of millions of rows in two arrays, and a lookup of names among millions.

An object for each text would cost every process hundreds of bytes a row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

# surrogateescape keeps the bytes of file names that are not UTF-8.
_ENCODING = "utf-8", "surrogateescape"

Row = TypeVar("Row", covariant=True)
Kind = TypeVar("Kind", bound=np.generic)


class Rows(Sequence[Row]):
    """A sequence that makes a row when it is asked for; a slice of it is a list."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        rows = range(len(self))[index]
        return (
            self._read_row(rows)
            if isinstance(rows, int)
            else list(map(self._read_row, rows))
        )

    def _read_row(self, index: int) -> Row:
        raise NotImplementedError


class Column(Generic[Kind]):
    """Numbers of all rows, which processes share.

    Forked processes share the pages of the array. When the column is first sent to a
    spawned process, torch moves it to shared memory, and this process reads it there too.

    Parameters
    ----------
    array : numpy.ndarray, [rows]
        The numbers. Other references to the array keep its memory.
    """

    def __init__(self, array: NDArray[Kind]) -> None:
        self.array = array
        self._tensor: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._tensor is None:
            # A late import: listing the names of files needs no torch.
            from torch import from_numpy

            self._tensor = from_numpy(self.array).share_memory_()
            self.array = self._tensor.numpy()
        return _receive_column, (self._tensor,)


def _receive_column(tensor: Any) -> Column[Any]:
    column: Column[Any] = Column(tensor.numpy())
    column._tensor = tensor
    return column


class Texts(Rows[str]):
    """Texts in one array of bytes.

    Parameters
    ----------
    data : numpy.ndarray, [bytes], uint8
        The texts in UTF-8, without separators.
    ends : numpy.ndarray, [texts], int64
        Offset of each text's end.

    Example
    -------
    >>> texts = Texts.of(["id1/a", "id1/b"])
    >>> texts[1], texts.data.array.shape
    ('id1/b', (10,))
    """

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.data, self.ends = Column(data), Column(ends)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Concatenate texts."""
        data, ends = bytearray(), array("q")
        for text in texts:
            data += encoded(text)
            ends.append(len(data))
        return cls(np.frombuffer(data, np.uint8), np.frombuffer(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends.array)

    def _read_row(self, index: int) -> str:
        ends = self.ends.array
        begin = ends[index - 1] if index else 0
        return self.data.array[begin : ends[index]].tobytes().decode(*_ENCODING)


def encoded(text: str) -> bytes:
    """Return the bytes of a text."""
    return text.encode(*_ENCODING)


class Lookup:
    """Finds a name among millions, in one step and 8 bytes of memory each.

    Parameters
    ----------
    keys : numpy.ndarray, [names], int64
        Digests of the names, sorted.

    Example
    -------
    >>> lookup, order = Lookup.of(["c.wav", "b.wav", "a.wav"])
    >>> int(order[lookup.find("a.wav")]), lookup.find("d.wav")
    (2, None)
    """

    def __init__(self, keys: NDArray[np.int64]) -> None:
        self.keys = keys

    @classmethod
    def of(cls, names: Iterable[str]) -> tuple[Lookup, NDArray[np.intp]]:
        """Make a lookup of names; ``find`` returns an index of the order beside it.

        Of two equal names the last is found.
        """
        keys = np.fromiter(map(_key_of, names), np.int64)
        order = np.argsort(keys, kind="stable")
        return cls(keys[order]), order

    def find(self, name: str) -> int | None:
        """Return the index of a name among the sorted digests; None if it is not there."""
        key = _key_of(name)
        index = int(self.keys.searchsorted(key, side="right")) - 1
        return index if index >= 0 and self.keys[index] == key else None


def _key_of(name: str) -> int:
    # Two of a million names have the same key with a probability of 3e-8.
    digest = hashlib.blake2b(encoded(name), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
