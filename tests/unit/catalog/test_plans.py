"""Plans of encoders, of sweeps and of runs: they fit, are the fastest, and name what helps."""

import dataclasses
import functools
import itertools
import json
import math
import re
import signal
import subprocess
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
from speechbrain_rev.catalog.steps import encoder_step, training_step
from speechbrain_rev.cli import main
from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    RangeBound,
)
from speechbrain_rev.devices import parse_card
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.geometry import AUTO, channels_at_the_peak
from speechbrain_rev.planner import (
    Infeasible,
    Plan,
    plan_step,
    profile,
    profiling,
)
from speechbrain_rev.planner.knapsack import solve
from speechbrain_rev.planner.memory import LiveBytes, live_bytes_peak
from speechbrain_rev.planner.profiling import Profiler, profiler_of
from speechbrain_rev.sizes import GIB, reserve_of, reserve_text, size_text
from speechbrain_rev.speed import ASSUMED, assumed_speed
from tests.unit.planner.networks import SCALARS

from .builders import CPU, WIDE, planned_as, step_of

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
        assert 0 < encoder.mode_counts["store"] < len(encoder.modes)
        needed = TIGHT.needed_bytes(row, "store", 128)
        needed["encoder_step"] = encoder.step_bytes
        assert encoder.needed_bytes == sum(needed.values()) <= TIGHT.available_bytes
        largest = max(model.largest_batch(mode) for mode in model.modes)
        assert encoder.largest_batch == max(largest, 128)
        assert encoder.cards == math.ceil(256 / encoder.largest_batch)
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
    same_speed = plan_encoders(PLENTY, names=names, speed=tight[0].speed)
    for more, less in zip(same_speed, tight, strict=True):
        assert more.times_stored == 1 < less.times_stored < 1.5
        assert more.times_baseline < less.times_baseline
        assert less.days <= less.model.least_days
    (named,) = plan_encoders(PLENTY, names=["resnet34"])
    about = "an assumed RTX 3090, listed nearest to 24 GiB (or name RTX 4090, A10, L4)"
    assert named.speed.about["device"] == about
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
    assert 0 < deep(TIGHT, 100 * GIB).largest_batch < 128
    assert deep(TIGHT, GIB).largest_batch == 128
    assert deep(Training(GIB, 1, 200), GIB).cards is None


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
    assert dataclasses.replace(tight[0], counted_bytes=5 * GIB).days is None


