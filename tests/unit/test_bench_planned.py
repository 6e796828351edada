"""The benchmark of plans: what it compares, what it checks, what it says."""

import dataclasses

import pytest
import torch

from tests.benchmarks import __main__ as command
from tests.benchmarks import planned, planned_ways, readme
from tests.benchmarks.harness import NotEqual, Result
from tests.benchmarks.planned_ways import RECONSTRUCT, STORE

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
        "counterpart torch checkpoint",
        "counterpart compiled",
    }
    for (way, batch), row in rows.items():
        fits = row["peak MB"] <= row["budget MB"]
        assert fits == (row["s per step"] != "does not fit")
        assert fits or way not in ("reconstruct", "planned", "accumulation")
        assert row["baseline"] == f"revnet57 reconstruct, batch {batch}"
    assert rows["store", 2]["s per step"] > 0
    assert rows["store", 4]["s per step"] == "does not fit"
    assert rows["accumulation", 4]["statistics of"] == 2
    assert ("accumulation", 2) not in rows
    updated = {way: row["statistics updated"] for (way, _), row in rows.items()}
    assert updated.pop("counterpart torch checkpoint") == 2
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
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    heads, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in readme.planned().splitlines()
        if line.startswith("|")
    )
    assert heads == ["encoder", "MB", "way", "batch 2", "batch 4"]
    assert lines == [
        ["revnet57", "197", "store", "0.45", "does not fit"],
        ["revnet57", "197", "planned", "0.50", "0.50"],
    ]


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


@pytest.mark.parametrize("way", [STORE, RECONSTRUCT], ids=lambda way: way.name)
def test_the_counterparts_bytes_grow_with_the_batch_as_those_of_the_encoder(way):
    few, many = (
        planned_ways.reversible_bytes("revnet57", way, batch, 40, **ROW)
        for batch in (2, 8)
    )
    assert 2 * few < many < 5 * few


def test_it_is_of_the_cpu_and_runs_by_name_only():
    assert command.BY_NAME["planned"] is planned.run
    with pytest.raises(ValueError, match="cuda was asked for"):
        planned.run(torch.device("cuda"))
