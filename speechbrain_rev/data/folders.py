"""Folders of audio: their files, and whose they are by the rules of a layout.

A layout is a row of `LAYOUTS`: the folder of the speakers' folders, and a pattern of names
with the groups speaker and session.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from sys import intern
from typing import NamedTuple

from speechbrain_rev.audio.packed import find_packed
from speechbrain_rev.lists import read_lines

from .manifest import Cause, LeftOut
from .rows import (
    ALL_SUFFIXES,
    AUDIO_SUFFIXES,
    LOSSLESS,
    OTHER_SUFFIXES,
    Row,
    Whose,
    is_below,
)

#: Files by which a folder is recognised, and which are packed with it.
LAYOUT_FILES = ("dev/dev.lst",)
# A speaker's folder, perhaps folders of sessions, and the file.
_FIRST = r"(?P<speaker>[^/]+)/(?:(?P<session>.+)/)?[^/]+"


class Layout(NamedTuple):
    """Where the speakers of a folder are, and how its files are named.

    Attributes
    ----------
    name : str
        As it is printed.
    place : str
        The folder of the speakers' folders, below the data folder.
    rule : str
        A regular expression of whole names below that folder, with the groups ``speaker``
        and ``session``.
    speakers : str
        A file of the data folder that must be there: it lists who belongs to the corpus.
    first : str
        A regular expression of the beginning of the first file's name below that folder.

    Example
    -------
    >>> whose = LAYOUTS[0].whose()
    >>> whose("train-clean-100/19/198/19-198-0000.flac")
    ('19', '198')
    """

    name: str
    place: str = "."
    rule: str = _FIRST
    speakers: str = ""
    first: str = ""

    def whose(self, speaker_from: int | str | None = None) -> Callable[[str], Whose]:
        """Give the function that finds speaker and session in a name.

        Parameters
        ----------
        speaker_from : int, str or None
            Which folder is the speaker's, 1 for the first; or a regular expression that is
            searched in names, whose group (or whole match) is the speaker; of two groups
            they are called speaker and session. None for the layout's rule.
        """
        if isinstance(speaker_from, str):
            return partial(_searched, re.compile(speaker_from))
        rule = self.rule
        if speaker_from is not None:
            rule = rf"(?:[^/]+/){{{speaker_from - 1}}}{_FIRST}"
        return partial(_matched, re.compile(rule))


def _matched(rule: re.Pattern[str], name: str) -> Whose:
    found = rule.fullmatch(name)
    return (found["speaker"], found["session"]) if found else (None, None)


def _searched(pattern: re.Pattern[str], name: str) -> Whose:
    """Search the speaker; the session is its group, or the folders behind the speaker's."""
    found = pattern.search(name)
    if not found:
        return None, None
    group = "speaker" if "speaker" in pattern.groupindex else min(pattern.groups, 1)
    speaker = found[group] or None
    if "session" in pattern.groupindex:
        return speaker, found["session"] or None
    folders = name.split("/")[:-1]
    level = 1 + name.count("/", 0, found.start(group))
    # All folders are the session if the file's own name has the speaker.
    return speaker, "/".join(folders[level if level <= len(folders) else 0 :]) or None


#: A folder is of the first layout that recognises it.
LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "LibriSpeech",
        rule=rf"[^/]+/{_FIRST}",
        first=r"(train|dev|test)-(clean|other)[^/]*/[^/]+/[^/]+/[^/]+$",
    ),
    Layout("VCTK", "wav48_silence_trimmed"),
    Layout("VCTK", "wav48"),
    Layout(
        "CN-Celeb",
        "data",
        r"(?P<speaker>[^/]+)/(?:.+/)?(?:(?P<session>[^/]+)-)?[^/]+",
        "dev/dev.lst",
    ),
    *(Layout("VoxCeleb", place) for place in ("wav", "dev/wav", "dev/aac", "aac")),
    Layout("folders of speakers"),
)


def find_layout(folder: Path) -> Layout | None:
    """Recognise the layout of a folder; None if it holds no audio that is read.

    Example
    -------
    >>> path = getfixture("tmp_path") / "wav" / "id1" / "video" / "a.wav"
    >>> path.parent.mkdir(parents=True); path.touch()
    >>> find_layout(getfixture("tmp_path")).name
    'VoxCeleb'
    """
    for layout in LAYOUTS:
        if layout.speakers and not (folder / layout.speakers).is_file():
            continue
        first = next(audio_names(folder / layout.place, AUDIO_SUFFIXES), None)
        if first is not None and re.match(layout.first, first):
            return layout
    return None