@pytest.mark.parametrize("chunk", [2 * AUTO, AUTO, AUTO // 4])
def test_the_chunk_of_a_plan_is_the_bytes_that_make_its_channels(tight, chunk):
    row = tight[0].model.row
    channels = tuple(channels_at_the_peak(chunk, row, row.geometry()))
    assert dataclasses.replace(tight[0], channels=channels).chunk_bytes == chunk
    all_channels = (None,) * len(channels)
    assert dataclasses.replace(tight[0], channels=all_channels).chunk_bytes is None


def test_utterances_per_second_are_those_of_a_sweep_at_that_batch(tight):
    (swept,) = sweep_encoder(tight[0].model.row, TIGHT, [128]).sweep.plans
    assert tight[0].utterances_per_second == pytest.approx(swept.samples_per_second)
    lacking = dataclasses.replace(tight[0], counted_bytes=100 * GIB)
    assert lacking.utterances_per_second is None


@pytest.mark.slow(drawn=False)
def test_all_25_are_planned_and_predicted_within_the_budget():
    planned = plan_encoders(Training(11 * GIB, 128, 200), workers=2)
    encoders = {encoder.model.row.name: encoder for encoder in planned}
    rates = [encoder.model.row.vox1_h_eer for encoder in planned]
    assert rates == sorted(rates)
    assert encoders.keys() == set(ARCHITECTURES)
    lacking = {name for name, encoder in encoders.items() if encoder.lacking_bytes}
    assert lacking == {"resnet152"}
    for encoder in planned:
        assert encoder.counted_bytes is None
        assert 1 <= encoder.times_stored < 1.6
        least = encoder.model.least_days
        assert least is None or encoder.days <= least
    for name, mode in [("resnet152", "store"), ("revnet230", "recompute")]:
        network, step = training_step(name, mode=mode, batch=128, frames=200)
        network.set_channels(encoders[name].channels)
        profiled = encoders[name].profile
        predicted = profiled.peak_bytes(profiled.uniform(mode))
        assert predicted == pytest.approx(live_bytes_peak(step), rel=1e-4)
    assert len(PlansReport(planned).text().splitlines()) > 27


def test_a_process_that_was_ended_is_reported_with_what_to_do(monkeypatch):
    def ended(self, *_):
        raise BrokenProcessPool

    monkeypatch.setattr(plans.ProcessPoolExecutor, "submit", ended)
    with pytest.raises(MemoryError, match=r"One of 2 processes .* Name the encoders"):
        plan_encoders(TIGHT, workers=2)


@pytest.mark.parametrize(
    ("ended_by", "status"),
    [("SIGINT", 130), pytest.param("SIGTERM", 143, marks=pytest.mark.slow)],
)
def test_a_signal_ends_all_processes_that_plan_and_leaves_nothing(ended_by, status):
    # Where SIGINT is ignored, as by workers of xdist, a new process would ignore it.
    heeding = "import signal as s, sys; s.signal(s.SIGINT, s.default_int_handler); "
    command = heeding + "from speechbrain_rev.cli import main; sys.exit(main())"
    started = subprocess.Popen(
        [sys.executable, "-c", command, "plan", "--card=6GB"],
        stderr=subprocess.PIPE,
        text=True,
    )
    # The line comes after some seconds, when there are processes.
    first = started.stderr.readline()
    assert first.startswith("planning:   0%|")
    assert "0/25 [00:0" in first
    started.send_signal(getattr(signal, ended_by))
    _, errors = started.communicate()
    assert started.returncode == status
    words = "speechbrain-rev: interrupted." if status == 130 else ""
    assert errors.strip() == words


def test_where_everything_can_be_stored_one_traced_step_shows_it(
    monkeypatch, own_profiles
):
    counted, count = set(), profiling.count

    def noted(trial, about, **options):
        counted.add(tuple(options["modes"]))
        return count(trial, about, **options)

    monkeypatch.setattr(profiling, "count", noted)
    (stored,) = plan_encoders(PLENTY, names=["revnet57"])
    assert (stored.times_stored, stored.channels) == (1, (None,) * 4)
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
    assert tried == [{"store"}, {"store", "recompute"}]
    assert planned.lacking_bytes == 0


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("models --card=11GB", r"revnet61 +II +61 +6\.30 +- +- +- +- +- +- "),
        ("plan revnet61 --card=4GB", r"revnet61 +6\.30 +- +[23]\.\d+ +- +counted "),
        ("memory revnet61 --mode=plan --card=4GB --batch=16", r"after +plan \d+/\d+/"),
    ],
)
def test_a_row_that_was_neither_counted_nor_published_is_listed_and_planned(
    command, shown, uncounted, capsys
):
    assert main(command.split()) == 0
    assert re.search(shown, capsys.readouterr().out, re.MULTILINE)
    assert main([*command.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out).get("encoders", [])
    published = [plain["published"] for plain in rows if plain["name"] == "revnet61"]
    assert all(set(figures.values()) == {None} for figures in published)


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
    document = json.loads(SweepReport(swept).json())
    assert (document["best_batch"], document["times"]["device"]) == (48, None)
    assert document["times"]["speed"] == json.loads(swept.speed.to_json())


def test_times_are_taken_where_it_was_asked():
    swept = sweep_encoder(SMALL, SWEPT, [1, 2], device="cpu")
    assert all(plan.seconds > 0 for plan in swept.sweep.plans)
    text = " ".join(SweepReport(swept).text().split())
    assert "Times: measured on cpu (measured on cpu, " in text
    assert "Plans were not run" in text


def test_an_optimizer_without_memory_is_reported_and_what_it_took_is_freed(monkeypatch):
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


def test_an_optimizer_takes_time_and_less_with_fewer_bits():
    light, heavy = (dataclasses.replace(SWEPT, optimizer_bits=bits) for bits in (8, 32))
    estimated = [optimizer_seconds(SMALL, each, None) for each in (light, heavy)]
    assert 0 < estimated[0] < estimated[1] < optimizer_seconds(SMALL, heavy, "cpu")


BATCHES = {"1:3": [1, 2, 3], "16:50:16": [16, 32, 48], "8:8:4": [8]}
NOT_WRITTEN = "", "16", "32:16", "16:32:0", "a:b", "1:2:3:4", "-1:4"


def test_batches_are_read_or_refused():
    for text, batches in BATCHES.items():
        assert list(parse_batches(text)) == batches
    refused = dict.fromkeys(NOT_WRITTEN, "--batches takes the first, the last and")
    refused |= dict.fromkeys(("0:4", "1:2000000"), "from 1 to 1000000 utterances")
    for text, message in refused.items():
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
@pytest.mark.slow(drawn=False)
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
    message = str(caught.value)
    assert "Weights, gradients, optimizer states, classifier and input take" in message
    assert "What helps: another arch; optimizer_bits: 8; memory_budget: " in message


def test_the_budget_that_is_needed_on_a_gpu_is_enough(monkeypatch):
    # A GPU that is not there: profiled, verified and timed on the CPU.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake")
    there = step_of(device=torch.device("cuda")).step()
    assert (there.is_card, step_of().step().is_card) == (True, False)
    step = dataclasses.replace(there, device=CPU)
    with pytest.raises(Infeasible) as caught:
        plan_step(step, 10**6)
    needed = caught.value.enough_bytes
    plan = plan_step(step, needed)
    shares = [int(plan.about[f"{name}_bytes"]) for name in ("staying", "reserved")]
    assert shares[1] == reserve_of(needed)
    assert sum(shares) + plan.budget_bytes == needed
    with pytest.raises(Infeasible):
        plan_step(step, needed - 2 * SCALARS)


def test_float_streams_are_not_reconstructed_under_half_precision():
    def refused(arch="revnet57", **changed):
        return Profiler(step_of(arch, **changed).step())._refused

    with pytest.warns(UserWarning, match=r"Not reconstructed.*stages.0.chain.0"):
        blocks = refused(streams="float", precision="bf16")
    assert blocks == sorted(step_of().encoder.reversible_blocks())
    for changed in ({"streams": "float"}, {"precision": "bf16"}, {"arch": "resnet34"}):
        assert refused(**changed) == []


def made(step, kept, **given):
    """Give the plan of a run, which it keeps, and what was reported."""
    lines = []
    given = {"plan_file": None, "memory_budget": None, **given}
    plan = plan_for_run(step, kept=kept, say=lines.append, warn=lines.append, **given)
    plan.save(kept)
    return plan, lines


def searching(**changed):
    return step_of(searches_chunk=True, **changed)


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "plan.json"


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    path = tmp_path_factory.mktemp("first") / "plan.json"
    plan, lines = made(searching(), path, memory_budget="1GB")
    assert lines[0].startswith("memory plan: 1GB is 1 GiB; blocks are timed on cpu")
    return path, plan


def test_a_budget_s_plan_is_kept_and_reports_how_the_budget_is_shared(first):
    path, plan = first
    assert made(searching(), path, memory_budget="1GB") == (plan, [])
    again, lines = made(searching(), path)
    assert again == plan
    assert lines[0].startswith(f"memory plan: of this run, {path}")
    assert plan.about["memory_budget_bytes"] == str(GIB)
    assert plan.about["seconds"] == f"measured on {devices.described(CPU)}, at batch 4"
    staying = int(plan.about["staying_bytes"])
    assert staying + plan.budget_bytes == GIB
    words = in_words(plan)
    assert f"budget 1.000 GiB, {size_text(staying)} of it for weights, gr" in words
    assert f"peaks at {size_text(plan.measured_bytes)} counted" in words
    assert words.endswith(f"remaining {size_text(plan.budget_bytes)}")


def test_peaks_of_a_plan_file_are_for_the_batch_that_it_names(first):
    plan = first[1].with_about(plan_file="p.json", batch="128", frames="200")
    made = "for its batch of 128, 200 frames each; of plan_file p.json"
    staying = f"{size_text(int(plan.about['staying_bytes']))} of it for weights, grad"
    assert in_words(plan).startswith(f"{plan}, {made}; budget 1.000 GiB, {staying}")
    elsewhere = dataclasses.replace(plan, about={"plan_file": "p.json"})
    assert in_words(elsewhere) == f"{plan}; of plan_file p.json"


def test_a_plan_of_a_budget_in_other_gigabytes_is_the_run_s(first, kept):
    """Up to 0.1.0 GB of a budget were 1e9 bytes; such a run goes on with its plan."""
    less = 10**9 - GIB
    old = dataclasses.replace(first[1], budget_bytes=first[1].budget_bytes + less)
    old = old.with_about(memory_budget_bytes="1000000000")
    old.save(kept)
    assert made(searching(), kept, memory_budget="1GB") == (old, [])
    assert "budget 953.7 MiB, " in in_words(old)


@pytest.mark.parametrize("there", [None, int(10.4 * GIB), 24 * GIB, 8 * GIB])
def test_a_plan_for_a_size_of_gpu_warns_where_there_is_less(
    first, kept, monkeypatch, there
):
    named = kept.with_name("named.json")
    about = {"device": "a GPU of 11 GiB", PLANNED_CARD: str(11 * GIB)}
    first[1].with_about(**about).save(named)
    monkeypatch.setattr(plans, "free_and_held_bytes", lambda _: there)
    _, lines = made(searching(), kept, plan_file=named)
    assert len(lines) == (there == 8 * GIB)


OWN, OTHER = [8, 8, 8, 8], [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("changed", "channels", "given", "message"),
    [
        ({"batch": 5}, None, None, r"batch 4, and this is 5\. Give memory_b"),
        ({"searches_chunk": False}, OTHER, "plan_file",
         "chunk: auto, which takes the plan"),
        ({"begun": True}, OWN, "memory_budget",
         r"began with \[8, 8, 8, 8\], which never change"),
        ({"begun": True}, OWN, "plan_file",
         r"began with \[8, 8, 8, 8\], which never change"),
    ],
)  # fmt: skip
def test_a_kept_plan_of_another_run_is_refused(
    first, changed, channels, given, message
):
    step = step_of(**{"searches_chunk": True} | changed)
    if channels is not None:
        step.encoder.set_channels(channels)
    values = {"plan_file": first[0], "memory_budget": "1GB"}
    with pytest.raises(ValueError, match=message):
        made(step, first[0], **({given: values[given]} if given else {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "channels", "words"),
    [
        ({"batch": 5}, None, "was made for batch 4, and this is 5: planned anew"),
        ({"optimizer_bits": 8}, None, "for optimizer sgd, 32 bit, and this is sgd"),
        ({"searches_chunk": False}, OTHER,
         "chunk was chosen by chunk: auto, and here it is set, which makes [1, 3"),
    ],
)  # fmt: skip
def test_a_budget_is_planned_anew_for_another_step_and_the_log_has_the_reason(
    first, kept, changed, channels, words
):
    first[1].save(kept)
    step = step_of(**{"searches_chunk": True} | changed)
    if channels is not None:
        step.encoder.set_channels(channels)
    plan, lines = made(step, kept, memory_budget="1GB")
    assert lines[0].startswith(f"memory plan: {kept} was made ")
    assert words in lines[0]
    assert made(step, kept, memory_budget="1GB") == (plan, [])


def test_a_run_that_goes_on_keeps_its_channels(first, kept):
    step = searching(begun=True)
    step.encoder.set_channels(OWN)
    assert first[1].channels != OWN
    assert made(step, kept, memory_budget="1GB")[0].channels == OWN
    fixed = step_of()
    fixed.encoder.set_channels(first[1].channels)
    assert made(fixed, kept, plan_file=first[0])[0].modes == first[1].modes


def test_a_plan_file_that_is_not_there_is_refused_with_what_to_give(first, kept):
    missing = kept.with_name("missing.json")
    with pytest.raises(FileNotFoundError, match=rf"plan_file: {missing} is no f") as e:
        made(searching(), kept, plan_file=missing)
    assert "leave plan_file out" not in str(e.value)
    with pytest.raises(FileNotFoundError, match=rf"leave .* and go on with {first[0]}"):
        made(searching(), first[0], plan_file=missing)


def test_an_automatic_budget_is_resolved_once_and_kept(kept, monkeypatch):
    plans_made = []
    for free_bytes in (10**9, 10**8):
        monkeypatch.setattr(devices, "free_and_held_bytes", lambda _, b=free_bytes: b)
        plans_made.append(made(searching(), kept, memory_budget="auto"))
    (plan, lines), again = plans_made
    assert plan.about["memory_budget_bytes"] == str(10**9)
    assert "auto is 953.7 MiB" in lines[0]
    assert again == (plan, [])


def test_all_that_a_plan_file_is_not_for_is_one_line_with_what_to_do(first, kept):
    step = searching(batch=5, precision="bf16")
    for given in ({"plan_file": first[0]}, {}):
        plan, (line, *_) = made(step, kept, **given)
        assert line.startswith("memory plan: ")
        assert (
            "for batch 4, and this is 5; for precision fp32, and this is bf16" in line
        )
        assert line.endswith("made for, or memory_budget, which plans.")
    assert plan.about["plan_file"] == str(first[0])
    # A budget is not met by it.
    plan, lines = made(searching(), kept, memory_budget="1GB")
    assert lines
    assert "plan_file" not in plan.about


@pytest.mark.parametrize("given", ["plan_file", "memory_budget", None])
@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        ("memory_budget_bytes", "7", "but memory_budget_bytes less staying_bytes and"),
        ("staying_bytes", "1e9", "staying_bytes is '1e9' and takes digits"),
        ("reserved_bytes", "-1", "reserved_bytes is '-1' and takes digits"),
    ],
)
def test_a_plan_whose_budget_is_not_what_its_shares_leave_is_refused(
    first, tmp_path, given, name, number, reason
):
    bad = tmp_path / "bad.json"
    first[1].with_about(**{name: number}).save(bad)
    values = {"plan_file": str(bad), "memory_budget": "1GB"}
    kept = tmp_path / "kept.json" if given == "plan_file" else bad
    with pytest.raises(ValueError, match=rf"bad\.json: This is no plan .*{reason}"):
        made(step_of(), kept, **({given: values[given]} if given else {}))


