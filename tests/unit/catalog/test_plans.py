"""Plans of encoders and of sweeps: they fit, are the fastest, and name what helps."""

import dataclasses
import functools
import json
import re

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.catalog import Training, plans
from speechbrain_rev.catalog.plans import (
    check_fits,
    optimizer_seconds,
    plan_encoders,
    sweep_encoder,
)
from speechbrain_rev.catalog.steps import encoder_step, training_step
from speechbrain_rev.cli import main
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.geometry import AUTO, channels_at_the_peak
from speechbrain_rev.planner import (
    Infeasible,
    Plan,
    profile,
    profiling,
)
from speechbrain_rev.planner.knapsack import solve
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.planner.profiling import profiler_of
from speechbrain_rev.sizes import GIB, reserve_of, reserve_text, size_text
from speechbrain_rev.training.memory_plan import in_words

from .builders import planned_as

TIGHT, PLENTY = Training(5 * GIB, 128, 200), Training(24 * GIB, 128, 200)
RESNET34 = architecture("resnet34")
#: Small enough to be run.
SMALL = dataclasses.replace(RESNET34, widths=(4, 4, 8, 8), blocks=(3, 1, 1, 1))
#: Of a sweep: stores the smallest batch only.
SWEPT = Training(4 * GIB, 1, 200)


def test_named_encoders_keep_within_the_budget_when_they_run(tight, tmp_path):
    assert [encoder.model.row.name for encoder in tight] == ["revnet57", "resnet34"]
    for encoder in tight:
        model, row = encoder.model, encoder.model.row
        budget_bytes = TIGHT.step_budget_bytes(row)
        assert encoder.step_bytes == encoder.counted_bytes
        assert 0.9 * budget_bytes < encoder.counted_bytes <= budget_bytes
        assert encoder.predicted_bytes == pytest.approx(encoder.counted_bytes, rel=1e-4)
        check_fits(encoder)
        assert {"store"} < set(encoder.modes.values())
        needed = TIGHT.needed_bytes(row, "store", 128)
        needed["encoder_step"] = encoder.step_bytes
        assert encoder.needed_bytes == sum(needed.values()) <= TIGHT.available_bytes
        largest = max(step.largest_batch for step in model.modes.values())
        assert encoder.largest_batch == max(largest, 128)
        # What was saved gives the encoder its modes.
        encoder.as_plan().save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
        assert plan == encoder.as_plan()
        words = in_words(plan.with_about(plan_file="p.json"))
        reserve = reserve_text(TIGHT.reserve_bytes)
        assert f"; budget {size_text(TIGHT.card_bytes)}, " in words
        assert words.endswith(f", {reserve}")
        assert plan.about["device"] == "a GPU of 5 GiB"
        with torch.device("meta"):
            network = build_encoder(plan.about["encoder"])
        plan.apply(network)
        modes = {name: mode.value for name, mode in network.block_modes().items()}
        assert modes == plan.modes


def test_more_memory_is_no_slower_and_its_gpu_is_another(tight):
    names = [encoder.model.row.name for encoder in tight]
    same_speed = plan_encoders(PLENTY, names=names, speed=tight[0].model.speed)
    for more, less in zip(same_speed, tight, strict=True):
        assert more.seconds == more.stored_seconds == less.stored_seconds
        assert less.stored_seconds < less.seconds < 1.5 * less.stored_seconds
        assert less.days <= less.model.days
    (named,) = plan_encoders(PLENTY, names=["resnet34"])
    about = "an assumed RTX 3090, listed nearest to 24 GiB (or name RTX 4090, A10, L4)"
    assert named.model.speed.device == about
    assert named.seconds < more.seconds


def test_a_plan_that_fits_counts_as_a_batch_that_fits():
    # Modes that are mixed can fit where none of those that all blocks share does.
    deep = functools.partial(planned_as, "resnet152", modes={})
    assert 0 < deep(TIGHT, 100 * GIB).largest_batch < 128
    assert deep(TIGHT, GIB).largest_batch == 128
    assert deep(Training(GIB, 1, 200), GIB).largest_batch == 0


