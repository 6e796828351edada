"""Runs: what happened in a training run's folder.

``run.json`` records what happened, as it happens: the settings, the speakers that were
trained on and held out, the augmentation, the epochs that are done, those whose mean the
weights are, and what was otherwise in earlier epochs. Exports, remarks on unfinished runs
and refusals are made of it. It may come from somebody else: it is data of known names and
types, or refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import METAFNAME

from speechbrain_rev.files import fits, made_of, parse_json, refusing, write_whole
from speechbrain_rev.inference.untrusted import read_own, short
from speechbrain_rev.lobes.checkpointer import place_in_run, run_in

#: In output_folder: the record, the weights of the run's end, and the settings that
#: SpeechBrain's loader builds.
RECORD, WEIGHTS = "run.json", "embedding_model.ckpt"
HYPERPARAMS = "hyperparams.yaml"

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
class FinalWeights:
    """What ``embedding_model.ckpt`` is, and how its training ended.

    Attributes
    ----------
    epochs : tuple of int
        Those whose mean it is.
    fingerprint : str
        As of ``fingerprint_of``.
    lr, margin : float or None
        Of the last step of these epochs.
    seconds : float
        Of all epochs up to there.
    """

    epochs: tuple[int, ...]
    fingerprint: str
    lr: float | None
    margin: float | None
    seconds: float


@dataclass(frozen=True)
class EarlierEpochs:
    """Epochs of a run that were trained otherwise than the later ones.

    Attributes
    ----------
    epochs : float
        How many from the beginning of the run, with the part of one that was begun.
    values : mapping of str to object
        Earlier values of what then changed, by the names of settings, augmentation,
        packages and ``device``.
    """

    epochs: float
    values: Mapping[str, Any]


@dataclass(frozen=True)
class TrainingRecord:
    """What happened in a run.

    Attributes
    ----------
    run : str
        Names the run; its checkpoints have the name, too.
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
    weights : FinalWeights or None
        ``embedding_model.ckpt``; of an earlier end while the run is extended. None before
        it is written, and while it is.
    earlier : tuple of EarlierEpochs
        In order.
    """

    run: str
    settings: Mapping[str, Any]
    data: DataCounts
    augmentation: Augmentation
    device: str
    versions: Mapping[str, str]
    epochs: int
    seconds: float
    lr: float | None
    margin: float | None
    weights: FinalWeights | None
    earlier: tuple[EarlierEpochs, ...]

    def is_finished(self, epochs: int) -> bool:
        """Whether the weights are the mean up to this epoch, or to a later one."""
        return self.weights is not None and max(self.weights.epochs) >= epochs

    def conditions(self) -> dict[str, Any]:
        """Return by name what a resumed run may have otherwise."""
        conditions = {"device": self.device, **self.versions, **self.settings}
        return {**conditions, **dataclasses.asdict(self.augmentation)}

    def following(self, before: TrainingRecord, epochs: float) -> TrainingRecord:
        """Complete the record by that of the run as it was before it was resumed.

        Parameters
        ----------
        before : TrainingRecord
            In the run's folder.
        epochs : float
            How many were trained until then.

        Returns
        -------
        TrainingRecord
        """
        now = self.conditions()
        changed = {
            name: value
            for name, value in before.conditions().items()
            if name in now and value != now[name]
        }
        earlier = before.earlier
        if changed and epochs:
            earlier = (*earlier, EarlierEpochs(epochs, changed))
        return replace(self, weights=before.weights, earlier=earlier)

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


# Settings that whoever loads, exports or resumes a run reads.
_SETTINGS: dict[str, Any] = {
    "output_folder": str,
    "save_folder": str,
    "average_checkpoints": int,
    "batch_size": int,
    "lr": float,
    "final_lr": float,
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


def standing(weights: Path, fingerprint: str) -> str:
    """Return of which epoch weights are, where that is not the end of their run.

    Parameters
    ----------
    weights : pathlib.Path
        The file: ``embedding_model.ckpt`` of a run, or one of a checkpoint.
    fingerprint : str
        Of its weights.

    Returns
    -------
    str
        A sentence; empty for a finished run, and where nothing is recorded.

    Raises
    ------
    ValueError
        If the run records other weights, or the checkpoint is another run's.
    """
    checkpoint = weights.parent
    in_checkpoint = (checkpoint / METAFNAME).exists()
    folders = [checkpoint.parent, checkpoint.parent.parent]
    if not in_checkpoint:
        folders = [weights.parent] if weights.name == WEIGHTS else []
    folder = next((each for each in folders if (each / RECORD).exists()), None)
    record = None if folder is None else read_record(folder)
    if record is None:
        return ""
    epochs, final = record.settings["number_of_epochs"], record.weights
    if in_checkpoint:
        if run_in(checkpoint) not in (record.run, None):
            raise ValueError(another_run(checkpoint, folder))
        epoch, ended, step, _ = place_in_run(checkpoint)
        where = f"of epoch {epoch}" + (f" at step {step}" if not ended else "")
        if record.is_finished(epochs):
            return (
                f"{folder} lacks {WEIGHTS}, which the same command of training writes "
                f"again: these weights are {where} alone."
            )
        return (
            f"{folder} is not finished: its weights are {where} of {epochs}, of the "
            "newest checkpoint."
        )
    if final is None:
        return (
            f"{folder} is not finished: {record.epochs} of {epochs} epochs are done, and "
            "its weights are of an earlier end, or their writing was interrupted. The same "
            "command of training completes it."
        )
    if final.fingerprint != fingerprint:
        raise ValueError(
            f"{weights} has other weights than the run in {folder} wrote, by its {RECORD}. "
            "Bring the file back, or delete it: the same command of training writes it "
            "again."
        )
    if record.is_finished(epochs):
        return ""
    return (
        f"{folder} is not finished: it is being extended to {epochs} epochs, "
        f"{record.epochs} are done, and its weights are those of an earlier end, the mean of "
        f"epochs up to {max(final.epochs)}."
    )


def another_run(checkpoint: Path, folder: str | PathLike[str] | None) -> str:
    """Return the refusal of a checkpoint that another run has written."""
    return (
        f"{checkpoint} is a checkpoint of another run than that in {folder}. Bring back the "
        "checkpoints of this one, or give the folder of the other."
    )
