"""Starting from a finished run: its encoder and classifier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.preparation import LABELS
from speechbrain_rev.heads import HEADS, head_of
from speechbrain_rev.inference.runs import RECORD, WEIGHTS, read_record
from speechbrain_rev.inference.trained import read_weights
from speechbrain_rev.lobes.checkpointer import load_finished_run


def refuse_own_folder(settings: Mapping[str, Any]) -> None:
    """Refuse a run that would write into the finished one it starts from.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If output_folder is pretrained_run or a folder in it.
    """
    ours, theirs = settings["output_folder"], settings["pretrained_run"]
    if theirs is None:
        return
    if Path(ours).resolve().is_relative_to(Path(theirs).resolve()):
        raise ValueError(
            f"output_folder {ours} is pretrained_run {theirs} or in it: the settings and "
            "checkpoints of the finished run would be overwritten. Give another "
            "output_folder, and pretrained_run without a slash at its end."
        )


def start_from(settings: Mapping[str, Any]) -> None:
    """Load encoder and classifier of a finished run.

    A run at the recorded speed alone takes the classes of that speed from a run that had
    more.

    Parameters
    ----------
    settings : mapping
        The run's settings with its ``modules``; its lists are in save_folder.

    Raises
    ------
    ValueError
        If pretrained_run is no finished run, or of other speakers, speeds or shapes, or
        of another pooling or head.
    """
    folder = Path(settings["pretrained_run"])
    record = read_record(folder)
    if record is None or not (folder / "save" / LABELS).is_file():
        raise ValueError(
            f"pretrained_run is {folder}, which has no record of a run, or no list of its "
            "training speakers: give the output_folder of a finished run."
        )
    run = record.settings
    pooled, pooling = run["pooling"], settings["pooling"]
    if pooled != pooling:
        raise ValueError(
            f"pretrained_run {folder} has the pooling {pooled}, this run {pooling}: its "
            f"embeddings would be other ones. Give pooling: {pooled}, or the output_folder "
            f"of a run with {pooling}."
        )
    heads = [head_of(each["loss"]).name for each in (run, settings)]
    if heads[0] != heads[1]:
        raise ValueError(
            f"pretrained_run {folder} has a classifier of head {heads[0]}, and loss "
            f"{settings['loss']} takes one of {heads[1]}. Give a loss of head {heads[0]}: "
            f"{', '.join(HEADS[heads[0]].losses)}."
        )
    theirs, ours = run["speeds"], list(settings["speeds"])
    if theirs != ours and not (ours == [1.0] and 1.0 in theirs):
        raise _other_classes(folder, f"the speeds {theirs}, this run {ours}")
    if read_labels(folder / "save" / LABELS) != read_labels(
        Path(settings["save_folder"], LABELS)
    ):
        raise _other_classes(folder, "other speakers, or numbered differently")
    early = (folder / WEIGHTS).is_file() and read_weights(folder / WEIGHTS).standing
    if early:
        raise ValueError(
            f"pretrained_run: {early} Its classifier would be of another epoch. Go on with "
            "it to its end, or give the output_folder of a finished run."
        )
    narrowed_from = None if theirs == ours else len(theirs)
    load_finished_run(settings["modules"], folder, narrowed_from=narrowed_from)


def _other_classes(folder: Path, difference: str) -> ValueError:
    return ValueError(
        f"pretrained_run {folder} has {difference}: its classifier would be wrong, "
        "and the encoder is not loaded alone. Give seed, data_folder, train_list, "
        f"trial_lists, valid_speakers, valid_trials and speeds as in {folder / RECORD}; speeds may "
        "also be [1.0], for which the classes of other speeds are dropped."
    )