def test_what_does_not_fit_is_refused_with_what_helps_and_that_does():
    training = Training(3 * GIB, 128, 200, optimizer_bits=32)
    (encoder,) = plan_encoders(training, names=["resnet34"])
    with pytest.raises(Infeasible, match="Even the lightest plan peaks at") as refused:
        check_fits(encoder)
    message, needed = str(refused.value), refused.value.needed_bytes
    assert needed == encoder.needed_bytes
    lacking = needed + reserve_of(3 * GIB) - 3 * GIB
    assert lacking == refused.value.lacking_bytes == encoder.lacking_bytes
    assert f"It lacks {size_text(lacking)}." in message
    assert " of the peak. What helps: " in message
    helps = message.partition("What helps: ")[2].removesuffix(".").split("; ")
    batch = int(re.fullmatch(r"a batch of (\d+)", helps[0])[1])
    other = helps[-3].removeprefix("another encoder, for instance ")
    assert training.fits(architecture(other))
    # The reserve is that of the GPU that was named, not of one that is large enough.
    assert f"({3 * GIB} bytes), {reserve_text(reserve_of(3 * GIB))}. It " in message
    larger = "a larger GPU, for instance RTX 2060 of 6 GiB"
    assert helps[-2:] == ["--optimizer_bits=8", larger]
    larger = dataclasses.replace(training, card_bytes=refused.value.enough_bytes)
    fitting = {training.at(batch): True, training.at(batch + 1): False, larger: True}
    for asked, fits in fitting.items():
        (again,) = plan_encoders(asked, names=["resnet34"])
        assert (again.lacking_bytes == 0) == fits


def test_a_bar_shows_each_step_of_a_plan_and_of_what_would_fit(terminal, monkeypatch):
    shown = terminal()
    monkeypatch.setattr("speechbrain_rev.planner.step.LONG_SECONDS", 0.0)
    training = Training(3 * GIB, 128, 200)
    (encoder,) = plan_encoders(training, names=["resnet34"])
    words = r"planning resnet34: 1 steps \[\d\d:\d\d, .*, batch {}\]"
    assert re.search(words.format(128), shown.getvalue())
    shown.truncate(0)
    with pytest.raises(Infeasible):
        check_fits(encoder)
    assert re.search(words.format(1), shown.getvalue())


def test_a_plan_lists_runs_of_blocks_of_one_mode_stage_by_stage():
    modes = dict.fromkeys(["stem", "stages.0.chain.0", "stages.0.chain.1"], "store")
    modes |= {"stages.1.entry": "recompute", "stages.1.chain.0": "recompute"}
    modes |= {f"stages.1.chain.{i}": "reconstruct" for i in (1, 2, 3)}
    modes |= {"stages.1.chain.4": "store"}
    assert planned_as("revnet57", TIGHT, GIB, modes=modes).stages == [
        "stem: store",
        "stage 1: blocks 0-1 store",
        "stage 2: transition recompute, block 0 recompute, 1-3 reconstruct, 4 store",
    ]


def test_days_are_those_of_all_epochs_at_the_rate_of_a_plan(tight):
    seconds = 150 * 1_092_009 / tight[0].utterances_per_second
    assert tight[0].days == pytest.approx(seconds / (24 * 60 * 60))
    lacking = planned_as("resnet34", TIGHT, 5 * GIB)
    assert (lacking.days, lacking.utterances_per_second) == (None, None)
    assert lacking.lacking_bytes == 5 * GIB - TIGHT.step_budget_bytes(RESNET34)


