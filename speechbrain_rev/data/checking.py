"""What becomes of each file of audio that was seen: it is used, or left out for a reason.

`read_checked` decides it for a file, `take_account` for a listing, without writing anything.
A preparation writes what it decided, and `speechbrain-rev data` shows it.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from speechbrain_rev.audio import AudioInfo, audio_info, read_audio
from speechbrain_rev.audio.checks import MIX, check_channel, is_silent
from speechbrain_rev.bars import progress_bar
from speechbrain_rev.files import write_whole
from speechbrain_rev.lists import is_listable, printable

from .listing import (
    DataSettings,
    ListedSpeech,
    refuse_alike,
    same_speakers,
    tested_speakers,
)
from .manifest import Cause, LeftOut, Utterance
from .rows import AUDIO_SUFFIXES, LOSSLESS, Row, counted, read_ahead

#: Treatments of audio when it is read.
RESAMPLED, MIXED, CHOSEN = "resampled", "channels mixed", "one of several channels"
# How utterances that are shorter than a segment come to its length.
_LENGTHENED = {
    "repeat": "shorter than a segment, repeated",
    "pad": "shorter than a segment, padded with zeros",
}
# Files that an error names of each problem.
_EXAMPLES = 3

ADVICE = (
    "Mend them, or train without them: leave them out of train_list, or give "
    "bad_files: drop."
)


class Checked(NamedTuple):
    """Audio that can be used.

    Attributes
    ----------
    samples : int
        The length at the rate that it is read at.
    wav : torch.Tensor, [samples], or None
        What was decoded.
    treated : tuple of str
        What is done when it is read: of ``RESAMPLED``, ``MIXED`` and ``CHOSEN``.
    """

    samples: int
    wav: torch.Tensor | None = None
    treated: tuple[str, ...] = ()


def read_checked(
    path: str | Path,
    *,
    name: str | None = None,
    sample_rate: int,
    whole: bool,
    resample: bool = False,
    channel: int | str | None = None,
    header: Callable[[AudioInfo], None] | None = None,
) -> Checked | LeftOut:
    """Read a file's header or all of it, and check it.

    Parameters
    ----------
    path : str or Path
        The file, or a segment of one.
    name : str, optional
        Its name in lists; the path by default.
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

    path = Path(path)
    if not is_listable(name or str(path)):
        # The file is one line of the list of such files.
        words = f"{name!r} has a tab or a line break, or a space at an end"
        return LeftOut(repr(str(path))[1:-1], Cause.NAME, words)
    if path.suffix.lower() not in AUDIO_SUFFIXES:
        return problem(Cause.SUFFIX, "is of another kind")
    treated = []
    try:
        # Decoding below gives the length, too.
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
            return problem(cause, f"has {counted(info.channels, 'channel')}")
        if info.channels != 1:
            treated.append(MIXED if channel == MIX else CHOSEN)
        if not info.samples and not (whole and info.lossy):
            return problem(Cause.EMPTY, "holds none")
        samples = info.samples_at(sample_rate)
        if not whole:
            return Checked(samples, None, tuple(treated))
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
        return problem(Cause.NOT_FINITE, f"has it first at {place:.2f} s")
    if is_silent(wav):
        return problem(Cause.SILENT, f"is at most {float(wav.abs().max()):.1e} loud")
    return Checked(samples, wav, tuple(treated))


