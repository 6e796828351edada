"""Runs with a memory_budget: their bits, their plan, and what they go on with."""

import copy
import json
import logging
import shutil

import pytest
import torch

from speechbrain_rev.compression import reference
from speechbrain_rev.planner import Plan
from speechbrain_rev.planner.compression_probe import CompressionProbe
from speechbrain_rev.training.memory_plan import in_words
from tests.recipes.runs import FEW_STEPS, arguments, assert_same_weights

#: A chunk that is searched.
SEARCHED = FEW_STEPS | {"chunk": "auto"}
#: More than the tiny encoder's step takes when it stores.
PLENTY = {"memory_budget": "1GB"}
#: Logged where a plan is made and not read.
PLANNED = "blocks are timed on cpu"


@pytest.fixture(autouse=True)
def information(caplog):
    caplog.set_level(logging.INFO, "train")


@pytest.fixture
def trained(train, data, tmp_path):
    """Train a run of a name, or go on with it."""

    def main(name, settings, **changed):
        train.main(arguments(data, tmp_path / name, **settings | changed))
        return tmp_path / name

    return main


@pytest.fixture(scope="module")
def begun(train, data, tmp_path_factory):
    """A run of one epoch with a budget for all."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    train.main(arguments(data, folder, **SEARCHED | PLENTY))
    return folder


def channels_of(folder):
    """Channels at a time in a run's checkpoints."""
    paths = folder.glob("save/CKPT*/channels.ckpt")
    return {tuple(json.loads(path.read_text())["channels"]) for path in paths}


@pytest.mark.slow
def test_a_budget_changes_memory_and_no_bit(trained, begun, caplog):
    stored = Plan.load(begun / "plan.json")
    assert set(stored.modes.values()) == {"store"}
    unused = stored.budget_bytes - stored.measured_bytes
    budget = f"{int(stored.about['memory_budget_bytes']) - unused - 20_000}B"
    planned = trained("planned", FEW_STEPS, memory_budget=budget)
    assert_same_weights(planned, begun)
    plan = Plan.load(planned / "plan.json")
    assert {"reconstruct", "recompute", "selective"} & set(plan.modes.values())
    assert plan.measured_bytes <= plan.budget_bytes < stored.measured_bytes
    assert f"memory plan: {in_words(plan)}" in caplog.messages
    # A plan_file gives the modes; where a mode is given, neither counts.
    given = {"plan_file": planned / "plan.json", "memory_budget": budget}
    kept = Plan.load(trained("second", FEW_STEPS, **given) / "plan.json")
    assert kept == plan.with_about(plan_file=str(planned / "plan.json"))


def test_auto_is_for_gpus(trained):
    with pytest.raises(ValueError, match="Give a size, as 11GB"):
        trained("run", FEW_STEPS, memory_budget="auto")


