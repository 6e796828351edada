"""Texts of millions of rows in two arrays, and the row of a text among them.

An object for each text would cost every process hundreds of bytes a row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

# Names of files that are no UTF-8 come back as they were.
_ENCODING = "utf-8", "surrogateescape"

Row = TypeVar("Row", covariant=True)
Kind = TypeVar("Kind", bound=np.generic)


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


class Column(Generic[Kind]):
    """Numbers of all rows, which processes share.

    Forked processes have the pages of an array. Where others are sent the first copy of it,
    torch moves it to shared memory, and this process reads it there, too.

    Parameters
    ----------
    array : numpy.ndarray, [rows]
        What is kept of it elsewhere stays as it is.
    """

    def __init__(self, array: NDArray[Kind]) -> None:
        self.array = array
        self._tensor: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._tensor is None:
            # Here, for who lists names of files needs no torch.
            from torch import from_numpy

            self._tensor = from_numpy(self.array).share_memory_()
            self.array = self._tensor.numpy()
        return _received, (self._tensor,)


def _received(tensor: Any) -> Column[Any]:
    column: Column[Any] = Column(tensor.numpy())
    column._tensor = tensor
    return column


class Texts(Rows[str]):
    """Texts, one behind another.

    Parameters
    ----------
    data : numpy.ndarray, [bytes], uint8
        The texts in UTF-8.
    ends : numpy.ndarray, [texts], int64
        Where each ends.

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
        """Put texts one behind another."""
        data, ends = bytearray(), array("q")
        for text in texts:
            data += encoded(text)
            ends.append(len(data))
        return cls(np.frombuffer(data, np.uint8), np.frombuffer(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends.array)

    def _row(self, place: int) -> str:
        ends = self.ends.array
        begin = ends[place - 1] if place else 0
        return self.data.array[begin : ends[place]].tobytes().decode(*_ENCODING)


def encoded(text: str) -> bytes:
    """Give the bytes of a text."""
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
        """Take names; what is found by them must be put in the order that comes beside.

        Of two names that are equal, the last is found.
        """
        keys = np.fromiter(map(_key_of, names), np.int64)
        order = np.argsort(keys, kind="stable")
        return cls(keys[order]), order

    def find(self, name: str) -> int | None:
        """Give the place of a name among the sorted digests, None if it is none of them."""
        key = _key_of(name)
        place = int(self.keys.searchsorted(key, side="right")) - 1
        return place if place >= 0 and self.keys[place] == key else None


def _key_of(name: str) -> int:
    # Among a million names, two have one key with a probability of 3e-8.
    digest = hashlib.blake2b(encoded(name), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
