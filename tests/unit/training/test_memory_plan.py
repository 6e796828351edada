"""Plans of runs: they are kept, are for this run, and name what helps."""

import dataclasses
import itertools
import re
from unittest import mock

import pytest
import torch

from speechbrain_rev import devices
from speechbrain_rev.catalog.plans import (
    PLANNED_CARD,
)
from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    RangeBound,
)
from speechbrain_rev.planner import (
    Infeasible,
    plan_step,
)
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.planner.profiling import Profiler, profiler_of
from speechbrain_rev.sizes import GIB, reserve_of, size_text
from speechbrain_rev.training import memory_plan
from speechbrain_rev.training.memory_plan import in_words, plan_for_run
from tests.unit.planner.networks import SCALARS

from .recipe_steps import CPU, WIDE, step_of


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
    logged = {"info": lines.append, "warning": lines.append}
    with mock.patch.multiple(memory_plan.logger, **logged):
        plan = plan_for_run(step, kept=kept, **given)
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


@pytest.mark.parametrize("there", [None, int(10.4 * GIB), 24 * GIB, 8 * GIB])
def test_a_plan_for_a_size_of_gpu_warns_where_there_is_less(
    first, kept, monkeypatch, there
):
    named = kept.with_name("named.json")
    about = {"device": "a GPU of 11 GiB", PLANNED_CARD: str(11 * GIB)}
    first[1].with_about(**about).save(named)
    monkeypatch.setattr(memory_plan, "free_and_held_bytes", lambda _: there)
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
    with pytest.raises(ValueError, match=rf"bad\.json is no plan .*{reason}"):
        made(step_of(), kept, **({given: values[given]} if given else {}))


def test_a_plan_with_another_limit_of_its_error_is_made_anew(first, kept, monkeypatch):
    asked = []

    def planned(step, size, *, max_gradient_error):
        asked.append(max_gradient_error)
        return first[1]

    monkeypatch.setattr(memory_plan, "plan_step", planned)
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
