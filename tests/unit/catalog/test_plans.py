"""Plans of encoders, of sweeps and of runs: they fit, are the fastest, and say what helps."""

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
import weakref
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from speechbrain_rev import devices
from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.catalog import Training, plans
from speechbrain_rev.catalog.plans import (
    PLANNED_CARD,
    check_fits,
    in_words,
    optimizer_seconds,
    parse_batches,
    plan_encoders,
    plan_for_run,
    sweep_encoder,
)
from speechbrain_rev.catalog.render import PlansReport, SweepReport
from speechbrain_rev.catalog.steps import assumed_speed, encoder_step, training_step
from speechbrain_rev.catalog.table import TABLE_SEVEN
from speechbrain_rev.cli import main
from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    RangeBound,
    reference,
)
from speechbrain_rev.devices import parse_card
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner import (
    Infeasible,
    Plan,
    memory,
    plan_step,
    profile,
    profiling,
)
from speechbrain_rev.planner.knapsack import solve
from speechbrain_rev.planner.memory import SHARE, LiveBytes, live_bytes_peak
from speechbrain_rev.planner.plan import choose
from speechbrain_rev.planner.profiling import Profiler, profiler_of, stored_bytes
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.sizes import GIB, RESERVE_BYTES, enough_text, size_text
from tests.unit.planner.networks import SCALARS

from .builders import CPU, WIDE, planned_as, step_of

BATCH, FRAMES = 128, 200
TIGHT = Training(5 * GIB, BATCH, FRAMES)
PLENTY = Training(24 * GIB, BATCH, FRAMES)
RESNET34 = architecture("resnet34")
#: Small enough to be run.
SMALL = dataclasses.replace(RESNET34, widths=(4, 4, 8, 8), blocks=(3, 1, 1, 1))
#: Of a sweep: stores the smallest batch only.
SWEPT = Training(4 * GIB, 1, FRAMES)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("resnet101", "mixed"), ("revnet57", "mixed"), ("revnet57", "reconstruct")],
)
def test_a_shallow_encoder_tells_the_peak_of_a_deep_one(name, mode):
    row = dataclasses.replace(
        architecture(name), widths=(8, 12, 16, 24), blocks=(3, 1, 4, 2)
    )
    network, step = training_step(
        name, widths=row.widths, blocks=row.blocks, batch=8, frames=200
    )
    found = profile(encoder_step(row, Training(None, 8, 200)))
    modes = found.uniform("reconstruct")
    if mode == "mixed":
        turns = itertools.cycle([0, 2, 1, 1, 0])
        modes = {b.name: b.modes[next(turns) % len(b.modes)] for b in found.blocks}
    network.set_mode(modes)
    counted = trace_bytes(network, step).peak_bytes
    assert found.peak_bytes(modes) == pytest.approx(counted, rel=1e-3)


def test_named_encoders_keep_within_the_budget_when_they_run(tight, tmp_path):
    assert [encoder.model.row.name for encoder in tight] == ["revnet57", "resnet34"]
    for encoder in tight:
        model, row = encoder.model, encoder.model.row
        budget_bytes = TIGHT.step_budget_bytes(row)
        assert encoder.step_bytes == encoder.counted_bytes
        assert 0.9 * budget_bytes < encoder.counted_bytes <= budget_bytes
        assert encoder.predicted_bytes == pytest.approx(encoder.counted_bytes, rel=1e-4)
        check_fits(encoder)
        assert 0 < encoder.mode_counts["store"] < len(encoder.modes)
        needed = TIGHT.needed_bytes(row, "store", BATCH)
        needed["encoder_step"] = encoder.step_bytes
        assert encoder.needed_bytes == sum(needed.values()) <= TIGHT.available_bytes
        largest = max(model.largest_batch(mode) for mode in model.modes)
        assert encoder.largest_batch == max(largest, BATCH)
        assert encoder.cards == math.ceil(256 / encoder.largest_batch)
        # What was saved gives the encoder its modes.
        encoder.as_plan().save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
        assert plan == encoder.as_plan()
        assert plan.about["device"] == "a GPU of 5 GiB"
        with torch.device("meta"):
            network = build_encoder(plan.about["encoder"])
        plan.apply(network)
        modes = {name: mode.value for name, mode in network.block_modes().items()}
        assert modes == plan.modes


