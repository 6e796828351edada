"""Which speech of a corpus is trained on, held out, or left out: by a run's settings.

`list_speech` gives the rows of each speaker, `tested_speakers` who is in trial lists,
`held_out_speakers` and `list_validation` whom a run is validated on.
"""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain, combinations, islice
from pathlib import PurePosixPath
from typing import Any, TypeVar

import torch

from speechbrain_rev.audio.segments import bytes_of
from speechbrain_rev.bars import progress_bar
from speechbrain_rev.files import digest_of
from speechbrain_rev.lists import (
    joined_line,
    printable,
    read_lines,
    split_line,
)
from speechbrain_rev.scoring import Trials, read_trials
from speechbrain_rev.scoring.trials import models_file

from .corpora import open_sources
from .manifest import Cause, LeftOut
from .rows import (
    Found,
    Row,
    Source,
    are,
    counted,
    find_rows,
    read_ahead,
)
from .seeding import generator

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

# Settings of how files are checked, which may change until training begins.
_CHECKS = "bad_files", "check_audio", "outside_files"
# Utterances of each held-out speaker: a validation after each epoch must stay short.
VALID_UTTERANCES = 10
#: Shorter utterances are in no validation trial: encoders need up to 9 frames, 0.105 s
#: with Kaldi's windows.
VALIDATED_SECONDS = 0.11
IMPOSTORS_PER_TARGET = 4
# Utterances that show how a corpus was understood.
_EXAMPLES = 3
# Folders that hold speakers of a part of a corpus.
_SPLIT = re.compile(
    r"(tr|cv|tt|train(ing)?|dev(el|elopment)?|test(ing)?|eval(uation)?|val(id|idation)?|"
    r"enrol|enroll|enrolment|enrollment)([-_. ].*)?|wavs?|flac|aac|mp3|m4a|audio|speech|data",
    re.IGNORECASE,
)
# The speaker of speaker_utterance.wav, and of speaker-utterance.wav.
_FLAT = r"^([^/_]+)_", r"^([^/-]+)-"


