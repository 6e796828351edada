"""Embeddings by name, in memory and on disk."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.inference.parquet import (
    check_pyarrow,
    parquet_errors,
    read_parquet,
    write_parquet,
)
from speechbrain_rev.whole_files import opened_whole

_SUFFIXES = (".npz", ".parquet")

# What a damaged file of arrays raises, one of other methods or with a password too.
_DAMAGED = (
    ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, RuntimeError,
    NotImplementedError, OSError, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class EmbeddingArchive:
    """Embeddings by name.

    Attributes
    ----------
    names : tuple of str
        One per utterance.
    embeddings : numpy.ndarray, [utterances, dim], float32
        In the order of the names.
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
        if self.embeddings.ndim != 2 or len(self.embeddings) != len(self.names):
            raise ValueError(
                f"{len(self.names)} names for embeddings of shape "
                f"{list(self.embeddings.shape)}: give one name for each row."
            )
        if len(self.sources) not in (0, len(self.names)):
            raise ValueError(
                f"{len(self.names)} names for {len(self.sources)} sources: give one "
                "source for each name, or none at all."
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
            If it is no archive of embeddings.
        ImportError
            If there is no pyarrow and it is needed.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"There are no embeddings at {path}. Run recipes/VoxCeleb/extract.py "
                "on a run first, or speechbrain-rev embed on audio."
            )
        with opened(path) as stored:
            names = tuple(stored["names"].tolist())
            embeddings = stored["embeddings"]
            fingerprint = str(stored["fingerprint"])
            sources = tuple(stored["sources"].tolist())
            return cls(names, embeddings, fingerprint, sources)


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
        with np.load(path, allow_pickle=False) as stored:
            yield stored
    except damaged as error:
        raise ValueError(
            f"{path} is no archive of embeddings ({error}). Remove it and embed again."
        ) from error


def check_names(names: Iterable[object]) -> None:
    """Refuse names that numpy would write as other ones.

    Raises
    ------
    ValueError
        If one is no text, empty or has a NUL character.
    """
    for name in names:
        if not isinstance(name, str) or not name or "\0" in name:
            raise ValueError(
                f"{name!r} names no embedding: give texts, not empty and without NUL "
                "characters."
            )
