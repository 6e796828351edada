"""The benchmark of plans: what it compares, what it checks, what it says."""

import dataclasses
import functools
import json

import pytest
import torch

from tests.benchmarks import __main__ as command
from tests.benchmarks import planned, planned_ways, readme, tables
from tests.benchmarks.harness import NotEqual, Result
from tests.benchmarks.planned_ways import RECONSTRUCT, STORE
from tests.benchmarks.user_ways import encoder_by, train_step

CPU = torch.device("cpu")
ROW = {"widths": (8, 8, 16, 16), "blocks": (1, 2, 1, 1)}
SETTING = planned.Setting(
    names=("revnet57",),
    batches=(2, 4),
    frames=40,
    repeats=2,
    memory_budgets=(0.5,),
    backend="aot_eager",
    row=ROW,
)


@pytest.mark.slow
def test_all_ways_are_measured_within_one_budget(tmp_path):
    result = planned.run(CPU, SETTING)
    rows = {(row["way"], row["batch"]): row for row in result.rows}
    assert {way for way, _ in rows} == {
        "store",
        "reconstruct",
        "planned",
        "accumulation",
        "counterpart stored",
        "counterpart part checkpoint",
        "counterpart torch checkpoint",
        "counterpart compiled",
    }
    for (way, batch), row in rows.items():
        fits = row["peak MB"] <= row["budget MB"]
        assert fits == (row["s per step"] != "does not fit")
        assert fits or way not in ("reconstruct", "planned", "accumulation")
        assert row["baseline"] == f"revnet57 reconstruct, batch {batch}"
    for batch in (2, 4):
        stored, part, whole, plan = (
            rows[way, batch]["peak MB"]
            for way in (
                "counterpart stored",
                "counterpart part checkpoint",
                "counterpart torch checkpoint",
                "planned",
            )
        )
        assert part <= max(plan, whole)
        assert part <= stored
    assert rows["store", 2]["s per step"] > 0
    assert rows["store", 4]["s per step"] == "does not fit"
    assert rows["accumulation", 4]["statistics of"] == 2
    assert ("accumulation", 2) not in rows
    updated = {way: row["statistics updated"] for (way, _), row in rows.items()}
    assert updated.pop("counterpart torch checkpoint") == 2
    assert updated.pop("counterpart part checkpoint") in (1, 2)
    assert updated.pop("accumulation") == 2
    assert set(updated.values()) == {1}
    result.save(tmp_path, CPU)
    planned.draw(result, tmp_path / "planned.png")
    assert (tmp_path / "planned.png").read_bytes().startswith(b"\x89PNG")


def row(batch, ratio, way="planned", times=0.5):
    return {
        "encoder": "revnet57",
        "batch": batch,
        "way": way,
        "budget MB": 197.2,
        "statistics of": batch // 2 if way == "accumulation" else batch,
        "times the baseline": times,
        "planned / best extreme": ratio,
    }


def test_the_verdict_names_each_batch_at_which_a_plan_was_slower():
    rows = [row(2, 1.02), row(2, "", "store"), row(4, 0.9)]
    told = planned.verdict(rows)
    assert told == "Planned takes at most 1.02 times the faster extreme, within 1.03"
    told = planned.verdict([*rows, row(8, 1.05)])
    assert "at most 1.05 times" in told
    assert told.endswith("NOT within 1.03: revnet57 at batch 8 1.05")


def test_the_readme_shows_a_column_for_each_batch(tmp_path, monkeypatch):
    rows = [
        row(2, "", "store", 0.45),
        row(2, 1.0),
        row(4, "", "store", ""),
        row(4, 0.9),
    ]
    Result("planned", "", "setting", rows, "verdict").save(tmp_path, CPU)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    heads, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in readme.planned().splitlines()
        if line.startswith("|")
    )
    assert heads == ["encoder", "MiB", "way", "batch 2", "batch 4"]
    assert lines == [
        ["revnet57", "188", "store", "0.45", "does not fit"],
        ["revnet57", "188", "planned", "0.50", "0.50"],
    ]


def test_the_readme_names_at_each_batch_what_is_faster_than_the_plan():
    rows = [
        *(row(2, "", "stored", 0.4), row(2, 1.0), row(2, "", "checkpoint", 0.501)),
        *(row(4, "", "stored", ""), row(4, 0.9), row(4, "", "checkpoint", 0.9)),
        *(row(8, 0.9), row(8, "", "accumulation", 0.49), row(8, "", "b", 0.45)),
    ]
    assert readme.planned_verdict(rows) == (
        "Faster than the plan, in multiples of its time: revnet57 at batch 2 stored 0.80, "
        "at batch 4 nothing, at batch 8 b 0.90 and accumulation 0.98. Statistics of less "
        "than the batch normalise in: accumulation."
    )


def test_a_committed_plan_is_never_slower_than_an_extreme_that_fits():
    file = readme.RESULTS / "planned_cpu.json"
    points = {}
    for each in json.loads(file.read_text())["rows"]:
        point = points.setdefault((each["encoder"], each["batch"]), {})
        if each["s per step"] != "does not fit":
            assert each["peak MB"] <= each["budget MB"]
            point[each["way"]] = each["s per step"]
    assert len(points) == 6
    for seconds in points.values():
        extremes = [seconds[way] for way in planned.EXTREMES if way in seconds]
        assert seconds["planned"] <= 1.03 * min(extremes)


def test_the_counterpart_of_torchs_layers_computes_what_the_packages_does():
    worst, updated = planned_ways.check_vanilla("revnet57")
    assert worst <= 1e-9
    assert updated == {"stored": 1, "checkpoint": 2}


