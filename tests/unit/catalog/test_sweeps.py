"""A sweep of an encoder: its plans are those of each batch, and what is said is so."""

import dataclasses
import json
import math
import weakref

import pytest
import torch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import Training, plans
from speechbrain_rev.catalog.pictures import draw_sweep
from speechbrain_rev.catalog.plans import (
    optimizer_seconds,
    parse_batches,
    sweep_encoder,
)
from speechbrain_rev.catalog.render import SweepReport
from speechbrain_rev.catalog.steps import encoder_step
from speechbrain_rev.planner import Infeasible, memory, profile, profiling
from speechbrain_rev.planner.knapsack import solve
from speechbrain_rev.planner.memory import SHARE
from speechbrain_rev.planner.plan import choose
from speechbrain_rev.planner.profile import VARIABLE
from speechbrain_rev.planner.profiling import Profiler, stored_bytes
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.sizes import GIB

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
        training = TIGHT.at(plan.batch)
        found = profile(encoder_step(RESNET34, training), channels=plan.channels)
        step_budget = training.step_budget_bytes(RESNET34)
        *modes, _ = solve(found.problem(), step_budget)
        assert list(plan.modes.values()) == modes
        left = training.available_bytes - plan.predicted_bytes
        assert left == step_budget - found.peak_bytes(plan.modes) >= 0
        assert plan.seconds == pytest.approx(
            found.seconds(plan.modes) + optimizer_seconds(RESNET34, TIGHT, None)
        )
    assert swept.sweep.infeasible_batch == 1000


def test_the_best_need_not_be_the_largest_and_both_are_named(swept):
    assert swept.sweep.best.batch == 48
    text = SweepReport(swept).text()
    assert "best batch 48: " in text
    assert "the largest batch with a plan is 80" in text
    assert "batch 1000 does not fit with any plan" in text
    (best,) = (line for line in text.splitlines() if line.endswith("  best"))
    assert best.split()[0] == "48"


def test_estimated_times_are_linear_in_the_batch(swept):
    for time in swept.sweep.times.values():
        assert time.worst_deviation < 0.001
    assert SweepReport(swept).text().count("off by 0.0 % at most") == 2
    assert "1e+05 operations/s; no clock was read" in " ".join(
        SweepReport(swept).text().split()
    )


@pytest.mark.slow
def test_most_of_what_all_batches_share_is_to_start_operations(swept):
    """The rest is the optimizer's step, and weights that are read."""
    at_once = dataclasses.replace(ASSUMED, operations_per_second=math.inf)
    alike = sweep_encoder(RESNET34, TIGHT, BATCHES, speed=at_once)
    for mode, time in swept.sweep.times.items():
        rest = alike.sweep.times[mode].fixed_seconds
        assert alike.sweep.other_seconds < rest < 0.1 * time.fixed_seconds


def test_json_says_what_figures_are(swept):
    document = json.loads(SweepReport(swept).json())
    assert document["best_batch"] == 48
    assert document["times"]["device"] is None
    assert "estimated" in document["times"]["how"]
    assert "no clock was read" in document["sources"]["time"]
    assert [each["batch"] for each in document["batches"]] == BATCHES
    assert all(len(each["modes"]) == 17 for each in document["batches"])
    assert document["times"]["speed"] == json.loads(ASSUMED.to_json())


def test_the_chunk_of_each_plan_is_shown_and_is_the_one_that_was_chosen():
    row, training = architecture("revnet57"), Training(2 * GIB, 1, 200)
    swept = sweep_encoder(row, training, [48, 56])
    step = encoder_step(row, training.at(56))
    with step.training():
        chosen = choose(Profiler(step), training.at(56).step_budget_bytes(row))
    assert chosen.channels != (None,) * 4
    plan = swept.sweep.plans[1]
    assert (plan.channels, dict(plan.modes)) == (chosen.channels, chosen.modes)
    document = json.loads(SweepReport(swept).json())["batches"][1]
    assert tuple(document["channels"]) == chosen.channels
    text = SweepReport(swept).text()
    _, heads, _, line, *_ = text.splitlines()
    place = heads.replace("of best", "share").split().index("chunk")
    assert line.split()[place] == str(chosen.channels[0])
    assert "chunk: channels at a time" in " ".join(text.split())


def test_a_speed_is_that_of_the_device_that_is_asked_about():
    slow = dataclasses.replace(
        ASSUMED, bytes_per_second=4e9, about={"device": "a slow one"}
    )
    usual, slower = (
        sweep_encoder(TINY, TIGHT, [2], speed=speed) for speed in (ASSUMED, slow)
    )
    assert slower.sweep.best.seconds > usual.sweep.best.seconds
    assert slower.sweep.other_seconds == pytest.approx(100 * usual.sweep.other_seconds)
    assert "for a slow one, " in SweepReport(slower).text()
    assert "an assumed 11 GB GPU, " in SweepReport(usual).text()


