"""Which files of a corpus can be used, and everything that is wrong with the others."""

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

from speechbrain_rev.lists import is_listable
from speechbrain_rev.whole_files import write_whole

from .corpus import AUDIO_SUFFIXES, Corpus, OutsideError
from .manifest import Utterance
from .reading import audio_info, read_audio, read_first_channel

#: Threads that read files, and how many files they are ahead at most.
THREADS, AHEAD = 16, 256
#: An utterance of which no sample is above this is silent: 6 steps of 16 bits.
SILENCE = 2e-4
# Files that an error names of each problem.
_EXAMPLES = 3


ADVICE = "Mend them, leave them out of train_list, or give bad_files: drop."

Item = TypeVar("Item")
Result = TypeVar("Result")


class Wrong(Enum):
    """What can be wrong with a file, and what to do about it.

    Example
    -------
    >>> Wrong.SILENT.words, Wrong.SILENT.advice
    ('silent', 'delete it')
    """

    UNREADABLE = "cannot be read", "copy or convert it again"
    SUFFIX = "no WAV or FLAC", "convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.flac"
    RATE = "other sample rate", "sox IN -r RATE OUT, or set sample_rate"
    CHANNELS = "several channels", "sox IN -c 1 OUT"
    EMPTY = "no samples", "delete it"
    TWICE = "same name twice", "keep one of them"
    OUTSIDE = (
        "outside the folder",
        "correct the name, or give --outside_files (--outside_files=true of train.py)",
    )
    NAME = "name for no list", "rename it"
    NO_SPEAKER = "no speaker's folder", "put it into a folder of its speaker"
    NOT_FINITE = "NaN or infinity", "convert it again"
    SILENT = "silent", "delete it"

    def __init__(self, words: str, advice: str) -> None:
        self.words, self.advice = words, advice


@dataclass(frozen=True)
class FileProblem:
    """A file that cannot be used.

    Attributes
    ----------
    wrong : Wrong
        What is wrong.
    path : str
        The file.
    detail : str
        The problem of this file, in words.
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
) -> tuple[dict[str, dict[str, Utterance]], list[FileProblem]]:
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
    problems : list of FileProblem
        Of the others, in order.

    Example
    -------
    >>> import soundfile
    >>> path = getfixture("tmp_path") / "id1" / "s" / "a.wav"
    >>> path.parent.mkdir(parents=True)
    >>> soundfile.write(path, [0.0, 0.5], 16000)
    >>> from speechbrain_rev.data import open_corpus
    >>> corpus = open_corpus(getfixture("tmp_path"))
    >>> usable, problems = check_files(
    ...     {"id1": ["id1/s/a.wav", "id1/s/b.wav"]}, corpus, sample_rate=16000, whole=True
    ... )
    >>> usable["id1"]["id1/s/a.wav"].samples, [problem.wrong.name for problem in problems]
    (2, ['UNREADABLE'])
    """
    rows = [(speaker, name) for speaker, names in by_speaker.items() for name in names]

    def checked(row: tuple[str, str]) -> Utterance | FileProblem:
        speaker, name = row
        path = check_name(name, corpus.locate)
        if isinstance(path, FileProblem):
            return path
        audio = read_checked(path, sample_rate=sample_rate, whole=whole)
        if isinstance(audio, FileProblem):
            return audio
        known, labels = corpus.utterance_id(name), corpus.labels(name)
        return Utterance(known, str(path), audio[0], speaker, labels)

    usable: dict[str, dict[str, Utterance]] = defaultdict(dict)
    problems: list[FileProblem] = []
    seen: set[str] = set()
    bar = tqdm(
        read_ahead(checked, rows),
        total=len(rows),
        desc="speech" if whole else "headers",
        unit="utt",
    )
    for (speaker, name), result in zip(rows, bar, strict=True):
        if isinstance(result, FileProblem):
            problems.append(result)
        elif result.ID in seen:
            words = f"{result.wav} is the second file of the name {result.ID}"
            problems.append(FileProblem(Wrong.TWICE, result.wav, words))
        else:
            seen.add(result.ID)
            usable[speaker][name] = result
    return dict(usable), problems


