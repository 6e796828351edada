"""Embeddings on disk: each utterance embedded once, and never twice with one model."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.inference.speaker import SpeakerEmbedder
from speechbrain_rev.speech.packed import find_packed

logger = logging.getLogger(__name__)

# What a damaged file of arrays raises, one of other methods or with a password too.
_DAMAGED = (
    ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, RuntimeError,
    NotImplementedError, OSError, zlib.error,
)  # fmt: skip
# Work that is lost if a long extraction is interrupted.
_SAVE_SECONDS = 600.0


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
        _check_names(self.names)
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
        """Write an .npz file; a file of that name is replaced in one step.

        Parameters
        ----------
        path : str or pathlib.Path
            Ends in ``.npz``; its folder is made.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(
            path,
            {
                "names": np.array(self.names, dtype=str),
                "embeddings": self.embeddings,
                "fingerprint": np.array(self.fingerprint, dtype=str),
                "sources": np.array(self.sources, dtype=str),
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> EmbeddingArchive:
        """Read what ``save`` wrote.

        Parameters
        ----------
        path : str or pathlib.Path
            An .npz file.

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
        """
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"There are no embeddings at {path}. Run recipes/VoxCeleb/extract.py "
                "on this run first."
            )
        with _opened(path) as stored:
            names = tuple(stored["names"].tolist())
            embeddings = stored["embeddings"]
            fingerprint = str(stored["fingerprint"])
            sources = tuple(stored["sources"].tolist())
            return cls(names, embeddings, fingerprint, sources)


def embed_into(
    path: str | Path, embedder: SpeakerEmbedder, files: Mapping[str, str | Path]
) -> EmbeddingArchive:
    """Embed files into an archive, except those it has from the same model and audio.

    A long extraction is saved from time to time and when it fails, so that it goes on
    where it was interrupted. What ``embed_share`` left beside the archive is taken into
    it, and deleted there.

    Parameters
    ----------
    path : str or pathlib.Path
        The .npz file. One of another model is replaced.
    embedder : SpeakerEmbedder
        With a fingerprint.
    files : mapping of str to path
        Audio files by name.

    Returns
    -------
    EmbeddingArchive
        The files asked for, in their order; the file may hold more.

    Raises
    ------
    ValueError
        If the embedder has no fingerprint, there is no file, a name is no text, or a
        file cannot be embedded.
    """
    _check_work(embedder, files)
    path = Path(path)
    parts = [part for part in _parts(path) if _is_whole(part)]
    wanted = {name: _source(file) for name, file in files.items()}
    rows: dict[str, tuple[NDArray[np.float32], str]] = {}
    for stored in (path, *parts):
        for name, row, source in _stored_rows(stored, embedder.fingerprint):
            if name not in rows or source == wanted.get(name):
                rows[name] = row, source
    missing = [name for name in files if rows.get(name, ("", ""))[1] != wanted[name]]
    if missing or parts:
        _embed_missing(path, embedder, files, rows, {n: wanted[n] for n in missing})
    for part in _parts(path):
        part.unlink()
    return _archive(files, rows, embedder)


def embed_share(
    path: str | Path,
    embedder: SpeakerEmbedder,
    files: Mapping[str, str | Path],
    *,
    rank: int,
    processes: int,
) -> None:
    """Embed the files that are this process's beside an archive, one part for each.

    When all processes are done, one of them makes the archive with ``embed_into``. Each
    takes every so many-th file: neighbours in a list, a speaker's utterances, are alike in
    length. What the archive or a part has already, left by any number of processes, is not
    embedded again.

    Parameters
    ----------
    path : str or pathlib.Path
        The .npz file of the archive, which is not written.
    embedder : SpeakerEmbedder
        With a fingerprint.
    files : mapping of str to path
        Audio files by name: those of all processes, in the same order.
    rank, processes : int
        This process, counted from 0, and how many there are.

    Raises
    ------
    ValueError
        As ``embed_into``.
    """
    _check_work(embedder, files)
    own = Path(path).with_suffix(f".part-{rank}.npz")
    if own.exists() and not _is_whole(own):
        own.unlink()
    parts = [part for part in _parts(path) if part != own and _is_whole(part)]
    others = [Path(path), *parts]
    known = {
        item
        for other in others
        for item in _stored_sources(other, embedder.fingerprint)
    }
    share = islice(files.items(), rank, None, processes)
    missing = {n: file for n, file in share if (n, _source(file)) not in known}
    if missing:
        embed_into(own, embedder, missing)


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an .npz file in one step: whole, or not at all.

    Parameters
    ----------
    path : pathlib.Path
        Ends in ``.npz``; a file of that name is replaced.
    arrays : mapping of str to numpy.ndarray
        What to write, by name.
    """
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _embed_missing(
    path: Path,
    embedder: SpeakerEmbedder,
    files: Mapping[str, str | Path],
    rows: dict[str, tuple[NDArray[np.float32], str]],
    wanted: Mapping[str, str],
) -> None:
    """Add to the rows, and save them: from time to time, at the end, when it fails."""
    missing = list(wanted)
    saved = time.monotonic()
    try:
        if missing:
            for index, row in embedder.embed_each([files[name] for name in missing]):
                rows[missing[index]] = row, wanted[missing[index]]
                if time.monotonic() - saved > _SAVE_SECONDS:
                    _archive(_ordered(rows, files), rows, embedder).save(path)
                    saved = time.monotonic()
    finally:
        if rows:
            _archive(_ordered(rows, files), rows, embedder).save(path)


def _parts(path: str | Path) -> Sequence[Path]:
    """Find what processes have left beside an archive."""
    path = Path(path)
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.part-*{path.suffix}"))


def _is_whole(part: Path) -> bool:
    """Tell whether a part can be read; one that a loss of power damaged is no loss."""
    try:
        EmbeddingArchive.load(part)
    except FileNotFoundError:
        # The process whose it is has just joined it.
        return False
    except ValueError as error:
        logger.warning(f"{error} What it held is embedded again.")
        return False
    return True


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Open an archive, whose arrays are read when they are asked for."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no .npz file")
        with np.load(path, allow_pickle=False) as stored:
            yield stored
    except _DAMAGED as error:
        raise ValueError(
            f"{path} is no archive of embeddings ({error}). Remove it and extract again."
        ) from error


def _stored_rows(
    path: Path, fingerprint: str
) -> Iterator[tuple[str, NDArray[np.float32], str]]:
    """Names, embeddings and sources of an archive, if it is there and of this model."""
    if path.exists():
        stored = EmbeddingArchive.load(path)
        if stored.fingerprint == fingerprint:
            # Audio of unknown source is embedded again.
            sources = stored.sources or ("",) * len(stored.names)
            yield from zip(stored.names, stored.embeddings, sources, strict=True)


def _stored_sources(path: Path, fingerprint: str) -> Iterator[tuple[str, str]]:
    """Names and sources of an archive, as ``_stored_rows``, without the embeddings."""
    if path.exists():
        with _opened(path) as stored:
            if str(stored["fingerprint"]) == fingerprint:
                names, sources = stored["names"].tolist(), stored["sources"].tolist()
                yield from zip(names, sources, strict=bool(sources))


def _check_work(embedder: SpeakerEmbedder, files: Mapping[str, str | Path]) -> None:
    """Refuse what cannot be embedded before the work begins."""
    if not embedder.fingerprint:
        raise ValueError(
            "an embedder without a fingerprint cannot be told from others; give "
            "SpeakerEmbedder one."
        )
    if not files:
        raise ValueError("there is no file to embed; give at least one.")
    _check_names(files)


def _check_names(names: Iterable[object]) -> None:
    """Refuse names that numpy would write as other ones."""
    for name in names:
        if not isinstance(name, str) or not name or "\0" in name:
            raise ValueError(
                f"{name!r} names no embedding: give texts, not empty and without NUL "
                "characters."
            )


def _ordered(names: Iterable[str], files: Iterable[str]) -> list[str]:
    """Put the files asked for first, in their order; they were embedded by length."""
    places = {name: place for place, name in enumerate(files)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def _source(file: str | Path) -> str:
    if found := find_packed(file):
        packed, name = found
        return f"{packed.folder}/{name}|{packed.stamp}"
    path = Path(file).resolve()
    # A missing file is named with its remedy where it is read.
    status = path.stat() if path.exists() else None
    return f"{path}|{status.st_size}|{status.st_mtime_ns}" if status else str(path)


def _archive(
    names: Iterable[str],
    rows: Mapping[str, tuple[NDArray[np.float32], str]],
    embedder: SpeakerEmbedder,
) -> EmbeddingArchive:
    names = tuple(names)
    embeddings = np.stack([rows[name][0] for name in names])
    sources = tuple(rows[name][1] for name in names)
    return EmbeddingArchive(names, embeddings, embedder.fingerprint, sources)
