"""Steps of rows and of runs: what their profiles are tied to, and chunks."""

import inspect

import pytest
import torch

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.planner import (
    memory,
    plan_step,
    profile,
    profiling,
)
from speechbrain_rev.planner.memory import SHARE
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.training.recipe_step import TrainingStep

from .recipe_steps import CPU, TINY, step_of


def test_a_step_is_that_of_the_settings():
    knobs = {
        "compute_cost": AAMSoftmax(), "opt_class": torch.optim.SGD,
        "optimizer_name": "sgd", "optimizer_bits": 8, "batch_size": 9,
        "chunk_samples": 31840, "sample_rate": 16000, "chunk": "auto",
    }  # fmt: skip
    modules = {
        "embedding_model": build_encoder("revnet57", **TINY),
        "classifier": CosineClassifier(256, 10),
    }
    options = {"precision": "bf16", "device": CPU}
    step = TrainingStep.of(knobs, modules, processes=2, begun=True, **options)
    assert (step.batch, step.frames, step.precision) == (5, 200, "bf16")
    assert (step.searches_chunk, step.begun) == (True, True)
    kaldi = {"features": "kaldi", "chunk_samples": 32240 + 159}
    assert TrainingStep.of(knobs | kaldi, modules, **options).frames == 200
    fixed = TrainingStep.of({**knobs, "chunk": None}, modules, **options)
    assert (fixed.batch, fixed.searches_chunk, fixed.begun) == (9, False, False)


#: What a step is made with, each as it is not by default.
CHANGES = {
    "encoder": {"arch": "revnet46"},
    "blocks": {"blocks": (1, 1, 0, 1)},
    "classifier": {"classifier": CosineClassifier(16, 11)},
    "loss": {"loss": torch.nn.CrossEntropyLoss()},
    "optimizer": {"optimizer_bits": 8},
    "batch": {"batch": 5},
    "frames": {"frames": 25},
    "precision": {"precision": "bf16"},
    "device": {"device": torch.device("meta")},
}


@pytest.mark.parametrize("name", CHANGES)
def test_plans_and_profiles_are_tied_to_all_that_a_step_depends_on(name):
    was, now = step_of(), step_of(**CHANGES[name])
    assert was.about()[name] != now.about()[name]
    assert was.about().keys() == now.about().keys()
    profiles = [step.about_profile().get(name) for step in (was, now)]
    # Bytes and times of shallow encoders are those at any depth.
    assert (profiles[0] == profiles[1]) == (name in ("blocks", "optimizer"))


#: What an encoder can be built with beside its name, each as it is not by default.
KNOBS = {
    "n_mels": 32,
    "embedding_dim": 17,
    "streams": "float",
    "verify": None,
    "verify_every": 7,
    "sync_batchnorm": True,
    "pooling": "attentive",
    "pooling_variance": "unbiased",
    "chunk": 1000,
    "memory_format": "channels_last",
    "deterministic": False,
    "widths": (8, 8, 8, 16),
    "blocks": (2, 0, 0, 1),
}
#: What no profile and no budget depends on: modes are planned, none compresses, and bytes
#: and times are those of any weights and features.
OTHER_KNOBS = {"name", "mode", "compression", "zero_init_residual", "front_end"}


def test_every_setting_of_an_encoder_is_known_to_matter_or_not():
    assert {*inspect.signature(build_encoder).parameters} == {*KNOBS, *OTHER_KNOBS}


def with_settings(**changed):
    return step_of(encoder=build_encoder("revnet57", **(TINY | changed)))


@pytest.mark.parametrize("knob", KNOBS)
def test_plans_and_profiles_are_tied_to_every_setting_of_the_encoder(knob):
    was, now = with_settings(), with_settings(**{knob: KNOBS[knob]})
    # A plan holds however often streams are compared, and by whatever kernels.
    same = knob in ("verify_every", "deterministic")
    assert (was.about() == now.about()) is same
    # Profiles are kept for channels too.
    assert was.step().key != now.step().key or knob == "chunk"


def test_what_follows_a_comparison_of_streams_makes_no_other_plan():
    warns, raises = (
        with_settings(verify=verify).about() for verify in ("warn", "raise")
    )
    assert warns == raises


def test_processes_that_share_statistics_are_named_and_not_waited_for(monkeypatch):
    step = with_settings(sync_batchnorm=True)
    own = step.step().trial().module
    for modules, shares in ((own, False), (step.encoder, True)):
        norms = [m for m in modules.modules() if isinstance(m, BatchNorm)]
        assert {m.sync for m in norms} == {shares}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert step.about()["sync_batchnorm"] == "3 processes"
    assert step_of().about()["sync_batchnorm"] == "False"


def test_times_of_as_many_as_fit_are_scaled_to_the_batch(monkeypatch, own_profiles):
    ran, trial = [], profiling.Step.trial

    def noted(self, batch=None, module=None, channels=None):
        ran.append(batch)
        return trial(self, batch, module, channels)

    def by_batch(*step, repeats, _measured=profiling.measured_seconds):
        return dict.fromkeys(_measured(*step, repeats=1), 0.001 * ran[-1])

    monkeypatch.setattr(profiling.Step, "trial", noted)
    monkeypatch.setattr(profiling, "measured_seconds", by_batch)
    step = step_of("resnet34", batch=8).step()
    whole = profile(step)
    # No more than suffice are timed, where they fit.
    assert (step.timed_batch, ran) == (4, [4])
    with step.training():
        peak = step.at(2).stored_bytes(step.shallow().to("meta"))
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: peak * 1.01 / SHARE)
    monkeypatch.setenv("SPEECHBRAIN_REV_PROFILES", f"{own_profiles} again")
    few = profile(step)
    assert ran == [4, 2]
    assert few.about["seconds"].endswith("at batch 2")
    stored = whole.uniform("store")
    assert few.peak_bytes(stored) == whole.peak_bytes(stored)
    assert few.seconds(stored) == pytest.approx(whole.seconds(stored))


@pytest.mark.slow
def test_profiles_of_the_recipe_are_kept_apart_by_their_shallow_encoders(own_profiles):
    widths, classifier = (4, 8, 8, 8), CosineClassifier(256, 10)
    planned = [
        plan_step(step_of(encoder=encoder, classifier=classifier).step(), 10**9)
        for encoder in (
            build_encoder("revnet57", widths=widths, blocks=blocks)
            for blocks in [(1, 1, 1, 1), (1, 3, 1, 1), (1, 5, 1, 1)]
        )
    ]
    # Of the last two the stages' first two blocks are the same. Bytes have a file, and
    # so have times.
    assert len(list(own_profiles.iterdir())) == 4
    assert [len(plan.modes) for plan in planned] == [8, 10, 12]
    for plan in planned:
        assert plan.predicted_bytes == pytest.approx(plan.measured_bytes, rel=1e-3)