def read_folder(
    folder: Path,
    left_out: list[LeftOut] | None = None,
    *,
    layout: Layout,
    speaker_from: int | str | None = None,
    outside_files: bool = True,
) -> Iterator[Row]:
    """Read a folder of audio: a row a file, sorted by folder and name.

    Parameters
    ----------
    folder : Path
        At any depth, links followed; or a packed folder.
    left_out : list of LeftOut, optional
        Takes the files that are no rows: hidden ones, originals beside what was made of
        them, and those outside the folder, beside the speakers' folders or of no speaker.
        Without it audio outside, of no speaker and of speakers who are not listed is rows.
    layout : Layout
        As ``find_layout`` gives it.
    speaker_from : int, str or None
        As of ``Layout.whose``.
    outside_files : bool
        Whether links may lead out of the folder.

    Yields
    ------
    Row
        Audio of kinds that cannot be read, too.

    Example
    -------
    >>> path = getfixture("tmp_path") / "wav" / "id1" / "video" / "a.wav"
    >>> path.parent.mkdir(parents=True); path.touch()
    >>> folder = getfixture("tmp_path")
    >>> [row.name for row in read_folder(folder, layout=find_layout(folder))]
    ['id1/video/a.wav']
    """
    root, whose = folder / layout.place, layout.whose(speaker_from)
    members = None
    if layout.speakers and left_out is not None:
        lines = read_lines(folder / layout.speakers, "'speaker'")
        members = {line.strip() for line in lines}
    within = None if outside_files or left_out is None else folder
    followed: list[str] = []
    for name in audio_names(root, left_out=left_out, within=within, followed=followed):
        speaker, session = whose(name)
        stem, ending = os.path.splitext(name)
        path = f"{root}/{name}"
        if left_out is not None and speaker is None:
            why = f"{path}: {name} names no speaker"
            left_out.append(LeftOut(path, Cause.NO_SPEAKER, why))
            continue
        if left_out is not None and members is not None and speaker not in members:
            why = f"{path} is of a speaker who is not in {layout.speakers}"
            left_out.append(LeftOut(path, Cause.BESIDE, why))
            continue
        # Many files have the same two.
        yield Row(
            stem,
            path,
            speaker and intern(speaker),
            session=session and intern(session),
            ending=ending,
        )
    if layout.place != "." and left_out is not None:
        left_out += _beside(folder, root, followed)


def _beside(folder: Path, root: Path, followed: Iterable[str]) -> Iterator[LeftOut]:
    """Find audio of the folder that is neither below the root nor linked there."""
    hidden: list[LeftOut] = []
    for name in audio_names(folder, left_out=hidden):
        path = f"{folder}/{name}"
        if path.startswith(f"{root}/"):
            continue
        parent = os.path.realpath(os.path.dirname(path))
        if not any(is_below(parent, target) for target in (str(root), *followed)):
            yield LeftOut(path, Cause.BESIDE, Cause.BESIDE.detail)
    yield from (one for one in hidden if not one.path.startswith(f"{root}/"))


def audio_names(
    folder: str | Path,
    suffixes: tuple[str, ...] = ALL_SUFFIXES,
    *,
    left_out: list[LeftOut] | None = None,
    within: str | Path | None = None,
    followed: list[str] | None = None,
) -> Iterator[str]:
    """Find audio that is not hidden, without originals of what was converted beside them.

    Parameters
    ----------
    folder : str or Path
        Searched at any depth, links followed; or a packed folder.
    suffixes : tuple of str
        What names end in, in small letters.
    left_out : list of LeftOut, optional
        Takes the other audio.
    within : str, Path or None
        Out of which no link may lead; None for anywhere.
    followed : list of str, optional
        Takes the folders that links led to.

    Yields
    ------
    str
        Relative, with ``/`` between folders; files of one folder together.
    """
    left_out = [] if left_out is None else left_out
    linked = within is not None and not is_below(os.path.realpath(folder), within)
    for before, files in _folders_below(folder, followed):
        audio = [(name, *os.path.splitext(name), link) for name, link in files]
        audio = [one for one in audio if one[2].lower() in suffixes]
        converted = {stem for _, stem, ending, _ in audio if ending.lower() in LOSSLESS}
        for name, stem, ending, link in audio:
            path, cause = f"{folder}/{before}{name}", None
            if is_hidden(before + name):
                cause = Cause.HIDDEN
            elif stem in converted and ending.lower() not in LOSSLESS:
                cause = Cause.ORIGINAL
            elif within is not None and (link or linked):
                real = os.path.realpath(path)
                if os.path.exists(path) and not is_below(real, within):
                    why = f"{path} leads through a link to {real}"
                    left_out.append(LeftOut(path, Cause.OUTSIDE, why))
                    continue
            if cause is None:
                yield before + name
            else:
                left_out.append(LeftOut(path, cause, cause.detail))


