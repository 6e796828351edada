"""A folder of audio into one file of embeddings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

from tqdm import tqdm

from speechbrain_rev.inference.archive import EmbeddingArchive, check_format, opened
from speechbrain_rev.inference.audio import (
    MAXIMUM_SECONDS,
    Channels,
    check_channels,
    check_choice,
    check_seconds,
)
from speechbrain_rev.inference.extraction import NothingEmbeddedError, embed_into
from speechbrain_rev.inference.recordings import Recording
from speechbrain_rev.inference.speaker import SpeakerEmbedder
from speechbrain_rev.inference.windows import check_window
from speechbrain_rev.speech.packed import find_packed
from speechbrain_rev.speech.reading import files_below
from speechbrain_rev.whole_files import check_path

#: What names of audio end in, in small letters. libsndfile reads more, of which other
#: programs use the endings (.raw, .mat, .sd2) or which hold no speech.
AUDIO_ENDINGS = (
    ".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".aifc", ".au",
    ".caf", ".w64", ".rf64", ".sph", ".nist",
)  # fmt: skip

#: What to do with files that cannot be embedded, once all others have been.
BadFiles: TypeAlias = Literal["refuse", "skip"]

# Bad files that are told of with the reason, and by name alone.
_SHOWN, _NAMED = 10, 100


@dataclass(frozen=True, eq=False)
class Listing:
    """What is to be embedded.

    Attributes
    ----------
    files : mapping of str to pathlib.Path
        Audio by name.
    others : mapping of str to int
        How many files were passed over, by what their names end in.
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
            f"{total} files that are no audio by their names were passed over: {kinds}."
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
    >>> found = list_audio(folder)
    >>> list(found.files), found.others
    (['a.FLAC', 'b.wav'], {'.txt': 1})
    """
    # Bytes and open files are iterable, and hold no paths.
    alone = isinstance(audio, (str, PathLike, bytes)) or hasattr(audio, "read")
    given = audio if isinstance(audio, Iterable) and not alone else [audio]
    places = [_place(one) for one in given]
    files: dict[str, Path] = {}
    others: Counter[str] = Counter()
    for place in places:
        below = files_below(place)
        if below is None:
            files[place.as_posix()] = place
            continue
        # Files of a packed folder are named from the root.
        packed = find_packed(place)
        root = place if packed is None else Path(packed[0].folder, packed[1])
        for path in sorted(below):
            if path.suffix.lower() in AUDIO_ENDINGS:
                inside = path.relative_to(root)
                files[(inside if alone else place / inside).as_posix()] = path
            else:
                others[path.suffix.lower() or "without an ending"] += 1
    listing = Listing(files, dict(others))
    if not files:
        raise ValueError(
            f"There is no audio in {', '.join(map(str, places)) or 'an empty list'}: no "
            f"name ends in {', '.join(AUDIO_ENDINGS)}. {listing.passed_over()}".rstrip()
        )
    return listing


def _place(audio: object) -> Path:
    check_path(
        audio,
        "audio of a folder or a list",
        "Of an open file, SpeakerEmbedder.embed takes what soundfile.read gives.",
    )
    assert isinstance(audio, (str, PathLike))
    return Path(audio)


def look_through(
    listing: Listing, *, channels: Channels = None, window: float | None = None
) -> tuple[float, dict[str, str]]:
    """Read the header of each file, to tell what a long job would find.

    Parameters
    ----------
    listing : Listing
        The files.
    channels, window
        As of ``SpeakerEmbedder.embed``.

    Returns
    -------
    seconds : float
        Of all that can be embedded, as far as headers tell.
    bad : dict of str to str
        Names of the others, and why. Silence, NaN and damage show in reading alone.

    Raises
    ------
    ValueError
        If channels or window are none of those of ``SpeakerEmbedder.embed``.
    """
    channels = check_choice(channels)
    if window is not None:
        check_window(window, window, "window")
    found = {
        name: _header_seconds(path, channels, window)
        for name, path in tqdm(listing.files.items(), desc="headers", unit="utt")
    }
    bad = {name: why for name, why in found.items() if isinstance(why, str)}
    return sum(s for s in found.values() if not isinstance(s, str)), bad


def _header_seconds(
    path: Path, channels: Channels, window: float | None
) -> float | str:
    """Give the seconds of a file, or why it cannot be embedded."""
    most = MAXIMUM_SECONDS if window is None else float("inf")
    try:
        samples, rate, count = Recording.of(path, None, str(path)).header()
        check_channels(count, channels, str(path))
        check_seconds(samples, rate, str(path), most=most)
    except (ValueError, OSError) as error:
        return str(error)
    return samples / rate


def embed_folder(
    audio: str | PathLike[str] | Iterable[str | PathLike[str]] | Listing,
    out: str | PathLike[str],
    embedder: SpeakerEmbedder,
    *,
    channels: Channels = None,
    window: float | None = None,
    bad_files: BadFiles = "refuse",
) -> FolderResult:
    """Embed a folder of audio into an .npz or a .parquet file.

    There is a progress bar. The file is saved from time to time; called again, only what
    is not there from the same model, audio, channel and window is embedded. Files that
    cannot be embedded do not stop the others. Rows of audio that is not there any more,
    or is not asked for, stay in the file; the result has none of them.

    Parameters
    ----------
    audio : path, iterable of paths, or Listing
        A folder, or files and folders; or what ``list_audio`` found of them.
    out : str or path-like
        Ends in .npz or .parquet; see ``EmbeddingArchive.save``.
    embedder : SpeakerEmbedder
        With a fingerprint, as ``from_run`` and ``from_hparams`` give it.
    channels, window
        As of ``SpeakerEmbedder.embed``.
    bad_files : {"refuse", "skip"}
        Whether files that cannot be embedded are an error, once all others have been
        embedded and saved, or are told of in the result alone.

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
    if bad_files not in ("refuse", "skip"):
        raise ValueError(f"bad_files takes refuse or skip, not {bad_files!r}.")
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
            path, embedder, listing.files, channels=channels, window=window, on_bad=note
        )
    except NothingEmbeddedError:
        refused = f"{told(bad)} No other is there."
    if bad and bad_files == "refuse" and not refused:
        refused = (
            f"{told(bad)} The other {len(archive.names)} are in {path}. Mend or remove "
            'these and call again, which embeds them alone, or give bad_files="skip" '
            "(--bad-files=skip)."
        )
    if refused:
        raise ValueError(refused)
    return FolderResult(archive, bad, listing.others)


def told(bad: Mapping[str, str]) -> str:
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
    >>> print(told({"a.wav": "it is silent", "\udcff.wav": "there is no such file"}))
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


def printable(text: str) -> str:
    """Escape what is of names that are not in UTF-8, which nothing can print."""
    return text.encode(errors="backslashreplace").decode()


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
    with opened(path) as stored:
        other = str(stored["fingerprint"])
    if other != fingerprint:
        raise ValueError(
            f"{path} holds embeddings of another model, or of another precision. Give "
            "another name, or remove it."
        )