def test_more_memory_is_no_slower_and_its_gpu_is_another(tight):
    names = [encoder.model.row.name for encoder in tight]
    speed = tight[0].speed
    for more, less in zip(
        plan_encoders(PLENTY, names=names, speed=speed), tight, strict=True
    ):
        assert more.times_stored == 1 < less.times_stored < 1.5
        assert set(more.modes.values()) == {"store"}
        assert more.times_baseline < less.times_baseline
    (named,) = plan_encoders(PLENTY, names=["resnet34"])
    assert (
        named.speed.about["device"] == "an assumed RTX 3090, listed nearest to 24 GiB"
    )
    assert named.seconds < more.seconds


def test_a_gpu_s_speed_is_that_share_of_its_peaks_that_an_11_gb_gpu_has():
    here = dataclasses.replace(assumed_speed(parse_card("11GB")), about=ASSUMED.about)
    assert here == ASSUMED
    fast = assumed_speed(parse_card("RTX 3090"))
    assert fast.about["device"] == "an assumed RTX 3090"
    assert fast.bytes_per_second / 936e9 == pytest.approx(here.bytes_per_second / 616e9)
    assert fast.flops_per_second / 35.6e12 == pytest.approx(0.5)


def test_a_plan_that_fits_counts_as_a_batch_that_fits():
    # Modes that are mixed can fit where none of those that all blocks share does.
    deep = functools.partial(planned_as, "resnet152", modes={})
    assert 0 < deep(TIGHT, 100 * GIB).largest_batch < BATCH
    assert deep(TIGHT, GIB).largest_batch == BATCH
    assert deep(Training(GIB, 1, FRAMES), GIB).cards is None


@pytest.mark.parametrize("name", TABLE_SEVEN)
def test_stored_encoders_need_about_the_gpus_published_and_ours_no_more(name):
    encoder = planned_as(name, Training(11 * GIB, BATCH, FRAMES), 100 * GIB)
    published = TABLE_SEVEN[name].cards
    if not encoder.model.row.reversible:
        assert encoder.cards_stored == pytest.approx(published, rel=0.1)
    assert encoder.cards <= published


def test_what_does_not_fit_is_refused_with_what_helps_and_that_does():
    training = Training(3 * GIB, BATCH, 200, optimizer_bits=32)
    (encoder,) = plan_encoders(training, names=["resnet34"])
    with pytest.raises(Infeasible, match="Even the lightest plan peaks at") as refused:
        check_fits(encoder)
    message, needed = str(refused.value), refused.value.needed_bytes
    assert f"It lacks {size_text(needed - 3 * GIB)}." in message
    helps = message.partition("What helps: ")[2].removesuffix(".").split("; ")
    batch = int(re.fullmatch(r"a batch of (\d+)", helps[0])[1])
    other = helps[-3].removeprefix("another encoder, for instance ")
    assert training.fits(architecture(other))
    assert helps[-2:] == ["--optimizer_bits=8", f"a GPU of {enough_text(needed)}"]
    larger = dataclasses.replace(training, card_bytes=needed)
    for asked, fits in (
        (training.at(batch), True),
        (training.at(batch + 1), False),
        (larger, True),
    ):
        (found,) = plan_encoders(asked, names=["resnet34"])
        assert (found.lacking_bytes == 0) == fits


def test_utterances_per_second_are_those_of_a_sweep_at_that_batch(tight):
    (swept,) = sweep_encoder(tight[0].model.row, TIGHT, [BATCH]).sweep.plans
    assert tight[0].utterances_per_second == pytest.approx(swept.samples_per_second)
    lacking = dataclasses.replace(tight[0], counted_bytes=100 * GIB)
    assert lacking.utterances_per_second is None


@pytest.mark.slow
def test_all_25_are_planned_and_predicted_within_the_budget():
    encoders = plan_encoders(Training(11 * GIB, BATCH, FRAMES), workers=2)
    rates = [encoder.model.row.vox1_h_eer for encoder in encoders]
    assert rates == sorted(rates)
    assert {encoder.model.row.name for encoder in encoders} == set(ARCHITECTURES)
    lacking = {e.model.row.name for e in encoders if e.lacking_bytes}
    assert lacking == {"resnet101", "resnet152"}
    for encoder in encoders:
        assert encoder.counted_bytes is None
        assert 1 <= encoder.times_stored < 1.6
    for name, mode in [("resnet152", "store"), ("revnet230", "recompute")]:
        (found,) = [e for e in encoders if e.model.row.name == name]
        network, step = training_step(name, mode=mode, batch=BATCH, frames=FRAMES)
        network.set_channels(found.channels)
        predicted = found.profile.peak_bytes(found.profile.uniform(mode))
        assert predicted == pytest.approx(live_bytes_peak(step), rel=1e-4)
    assert len(PlansReport(encoders).text().splitlines()) > 27


