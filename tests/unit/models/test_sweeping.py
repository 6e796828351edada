"""A sweep of an encoder: its plans are those of each batch, and what is said is so."""

import dataclasses
import json
import math
import weakref

import pytest
import torch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.memory import live_bytes_peak
from speechbrain_rev.models import Training, profiling, sweeping
from speechbrain_rev.models.counting import training_step
from speechbrain_rev.models.planning import encoder_profile
from speechbrain_rev.models.sweeping import (
    optimizer_seconds,
    parse_batches,
    sweep_encoder,
)
from speechbrain_rev.models.sweeping_picture import draw_sweep
from speechbrain_rev.models.sweeping_render import as_json, as_text
from speechbrain_rev.planner import Infeasible
from speechbrain_rev.planner.knapsack import solve
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.sizes import GIB, size_text

RESNET34 = architecture("resnet34")
#: Small enough to be run.
TINY = dataclasses.replace(RESNET34, widths=(4, 4, 8, 8), blocks=(3, 1, 1, 1))
BATCHES = [16, 48, 80]
#: Stores the smallest of these batches only, and fits no batch of 1000.
TIGHT = Training(4 * GIB, 1, 200)


@pytest.fixture(scope="module")
def swept():
    return sweep_encoder(RESNET34, TIGHT, [*BATCHES, 1000])


def test_each_batch_has_the_plan_that_fits_beside_all_else(swept):
    assert [plan.batch for plan in swept.sweep.plans] == BATCHES
    for plan in swept.sweep.plans:
        training = dataclasses.replace(TIGHT, batch=plan.batch)
        profile = encoder_profile(RESNET34, plan.batch, 200)
        step_budget = training.step_budget_bytes(RESNET34)
        *modes, _ = solve(profile.problem(), step_budget)
        assert list(plan.modes.values()) == modes
        left = training.available_bytes - plan.predicted_bytes
        assert left == step_budget - profile.peak_bytes(plan.modes) >= 0
        assert plan.seconds == pytest.approx(
            profile.seconds(plan.modes) + optimizer_seconds(RESNET34, TIGHT, None)
        )
    assert swept.sweep.infeasible_batch == 1000


def test_the_best_need_not_be_the_largest_and_both_are_named(swept):
    assert swept.sweep.best.batch == 48
    text = as_text(swept)
    assert "best batch 48: " in text
    assert "the largest batch with a plan is 80" in text
    assert "batch 1000 does not fit with any plan" in text
    (best,) = (line for line in text.splitlines() if line.endswith("  best"))
    assert best.split()[0] == "48"


def test_estimated_times_are_linear_in_the_batch(swept):
    for time in swept.sweep.times.values():
        assert time.worst_deviation < 0.001
    assert as_text(swept).count("off by 0.0 % at most") == 2


def test_the_time_that_all_batches_share_is_explained(swept):
    note = " ".join(as_text(swept).split())
    assert "1e+05 operations/s" in note
    assert "To start an operation takes 10 microseconds, whatever the batch" in note


@pytest.mark.slow
def test_most_of_what_all_batches_share_is_to_start_operations(swept):
    """The rest is the optimizer's step, and weights that are read."""
    at_once = dataclasses.replace(ASSUMED, operations_per_second=math.inf)
    alike = sweep_encoder(RESNET34, TIGHT, BATCHES, speed=at_once)
    assert "takes 0 microseconds" in as_text(alike)
    for mode, time in swept.sweep.times.items():
        rest = alike.sweep.times[mode].fixed_seconds
        assert alike.sweep.other_seconds < rest < 0.1 * time.fixed_seconds


def test_json_says_what_figures_are(swept):
    document = json.loads(as_json(swept))
    assert document["best_batch"] == 48
    assert document["times"]["device"] is None
    assert "estimated" in document["times"]["how"]
    assert "no clock was read" in document["sources"]["time"]
    assert [each["batch"] for each in document["batches"]] == BATCHES
    assert all(len(each["modes"]) == 17 for each in document["batches"])
    assert document["times"]["speed"] == json.loads(ASSUMED.to_json())


