import copy
import json
import logging
import shutil

import pytest
import torch

from speechbrain_rev.catalog.plans import in_words
from speechbrain_rev.compression import reference
from speechbrain_rev.planner import Plan
from speechbrain_rev.planner.probe import CompressionProbe
from tests.corpus import write_corpus
from tests.recipes.runs import SHORT, arguments, weights

FEW_STEPS = SHORT | {"steps_per_epoch": 3}

#: What the tiny encoder's step makes when it stores, and what stays, are below this.
PLENTY = "1GB"

#: What the recipe says where it plans and does not read a plan.
PLANNED = "times of blocks on cpu"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(autouse=True)
def information(caplog):
    caplog.set_level(logging.INFO, "train")


def trained(train, data, folder, **changed):
    """One epoch without validation."""
    folder.mkdir()
    train.main(arguments(data, folder, **FEW_STEPS, **changed))
    return weights(folder)


@pytest.fixture(scope="module")
def begun(train, data, tmp_path_factory):
    """A run of one epoch with a budget for all."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    trained(train, data, folder, memory_budget=PLENTY)
    return folder


def channels_of(folder):
    """Channels at a time in a run's checkpoints."""
    paths = folder.glob("save/CKPT*/channels.ckpt")
    return {tuple(json.loads(path.read_text())) for path in paths}


def least(train, data, folder):
    """The least budget, as the error says it."""
    with pytest.raises(
        ValueError, match=r"It lacks .*What helps: another arch"
    ) as error:
        trained(train, data, folder, memory_budget="0.05MB")
    return error.value.needed_bytes


def test_a_budget_changes_memory_and_no_bit(train, data, tmp_path, caplog):
    stored = trained(train, data, tmp_path / "stored", mode="store")
    budget = f"{least(train, data, tmp_path / 'least') + 20_000}B"
    planned = trained(train, data, tmp_path / "planned", memory_budget=budget)
    assert all(torch.equal(planned[key], value) for key, value in stored.items())
    plan = Plan.load(tmp_path / "planned" / "plan.json")
    assert {"reconstruct", "recompute"} & set(plan.modes.values())
    assert plan.measured_bytes <= plan.budget_bytes
    assert f"memory plan: {in_words(plan)}" in caplog.messages


@pytest.mark.slow
def test_a_plan_is_kept_on_resume_and_made_anew_for_another_budget(
    train, data, begun, tmp_path, caplog
):
    folder = shutil.copytree(begun, tmp_path / "run")
    kept = (folder / "plan.json").read_text()
    again = arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2})
    caplog.clear()
    train.main([*again, f"--memory_budget={PLENTY}"])
    assert (folder / "plan.json").read_text() == kept
    assert "memory plan: " in caplog.text
    assert PLANNED not in caplog.text
    again = arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 3})
    train.main([*again, "--memory_budget=900MB"])
    assert PLANNED in caplog.text
    now = json.loads((folder / "plan.json").read_text())
    assert now["about"]["memory_budget"] == "900MB"
    assert now["channels"] == json.loads(kept)["channels"]


@pytest.mark.slow
def test_a_run_that_goes_on_without_its_budget_keeps_its_plan(
    train, data, begun, tmp_path, caplog
):
    folder = shutil.copytree(begun, tmp_path / "run")
    plan = Plan.load(folder / "plan.json")
    caplog.clear()
    train.main(arguments(data, folder, **FEW_STEPS | {"number_of_epochs": 2}))
    assert "memory plan: of this run, " in caplog.text
    assert f"memory plan: {in_words(plan)}" in caplog.messages
    assert Plan.load(folder / "plan.json") == plan


