"""Embeddings by name, in memory and on disk."""

from __future__ import annotations

import contextlib
import lzma
import math
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.inference.fingerprint import check_fingerprint
from speechbrain_rev.inference.own_files import REFUSED
from speechbrain_rev.inference.parquet import (
    check_pyarrow,
    parquet_errors,
    read_parquet,
    write_parquet,
)
from speechbrain_rev.whole_files import check_path, check_regular, opened_whole

_SUFFIXES = (".npz", ".parquet")

# What a damaged file of arrays raises, one of other methods or with a password too.
_DAMAGED = (
    *REFUSED, zipfile.BadZipFile, zlib.error, lzma.LZMAError, SyntaxError,
    tokenize.TokenError, SystemError,
)  # fmt: skip

_AT_ONCE = 2**20
#: Axes of each array of an archive; texts but for one of float32.
_AXES = {"names": 1, "embeddings": 2, "fingerprint": 0, "sources": 1}


@dataclass(frozen=True, eq=False)
class EmbeddingArchive:
    """Embeddings by name.

    Attributes
    ----------
    names : tuple of str
        One per utterance, none twice.
    embeddings : numpy.ndarray, [utterances, dim], float32
        In the order of the names, finite.
    fingerprint : str
        Of the model that made them, see ``SpeakerEmbedder``.
    sources : tuple of str
        What tells the audio of each from other audio of that name: path, size and time
        of change. Empty where nobody will ask.

    Example
    -------
    >>> import os, tempfile
    >>> archive = EmbeddingArchive(("a",), np.ones((1, 2), np.float32), "f00d")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     archive.save(os.path.join(folder, "some.npz"))
    ...     EmbeddingArchive.load(os.path.join(folder, "some.npz")).names
    ('a',)
    """

    names: tuple[str, ...]
    embeddings: NDArray[np.float32]
    fingerprint: str
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.names)
        _check_type("embeddings", self.embeddings.shape, self.embeddings.dtype)
        check_fingerprint(self.fingerprint)
        if len(self.embeddings) != len(self.names):
            raise ValueError(
                f"{len(self.names)} names for embeddings of shape "
                f"{list(self.embeddings.shape)}: give one name for each row."
            )
        if len(self.sources) not in (0, len(self.names)):
            raise ValueError(
                f"{len(self.names)} names for {len(self.sources)} sources: give one "
                "source for each name, or none at all."
            )
        # What is finite in each place would be another array.
        if (
            self.names
            and not np.isfinite([self.embeddings.min(), self.embeddings.max()]).all()
        ):
            rows = np.isfinite(self.embeddings).all(axis=1)
            raise ValueError(
                f"the embedding of {self.names[int(rows.argmin())]!r} holds NaN or infinity"
            )

    def save(self, path: str | Path) -> None:
        """Write a file; one of that name is replaced in one step.

        Parameters
        ----------
        path : str or pathlib.Path
            Its folder is made. Ends in ``.npz``, for arrays names, embeddings,
            fingerprint and sources, or in ``.parquet``, for columns name, embedding and
            source with the fingerprint in the schema's metadata, which needs pyarrow.

        Raises
        ------
        ValueError
            If the name ends in something else.
        ImportError
            If there is no pyarrow and it is needed.
        """
        path = Path(path)
        check_format(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {
            "names": np.array(self.names, dtype=str),
            "embeddings": self.embeddings,
            "fingerprint": np.array(self.fingerprint, dtype=str),
            "sources": np.array(self.sources, dtype=str),
        }
        with opened_whole(path) as file:
            if path.suffix == ".parquet":
                write_parquet(file, arrays)
            else:
                np.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> EmbeddingArchive:
        """Read what ``save`` wrote.

        Parameters
        ----------
        path : str or pathlib.Path
            An .npz or a .parquet file.

        Returns
        -------
        EmbeddingArchive
            Names, embeddings, the fingerprint, and the sources, if there are any.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no archive of embeddings: damaged, with other arrays or types, a name
            that is missing or there twice, or an embedding that is not finite.
        ImportError
            If there is no pyarrow and it is needed.
        """
        check_path(path, "an archive of embeddings")
        check_regular(path)
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"There are no embeddings at {path}. Run recipes/VoxCeleb/extract.py "
                "on a run first, or speechbrain-rev embed on audio."
            )
        with opened(path) as stored:
            return cls(
                tuple(stored["names"].tolist()),
                stored["embeddings"],
                str(stored["fingerprint"]),
                tuple(stored["sources"].tolist()),
            )