def test_a_process_that_was_ended_is_reported_with_what_to_do(monkeypatch):
    def ended(self, *_):
        raise BrokenProcessPool

    monkeypatch.setattr(plans.ProcessPoolExecutor, "map", ended)
    with pytest.raises(MemoryError, match=r"One of 2 processes .* Name the encoders"):
        plan_encoders(TIGHT, workers=2)


def test_where_everything_can_be_stored_one_traced_step_tells_it(
    monkeypatch, own_profiles
):
    counted, count = [], profiling.count

    def noted(trial, about, **options):
        counted.append(list(options["modes"]))
        return count(trial, about, **options)

    monkeypatch.setattr(profiling, "count", noted)
    (stored,) = plan_encoders(PLENTY, names=["revnet57"])
    assert (stored.times_stored, stored.channels) == (1, (None,) * 4)
    assert {*map(tuple, counted)} == {("store",)}
    assert stored.counted_bytes == pytest.approx(stored.predicted_bytes, rel=1e-4)
    # The same by the profile of all modes.
    step = encoder_step(ARCHITECTURES["revnet57"], PLENTY)
    with step.training():
        whole = profiler_of(step).timed(stored.channels)
    assert whole.seconds(stored.modes) == stored.seconds
    assert whole.peak_bytes(stored.modes) == stored.predicted_bytes


def test_a_stored_step_that_counts_more_than_predicted_is_planned(monkeypatch):
    counts = []

    def more_than_fits(profiler, found, channels, left, show, counted=plans._counted):
        counts.append(set(found.blocks[0].modes))
        if len(counts) == 1:
            return found.uniform("store"), left + 1
        return counted(profiler, found, channels, left, show)

    monkeypatch.setattr(plans, "_counted", more_than_fits)
    (found,) = plan_encoders(PLENTY, names=["resnet34"])
    assert counts == [{"store"}, {"store", "recompute"}]
    assert found.lacking_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("models --card=11GB", r"revnet61 +II +61 +6\.30 +- +- +- +- +- +- "),
        ("plan revnet61 --card=4GB", r"revnet61 +6\.30 +- +[23]\.\d+ +- +counted "),
        (
            "memory revnet61 --mode=plan --card=4GB --batch=16",
            r"revnet61 after +plan \d+/\d+/\d+ +sgd 8 bit",
        ),
    ],
)
def test_a_row_that_was_neither_counted_nor_published_is_listed_and_planned(
    arguments, shown, uncounted, capsys
):
    assert main(arguments.split()) == 0
    assert re.search(shown, capsys.readouterr().out, re.MULTILINE)
    assert main([*arguments.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out).get("encoders", [])
    for plain in rows:
        if plain["name"] == uncounted.name:
            assert set(plain["published"].values()) == {None}


def test_each_swept_batch_has_the_plan_that_fits_beside_all_else(swept):
    found = swept.sweep
    assert [plan.batch for plan in found.plans] == [16, 48, 80]
    assert (found.best.batch, found.infeasible_batch) == (48, 1000)
    for plan in found.plans:
        training = SWEPT.at(plan.batch)
        alone = profile(encoder_step(RESNET34, training), channels=plan.channels)
        step_budget = training.step_budget_bytes(RESNET34)
        *modes, _ = solve(alone.problem(), step_budget)
        assert list(plan.modes.values()) == modes
        left = training.available_bytes - plan.predicted_bytes
        assert left == step_budget - alone.peak_bytes(plan.modes) >= 0
        other = optimizer_seconds(RESNET34, SWEPT, None)
        assert plan.seconds == pytest.approx(alone.seconds(plan.modes) + other)
    # Estimated times are linear in the batch.
    assert all(time.worst_deviation < 0.001 for time in found.times.values())
    document = json.loads(SweepReport(swept).json())
    assert (document["best_batch"], document["times"]["device"]) == (48, None)
    assert document["times"]["speed"] == json.loads(swept.speed.to_json())


@pytest.mark.slow
def test_the_chunk_of_each_swept_plan_is_the_one_that_was_chosen():
    row, training = architecture("revnet57"), Training(2 * GIB, 56, 200)
    (plan,) = sweep_encoder(row, training, [56]).sweep.plans
    step = encoder_step(row, training)
    with step.training():
        chosen = choose(Profiler(step), training.step_budget_bytes(row))
    assert chosen.channels != (None,) * 4
    assert (plan.channels, dict(plan.modes)) == (chosen.channels, chosen.modes)


def test_times_are_taken_where_it_was_asked():
    swept = sweep_encoder(SMALL, SWEPT, [1, 2], device="cpu")
    assert all(plan.seconds > 0 for plan in swept.sweep.plans)
    text = " ".join(SweepReport(swept).text().split())
    assert "Times: measured on cpu (measured on cpu, " in text
    assert "Plans were not run" in text
    assert text.count("too few batches to know") == 2


@pytest.fixture
def timed(monkeypatch, own_profiles):
    """Batches that are timed; memory runs out at some of them."""
    noted, lacks = [], set()
    measured, trial = profiling.measured_seconds, profiling.Step.trial

    def taken(network, run, device, **options):
        noted.append(network.current)
        if network.current in lacks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measured(network, run, device, **options)

    def made(self, batch=None, module=None, channels=None):
        found = trial(self, batch, module, channels)
        found.network.current = self.batch
        return found

    monkeypatch.setattr(profiling.Step, "trial", made)
    monkeypatch.setattr(profiling, "measured_seconds", taken)
    monkeypatch.setattr(plans, "optimizer_seconds", lambda *_, **__: 0.1)
    return noted, lacks


def test_memory_that_ran_out_is_a_row_and_the_sweep_goes_on(timed):
    timed[1].add(2)
    found = sweep_encoder(SMALL, SWEPT, [1, 2, 3], device="cpu")
    assert [bool(plan.modes) for plan in found.sweep.plans] == [True, False, True]
    assert "-  memory ran out while it was timed" in SweepReport(found).text()
    assert json.loads(SweepReport(found).json())["out_of_memory"] == [2]
    timed[1].update({4, 5})
    message = r"Memory ran out while batches \[4, 5\] were profiled"
    with pytest.raises(MemoryError, match=message):
        sweep_encoder(SMALL, SWEPT, [4, 5], device="cpu")


def test_where_a_batch_does_not_fit_fewer_utterances_are_timed(timed, monkeypatch):
    step = encoder_step(SMALL, SWEPT.at(4), device=CPU)
    with step.training():
        peak = stored_bytes(step.at(2), step.shallow().to("meta"), step.channels[0][0])
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: peak / SHARE + 1000)
    swept = sweep_encoder(SMALL, SWEPT, [1, 2, 4], device="cpu")
    assert [plan.timed_batch for plan in swept.sweep.plans] == [1, 2, 2]
    lines = SweepReport(swept).text().splitlines()
    assert [line.endswith("timed at batch 2") for line in lines[2:5]] == [0, 0, 1]
    # Times of twice as many utterances are twice those that were taken.
    _, some, many = swept.sweep.plans
    assert many.seconds > some.seconds