@pytest.mark.slow
def test_a_plan_with_other_bits_ends_the_run(monkeypatch):
    planned_ways.check_plans("revnet57")
    other = planned_ways.Planned.encoder

    def wrong(self, name, **row):
        plan = dataclasses.replace(self.plan, channels=[None] * 4)
        return other(dataclasses.replace(self, plan=plan), name, **row)

    monkeypatch.setattr(planned_ways.Planned, "encoder", wrong)
    with pytest.raises(NotEqual, match="revnet57 as planned are not the bits"):
        planned_ways.check_plans("revnet57")


def test_a_counterpart_that_computes_something_else_ends_the_run(monkeypatch):
    monkeypatch.setattr(planned_ways.PlainEncoder, "variance_floor", 1e-3)
    with pytest.raises(NotEqual, match=r"resnet34 of torch's layers are .* from those"):
        planned_ways.check_vanilla("revnet57")


def test_compiled_gradients_may_be_as_far_from_float64_as_others():
    plain = planned_ways.vanilla("revnet57", **ROW)
    feats = torch.randn(2, 40, 80)
    assert planned_ways.check_compiled(plain, plain, feats) == 1.0
    with pytest.raises(NotEqual, match="Compiled gradients are"):
        planned_ways.check_compiled(Rounded(plain), plain, feats)


class Rounded(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, feats):
        return self.inner(feats.bfloat16().float())


def test_the_record_of_the_allocator_has_what_is_alive():
    def step():
        x = torch.zeros(1000)
        return x + 1

    assert 8000 <= planned_ways.recorded_peak(step) < 9000


def recorded(network, batch):
    feats = planned_ways.features(batch, 40, 80)
    step = functools.partial(train_step, network, feats, planned_ways.VANILLA)
    return planned_ways.recorded_peak(step)


NETWORKS = {
    "store": lambda: encoder_by(STORE, "revnet57", **ROW),
    "reconstruct": lambda: encoder_by(RECONSTRUCT, "revnet57", **ROW),
    "counterpart": lambda: planned_ways.vanilla("revnet57", **ROW),
    "checkpoint": lambda: planned_ways.vanilla("revnet57", checkpointed=9, **ROW),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_peaks_of_all_ways_grow_with_the_batch(name):
    network = NETWORKS[name]()
    assert 2 * recorded(network, 2) < recorded(network, 8) < 5 * recorded(network, 2)


def test_the_more_blocks_are_in_torchs_checkpoint_the_less_is_held():
    depth = len(planned_ways.vanilla("revnet57", **ROW).blocks)
    peaks = [
        recorded(planned_ways.vanilla("revnet57", checkpointed=count, **ROW), 8)
        for count in (0, 2, depth)
    ]
    # Of all blocks the first one's own second run is what takes the most.
    assert peaks[0] > peaks[1] >= peaks[2]


@pytest.fixture
def benchmark():
    """One whose networks are small, without what takes long."""
    found = planned.Benchmark.__new__(planned.Benchmark)
    found.name, found.setting, found.counterpart = "revnet57", SETTING, "resnet34"
    found.depth = len(planned_ways.vanilla("revnet57", **ROW).blocks)
    found.updated = {"stored": 1, "checkpoint": 2}
    return found


def test_as_few_blocks_are_checkpointed_as_keep_to_the_peak_of_the_plan(benchmark):
    peaks = [benchmark._vanilla("a", 4, i).peak_bytes for i in range(3)]
    few = benchmark._part_checkpointed(4, peaks[2])
    assert few.peak_bytes == peaks[2] < peaks[1] <= peaks[0]
    assert few.note == f"the first 2 of {benchmark.depth}: stem, blocks, transitions"
    assert few.updated == 2
    none = benchmark._part_checkpointed(4, peaks[0])
    assert (none.peak_bytes, none.note, none.updated) == (peaks[0], "", 1)
    # Where none keeps to it, all are; what does not fit is then seen.
    assert f"first {benchmark.depth} of" in benchmark._part_checkpointed(4, 0).note


def test_a_plan_is_for_less_where_the_record_is_above_the_budget(
    benchmark, monkeypatch
):
    asked = []

    class Found:
        words = "a plan"

        def encoder(self, name, **row):
            return asked[-1]

    def planned_within(name, batch, frames, budget_bytes, seconds, **row):
        asked.append(budget_bytes)
        return Found()

    # A record has 30 bytes beyond what is counted.
    monkeypatch.setattr(planned, "planned_within", planned_within)
    monkeypatch.setattr(planned, "recorded_peak", lambda step: step.args[0] + 30)
    benchmark.budget_bytes, benchmark.seconds = 1000, {}
    assert benchmark._planned(2).peak_bytes == 1000
    assert asked == [1000, 970]


def test_a_batch_is_stored_in_as_few_parts_as_fit(benchmark, monkeypatch):
    sizes = {1: 80, 2: 40, 3: 30, 4: 20, 8: 10}
    monkeypatch.setattr(
        planned, "recorded_peak", lambda step: sizes[step.args[2].parts]
    )
    for budget, parts, size in [(30, 3, 3), (39, 3, 3), (29, 4, 2), (10, 8, 1)]:
        benchmark.budget_bytes = budget
        (case,) = benchmark._accumulated(8)
        assert (case.updated, case.statistics_of) == (parts, size)
        assert case.note == f"{parts} parts of at most {size}, stored"
    for budget in (80, 9):
        benchmark.budget_bytes = budget
        assert benchmark._accumulated(8) == []


def test_it_is_of_the_cpu_and_runs_by_name_only():
    assert command.BY_NAME["planned"] is planned.run
    assert "planned" not in command.BENCHMARKS | command.ON_META
    with pytest.raises(ValueError, match="cuda was asked for"):
        planned.run(torch.device("cuda"))
