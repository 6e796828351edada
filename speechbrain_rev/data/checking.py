"""Which files of a corpus can be used, and everything that is wrong with the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from tqdm import tqdm

from speechbrain_rev.audio import AudioInfo, audio_info, read_audio
from speechbrain_rev.audio.checks import MIX, check_channel, is_silent
from speechbrain_rev.audio.reading import open_bytes
from speechbrain_rev.audio.segments import bytes_of, find_segment
from speechbrain_rev.bars import progress_bar
from speechbrain_rev.files import write_whole
from speechbrain_rev.lists import is_listable, printable

from .corpus import (
    AUDIO_SUFFIXES,
    LOSSLESS,
    Corpus,
    OutsideError,
    read_ahead,
)
from .listing import DataSettings
from .manifest import Cause, LeftOut, Utterance

#: What is done to audio when it is read.
RESAMPLED, MIXED, CHOSEN = "resampled", "channels mixed", "one of several channels"
# Files that an error names of each problem.
_EXAMPLES = 3
# What is read from the middle of a file, and of a whole one at a time.
_MIDDLE_BYTES, _BLOCK_BYTES = 4096, 2**20

ADVICE = (
    "Mend them, or train without them: leave them out of train_list, or give "
    "bad_files: drop."
)


def check_files(
    by_speaker: Mapping[str, Sequence[str]], corpus: Corpus, settings: DataSettings
) -> tuple[
    dict[str, dict[str, Utterance]],
    list[LeftOut],
    dict[str, tuple[str, ...]],
    Counter[tuple[int, int]],
]:
    """Look at the header of each file, or at all of it.

    Parameters
    ----------
    by_speaker : mapping of str to sequence of str
        Names of files by speaker.
    corpus : Corpus
        Where they are.
    settings : DataSettings
        The run's. With ``check_audio`` each file is decoded, which finds silence, NaN and
        damage behind headers, and takes as long as reading the corpus.

    Returns
    -------
    usable : dict of str to dict of str to Utterance
        By speaker and name; speakers without any are left out.
    left_out : list of LeftOut
        The others, in order.
    treated : dict of str to tuple of str
        By ID of the usable to which something is done: ``RESAMPLED``, ``MIXED``, ``CHOSEN``.
    headers : Counter
        Of sample rate and number of channels, of each file whether it can be used or not.

    Example
    -------
    >>> import soundfile
    >>> path = getfixture("tmp_path") / "id1" / "s" / "a.wav"
    >>> path.parent.mkdir(parents=True)
    >>> soundfile.write(path, [0.0, 0.5], 16000)
    >>> settings = DataSettings(str(getfixture("tmp_path")), check_audio=True)
    >>> usable, left_out, treated, headers = check_files(
    ...     {"id1": ["id1/s/a.wav", "id1/s/b.wav"]}, settings.corpus(), settings
    ... )
    >>> usable["id1"]["id1/s/a.wav"].samples, [one.cause.name for one in left_out]
    (2, ['UNREADABLE'])
    """
    rows = [(speaker, name) for speaker, names in by_speaker.items() for name in names]
    headers: Counter[tuple[int, int]] = Counter()
    counting = Lock()

    def count(header: AudioInfo) -> None:
        with counting:
            headers[header.sample_rate, header.channels] += 1

    def checked(row: tuple[str, str]) -> Checked | LeftOut:
        audio = read_checked(
            row[1],
            locate=corpus.locate,
            sample_rate=settings.sample_rate,
            whole=settings.check_audio,
            resample=settings.resample,
            channel=settings.channel,
            header=count,
        )
        # What was decoded is held no longer.
        return audio._replace(wav=None) if isinstance(audio, Checked) else audio

    usable: dict[str, dict[str, Utterance]] = defaultdict(dict)
    left_out: list[LeftOut] = []
    treated: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    shortest = settings.segment_samples() if settings.short == "drop" else 0
    bar = progress_bar(
        "speech" if settings.check_audio else "headers",
        read_ahead(checked, rows),
        unit="utt",
        total=len(rows),
        leave=True,
    )
    for (speaker, name), audio in zip(rows, bar, strict=True):
        if isinstance(audio, LeftOut):
            left_out.append(audio)
            continue
        path, (ID, labels) = str(audio.path), corpus.entry(name)
        if ID in seen:
            words = f"{path} is the second file of the name {ID}"
            left_out.append(LeftOut(path, Cause.TWICE, words))
        elif audio.samples < shortest:
            words = f"{audio.samples} samples, and a segment has {shortest}"
            left_out.append(LeftOut(path, Cause.SHORT, words))
        else:
            seen.add(ID)
            usable[speaker][name] = Utterance(ID, path, audio.samples, speaker, labels)
            if audio.treated:
                treated[ID] = audio.treated
    return dict(usable), left_out, treated, headers


class _Audio(NamedTuple):
    """An utterance that is compared with others."""

    speaker: str
    path: str
    #: The file, and which part of it is heard.
    recording: str
    part: tuple[int | None, ...]
    #: Its name in the corpus, and its samples; None of what is not used.
    name: str | None = None
    samples: int | None = None


def find_copies(
    usable: Mapping[str, Mapping[str, Utterance]],
    unused: Iterable[tuple[str, str]] = (),
) -> dict[tuple[str, str], LeftOut]:
    """Find the audio of two speakers: files of equal content, whatever they are called.

    Few files are read: those whose bytes and samples are as many as those of another
    speaker's file, 4 KiB from the middle, and those that are equal there as a whole.

    Parameters
    ----------
    usable : mapping of str to mapping of str to Utterance
        By speaker and name, as ``check_files`` gives them.
    unused : iterable of (str, str)
        Speaker and path of what is compared and not reported.

    Returns
    -------
    dict of (str, str) to LeftOut
        By speaker and name, of each utterance whose content another speaker has, too.

    Example
    -------
    >>> folder = getfixture("tmp_path")
    >>> for name in ("a", "b"):
    ...     _ = (folder / name).write_bytes(b"RIFF")
    >>> usable = {s: {s: Utterance(s, str(folder / s), 2, s)} for s in ("a", "b")}
    >>> [problem.cause.words for problem in find_copies(usable).values()]
    ['audio of two speakers', 'audio of two speakers']
    """
    audio = [
        _Audio(speaker, one.wav, *_heard(one.wav), name, one.samples)
        for speaker, names in usable.items()
        for name, one in names.items()
    ]
    audio += [_Audio(speaker, path, *_heard(path)) for speaker, path in unused]
    groups = _alike([audio], bytes_of, "sizes")
    groups = [part for group in groups for part in _split(group, _samples_of(group))]
    groups = _alike(groups, _middle_of, "files of equal size")
    groups = _alike(groups, _digest_of, "files of equal middle")
    problems = {}
    for group in groups:
        for one in group:
            if one.name is not None:
                other = next(o for o in group if o.speaker != one.speaker)
                words = f"{one.path} of {one.speaker!r} is the same audio as "
                words += f"{other.path} of {other.speaker!r}"
                problem = LeftOut(one.path, Cause.SHARED, words)
                problems[one.speaker, one.name] = problem
    return problems


def _heard(path: str) -> tuple[str, tuple[int | None, ...]]:
    """Give the file of audio, and which part of it is heard."""
    segment = find_segment(path)
    return (str(segment.recording), segment[1:]) if segment else (path, ())


def _alike(
    groups: Sequence[list[_Audio]], content: Callable[[str], object], what: str
) -> list[list[_Audio]]:
    """Split groups by something of their files, which is read once of each."""
    files = dict.fromkeys(one.recording for group in groups for one in group)

    def read(file: str) -> object:
        try:
            found = content(file)
        except (ValueError, OSError):
            found = None
        # What cannot be read is not used, and equals nothing.
        return object() if found is None else found

    bar = progress_bar(
        what, read_ahead(read, files), unit="file", total=len(files), off=not files
    )
    found = dict(zip(files, bar, strict=True))
    return [
        part
        for group in groups
        for part in _split(group, [(one.part, found[one.recording]) for one in group])
    ]


def _samples_of(group: Sequence[_Audio]) -> list[int | None]:
    """Give the samples of each; None of all where those of one are not known."""
    samples = [one.samples for one in group]
    return [None] * len(samples) if None in samples else samples


def _split(group: Sequence[_Audio], keys: Iterable[object]) -> list[list[_Audio]]:
    """Give what has one key, of several speakers, where any of it is used."""
    parts = defaultdict(list)
    for one, key in zip(group, keys, strict=True):
        parts[key].append(one)
    return [
        part
        for part in parts.values()
        if len({one.speaker for one in part}) > 1
        and any(one.name is not None for one in part)
    ]


def _middle_of(path: str) -> bytes:
    return _read_bytes(path, (bytes_of(path) or 0) // 2, _MIDDLE_BYTES)


def _digest_of(path: str) -> bytes:
    made = blake2b(digest_size=16)
    for begin in range(0, bytes_of(path) or 0, _BLOCK_BYTES):
        made.update(_read_bytes(path, begin, _BLOCK_BYTES))
    return made.digest()


def _read_bytes(path: str, begin: int, count: int) -> bytes:
    """Read bytes of a file wherever it is."""
    with open_bytes(path) as file:
        file.seek(begin)
        return file.read(count)


def _by_kind(problems: Sequence[LeftOut]) -> list[tuple[Cause, list[LeftOut]]]:
    """Group problems by their kind, in the order of `Cause`."""
    groups = [(cause, [p for p in problems if p.cause is cause]) for cause in Cause]
    return [(cause, group) for cause, group in groups if group]


def report_problems(
    problems: Sequence[LeftOut],
    files: int,
    path: Path,
    *,
    drop: bool,
    advice: str = ADVICE,
) -> None:
    r"""Print all problems, and list the files; refuse them unless they are dropped.

    Parameters
    ----------
    problems : sequence of LeftOut
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
    >>> problem = LeftOut("a.wav", Cause.EMPTY, "a.wav holds none")
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
    lines = [f"{p.path}\t{p.cause.words}: {p.detail}\n" for p in problems]
    # A name that is not in UTF-8 can be written in no other way.
    write_whole(path, "".join(lines).encode(errors="backslashreplace"))
    kinds = _by_kind(problems)
    wide = max(18, *(len(cause.words) for cause, _ in kinds))
    table = [
        f"  {cause.words:<{wide}}{len(group):>9}  {group[0].detail}"
        for cause, group in kinds
    ]
    table = [f"{len(problems)} of {files} files cannot be used:", *table]
    words = "\n".join([*table, f"All of them are listed in {path}."])
    tqdm.write(printable(words))
    if not drop:
        raise ValueError(
            f"{len(problems)} of {files} files cannot be used: {kinds_of(problems)}. All "
            f"of them are listed in {path}. {advice}"
        )


