"""Packing a folder of audio into one file, which is read many times faster."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from speech_files import (
    Problem,
    check_name,
    read_ahead,
    read_checked,
    report_problems,
)
from tqdm import tqdm

from speechbrain_rev.data import audio_files
from speechbrain_rev.data.corpus import (
    AUDIO_SUFFIXES,
    OTHER_SUFFIXES,
    inside,
    without_originals,
)
from speechbrain_rev.data.packing import Packing

BAD_FILES = "bad_files.txt"
#: Whole files that wait decoded; some of noise have hours.
_AHEAD = 32
_ADVICE = "Mend them and pack on, or give --bad_files=drop."


def pack(
    source: Path,
    packed: Path,
    *,
    sample_rate: int,
    drop: bool = False,
    first_channel: bool = False,
    outside_files: bool = False,
) -> None:
    """Pack all WAV and FLAC files below a folder; what was begun goes on.

    Parameters
    ----------
    source : Path
        A folder of speech, noise or room responses.
    packed : Path
        The packed folder, whose name ends in ``.packed``.
    sample_rate : int
        That the files must have, Hz.
    drop : bool
        Whether files that cannot be used are left out, and not refused.
    first_channel : bool
        Whether of several channels the first is taken.
    outside_files : bool
        Whether links may lead out of the source.

    Raises
    ------
    ValueError
        If there is no such folder, the packed one is there already, or files cannot be
        used: those that can stay packed for the next time.
    """
    locate = partial(inside, source, within=None if outside_files else source)
    files = without_originals(audio_files(source, AUDIO_SUFFIXES + OTHER_SUFFIXES))

    def read(path: Path) -> torch.Tensor | Problem:
        name = path.relative_to(source).as_posix()
        located = check_name(name, locate)
        if isinstance(located, Problem):
            return located
        found = read_checked(
            located, sample_rate=sample_rate, whole=True, first_channel=first_channel
        )
        if isinstance(found, Problem):
            return found
        wav = found[1]
        assert wav is not None
        return wav

    problems: list[Problem] = []
    with (
        Packing(packed, source=str(source.resolve()), sample_rate=sample_rate) as made,
        tqdm(total=len(files), desc="packing", unit="file") as bar,
    ):
        left = [f for f in files if f.relative_to(source).as_posix() not in made]
        bar.update(len(files) - len(left))
        for path, wav in zip(left, read_ahead(read, left, ahead=_AHEAD), strict=True):
            if isinstance(wav, Problem):
                problems.append(wav)
            else:
                made.add(path.relative_to(source).as_posix(), wav)
            bar.update()
        report_problems(
            problems, len(files), packed / BAD_FILES, drop=drop, advice=_ADVICE
        )
        if not len(made):
            raise ValueError(f"No file below {source} can be used: nothing is packed.")
        made.finish()
    print(f"{packed}: {len(made)} files. Give it in the place of {source}.")
