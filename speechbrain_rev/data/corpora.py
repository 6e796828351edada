"""What `data_folder` is: a list, a folder of audio, or several of them, as sources of rows."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from speechbrain_rev.audio.packed import SUFFIX, find_packed

from .folders import (
    audio_files,
    find_layout,
    name_other_audio,
    read_folder,
)
from .formats import FORMATS
from .rows import Row, Source

#: A folder or list, or several.
Folders: TypeAlias = str | Path | Sequence[str | Path]

_ACCEPTED = (
    "Accepted are DATA/wav/<speaker>/<session>/<utterance>.wav (.flac, .m4a, ...), and the same "
    "below dev/wav, dev/aac or aac, or with the speakers directly in DATA. Between "
    "speaker and utterance there may be any number of folders. Or a manifest of SpeechBrain (.csv, .json), a Kaldi directory (wav.scp, "
    "utt2spk, perhaps segments), WeSpeaker's raw.list or shard.list, or a cut set of lhotse "
    "(.jsonl, .jsonl.gz)."
)


def open_sources(
    folders: Folders,
    option: str = "data_folder",
    *,
    outside_files: bool = False,
    speaker_from: int | str | None = None,
) -> list[Source]:
    """Recognise a folder or list, or several.

    Parameters
    ----------
    folders : str, Path or sequence of them
        As given by the user: of audio, of a list, or packed; or a list. Of several, names
        and speakers begin with the folder's name, or with as much of its path as
        distinguishes them.
    option : str
        What it is given as, for errors.
    outside_files : bool
        Whether names and links may lead out of a folder.
    speaker_from : int, str or None
        Where a folder's files name their speaker, as of ``Layout.whose``; None for what
        the layout says.

    Returns
    -------
    list of Source

    Raises
    ------
    ValueError
        If one is not there or not recognised.

    Example
    -------
    >>> path = getfixture("tmp_path") / "wav" / "id1" / "video" / "a.wav"
    >>> path.parent.mkdir(parents=True); path.touch()
    >>> (source,) = open_sources(getfixture("tmp_path"))
    >>> [(row.name, row.speaker) for row in source.rows()]
    [('id1/video/a.wav', 'id1')]
    """
    given = [folders] if isinstance(folders, str | Path) else [*folders]
    paths = [Path(os.path.abspath(one)) for one in given]
    if len(set(paths)) < len(paths) or not paths:
        raise ValueError(
            f"{option} is {list(map(str, given))}. Give each folder or list once."
        )
    sources = [_open(path, option, outside_files, speaker_from) for path in paths]
    if len(sources) == 1:
        return sources
    keys = _keys(paths, option)
    return [source._replace(key=key) for source, key in zip(sources, keys, strict=True)]


def _open(
    path: Path,
    option: str,
    outside_files: bool,
    speaker_from: int | str | None,
) -> Source:
    if find_packed(path) is None and not path.exists():
        raise ValueError(
            f"The data folder {path} does not exist. Give the folder of "
            f"VoxCeleb, or of your speech, as {option}."
        )
    if name := _format_of(path):
        if speaker_from is not None:
            raise ValueError(
                f"speaker_from is {speaker_from!r}, and {path} lists its speakers "
                f"({name}). Leave speaker_from out."
            )
        return Source(path, name, partial(_read_list, path, FORMATS[name].read))
    if path.is_file():
        raise ValueError(f"{path} is no list that is known. {_ACCEPTED}")
    layout = find_layout(path)
    if layout is None:
        other = name_other_audio(path) or f"There is no speech in {path}. "
        raise ValueError(other + _ACCEPTED)
    read = partial(
        read_folder,
        path,
        layout=layout,
        speaker_from=speaker_from,
        outside_files=outside_files,
    )
    return Source(
        path / layout.place,
        layout.name,
        read,
        layout.whose(speaker_from),
        None if outside_files else path,
    )


def _format_of(path: Path) -> str | None:
    """Give the name of the first format that recognises a path."""
    return next((name for name, one in FORMATS.items() if one.recognise(path)), None)


def _read_list(
    path: Path, read: Callable[[Path], Iterator[Row]], _: object
) -> Iterator[Row]:
    """Give the rows of a list of speech; one that no list of ours can hold is refused."""
    names = set[str]()
    for number, row in enumerate(read(path), start=1):
        if problem := _problem(row, names):
            raise ValueError(f"{path}, utterance {number} ({row.id!r}): {problem}.")
        names.add(row.id)
        yield row
    if not names:
        raise ValueError(f"{path} lists no utterance.")


def _problem(row: Row, names: set[str]) -> str:
    """Say why a row of a list is refused, beside names that were taken."""
    if not row.speaker:
        also = ", ".join(name for name, _ in row.labels) or "none"
        return (
            "it has no speaker. Give one (spk_id of SpeechBrain, spk of WeSpeaker, utt2spk "
            "of Kaldi, speaker of lhotse's supervision), or leave it out. Its further "
            f"columns: {also}"
        )
    if row.id in names:
        return "the utterance is listed twice. Leave one"
    for text in (row.id, row.speaker, *chain.from_iterable(row.labels)):
        # Half of a pair, which JSON can write and UTF-8 cannot.
        if not text.isascii() and any("\ud800" <= x <= "\udfff" for x in text):
            return f"{text!r} is no text that UTF-8 can write. Rename it"
    return ""


def _keys(paths: Sequence[Path], option: str) -> list[str]:
    """Name folders and lists by their last parts, as many as distinguish them."""
    # A folder that is packed, and a list, is called as without its ending.
    for called in (_stem, lambda path: path.name):
        parts = [(*path.parts[:-1], called(path)) for path in paths]
        for depth in range(1, max(map(len, parts)) + 1):
            names = ["-".join(one[-depth:]).replace("/", "") for one in parts]
            # In the form that names are looked up in.
            names = [unicodedata.normalize("NFC", name) for name in names]
            if len(set(names)) == len(names):
                return names
    raise ValueError(
        f"{option} has {', '.join(map(str, paths))}, which have the same name. Rename one."
    )


def _stem(path: Path) -> str:
    name = path.name.partition(".")[0] if path.is_file() else path.name
    return name.removesuffix(SUFFIX) or path.name


def absolute(folders: Folders) -> str | list[str]:
    """Give the absolute path of a folder, or those of several.

    Example
    -------
    >>> absolute(["/data/a", "/data/x/../b"])
    ['/data/a', '/data/b']
    """
    if isinstance(folders, str | Path):
        return os.path.abspath(folders)
    return [os.path.abspath(folder) for folder in folders]


def noise_files(folder: str | Path, *, aside: list[Path] | None = None) -> list[Path]:
    """List audio of noise or room impulse responses, which has no speakers.

    Parameters
    ----------
    folder : str or Path
        A folder of audio at any depth, packed or not, or a list of one of ``FORMATS``.
    aside : list of Path, optional
        Takes hidden files and originals of a folder, as of ``audio_files``.

    Returns
    -------
    list of Path
        Sorted.

    Raises
    ------
    ValueError
        If there is none, or a row of the list cannot be used.

    Example
    -------
    >>> path = getfixture("tmp_path") / "noise.list"
    >>> _ = path.write_text('{"key": "hum", "wav": "/noise/hum.wav"}')
    >>> noise_files(path)
    [PosixPath('/noise/hum.wav')]
    """
    path = Path(os.path.abspath(folder))
    if name := _format_of(path):
        files = sorted(Path(row.wav) for row in FORMATS[name].read(path))
        if not files:
            raise ValueError(f"{path} lists no audio.")
        return files
    return audio_files(folder, aside=aside)


def refuse_lists(folder: str | Path) -> None:
    """Refuse a folder whose lists name the speakers, where only audio is taken.

    Parameters
    ----------
    folder : str or Path

    Raises
    ------
    ValueError
        If it is of one of ``FORMATS``.
    """
    if name := _format_of(Path(folder)):
        raise ValueError(
            f"{folder} is a {name}, whose lists name the speakers; "
            "only audio would be packed. Give it as it is, or pack its folder of audio."
        )