def test_a_batch_that_no_plan_makes_fit_is_not_timed(timed):
    training = Training(3 * GIB // 2, 1, 200)
    swept = sweep_encoder(SMALL, training, [1, 9000], device="cpu")
    assert (swept.sweep.infeasible_batch, timed[0]) == (9000, [1])
    with pytest.raises(Infeasible, match="Even the lightest plan peaks at"):
        sweep_encoder(RESNET34, training, [80], device="cpu")
    assert timed[0] == [1]


def test_an_optimizer_without_memory_is_said_and_what_it_took_is_freed(monkeypatch):
    held = []

    def greedy(row, training, device, **_):
        big = torch.nn.Linear(2, 2)
        held.append(weakref.ref(big))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plans, "optimizer_seconds", greedy)
    message = r"ran out on cpu while the step of sgd .* resnet34.*leave out --device"
    with pytest.raises(MemoryError, match=message):
        sweep_encoder(SMALL, SWEPT, [2], device="cpu")
    assert held[0]() is None


def test_a_smallest_batch_that_does_not_fit_is_refused_with_what_helps():
    small = Training(3 * GIB // 2, 1, 200)
    with pytest.raises(Infeasible, match=r"What helps: a batch of \d+; ") as refused:
        sweep_encoder(RESNET34, small, [80, 48])
    fits = int(str(refused.value).partition("a batch of ")[2].partition(";")[0])
    swept = sweep_encoder(RESNET34, small, [fits, fits + 1])
    assert swept.sweep.infeasible_batch == fits + 1 <= 48


def test_an_optimizer_takes_time_and_less_with_fewer_bits():
    light, heavy = (dataclasses.replace(SWEPT, optimizer_bits=bits) for bits in (8, 32))
    estimated = [optimizer_seconds(SMALL, each, None) for each in (light, heavy)]
    assert 0 < estimated[0] < estimated[1] < optimizer_seconds(SMALL, heavy, "cpu")


@pytest.mark.parametrize(
    ("text", "batches"),
    [("1:3", [1, 2, 3]), ("16:50:16", [16, 32, 48]), ("8:8:4", [8])],
)
def test_batches_are_read(text, batches):
    assert list(parse_batches(text)) == batches


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "--batches takes the first, the last and")
          for text in ("", "16", "32:16", "16:32:0", "a:b", "1:2:3:4", "-1:4")),
        *((text, "from 1 to 1000000 utterances") for text in ("0:4", "1:2000000")),
    ],
)  # fmt: skip
def test_other_batches_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_batches(text)


