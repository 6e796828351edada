"""Trainings of the study on a CUDA device: equal weights where modes claim them."""

from pathlib import Path

import pytest
import torch

from speechbrain_rev.inference.run_folder import read_weights
from tests.recipes.study import study
from tests.recipes.tiny_study import recipe_settings, tiny_size, write_data

HPARAMS = Path(__file__).parents[2] / "hparams" / "minivox.yaml"
MODES = ("store", "reconstruct")


def weights_in_two_modes(folder: Path, device: str) -> set[str]:
    """Train and score in two modes, and hash the weights at the end."""
    trainings, conditions = study("running.trainings"), study("design.conditions")
    settings = recipe_settings(*write_data(folder), device)
    runs = [
        trainings.Run(
            conditions.Condition(mode, "revnet46", {"mode": mode}), 1, folder / mode
        )
        for mode in MODES
    ]
    trainings.train_all(runs, settings, tiny_size(device), HPARAMS, jobs=1)
    return {read_weights(run.folder).fingerprint for run in runs}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_trainings_on_a_card_end_with_equal_weights_in_two_modes(tmp_path):
    assert len(weights_in_two_modes(tmp_path, "cuda")) == 1


@pytest.mark.slow
def test_trainings_on_the_cpu_end_with_equal_weights_in_two_modes(tmp_path):
    assert len(weights_in_two_modes(tmp_path, "cpu")) == 1
