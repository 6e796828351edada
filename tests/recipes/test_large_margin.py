"""Large-margin fine-tuning from a finished run, planned for memory."""

import copy

import pytest
import torch

from speechbrain_rev.hparams import plain_settings
from speechbrain_rev.planner import Plan
from tests.corpus import write_corpus
from tests.recipes.runs import HPARAMS, TINY, arguments, log, recipe, weights

#: The finished run has 3 speeds and 4 speakers.
SPEEDS, SPEAKERS = 3, 4
#: What the regime leaves to the one who gives the command, and a smaller chunk.
SIZES = (
    *("arch", "widths", "blocks", "n_mels", "embedding_dim", "chunk_samples"),
    *("batch_size", "valid_speakers", "num_workers"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def finished(train, data, tmp_path):
    folder = tmp_path / "finished"
    train.main(arguments(data, folder, steps_per_epoch=2))
    return folder


def large_margin(data, finished, budget):
    settings = {key: TINY[key] for key in SIZES} | {
        "data_folder": data,
        "pretrained_run": finished,
        "memory_budget": budget,
    }
    options = [f"--{key}={value}" for key, value in settings.items()]
    return [str(HPARAMS / "large_margin.yaml"), *options, "--device=cpu"]


@pytest.mark.slow
def test_a_large_margin_run_starts_with_true_speakers_and_a_mixed_plan(
    train, data, finished, tmp_path, monkeypatch
):
    def remember_start(self, batch, _fit=train.SpeakerBrain.fit_batch):
        if not start:
            start.update(copy.deepcopy(self.modules.state_dict()))
        return _fit(self, batch)

    start = {}
    with pytest.raises(ValueError, match="It lacks") as error:
        train.main(large_margin(data, finished, "0.05MB"))
    budget = f"{(error.value.needed_bytes + 20_000) / 1e6:.6f}MB"
    monkeypatch.setattr(train.SpeakerBrain, "fit_batch", remember_start)
    train.main(large_margin(data, finished, budget))
    folder = tmp_path / "finished_large_margin"

    newest = max((finished / "save").glob("CKPT*/classifier.ckpt"))
    directions = torch.load(newest, weights_only=True)["weight"]
    assert len(directions) == SPEEDS * SPEAKERS
    assert torch.equal(start["classifier.weight"], directions[:SPEAKERS])
    for name, value in weights(finished).items():
        assert torch.equal(start[f"embedding_model.{name}"], value), name

    plan = Plan.load(folder / "plan.json")
    assert plan.measured_bytes <= plan.budget_bytes
    assert len(set(plan.modes.values())) > 1

    epochs = log(folder)
    assert [line["epoch"] for line in epochs] == [1, 2, 3, 4, 5]
    assert {line["margin"] for line in epochs} == {0.5}
    settings = plain_settings((folder / "hyperparams.yaml").read_text())
    assert settings["out_n_neurons"] == SPEAKERS
    last = max((folder / "save").glob("CKPT*/embedding_model.ckpt"))
    expected = torch.load(last, weights_only=True)
    found = weights(folder)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(found["fc.weight"], start["embedding_model.fc.weight"])


@pytest.mark.parametrize(
    ("theirs", "ours", "narrowed_from"),
    [
        ([1.0, 0.9, 1.1], [1.0, 0.9, 1.1], None),
        ([1.0], [1.0], None),
        ([1.0, 0.9, 1.1], [1.0], 3),
        ([0.9, 1.0], [1.0], 2),
    ],
)
def test_equal_speeds_keep_all_classes_and_speed_one_its_own(
    tmp_path, theirs, ours, narrowed_from
):
    fine_tuning = recipe("fine_tuning")
    assert fine_tuning.speeds_to_narrow(theirs, ours, tmp_path) == narrowed_from


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ([1.0], [1.0, 0.9, 1.1]),
        ([1.0, 0.9, 1.1], [1.0, 0.9]),
        ([1.0, 0.9, 1.1], [0.9]),
        ([0.9, 1.1], [1.0]),
        ([1.0, 0.9], [0.9, 1.0]),
    ],
)
def test_other_speeds_are_refused_with_what_may_be_given(tmp_path, theirs, ours):
    with pytest.raises(ValueError, match=r"has the speeds \[.* may also be \[1\.0\]"):
        recipe("fine_tuning").speeds_to_narrow(theirs, ours, tmp_path / "settings")


def test_a_run_without_its_settings_is_refused(tmp_path):
    hparams = {"pretrained_run": str(tmp_path), "speeds": [1.0]}
    with pytest.raises(ValueError, match="lacks hyperparams"):
        recipe("fine_tuning").start_from(hparams)


@pytest.mark.parametrize("settings", ["arch: revnet57\n", "speeds: [1.0]\n"])
def test_a_model_without_its_training_is_refused(tmp_path, settings):
    """An exported one has neither speeds nor speakers."""
    (tmp_path / "hyperparams.yaml").write_text(settings)
    hparams = {"pretrained_run": str(tmp_path), "speeds": [1.0]}
    with pytest.raises(
        ValueError, match="a model that was exported: give the output_f"
    ):
        recipe("fine_tuning").start_from(hparams)


def test_a_finished_run_is_not_overwritten_by_what_starts_from_it(
    train, data, tmp_path
):
    (tmp_path / "run").mkdir()
    record = tmp_path / "run" / "hyperparams.yaml"
    record.write_text("speeds: [1.0]\n")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    argv = arguments(data, tmp_path / "run", pretrained_run=tmp_path / "link")
    with pytest.raises(ValueError, match="Give another output_folder"):
        train.main(argv)
    assert record.read_text() == "speeds: [1.0]\n"