@dataclass(frozen=True)
class DataSettings:
    """The settings that a run's lists depend on.

    Attributes
    ----------
    data_folder : str or list of str
        Training speech, of one corpus or several.
    train_list : str or None
        A file of lines "speaker path"; None for all speakers of data_folder.
    trial_lists : tuple of str
        Lists to be evaluated on: their speakers are left out of training.
    trials_folder : str, list of str or None
        Where the audio of the trial lists is; None for data_folder. It is looked for
        there, but changes no list.
    valid_speakers : int
        How many training speakers are held out for validation.
    valid_trials : str or None
        A validation list of the user's own, instead of held-out speakers.
    sample_rate : int
        Rate that files are read at, Hz.
    seed : int
        Seed of the choice of held-out speakers and trials.
    bad_files : {"refuse", "drop"}
        What is done if files cannot be used.
    check_audio : bool
        Whether files are decoded as a whole, and not their headers only.
    outside_files : bool
        Whether names and links may lead out of data_folder and trials_folder.
    speaker_from : int, str or None
        Where files of a folder name their speaker; None for what its layout says.
    resample, channel : bool, and int, "mix" or None
        As of ``read_audio``.
    short : {"repeat", "pad", "drop"}
        Whether utterances shorter than a segment are repeated or padded in training, or
        left out.
    sentence_len : float
        Seconds of a segment.

    Example
    -------
    >>> DataSettings("/data/wav", seed=7).segment_samples()
    35200
    """

    data_folder: str | list[str]
    train_list: str | None = None
    trial_lists: tuple[str, ...] = ()
    trials_folder: str | list[str] | None = None
    valid_speakers: int = 0
    valid_trials: str | None = None
    sample_rate: int = 16000
    seed: int = 0
    bad_files: str = "refuse"
    check_audio: bool = False
    outside_files: bool = False
    speaker_from: int | str | None = None
    resample: bool = False
    channel: int | str | None = None
    short: str = "repeat"
    sentence_len: float = 2.2

    @classmethod
    def of(cls, knobs: Mapping[str, Any]) -> DataSettings:
        """Select from a run's settings what the lists depend on."""
        chosen = {name: knobs[name] for name in cls.__dataclass_fields__}
        return cls(**{**chosen, "trial_lists": tuple(chosen["trial_lists"])})

    def checks(self) -> dict[str, object]:
        """Return the settings of how files are checked."""
        return {name: getattr(self, name) for name in _CHECKS}

    def segment_samples(self) -> int:
        """Return the samples of a segment, as train.py reads it."""
        return round(self.sentence_len * self.sample_rate)

    def sources(self, option: str = "data_folder") -> list[Source]:
        """Recognise the training speech, given as an option, or that of trial lists."""
        folder = self.data_folder
        if option == "trials_folder" and self.trials_folder:
            folder = self.trials_folder
        return open_sources(
            folder,
            option,
            outside_files=self.outside_files,
            speaker_from=self.speaker_from,
        )

    def trials_are_elsewhere(self) -> bool:
        """Whether the audio of trial lists is in a folder of its own."""
        return self.trials_folder not in (None, self.data_folder)

    def check_there(self) -> None:
        """Refuse a data folder or a list that is not there, before anything is written.

        Raises
        ------
        ValueError
            If one is missing, or no corpus is recognised in the folder.
        """
        for source in self.sources():
            next(source.rows(), None)
        self.fingerprint()

    def fingerprint(self) -> dict[str, object]:
        """Return the settings that lists depend on, with a digest of each list's content."""
        unread = "data_folder", "trials_folder", *_CHECKS
        given = {n: value for n, value in asdict(self).items() if n not in unread}
        if self.short != "drop":
            # Lists depend on a segment's length only where short utterances are left out.
            given |= {"short": "repeat or pad", "sentence_len": None}
        for name in ("train_list", "valid_trials", "trial_lists"):
            lists = given[name] or ()
            lists = [lists] if isinstance(lists, str) else lists
            models = [models_file(path) for path in lists if name != "train_list"]
            given[name] = [digest_of(path) for path in filter(None, [*lists, *models])]
        return given


@dataclass(frozen=True)
class ListedSpeech:
    """The rows of the speech, before they are checked.

    Attributes
    ----------
    sources : sequence of Source
        Where they are.
    rows : sequence of Row
        Sorted by speaker, then by name; those of a training list in its order.
    left_out : sequence of LeftOut
        Files of no speaker, and those that are no utterances.
    aliases : mapping of str to set of str
        What else lists of trials may call a speaker.
    """

    sources: Sequence[Source]
    rows: Sequence[Row]
    left_out: Sequence[LeftOut] = ()
    aliases: Mapping[str, set[str]] = field(default_factory=dict)

    @cached_property
    def speakers(self) -> list[str]:
        """The speakers, in the order of their rows."""
        return [*dict.fromkeys(row.speaker or "" for row in self.rows)]

    def digest(self) -> str:
        """Digest names, sizes and all that rows say: equal where the data are the same."""
        made = blake2b(digest_size=16)
        # Data may move together with their list.
        roots = tuple(f"{source.folder}/" for source in self.sources)
        sizes = read_ahead(lambda row: bytes_of(row.path), self.rows)
        for row, size in zip(self.rows, sizes, strict=True):
            path = row.path
            if path.startswith(roots):
                path = path[max(len(root) for root in roots if path.startswith(root)) :]
            session = None if row.session == row.path else row.session
            fields = (row.name, path, size, *row[2:6], session, row.labels)
            made.update(os.fsencode("\t".join(map(str, fields)) + "\n"))
        return made.hexdigest()

    def understood(self) -> str:
        """Say what each source was taken for, with three examples."""
        lines = []
        for source in self.sources:
            rows = [row for row in self.rows if row.id.startswith(source.prefix)]
            first: dict[str | None, Row] = {}
            for row in rows:
                first.setdefault(row.speaker, row)
            lines.append(
                f"{f'{source.key}: ' if source.key else ''}Understood as {source.format}: "
                f"{counted(len(rows), 'utterance')} of {counted(len(first), 'speaker')}, "
                "such as"
            )
            apart = islice(first.values(), _EXAMPLES)
            examples = dict.fromkeys([*apart, *rows[:_EXAMPLES]])
            lines += [
                f"  {row.name} of {row.speaker}: {row.wav}"
                for row in islice(examples, _EXAMPLES)
            ]
        return printable("\n".join(lines))

    def seen(self) -> int:
        """Count all files of audio."""
        return len(self.rows) + len(self.left_out)