def test_a_plan_without_a_checkpoint_is_not_taken_unless_it_is_asked_for(
    train, data, tmp_path, caplog
):
    """A dry run leaves one, and tells nothing of the training that follows."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text("no plan")
    train.main([*arguments(data, folder, **FEW_STEPS), "--dry_run"])
    assert "memory plan" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("by", ["plan", "mode"])
def test_channels_are_those_of_the_first_step_whatever_plans_later(
    train, data, begun, tmp_path, by
):
    """Neither another budget, a plan that was deleted nor a mode changes them."""
    folder = tmp_path / "run"
    if by == "plan":
        shutil.copytree(begun, folder)
    else:
        trained(train, data, folder, mode="store")
    (channels,) = channels_of(folder)
    # All channels at once is what a search tries first, and enough for a plan.
    assert (channels == (None,) * 4) == (by == "plan")
    (folder / "plan.json").unlink(missing_ok=True)
    longer = FEW_STEPS | {"number_of_epochs": 2}
    train.main(arguments(data, folder, **longer, memory_budget="900MB"))
    assert Plan.load(folder / "plan.json").channels == list(channels)
    longer = FEW_STEPS | {"number_of_epochs": 3}
    train.main(arguments(data, folder, **longer, mode="recompute"))
    assert channels_of(folder) == {channels}
    longer = FEW_STEPS | {"number_of_epochs": 4}
    with pytest.raises(ValueError, match="chunk: auto, which goes on"):
        train.main(arguments(data, folder, **longer, chunk=7000, mode="store"))


@pytest.mark.slow
def test_a_plan_of_another_card_is_refused(train, data, begun, tmp_path):
    folder = shutil.copytree(begun, tmp_path / "run")
    path = folder / "plan.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "A card"'))
    longer = FEW_STEPS | {"number_of_epochs": 2}
    with pytest.raises(ValueError, match=r"made for device A card, and this is cpu"):
        train.main(arguments(data, folder, **longer, memory_budget=PLENTY))


@pytest.mark.slow
def test_a_plan_file_gives_the_modes_and_mode_goes_before_both(
    train, data, begun, tmp_path
):
    given = {"plan_file": begun / "plan.json", "memory_budget": PLENTY}
    trained(train, data, tmp_path / "second", **given)
    plan = Plan.load(begun / "plan.json")
    kept = Plan.load(tmp_path / "second" / "plan.json")
    assert kept == plan.with_about(plan_file=str(begun / "plan.json"))
    trained(train, data, tmp_path / "third", mode="store", memory_budget="0.05MB")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("auto", "Give a size, as 11GB"),
        ("11", r"takes a size such as 11GB, .*, not 11\."),
    ],
)
def test_what_is_no_budget_is_refused(train, data, tmp_path, budget, message):
    with pytest.raises(ValueError, match=message):
        trained(train, data, tmp_path / "run", memory_budget=budget)
    # What is no budget is said before data is prepared.
    assert (tmp_path / "run" / "save").exists() == (budget == "auto")


#: Whose first blocks take most of the memory.
WIDE = {
    "arch": "resnet34",
    "blocks": "[1, 1, 1, 1]",
    "widths": "[16, 8, 8, 8]",
    "n_mels": 48,
    "chunk_samples": 7520,
    "optimizer_name": "sgd",
}


@pytest.mark.slow
def test_a_limit_of_the_error_lets_plans_compress_and_is_kept(
    train, data, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(reference, "SLICE", 2**12)
    with pytest.raises(ValueError, match="It lacks") as error:
        trained(train, data, tmp_path / "least", memory_budget="0.05MB", **WIDE)
    budget = f"{error.value.needed_bytes - 10_000}B"
    limited = {"memory_budget": budget, "max_gradient_error": 0.05}
    folder = tmp_path / "run"
    trained(train, data, folder, **limited, **WIDE)
    plan = Plan.load(folder / "plan.json")
    assert "compress" in plan.modes.values()
    assert 0 < plan.measured_gradient_error <= 0.05
    said = f"memory plan: {in_words(plan)}"
    assert said in caplog.messages
    assert "gradient error" in said
    longer = FEW_STEPS | {"number_of_epochs": 2} | WIDE
    for given in (limited, {}):
        caplog.clear()
        train.main(arguments(data, folder, **longer, **given))
        assert Plan.load(folder / "plan.json") == plan
        assert said in caplog.messages
        assert PLANNED not in caplog.text
        longer["number_of_epochs"] += 1
    # Other bounds put gradients off by another error: the plan is made anew, of the
    # weights that the training goes on with.
    caplog.clear()
    seen = []
    probed = CompressionProbe.__init__

    def probe(self, step, *args):
        seen.append(copy.deepcopy(step.module.state_dict()))
        probed(self, step, *args)

    monkeypatch.setattr(CompressionProbe, "__init__", probe)
    newest = max(folder.glob("save/CKPT*"), key=lambda path: path.stat().st_mtime)
    train.main(arguments(data, folder, **longer, **limited, normalisation_error=0.02))
    assert PLANNED in caplog.text
    assert "fraction=0.02" in Plan.load(folder / "plan.json").about["bounds"]
    kept = torch.load(newest / "embedding_model.ckpt", weights_only=True)
    assert all(torch.equal(value, seen[0][name]) for name, value in kept.items())


def test_a_limit_of_the_error_without_a_budget_is_refused(train, data, tmp_path):
    with pytest.raises(
        ValueError, match=r"max_gradient_error is 0\.05, .* is null\. Give"
    ):
        trained(train, data, tmp_path / "run", max_gradient_error=0.05)
