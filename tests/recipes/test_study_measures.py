"""What a training step of a run takes, measured on trained runs."""

import json
import shutil

import pytest
import torch

from speechbrain_rev.planner import Infeasible, Plan, plan_step
from tests.recipes.study import contents, copy_with, study, trained_run

budget, measures = study("measurements.budget"), study("measurements.steps")
rebuilt = study("measurements.rebuilt")

# Each file trains its runs first.
pytestmark = pytest.mark.slow


def measure(runs, repeats=1):
    ways = {name: measures.Way(folder) for name, folder in runs.items()}
    return measures.measure(ways, "cpu", repeats=repeats)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("run"))[0]


@pytest.fixture(scope="module")
def conditions(run, tmp_path_factory):
    """The run, and what it would be in other modes."""
    folder = tmp_path_factory.mktemp("conditions")
    store = copy_with(run, folder / "store", "mode: null", "mode: store")
    planned = shutil.copytree(run, folder / "plan")
    encoder = rebuilt.Rebuilt.of(run, "cpu").encoder
    modes = dict.fromkeys(encoder.block_modes(), "recompute")
    modes[list(modes)[-1]] = "reconstruct"
    plan = Plan(modes, tuple(encoder.channels), 10**9, 0, 0, 0.0, {})
    plan.save(planned / "plan.json")
    return {"reconstruct": run, "store": store, "plan": planned}


@pytest.fixture(scope="module")
def measured(conditions):
    return json.loads(json.dumps(measure(conditions, repeats=3)))


def test_a_step_is_measured_in_the_modes_of_its_run(measured):
    assert list(measured) == ["reconstruct", "store", "plan"]
    blocks = {name: found["blocks"] for name, found in measured.items()}
    count = sum(blocks["store"].values())
    assert blocks["store"] == {"store": count}
    assert blocks["plan"] == {"recompute": count - 1, "reconstruct": 1}
    assert blocks["reconstruct"]["reconstruct"] > 1


def test_modes_change_activations_and_the_peak_and_nothing_else(measured):
    for part in (
        "parameters",
        "optimizer_state_bytes",
        "weight_bytes",
        "gradient_bytes",
    ):
        assert len({found[part] for found in measured.values()}) == 1
    for part in ("peak_bytes", "activations_bytes"):
        assert measured["reconstruct"][part] < measured["store"][part]
        assert measured["plan"][part] < measured["store"][part]


def test_the_peak_is_of_a_step_with_all_that_it_holds(measured, run):
    again = rebuilt.Rebuilt.of(run, "cpu")
    parameters = sum(p.numel() for p in again.modules.parameters())
    buffers = sum(b.numel() * b.element_size() for b in again.modules.buffers())
    speech = 4 * 30 * 24 * 4 + 4 * 8
    for found in measured.values():
        # Momentum of 32 bit for each parameter.
        assert found["optimizer_state_bytes"] == 4 * parameters
        staying = found["weight_bytes"] + 4 * parameters + speech
        most = staying + found["gradient_bytes"] + found["activations_bytes"]
        # Gradients come while activations go.
        assert staying + found["activations_bytes"] / 2 < found["peak_bytes"] <= most
        assert 4 * parameters < found["weight_bytes"] <= 4 * parameters + buffers


def test_times_are_medians_of_the_repeats(measured):
    for found in measured.values():
        fastest, slowest = found["fastest_seconds"], found["slowest_seconds"]
        assert 0 < fastest <= found["seconds_per_step"] <= slowest
        assert found["repeats"] == 3


def test_there_are_no_figures_where_modes_do_not_compute_the_same(run, monkeypatch):
    gradient = rebuilt.Rebuilt.gradient

    def turned(self, batch, *, precision):
        found = gradient(self, batch, precision=precision)
        found[0] += 1e-3 * ("reconstruct" in self.encoder.block_modes().values())
        return found

    monkeypatch.setattr(rebuilt.Rebuilt, "gradient", turned)
    with pytest.raises(rebuilt.NotEqual, match="degrees off that of stored"):
        measure({"reconstruct": run})