def check_name(name: str, locate: Callable[[str], Path]) -> Path | FileProblem:
    """Give the file of a name, or the problem of the name.

    Parameters
    ----------
    name : str
        The file's.
    locate : callable
        Gives the file, or raises ``OutsideError``.

    Returns
    -------
    Path or FileProblem
    """
    try:
        path = locate(name)
    except OutsideError as error:
        return FileProblem(Wrong.OUTSIDE, str(error.path), str(error))
    if not is_listable(name):
        words = f"{name!r} has a tab or a line break, or a space at an end"
        # As one line of the list of such files.
        return FileProblem(Wrong.NAME, repr(str(path))[1:-1], words)
    return path


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], *, ahead: int = AHEAD
) -> Iterator[Result]:
    """Read files by several threads, a bounded number ahead of the caller.

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
    object
        What ``read`` returns, in the order of the items.

    Example
    -------
    >>> list(read_ahead(str.upper, "abc", ahead=2))
    ['A', 'B', 'C']
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) == ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def problem_table(problems: Sequence[FileProblem], files: int) -> str:
    """Count each problem, and give an example of it.

    Parameters
    ----------
    problems : sequence of FileProblem
        As ``check_files`` gives them.
    files : int
        How many files there were.

    Returns
    -------
    str
        A line for each problem that some file has.

    Example
    -------
    >>> print(problem_table([FileProblem(Wrong.EMPTY, "a.wav", "a.wav holds none")], 7))
    1 of 7 files cannot be used:
      no samples                1  a.wav holds none
    """
    lines = [f"{len(problems)} of {files} files cannot be used:"]
    for wrong, group in _by_kind(problems):
        detail = group[0].detail
        lines.append(f"  {wrong.words:<18}{len(group):>9}  {detail}")
    return "\n".join(lines)


def _by_kind(problems: Sequence[FileProblem]) -> list[tuple[Wrong, list[FileProblem]]]:
    """Group problems by their kind, in the order of `Wrong`."""
    groups = [(wrong, [p for p in problems if p.wrong is wrong]) for wrong in Wrong]
    return [(wrong, group) for wrong, group in groups if group]


def report_problems(
    problems: Sequence[FileProblem],
    files: int,
    path: Path,
    *,
    drop: bool,
    advice: str = ADVICE,
) -> None:
    r"""Print all problems, and list the files; refuse them unless they are dropped.

    Parameters
    ----------
    problems : sequence of FileProblem
        As ``check_files`` gives them.
    files : int
        How many files there were.
    path : Path
        Where a line for each file is written: its path, a tab, and its problem. An
        earlier file of this name is deleted.
    drop : bool
        Whether such files are left out, and not refused.
    advice : str
        What to do about them where they are refused.

    Raises
    ------
    ValueError
        If there are problems and they are not to be dropped; it has examples of each.

    Example
    -------
    >>> problem = FileProblem(Wrong.EMPTY, "a.wav", "a.wav holds none")
    >>> path = getfixture("tmp_path") / "bad_files.txt"
    >>> report_problems([problem], 7, path, drop=True)  # doctest: +ELLIPSIS
    1 of 7 files cannot be used:
    ...
    >>> path.read_text()
    'a.wav\tno samples: a.wav holds none\n'
    """
    path.unlink(missing_ok=True)
    if not problems:
        return
    lines = [f"{p.path}\t{p.wrong.words}: {p.detail}\n" for p in problems]
    # A name that is not in UTF-8 can be written in no other way.
    write_whole(path, "".join(lines).encode(errors="backslashreplace"))
    tqdm.write(f"{problem_table(problems, files)}\nAll of them are listed in {path}.")
    if drop:
        return
    kinds = []
    for wrong, group in _by_kind(problems):
        also = "".join(f"; also {p.path}" for p in group[1:_EXAMPLES])
        kinds.append(
            f"{len(group)} {wrong.words} ({group[0].detail}{also}; {wrong.advice})"
        )
    raise ValueError(
        f"{len(problems)} of {files} files cannot be used: {', '.join(kinds)}. All of "
        f"them are listed in {path}. {advice}"
    )


def read_checked(
    path: Path, *, sample_rate: int, whole: bool, first_channel: bool = False
) -> tuple[int, torch.Tensor | None] | FileProblem:
    """Read a file's header or all of it, and check it.

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
    FileProblem
        If it cannot be used.
    """

    def problem(wrong: Wrong, words: str) -> FileProblem:
        return FileProblem(wrong, str(path), f"{path} {words}")

    if path.suffix.lower() not in AUDIO_SUFFIXES:
        return problem(Wrong.SUFFIX, "is of another kind")
    try:
        info = audio_info(path)
        if info.sample_rate != sample_rate:
            words = f"has {info.sample_rate} samples per second, not {sample_rate}"
            return problem(Wrong.RATE, words)
        if info.channels != 1 and not first_channel:
            return problem(Wrong.CHANNELS, f"has {info.channels} channels")
        if not info.samples:
            return problem(Wrong.EMPTY, "holds none")
        if not whole:
            return info.samples, None
        read = read_audio if info.channels == 1 else read_first_channel
        wav = read(path, sample_rate=sample_rate)
    except (ValueError, OSError) as error:
        return FileProblem(Wrong.UNREADABLE, str(path), str(error))
    if len(wav) < info.samples:
        words = f"has {len(wav)} of the {info.samples} samples that it says"
        return problem(Wrong.UNREADABLE, words)
    if not bool(wav.isfinite().all()):
        place = int((~wav.isfinite()).nonzero()[0]) / sample_rate
        return FileProblem(
            Wrong.NOT_FINITE, str(path), f"{path}, first at {place:.2f} s"
        )
    if float(wav.abs().max()) < SILENCE:
        return problem(Wrong.SILENT, f"is at most {float(wav.abs().max()):.1e} loud")
    return info.samples, wav