def list_speech(settings: DataSettings, option: str = "data_folder") -> ListedSpeech:
    """List the rows of the data folder, or those that the training list names.

    Parameters
    ----------
    settings : DataSettings
        The run's.
    option : str
        What the data folder is given as, for errors.

    Returns
    -------
    ListedSpeech

    Raises
    ------
    ValueError
        If a folder or list is missing or cannot be used, or one part of a recording is of
        two speakers.

    Example
    -------
    >>> path = getfixture("tmp_path") / "id1" / "s1" / "a.wav"
    >>> path.parent.mkdir(parents=True); path.touch()
    >>> [row.id for row in list_speech(DataSettings(str(getfixture("tmp_path")))).rows]
    ['id1/s1/a']
    """
    sources = settings.sources(option)
    if settings.train_list is not None:
        return _listed(sources, settings)
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for source in sources:
        # Files of other formats are listed too, so that none is dropped silently.
        begin, before = len(rows), len(left_out)
        rows += progress_bar("listing", source.rows(left_out), unit="file")
        if settings.speaker_from is not None and len(rows) == begin:
            raise ValueError(
                f"speaker_from is {settings.speaker_from!r}, and finds no speaker in the "
                f"names of {source.path}, such as "
                f"{left_out[before].path.removeprefix(f'{source.path}/')}."
            )
        if source.whose is not None and settings.speaker_from is None:
            _refuse_flat(source, left_out[before:])
            _refuse_splits(source, rows[begin:], option)
    rows.sort(key=lambda row: (row.speaker, row.name))
    left_out.sort(key=lambda one: one.path)
    listing = ListedSpeech(sources, rows, left_out)
    if len(sources) == 1:
        return listing
    aliases = {speaker: {speaker.partition("/")[2]} for speaker in listing.speakers}
    return replace(listing, aliases=aliases)


def _refuse_flat(source: Source, left_out: Sequence[LeftOut]) -> None:
    """Refuse files that have the speaker in their names, with the option that reads them."""
    names = [
        os.path.basename(one.path) for one in left_out if one.cause is Cause.NO_SPEAKER
    ]
    speakers: dict[str, set[str]] = {}
    for pattern in _FLAT:
        found = [match[1] for name in names if (match := re.match(pattern, name))]
        # As many speakers as files would be utterances.
        if 2 * len(found) > len(names) and 1 < len(set(found)) < len(found):
            speakers[pattern] = set(found)
    if speakers:
        pattern = max(speakers, key=lambda pattern: len(speakers[pattern]))
        raise ValueError(
            f"{counted(len(names), 'file')} in {source.path} {are(len(names))} in no folder "
            f"of a speaker. Names such as {min(names)} begin with one: "
            f"--speaker_from='{pattern}' reads "
            f"{counted(len(speakers[pattern]), 'speaker')}, such as {min(speakers[pattern])}."
        )


