"""What becomes of each file of audio that was seen: it is used, or left out for a reason.

`take_account` decides it for a listing, without writing anything. A preparation writes what
it decided, and `speechbrain-rev data` shows it.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

from speechbrain_rev.files import write_whole

from .checking import check_files, find_copies
from .corpus import located
from .listing import (
    DataSettings,
    ListedSpeech,
    refuse_alike,
    refuse_one_folder_twice,
    refuse_shared_audio,
    same_speakers,
    tested_speakers,
)
from .manifest import Cause, LeftOut, Utterance

ACCOUNTING, LEFT_OUT = "accounting.csv", "left_out.csv"
SINGLE = "single_speakers.txt"

LOST = "lost_speakers.txt"

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
        return self.used() + len(self.problems) + self.causes()[Cause.SHORT]

    def causes(self) -> Counter[Cause]:
        """Count files that are left out by cause; two causes are always there."""
        counts = Counter(one.cause for one in self.left_out)
        first = {cause: counts.pop(cause, 0) for cause in (Cause.TESTED, Cause.BESIDE)}
        others = sorted(counts, key=lambda cause: cause.words)
        return Counter(first | {cause: counts[cause] for cause in others})


def take_account(listing: ListedSpeech, settings: DataSettings) -> Account:
    """Check the files of a listing, and decide what becomes of each.

    Parameters
    ----------
    listing : ListedSpeech
        As ``list_speech`` gives it.
    settings : DataSettings
        The run's.

    Returns
    -------
    Account
        Its problems are neither reported nor refused.

    Raises
    ------
    ValueError
        If two speakers have one folder, one name or one recording, or a trial list cannot
        be used.

    Example
    -------
    >>> import soundfile
    >>> from speechbrain_rev.data.listing import list_speech
    >>> path = getfixture("tmp_path") / "id1" / "s" / "a.wav"
    >>> path.parent.mkdir(parents=True)
    >>> soundfile.write(path, [0.0, 0.5], 16000)
    >>> settings = DataSettings(str(getfixture("tmp_path")), short="drop")
    >>> account = take_account(list_speech(settings), settings)
    >>> account.used(), account.causes()[Cause.SHORT]
    (0, 1)
    """
    corpus, by_speaker = listing.corpus, listing.by_speaker
    refuse_one_folder_twice(corpus, by_speaker)
    refuse_alike(corpus, by_speaker)
    spoken = tested_speakers(corpus, settings)
    tested = same_speakers(corpus, by_speaker, spoken)
    if settings.train_list is not None and spoken:
        # Such a list may call them otherwise than their folders.
        tested |= {
            speaker
            for speaker, names in by_speaker.items()
            if any(corpus.speaker(name) in spoken for name in names)
        }
    kept = {s: names for s, names in sorted(by_speaker.items()) if s not in tested}
    usable, left_out, treated, headers = check_files(kept, corpus, settings)
    unused = [
        (speaker, str(located(corpus, name)[0]))
        for speaker in sorted(tested)
        for name in by_speaker[speaker]
    ]
    if len(corpus.parts()) > 1:
        used = ((s, one.wav) for s, names in usable.items() for one in names.values())
        refuse_shared_audio(chain(unused, used))
    copies = find_copies(usable, unused)
    for speaker, name in copies:
        del usable[speaker][name]
    usable = {speaker: names for speaker, names in usable.items() if names}
    left_out = [*listing.left_out, *left_out, *copies.values()]
    left_out += [LeftOut(p, Cause.TESTED, f"{s} is in a trial list") for s, p in unused]
    left_out.sort(key=lambda one: not one.cause.advice)
    account = Account(
        listing,
        usable,
        left_out,
        Counter(
            how
            for names in usable.values()
            for one in names.values()
            for how in treated.get(one.ID, ())
        ),
        headers,
        [speaker for speaker in kept if speaker not in usable],
    )
    seen, accounted = listing.seen(), account.used() + len(left_out)
    assert seen == accounted, (
        f"{seen} files were seen, {account.used()} are used and {len(left_out)} left out: "
        f"{seen - accounted} are lost. This is a defect; please report it."
    )
    return account


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
        found = len(account.listing.by_speaker)
        in_lists = found - len(account.lost) - len(account.usable)
        lost = ""
        if account.lost:
            lost = (
                f"{len(account.lost)} without a usable utterance ({account.lost[0]}), "
            )
        raise ValueError(
            f"Only {left} speaker(s) are left for training: {found} found, "
            f"{in_lists} in trial lists, {lost}{len(held_out)} held out. "
            "Check data_folder, train_list, trial_lists and valid_speakers."
        )


def count_short(utterances: Iterable[Utterance], settings: DataSettings) -> int:
    """Count utterances that are shorter than a segment of a run."""
    segment = settings.segment_samples()
    return sum(one.samples < segment for one in utterances)


def write_account(
    account: Account,
    save_folder: Path,
    *,
    training: Sequence[Utterance],
    validation: int,
    single: Sequence[str],
    settings: DataSettings,
) -> None:
    """Write what was seen, used and left out: by reason, by file, and single speakers.

    Parameters
    ----------
    account : Account
        Of the corpus.
    save_folder : Path
        Where ``accounting.csv``, ``left_out.csv``, ``single_speakers.txt`` and
        ``lost_speakers.txt`` are written.
    training : sequence of Utterance
        What is trained on.
    validation : int
        How many utterances are held out.
    single : sequence of str
        Speakers with one utterance to train on.
    settings : DataSettings
        The run's.
    """
    how = dict(sorted(account.treated.items()))
    if short := count_short(training, settings):
        how[f"{Cause.SHORT.words} and {LENGTHENED[settings.short]}"] = short
    assert len(training) + validation == account.used()
    counts = {
        "seen": account.listing.seen(),
        "used: training": len(training),
        "used: validation": validation,
        **{f"of the used: {words}": count for words, count in how.items()},
        **{f"left out: {why.words}": n for why, n in account.causes().items()},
    }
    _write_csv(save_folder / ACCOUNTING, ("what", "files"), counts.items())
    left_out = [(path, why.words, detail) for path, why, detail in account.left_out]
    _write_csv(save_folder / LEFT_OUT, ("file", "reason", "detail"), left_out)
    for file, speakers in ((SINGLE, single), (LOST, account.lost)):
        names = "".join(f"{name}\n" for name in speakers)
        write_whole(save_folder / file, names.encode(errors="backslashreplace"))


def _write_csv(
    path: Path, header: Sequence[str], rows: Collection[Sequence[object]]
) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    table.writerows(rows)
    # A name that is not in UTF-8 can be written in no other way.
    write_whole(path, text.getvalue().encode(errors="backslashreplace"))