def test_the_chunk_of_each_plan_is_told_and_is_the_one_that_was_chosen(monkeypatch):
    row = dataclasses.replace(
        architecture("revnet57"), widths=(8, 8, 8, 8), blocks=(1, 0, 0, 0)
    )
    channels = (3, 5, None, None)
    monkeypatch.setattr(
        sweeping,
        "fastest_channels",
        lambda profile_for, encoder, budget: (channels, profile_for(channels)),
    )
    swept = sweep_encoder(row, TIGHT, [2])
    assert swept.channels == {2: channels}
    profile = encoder_profile(row, 2, 200, channels=channels)
    assert profile.blocks != encoder_profile(row, 2, 200, channels=(None,) * 4).blocks
    (plan,) = swept.sweep.plans
    assert plan.seconds == profile.seconds(plan.modes) + swept.sweep.other_seconds
    (document,) = json.loads(as_json(swept))["batches"]
    assert tuple(document["channels"]) == channels
    text = as_text(swept)
    _, heads, line, *_ = text.splitlines()
    place = heads.replace("of best", "share").split().index("chunk")
    assert line.split()[place] == "3"
    assert "chunk: the channels of the first level" in " ".join(text.split())


def test_a_speed_is_that_of_the_device_that_is_asked_about():
    slow = dataclasses.replace(
        ASSUMED, bytes_per_second=4e9, about={"device": "a slow one"}
    )
    usual, slower = (
        sweep_encoder(TINY, TIGHT, [2], speed=speed) for speed in (ASSUMED, slow)
    )
    assert slower.sweep.best.seconds > usual.sweep.best.seconds
    assert slower.sweep.other_seconds == pytest.approx(100 * usual.sweep.other_seconds)
    assert "for a slow one, " in as_text(slower)
    assert "an assumed card of 11 GB, " in as_text(usual)


def test_times_are_taken_where_it_was_asked():
    swept = sweep_encoder(TINY, TIGHT, [1, 2], device="cpu")
    assert swept.sweep.about["seconds"].startswith("measured on cpu, ")
    assert all(plan.seconds > 0 for plan in swept.sweep.plans)
    text = " ".join(as_text(swept).split())
    assert "Times: measured on cpu" in text
    assert "Plans were not run" in text
    assert text.count("too few batches to tell") == 2