def _refuse_splits(source: Source, rows: Sequence[Row], option: str) -> None:
    """Refuse folders of speakers' folders, each of which would be one speaker."""
    first = {
        (row.speaker or "").removeprefix(source.prefix): row.name
        for row in reversed(rows)
    }
    if not first or not all(map(_SPLIT.fullmatch, first)):
        return
    *_, last = splits = sorted(first)
    name = first[last].removeprefix(source.prefix)
    level = f"--speaker_from=2 takes {name.split('/')[1]!r} of {name}"
    if name.count("/") < 2:
        level = f"which {name} does not have"
    raise ValueError(
        f"Folders called {', '.join(splits[: _EXAMPLES + 1])} in {source.path} would be "
        f"taken for speakers. Give the one to train on as {option} ({source.path / last}), or "
        f"the level of the speakers' folders ({level}). If these are speakers, give "
        "--speaker_from=1."
    )


def _listed(sources: Sequence[Source], settings: DataSettings) -> ListedSpeech:
    """Read the training list, each file of which is of one speaker."""
    assert settings.train_list is not None
    train_list, form = settings.train_list, "'speaker path'"
    speakers: dict[str, str] = {}
    for number, line in enumerate(read_lines(train_list, form), start=1):
        fields = split_line(line, 2)
        if len(fields) != 2:
            raise ValueError(
                f"{train_list}, line {number}: {line[:60]!r} has "
                f"{counted(len(fields), 'field')} instead of 2. Lines must be {form}, with a "
                "tab between them where one has spaces."
            )
        # One file, however many slashes a line has.
        speaker, name = fields[0], str(PurePosixPath(fields[1]))
        if speakers.setdefault(name, speaker) != speaker:
            raise ValueError(
                f"{train_list}, line {number}: {name!r} is of the speakers "
                f"{speakers[name]!r} and {speaker!r}. Leave the right one."
            )
    if not speakers:
        raise ValueError(f"{train_list} is empty; lines must be {form}.")
    found = find_rows(sources, speakers)
    rows, left_out = [], []
    aliases: dict[str, set[str]] = defaultdict(set)
    for name, speaker in speakers.items():
        if name in found.outside:
            words = f"{name!r} {found.outside[name]}"
            left_out.append(LeftOut(name, Cause.OUTSIDE, words))
            continue
        row = found.rows.get(name)
        if row is None:
            # It is reported with all else that is wrong.
            row = Row(name, str(sources[0].path / name))
        if row.speaker is not None:
            aliases[speaker] |= {row.speaker, row.speaker.partition("/")[2]} - {""}
        rows.append(row._replace(speaker=speaker))
    rows.sort(key=lambda row: row.speaker or "")
    return ListedSpeech(sources, rows, left_out, aliases)


def tested_speakers(listing: ListedSpeech, settings: DataSettings) -> set[str]:
    """Return the speakers of all trial lists, and look for their audio.

    Parameters
    ----------
    listing : ListedSpeech
        The training speech.
    settings : DataSettings
        The run's.

    Returns
    -------
    set of str

    Raises
    ------
    ValueError
        If names of a list do not begin with the speaker, lead out of the folder, or files
        of validation trials are missing. Missing files of other lists are a warning.
    """
    paths = filter(None, [*settings.trial_lists, settings.valid_trials])
    lists = {path: read_trials(path) for path in paths}
    if not lists:
        return set()
    elsewhere = settings.trials_are_elsewhere()
    names = chain.from_iterable(trials.utterances for trials in lists.values())
    sources, lacking = listing.sources, ""
    if elsewhere:
        try:
            sources = settings.sources("trials_folder")
        except ValueError as error:
            # Names have the speakers all the same.
            lacking = str(error)
    found = find_rows(sources, names)
    tested: set[str] = set()
    for path, trials in lists.items():
        found.refuse_outside(path, trials.utterances)
        speakers = _speakers_of(path, trials, found, sources)
        missing = lacking or found.lacking(trials.utterances)
        if missing and path == settings.valid_trials:
            raise ValueError(
                f"{path}: {missing} Set trials_folder or correct the list."
            )
        if missing:
            logger.warning(
                f"{path}: {missing} Training does without; before extract.py, set "
                "trials_folder to where they are."
            )
        tested.update(speakers)
        if elsewhere:
            # Names of another corpus have no key of these.
            tested.update(filter(None, (s.partition("/")[2] for s in speakers)))
    return tested