def test_a_plan_without_a_checkpoint_is_not_taken(trained, tmp_path, caplog):
    """A dry run leaves one, of other settings perhaps; nor is it when the run goes on."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("no plan")
    trained("run", FEW_STEPS)
    folder = trained("run", FEW_STEPS, number_of_epochs=2)
    assert "memory plan" not in caplog.text
    assert "plan.json is of no step that was taken here" in caplog.text
    assert (folder / "unused_plan.json").read_text() == "no plan"


@pytest.mark.slow(drawn=False)
def test_a_run_goes_on_with_its_plan_unless_the_budget_is_another(
    trained, begun, tmp_path, caplog
):
    path = shutil.copytree(begun, tmp_path / "run") / "plan.json"
    plan = Plan.load(path)
    for epochs, given in enumerate((PLENTY, {}), start=2):
        caplog.clear()
        trained("run", SEARCHED, **given, number_of_epochs=epochs)
        assert Plan.load(path) == plan
        assert f"memory plan: {in_words(plan)}" in caplog.messages
        assert ("memory plan: of this run, " in caplog.text) == (not given)
        assert PLANNED not in caplog.text
    trained("run", SEARCHED, number_of_epochs=4, memory_budget="900MB")
    assert PLANNED in caplog.text
    now = Plan.load(path)
    assert (now.about["memory_budget"], now.channels) == ("900MB", plan.channels)
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "A GPU"'))
    with pytest.raises(ValueError, match=r"made for device A GPU, and this is cpu"):
        trained("run", SEARCHED, number_of_epochs=5)
    caplog.clear()
    trained("run", SEARCHED, number_of_epochs=5, memory_budget="900MB")
    assert "made for device A GPU, and this is cpu: planned anew" in caplog.text
    assert Plan.load(path) == now


@pytest.mark.slow
@pytest.mark.parametrize("by", ["plan", "mode"])
def test_channels_are_those_of_the_first_step_whatever_plans_later(
    trained, begun, tmp_path, by
):
    """Neither another budget, a plan that was deleted nor a mode changes them."""
    folder = tmp_path / "run"
    if by == "plan":
        shutil.copytree(begun, folder)
    else:
        trained("run", SEARCHED, mode="store")
    (channels,) = channels_of(folder)
    # All channels at once is what a search tries first, and enough for a plan.
    assert (channels == (None,) * 4) == (by == "plan")
    (folder / "plan.json").unlink(missing_ok=True)
    trained("run", SEARCHED, number_of_epochs=2, memory_budget="900MB")
    assert Plan.load(folder / "plan.json").channels == list(channels)
    trained("run", SEARCHED, number_of_epochs=3, mode="recompute")
    assert channels_of(folder) == {channels}
    with pytest.raises(ValueError, match="chunk: auto, which goes on"):
        trained("run", SEARCHED, number_of_epochs=4, chunk=7000, mode="store")


def test_mode_overrides_a_budget_that_nothing_fits(trained, caplog):
    folder = trained("run", FEW_STEPS, mode="store", memory_budget="0.05MB")
    assert "mode: store overrides plan_file and memory_budget" in caplog.text
    assert not (folder / "plan.json").exists()


#: Whose first blocks take most of the memory.
WIDE = SEARCHED | {
    "arch": "resnet34",
    "blocks": "[1, 1, 1, 1]",
    "widths": "[16, 8, 8, 8]",
    "n_mels": 48,
    "chunk_samples": 7520,
    "optimizer_name": "sgd",
}


@pytest.mark.slow(drawn=False)
def test_a_limit_of_the_error_lets_plans_compress_and_is_kept(
    trained, caplog, monkeypatch
):
    monkeypatch.setattr(reference, "SLICE", 2**12)
    with pytest.raises(ValueError, match="It lacks") as error:
        trained("least", WIDE, memory_budget="0.05MB")
    budget = f"{error.value.needed_bytes - 10_000}B"
    limited = {"memory_budget": budget, "max_gradient_error": 0.05}
    folder = trained("run", WIDE, **limited)
    plan = Plan.load(folder / "plan.json")
    assert "compress" in plan.modes.values()
    assert 0 < plan.measured_gradient_error <= 0.05
    line = f"memory plan: {in_words(plan)}"
    assert line in caplog.messages
    assert "gradient error" in line
    for epochs, given in enumerate((limited, {}), start=2):
        caplog.clear()
        trained("run", WIDE, **given, number_of_epochs=epochs)
        assert Plan.load(folder / "plan.json") == plan
        assert line in caplog.messages
        assert PLANNED not in caplog.text
    # Other bounds change the error: the plan is made anew, of the weights that go on.
    caplog.clear()
    seen = []
    probed = CompressionProbe.__init__

    def probe(self, step, *args):
        seen.append(copy.deepcopy(step.module.state_dict()))
        probed(self, step, *args)

    monkeypatch.setattr(CompressionProbe, "__init__", probe)
    newest = max(folder.glob("save/CKPT*"), key=lambda path: path.stat().st_mtime)
    trained("run", WIDE, **limited, number_of_epochs=4, normalisation_error=0.02)
    assert PLANNED in caplog.text
    assert "fraction=0.02" in Plan.load(folder / "plan.json").about["bounds"]
    kept = torch.load(newest / "embedding_model.ckpt", weights_only=True)
    assert all(torch.equal(value, seen[0][name]) for name, value in kept.items())