@pytest.mark.parametrize("chunk", [2 * AUTO, AUTO, AUTO // 4])
def test_the_chunk_of_a_plan_is_the_bytes_that_make_its_channels(tight, chunk):
    row = tight[0].model.row
    channels = tuple(channels_at_the_peak(chunk, row, row.geometry()))
    planned = planned_as(row.name, TIGHT, GIB, modes={}, channels=channels)
    assert (planned.chunk_bytes, tight[0].chunk_bytes) == (chunk, None)


def test_utterances_per_second_are_those_of_a_sweep_at_that_batch(tight):
    (swept,) = sweep_encoder(tight[0].model.row, TIGHT, [128]).sweep.plans
    assert tight[0].utterances_per_second == pytest.approx(swept.samples_per_second)


@pytest.mark.slow(drawn=False)
def test_all_25_are_planned_and_predicted_within_the_budget():
    planned = plan_encoders(Training(11 * GIB, 128, 200))
    encoders = {encoder.model.row.name: encoder for encoder in planned}
    rates = [encoder.model.row.vox1_h_eer for encoder in planned]
    assert rates == sorted(rates)
    assert encoders.keys() == set(ARCHITECTURES)
    lacking = {name for name, encoder in encoders.items() if encoder.lacking_bytes}
    assert lacking == {"resnet152"}
    for encoder in planned:
        assert encoder.counted_bytes is None
        assert 1 <= encoder.seconds / encoder.stored_seconds < 1.6
        least = encoder.model.days
        assert least is None or encoder.days <= least
    for name, mode in [("resnet152", "store"), ("revnet230", "recompute")]:
        network, step = training_step(name, mode=mode, batch=128, frames=200)
        network.set_channels(encoders[name].channels)
        row = architecture(name)
        trained = encoder_step(row, Training(11 * GIB, 128, 200))
        profiled = profile(trained, channels=encoders[name].channels)
        predicted = profiled.peak_bytes(profiled.uniform(mode))
        assert predicted == pytest.approx(live_bytes_peak(step), rel=1e-4)


def test_where_everything_can_be_stored_one_traced_step_shows_it(
    monkeypatch, own_profiles
):
    counted, count = set(), profiling.count

    def noted(trial, about, **options):
        counted.add(tuple(options["modes"]))
        return count(trial, about, **options)

    monkeypatch.setattr(profiling, "count", noted)
    (stored,) = plan_encoders(PLENTY, names=["revnet57"])
    assert stored.seconds == stored.stored_seconds
    assert stored.channels == (None,) * 4
    assert counted == {("store",)}
    # The same by the profile of all modes.
    step = encoder_step(ARCHITECTURES["revnet57"], PLENTY)
    with step.training():
        whole = profiler_of(step).timed(stored.channels)
    assert whole.seconds(stored.modes) == stored.seconds
    assert whole.peak_bytes(stored.modes) == stored.predicted_bytes


def test_a_stored_step_that_counts_more_than_predicted_is_planned(monkeypatch):
    tried = []

    def more_than_fits(profiler, profile, channels, left, counted=plans._counted):
        tried.append(set(profile.blocks[0].modes))
        if len(tried) == 1:
            return profile.uniform("store"), left + 1
        return counted(profiler, profile, channels, left)

    monkeypatch.setattr(plans, "_counted", more_than_fits)
    (planned,) = plan_encoders(PLENTY, names=["resnet34"])
    assert tried == [{"store"}, {"store", "selective", "recompute"}]
    assert planned.lacking_bytes == 0


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("models --card=11GB", r"revnet61 +- +- +- +- +- +- +-"),
        ("plan revnet61 --card=4GB", r"revnet61 +- +[23]\.\d+ +- +1\.\d+ "),
        ("memory revnet61 --batch=16", r"total +\d+\.\d+ [GM]iB"),
    ],
)
def test_a_row_that_was_neither_counted_nor_published_is_listed_and_planned(
    command, shown, uncounted, capsys
):
    assert main(command.split()) == 0
    assert re.search(shown, capsys.readouterr().out, re.MULTILINE)
    assert main([*command.split(), "--json"]) == 0
    assert "revnet61" in [
        plain.get("name") or plain.get("model", plain)["row"]["name"]
        for plain in json.loads(capsys.readouterr().out)
    ]


def test_each_swept_batch_has_the_plan_that_fits_beside_all_else(swept):
    sweep = swept.sweep
    assert [plan.batch for plan in sweep.plans] == [16, 48, 80]
    assert (sweep.best.batch, sweep.infeasible_batch) == (48, 1000)
    other_seconds = optimizer_seconds(RESNET34, SWEPT, None, speed=swept.speed)
    for plan in sweep.plans:
        training = SWEPT.at(plan.batch)
        step = encoder_step(RESNET34, training, speed=swept.speed)
        alone = profile(step, channels=plan.channels)
        step_budget = training.step_budget_bytes(RESNET34)
        *modes, _ = solve(alone.problem(), step_budget)
        assert list(plan.modes.values()) == modes
        left = training.available_bytes - plan.predicted_bytes
        assert left == step_budget - alone.peak_bytes(plan.modes) >= 0
        seconds = alone.seconds(plan.modes) + other_seconds
        assert plan.seconds == pytest.approx(seconds)
    assert (swept.best_batch, swept.device) == (48, None)


def test_times_are_taken_where_it_was_asked():
    swept = sweep_encoder(SMALL, SWEPT, [1, 2], device="cpu")
    assert all(plan.seconds > 0 for plan in swept.sweep.plans)
    assert swept.sweep.about["seconds"].startswith("measured on cpu, ")


def test_an_optimizer_takes_time_and_less_with_fewer_bits():
    light, heavy = (dataclasses.replace(SWEPT, optimizer_bits=bits) for bits in (8, 32))
    estimated = [optimizer_seconds(SMALL, each, None) for each in (light, heavy)]
    assert 0 < estimated[0] < estimated[1] < optimizer_seconds(SMALL, heavy, "cpu")
