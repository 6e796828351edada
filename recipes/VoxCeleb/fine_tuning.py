"""Training that starts from a finished run."""

from __future__ import annotations

from pathlib import Path

from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.preparation import LABELS
from speechbrain_rev.hparams import plain_settings
from speechbrain_rev.lobes.checkpoints import load_finished_run


def refuse_own_folder(settings):
    """Refuse a run that would write into the finished one it starts from."""
    ours, theirs = settings["output_folder"], settings["pretrained_run"]
    if theirs is None:
        return
    if Path(ours).resolve().is_relative_to(Path(theirs).resolve()):
        raise ValueError(
            f"output_folder {ours} is pretrained_run {theirs} or in it: the settings and "
            "checkpoints of the finished run would be overwritten. Give another "
            "output_folder, and pretrained_run without a slash at its end."
        )


def start_from(hparams):
    """Load encoder and classifier of a finished run."""
    folder = Path(hparams["pretrained_run"])
    record = folder / "hyperparams.yaml"
    if not record.is_file():
        raise ValueError(
            f"pretrained_run is {folder}, which lacks hyperparams.yaml: give the "
            "output_folder of a finished run."
        )
    earlier = plain_settings(record.read_text(encoding="utf-8"))
    if "speeds" not in earlier or not (folder / "save" / LABELS).is_file():
        raise ValueError(
            f"pretrained_run is {folder}, which has no classifier and tells of no training "
            "speakers, as a model that was exported: give the output_folder of a finished "
            "run."
        )
    narrowed_from = speeds_to_narrow(earlier["speeds"], list(hparams["speeds"]), record)
    ours = read_labels(Path(hparams["save_folder"], LABELS))
    if read_labels(folder / "save" / LABELS) != ours:
        raise other_classes(record, "other speakers, or numbered differently")
    load_finished_run(hparams["modules"], folder, narrowed_from=narrowed_from)


def speeds_to_narrow(theirs, ours, record):
    """Count the speeds of a classifier of which 1.0 is kept; None if all are."""
    if theirs == ours:
        return None
    if ours == [1.0] and 1.0 in theirs:
        return len(theirs)
    raise other_classes(record, f"the speeds {theirs}, this run {ours}")


def other_classes(record, what):
    """Say why the classifier of a pretrained run cannot be taken."""
    return ValueError(
        f"pretrained_run {record.parent} has {what}: its classifier would be wrong, and "
        "the encoder is not loaded alone. Give seed, data_folder, train_list, "
        f"trial_lists, valid_speakers, valid_trials and speeds as in {record}; speeds may "
        "also be [1.0], for which the classes of other speeds are dropped."
    )