@pytest.mark.parametrize(
    ("changed", "offered", "not_offered"),
    [
        ({}, ["batch_size: ", "a smaller chunk", "optimizer_bits: 8"], []),
        ({"optimizer_bits": 8}, ["another arch"], ["optimizer_bits"]),
        ({"searches_chunk": True}, ["chunk_samples (now 24"], ["smaller chunk"]),
        ({"begun": True}, ["memory_budget: "], ["smaller chunk"]),
        ({"arch": "resnet34"}, ["another arch"], ["smaller chunk"]),
    ],
)
@pytest.mark.slow
def test_only_remedies_that_can_help_a_run_are_named(changed, offered, not_offered):
    step = step_of(**{"batch": 24, **changed}).step()
    with pytest.raises(Infeasible) as caught:
        plan_step(step, 10**5)
    budget = caught.value.needed_bytes * 2 // 3
    with pytest.raises(Infeasible) as caught:
        plan_step(step, budget)
    helps = str(caught.value).partition("What helps: ")[2]
    assert all(words in helps for words in offered)
    assert not any(words in helps for words in not_offered)
    assert re.match(r"batch_size: \d+ for each process \(now 24\); lower chunk_", helps)
    needed = re.search(r"memory_budget: ([\d.]+ MiB)\.$", helps)[1]
    assert plan_step(step, needed).measured_bytes


def test_where_what_is_fixed_is_too_much_nothing_of_a_step_is_advised():
    with pytest.raises(Infeasible) as caught:
        plan_step(step_of("resnet34").step(), 1000)
    said = str(caught.value)
    assert "Weights, gradients, optimizer states, classifier and input take" in said
    assert "What helps: another arch; optimizer_bits: 8; memory_budget: " in said
    assert not any(word in said for word in ("batch_size", "chunk"))


@pytest.mark.parametrize("searches_chunk", [True, False])
def test_a_budget_that_nothing_fits_is_refused_before_a_time_is_taken(
    searches_chunk, monkeypatch
):
    step = step_of(searches_chunk=searches_chunk, batch=3, frames=32).step()
    with monkeypatch.context() as patch:
        patch.setattr(profiling, "measured_seconds", None)
        with pytest.raises(Infeasible) as caught:
            plan_step(step, 10**5)
        needed = caught.value.needed_bytes
        with pytest.raises(Infeasible):
            plan_step(step, needed - SCALARS)
        with pytest.raises(TypeError):
            plan_step(step, needed + SCALARS)
    found = plan_step(step, needed + SCALARS)
    assert found.seconds > 0
    assert found.about["seconds"].startswith("measured on")


def test_the_budget_that_is_needed_on_a_gpu_is_enough(monkeypatch):
    # A GPU that is not there: profiled, verified and timed on the CPU.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake")
    there = step_of(device=torch.device("cuda")).step()
    assert (there.is_card, step_of().step().is_card) == (True, False)
    step = dataclasses.replace(there, device=CPU)
    with pytest.raises(Infeasible) as caught:
        plan_step(step, 10**6)
    needed = caught.value.needed_bytes
    assert needed > RESERVE_BYTES
    plan = plan_step(step, needed)
    shares = (int(plan.about[f"{name}_bytes"]) for name in ("staying", "reserved"))
    assert sum(shares) + plan.budget_bytes == needed
    with pytest.raises(Infeasible):
        plan_step(step, needed - 2 * SCALARS)


def test_float_streams_are_not_reconstructed_under_half_precision():
    def refused(arch="revnet57", **changed):
        return Profiler(step_of(arch, **changed).step())._refused

    with pytest.warns(UserWarning, match=r"Not reconstructed.*stages.0.chain.0"):
        found = refused(streams="float", precision="bf16")
    assert found == sorted(step_of().encoder.reversible_blocks())
    for changed in ({"streams": "float"}, {"precision": "bf16"}, {"arch": "resnet34"}):
        assert refused(**changed) == []


def made(step, kept, **given):
    said = []
    given = {"plan_file": None, "memory_budget": None, **given}
    plan = plan_for_run(step, kept=kept, say=said.append, **given)
    plan.save(kept)
    return plan, said


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "plan.json"


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    path = tmp_path_factory.mktemp("first") / "plan.json"
    plan, said = made(step_of(searches_chunk=True), path, memory_budget="1GB")
    assert said[0].startswith("memory plan: 1GB is 1 GiB; times of blocks on cpu")
    return path, plan


