"""The breakdown of a named encoder: exact parts, and a bound as total."""

import dataclasses
import gc
import json
from types import SimpleNamespace

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES, HEAD, Head
from speechbrain_rev.catalog import Training, counted_peaks, pictures
from speechbrain_rev.catalog.breakdown import (
    before_and_after,
    before_and_planned,
    encoder_breakdown,
    planned_breakdown,
)
from speechbrain_rev.catalog.plans import PlannedEncoder
from speechbrain_rev.catalog.render import BreakdownReport, saved
from speechbrain_rev.catalog.steps import head_modules
from speechbrain_rev.catalog.table import ListedEncoder
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.planner.memory import PARTS, LiveBytes
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.sizes import GIB, MIB
from tests.benchmarks.counts import training_step_peak

TIGHT = Training(5 * GIB // 2, batch=64, frames=200)
NO_HEAD = Head(classes=0)
#: One encoder of each family.
OF_EACH_FAMILY = ("resnet34", "df_resnet56", "revnet57", "df_revnet66")


@pytest.fixture(scope="module")
def pairs():
    return [
        before_and_after(name, batch=64, frames=200)
        for name in ("resnet34", "revnet57")
    ]


@pytest.fixture(scope="module")
def encoder():
    """Revnet57 as if planned, with modes that take turns."""
    with torch.device("meta"):
        allowed = build_encoder("revnet57").allowed_modes().items()
    modes = {name: m[i % len(m)].value for i, (name, m) in enumerate(allowed)}
    model = ListedEncoder(ARCHITECTURES["revnet57"], TIGHT)
    return PlannedEncoder(model, None, (None,) * 4, modes, 10**9, 1.0, 1.0, ASSUMED)


@pytest.fixture(scope="module")
def planned(encoder):
    return before_and_planned(encoder)


@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_EACH_FAMILY else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def test_parts_of_every_encoder_are_exact_where_they_can_be(name):
    row = ARCHITECTURES[name]
    case = encoder_breakdown(row.name, batch=128, frames=200)
    assert (case.mode, case.optimizer_name) == (row.default_mode, row.optimizer_name)
    report = case.report
    peak = counted_peaks()[row.name, row.default_mode, 200](128)
    assert report.activations_bytes == peak
    parameters = row.parameters + HEAD.parameters
    assert report.gradients_bytes == 4 * parameters
    assert 4 * parameters < report.weights_bytes < 1.02 * 4 * parameters
    # The table of what fits has constants for these two, each of which is a bound.
    bound = Training(None, 128, 200).needed_bytes(row, row.default_mode, 128)
    assert 0.9 * bound["optimizer_states"] < report.optimizer_states_bytes
    assert report.optimizer_states_bytes <= bound["optimizer_states"]
    others = bound["classifier_step"] + bound["input"]
    assert 0.95 * others <= report.others_bytes <= others


@pytest.mark.parametrize("name", ["resnet34", "df_resnet56"])  # sgd, adamw
@pytest.mark.parametrize("bits", [8, 32])
def test_optimizer_states_are_those_of_a_real_optimizer_to_the_byte(name, bits):
    row = ARCHITECTURES[name]
    parameters = list(build_encoder(name).parameters())
    optimizer = build_optimizer(parameters, name=row.optimizer_name, bits=bits, lr=0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    case = encoder_breakdown(
        name, batch=2, frames=200, optimizer_bits=bits, head=NO_HEAD
    )
    assert case.report.optimizer_states_bytes == state_bytes(optimizer)


@pytest.mark.parametrize(("name", "mode"), [("revnet57", None), ("resnet34", "store")])
def test_the_total_bounds_a_whole_training_step_on_the_cpu(name, mode):
    batch, head = 4, Head(classes=50)
    gc.collect()
    with LiveBytes() as meter:
        encoder = build_encoder(name, mode=mode)
        classifier, loss = head_modules(head)
        parameters = [*encoder.parameters(), *classifier.parameters()]
        optimizer = build_optimizer(parameters, name="sgd", bits=8, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        meter.peak = meter.live
        wavs, feats = torch.randn(batch, 35200), torch.randn(batch, 200, 80)
        augmented, targets = wavs[:, :32000].clone(), torch.zeros(batch, 1).long()
        loss(classifier(encoder(feats)), targets).backward()
        del wavs, augmented
    case = encoder_breakdown(name, mode=mode, batch=batch, frames=200, head=head)
    assert 0.99 * case.report.total_bytes <= meter.peak <= case.report.total_bytes


def test_lengths_that_are_not_committed_are_counted():
    case = encoder_breakdown("resnet34", batch=3, frames=48)
    counted = training_step_peak("resnet34", frames=48, batch=3)
    assert case.report.activations_bytes == counted
    assert case.report.input_shape == (3, 48, 80)


def test_before_is_stored_at_32_bit_and_after_is_as_asked():
    before, after = before_and_after(
        "revnet57", mode="recompute", batch=64, frames=200, optimizer_bits=32
    )
    assert (before.mode, before.optimizer_bits) == ("store", 32)
    assert (after.mode, after.optimizer_bits) == ("recompute", 32)
    assert "8 bit" not in saved(before, after)
    same = before_and_after("resnet34", batch=64, frames=200, optimizer_bits=32)
    assert len(same) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "revnet58"}, "Did you mean revnet57"),
        ({"mode": "reconstruct"}, "resnet34 has no reversible blocks"),
        (
            {"mode": "compress"},
            "mode takes store, reconstruct, recompute, not compress",
        ),
        ({"batch": 0}, "from 1 to 1000000 utterances, not 0"),
        ({"frames": -3}, "from 1 to 100000 frames of 10 ms, not -3"),
        ({"frames": 3}, "needs at least 9 frames"),
        ({"optimizer_bits": 4}, "bits is 4"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    options = {"name": "resnet34", "batch": 64, "frames": 200} | wrong
    with pytest.raises(ValueError, match=message):
        encoder_breakdown(options.pop("name"), **options)


def test_every_figure_of_the_text_is_that_of_the_json(pairs):
    report = BreakdownReport(pairs, 11 * GIB)
    lines = report.text().splitlines()
    plain = json.loads(report.json())["breakdowns"]
    assert len(plain) == 4
    units = ["GiB", *["MiB"] * 4, "GiB"]
    assert lines[1].split() == ["encoder", "mode", "optimizer", *units]
    for line, case, word in zip(
        lines[2:], plain, ("before", "after") * 2, strict=False
    ):
        sizes = [case["report"][f"{part}_bytes"] for part in PARTS]
        shown = [f"{sizes[0] / GIB:.3f}", *(f"{size / MIB:.1f}" for size in sizes[1:])]
        cells = [
            cell
            for size, figure in zip(sizes, shown, strict=True)
            for cell in (figure, f"{100 * size / case['total_bytes']:.1f}%")
        ]
        assert line.split() == [
            case["name"], word, case["mode"],
            case["optimizer_name"], str(case["optimizer_bits"]), "bit",
            *cells, f"{sum(sizes) / GIB:.3f}", "yes" if case["fits"] else "no",
        ]  # fmt: skip
        assert case["total_bytes"] == sum(sizes)


def test_of_a_plan_each_row_says_how_many_blocks_keep_what(planned):
    after = planned[1]
    assert after.mode == "plan"
    counts = [after.blocks[mode] for mode in ("store", "reconstruct", "recompute")]
    assert sum(counts) == 17
    assert min(counts) > 0
    report = BreakdownReport([planned], TIGHT.card_bytes)
    text = report.text()
    row = text.splitlines()[3].split()
    assert row[1:4] == ["after", "plan", "/".join(map(str, counts))]
    assert row[-1] == "yes"
    words = " ".join(text.split())
    assert "revnet57: plan saves" in words
    assert "how many blocks store / reconstruct / recompute" in words
    assert "counted (store); counted with the plan (plan), on meta tensors" in words
    (_, plain) = json.loads(report.json())["breakdowns"]
    assert (plain["mode"], plain["blocks"]) == ("plan", after.blocks)
    assert "stages" not in plain


def test_a_planned_step_differs_from_others_in_its_activations_alone(planned):
    before, after = planned
    assert (before.mode, before.optimizer_bits) == ("store", 32)
    assert after.report.activations_bytes == 10**9
    reconstructed = encoder_breakdown("revnet57", batch=64, frames=200).report
    for part in PARTS[1:]:
        assert after.report.parts[part] == reconstructed.parts[part]


def test_a_plan_that_fits_is_said_to_fit(encoder):
    budget_bytes = TIGHT.step_budget_bytes(encoder.model.row)
    fitting = dataclasses.replace(encoder, counted_bytes=budget_bytes)
    assert fitting.lacking_bytes == 0
    assert planned_breakdown(fitting).fits(TIGHT.card_bytes)


def test_a_plan_that_was_not_counted_is_said_to_be_predicted(encoder, monkeypatch):
    profile = SimpleNamespace(peak_bytes=lambda modes: len(modes))
    case = planned_breakdown(
        dataclasses.replace(encoder, profile=profile, counted_bytes=None)
    )
    assert case.how == "predicted for the plan"
    drawn = {}
    monkeypatch.setattr(
        pictures,
        "memory_parts",
        lambda bars, path, **words: drawn.update(words),
    )
    pictures.draw_breakdowns([[case]], "memory.png", TIGHT.card_bytes)
    assert drawn["title"].endswith("of 200 frames, planned for 2.5 GiB")
    assert drawn["source"].startswith("Counted, and predicted for plans, on meta")
    assert case.report.activations_bytes == 17


def test_text_fits_a_terminal_of_130_columns_and_says_what_figures_are():
    longest = [before_and_after("df_revnet377", batch=256, frames=600)]
    longest[0][1] = dataclasses.replace(longest[0][1], mode="plan")
    text = BreakdownReport(longest, 11 * GIB).text()
    assert max(map(len, text.splitlines())) <= 130
    for word in ("counted", "upper bound", "No GPU was tried", "classifier of 17982"):
        assert word in " ".join(text.split())


def test_the_smallness_of_what_8_bit_saves_is_said(pairs):
    assert saved(*pairs[0]) == (
        "resnet34: 8 bit saves 75 % of the optimizer states, 0.8 % of the total."
    )


def test_a_card_is_fitted_where_the_reserve_stays_free(pairs):
    before, after = pairs[1]
    assert not before.fits(5 * GIB)
    assert after.fits(5 * GIB)


def test_the_picture_shows_the_parts_of_the_text(pairs, monkeypatch):
    calls = []
    monkeypatch.setattr(
        pictures,
        "memory_parts",
        lambda bars, path, **words: calls.append((bars, words)),
    )
    pictures.draw_breakdowns(pairs, "memory.png")
    bars, words = calls[-1]
    cases = [case for pair in pairs for case in pair]
    assert [bar.parts for bar in bars] == [case.report.parts for case in cases]
    assert [bar.group for bar in bars] == [case.name for case in cases]
    assert "64 utterances of 200 frames" in words["title"]
