"""What becomes of each file of audio that was seen: it is used, or left out for a reason.

`take_account` decides it for a listing, without writing anything. A preparation writes what
it decided, and `speechbrain-rev data` shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

from speechbrain_rev.audio.reading import AudioInfo
from speechbrain_rev.bars import progress_bar

from .checking import Checked, read_checked
from .listing import (
    DataSettings,
    ListedSpeech,
    refuse_alike,
    same_speakers,
    tested_speakers,
)
from .manifest import Cause, LeftOut, Utterance
from .rows import Row, counted, read_ahead

#: How clips that are shorter than a segment come to its length.
LENGTHENED = {"repeat": "repeated", "pad": "padded with zeros"}


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
        How many of the usable are resampled, mixed, or of one of several channels.
    headers : mapping of (int, int) to int
        How many files have which rate and number of channels, of all whose header was read.
    lost : sequence of str
        Speakers in no trial list of whom no utterance can be used.
    """

    listing: ListedSpeech
    usable: Mapping[str, Mapping[str, Utterance]]
    left_out: Sequence[LeftOut]
    treated: Mapping[str, int]
    headers: Mapping[tuple[int, int], int] = field(repr=False)
    lost: Sequence[str] = ()

    def used(self) -> int:
        """Count the files that are used."""
        return sum(map(len, self.usable.values()))

    @cached_property
    def problems(self) -> list[LeftOut]:
        """The files that cannot be used."""
        return [one for one in self.left_out if one.cause.advice]

    def looked_at(self) -> int:
        """Count the files that were checked, or have no speaker."""
        causes = self.causes()
        return self.used() + len(self.problems) + causes.get(Cause.SHORT.words, 0)

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
        If names of two speakers look the same, or a trial list cannot be used.

    Example
    -------
    >>> import soundfile
    >>> from speechbrain_rev.data.listing import list_speech
    >>> path = getfixture("tmp_path") / "id1" / "s" / "a.wav"
    >>> path.parent.mkdir(parents=True)
    >>> soundfile.write(path, [0.0, 0.5], 16000)
    >>> settings = DataSettings(str(getfixture("tmp_path")), short="drop")
    >>> account = take_account(list_speech(settings), settings)
    >>> account.used(), account.causes()
    (0, {'shorter than a segment': 1})
    """
    refuse_alike(listing.rows)
    tested = same_speakers(listing, tested_speakers(listing, settings))
    rows = [row for row in listing.rows if row.speaker not in tested]
    usable, left_out, treated, headers = check_files(rows, settings)
    left_out = [*listing.left_out, *left_out]
    left_out += [
        LeftOut(row.wav, Cause.TESTED, f"{row.speaker} is in a trial list")
        for row in listing.rows
        if row.speaker in tested
    ]
    left_out.sort(key=lambda one: not one.cause.advice)
    speakers = dict.fromkeys(row.speaker or "" for row in rows)
    lost = [speaker for speaker in speakers if speaker not in usable]
    account = Account(listing, usable, left_out, treated, headers, lost)
    seen, accounted = listing.seen(), account.used() + len(left_out)
    assert seen == accounted, (
        f"{seen} files were seen, {account.used()} are used and {len(left_out)} left out: "
        f"{seen - accounted} are lost. This is a defect; please report it."
    )
    return account


def check_files(
    rows: Sequence[Row], settings: DataSettings
) -> tuple[
    dict[str, dict[str, Utterance]],
    list[LeftOut],
    Counter[str],
    Counter[tuple[int, int]],
]:
    """Look at the header of each file, or at all of it.

    Parameters
    ----------
    rows : sequence of Row
        Of speakers who are trained on or held out.
    settings : DataSettings
        The run's.

    Returns
    -------
    usable : dict of str to dict of str to Utterance
        By speaker and name; speakers without any are left out.
    left_out : list of LeftOut
        The others, in order.
    treated : Counter
        Of ``RESAMPLED``, ``MIXED`` and ``CHOSEN``, among the usable.
    headers : Counter
        Of sample rate and number of channels, of each file whether it can be used or not.
    """
    headers: Counter[tuple[int, int]] = Counter()
    counting = Lock()

    def count(header: AudioInfo) -> None:
        with counting:
            headers[header.sample_rate, header.channels] += 1

    def checked(row: Row) -> Checked | LeftOut:
        audio = read_checked(
            row.wav,
            name=row.name,
            sample_rate=settings.sample_rate,
            whole=settings.check_audio,
            resample=settings.resample,
            channel=settings.channel,
            header=count,
        )
        # Decoded samples are dropped here.
        return audio._replace(wav=None) if isinstance(audio, Checked) else audio

    usable: dict[str, dict[str, Utterance]] = {}
    left_out: list[LeftOut] = []
    treated: Counter[str] = Counter()
    seen: set[str] = set()
    shortest = settings.segment_samples() if settings.short == "drop" else 0
    bar = progress_bar(
        "speech" if settings.check_audio else "headers",
        read_ahead(checked, rows),
        unit="utt",
        total=len(rows),
        leave=True,
    )
    for row, audio in zip(rows, bar, strict=True):
        if isinstance(audio, LeftOut):
            left_out.append(audio)
        elif row.id in seen:
            words = f"{row.wav} is the second file of the name {row.id}"
            left_out.append(LeftOut(row.wav, Cause.TWICE, words))
        elif audio.samples < shortest:
            words = f"{audio.samples} samples, and a segment has {shortest}"
            left_out.append(LeftOut(row.wav, Cause.SHORT, words))
        else:
            seen.add(row.id)
            speaker = row.speaker or ""
            utterance = Utterance(row.id, row.wav, audio.samples, speaker, row.labels)
            usable.setdefault(speaker, {})[row.name] = utterance
            treated.update(audio.treated)
    return usable, left_out, treated, headers


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
        found = len(account.listing.speakers())
        in_lists = found - len(account.lost) - len(account.usable)
        lost = ""
        if account.lost:
            lost = (
                f"{len(account.lost)} without a usable utterance ({account.lost[0]}), "
            )
        raise ValueError(
            f"Only {counted(left, 'speaker')} left for training: {found} found, "
            f"{in_lists} in trial lists, {lost}{len(held_out)} held out. "
            "Check data_folder, train_list, trial_lists and valid_speakers."
        )


def count_short(utterances: Iterable[Utterance], settings: DataSettings) -> int:
    """Count utterances that are shorter than a segment of a run."""
    segment = settings.segment_samples()
    return sum(one.samples < segment for one in utterances)