def test_a_plan_with_another_limit_of_its_error_is_made_anew(first, kept, monkeypatch):
    asked = []

    def planned(step, size, *, max_gradient_error):
        asked.append(max_gradient_error)
        return first[1]

    monkeypatch.setattr(plans, "plan_step", planned)
    for limit in (0.05, 0.05, 0.02, None):
        made(searching(), kept, memory_budget="1GB", max_gradient_error=limit)
    assert asked == [0.05, 0.02, None]


def coarsely_compressing(*given, **changed):
    """A step whose encoder has bounds that are coarse, for halves have few bits."""
    training = step_of(*given, **changed)
    training.encoder.compression = ActivationCompression(
        convolutions=RangeBound(3e-2), normalisations=DeviationBound(3e-2)
    )
    return training


@pytest.mark.slow
def test_counts_without_contents_are_those_of_what_was_measured():
    training = coarsely_compressing("resnet34", precision="bf16", **WIDE)
    step = training.step()
    with step.training():
        profiler = profiler_of(step, 1.0)
        profiled = profiler.timed(step.channels[0][0])
    assert set(profiled.uniform("compress").values()) == {"compress"}
    held, counted = {}, {}
    for name in ("store", "compress"):
        encoder = profiler.probe.trial.module
        encoder.set_mode(name)
        with LiveBytes() as meter, step.autocast(CPU):
            y = encoder(torch.randn(4, training.frames, 48))
            held[name] = meter.live
        del y
        counted[name] = sum(
            next(c.held_bytes for (_, mode), c in b.costs.items() if mode == name)
            for b in profiled.blocks
        )
    assert counted["compress"] < counted["store"]
    less, expected = (h["store"] - h["compress"] for h in (held, counted))
    assert less == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_of_chains_compress_beside_those_that_reconstruct(precision):
    training = coarsely_compressing(
        blocks=(1, 2, 0, 1), precision=precision, searches_chunk=True
    )
    step = dataclasses.replace(training.step(), timed_batch=2)
    wanted = {"compress", "reconstruct", "store"}
    with step.training():
        profiler = profiler_of(step, 1.0)
        for channels in (None,) * 4, (8,) * 4:
            profiled = profiler.timed(channels)
            # Maps of the last stage are too small.
            chained = [b.name for b in profiled.blocks if wanted <= set(b.modes)]
            assert len(chained) == 3
        turns = zip(chained, itertools.cycle(["reconstruct", "compress"]), strict=False)
        modes = profiled.uniform("recompute") | dict(turns)
        assert profiled.peak_bytes(modes) > 0
        error = profiler.probe.gradient_error(modes)
        assert error == pytest.approx(profiled.gradient_error(modes), rel=0.5)
        profiler.probe.trial.module.check_streams()
    plan = plan_step(step, 10**9, max_gradient_error=1.0)
    assert set(plan.modes.values()) == {"store"}
    assert plan.measured_gradient_error == 0
