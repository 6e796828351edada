"""Which speech of a corpus is trained on, held out, or left out: by a run's settings.

`list_speech` finds the files of each speaker, `tested_speakers` who is in trial lists,
`held_out_speakers` and `validation_lines` whom a run is validated on.
"""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

from speechbrain_rev.audio.segments import find_segment
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

from .corpora import find_files, list_files, open_corpus
from .corpus import Corpus, VoxCelebFolder, located
from .manifest import Cause, LeftOut
from .seeding import generator

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

# How files are checked; it may change until training begins.
_CHECKS = "bad_files", "check_audio", "outside_files"
# Of each held-out speaker; a validation after each epoch must stay short.
VALID_UTTERANCES = 10
#: No encoder embeds shorter utterances, which are held out and in no trial.
VALIDATED_SECONDS = 0.09
IMPOSTORS_PER_TARGET = 4
# Utterances that show how a corpus was understood.
_EXAMPLES = 3
# Folders that hold speakers of a part of a corpus.
_SPLIT = re.compile(
    r"(tr|cv|tt|train(ing)?|dev(el|elopment)?|test(ing)?|eval(uation)?|val(id|idation)?|"
    r"enrol|enroll|enrolment|enrollment)([-_. ].*)?",
    re.IGNORECASE,
)
# Two who are held out, for impostor trials, and two to train on.
FEWEST_SPEAKERS = 4


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

    def corpus(self, option: str = "data_folder") -> Corpus:
        """Open the training speech, which was given as an option, or that of trial lists."""
        folder = self.data_folder
        if option == "trials_folder" and self.trials_folder:
            folder = self.trials_folder
        return open_corpus(
            folder,
            option,
            outside_files=self.outside_files,
            speaker_from=self.speaker_from,
        )

    def check_there(self) -> None:
        """Refuse a data folder or a list that is not there, before anything is written.

        Raises
        ------
        ValueError
            If one is missing, or no corpus is recognised in the folder.
        """
        self.corpus()
        self.fingerprint()

    def fingerprint(self) -> dict[str, object]:
        """Return the settings and a digest of each list's content."""
        given = asdict(self)
        for name in ("trials_folder", *_CHECKS):
            del given[name]
        if self.short != "drop":
            # Lists depend on a segment's length only where short utterances are left out.
            del given["short"], given["sentence_len"]
        if tables := list_files(self.data_folder):
            given["data_lists"] = {str(p): digest_of(p) for p in tables}
        for name in ("train_list", "valid_trials", "trial_lists"):
            lists = given[name] if name == "trial_lists" else _paths_given(given[name])
            given[name] = {str(path): digest_of(_existing(path)) for path in lists}
            if name != "train_list":
                also = [file for path in lists if (file := models_file(path))]
                given[name] |= {str(p): digest_of(p) for p in also}
        return given


def _paths_given(path: str | None) -> list[str]:
    """Return a list of the path, if there is one."""
    return [] if path is None else [path]


def _existing(path: str | Path) -> Path:
    """Return the path of a list."""
    if not Path(path).is_file():
        raise ValueError(f"The list {path} does not exist.")
    return Path(path)


@dataclass(frozen=True)
class ListedSpeech:
    """The files of a corpus or of a training list, before they are checked.

    Attributes
    ----------
    corpus : Corpus
        Where they are.
    by_speaker : mapping of str to list of str
        Names of files by speaker.
    left_out : sequence of LeftOut
        Files of no speaker, and those that are no utterances.
    """

    corpus: Corpus
    by_speaker: Mapping[str, list[str]]
    left_out: Sequence[LeftOut] = ()

    def digest(self) -> str:
        """Digest names and sizes of the files of all speakers."""
        return self.corpus.digest(
            name for names in self.by_speaker.values() for name in names
        )

    def understood(self) -> str:
        """Say what each corpus was taken for, with three examples."""
        lines = []
        for key, part in self.corpus.parts().items():
            names = {
                name: speaker
                for speaker, names in self.by_speaker.items()
                for name in names
                if self.corpus.part(name) == key
            }
            first = {speaker: name for name, speaker in reversed(names.items())}
            lines.append(
                f"{f'{key}: ' if key else ''}Understood as {part.format}: {len(names)} "
                f"utterances of {len(first)} speakers, such as"
            )
            apart = list(first.values())[::-1]
            examples = dict.fromkeys([*apart[:_EXAMPLES], *islice(names, _EXAMPLES)])
            for name in islice(examples, _EXAMPLES):
                path = located(self.corpus, name)[0]
                lines.append(f"  {name} of {names[name]}: {path}")
        return printable("\n".join(lines))

    def seen(self) -> int:
        """Count all files of audio."""
        return sum(map(len, self.by_speaker.values())) + len(self.left_out)