def write_left_out(path: Path, left_out: Iterable[LeftOut]) -> None:
    r"""Write each file that is left out, and why, as CSV.

    Parameters
    ----------
    path : Path
        Replaced whole.
    left_out : iterable of LeftOut
        A row each: file, reason, detail.

    Example
    -------
    >>> path = getfixture("tmp_path") / "left_out.csv"
    >>> write_left_out(path, [LeftOut("a.wav", Cause.EMPTY, "a.wav holds none")])
    >>> path.read_text()
    'file,reason,detail\na.wav,no samples,a.wav holds none\n'
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("file", "reason", "detail"))
    table.writerows((one.path, one.cause.words, one.detail) for one in left_out)
    # A name that is not in UTF-8 can be written in no other way.
    write_whole(path, text.getvalue().encode(errors="backslashreplace"))


def report_problems(
    problems: Sequence[LeftOut],
    files: int,
    path: Path | None,
    *,
    drop: bool,
    advice: str = ADVICE,
) -> None:
    """Refuse files that cannot be used, or print which are dropped.

    Parameters
    ----------
    problems : sequence of LeftOut
        Files that cannot be used.
    files : int
        How many files there were.
    path : Path or None
        Where they are listed.
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
    >>> report_problems([problem], 7, Path("left_out.csv"), drop=True)
    1 of 7 files cannot be used: 1 no samples (a.wav holds none; delete it). left_out.csv ...
    """
    if problems:
        words = (
            f"{len(problems):,} of {counted(files, 'file')} cannot be used: "
            f"{_kinds_of(problems)}." + f" {path} lists each." * (path is not None)
        )
        if not drop:
            raise ValueError(f"{words} {advice}")
        tqdm.write(printable(words))


def _kinds_of(problems: Sequence[LeftOut]) -> str:
    """Count each problem in one line, with examples and what to do."""
    kinds = []
    for cause in Cause:
        group = [one for one in problems if one.cause is cause]
        if not group:
            continue
        also = "".join(f"; also {p.path}" for p in group[1:_EXAMPLES])
        # A message that ends in the advice does not get it twice.
        detail = group[0].detail.removesuffix(f"{cause.advice.capitalize()}.")
        detail = detail.strip().removesuffix(".")
        kinds.append(f"{len(group)} {cause.words} ({detail}{also}; {cause.advice})")
    return ", ".join(kinds)


@dataclass(frozen=True)
class Account:
    """What becomes of each file of a listing.

    Attributes
    ----------
    listing : ListedSpeech
        What was seen.
    usable : mapping of str to mapping of str to Utterance
        By speaker and name.
    left_out : sequence of LeftOut
        All files that are left out, those that cannot be used first.
    treated : mapping of str to int
        How many of the usable are resampled, mixed, of one of several channels, or shorter
        than a segment.
    headers : mapping of (int, int) to int
        How many files have which rate and number of channels, of all whose header was read.
    speakers : sequence of str
        All who are in no trial list.
    """

    listing: ListedSpeech
    usable: Mapping[str, Mapping[str, Utterance]]
    left_out: Sequence[LeftOut]
    treated: Mapping[str, int]
    headers: Mapping[tuple[int, int], int] = field(repr=False)
    speakers: Sequence[str]

    @cached_property
    def utterances(self) -> list[Utterance]:
        """The utterances that are used."""
        return [one for spoken in self.usable.values() for one in spoken.values()]

    @cached_property
    def problems(self) -> list[LeftOut]:
        """The files that cannot be used."""
        return [one for one in self.left_out if one.cause.advice]

    @cached_property
    def lost(self) -> list[str]:
        """Speakers in no trial list of whom no utterance can be used."""
        return [speaker for speaker in self.speakers if speaker not in self.usable]

    def causes(self) -> dict[str, int]:
        """Count the files that are left out by the words of their cause."""
        return dict(sorted(Counter(one.cause.words for one in self.left_out).items()))


def take_account(listing: ListedSpeech, settings: DataSettings) -> Account:
    """Check the files of a listing, and decide what becomes of each.

    Parameters
    ----------
    listing : ListedSpeech
        As ``list_speech`` gives it.
    settings : DataSettings
        The run's. With ``check_audio`` each file is decoded, which finds silence, NaN and
        damage behind headers, and takes as long as reading the corpus.

    Returns
    -------
    Account
        Its problems are neither reported nor refused.

    Raises
    ------
    ValueError
        If names of two speakers look the same, one part of a recording is listed for two,
        or a trial list cannot be used.

    Example
    -------
    >>> import soundfile
    >>> from speechbrain_rev.data.listing import list_speech
    >>> path = getfixture("tmp_path") / "id1" / "s" / "a.wav"
    >>> path.parent.mkdir(parents=True)
    >>> soundfile.write(path, [0.0, 0.5], 16000)
    >>> settings = DataSettings(str(getfixture("tmp_path")), short="drop")
    >>> account = take_account(list_speech(settings), settings)
    >>> account.utterances, account.causes()
    ([], {'shorter than a segment': 1})
    """
    refuse_alike(listing.rows)
    tested = same_speakers(listing, tested_speakers(listing, settings))
    rows = [row for row in listing.rows if row.speaker not in tested]

    def checked(row: Row) -> tuple[Checked | LeftOut, list[AudioInfo]]:
        infos: list[AudioInfo] = []
        audio = read_checked(
            row.wav,
            name=row.name,
            sample_rate=settings.sample_rate,
            whole=settings.check_audio,
            resample=settings.resample,
            channel=settings.channel,
            header=infos.append,
        )
        # Decoded samples are dropped here.
        return audio._replace(wav=None) if isinstance(audio, Checked) else audio, infos

    usable: dict[str, dict[str, Utterance]] = {}
    left_out = [*listing.left_out]
    treated: Counter[str] = Counter()
    headers: Counter[tuple[int, int]] = Counter()
    names: set[str] = set()
    # By hashes, for rows are many.
    parts: dict[int, Row] = {}
    may_overlap = len(listing.sources) > 1 or settings.train_list is not None
    may_overlap |= any(source.whose is None for source in listing.sources)
    segment = settings.segment_samples()
    bar = progress_bar(
        "speech" if settings.check_audio else "headers",
        read_ahead(checked, rows),
        unit="utt",
        total=len(rows),
        leave=True,
    )
    for row, (audio, infos) in zip(rows, bar, strict=True):
        headers.update((info.sample_rate, info.channels) for info in infos)
        if may_overlap:
            # Of "all that follows" the length is known by now.
            samples = audio.samples if isinstance(audio, Checked) else row.samples
            part = os.path.normpath(row.path), row.start, samples, row.channel
            if (other := parts.setdefault(hash(part), row)).speaker != row.speaker:
                raise ValueError(
                    f"{row.id!r} of {row.speaker!r} is the same audio as {other.id!r} of "
                    f"{other.speaker!r}: {row.wav}. Leave one."
                )
        if isinstance(audio, LeftOut):
            left_out.append(audio)
        elif row.id in names:
            words = f"{row.wav} is the second file of the name {row.id}"
            left_out.append(LeftOut(row.wav, Cause.TWICE, words))
        elif audio.samples < segment and settings.short == "drop":
            words = f"{audio.samples} samples, and a segment has {segment}"
            left_out.append(LeftOut(row.wav, Cause.SHORT, words))
        else:
            names.add(row.id)
            speaker = row.speaker or ""
            utterance = Utterance(row.id, row.wav, audio.samples, speaker, row.labels)
            usable.setdefault(speaker, {})[row.name] = utterance
            treated.update(audio.treated)
            if audio.samples < segment:
                treated[_LENGTHENED[settings.short]] += 1
    left_out += [
        LeftOut(row.wav, Cause.TESTED, f"{row.speaker} is in a trial list")
        for row in listing.rows
        if row.speaker in tested
    ]
    left_out.sort(key=lambda one: not one.cause.advice)
    speakers = [speaker for speaker in listing.speakers if speaker not in tested]
    return Account(listing, usable, left_out, treated, headers, speakers)


def refuse_few_speakers(account: Account, held_out: Collection[str] = ()) -> None:
    """Refuse to train on fewer than two speakers.

    Parameters
    ----------
    account : Account
        Of the corpus.
    held_out : collection of str
        Speakers who are for validation.

    Raises
    ------
    ValueError
        It counts where the others went.
    """
    left = len(account.usable) - len(held_out)
    if left < 2:
        found = len(account.listing.speakers)
        lost = ""
        if account.lost:
            lost = (
                f"{len(account.lost)} without a usable utterance ({account.lost[0]}), "
            )
        raise ValueError(
            f"Only {counted(left, 'speaker')} left for training: {found} found, "
            f"{found - len(account.speakers)} in trial lists, {lost}{len(held_out)} held out. "
            "Check data_folder, train_list, trial_lists and valid_speakers."
        )