def _speakers_of(
    path: str, trials: Trials, found: Found, sources: Sequence[Source]
) -> set[str]:
    """Give the speakers of a list of trials, which its labels must not contradict."""
    known = {n: row.speaker for n, row in found.rows.items() if row.speaker}
    unknown = [name for name in trials.utterances if name not in known]
    if unknown and any(source.whose is None for source in sources):
        raise ValueError(
            f"{path}: {counted(len(unknown), 'utterance')} of it or of its spk2utt file "
            f"without a known speaker, such as {found.missing.get(unknown[0], unknown[0])}. "
            "Such speakers could not be left out of training. Set trials_folder to the "
            "corpus of the trials, or correct the list."
        )
    by_name = {name: known.get(name, name) for name in trials.utterances}
    for model, files in trials.models.items():
        if len(whose := {by_name[name] for name in files}) > 1:
            raise ValueError(
                f"{path}: {model!r} is enrolled with utterances of {sorted(whose)}. Correct "
                "the spk2utt file, whose names must be those of trials_folder."
            )
    for label, *names in zip(trials.labels, trials.enrol, trials.test, strict=True):
        one, other = (by_name[trials.files(names[0])[0]], by_name[names[1]])
        if (one == other) != bool(label):
            formats = ", ".join(source.format for source in sources)
            raise ValueError(
                f"{path}: the trial {label} {' '.join(names)} is of the speakers {one!r} and "
                f"{other!r} ({formats}), which contradicts its label: correct the label, or "
                "the names, which must begin with the speaker in a folder of audio "
                "(id10270/x6uYqmx31kE/00001.wav, not wav/id10270/...), or the test speakers "
                "could not be left out of training."
            )
    return set(by_name.values())


def refuse_alike(rows: Iterable[Row]) -> None:
    """Refuse speakers whose names look the same; warn of those that differ in case.

    Parameters
    ----------
    rows : iterable of Row
        Of all speakers.

    Raises
    ------
    ValueError
        If names differ in spaces, or in the Unicode form of letters, alone.
    """
    first = {row.speaker or "": row for row in rows}
    alike: dict[str, dict[str, str]] = defaultdict(dict)
    for speaker in first:
        plain = _plain(speaker)
        same = alike[plain.casefold()]
        if (other := same.setdefault(plain, speaker)) != speaker:
            one, two = (f"{s!a} ({first[s].path})" for s in (other, speaker))
            raise ValueError(
                f"The names of the speakers {one} and {two} differ in spaces or in the "
                "Unicode form of letters alone. Give both one name, or another to one."
            )
    cases = [" and ".join(map(repr, s.values())) for s in alike.values() if len(s) > 1]
    if cases:
        logger.warning(
            f"{counted(len(cases), 'name')} of speakers differ in case alone, and are "
            f"speakers each: {', '.join(cases[:_EXAMPLES])}. If some are one speaker, give "
            "them one name."
        )


def _plain(name: str) -> str:
    """Give a name in one Unicode form, without spaces around it or two in it."""
    if name.isascii() and name.isalnum():
        return name
    return " ".join(unicodedata.normalize("NFC", name).split())


def same_speakers(listing: ListedSpeech, others: Collection[str]) -> set[str]:
    """Select the speakers who are among others by name.

    Names are equal that differ in spaces, or in the Unicode form of letters, alone.

    Parameters
    ----------
    listing : ListedSpeech
        Of the speakers.
    others : collection of str
        Their names.

    Returns
    -------
    set of str

    Example
    -------
    >>> rows = [Row(f"{speaker}/a", "a.wav", speaker) for speaker in ("id1", "id2")]
    >>> sorted(same_speakers(ListedSpeech([], rows), ["id2", "id3"]))
    ['id2']
    """
    names = set(map(_plain, others))
    return {
        speaker
        for speaker in listing.speakers
        if not names.isdisjoint(
            map(_plain, {speaker, *listing.aliases.get(speaker, ())})
        )
    }


