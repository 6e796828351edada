"""Training that starts from a finished run."""

from __future__ import annotations

from pathlib import Path

from prepare import speaker_numbers

from speechbrain_rev.hparams import plain_settings
from speechbrain_rev.lobes.checkpoints import load_finished_run


def start_from(hparams):
    """Load encoder and classifier of a finished run."""
    folder = Path(hparams["pretrained_run"])
    if (record := folder / "hyperparams.yaml").is_file():
        refuse_other_classes(hparams, folder, plain_settings(record.read_text()))
    load_finished_run(hparams["modules"], folder)


def refuse_other_classes(hparams, folder, earlier):
    """Refuse a pretrained run whose classifier is of other speakers or speeds."""
    ours, theirs = hparams["save_folder"], folder / "save"
    if earlier["speeds"] != list(hparams["speeds"]):
        what = f"the speeds {earlier['speeds']}, this run {list(hparams['speeds'])}"
    elif speaker_numbers(theirs) != speaker_numbers(ours):
        what = "other speakers, or numbered differently"
    else:
        return
    raise ValueError(
        f"pretrained_run {folder} has {what}: its classifier would be wrong, and the "
        "encoder is not loaded alone. Give seed, data_folder, train_list, trial_lists, "
        f"valid_speakers, valid_trials and speeds as in {folder / 'hyperparams.yaml'}."
    )