def _folders_below(
    folder: str | Path, followed: list[str] | None
) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Give what stands before the names of each folder, and its files, in sorted order."""
    if (packed := find_packed(folder)) and packed[1] not in packed[0]:
        by_folder: dict[str, list[tuple[str, bool]]] = {}
        start = len(packed[1]) + 1 if packed[1] else 0
        for name in packed[0].below(packed[1]):
            before, slash, file = name[start:].rpartition("/")
            by_folder.setdefault(before + slash, []).append((file, False))
        yield from by_folder.items()
    elif os.path.isdir(folder):
        yield from _walk(
            str(folder), "", False, (), [] if followed is None else followed
        )


def _walk(
    folder: str, before: str, linked: bool, way: tuple[str, ...], followed: list[str]
) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Go through folders; a link to a folder that leads there is not followed."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    files, folders = [], []
    for entry in found:
        if entry.is_dir():
            folders.append(entry)
            continue
        link = entry.is_symlink()
        # Files have an ending; folders of a disk that is not there have none.
        if link and "." not in entry.name and not os.path.exists(entry.path):
            raise FileNotFoundError(
                f"{entry.path} leads to {os.readlink(entry.path)}, which is not there. "
                "Mount or copy it, or delete the link."
            )
        files.append((entry.name, linked or link))
    yield before, files
    for entry in folders:
        link, inner = entry.is_symlink(), way
        if link:
            target = os.path.realpath(entry.path)
            inner = (*way, os.path.realpath(folder))
            if any(is_below(one, target) for one in inner):
                continue
            followed.append(target)
        name = f"{before}{entry.name}/"
        yield from _walk(entry.path, name, linked or link, inner, followed)


def is_hidden(name: str) -> bool:
    """Return whether a relative name is of a hidden file, or of one in a hidden folder."""
    return name.startswith(".") or "/." in name


def files_below(folder: str | Path) -> Iterator[Path] | None:
    """Find all files of a folder or a packed folder; None if it is neither.

    Parameters
    ----------
    folder : str or Path
        Searched at any depth, links followed.

    Returns
    -------
    iterator of Path, or None
        Files of one folder one after another.
    """
    packed = find_packed(folder)
    is_folder = packed[1] not in packed[0] if packed else os.path.isdir(folder)
    if not is_folder:
        return None
    return (
        Path(folder, before + name)
        for before, files in _folders_below(folder, None)
        for name, _ in files
    )


def audio_files(folder: str | Path, *, aside: list[Path] | None = None) -> list[Path]:
    """All files of audio below a folder, in sorted order.

    Without hidden ones, and without originals beside the WAV or FLAC that was made of them.

    Parameters
    ----------
    folder : str or Path
        Searched at any depth, links followed; or a packed folder.
    aside : list of Path, optional
        Takes the files that are left out.

    Returns
    -------
    list of Path

    Raises
    ------
    ValueError
        If the folder does not exist, is no path or holds no such file.
    """
    # Files of a packed folder are found from any working folder.
    folder = Path(os.path.abspath(folder) if find_packed(folder) else folder)
    if files_below(folder) is None:
        raise ValueError(f"There is no folder {folder}. Give one with files of audio.")
    left_out: list[LeftOut] = []
    names = audio_names(folder, AUDIO_SUFFIXES, left_out=left_out)
    paths = sorted(folder / name for name in names)
    if aside is not None:
        aside += [Path(one.path) for one in left_out]
    if not paths:
        raise ValueError(
            f"There is no audio below {folder}: no name ends in "
            f"{', '.join(AUDIO_SUFFIXES)}. Other formats must be converted first."
        )
    return paths


def name_other_audio(folder: Path) -> str:
    """Say which audio in a folder cannot be read; nothing where there is none."""
    name = next(audio_names(folder, OTHER_SUFFIXES), None)
    if name is None:
        return ""
    kind = os.path.splitext(name)[1]
    return (
        f"{folder} holds {kind} files, which cannot be read. "
        f"Convert each: ffmpeg -i IN{kind} -ar 16000 -ac 1 OUT.flac. "
    )