def test_a_budget_s_plan_is_kept_and_says_how_the_budget_is_shared(first):
    path, plan = first
    step = step_of(searches_chunk=True)
    assert made(step, path, memory_budget="1GB") == (plan, [])
    again, said = made(step, path)
    assert again == plan
    assert said[0].startswith(f"memory plan: of this run, {path}")
    assert plan.about["memory_budget_bytes"] == str(GIB)
    assert plan.about["seconds"] == f"measured on {devices.described(CPU)}, at batch 4"
    staying = int(plan.about["staying_bytes"])
    assert staying + plan.budget_bytes == GIB
    words = in_words(plan)
    assert f"budget 1.000 GiB, {size_text(staying)} of it for weights, gr" in words
    assert f"peaks at {size_text(plan.measured_bytes)} counted" in words
    assert words.endswith(f"remaining {size_text(plan.budget_bytes)}")
    assert in_words(plan.with_about(plan_file="p.json")).endswith("of plan_file p.json")


def test_a_plan_of_a_budget_in_other_gigabytes_is_the_run_s(first, kept):
    """Up to 0.1.0 GB of a budget were 1e9 bytes; such a run goes on with its plan."""
    less = 10**9 - GIB
    old = dataclasses.replace(first[1], budget_bytes=first[1].budget_bytes + less)
    old = old.with_about(memory_budget_bytes="1000000000")
    old.save(kept)
    step = step_of(searches_chunk=True)
    assert made(step, kept, memory_budget="1GB") == (old, [])
    assert "budget 953.7 MiB, " in in_words(old)


@pytest.mark.parametrize("there", [None, int(10.4 * GIB), 24 * GIB, 8 * GIB])
def test_a_plan_for_a_size_of_gpu_warns_where_there_is_less(
    first, kept, monkeypatch, recwarn, there
):
    named = kept.with_name("named.json")
    about = {"device": "a GPU of 11 GiB", PLANNED_CARD: str(11 * GIB)}
    named.write_text(first[1].with_about(**about).to_json())
    monkeypatch.setattr(plans, "free_and_held_bytes", lambda _: there)
    made(step_of(searches_chunk=True), kept, plan_file=named)
    warned = ["was made for device" in str(w.message) for w in recwarn]
    assert sum(warned) == (there == 8 * GIB)


OWN, OTHER = [8, 8, 8, 8], [1, 3, 5, 7]
FILE, BUDGET, NOTHING = {"plan_file": "KEPT"}, {"memory_budget": "1GB"}, {}


@pytest.mark.parametrize(
    ("changed", "channels", "given", "message"),
    [
        ({"batch": 5}, None, NOTHING, r"batch 4, and this is 5\. Delete it"),
        ({"optimizer_bits": 8}, None, BUDGET, r"optimizer sgd, 32 bit, and this is sgd"),
        ({"searches_chunk": False}, OTHER, BUDGET,
         r"chunk was chosen by chunk: auto, and here it is set, which makes \[1, 3"),
        ({"searches_chunk": False}, OTHER, FILE, "chunk: auto, which takes the plan"),
        ({"begun": True}, OWN, BUDGET, r"began with \[8, 8, 8, 8\], which never change"),
        ({"begun": True}, OWN, FILE, r"began with \[8, 8, 8, 8\], which never change"),
    ],
)  # fmt: skip
def test_a_kept_plan_of_another_run_is_refused(
    first, changed, channels, given, message
):
    step = step_of(**{"searches_chunk": True} | changed)
    if channels is not None:
        step.encoder.set_channels(channels)
    given = {k: first[0] if v == "KEPT" else v for k, v in given.items()}
    with pytest.raises(ValueError, match=message):
        made(step, first[0], **given)


def test_a_run_that_goes_on_keeps_its_channels(first, kept):
    step = step_of(searches_chunk=True, begun=True)
    step.encoder.set_channels(OWN)
    assert first[1].channels != OWN
    assert made(step, kept, memory_budget="1GB")[0].channels == OWN
    fixed = step_of()
    fixed.encoder.set_channels(first[1].channels)
    assert made(fixed, kept, plan_file=first[0])[0].modes == first[1].modes


