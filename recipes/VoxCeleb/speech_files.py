"""Which files of a corpus can be trained on, and all that is wrong with the others."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from speechbrain_rev.data import (
    Corpus,
    Utterance,
    audio_info,
    read_audio,
    read_first_channel,
)
from speechbrain_rev.data.corpus import AUDIO_SUFFIXES, OutsideError
from speechbrain_rev.lists import is_listable
from speechbrain_rev.whole_files import write_whole

#: Threads that read files, and how many files they are ahead at most.
THREADS, AHEAD = 16, 256
#: Below, a whole utterance is taken for silence: 6 steps of 16 bit.
SILENCE = 2e-4
# Files that an error names of each thing that is wrong.
_EXAMPLES = 3


ADVICE = "Mend them, leave them out of train_list, or give bad_files: drop."

Item = TypeVar("Item")
Found = TypeVar("Found")


class Wrong(Enum):
    """What a file cannot be used for, and what to do about it."""

    UNREADABLE = "cannot be read", "copy or convert it again"
    SUFFIX = "no WAV or FLAC", "convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.flac"
    RATE = "other sample rate", "sox IN -r RATE OUT, or set sample_rate"
    CHANNELS = "several channels", "sox IN -c 1 OUT"
    EMPTY = "no samples", "delete it"
    TWICE = "same name twice", "keep one of them"
    OUTSIDE = (
        "outside the folder",
        (
            "correct the name, or give --outside_files (--outside_files=true of train.py)"
        ),
    )
    NAME = "name for no list", "rename it"
    NO_SPEAKER = "no speaker's folder", "put it into a folder of its speaker"
    NOT_FINITE = "NaN or infinity", "convert it again"
    SILENT = "silent", "delete it"

    def __init__(self, words: str, advice: str) -> None:
        self.words, self.advice = words, advice


@dataclass(frozen=True)
class Problem:
    """A file that cannot be used.

    Attributes
    ----------
    wrong : Wrong
        What is wrong.
    path : str
        The file.
    detail : str
        In words.
    """

    wrong: Wrong
    path: str
    detail: str


def check_files(
    by_speaker: Mapping[str, Sequence[str]],
    corpus: Corpus,
    *,
    sample_rate: int,
    whole: bool,
) -> tuple[dict[str, dict[str, Utterance]], list[Problem]]:
    """Look at the header of each file, or at all of it.

    Parameters
    ----------
    by_speaker : mapping of str to sequence of str
        Names of files by speaker.
    corpus : Corpus
        Where they are.
    sample_rate : int
        That they must have, Hz.
    whole : bool
        Whether each file is decoded, which finds silence, NaN and damage behind headers,
        and takes as long as reading the corpus.

    Returns
    -------
    usable : dict of str to dict of str to Utterance
        By speaker and name; speakers without any are left out.
    problems : list of Problem
        Of the others, in order.
    """
    rows = [(speaker, name) for speaker, names in by_speaker.items() for name in names]

    def checked(row: tuple[str, str]) -> Utterance | Problem:
        speaker, name = row
        path = check_name(name, corpus.locate)
        if isinstance(path, Problem):
            return path
        read = read_checked(path, sample_rate=sample_rate, whole=whole)
        if isinstance(read, Problem):
            return read
        return Utterance(name.rsplit(".", 1)[0], str(path), read[0], speaker)

    usable: dict[str, dict[str, Utterance]] = defaultdict(dict)
    problems, seen = [], set()
    found = tqdm(
        read_ahead(checked, rows),
        total=len(rows),
        desc="speech" if whole else "headers",
        unit="utt",
    )
    for (speaker, name), one in zip(rows, found, strict=True):
        if isinstance(one, Utterance) and one.ID in seen:
            words = f"{one.wav} is the second file of the name {one.ID}"
            problems.append(Problem(Wrong.TWICE, one.wav, words))
        elif isinstance(one, Utterance):
            seen.add(one.ID)
            usable[speaker][name] = one
        else:
            problems.append(one)
    return dict(usable), problems


def check_name(name: str, locate: Callable[[str], Path]) -> Path | Problem:
    """Give the file of a name, or say what is wrong with the name.

    Parameters
    ----------
    name : str
        The file's.
    locate : callable
        Gives the file, or raises ``OutsideError``.

    Returns
    -------
    Path or Problem
    """
    try:
        path = locate(name)
    except OutsideError as error:
        return Problem(Wrong.OUTSIDE, str(error.path), str(error))
    if not is_listable(name):
        words = f"{name!r} has a tab or a line break, or a space at an end"
        # As one line of the list of such files.
        return Problem(Wrong.NAME, repr(str(path))[1:-1], words)
    return path


def read_ahead(
    read: Callable[[Item], Found], items: Iterable[Item], *, ahead: int = AHEAD
) -> Iterator[Found]:
    """Read files by several threads, a bounded number ahead of who asks for them.

    Parameters
    ----------
    read : callable
        Takes one of the items.
    items : iterable
        Of a million, tasks for all at once would take gigabytes.
    ahead : int
        How many are read or waiting at most.

    Yields
    ------
    Found
        What it gives, in the order of the items.
    """
    waiting: deque[Future[Found]] = deque()
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) == ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def table(problems: Sequence[Problem], files: int) -> str:
    """Lay out what is wrong, how often, and an example of each.

    Parameters
    ----------
    problems : sequence of Problem
        As ``check_files`` gives them.
    files : int
        How many files there were.

    Returns
    -------
    str
        A line for each thing that is wrong with some.
    """
    lines = [f"{len(problems)} of {files} files cannot be used:"]
    for wrong in Wrong:
        found = [p for p in problems if p.wrong is wrong]
        if found:
            lines.append(f"  {wrong.words:<18}{len(found):>9}  {found[0].detail}")
    return "\n".join(lines)


def report_problems(
    problems: Sequence[Problem],
    files: int,
    path: Path,
    *,
    drop: bool,
    advice: str = ADVICE,
) -> None:
    """Print what is wrong, and list the files; refuse them unless they are dropped.

    Parameters
    ----------
    problems : sequence of Problem
        As ``check_files`` gives them.
    files : int
        How many files there were.
    path : Path
        Where a line for each file is written, its path, a tab, and what is wrong; what
        was there goes.
    drop : bool
        Whether the training does without them.
    advice : str
        What to do about them where they are refused.

    Raises
    ------
    ValueError
        If there are problems and they are not to be dropped; it has examples of each.
    """
    path.unlink(missing_ok=True)
    if not problems:
        return
    lines = [f"{p.path}\t{p.wrong.words}: {p.detail}\n" for p in problems]
    # A name that is not in UTF-8 can be written in no other way.
    write_whole(path, "".join(lines).encode(errors="backslashreplace"))
    print(f"{table(problems, files)}\nAll of them are listed in {path}.")
    if drop:
        return
    told = []
    for wrong in Wrong:
        found = [p for p in problems if p.wrong is wrong]
        if found:
            also = "".join(f"; also {p.path}" for p in found[1:_EXAMPLES])
            example = f"{found[0].detail}{also}; {wrong.advice}"
            told.append(f"{len(found)} {wrong.words} ({example})")
    raise ValueError(
        f"{len(problems)} of {files} files cannot be used: {', '.join(told)}. All of "
        f"them are listed in {path}. {advice}"
    )


def read_checked(
    path: Path, *, sample_rate: int, whole: bool, first_channel: bool = False
) -> tuple[int, torch.Tensor | None] | Problem:
    """Read a file as far as it is to be looked at, or say what is wrong with it.

    Parameters
    ----------
    path : Path
        The file.
    sample_rate : int
        That it must have, Hz.
    whole : bool
        Whether it is decoded, or its header read only.
    first_channel : bool
        Whether of several channels the first is taken (otherwise they are a problem).

    Returns
    -------
    samples : int
        Its length.
    wav : torch.Tensor, [samples], or None
        What was decoded.
    Problem
        If it cannot be used.
    """
    if path.suffix.lower() not in AUDIO_SUFFIXES:
        return Problem(Wrong.SUFFIX, str(path), f"{path} is of another kind")
    try:
        info = audio_info(path)
        several = info.channels != 1
        if info.sample_rate != sample_rate:
            words = (
                f"{path} has {info.sample_rate} samples per second, not {sample_rate}"
            )
            return Problem(Wrong.RATE, str(path), words)
        if several and not first_channel:
            return Problem(
                Wrong.CHANNELS, str(path), f"{path} has {info.channels} channels"
            )
        if not info.samples:
            return Problem(Wrong.EMPTY, str(path), f"{path} holds none")
        if not whole:
            return info.samples, None
        read = read_first_channel if several else read_audio
        wav = read(path, sample_rate=sample_rate)
    except (ValueError, OSError) as error:
        return Problem(Wrong.UNREADABLE, str(path), str(error))
    if len(wav) < info.samples:
        words = f"{path} has {len(wav)} of the {info.samples} samples that it says"
        return Problem(Wrong.UNREADABLE, str(path), words)
    if not bool(wav.isfinite().all()):
        place = int((~wav.isfinite()).nonzero()[0]) / sample_rate
        return Problem(Wrong.NOT_FINITE, str(path), f"{path}, first at {place:.2f} s")
    if float(wav.abs().max()) < SILENCE:
        words = f"{path} is at most {float(wav.abs().max()):.1e} loud"
        return Problem(Wrong.SILENT, str(path), words)
    return info.samples, wav