def test_a_step_is_measured_with_what_the_run_ended_with(run, monkeypatch):
    weights = []

    def remembered(run, batch):
        weights.append({k: v.clone() for k, v in run.encoder.state_dict().items()})

    monkeypatch.setattr(measures, "check_equal", remembered)
    measure({"reconstruct": run})
    last = rebuilt.Rebuilt.of(run, "cpu").epochs()[-1]
    ended = torch.load(last.paramfiles["embedding_model"], weights_only=True)
    assert all(torch.equal(weights[0][name], ended[name]) for name in ended)


def test_what_compresses_or_rounds_is_measured_without_a_claim_to_be_equal(tmp_path):
    settings = {"compressed": {"mode": "compress"}, "float": {"streams": "float"}}
    runs = {}
    for name, changed in settings.items():
        (tmp_path / name).mkdir()
        runs[name], _ = trained_run(tmp_path / name, precision="bf16", **changed)
    found = measure(runs)
    assert set(found["compressed"]["blocks"]) == {"compress"}
    assert "reconstruct" in found["float"]["blocks"]
    assert all(row["peak_bytes"] > row["activations_bytes"] for row in found.values())


def test_measuring_leaves_a_run_as_it_was(run):
    before = contents(run)
    measure({"reconstruct": run})
    assert contents(run) == before


def test_an_encoder_is_measured_in_all_ways_that_compute_the_same(run):
    ways = measures.ways_of(run)
    found = measures.measure(ways, "cpu", repeats=1)
    modes = ("store", "recompute", "reconstruct")
    assert list(found) == [f"{mode}, {bits} bit" for bits in (32, 8) for mode in modes]
    for mode in modes:
        wide, narrow = found[f"{mode}, 32 bit"], found[f"{mode}, 8 bit"]
        assert mode in wide["blocks"]
        assert wide["activations_bytes"] == narrow["activations_bytes"]
        assert narrow["optimizer_state_bytes"] < wide["optimizer_state_bytes"]
        assert narrow["peak_bytes"] < wide["peak_bytes"]
        assert (
            mode == "store" or wide["peak_bytes"] < found["store, 32 bit"]["peak_bytes"]
        )


def test_vanilla_encoders_have_no_way_that_reconstructs(run, tmp_path):
    vanilla = copy_with(run, tmp_path / "run", "arch: revnet57", "arch: resnet34")
    assert not any("reconstruct" in name for name in measures.ways_of(vanilla))


def test_a_run_in_fp16_is_refused(run, tmp_path):
    half = copy_with(run, tmp_path / "run", "precision: fp32", "precision: fp16")
    with pytest.raises(ValueError, match="trained in fp16"):
        measure({"half": half})


def test_half_of_the_memory_is_a_budget_for_which_there_is_a_plan(run):
    step = rebuilt.Rebuilt.of(run, "cpu", batch_size=32, blocks=[4, 0, 0, 0]).step
    half = budget.half_of_the_memory(step)
    assert half.halved == "memory"
    assert half.counted_bytes == half.stored_bytes // 2
    assert half.memory_budget == f"{half.counted_bytes}B"
    plan = plan_step(step.step(), half.counted_bytes)
    assert plan.measured_bytes + half.staying_bytes <= half.counted_bytes
    assert {"store", "reconstruct"} <= set(plan.modes.values())
    without_limit = plan_step(step.step(), 10**9)
    assert set(without_limit.modes.values()) == {"store"}
    assert without_limit.measured_bytes + half.staying_bytes == half.stored_bytes


def test_activations_are_halved_where_no_plan_takes_half_of_the_memory(run):
    step = rebuilt.Rebuilt.of(run, "cpu", batch_size=64).step
    half = budget.half_of_the_memory(step)
    assert half.halved == "activations"
    with pytest.raises(Infeasible):
        plan_step(step.step(), half.stored_bytes // 2)
    activations = half.stored_bytes - half.staying_bytes
    assert half.counted_bytes == half.staying_bytes + activations // 2