def list_speech(settings: DataSettings, option: str = "data_folder") -> ListedSpeech:
    """List the files of each speaker, in the data folder or in the training list.

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
        If a folder or list is missing or cannot be used.

    Example
    -------
    >>> path = getfixture("tmp_path") / "id1" / "s1" / "a.wav"
    >>> path.parent.mkdir(parents=True); path.touch()
    >>> list_speech(DataSettings(str(getfixture("tmp_path")))).by_speaker
    {'id1': ['id1/s1/a.wav']}
    """
    corpus = settings.corpus(option)
    if settings.train_list is not None:
        return ListedSpeech(corpus, _listed(corpus, settings))
    by_speaker: dict[str, list[str]] = {}
    left_out: list[LeftOut] = []
    for key, part in corpus.parts().items():
        speakers = _in_folder(part, left_out)
        if settings.speaker_from is None:
            _refuse_splits(part, speakers, option)
        before = f"{key}/" if key else ""
        for speaker, names in speakers.items():
            by_speaker[before + speaker] = [before + name for name in sorted(names)]
    return ListedSpeech(corpus, by_speaker, sorted(left_out, key=lambda one: one.path))


def _refuse_splits(
    corpus: Corpus, speakers: Mapping[str, Sequence[str]], option: str
) -> None:
    """Refuse folders such as train and test, each of which would be one speaker."""
    if not isinstance(corpus, VoxCelebFolder):
        return
    splits = sorted(filter(_SPLIT.fullmatch, speakers))
    words = f"{', '.join(splits[: _EXAMPLES + 1])} in {corpus.root}"
    if splits and len(splits) == len(speakers):
        name = min(speakers[splits[-1]])
        raise ValueError(
            f"Folders called {words} would be taken for speakers. Give the one to train on "
            f"as {option} ({corpus.root / splits[-1]}), or the level of the speakers' "
            f"folders (--speaker_from=2 takes {name.split('/')[1]!r} of {name}). If these are "
            "speakers, give --speaker_from=1."
        )
    if splits:
        logger.warning(
            f"Folders called {words} are taken for speakers, as are the others beside "
            "them. If they hold several speakers, move them away or set speaker_from."
        )


def _in_folder(corpus: Corpus, left_out: list[LeftOut]) -> dict[str, list[str]]:
    """List the audio of speakers, and what is left out."""
    by_speaker, names = defaultdict(list), []
    # Files of other formats are listed too, so that none is dropped silently.
    for name, cause in progress_bar("listing", corpus.audio(), unit="file"):
        if cause:
            left_out.append(LeftOut(str(located(corpus, name)[0]), cause, cause.detail))
        else:
            names.append(name)
    for name in names:
        if (speaker := corpus.speaker(name)) is not None:
            by_speaker[speaker].append(name)
        else:
            path = str(located(corpus, name)[0])
            words = f"{path} lies in the folder of the speakers' folders"
            if "/" in name or not corpus.speakers_in_names:
                words = f"{path}: speaker_from finds no speaker in {name}"
            left_out.append(LeftOut(path, Cause.NO_SPEAKER, words))
    warnings, beside = corpus.remarks(names)
    for words in warnings:
        logger.warning(words)
    cause = Cause.BESIDE
    left_out += [LeftOut(str(path), cause, cause.detail) for path in beside]
    return by_speaker


def _listed(corpus: Corpus, settings: DataSettings) -> dict[str, list[str]]:
    """Read the training list, each file of which is of one speaker."""
    assert settings.train_list is not None
    train_list, form = _existing(settings.train_list), "'speaker path'"
    lines: dict[str, tuple[str, int]] = {}
    by_speaker = defaultdict(list)
    for number, line in enumerate(read_lines(train_list, form), start=1):
        fields = split_line(line, 2)
        if len(fields) != 2:
            raise ValueError(
                f"{train_list}, line {number}: {line[:60]!r} has {len(fields)} fields "
                f"instead of 2. Lines must be {form}, with a tab between them where one "
                "has spaces."
            )
        # One file, however many slashes a line has.
        speaker, name = fields[0], str(PurePosixPath(fields[1]))
        other, at = lines.setdefault(name, (speaker, number))
        if other != speaker:
            raise ValueError(
                f"{train_list}, lines {at} and {number}: {name!r} is of the speakers "
                f"{other!r} and {speaker!r}. Leave the right one."
            )
        by_speaker[speaker].append(name)
    if not by_speaker:
        raise ValueError(f"{train_list} is empty; lines must be {form}.")
    files = find_files(corpus, list(lines))
    # Missing files are reported with all else that is wrong.
    return {
        s: [files.names.get(n, n) for n in names] for s, names in by_speaker.items()
    }


