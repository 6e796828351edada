"""A plan for a training: what it is for, what it verifies, and what it says is needed."""

import dataclasses
import functools
import inspect
import itertools
import re
import sys

import pytest
import torch

from speechbrain_rev import devices
from speechbrain_rev.catalog import plans
from speechbrain_rev.catalog.plans import PLANNED_CARD, in_words, plan_for_run
from speechbrain_rev.catalog.steps import TrainingStep, shallow
from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    RangeBound,
    reference,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.lobes.pooling import POOLINGS, StatisticsPooling
from speechbrain_rev.planner import Infeasible, Plan, memory, plan_step, profiling
from speechbrain_rev.planner.memory import SHARE, LiveBytes
from speechbrain_rev.planner.profile import VARIABLE
from speechbrain_rev.planner.profiling import Profiler, profiler_of, stored_bytes
from speechbrain_rev.reversible import compile_pieces
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.sizes import GIB, RESERVE_BYTES, size_text
from tests.unit.planner.networks import SCALARS

TINY = {"widths": (8, 8, 8, 8), "blocks": (1, 0, 0, 1), "n_mels": 24}
CPU = torch.device("cpu")


def step_of(arch="revnet57", encoder=None, **changed):
    torch.manual_seed(0)
    if arch == "resnet34":
        changed = {"blocks": (1, 1, 1, 1), **changed}
    own = {k: changed.pop(k) for k in list(changed) if k in (*TINY, "streams", "chunk")}
    encoder = encoder or build_encoder(arch, **{**TINY, "embedding_dim": 16, **own})
    step = TrainingStep(
        encoder,
        CosineClassifier(16, 10),
        AAMSoftmax(),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        optimizer_name="sgd",
        optimizer_bits=32,
        batch=4,
        frames=24,
        precision="fp32",
        device=CPU,
    )
    return dataclasses.replace(step, **changed)


@pytest.fixture(scope="module", autouse=True)
def own_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("profiles")))
        yield


def test_a_step_is_that_of_the_settings():
    encoder = build_encoder("revnet57", **TINY)
    knobs = {
        "compute_cost": AAMSoftmax(),
        "opt_class": torch.optim.SGD,
        "optimizer_name": "sgd",
        "optimizer_bits": 8,
        "batch_size": 9,
        "chunk_samples": 31840,
        "sample_rate": 16000,
        "chunk": "auto",
    }
    modules = {"embedding_model": encoder, "classifier": CosineClassifier(256, 10)}
    step = TrainingStep.of(
        knobs, modules, precision="bf16", device=CPU, processes=2, begun=True
    )
    assert (step.batch, step.frames, step.precision) == (5, 200, "bf16")
    assert (step.searches_chunk, step.begun) == (True, True)
    fixed = TrainingStep.of(
        {**knobs, "chunk": None}, modules, precision="fp32", device=CPU
    )
    assert (fixed.batch, fixed.searches_chunk, fixed.begun) == (9, False, False)


