"""Where the speech of a folder is, whose it is, and which files a list names."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path

from speechbrain_rev.inference.extraction import AUDIO_ENDINGS
from speechbrain_rev.lists import way_out
from speechbrain_rev.speech import audio_exists
from speechbrain_rev.speech.packed import find_packed
from speechbrain_rev.speech.reading import AUDIO_SUFFIXES, files_below

# What speech often comes as, and cannot be read by frame range.
OTHER_SUFFIXES = (
    ".m4a", ".aac", ".wma", *(e for e in AUDIO_ENDINGS if e not in AUDIO_SUFFIXES)
)  # fmt: skip
LAYOUTS = ("wav", "dev/wav", "dev/aac", "aac", ".")
LAYOUT_WORDS = (
    "Accepted are DATA/wav/<speaker>/<session>/<utterance>.wav or .flac, and the same "
    "below dev/wav, dev/aac or aac, or with the speakers directly in DATA. Between "
    "speaker and utterance there may be any number of folders."
)
# Folders from the speaker's to the file: VoxCeleb's.
_USUAL_DEPTH = 3
# Threads that look for files.
_THREADS = 16


def speech_root(data_folder: str | Path, option: str = "data_folder") -> Path:
    """Find the folder that holds one folder per speaker.

    Parameters
    ----------
    data_folder : str or Path
        As given by the user.
    option : str
        What it is given as.

    Returns
    -------
    Path
        Absolute: a run may go on, and be scored, in another working folder.

    Raises
    ------
    ValueError
        If there is none; it names the layouts.
    """
    given, data_folder = data_folder, Path(os.path.abspath(data_folder))
    if find_packed(data_folder) is None and not data_folder.is_dir():
        raise ValueError(
            f"The data folder {given} does not exist. Give the folder of "
            f"VoxCeleb (or of your speech) with --{option}=... {LAYOUT_WORDS}"
        )
    for layout in LAYOUTS:
        if any(True for _ in audio_below(data_folder / layout)):
            _refuse_corpora(given, data_folder / layout)
            return data_folder / layout
    other = next(audio_below(data_folder, OTHER_SUFFIXES), None)
    if other is not None:
        raise ValueError(
            f"{given} holds {other.suffix} files, which cannot be read by frame "
            f"range. Convert each: ffmpeg -i IN{other.suffix} -ar 16000 -ac 1 OUT.flac. "
            + LAYOUT_WORDS
        )
    raise ValueError(f"There is no speech in {given}. {LAYOUT_WORDS}")


def _refuse_corpora(given: str | Path, root: Path) -> None:
    """Refuse a folder of corpora, each of which would be taken for one speaker."""
    if not root.is_dir():
        return  # it is packed
    layouts = LAYOUTS[:-1]
    found = [p / x for p in sorted(root.iterdir()) for x in layouts if (p / x).is_dir()]
    if found:
        raise ValueError(
            f"{given} holds folders of speakers' folders, such as "
            f"{', '.join(str(path.relative_to(root)) for path in found[:3])}: each would "
            f"be taken for one speaker. Give one of them. {LAYOUT_WORDS}"
        )


def speaker_of(name: str) -> str:
    """Return the speaker of an utterance named as in a trial list."""
    return name.split("/")[0]


def speaker_in(root: Path, name: str) -> str:
    """Return the speaker of a file of a list, however its path is spelt.

    Parameters
    ----------
    root : Path
        The folder of the speakers' folders.
    name : str
        Relative to it: ``./id1/a.wav`` and ``../wav/id1/a.wav`` are of id1.
    """
    path = Path(os.path.normpath(root / name))
    return (
        path.relative_to(root).parts[0]
        if path.is_relative_to(root)
        else speaker_of(name)
    )


def refuse_one_folder_twice(root: Path, speakers: Iterable[str]) -> None:
    """Refuse two speakers whose folders are one, by a link.

    Parameters
    ----------
    root : Path
        The folder of the speakers' folders.
    speakers : iterable of str
        Their names.

    Raises
    ------
    ValueError
        It names both.
    """
    known: dict[str, str] = {}
    for speaker in sorted(speakers):
        other = known.setdefault(os.path.realpath(root / speaker), speaker)
        if other != speaker:
            raise ValueError(
                f"{root / other} and {root / speaker} are one folder, and would be two "
                "speakers. Leave one of them out."
            )


def audio_below(
    root: Path, suffixes: tuple[str, ...] = AUDIO_SUFFIXES
) -> Iterator[Path]:
    """Find audio at any depth, in packed folders too.

    Parameters
    ----------
    root : Path
        The folder of the speakers' folders.
    suffixes : tuple of str
        What names end in, in small letters; packed folders hold WAV and FLAC alone.
    """
    paths = files_below(root) or ()
    return (path for path in paths if path.suffix.lower() in suffixes)


def without_originals(paths: Iterable[Path]) -> list[Path]:
    """Leave out files of other kinds that were converted where they are.

    Parameters
    ----------
    paths : iterable of Path
        Files of all kinds of audio.

    Returns
    -------
    list of Path
        Of those that are neither WAV nor FLAC only those beside which no WAV or FLAC
        has the same name.
    """
    paths = list(paths)
    others = {path for path in paths if path.suffix.lower() in OTHER_SUFFIXES}
    if not others:
        return paths
    converted = {path.with_suffix("") for path in paths if path not in others}
    return [p for p in paths if p not in others or p.with_suffix("") not in converted]


def unusual_depths(root: Path, names: Iterable[str]) -> str:
    """Say at which depths speech lies, if that is not VoxCeleb's everywhere.

    Parameters
    ----------
    root : Path
        The folder of the speakers' folders.
    names : iterable of str
        Files relative to it.

    Returns
    -------
    str
        Counts and three examples of each depth; empty where all have one session folder.
    """
    by_depth = defaultdict(list)
    for name in names:
        by_depth[name.count("/") + 1].append(name)
    if set(by_depth) <= {_USUAL_DEPTH}:
        return ""
    told = "; ".join(
        f"{len(found)} files at depth {depth}, such as {', '.join(nsmallest(3, found))}"
        for depth, found in sorted(by_depth.items())
    )
    return (
        f"Speech below {root} does not lie in <speaker>/<session>/ alone. The first "
        f"folder is taken for the speaker: {told}."
    )


def beside(data_folder: str | Path, root: Path, used: Iterable[Path]) -> list[Path]:
    """Find audio of a data folder that is not below the folder of the speakers' folders.

    Parameters
    ----------
    data_folder : str or Path
        The whole.
    root : Path
        What ``speech_root`` found in it.
    used : iterable of Path
        Files below it; where they are links, what they lead to is used.

    Returns
    -------
    list of Path
        In order.
    """
    whole = Path(os.path.abspath(data_folder))
    if whole == root:
        return []
    found = audio_below(whole, AUDIO_SUFFIXES + OTHER_SUFFIXES)
    others = [path for path in found if not path.is_relative_to(root)]
    if others:
        real = {os.path.realpath(folder) for folder in {p.parent for p in used}}
        others = [p for p in others if os.path.realpath(p.parent) not in real]
    return sorted(without_originals(others))


@dataclass(frozen=True)
class Found:
    """What there is of the files that a list names.

    Attributes
    ----------
    root : Path
        What names are relative to.
    files : dict of str to str
        Names of the files, by the names of the list.
    missing : list of str
        Names without a file.
    renamed : dict of str to str
        Names of files of another extension, by those of the missing that they may be.
    """

    root: Path
    files: dict[str, str]
    missing: list[str]
    renamed: dict[str, str]

    def lacking(self) -> str:
        """Say how many are missing, the first, and whether it is the extension alone."""
        if not self.missing:
            return ""
        told = (
            f"{len(self.missing)} of {len(self.files) + len(self.missing)} files are "
            f"missing, such as {self.root / self.missing[0]}."
        )
        if self.renamed:
            told += (
                f" {len(self.renamed)} are there with another extension, such as "
                f"{self.root / next(iter(self.renamed.values()))}: --any_extension takes "
                "what is there (--any_extension=true of train.py)."
            )
        return told


def find_files(root: Path, names: Collection[str], *, any_extension: bool) -> Found:
    """Find the files that a list names.

    Parameters
    ----------
    root : Path
        What names are relative to.
    names : collection of str
        Of the list.
    any_extension : bool
        Whether a .flac is taken where the list says .wav, or the reverse.

    Returns
    -------
    Found
    """
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        there = pool.map(lambda name: audio_exists(root / name), names)
        absent = [n for n, is_file in zip(names, there, strict=True) if not is_file]
        others = zip(absent, pool.map(lambda n: _other(root, n), absent), strict=True)
        renamed = {name: other for name, other in others if other is not None}
    taken = renamed if any_extension else {}
    missing = [name for name in absent if name not in taken]
    lost = set(missing)
    files = {name: taken.get(name, name) for name in names if name not in lost}
    return Found(root, files, missing, {} if any_extension else renamed)


def _other(root: Path, name: str) -> str | None:
    """Find a file of another extension that a name of audio may mean."""
    stem, dot, suffix = name.rpartition(".")
    if f"{dot}{suffix}".lower() not in AUDIO_SUFFIXES + OTHER_SUFFIXES:
        return None
    for other in (*AUDIO_SUFFIXES, *(s.upper() for s in AUDIO_SUFFIXES)):
        if audio_exists(root / f"{stem}{other}"):
            return f"{stem}{other}"
    return None


def refuse_outside(
    path: str | Path, names: Iterable[str], root: Path, within: str | Path
) -> None:
    """Refuse a list whose names lead out of the folder.

    Parameters
    ----------
    path : str or Path
        The list.
    names : iterable of str
        In it.
    root : Path
        What they are relative to.
    within : str or Path
        Where files may be.

    Raises
    ------
    ValueError
        It counts them and names the first.
    """
    out = {name: why for name in names if (why := way_out(root, name, within=within))}
    if out:
        name, why = next(iter(out.items()))
        raise ValueError(
            f"{path}: {len(out)} names lead out of {within}, such as {name!r}, which "
            f"{why}. Correct the list; --outside_files reads them all the same "
            "(--outside_files=true of train.py)."
        )
