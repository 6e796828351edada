"""Training in mode "compress"."""

import json
import shutil

import pytest
import torch

from tests.corpus import write_corpus
from tests.recipes.runs import arguments, weights

SHORT = {
    "arch": "resnet34",
    "mode": "compress",
    "widths": "[8, 8, 8, 8]",
    "blocks": "[1, 1, 1, 1]",
    "warmup_epochs": "0.0",
    "margin_start_epoch": 0,
    "margin_end_epoch": 0,
    "average_checkpoints": 1,
    "valid_speakers": 0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def compressed(train, data, tmp_path_factory):
    """A run of one epoch."""
    folder = tmp_path_factory.mktemp("compressed")
    train.main(arguments(data, folder, **SHORT, number_of_epochs=1))
    return folder


def logged(folder):
    return [json.loads(line) for line in (folder / "train_log.jsonl").open()]


def kept_rule(folder):
    """What the newest checkpoint holds of the convolutions' rule."""
    newest = max((folder / "save").glob("CKPT*/compression.ckpt"))
    return torch.load(newest, weights_only=True)["processes"][0]["convolution"]


def test_bounds_and_ratios_are_logged_and_bounds_go_on_after_a_stop(
    train, data, compressed, tmp_path
):
    folder = shutil.copytree(compressed, tmp_path / "run")
    (first,), steps = logged(folder), kept_rule(folder)["steps"]
    assert first["compression_ratio"] > 2
    assert first["error_bounds"].keys() == first["compression_ratios"].keys()
    # After a step there is a momentum, and a bound for each convolution.
    assert {"stages.0.blocks.0.conv1", "stages.1.blocks.0.conv2"} <= kept_rule(folder)[
        "bounds"
    ].keys()
    train.main(arguments(data, folder, **SHORT, number_of_epochs=2))
    assert kept_rule(folder)["steps"] == 2 * steps > 0


def test_training_goes_where_storing_goes(train, data, compressed, tmp_path):
    settings = SHORT | {"mode": "store", "number_of_epochs": 1}
    train.main(arguments(data, tmp_path, **settings))
    (ours,), (stored,) = logged(compressed), logged(tmp_path)
    assert ours["train_loss"] == pytest.approx(stored["train_loss"], rel=0.05)
    found = weights(compressed)
    expected = weights(tmp_path).items()
    assert any(not torch.equal(found[key], value) for key, value in expected)