def check_format(path: Path) -> None:
    """Refuse a name whose ending says no format, or one that cannot be written here.

    Parameters
    ----------
    path : pathlib.Path
        Of an archive.

    Raises
    ------
    ValueError
        If the name ends in something else than .npz or .parquet.
    ImportError
        If it is .parquet and there is no pyarrow.

    Example
    -------
    >>> check_format(Path("some.npz"))
    """
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"embeddings are written to a name that ends in {' or '.join(_SUFFIXES)}, not "
            f"{path}."
        )
    if path.suffix == ".parquet":
        check_pyarrow()


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Open an archive, whose arrays are read when they are asked for.

    Parameters
    ----------
    path : str or pathlib.Path
        An .npz or a .parquet file.

    Yields
    ------
    mapping of str to numpy.ndarray
        names, embeddings, fingerprint and sources.

    Raises
    ------
    ValueError
        If it is no archive; so if reading what was asked for fails in the block.
    """
    check_regular(path)
    parquet = Path(path).suffix == ".parquet"
    damaged: tuple[type[Exception], ...] = _DAMAGED
    if parquet:
        damaged += parquet_errors()
    try:
        if parquet:
            yield read_parquet(Path(path))
            return
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no .npz file")
        with zipfile.ZipFile(path) as members:
            yield _Arrays(members)
    except damaged as error:
        raise ValueError(
            f"{path} is no archive of embeddings ({error}). Remove it and embed again."
        ) from error


class _Arrays(Mapping[str, NDArray[Any]]):
    """The arrays of an .npz file, each no larger than what is there of it."""

    def __init__(self, members: zipfile.ZipFile) -> None:
        self._members = members

    def __iter__(self) -> Iterator[str]:
        return iter(_AXES)

    def __len__(self) -> int:
        return len(_AXES)

    def __getitem__(self, name: str) -> NDArray[Any]:
        member = f"{name}.npy"
        listed = self._members.namelist().count(member)
        if listed != 1:
            raise ValueError(f"it has {listed or 'no'} {member}")
        with self._members.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in _HEADERS:
                raise ValueError(f"{name} are of version {version}")
            shape, fortran, dtype = _HEADERS[version](file)
            _check_type(name, shape, dtype)
            there = self._members.getinfo(member).file_size - file.tell()
            if math.prod(shape) * dtype.itemsize != there:
                raise ValueError(
                    f"{name} are {list(shape)} of {dtype} by their header, and "
                    f"{there:,} bytes"
                )
            # Its last axis is the outer one where it is in Fortran's order.
            array = np.empty(shape[::-1] if fortran else shape, dtype)
            content, read = array.reshape(-1).view(np.uint8), 0
            while part := file.read(_AT_ONCE):
                content[read : read + len(part)] = np.frombuffer(part, np.uint8)
                read += len(part)
        if read != there:
            raise ValueError(f"{name} end after {read:,} of {there:,} bytes")
        return array.T if fortran else array


_HEADERS: dict[Any, Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _check_type(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse an array of an archive that is of another type or has other axes."""
    texts = name != "embeddings"
    right = dtype.kind == "U" if texts else dtype == np.float32
    if (
        not right
        or len(shape) != _AXES[name]
        or 0 in shape[1:]
        or min(shape, default=0) < 0
    ):
        wanted = ["[]", "[n]", "[n, dim]"][_AXES[name]]
        raise ValueError(
            f"{name} are {list(shape)} of {dtype}, not {wanted} of "
            f"{'texts' if texts else 'float32'}"
        )


def check_names(names: Iterable[object]) -> None:
    """Refuse names that numpy would write as other ones, and names that two rows have.

    Raises
    ------
    ValueError
        If one is no text, empty, has a NUL character or is there twice.
    """
    names = list(names)
    for name in names:
        if not isinstance(name, str) or not name or "\0" in name:
            raise ValueError(
                f"{name!r} names no embedding: give texts, not empty and without NUL "
                "characters."
            )
    if len(set(names)) < len(names):
        ((twice, _),) = Counter(names).most_common(1)
        raise ValueError(f"the name {twice!r} is there twice: give each its own.")