def test_times_are_taken_where_it_was_asked():
    swept = sweep_encoder(TINY, TIGHT, [1, 2], device="cpu")
    assert swept.sweep.about["seconds"].startswith("measured on cpu, ")
    assert all(plan.seconds > 0 for plan in swept.sweep.plans)
    text = " ".join(SweepReport(swept).text().split())
    assert "Times: measured on cpu" in text
    assert "Plans were not run" in text
    assert text.count("too few batches to know") == 2


def without_memory_at(batches, monkeypatch):
    """Let memory run out where the times of some batches are taken."""
    measured = profiling.measured_seconds

    def taken(network, run, device, **options):
        if network.current in batches:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measured(network, run, device, **options)

    trial = profiling.Step.trial

    def noted(self, batch=None, module=None, channels=None):
        found = trial(self, batch, module, channels)
        found.network.current = self.batch
        return found

    monkeypatch.setattr(profiling.Step, "trial", noted)
    monkeypatch.setattr(profiling, "measured_seconds", taken)
    monkeypatch.setattr(plans, "optimizer_seconds", lambda *_, **__: 0.1)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "profiles"))


def test_memory_that_ran_out_is_a_row_and_the_sweep_goes_on(
    monkeypatch, tmp_path, own_folder
):
    without_memory_at({2}, monkeypatch)
    found = sweep_encoder(TINY, TIGHT, [1, 2, 3], device="cpu")
    assert [bool(plan.modes) for plan in found.sweep.plans] == [True, False, True]
    assert "-  memory ran out while it was timed" in SweepReport(found).text()
    assert json.loads(SweepReport(found).json())["out_of_memory"] == [2]
    picture = tmp_path / "sweep.png"
    draw_sweep(found, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_where_memory_ran_out_at_every_batch_that_is_said(monkeypatch, own_folder):
    without_memory_at({1, 2}, monkeypatch)
    message = r"Memory ran out while batches \[1, 2\] were profiled"
    with pytest.raises(MemoryError, match=message):
        sweep_encoder(TINY, TIGHT, [1, 2], device="cpu")


def test_where_a_batch_does_not_fit_fewer_utterances_are_timed(monkeypatch, own_folder):
    step = encoder_step(TINY, TIGHT.at(4), device=torch.device("cpu"))
    with step.training():
        peak = stored_bytes(step.at(2), step.shallow().to("meta"), step.channels[0][0])
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: peak / SHARE + 1000)
    swept = sweep_encoder(TINY, TIGHT, [1, 2, 4], device="cpu")
    assert [plan.timed_batch for plan in swept.sweep.plans] == [1, 2, 2]
    few, some, many = json.loads(SweepReport(swept).json())["batches"]
    assert (few["timed_batch"], many["timed_batch"]) == (1, 2)
    lines = SweepReport(swept).text().splitlines()
    assert lines[4].endswith("timed at batch 2")
    assert "timed at" not in lines[2] + lines[3]
    words = " ".join(SweepReport(swept).text().split())
    assert "of a shallow encoder at each batch, or of as many" in words
    # Times of twice as many utterances are twice those that were taken.
    assert many["step_seconds"] > some["step_seconds"]


def test_an_optimizer_without_memory_is_said_and_what_it_took_is_freed(monkeypatch):
    held = []

    def greedy(row, training, device, **_):
        big = torch.nn.Linear(2, 2)
        held.append(weakref.ref(big))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plans, "optimizer_seconds", greedy)
    message = r"ran out on cpu while the step of sgd .* resnet34.*leave out --device"
    with pytest.raises(MemoryError, match=message):
        sweep_encoder(TINY, TIGHT, [2], device="cpu")
    assert held[0]() is None


def test_nothing_is_timed_where_no_plan_makes_the_smallest_batch_fit(monkeypatch):
    monkeypatch.setattr(plans, "seconds_of", None)
    monkeypatch.setattr(profiling, "measured_seconds", None)
    small = Training(3 * GIB // 2, 1, 200)
    with pytest.raises(Infeasible, match="Even the lightest plan peaks at"):
        sweep_encoder(RESNET34, small, [80], device="cpu")


def test_a_batch_that_no_plan_makes_fit_is_not_timed(monkeypatch, own_folder):
    timed, measured = [], profiling.measured_seconds

    def taken(network, run, device, **options):
        timed.append(network)
        return measured(network, run, device, **options)

    monkeypatch.setattr(profiling, "measured_seconds", taken)
    monkeypatch.setattr(plans, "optimizer_seconds", lambda *_, **__: 0.1)
    swept = sweep_encoder(TINY, Training(GIB * 3 // 2, 1, 200), [1, 9000], device="cpu")
    assert swept.sweep.infeasible_batch == 9000
    assert len(timed) == 1


def test_a_smallest_batch_that_does_not_fit_is_refused_with_what_helps():
    small = Training(3 * GIB // 2, 1, 200)
    with pytest.raises(Infeasible, match=r"What helps: a batch of \d+; ") as refused:
        sweep_encoder(RESNET34, small, [80, 48])
    fits = int(str(refused.value).partition("a batch of ")[2].partition(";")[0])
    assert fits < 48
    swept = sweep_encoder(RESNET34, small, [fits, fits + 1])
    assert swept.sweep.infeasible_batch == fits + 1


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