def kinds_of(problems: Sequence[LeftOut]) -> str:
    """Count each problem in one line, with examples and what to do.

    Parameters
    ----------
    problems : sequence of LeftOut
        As ``check_files`` gives them.

    Returns
    -------
    str

    Example
    -------
    >>> kinds_of([LeftOut("a.wav", Cause.EMPTY, "a.wav holds none")])
    '1 no samples (a.wav holds none; delete it)'
    >>> cut = "b.wav is cut. Copy or convert it again."
    >>> kinds_of([LeftOut("b.wav", Cause.UNREADABLE, cut)])
    '1 cannot be read (b.wav is cut; copy or convert it again)'
    """
    kinds = []
    for cause, group in _by_kind(problems):
        also = "".join(f"; also {p.path}" for p in group[1:_EXAMPLES])
        # Where a file's own message ends in the advice, it is given once.
        detail = group[0].detail.removesuffix(f"{cause.advice.capitalize()}.")
        detail = detail.strip().removesuffix(".")
        kinds.append(f"{len(group)} {cause.words} ({detail}{also}; {cause.advice})")
    return ", ".join(kinds)


class Checked(NamedTuple):
    """Audio that can be used.

    Attributes
    ----------
    path : Path
        The file.
    samples : int
        Its length at the rate that it is read at.
    wav : torch.Tensor, [samples], or None
        What was decoded.
    treated : tuple of str
        What is done when it is read: of ``RESAMPLED``, ``MIXED`` and ``CHOSEN``.
    """

    path: Path
    samples: int
    wav: torch.Tensor | None = None
    treated: tuple[str, ...] = ()


