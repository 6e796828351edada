"""Where the speech of a folder in VoxCeleb's layout is, and whose."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from speechbrain_rev.speech.packed import find_packed
from speechbrain_rev.speech.reading import AUDIO_SUFFIXES

# What speech often comes as, and cannot be read by frame range.
OTHER_SUFFIXES = (".m4a", ".aac", ".mp3", ".ogg", ".opus", ".wma", ".sph", ".aiff")
LAYOUTS = ("wav", "dev/wav", "dev/aac", "aac", ".")
LAYOUT_WORDS = (
    "Accepted are DATA/wav/<speaker>/<session>/<utterance>.wav or .flac, and the same "
    "below dev/wav, dev/aac or aac, or with the speakers directly in DATA."
)


def speech_root(data_folder: str | Path) -> Path:
    """Find the folder that holds one folder per speaker.

    Parameters
    ----------
    data_folder : str or Path
        As given by the user.

    Returns
    -------
    Path

    Raises
    ------
    ValueError
        If there is none; it names the layouts.
    """
    data_folder = Path(data_folder)
    if find_packed(data_folder) is not None:
        # Of a packed folder names are found by absolute paths.
        data_folder = Path(os.path.abspath(data_folder))
    elif not data_folder.is_dir():
        raise ValueError(
            f"The data folder {data_folder} does not exist. Give the folder of "
            f"VoxCeleb (or of your speech) with --data_folder=... {LAYOUT_WORDS}"
        )
    for layout in LAYOUTS:
        if any(audio_below(data_folder / layout)):
            return data_folder / layout
    if any(data_folder.glob("**/*.m4a")):
        raise ValueError(
            f"{data_folder} holds VoxCeleb2's .m4a files, which cannot be read by "
            "frame range. Convert each: ffmpeg -i IN.m4a -ar 16000 -ac 1 OUT.flac. "
            + LAYOUT_WORDS
        )
    raise ValueError(f"There is no speech in {data_folder}. {LAYOUT_WORDS}")


def speaker_of(name: str) -> str:
    """Return the speaker of an utterance named as in a trial list."""
    return name.split("/")[0]


def audio_below(
    root: Path, suffixes: tuple[str, ...] = AUDIO_SUFFIXES
) -> Iterable[Path]:
    """Find audio in session folders of speaker folders, packed ones too.

    Parameters
    ----------
    root : Path
        The folder of the speakers' folders.
    suffixes : tuple of str
        What names end in, in small letters; packed folders hold WAV and FLAC alone.
    """
    if found := find_packed(root):
        packed, name = found
        paths = (Path(packed.folder, inside) for inside in packed.below(name))
        return (p for p in paths if len(p.relative_to(root).parts) == 3)
    return (p for p in root.glob("*/*/*") if p.suffix.lower() in suffixes)


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
