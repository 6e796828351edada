"""Files into an archive: each embedded once, and never twice with one model."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.audio.checks import MAXIMUM_SECONDS, Channel, as_channel
from speechbrain_rev.audio.segments import file_of
from speechbrain_rev.bars import progress_bar
from speechbrain_rev.data.folders import files_below, is_hidden
from speechbrain_rev.data.rows import AUDIO_SUFFIXES
from speechbrain_rev.files import check_file, delete_leftovers, writing_alone
from speechbrain_rev.inference.archive import (
    EmbeddingArchive,
    check_format,
    check_names,
)
from speechbrain_rev.inference.audio import Recording, refuse_unordered
from speechbrain_rev.inference.running import check_window
from speechbrain_rev.inference.speaker import SpeakerEmbedder
from speechbrain_rev.lists import printable
from speechbrain_rev.processes import interrupted_while

logger = logging.getLogger(__name__)

# Work that is lost if a long extraction is interrupted.
_SAVE_SECONDS = 600.0

# Embedding and source by name.
_Rows: TypeAlias = dict[str, tuple[NDArray[np.float32], str]]


class NothingEmbeddedError(ValueError):
    """Not one of the files could be embedded."""


def embed_into(
    path: str | Path,
    embedder: SpeakerEmbedder,
    files: Mapping[str, str | Path],
    *,
    channel: Channel = None,
    window: float | None = None,
    on_bad: Callable[[str, Exception], None] | None = None,
) -> EmbeddingArchive:
    """Embed files into an archive, except those it has from the same model and audio.

    A long extraction is saved from time to time and when it fails, so that it goes on
    where it was interrupted. What ``embed_share`` left beside the archive is taken into
    it, and deleted there. Another process that writes the archive is an error.

    Parameters
    ----------
    path : str or pathlib.Path
        The .npz file. One of another model is replaced.
    embedder : SpeakerEmbedder
        With a fingerprint.
    files : mapping of str to path
        Audio files by name.
    channel, window
        As of ``SpeakerEmbedder.embed``.
    on_bad : callable, optional
        Takes the name of a file that cannot be embedded and the error, which is raised
        without it. The file is left out.

    Returns
    -------
    EmbeddingArchive
        The files asked for, in their order; the file may hold more.

    Raises
    ------
    ValueError
        If the embedder has no fingerprint, there is no file, a name is no text, a file
        cannot be embedded, or none of them can; if another process writes the archive, or
        something is missing there and it cannot be written.
    """
    path = Path(path)
    _check_work(path, embedder, files)
    with writing_alone(path):
        delete_leftovers(path)
        parts = [part for part in _parts(path) if _is_own(part, embedder.fingerprint)]
        wanted = {n: _source(file, channel, window) for n, file in files.items()}
        rows: _Rows = {}
        for stored in (path, *parts):
            for name, row, source in _stored_rows(stored, embedder.fingerprint):
                if name not in rows or source == wanted.get(name):
                    rows[name] = row, source
        missing = [n for n in files if n not in rows or rows[n][1] != wanted[n]]
        # What was there of their names is of other audio.
        for name in missing:
            rows.pop(name, None)
        if missing or parts:
            check_file("The archive", path)

            def refused(index: int, error: Exception) -> None:
                assert on_bad is not None
                on_bad(missing[index], error)

            embedded = (
                embedder.embed_each(
                    [files[name] for name in missing],
                    channel=channel,
                    window=window,
                    on_bad=on_bad and refused,
                )
                if missing
                else ()
            )
            named = ((missing[index], row) for index, row in embedded)
            _fill(
                path, embedder, files, rows, ((n, row, wanted[n]) for n, row in named)
            )
        for part in parts:
            part.unlink(missing_ok=True)
    some = [name for name in files if name in rows]
    if not some:
        raise NothingEmbeddedError(f"none of the {len(files)} files could be embedded.")
    return _archive(some, rows, embedder)


def embed_share(
    path: str | Path,
    embedder: SpeakerEmbedder,
    files: Mapping[str, str | Path],
    *,
    rank: int,
    processes: int,
    channel: Channel = None,
    window: float | None = None,
) -> None:
    """Embed the files that are this process's beside an archive, one part for each.

    When all processes are done, one of them makes the archive with ``embed_into``. Each
    takes every so many-th file: neighbours in a list, a speaker's utterances, are alike in
    length. What the archive or a part has already, left by any number of processes, is not
    embedded again.

    Parameters
    ----------
    path : str or pathlib.Path
        The file of the archive, which is not written.
    embedder : SpeakerEmbedder
        With a fingerprint.
    files : mapping of str to path
        Audio files by name: those of all processes, in the same order.
    rank, processes : int
        This process, counted from 0, and how many there are.
    channel, window
        As of ``embed_into``.

    Raises
    ------
    ValueError
        As ``embed_into``.
    """
    path = Path(path)
    _check_work(path, embedder, files)
    own = path.with_suffix(f".part-{rank}{path.suffix}")
    if own.exists() and _load_part(own) is None:
        own.unlink()
    parts = [part for part in _parts(path) if part != own]
    others = [path, *(p for p in parts if _is_own(p, embedder.fingerprint))]
    known = {
        (name, source)
        for other in others
        for name, _, source in _stored_rows(other, embedder.fingerprint)
    }
    share = islice(files.items(), rank, None, processes)
    missing = {
        n: file for n, file in share if (n, _source(file, channel, window)) not in known
    }
    if missing:
        embed_into(own, embedder, missing, channel=channel, window=window)


def _fill(
    path: Path,
    embedder: SpeakerEmbedder,
    files: Mapping[str, str | Path],
    rows: _Rows,
    embedded: Iterable[tuple[str, NDArray[np.float32], str]],
) -> None:
    """Add to the rows, and save them: from time to time, at the end, when it fails."""
    saved = time.monotonic()
    words = f"in the extraction to {path}. What is embedded is kept; the same command goes on."
    with interrupted_while(words):
        try:
            for name, row, source in embedded:
                rows[name] = row, source
                if time.monotonic() - saved > _SAVE_SECONDS:
                    _archive(_ordered(rows, files), rows, embedder).save(path)
                    saved = time.monotonic()
        finally:
            if rows:
                _archive(_ordered(rows, files), rows, embedder).save(path)


def _parts(path: Path) -> Sequence[Path]:
    """Find what processes have left beside an archive; none where there is no folder."""
    wanted = re.compile(rf"{re.escape(path.stem)}\.part-\d+{re.escape(path.suffix)}")
    return sorted(p for p in path.parent.glob("*") if wanted.fullmatch(p.name))


def _is_own(part: Path, fingerprint: str) -> bool:
    """Return whether a part can be read and is of this model."""
    archive = _load_part(part)
    if archive is None:
        return False
    if archive.fingerprint == fingerprint:
        return True
    logger.warning(f"{part} is of another model, and not used. Remove it.")
    return False


def _load_part(part: Path) -> EmbeddingArchive | None:
    """Load a part; a damaged one is embedded anew."""
    try:
        return EmbeddingArchive.load(part)
    except FileNotFoundError:
        # The process whose it is has just joined it.
        return None
    except ValueError as error:
        logger.warning(f"{error} What it would have held is embedded anew.")
        return None


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


def _check_work(
    path: Path, embedder: SpeakerEmbedder, files: Mapping[str, str | Path]
) -> None:
    """Refuse what cannot be embedded or written before the work begins."""
    check_format(path)
    if not embedder.fingerprint:
        raise ValueError(
            "an embedder without a fingerprint cannot fill an archive; give "
            "SpeakerEmbedder one."
        )
    if not files:
        raise ValueError("there is no file to embed; give at least one.")
    check_names(files)


def _ordered(names: Iterable[str], files: Iterable[str]) -> list[str]:
    """Put the files asked for first, in their order; they were embedded by length."""
    places = {name: place for place, name in enumerate(files)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def _source(file: str | Path, channel: Channel, window: float | None) -> str:
    """Name audio, and what is made of it, as no other is named."""
    treated = "" if channel is None else f"|channel {channel}"
    treated += "" if window is None else f"|mean of windows of {float(window)} s"
    path = Path(file).resolve()
    # Of a segment or a member of a tar. A missing file is named where it is read.
    holder = file_of(path)
    status = holder.stat() if holder.exists() else None
    stamp = f"|{status.st_size}|{status.st_mtime_ns}" if status else ""
    return f"{path}{stamp}{treated}"


def _archive(
    names: Iterable[str],
    rows: _Rows,
    embedder: SpeakerEmbedder,
) -> EmbeddingArchive:
    names = tuple(names)
    embeddings = np.stack([rows[name][0] for name in names])
    sources = tuple(rows[name][1] for name in names)
    return EmbeddingArchive(names, embeddings, embedder.fingerprint, sources)


#: What to do with files that cannot be embedded, once all others have been.
BadFiles: TypeAlias = Literal["refuse", "drop"]

# Bad files that are listed with the reason, and by name alone.
_SHOWN, _NAMED = 10, 100


@dataclass(frozen=True, eq=False)
class Listing:
    """What is to be embedded.

    Attributes
    ----------
    files : mapping of str to pathlib.Path
        Audio by name.
    others : mapping of str to int
        How many files were passed over, by what their names end in, or "hidden".
    """

    files: Mapping[str, Path]
    others: Mapping[str, int]

    def passed_over(self) -> str:
        """Say which files were passed over; an empty text if none were."""
        if not self.others:
            return ""
        kinds = ", ".join(f"{n} {ending}" for ending, n in sorted(self.others.items()))
        total = sum(self.others.values())
        return printable(
            f"{total} files that by their names are hidden or no audio were passed over: {kinds}."
        )


@dataclass(frozen=True, eq=False)
class FolderResult:
    """What came of embedding a folder.

    Attributes
    ----------
    archive : EmbeddingArchive
        The files that have an embedding, in sorted order.
    bad : mapping of str to str
        Names of those that cannot be embedded, and why.
    others : mapping of str to int
        Files that were passed over, by what their names end in.
    """

    archive: EmbeddingArchive
    bad: Mapping[str, str]
    others: Mapping[str, int]


def list_audio(audio: str | PathLike[str] | Iterable[str | PathLike[str]]) -> Listing:
    """Find the audio in a folder, or among files and folders.

    Parameters
    ----------
    audio : path, or iterable of paths
        One folder or packed folder, searched at any depth, whose files are named relative
        to it. Of a list files are taken whatever their names end in, and all are named as
        they are given, those of folders with the folder before.

    Returns
    -------
    Listing

    Raises
    ------
    ValueError
        If there is no audio, or something else than a path.

    Example
    -------
    >>> folder = getfixture("tmp_path")
    >>> for name in ("b.wav", "a.FLAC", "notes.txt"):
    ...     (folder / name).touch()
    >>> listing = list_audio(folder)
    >>> list(listing.files), listing.others
    (['a.FLAC', 'b.wav'], {'.txt': 1})
    """
    alone = isinstance(audio, (str, PathLike))
    refuse_unordered(audio)
    given = [audio] if isinstance(audio, (str, PathLike)) else audio
    places = [*map(Path, given)]
    files: dict[str, Path] = {}
    others: Counter[str] = Counter()
    for place in places:
        below = files_below(place)
        if below is None:
            files[place.as_posix()] = place
            continue
        for path in sorted(below):
            inside = path.relative_to(place)
            if is_hidden(inside.as_posix()):
                others["hidden"] += 1
            elif path.suffix.lower() in AUDIO_SUFFIXES:
                files[(inside if alone else place / inside).as_posix()] = path
            else:
                others[path.suffix.lower() or "without an ending"] += 1
    listing = Listing(files, dict(others))
    if not files:
        raise ValueError(
            f"There is no audio in {', '.join(map(str, places)) or 'an empty list'}: no "
            f"name ends in {', '.join(AUDIO_SUFFIXES)}. {listing.passed_over()}".rstrip()
        )
    return listing


def look_through(
    listing: Listing, *, channel: Channel = None, window: float | None = None
) -> tuple[float, dict[str, str]]:
    """Read the header of each file, to foresee what a long job would meet.

    Parameters
    ----------
    listing : Listing
        The files.
    channel, window
        As of ``SpeakerEmbedder.embed``.

    Returns
    -------
    seconds : float
        Of all that can be embedded, as far as headers say.
    bad : dict of str to str
        Names of the others, and why. Silence, NaN and damage show in reading alone.

    Raises
    ------
    ValueError
        If channel or window are none of those of ``SpeakerEmbedder.embed``.
    """
    channel = as_channel(channel)
    if window is not None:
        check_window(window, window, "window")
    headers = {
        name: _header_seconds(path, channel, window)
        for name, path in progress_bar(
            "headers", listing.files.items(), unit="utt", total=len(listing.files)
        )
    }
    bad = {name: why for name, why in headers.items() if isinstance(why, str)}
    return sum(s for s in headers.values() if not isinstance(s, str)), bad


def _header_seconds(path: Path, channel: Channel, window: float | None) -> float | str:
    """Give the seconds of a file, or why it cannot be embedded."""
    most = MAXIMUM_SECONDS if window is None else float("inf")
    try:
        info = Recording.of(path, None, str(path)).checked_info(channel, most=most)
    except (ValueError, OSError) as error:
        return str(error)
    return info.samples / info.sample_rate


def embed_folder(
    audio: str | PathLike[str] | Iterable[str | PathLike[str]] | Listing,
    out: str | PathLike[str],
    embedder: SpeakerEmbedder,
    *,
    channel: Channel = None,
    window: float | None = None,
    bad_files: BadFiles = "refuse",
) -> FolderResult:
    """Embed a folder of audio into an .npz file.

    There is a progress bar. The file is saved from time to time; called again, only what
    is not there from the same model, audio, channel and window is embedded. Files that
    cannot be embedded do not stop the others. Rows of audio that is not there any more,
    or is not asked for, stay in the file; the result has none of them.

    Parameters
    ----------
    audio : path, iterable of paths, or Listing
        A folder, or files and folders; or what ``list_audio`` gives of them.
    out : str or path-like
        Ends in .npz; see ``EmbeddingArchive.save``.
    embedder : SpeakerEmbedder
        With a fingerprint, as ``from_run`` and ``from_hparams`` give it.
    channel, window
        As of ``SpeakerEmbedder.embed``.
    bad_files : {"refuse", "drop"}
        Whether files that cannot be embedded are an error, once all others have been
        embedded and saved, or are listed in the result alone.

    Returns
    -------
    FolderResult
        Embeddings, and the files that have none.

    Raises
    ------
    ValueError
        If there is no audio; if files cannot be embedded, all of them at once; or if
        ``out`` is there and of another model.
    """
    if bad_files not in get_args(BadFiles):
        raise ValueError(f"bad_files takes refuse or drop, not {bad_files!r}.")
    path = Path(out)
    check_format(path)
    check_own(path, embedder.fingerprint)
    listing = audio if isinstance(audio, Listing) else list_audio(audio)
    bad: dict[str, str] = {}

    def note(name: str, error: Exception) -> None:
        bad[name] = str(error)

    refused = ""
    try:
        archive = embed_into(
            path, embedder, listing.files, channel=channel, window=window, on_bad=note
        )
    except NothingEmbeddedError:
        refused = f"{describe_bad(bad)} No other is there."
    if bad and bad_files == "refuse" and not refused:
        refused = (
            f"{describe_bad(bad)} The other {len(archive.names)} are in {path}. Mend or remove "
            'these and call again, which embeds them alone, or give bad_files="drop" '
            "(--bad_files=drop)."
        )
    if refused:
        raise ValueError(refused)
    return FolderResult(archive, bad, listing.others)


def describe_bad(bad: Mapping[str, str]) -> str:
    r"""Name bad files: the first ones with what is wrong, and then a hundred names.

    Parameters
    ----------
    bad : mapping of str to str
        What is wrong, by name.

    Returns
    -------
    str
        Some lines of text that can be printed, whatever the names are.

    Example
    -------
    >>> print(describe_bad({"a.wav": "it is silent", "\udcff.wav": "there is no such file"}))
    2 files cannot be embedded:
    - a.wav: it is silent
    - \udcff.wav: there is no such file
    <BLANKLINE>
    """
    shown = [f"- {name}: {why}" for name, why in list(bad.items())[:_SHOWN]]
    rest = list(bad)[_SHOWN:]
    if rest:
        names = ", ".join(rest[:_NAMED]) + (", ..." if len(rest) > _NAMED else "")
        shown.append(f"- and {len(rest)} more: {names}")
    return printable("\n".join([f"{len(bad)} files cannot be embedded:", *shown, ""]))


def check_own(path: Path, fingerprint: str) -> None:
    """Refuse to replace embeddings that another model made.

    Parameters
    ----------
    path : pathlib.Path
        An archive that may be there.
    fingerprint : str
        Of the model at hand.

    Raises
    ------
    ValueError
        If it is of another model or precision, or no archive.
    """
    if not path.exists():
        return
    if EmbeddingArchive.load(path).fingerprint != fingerprint:
        raise ValueError(
            f"{path} holds embeddings of another model, or of another precision. Give "
            "another name, or remove it."
        )