def read_checked(
    name: str | Path,
    *,
    locate: Callable[[str], Path] = Path,
    sample_rate: int,
    whole: bool,
    resample: bool = False,
    channel: int | str | None = None,
    header: Callable[[AudioInfo], None] | None = None,
) -> Checked | LeftOut:
    """Read a file's header or all of it, and check it.

    Parameters
    ----------
    name : str or Path
        The file's, in a corpus or a path.
    locate : callable
        Gives the file of the name, or raises ``OutsideError``.
    sample_rate : int
        That it is read at, Hz.
    whole : bool
        Whether it is decoded, or its header read only.
    resample, channel : bool, and int, "mix" or None
        As of ``read_audio``.
    header : callable, optional
        Takes what the header says, of files that cannot be used too.

    Returns
    -------
    Checked or LeftOut
        The second if it cannot be used.
    """

    def problem(cause: Cause, words: str) -> LeftOut:
        return LeftOut(str(path), cause, f"{path} {words}")

    try:
        path = locate(str(name))
    except OutsideError as error:
        return LeftOut(str(error.path), Cause.OUTSIDE, str(error))
    if not is_listable(str(name)):
        words = f"{name!r} has a tab or a line break, or a space at an end"
        # As one line of the list of such files.
        return LeftOut(repr(str(path))[1:-1], Cause.NAME, words)
    if path.suffix.lower() not in AUDIO_SUFFIXES:
        return problem(Cause.SUFFIX, "is of another kind")
    treated = []
    try:
        # What is decoded below has its length.
        info = audio_info(path, estimate=whole)
        if header is not None:
            header(info)
        if info.lossy and path.suffix.lower() in LOSSLESS:
            return problem(Cause.NAMED, "is OGG or MP3 by its content")
        if info.sample_rate != sample_rate:
            if not resample:
                words = f"has {info.sample_rate} samples per second"
                if channel is None and info.channels != 1:
                    words += f" and {info.channels} channels, not {sample_rate} and 1"
                    return problem(Cause.RATE_AND_CHANNELS, words)
                return problem(Cause.RATE, f"{words}, not {sample_rate}")
            treated.append(RESAMPLED)
        try:
            check_channel(path, info.channels, channel)
        except ValueError:
            cause = Cause.CHANNELS if channel is None else Cause.NO_CHANNEL
            return problem(cause, f"has {info.channels} channels")
        if info.channels != 1:
            treated.append(MIXED if channel == MIX else CHOSEN)
        if not info.samples and not (whole and info.lossy):
            return problem(Cause.EMPTY, "holds none")
        samples = info.samples_at(sample_rate)
        if not whole:
            return Checked(path, samples, None, tuple(treated))
        wav = read_audio(
            path, sample_rate=sample_rate, resample=resample, channel=channel
        )
    except (ValueError, OSError) as error:
        return LeftOut(str(path), Cause.UNREADABLE, str(error))
    if info.lossy:
        samples = len(wav)
    if not samples:
        return problem(Cause.EMPTY, "holds none")
    if len(wav) < samples:
        words = f"has {len(wav)} of the {samples} samples that it says"
        return problem(Cause.UNREADABLE, words)
    if not bool(wav.isfinite().all()):
        place = int((~wav.isfinite()).nonzero()[0]) / sample_rate
        words = f"{path}, first at {place:.2f} s"
        return LeftOut(str(path), Cause.NOT_FINITE, words)
    if is_silent(wav):
        return problem(Cause.SILENT, f"is at most {float(wav.abs().max()):.1e} loud")
    return Checked(path, samples, wav, tuple(treated))