def test_a_plan_file_that_is_not_there_is_said_with_what_to_give(first, kept):
    step, missing = step_of(searches_chunk=True), kept.with_name("missing.json")
    with pytest.raises(FileNotFoundError, match=rf"plan_file: {missing} is no f") as e:
        made(step, kept, plan_file=missing)
    assert "leave plan_file out" not in str(e.value)
    with pytest.raises(FileNotFoundError, match=rf"leave .* and go on with {first[0]}"):
        made(step, first[0], plan_file=missing)


def test_an_automatic_budget_is_resolved_once_and_kept(kept, monkeypatch):
    step = step_of(searches_chunk=True)
    monkeypatch.setattr(devices, "free_and_held_bytes", lambda device: 10**9)
    plan, said = made(step, kept, memory_budget="auto")
    assert plan.about["memory_budget_bytes"] == str(10**9)
    assert "auto is 953.7 MiB" in said[0]
    monkeypatch.setattr(devices, "free_and_held_bytes", lambda device: 10**8)
    assert made(step, kept, memory_budget="auto") == (plan, [])


def test_each_thing_that_a_plan_file_is_not_for_is_said_once(first, kept):
    step = step_of(searches_chunk=True, batch=5, precision="bf16")
    for given in ({"plan_file": first[0]}, {}):
        with pytest.warns(UserWarning, match="plan") as said:
            plan, _ = made(step, kept, **given)
        texts = [str(w.message) for w in said]
        assert len(texts) == 2
        assert any("for batch 4, and this is 5" in text for text in texts)
        assert any("for precision fp32, and this is bf16" in text for text in texts)
    assert plan.about["plan_file"] == str(first[0])
    # A budget is not met by it.
    plan, said = made(step_of(searches_chunk=True), kept, memory_budget="1GB")
    assert said
    assert "plan_file" not in plan.about


@pytest.mark.parametrize("given", ["plan_file", "memory_budget", None])
@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("memory_budget_bytes", "7", "but memory_budget_bytes less staying_bytes and"),
        ("staying_bytes", "1e9", "staying_bytes is '1e9' and takes digits"),
        ("reserved_bytes", "-1", "reserved_bytes is '-1' and takes digits"),
    ],
)
def test_a_plan_whose_budget_is_not_what_its_shares_leave_is_refused(
    first, tmp_path, given, name, number, said
):
    bad = tmp_path / "bad.json"
    first[1].with_about(**{name: number}).save(bad)
    value = {"plan_file": str(bad), "memory_budget": "1GB"}.get(given)
    kept = tmp_path / "kept.json" if given == "plan_file" else bad
    with pytest.raises(ValueError, match=rf"bad\.json: This is no plan .*{said}"):
        made(step_of(), kept, **({given: value} if given else {}))


@pytest.fixture(scope="module")
def compressing(tmp_path_factory):
    """A plan that may compress, where no lossless one fits."""
    path = tmp_path_factory.mktemp("compressing") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        # Tensors are small: so let be what the codec works on at a time.
        patch.setattr(reference, "SLICE", 2**12)
        step = step_of("resnet34", **WIDE)
        with pytest.raises(Infeasible) as caught:
            plan_step(step.step(), 1)
        budget = f"{caught.value.needed_bytes - 10_000}B"
        with pytest.raises(Infeasible):
            made(step, path, memory_budget=budget)
        plan, _ = made(step, path, memory_budget=budget, max_gradient_error=0.05)
    return step, path, plan, budget


@pytest.mark.slow
def test_a_training_compresses_where_no_lossless_plan_fits(compressing):
    step, _, plan, _ = compressing
    assert "compress" in plan.modes.values()
    assert plan.measured_bytes <= plan.budget_bytes
    assert 0 < plan.measured_gradient_error <= 0.05
    assert "gradient error" in in_words(plan)
    assert "of noise" in plan.about["gradient error"]
    # What was planned is as it was.
    assert {m.value for m in step.encoder.block_modes().values()} == {"store"}
    assert not step.encoder.compression.assumed_bits


def test_a_plan_with_another_limit_of_its_error_is_made_anew(compressing, monkeypatch):
    step, path, plan, budget = compressing
    asked = []

    def planned(step, size, *, max_gradient_error):
        asked.append(max_gradient_error)
        return plan

    monkeypatch.setattr(plans, "plan_step", planned)
    for limit in (0.05, 0.02, None):
        kept = path.with_name(f"kept {limit}.json")
        plan.save(kept)
        made(step, kept, memory_budget=budget, max_gradient_error=limit)
    assert asked == [0.02, None]


