"""Runs: what happened in a training run's folder.

``run.json`` records what happened, as it happens: the settings, the speakers that were
trained on and held out, the augmentation, the epochs that are done, and those whose mean
the weights are. Exports, remarks on unfinished runs and refusals are made of it. It
may come from somebody else: it is data of known names and types, or refused.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from speechbrain_rev.files import fits, made_of, parse_json, refusing, write_whole
from speechbrain_rev.inference.trained import checkpoint_place, encoder_file
from speechbrain_rev.inference.untrusted import read_own, short
from speechbrain_rev.processes import process_rank

logger = logging.getLogger(__name__)

#: The record, and the settings that SpeechBrain's loader builds, in output_folder.
RECORD, HYPERPARAMS = "run.json", "hyperparams.yaml"

_MOST_BYTES = 1_000_000


@dataclass(frozen=True)
class DataCounts:
    """Sizes of the lists of a run.

    Attributes
    ----------
    utterances, speakers : int
        Of the training set.
    held_out_speakers : int
        Of validation.
    left_out : int
        Utterances of speakers of trial lists.
    """

    utterances: int
    speakers: int
    held_out_speakers: int
    left_out: int


@dataclass(frozen=True)
class Augmentation:
    """What training draws from.

    Attributes
    ----------
    speeds : tuple of float
        Of speed perturbation.
    noise, reverberation : bool
        Whether some utterances have it.
    """

    speeds: tuple[float, ...]
    noise: bool
    reverberation: bool


@dataclass(frozen=True)
class TrainingRecord:
    """What happened in a run.

    Attributes
    ----------
    settings : mapping of str to object
        The plain settings, as they were composed.
    data : DataCounts
        Of the lists.
    augmentation : Augmentation
        What training draws from.
    device : str
        Where it was trained, and by how many processes.
    versions : mapping of str to str
        Of the packages.
    epochs : int
        How many are done, as of the last one that ended.
    seconds : float
        Of these epochs, validation included, as train_log.jsonl has them.
    lr, margin : float or None
        Of the last step of these epochs, the learning rate with the batch counted in.
    averaged : tuple of int
        The epochs whose mean ``embedding_model.ckpt`` is; empty while it is not written,
        or is of an earlier end.
    """

    settings: Mapping[str, Any]
    data: DataCounts
    augmentation: Augmentation
    device: str
    versions: Mapping[str, str]
    epochs: int
    seconds: float
    lr: float | None
    margin: float | None
    averaged: tuple[int, ...]

    def is_finished(self, epochs: int) -> bool:
        """Whether the weights are the mean up to this epoch, or to a later one."""
        return bool(self.averaged) and max(self.averaged) >= epochs

    def after(self, rows: Sequence[Mapping[str, Any]]) -> TrainingRecord:
        """Complete the record by the epochs that are done.

        Parameters
        ----------
        rows : sequence of mapping
            Of train_log.jsonl, one for each of them.

        Returns
        -------
        TrainingRecord
        """
        if not rows:
            return self
        last = rows[-1]
        return replace(
            self,
            epochs=last["epoch"],
            seconds=sum(60 * row["minutes"] for row in rows),
            lr=last["lr"],
            margin=last["margin"],
        )

    def write(self, folder: Path) -> None:
        """Write the record into a run's folder, whole."""
        content = json.dumps(dataclasses.asdict(self), indent=1)
        write_whole(folder / RECORD, content + "\n")


# Settings that whoever loads or exports a run reads.
_SETTINGS: dict[str, Any] = {
    "number_of_epochs": int,
    "speeds": list[float],
    "loss": str,
    "data_folder": str | list[str],
    "train_list": str | None,
    "trial_lists": list[str],
}


def read_record(folder: str | PathLike[str]) -> TrainingRecord | None:
    """Read what happened in a run.

    Parameters
    ----------
    folder : str or path-like
        Its ``output_folder``.

    Returns
    -------
    TrainingRecord or None
        None if recipes/VoxCeleb/train.py has trained nothing there.

    Raises
    ------
    ValueError
        If ``run.json`` is anything else than training writes.

    Example
    -------
    >>> read_record(getfixture("tmp_path")) is None
    True
    """
    path = Path(folder, RECORD)
    if not path.exists():
        return None
    content = read_own(Path(folder), RECORD, _MOST_BYTES)
    with refusing(
        f"{path} is not what recipes/VoxCeleb/train.py writes",
        "Bring the file back as it was.",
    ):
        record = made_of(TrainingRecord, parse_json(content))
        for name, hint in _SETTINGS.items():
            if not fits(value := record.settings.get(name), hint):
                raise ValueError(f"{name} is {short(value)}")
        return record


def record_of(folder: str | PathLike[str]) -> TrainingRecord:
    """Read what happened in a run, which must be of this package's recipe.

    Parameters
    ----------
    folder : str or path-like
        Its ``output_folder``.

    Returns
    -------
    TrainingRecord

    Raises
    ------
    FileNotFoundError
        If it has no ``run.json``.
    ValueError
        As of ``read_record``.
    """
    record = read_record(folder)
    if record is None:
        raise FileNotFoundError(
            f"{folder} has no {RECORD}: give the output_folder of a run of "
            "recipes/VoxCeleb/train.py."
        )
    return record


def standing(folder: str | PathLike[str], weights: Path) -> str:
    """Say of which epoch weights are, where that is not the end of their run.

    Parameters
    ----------
    folder : str or path-like
        The run's ``output_folder``.
    weights : pathlib.Path
        The file, as ``encoder_file`` finds it.

    Returns
    -------
    str
        A sentence; empty for a finished run, and where nothing is recorded.
    """
    record = read_record(folder)
    if record is None:
        return ""
    epochs = record.settings["number_of_epochs"]
    if weights.parent != Path(folder):
        checkpoint = weights.parent.relative_to(folder)
        epoch, ended, step, _ = checkpoint_place(Path(folder), checkpoint)
        where = f"of epoch {epoch}" + (f" at step {step}" if not ended else "")
        return (
            f"{folder} is not finished: its weights are {where} of {epochs}, of the "
            "newest checkpoint."
        )
    if record.is_finished(epochs):
        return ""
    if not record.averaged:
        return (
            f"{folder} is not finished: it is being extended to {epochs} epochs, "
            f"{record.epochs} are done, and its weights are those of its earlier end."
        )
    return (
        f"{folder} is not finished: its weights are the mean of epochs up to "
        f"{max(record.averaged)} of {epochs}."
    )


def warn_unfinished(source: str | PathLike[str]) -> None:
    """Log a warning where the weights of a run are not those of its end.

    Parameters
    ----------
    source : str or path-like
        A run, or whatever else has weights.
    """
    folder = Path(source)
    if (
        not process_rank()
        and folder.is_dir()
        and (message := standing(folder, encoder_file(folder)))
    ):
        logger.warning(message)