def test_memory_that_ran_out_is_a_row_and_the_sweep_goes_on(
    swept, monkeypatch, tmp_path
):
    def profile(row, batch, frames, **options):
        if batch == 48:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encoder_profile(row, batch, frames, **options)

    monkeypatch.setattr(sweeping, "encoder_profile", profile)
    found = sweep_encoder(RESNET34, TIGHT, BATCHES)
    assert [bool(plan.modes) for plan in found.sweep.plans] == [True, False, True]
    assert found.sweep.plans[2] == swept.sweep.plans[2]
    assert "-  memory ran out while it was timed" in as_text(found)
    assert set(found.channels) == {16, 80}
    assert json.loads(as_json(found))["out_of_memory"] == [48]
    picture = tmp_path / "sweep.png"
    draw_sweep(found, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_machine_is_not_asked_for_memory_that_it_has_not_got(monkeypatch):
    sizes = {}
    for batch in (1, 2):
        _, step = training_step(
            "resnet34",
            mode="store",
            widths=TINY.widths,
            blocks=(2, 1, 1, 1),
            batch=batch,
            frames=200,
        )
        sizes[batch] = live_bytes_peak(step)

    def at_most(row, batch, frames, **options):
        device = options.pop("device")
        assert batch < 2 or device is None
        # Which takes no time.
        return encoder_profile(row, batch, frames, **options)

    monkeypatch.setattr(sweeping, "encoder_profile", at_most)
    monkeypatch.setattr(sweeping, "optimizer_seconds", lambda *_, **__: 0.1)
    monkeypatch.setattr(sweeping, "available_ram_bytes", lambda: sizes[2])
    swept = sweep_encoder(TINY, TIGHT, [1, 2], device="cpu")
    assert [bool(plan.modes) for plan in swept.sweep.plans] == [True, False]
    assert sizes[2] < swept.refused_bytes[2] < 1.5 * sizes[2]
    needed = size_text(swept.refused_bytes[2])
    assert f"-  not timed: it needs {needed}, which this machine has" in as_text(swept)
    few, many = json.loads(as_json(swept))["batches"]
    assert few["not_timed_needed_bytes"] is None
    assert many["not_timed_needed_bytes"] == swept.refused_bytes[2]
    monkeypatch.setattr(sweeping, "available_ram_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"at batch 1 that needs .*has not got free"):
        sweep_encoder(TINY, TIGHT, [1, 2], device="cpu")
    # Where times are estimated, nothing is run.
    assert not sweep_encoder(TINY, TIGHT, [1]).refused_bytes
    # Nor does anybody refuse what nobody can tell.
    monkeypatch.setattr(sweeping, "available_ram_bytes", lambda: None)
    assert not sweep_encoder(TINY, TIGHT, [1], device="cpu").refused_bytes


def test_an_optimizer_without_memory_is_said_and_what_it_took_is_freed(monkeypatch):
    held = []

    def greedy(row, training, device, **_):
        big = torch.nn.Linear(2, 2)
        held.append(weakref.ref(big))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sweeping, "optimizer_seconds", greedy)
    message = r"ran out on cpu while the step of sgd .* resnet34.*leave out --device"
    with pytest.raises(MemoryError, match=message):
        sweep_encoder(TINY, TIGHT, [2], device="cpu")
    assert held[0]() is None


def test_nothing_is_timed_where_no_plan_makes_the_smallest_batch_fit(monkeypatch):
    for name in ("seconds_of", "_check_memory"):
        monkeypatch.setattr(sweeping, name, None)
    monkeypatch.setattr(profiling, "measured_seconds", None)
    small = Training(3 * GIB // 2, 1, 200)
    with pytest.raises(Infeasible, match="That was batch 80"):
        sweep_encoder(RESNET34, small, [80], device="cpu")


def test_a_batch_that_no_plan_makes_fit_is_not_timed(monkeypatch):
    timed = []

    def profile(row, batch, frames, *, device, **options):
        timed.append((batch, device))
        return encoder_profile(row, batch, frames, **options)

    monkeypatch.setattr(sweeping, "encoder_profile", profile)
    monkeypatch.setattr(sweeping, "optimizer_seconds", lambda *_, **__: 0.1)
    swept = sweep_encoder(RESNET34, TIGHT, [16, 1000], device="cpu")
    assert swept.sweep.infeasible_batch == 1000
    assert {batch for batch, device in timed if device is not None} == {16}


def test_a_smallest_batch_that_does_not_fit_is_refused_with_what_helps():
    small = Training(3 * GIB // 2, 1, 200)
    with pytest.raises(Infeasible, match=r"That was batch 48 of .*: a batch of 11 "):
        sweep_encoder(RESNET34, small, [80, 48])


@pytest.mark.parametrize("bits", [8, 32])
def test_an_optimizer_takes_time_wherever_it_is_asked(bits):
    training = dataclasses.replace(TIGHT, optimizer_bits=bits)
    estimated = optimizer_seconds(TINY, training, None)
    assert 0 < estimated < optimizer_seconds(TINY, training, "cpu")


def test_states_of_fewer_bits_are_moved_faster():
    lighter, heavier = (
        optimizer_seconds(TINY, dataclasses.replace(TIGHT, optimizer_bits=bits), None)
        for bits in (8, 32)
    )
    assert lighter < heavier


@pytest.mark.parametrize(
    ("text", "batches"),
    [("1:3", [1, 2, 3]), ("16:50:16", [16, 32, 48]), ("8:8:4", [8])],
)
def test_batches_are_read(text, batches):
    assert list(parse_batches(text)) == batches


@pytest.mark.parametrize(
    "text", ["", "16", "32:16", "16:32:0", "a:b", "1:2:3:4", "-1:4"]
)
def test_other_batches_are_refused(text):
    with pytest.raises(ValueError, match="--batches takes the first, the last and"):
        parse_batches(text)


@pytest.mark.parametrize("text", ["0:4", "1:2000000"])
def test_batches_that_no_training_has_are_refused(text):
    with pytest.raises(ValueError, match="from 1 to 1000000 utterances"):
        parse_batches(text)