def held_out_speakers(speakers: Collection[str], settings: DataSettings) -> list[str]:
    """Choose the speakers who are held out for validation.

    Parameters
    ----------
    speakers : collection of str
        Those of whom files can be used.
    settings : DataSettings
        The run's.

    Returns
    -------
    list of str
        Sorted; empty without validation.

    Raises
    ------
    ValueError
        If there are too few speakers.
    """
    if settings.valid_trials is not None or not settings.valid_speakers:
        return []
    speakers = sorted(speakers)
    if not 2 <= settings.valid_speakers <= len(speakers) - 2:
        listed = settings.train_list or settings.data_folder
        raise ValueError(
            f"valid_speakers is {settings.valid_speakers}, and {listed} has "
            f"{counted(len(speakers), 'speaker')} beside those of trial lists "
            f"({', '.join(speakers[:_EXAMPLES])}): validation takes 2 or more (the default is "
            "40), and training 2 or more others. valid_speakers 0 means no validation. Of "
            "folders speaker_from may name another level."
        )
    draws = generator("held out", settings.seed)
    order = torch.randperm(len(speakers), generator=draws).tolist()
    return sorted(speakers[i] for i in order[: settings.valid_speakers])


def list_validation(
    held_out: Mapping[str, Sequence[Row]], listing: ListedSpeech, settings: DataSettings
) -> tuple[list[str], dict[str, str]]:
    """List the validation trials, the user's own or of held-out speakers, and their files.

    Parameters
    ----------
    held_out : mapping of str to sequence of Row
        Of the speakers that ``held_out_speakers`` chose, what encoders can embed.
    listing : ListedSpeech
        Theirs.
    settings : DataSettings
        The run's.

    Returns
    -------
    lines : list of str
        "label path path".
    files : dict of str to str
        Paths of audio by the names in the lines.
    """
    if settings.valid_trials is not None:
        return _own_trials(settings.valid_trials, listing, settings)
    if not held_out:
        return [], {}
    draws = generator("valid trials", settings.seed)
    rows = {s: _some(r, VALID_UTTERANCES, draws) for s, r in held_out.items()}
    targets = [pair for some in rows.values() for pair in _target_pairs(some)]
    everyone = [row for some in rows.values() for row in some]
    impostors = [(a, b) for a, b in combinations(everyone, 2) if a.speaker != b.speaker]
    impostors = _some(impostors, IMPOSTORS_PER_TARGET * len(targets), draws)
    lines = [joined_line("1", a.name, b.name) for a, b in targets]
    lines += [joined_line("0", a.name, b.name) for a, b in impostors]
    return lines, {row.name: row.wav for row in everyone}


def _own_trials(
    path: str, listing: ListedSpeech, settings: DataSettings
) -> tuple[list[str], dict[str, str]]:
    """Copy the user's own list, with the names of the files that are there."""
    trials = read_trials(path)
    if trials.models:
        raise ValueError(
            f"valid_trials is {path}, whose speakers are enrolled with several utterances. "
            "Validation takes one for each side: give it in trial_lists, for score.py."
        )
    elsewhere = settings.trials_are_elsewhere()
    sources = settings.sources("trials_folder") if elsewhere else listing.sources
    rows = find_rows(sources, trials.utterances).rows
    lines = [
        joined_line(str(label), rows[a].name, rows[b].name)
        for label, a, b in zip(
            trials.labels.tolist(), trials.enrol, trials.test, strict=True
        )
    ]
    return lines, {row.name: row.wav for row in rows.values()}


def _target_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pair utterances of different sessions: within one, the channel gives them away."""
    pairs = list(combinations(rows, 2))
    return [(a, b) for a, b in pairs if a.session != b.session] or pairs


def _some(items: Sequence[Item], count: int, draws: torch.Generator) -> list[Item]:
    """Draw items, and return them in their order."""
    chosen = torch.randperm(len(items), generator=draws)[:count].sort().values
    return [items[i] for i in chosen.tolist()]