CHANGES = {
    "encoder": {"arch": "revnet46"},
    "widths": {"widths": (8, 8, 8, 16)},
    "blocks": {"blocks": (1, 1, 0, 1)},
    "n_mels": {"n_mels": 32},
    "streams": {"streams": "float"},
    "chunk": {"chunk": 1000},
    "classifier": {"classifier": CosineClassifier(16, 11)},
    "loss": {"loss": torch.nn.CrossEntropyLoss()},
    "optimizer": {"optimizer_bits": 8},
    "batch": {"batch": 5},
    "frames": {"frames": 25},
    "precision": {"precision": "bf16"},
    "device": {"device": torch.device("meta")},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_is_tied_to_all_that_its_budget_depends_on(name):
    was, now = step_of().about(), step_of(**CHANGES[name]).about()
    assert was[name] != now[name]
    assert was.keys() == now.keys()


#: What an encoder can be built with beside its name, each as it is not by default.
KNOBS = {
    "n_mels": 32,
    "embedding_dim": 17,
    "streams": "float",
    "verify": None,
    "verify_every": 7,
    "sync_batchnorm": True,
    "pooling": "other",
    "pooling_variance": "unbiased",
    "chunk": 1000,
    "widths": (8, 8, 8, 16),
    "blocks": (2, 0, 0, 1),
}
#: What no profile and no budget depends on: modes are planned, none compresses, and bytes
#: and times are those of any weights.
OTHER_KNOBS = {"name", "mode", "compression", "zero_init_residual"}


def test_every_setting_of_an_encoder_is_known_to_matter_or_not():
    assert {*inspect.signature(build_encoder).parameters} == {*KNOBS, *OTHER_KNOBS}


@pytest.mark.parametrize("knob", KNOBS)
def test_plans_and_profiles_are_tied_to_every_setting_of_the_encoder(knob, monkeypatch):
    other = type("Other", (StatisticsPooling,), {})
    monkeypatch.setitem(POOLINGS, "other", other)
    was, now = (
        step_of(encoder=build_encoder("revnet57", **(TINY | changed)))
        for changed in ({}, {knob: KNOBS[knob]})
    )
    # A plan holds however often streams are compared.
    assert (was.about() == now.about()) is (knob == "verify_every")
    # Profiles are kept for channels too.
    assert was.step().key != now.step().key or knob == "chunk"


@pytest.mark.parametrize("name", sorted({*CHANGES} - {"blocks", "chunk", "optimizer"}))
def test_profiles_are_tied_to_all_that_a_step_of_shallow_encoders_depends_on(name):
    was, now = step_of().about_profile(), step_of(**CHANGES[name]).about_profile()
    assert was[name] != now[name]


def test_what_follows_a_comparison_of_streams_makes_no_other_plan():
    abouts = [
        step_of(encoder=build_encoder("revnet57", **TINY, verify=verify)).about()
        for verify in ("warn", "raise", None)
    ]
    assert abouts[0] == abouts[1] != abouts[2]


def test_what_is_tried_shares_no_statistics_with_processes_that_wait():
    encoder = build_encoder("revnet57", **TINY, sync_batchnorm=True)
    own = step_of(encoder=encoder).step().trial().module
    shared = [
        [m.sync for m in e.modules() if isinstance(m, BatchNorm)]
        for e in (own, encoder)
    ]
    assert not any(shared[0])
    assert all(shared[1])


def test_processes_that_share_statistics_are_told(monkeypatch):
    encoder = build_encoder("revnet57", **TINY, sync_batchnorm=True)
    assert step_of(encoder=encoder).about()["sync_batchnorm"] == "True"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert step_of(encoder=encoder).about()["sync_batchnorm"] == "3 processes"
    assert step_of().about()["sync_batchnorm"] == "False"


def test_compiled_pieces_are_profiled_as_such():
    encoder = compile_pieces(build_encoder("revnet57", **TINY), "aot_eager")
    assert step_of(encoder=encoder).about()["compiled"] == "aot_eager"
    assert {m.compiled_with for m in shallow(encoder).stages[0].chain.modules()
            if hasattr(type(m), "compiled_with")} == {"aot_eager"}  # fmt: skip


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
def test_only_remedies_that_can_help_are_named(changed, offered, not_offered):
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


@pytest.mark.parametrize(
    ("arch", "searches_chunk"), [("revnet57", True), ("resnet34", False)]
)
def test_a_budget_that_nothing_fits_is_refused_before_a_time_is_taken(
    arch, searches_chunk, monkeypatch
):
    step = step_of(arch, searches_chunk=searches_chunk, batch=3, frames=32).step()
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


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_batch_that_an_error_names_fits_and_one_more_does_not(precision):
    step = step_of(batch=24, precision=precision).step()
    with pytest.raises(Infeasible) as caught:
        plan_step(step, 10**5)
    budget = caught.value.needed_bytes * 2 // 3
    with pytest.raises(Infeasible) as caught:
        plan_step(step, budget)
    batch = int(re.search(r"batch_size: (\d+) for", str(caught.value))[1])
    assert 1 < batch < 24
    plan_step(step.at(batch), budget)
    with pytest.raises(Infeasible):
        plan_step(step.at(batch + 1), budget)


@pytest.fixture
def on_gpu(monkeypatch):
    """A step on a GPU that is not there: profiled, verified and timed on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake")
    here = step_of().step()
    there = step_of(device=torch.device("cuda")).step()
    assert there.is_card
    assert not here.is_card
    return dataclasses.replace(there, device=CPU)


def test_the_budget_that_is_needed_on_a_gpu_is_enough(on_gpu):
    with pytest.raises(Infeasible) as caught:
        plan_step(on_gpu, 10**6)
    needed = caught.value.needed_bytes
    assert needed > RESERVE_BYTES
    plan = plan_step(on_gpu, needed)
    assert plan.measured_bytes
    shares = (int(plan.about[f"{name}_bytes"]) for name in ("staying", "reserved"))
    assert sum(shares) + plan.budget_bytes == needed
    with pytest.raises(Infeasible):
        plan_step(on_gpu, needed - 2 * SCALARS)


def test_float_streams_are_not_reconstructed_under_half_precision():
    def refused(arch="revnet57", **changed):
        return Profiler(step_of(arch, **changed).step())._refused

    with pytest.warns(UserWarning, match=r"Not reconstructed.*stages.0.chain.0"):
        found = refused(streams="float", precision="bf16")
    assert found == sorted(step_of().encoder.reversible_blocks())
    assert refused(streams="float") == []
    for precision in ("fp32", "bf16", "fp16"):
        assert refused(precision=precision) == []
    assert refused("resnet34") == []


@pytest.mark.slow
def test_a_plan_of_float_streams_under_half_precision_recomputes():
    step = step_of(streams="float", precision="bf16").step()
    with (
        pytest.warns(UserWarning, match="Not reconstructed"),
        pytest.raises(Infeasible) as caught,
    ):
        plan_step(step, 10**4)
    with pytest.warns(UserWarning, match="Not reconstructed"):
        found = plan_step(step, caught.value.needed_bytes)
    assert "reconstruct" not in found.modes.values()
    exact = plan_step(step_of(precision="bf16").step(), caught.value.needed_bytes)
    assert "reconstruct" in exact.modes.values() or "store" in exact.modes.values()


def test_times_of_as_many_as_fit_are_scaled_to_the_batch(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    ran, trial = [], profiling.Step.trial

    def noted(self, batch=None, module=None, channels=None):
        ran.append(batch)
        return trial(self, batch, module, channels)

    monkeypatch.setattr(profiling.Step, "trial", noted)
    step = step_of(batch=8).step()
    # No more than suffice are timed, where they fit.
    assert step.timed_batch == 4
    whole = profiling.profile(step)
    assert ran == [4]
    assert whole.about["seconds"].endswith("at batch 4")
    with step.training():
        peak = stored_bytes(step.at(2), step.shallow().to("meta"))
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: peak * 1.01 / SHARE)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other"))
    few = profiling.profile(step)
    assert ran == [4, 2]
    assert few.about["seconds"].endswith("at batch 2")
    stored = whole.uniform("store")
    assert few.seconds(stored) == pytest.approx(whole.seconds(stored), rel=20)


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "plan.json"


def made(step, kept, **given):
    said = []
    given = {"plan_file": None, "memory_budget": None, **given}
    plan = plan_for_run(step, kept=kept, say=said.append, **given)
    plan.save(kept)
    return plan, said


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    path = tmp_path_factory.mktemp("first") / "plan.json"
    step = step_of(searches_chunk=True)
    plan, said = made(step, path, memory_budget="1GB")
    assert said[0].startswith("memory plan: 1GB is 1 GiB; times of blocks on cpu")
    return path, plan


def test_a_budget_s_plan_is_kept_and_made_anew_for_another(first):
    path, plan = first
    step = step_of(searches_chunk=True)
    assert made(step, path, memory_budget="1GB") == (plan, [])
    assert plan.about["memory_budget_bytes"] == str(GIB)


def test_a_plan_of_a_budget_in_other_gigabytes_is_the_run_s(first, kept):
    """Up to 0.1.0 a training's GB were 1e9 bytes; such a run goes on with its plan."""
    _, plan = first
    less = 10**9 - GIB
    old = dataclasses.replace(plan, budget_bytes=plan.budget_bytes + less)
    old = old.with_about(memory_budget_bytes="1000000000")
    old.save(kept)
    step = step_of(searches_chunk=True)
    assert made(step, kept, memory_budget="1GB") == (old, [])
    assert made(step, kept)[0] == old
    assert "budget 953.7 MiB, " in in_words(old)


def test_a_plan_says_how_its_numbers_were_found_and_its_budget_is_shared(first):
    _, plan = first
    assert plan.about["seconds"] == f"measured on {devices.described(CPU)}, at batch 4"
    assert plan.about["bytes"] == "counted on meta tensors"
    staying = int(plan.about["staying_bytes"])
    assert staying + plan.budget_bytes == GIB
    words = in_words(plan)
    assert f"budget 1.000 GiB, {size_text(staying)} of it for weights, gr" in words
    assert f"peaks at {size_text(plan.measured_bytes)} counted" in words
    assert words.endswith(f"remaining {size_text(plan.budget_bytes)}")
    assert in_words(plan.with_about(plan_file="p.json")).endswith("of plan_file p.json")


def test_a_plan_that_is_kept_is_the_run_s_where_nothing_is_given(first):
    path, plan = first
    again, said = made(step_of(searches_chunk=True), path)
    assert again == plan
    assert said[0].startswith(f"memory plan: of this run, {path}")
    with pytest.raises(ValueError, match=r"batch 4, and this is 5\. Delete it"):
        made(step_of(searches_chunk=True, batch=5), path)


def test_a_kept_plan_of_a_file_warns_of_another_training_as_the_file_did(first, kept):
    made(step_of(searches_chunk=True), kept, plan_file=first[0])
    with pytest.warns(UserWarning, match=rf"{kept} was made for batch 4, and this"):
        made(step_of(searches_chunk=True, batch=5), kept)


@pytest.mark.parametrize("there", [None, int(10.4 * GIB), 24 * GIB, 8 * GIB])
def test_a_plan_for_a_size_of_card_warns_where_there_is_less(
    first, kept, monkeypatch, recwarn, there
):
    _, plan = first
    named = kept.with_name("named.json")
    about = {"device": "a GPU of 11 GiB", PLANNED_CARD: str(11 * GIB)}
    named.write_text(plan.with_about(**about).to_json())
    monkeypatch.setattr(plans, "free_and_held_bytes", lambda _: there)
    made(step_of(searches_chunk=True), kept, plan_file=named)
    warned = [
        str(w.message) for w in recwarn if "was made for device" in str(w.message)
    ]
    assert len(warned) == (there == 8 * GIB)


def test_a_plan_file_that_is_not_there_is_said_with_what_to_give(first, kept):
    step, missing = step_of(searches_chunk=True), kept.with_name("missing.json")
    with pytest.raises(FileNotFoundError, match=rf"plan_file: {missing} is no f") as e:
        made(step, kept, plan_file=missing)
    assert "leave plan_file out" not in str(e.value)
    with pytest.raises(FileNotFoundError, match=rf"leave .* and go on with {first[0]}"):
        made(step, first[0], plan_file=missing)


def test_another_way_to_a_chunk_is_said_in_words(first):
    step = step_of()
    step.encoder.set_channels([1, 3, 5, 7])
    message = r"chunk was chosen by chunk: auto, and here it is set, which makes \[1, 3"
    with pytest.raises(ValueError, match=message):
        made(step, first[0], memory_budget="1GB")


def test_an_automatic_budget_is_resolved_once_and_kept(kept, monkeypatch):
    step = step_of(searches_chunk=True)
    monkeypatch.setattr(devices, "free_and_held_bytes", lambda device: 10**9)
    plan, said = made(step, kept, memory_budget="auto")
    assert plan.about["memory_budget"] == "auto"
    assert plan.about["memory_budget_bytes"] == str(10**9)
    assert "auto is 953.7 MiB" in said[0]
    monkeypatch.setattr(devices, "free_and_held_bytes", lambda device: 10**8)
    assert made(step, kept, memory_budget="auto") == (plan, [])


def test_a_kept_plan_of_another_training_is_refused(first):
    step = step_of(searches_chunk=True, optimizer_bits=8)
    with pytest.raises(ValueError, match=r"optimizer sgd, 32 bit, and this is sgd"):
        made(step, first[0], memory_budget="1GB")


def test_a_training_that_goes_on_keeps_its_channels(first, kept):
    step = step_of(searches_chunk=True, begun=True)
    own = [8, 8, 8, 8]
    step.encoder.set_channels(own)
    assert first[1].channels != own
    plan, _ = made(step, kept, memory_budget="1GB")
    assert plan.channels == own
    for given in ({"plan_file": first[0]}, {"memory_budget": "1GB"}):
        with pytest.raises(ValueError, match=r"began with \[8, 8, 8, 8\], which n"):
            made(step, first[0], **given)


def test_a_plan_file_does_not_replace_a_chunk_that_is_fixed(first, kept):
    step = step_of()
    step.encoder.set_channels([3, 3, 3, 3])
    with pytest.raises(ValueError, match="Give chunk: auto, which takes the plan"):
        made(step, kept, plan_file=first[0])
    step.encoder.set_channels(first[1].channels)
    assert made(step, kept, plan_file=first[0])[0].modes == first[1].modes


def test_each_thing_that_a_plan_file_is_not_for_is_said_once(first, kept):
    step = step_of(searches_chunk=True, batch=5, precision="bf16")
    with pytest.warns(UserWarning, match="plan_file") as said:
        plan, _ = made(step, kept, plan_file=first[0])
    texts = [str(w.message) for w in said]
    assert len(texts) == 2
    assert any("for batch 4, and this is 5" in text for text in texts)
    assert any("for precision fp32, and this is bf16" in text for text in texts)
    assert Plan.load(kept) == plan
    assert plan.about["plan_file"] == str(first[0])


@pytest.mark.parametrize("given", ["plan_file", "memory_budget", None])
@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("memory_budget_bytes", "7", "but memory_budget_bytes less staying_bytes and"),
        ("staying_bytes", "0", "but memory_budget_bytes less staying_bytes and"),
        ("staying_bytes", "1e9", "staying_bytes is '1e9' and takes digits"),
        ("reserved_bytes", "-1", "reserved_bytes is '-1' and takes digits"),
    ],
)
def test_a_plan_whose_budget_is_not_what_its_shares_leave_is_refused(
    first, tmp_path, given, name, number, said
):
    bad = tmp_path / "bad.json"
    first[1].with_about(**{name: number}).save(bad)
    budget = first[1].about["memory_budget"]
    options = {"plan_file": str(bad), "memory_budget": budget, None: None}[given]
    kept = tmp_path / "kept.json" if given == "plan_file" else bad
    with pytest.raises(ValueError, match=rf"bad\.json: This is no plan .*{said}"):
        made(step_of(), kept, **({given: options} if given else {}))


def test_a_budget_is_not_met_by_a_plan_file_that_was_kept(first, kept):
    step = step_of(searches_chunk=True)
    made(step, kept, plan_file=first[0])
    plan, said = made(step, kept, memory_budget="1GB")
    assert said
    assert "plan_file" not in plan.about


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


WIDE = {"widths": (16, 8, 8, 8), "frames": 48, "n_mels": 48}


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


def test_a_plan_that_compresses_is_the_run_s_when_it_goes_on(compressing):
    step, path, plan, _ = compressing
    again, said = made(step, path)
    assert again == plan
    assert said[0].startswith(f"memory plan: of this run, {path}")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_counts_without_contents_are_those_of_what_was_measured(precision):
    training = step_of("resnet34", precision=precision, **WIDE)
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