def tested_speakers(corpus: Corpus, settings: DataSettings) -> set[str]:
    """Return the speakers of all trial lists, and look for their audio.

    Parameters
    ----------
    corpus : Corpus
        Of the training speech.
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
    tested: set[str] = set()
    lacking = ""
    lists = (*settings.trial_lists, *_paths_given(settings.valid_trials))
    if lists:
        try:
            corpus = settings.corpus("trials_folder")
        except ValueError as error:
            # Names have the speakers all the same.
            lacking = str(error)
    for path in lists:
        trials = read_trials(path)
        speakers = {n: corpus.speaker(n) or n for n in trials.utterances}
        _refuse_unknown(path, trials, corpus)
        _refuse_other_names(path, trials, speakers, corpus)
        files = find_files(corpus, trials.utterances)
        files.refuse_outside(path, trials.utterances)
        missing = lacking or files.lacking()
        if not lacking and (named := _by_models(path, trials, files.missing)):
            missing += f" {named} names it."
        if missing and path == settings.valid_trials:
            raise ValueError(
                f"{path}: {missing} Set trials_folder or correct the list."
            )
        if missing:
            logger.warning(
                f"{path}: {missing} Training does without; before extract.py, set "
                "trials_folder to where they are."
            )
        tested.update(speakers.values())
        if settings.trials_folder not in (None, settings.data_folder):
            # Of other corpora, whose names mean nothing in these.
            tested.update(map(corpus.also_known_as, speakers.values()))
    return tested


def _by_models(path: str, trials: Trials, utterances: Iterable[str]) -> Path | None:
    """Give the file that names the first of some utterances, if it is one of models."""
    first = next(iter(utterances), "")
    of_model = any(first in names for names in trials.models.values())
    return models_file(path) if of_model else None


def _refuse_unknown(path: str, trials: Trials, corpus: Corpus) -> None:
    """Refuse utterances that a list of utterances has not: nobody would be left out."""
    unknown = [name for name in trials.utterances if corpus.speaker(name) is None]
    if unknown and not all(part.speakers_in_names for part in corpus.parts().values()):
        named = _by_models(path, trials, unknown)
        raise ValueError(
            f"{named or path}: {len(unknown)} utterances have no speaker that is known, such "
            f"as {corpus.lacks(unknown[0])}. Such speakers could not be left out of "
            "training. Set trials_folder to the corpus of the trials, or correct the list."
        )


def _refuse_other_names(
    path: str, trials: Trials, by_name: Mapping[str, str], corpus: Corpus
) -> None:
    """Refuse names that do not begin with the speaker: nobody would be left out."""
    for model, files in trials.models.items():
        if len(whose := {by_name[name] for name in files}) > 1:
            raise ValueError(
                f"{path}: {model!r} is enrolled with utterances of {sorted(whose)}. Correct "
                "the spk2utt file, whose names must be those of trials_folder."
            )
    for label, *names in zip(trials.labels, trials.enrol, trials.test, strict=True):
        speakers = [by_name[trials.files(names[0])[0]], by_name[names[1]]]
        if (speakers[0] == speakers[1]) != bool(label):
            if not any(part.speakers_in_names for part in corpus.parts().values()):
                raise ValueError(
                    f"{path}: the trial {label} {' '.join(names)} is of {speakers[0]!r} and "
                    f"{speakers[1]!r} by the list of the corpus ({corpus.format}). Correct "
                    "the label of the trial, or the speakers of that list."
                )
            raise ValueError(
                f"{path}: the trial {label} {' '.join(names)} is of the speakers "
                f"{speakers[0]!r} and {speakers[1]!r}, which contradicts its label: "
                "paths must begin with the speaker (id10270/x6uYqmx31kE/00001.wav, not "
                "wav/id10270/...), or the test speakers could not be left out of "
                "training. Correct the paths of the list."
            )


def refuse_alike(corpus: Corpus, by_speaker: Mapping[str, Sequence[str]]) -> None:
    """Refuse speakers whose names look the same: one would be two.

    Parameters
    ----------
    corpus : Corpus
        Theirs.
    by_speaker : mapping of str to sequence of str
        Names of files by speaker.

    Raises
    ------
    ValueError
        If names differ in spaces, or in the Unicode form of letters, alone.
    """
    known: dict[str, str] = {}
    for speaker in by_speaker:
        other = known.setdefault(_plain(speaker), speaker)
        if other != speaker:
            first, second = (
                f"{s!a} ({located(corpus, by_speaker[s][0])[0]})"
                for s in (other, speaker)
            )
            raise ValueError(
                f"The names of the speakers {first} and {second} differ in spaces or in the "
                "Unicode form of letters alone. Give both one name, or another to one."
            )


def _plain(name: str) -> str:
    """Give a name in one Unicode form, without spaces around it or two in it."""
    if name.isascii() and name.isalnum():
        return name
    return " ".join(unicodedata.normalize("NFC", name).split())


def refuse_shared_audio(audio: Iterable[tuple[str, str]]) -> None:
    """Refuse one recording of two speakers, as where two corpora list the same files.

    Parameters
    ----------
    audio : iterable of (str, str)
        Speaker and path of each utterance.

    Raises
    ------
    ValueError
        It names both. Parts of one recording may be of several speakers.

    Example
    -------
    >>> refuse_shared_audio([("a/ann", "r.wav/0+9.wav"), ("b/bob", "r.wav/9+9.wav")])
    """
    # By hashes, for they are many.
    known: dict[int, tuple[str, str]] = {}
    for speaker, path in audio:
        segment = find_segment(path)
        file = path if segment is None else segment.recording
        try:
            status = os.stat(file)
            # Inode and device; not all file systems have an inode of each file's own.
            recording: object = (*status[1:3], status.st_size, status.st_mtime_ns)
        except OSError:
            # In a packed folder or a tar.
            recording = os.path.realpath(file)
        # A whole recording has all of its parts, and a part what equals it.
        own = ["whole"] if segment is None else [segment[1:], "a part"]
        for part in ("whole", own[0] if segment else "a part"):
            other, there = known.get(hash((recording, part)), (speaker, path))
            if other != speaker:
                raise ValueError(
                    f"{path} of {speaker!r} is the same audio as {there} of {other!r}: one "
                    "recording would be of two speakers. Leave one of the two out."
                )
        for part in own:
            known.setdefault(hash((recording, part)), (speaker, path))


def refuse_one_folder_twice(corpus: Corpus, speakers: Iterable[str]) -> None:
    """Refuse two speakers whose folders are one, by a link.

    Parameters
    ----------
    corpus : Corpus
        Theirs.
    speakers : iterable of str
        Their names.

    Raises
    ------
    ValueError
        It names both.
    """
    known: dict[str, Path] = {}
    for folder in filter(None, map(corpus.folder_of, sorted(speakers))):
        other = known.setdefault(os.path.realpath(folder), folder)
        if other != folder:
            raise ValueError(
                f"{other} and {folder} are one folder, and would be two "
                "speakers. Leave one of them out."
            )


def same_speakers(
    corpus: Corpus, speakers: Iterable[str], others: Collection[str]
) -> set[str]:
    """Select the speakers who are among others, by name or by a link to their folder.

    Names are equal that differ in spaces, or in the Unicode form of letters, alone.

    Parameters
    ----------
    corpus : Corpus
        Of the speakers.
    speakers, others : iterable and collection of str
        Their names.

    Returns
    -------
    set of str
        Of ``speakers``.

    Example
    -------
    >>> sorted(same_speakers(VoxCelebFolder(Path("wav")), ["id1", "id2"], ["id2", "id3"]))
    ['id2']
    """

    def behind(speakers: Iterable[str]) -> set[str]:
        folders = filter(None, map(corpus.folder_of, speakers))
        return set(map(os.path.realpath, folders))

    names, folders = set(map(_plain, others)), behind(others)
    return {
        speaker
        for speaker in speakers
        if names & {_plain(speaker), _plain(corpus.also_known_as(speaker))}
        or folders & behind([speaker])
    }


def held_out_speakers(
    by_speaker: dict[str, list[str]], corpus: Corpus, settings: DataSettings
) -> dict[str, list[str]]:
    """Choose the speakers who are held out for validation.

    Parameters
    ----------
    by_speaker : dict of str to list of str
        Names of files that can be used, by speaker.
    corpus : Corpus
        Theirs.
    settings : DataSettings
        The run's.

    Returns
    -------
    dict of str to list of str
        All files of each chosen speaker; empty without validation.

    Raises
    ------
    ValueError
        If there are too few speakers.
    """
    if settings.valid_trials is not None or not settings.valid_speakers:
        return {}
    speakers = sorted(by_speaker)
    if len(speakers) < FEWEST_SPEAKERS:
        raise ValueError(_too_few(speakers, corpus, settings))
    if not 2 <= settings.valid_speakers <= len(speakers) - 2:
        raise ValueError(
            f"valid_speakers is {settings.valid_speakers}, of {len(speakers)} speakers. "
            f"Give 0 (no validation) or 2 to {len(speakers) - 2} (the default is 40)."
        )
    draws = generator("held out", settings.seed)
    order = torch.randperm(len(speakers), generator=draws).tolist()
    chosen = sorted(speakers[i] for i in order[: settings.valid_speakers])
    return {speaker: by_speaker[speaker] for speaker in chosen}


def _too_few(speakers: Sequence[str], corpus: Corpus, settings: DataSettings) -> str:
    """Explain that nobody can be held out, and why there may be so few speakers."""
    named = f" ({', '.join(speakers)})" if speakers else ""
    beside = ", beside those of trial lists" if settings.trial_lists else ""
    level = ""
    if settings.train_list is None:
        level = f"Is data_folder the right level? {corpus.layout} "
    return (
        f"valid_speakers is {settings.valid_speakers}, and {len(speakers)} speaker(s) were "
        f"found in {settings.train_list or settings.data_folder}{named}{beside}: too few "
        "to hold any out, as validation takes 2 and training 2 others. "
        f"{level}valid_speakers 0 means no validation."
    )


def validation_lines(
    held_out: dict[str, list[str]], corpus: Corpus, settings: DataSettings
) -> list[str]:
    """Return the lines of the validation list: the user's own, or of held-out speakers.

    Parameters
    ----------
    held_out : dict of str to list of str
        As ``held_out_speakers`` chose them.
    corpus : Corpus
        Theirs.
    settings : DataSettings
        The run's.

    Returns
    -------
    list of str
        Lines "label path path".
    """
    if settings.valid_trials is not None:
        return _own_lines(settings.valid_trials, settings)
    if not held_out:
        return []
    draws = generator("valid trials", settings.seed)
    names = {s: _some(n, VALID_UTTERANCES, draws) for s, n in held_out.items()}
    targets = [pair for n in names.values() for pair in _target_pairs(n, corpus)]
    everyone = [(speaker, name) for speaker, n in names.items() for name in n]
    impostors = [
        (a, b) for (one, a), (other, b) in combinations(everyone, 2) if one != other
    ]
    impostors = _some(impostors, IMPOSTORS_PER_TARGET * len(targets), draws)
    lines = [joined_line("1", a, b) for a, b in targets]
    return lines + [joined_line("0", a, b) for a, b in impostors]


def _own_lines(path: str, settings: DataSettings) -> list[str]:
    """Copy the user's own list, with the names of the files that are there."""
    trials = read_trials(path)
    if trials.models:
        raise ValueError(
            f"valid_trials is {path}, whose speakers are enrolled with several utterances. "
            "Validation takes one for each side: give it in trial_lists, for score.py."
        )
    files = find_files(settings.corpus("trials_folder"), trials.utterances).names
    return [
        joined_line(str(label), files.get(a, a), files.get(b, b))
        for label, a, b in zip(
            trials.labels.tolist(), trials.enrol, trials.test, strict=True
        )
    ]


def _target_pairs(names: Sequence[str], corpus: Corpus) -> list[tuple[str, str]]:
    """Pair utterances of different sessions: within one, the channel gives them away."""
    pairs = list(combinations(names, 2))
    apart = [(a, b) for a, b in pairs if corpus.session(a) != corpus.session(b)]
    return apart or pairs


def _some(items: Sequence[Item], count: int, draws: torch.Generator) -> list[Item]:
    """Draw items, and return them in their order."""
    chosen = torch.randperm(len(items), generator=draws)[:count].sort().values
    return [items[i] for i in chosen.tolist()]