def test_counts_without_contents_are_those_of_what_was_measured():
    training = step_of("resnet34", precision="bf16", **WIDE)
    # Coarse, for halves have few bits.
    training.encoder.compression = ActivationCompression(
        convolutions=RangeBound(3e-2), normalisations=DeviationBound(3e-2)
    )
    step = training.step()
    with step.training():
        profiler = profiler_of(step, 1.0)
        found = profiler.counted().profile
        encoder = profiler.probe.trial.module
        modes = found.uniform("compress")
        assert set(modes.values()) == {"compress"}
        held = {}
        for name in ("store", "compress"):
            encoder.set_mode(name)
            with LiveBytes() as meter:
                feats = torch.randn(4, training.frames, 48)
                with step.autocast(CPU):
                    y = encoder(feats)
                held[name] = meter.live
            del y
    counted = {
        name: sum(b.costs[pair_of(b, name)].held_bytes for b in found.blocks)
        for name in held
    }
    assert counted["compress"] < counted["store"]
    less, expected = (h["store"] - h["compress"] for h in (held, counted))
    assert less == pytest.approx(expected, rel=0.1)


def pair_of(block, name):
    return (name, name) if (name, name) in block.costs else (None, name)


@pytest.fixture(scope="module")
def tried():
    """What compression costs a run, tried on two utterances."""
    step = dataclasses.replace(step_of("resnet34", **WIDE).step(), timed_batch=2)
    with step.training():
        profiler = profiler_of(step, 0.1)
        yield profiler, profiler.timed(step.channels[0][0])


def held_with(tried, solve, monkeypatch, peaks):
    """Hold a plan to 1000 bytes where the whole batch takes others."""
    profiler, found = tried
    module = sys.modules["speechbrain_rev.planner.plan"]
    seen = iter(peaks)
    monkeypatch.setattr(module, "_peak_bytes", lambda *_: next(seen))
    chosen = module.Choice(None, found, found.uniform("compress"), 1, fits=True)
    return module._held(profiler, chosen, solve, 1000)


def test_a_whole_batch_that_takes_more_than_its_budget_is_heeded(tried, monkeypatch):
    """Sizes of few utterances are not those of all; and memory may run out."""
    _, found = tried
    asked = []

    def solve(own, left):
        asked.append((left, own.max_gradient_error))
        modes = found.uniform("compress" if own.max_gradient_error else "recompute")
        return Plan(modes, None, left, 1, 1, 1.0, {})

    for peaks, expected in (
        ([1000], [1000]),
        ([1100, 990], [1000, 900]),
        ([None, 1001, 1000], [1000, 900, 899]),
    ):
        asked.clear()
        plan = held_with(tried, solve, monkeypatch, peaks)
        assert [left for left, _ in asked] == expected
        assert (plan.measured_bytes, plan.budget_bytes) == (peaks[-1], 1000)
    plan = held_with(tried, solve, monkeypatch, itertools.repeat(2000))
    assert asked[-1] == (1000, 0.0)
    assert "compress" not in plan.modes.values()


def test_a_lossless_plan_after_one_that_took_too_much_has_all_the_room(
    tried, monkeypatch
):
    _, found = tried

    def solve(own, left):
        # With the whole budget it compresses, with less it does not.
        lossy = own.max_gradient_error and left == 1000
        modes = found.uniform("compress" if lossy else "recompute")
        return Plan(modes, None, left, 1, 1, 1.0, {})

    plan = held_with(tried, solve, monkeypatch, itertools.repeat(1100))
    assert set(plan.modes.values()) == {"recompute"}
    assert plan.budget_bytes == 1000


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_of_chains_compress_beside_those_that_reconstruct(precision):
    training = step_of(blocks=(1, 2, 0, 1), precision=precision, searches_chunk=True)
    training.encoder.compression = ActivationCompression(
        convolutions=RangeBound(3e-2), normalisations=DeviationBound(3e-2)
    )
    step = dataclasses.replace(training.step(), timed_batch=2)
    with step.training():
        profiler = profiler_of(step, 1.0)
        for channels in (None,) * 4, (8,) * 4:
            found = profiler.timed(channels)
            # Maps of the last stage are too small.
            chained = [
                b
                for b in found.blocks
                if {"compress", "reconstruct", "store"} <= set(b.modes)
            ]
            assert len(chained) == 3
        turns = itertools.cycle(["reconstruct", "compress"])
        modes = found.uniform("recompute") | {b.name: next(turns) for b in chained}
        assert found.peak_bytes(modes) > 0
        error = profiler.probe.gradient_error(modes)
        assert error == pytest.approx(found.gradient_error(modes), rel=0.5)
        profiler.probe.trial.module.check_streams()
    plan = plan_step(step, 10**9, max_gradient_error=1.0)
    assert set(plan.modes.values()) == {"store"}
    assert plan.measured_gradient_error == 0
