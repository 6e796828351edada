"""What the lists of a training depend on, and what was listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speechbrain_rev.data import Corpus, open_corpus
from speechbrain_rev.whole_files import check_regular, digest_of

_TREATMENT = "bad_files", "check_audio", "any_extension", "outside_files"


@dataclass(frozen=True)
class Settings:
    """What the lists depend on.

    Attributes
    ----------
    data_folder : str
        Training speech.
    train_list : str or None
        A file of lines "speaker path"; None for all speakers found.
    trial_lists : tuple of str
        Lists to be evaluated on: their speakers are left out of the training.
    trials_folder : str or None
        Where the audio of the trial lists is; None for data_folder. It is looked for
        there, but changes no list.
    valid_speakers : int
        How many training speakers are held out for validation.
    valid_trials : str or None
        A validation list of the user's own, instead of held-out speakers.
    sample_rate : int
        Rate that the files must have, Hz.
    seed : int
        Seed of the choice of held-out speakers and trials.
    bad_files : {"refuse", "drop"}
        What is done if files cannot be used.
    check_audio : bool
        Whether files are decoded as a whole, and not their headers only.
    any_extension : bool
        Whether lists may say .wav where files are .flac, or the reverse.
    outside_files : bool
        Whether names and links may lead out of data_folder and trials_folder.
    """

    data_folder: str
    train_list: str | None = None
    trial_lists: tuple[str, ...] = ()
    trials_folder: str | None = None
    valid_speakers: int = 0
    valid_trials: str | None = None
    sample_rate: int = 16000
    seed: int = 0
    bad_files: str = "refuse"
    check_audio: bool = False
    any_extension: bool = False
    outside_files: bool = False

    @classmethod
    def of(cls, knobs: Mapping[str, Any]) -> Settings:
        """Select from a training's settings what the lists depend on."""
        # A complete file of an earlier version has not all of them.
        chosen = {n: knobs[n] for n in cls.__dataclass_fields__ if n in knobs}
        return cls(**{**chosen, "trial_lists": tuple(chosen["trial_lists"])})

    def treatment(self) -> dict[str, object]:
        """Return how files are looked at, which is heeded before training begins."""
        return {name: getattr(self, name) for name in _TREATMENT}

    def corpus(self) -> Corpus:
        """Open the training speech."""
        return open_corpus(
            self.data_folder,
            any_extension=self.any_extension,
            outside_files=self.outside_files,
        )

    def trials_corpus(self) -> Corpus:
        """Open the speech of the trial lists."""
        return open_corpus(
            self.trials_folder or self.data_folder,
            "trials_folder",
            any_extension=self.any_extension,
            outside_files=self.outside_files,
        )

    def fingerprint(self) -> dict[str, object]:
        """Return the settings and a digest of each list's content."""
        given = asdict(self)
        for name in ("trials_folder", *_TREATMENT):
            del given[name]
        for name in ("train_list", "valid_trials", "trial_lists"):
            lists = given[name] if name == "trial_lists" else paths_given(given[name])
            given[name] = {
                str(path): digest_of(existing(path), "blake2b") for path in lists
            }
        return given


@dataclass(frozen=True)
class Prepared:
    """What was prepared.

    Attributes
    ----------
    utterances, speakers : int
        Size of the training set.
    left_out : int
        Utterances left out because their speaker is in a trial list.
    held_out : int
        Utterances of speakers held out for validation.
    valid_trials : int
        Number of validation trials, 0 for none.
    dropped : int
        Files that could not be used.
    single : int
        Training speakers with one utterance only.
    seen : int or None
        Files of audio in the data folder or the training list, each of which is in one of
        the counts; None where they were not counted.
    passed_over : int
        Of these, those beside the folder of the speakers' folders.
    """

    utterances: int
    speakers: int
    left_out: int
    held_out: int
    valid_trials: int
    dropped: int = 0
    single: int = 0
    seen: int | None = None
    passed_over: int = 0

    def accounts_for_all(self) -> bool:
        """Return whether each file that was seen is in one of the counts."""
        used = self.utterances + self.held_out
        without = self.left_out + self.dropped + self.passed_over
        return self.seen in (None, used + without)

    def in_words(self) -> str:
        """Say it."""
        seen = "" if self.seen is None else f"Seen: {self.seen} files of audio. "
        beside = ""
        if self.passed_over:
            beside = f"Passed over beside the speakers' folders: {self.passed_over}. "
        return (
            f"{seen}Training: {self.utterances} utterances of {self.speakers} speakers. "
            f"Validation: {self.valid_trials} trials, {self.held_out} utterances held "
            f"out. Left out because their speakers are in trial lists: {self.left_out}. "
            f"Dropped because they cannot be used: {self.dropped}. {beside}Speakers with "
            f"one utterance only: {self.single}."
        )


def paths_given(path: str | None) -> list[str]:
    """Give a list of the one path that there may be."""
    return [] if path is None else [path]


def existing(path: str | Path) -> Path:
    """Give the path of a list; ValueError if there is none, or it is no regular file."""
    check_regular(path)
    if not Path(path).is_file():
        raise ValueError(f"The list {path} does not exist.")
    return Path(path)
