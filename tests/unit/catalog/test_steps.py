"""Steps of rows and of runs: what their profiles are tied to, and chunks."""

import dataclasses
import inspect

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.catalog import Training, plans
from speechbrain_rev.catalog.steps import (
    TrainingStep,
    channels_to_try,
    encoder_step,
    shallow,
)
from speechbrain_rev.catalog.table import ListedEncoder
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.planner import (
    Profile,
    memory,
    plan_step,
    profile,
    profiling,
)
from speechbrain_rev.planner.knapsack import Cost
from speechbrain_rev.planner.memory import SHARE
from speechbrain_rev.planner.plan import choose
from speechbrain_rev.planner.profile import BlockProfile
from speechbrain_rev.planner.profiling import stored_bytes
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.sizes import GIB

from .builders import CPU, TINY, step_of

SMALL = {"widths": (8, 12, 16, 24), "blocks": (3, 1, 2, 0)}
ROW = dataclasses.replace(
    architecture("df_revnet149"), widths=(8, 8, 8, 8), blocks=(1, 3, 1, 1)
)


def built(name, **options):
    with torch.device("meta"):
        return build_encoder(name, **{**SMALL, **options})


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
    "cudnn_benchmark": True,
    "cudnn_deterministic": False,
    "widths": (8, 8, 8, 16),
    "blocks": (2, 0, 0, 1),
}
#: What no profile and no budget depends on: modes are planned, none compresses, and bytes
#: and times are those of any weights.
OTHER_KNOBS = {"name", "mode", "compression", "zero_init_residual"}


def test_every_setting_of_an_encoder_is_known_to_matter_or_not():
    assert {*inspect.signature(build_encoder).parameters} == {*KNOBS, *OTHER_KNOBS}


def with_settings(**changed):
    return step_of(encoder=build_encoder("revnet57", **(TINY | changed)))


@pytest.mark.parametrize("knob", KNOBS)
def test_plans_and_profiles_are_tied_to_every_setting_of_the_encoder(knob):
    was, now = with_settings(), with_settings(**{knob: KNOBS[knob]})
    # A plan holds however often streams are compared, and by whatever kernels.
    same = knob in ("verify_every", "cudnn_benchmark", "cudnn_deterministic")
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
        peak = stored_bytes(step.at(2), step.shallow().to("meta"))
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: peak * 1.01 / SHARE)
    monkeypatch.setenv("SPEECHBRAIN_REV_PROFILES", f"{own_profiles} again")
    few = profile(step)
    assert ran == [4, 2]
    assert few.about["seconds"].endswith("at batch 2")
    stored = whole.uniform("store")
    assert few.peak_bytes(stored) == whole.peak_bytes(stored)
    assert few.seconds(stored) == pytest.approx(whole.seconds(stored))


def test_a_shallow_encoder_is_one_of_its_kind():
    more = {"verify": None, "verify_every": 7, "sync_batchnorm": True}
    more |= {"pooling_variance": "unbiased", "streams": "float"}
    encoder = built("df_revnet377", n_mels=24, embedding_dim=7, **more)
    encoder.set_channels([3, None, 5, 6])
    with torch.device("meta"):
        small = shallow(encoder)
    assert small.architecture.blocks == (2, 1, 2, 0)
    assert small.channels == encoder.channels
    assert settings_of(small) == settings_of(encoder)
    assert more.items() <= settings_of(small).items()


def test_channels_are_tried_once_and_the_largest_first():
    assert channels_to_try(built("revnet57"))[0] == (None,) * 4
    with torch.device("meta"):
        full = build_encoder("df_revnet89")
    channels = channels_to_try(full)
    assert [sizes[0] for sizes in channels] == [None, 32, 16]
    assert list(channels[2]) == full.channels
    assert channels_to_try(built("resnet34", blocks=(1, 1, 1, 1))) == [(None,) * 4]


@pytest.mark.parametrize(
    ("name", "channels", "message"),
    [
        *(
            ("revnet57", [wrong] * 4, "at least 1, or None for all")
            for wrong in (0, 2.0, "auto", True)
        ),
        ("revnet57", [4, 4], "one for each of the 4 levels"),
        ("resnet34", [8] * 4, "has no reversible blocks"),
    ],
)
def test_what_are_no_channels_is_refused(name, channels, message):
    encoder = built(name, blocks=(1, 1, 1, 1))
    before = list(encoder.channels)
    with pytest.raises(ValueError, match=message):
        encoder.set_channels(channels)
    assert encoder.channels == before


def chain_of(stored, recomputed):
    """Four blocks in two modes, each of which holds bytes and takes seconds."""
    costs = {
        (before, own): Cost(held, held + 5, taken)
        for before in (None, "store", "recompute")
        for own, (held, taken) in (("store", stored), ("recompute", recomputed))
    }
    blocks = [BlockProfile(f"b.{i}", 0, costs) for i in range(4)]
    return Profile(blocks, 0, {"store": 0, "recompute": 0}, 0.0, {})


PROFILES = {
    None: chain_of(stored=(100, 1.0), recomputed=(60, 2.0)),
    32: chain_of(stored=(90, 1.4), recomputed=(20, 2.1)),
    16: chain_of(stored=(80, 2.0), recomputed=(10, 2.5)),
    8: chain_of(stored=(70, 4.0), recomputed=(5, 5.0)),
    4: chain_of(stored=(60, 8.0), recomputed=(6, 9.0)),
}


@pytest.mark.parametrize(
    ("budget", "chosen", "tried"),
    [
        (405, None, [None]),  # all store: nothing is faster
        (330, None, [None, 32]),  # 2 recompute, 1 at 32, yet larger chunks are faster
        (300, 32, [None, 32, 16]),  # 3 recompute at None, only 1 at 32
        (60, 16, [None, 32, 16]),  # nothing fits before
        (30, 8, [None, 32, 16, 8]),  # small ones until something fits
        (5, 8, [None, 32, 16, 8, 4]),  # nothing fits at all: the lightest
    ],
)
def test_the_chunk_is_that_of_the_fastest_plan(budget, chosen, tried):
    asked = []

    class Profiled(profiling.Profiler):
        def timed(self, channels=None):
            asked.append(channels[0])
            return PROFILES[channels[0]]

    step = encoder_step(architecture("df_revnet89"), Training(None, 1, 200))
    with step.training():
        choice = choose(Profiled(step), budget)
    assert (choice.channels[0], choice.profile) == (chosen, PROFILES[chosen])
    assert asked == tried
    assert choice.fits == (budget > 5)


@dataclasses.dataclass(frozen=True)
class Pooled(Architecture):
    """A row with a field that no other has."""

    pooling: str = "statistics"


@pytest.mark.parametrize(
    "changed",
    [
        {"family": "df_revnet"},
        {"type": "I"},
        {"block": "bottleneck"},
        {"widths": (48, 96, 192, 304)},
        {"strides": (1, 2, 2, 1)},
        {"pooling": "attentive"},
    ],
    ids=str,
)
def test_an_encoder_of_another_kind_has_a_profile_of_its_own(changed, monkeypatch):
    like = Pooled(**dataclasses.asdict(ARCHITECTURES["revnet57"]))
    deeper = dataclasses.replace(like, name="revnet77", blocks=(2, 3, 10, 3), layers=77)
    other = dataclasses.replace(like, name="revnet58", **changed)
    training = Training(5 * GIB, 128, 200)
    for row in (like, deeper, other):
        monkeypatch.setitem(ARCHITECTURES, row.name, row)
    models = [ListedEncoder(row, training) for row in (like, deeper, other)]
    groups = [[m.row.name for m in group] for group in plans._by_kind(models)]
    assert groups == [["revnet57", "revnet77"], ["revnet58"]]
    keys = [encoder_step(model.row, training).key for model in models]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.slow
def test_a_profile_on_a_device_is_measured_once_and_names_it(own_profiles):
    def profiled(channels=None, **options):
        step = encoder_step(ROW, Training(None, 2, 200), **options)
        return profile(step, channels=channels)

    first = profiled(device=CPU)
    assert "measured on cpu" in first.about["seconds"]
    # Bytes are counted first, and kept without times.
    assert len(list(own_profiles.iterdir())) == 2
    # Times of the clock are never equal twice: these were read.
    assert profiled(device=CPU) == first
    usual, narrow = profiled(), profiled((2, 2, 4, 4))
    assert usual.about["seconds"].startswith("estimated from counts")
    modes = usual.uniform("reconstruct")
    assert narrow.peak_bytes(modes) < usual.peak_bytes(modes) == first.peak_bytes(modes)
    assert narrow.seconds(modes) > usual.seconds(modes)


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


@pytest.mark.parametrize(
    ("training", "advised"),
    [
        (Training(11 * GIB, 40, 600, 32), ["--frames=200", "another", "--optimizer"]),
        (Training(GIB // 2, 128, 200), []),
    ],
)
def test_what_is_advised_for_a_gpu_depends_on_what_fits_it(training, advised):
    step = encoder_step(architecture("resnet152"), training)
    first, *others, last = (each.words for each in step.alternatives(step))
    assert (first, last) == ("a batch of {fits}", "a larger GPU, for instance {gpu}")
    assert len(others) == len(advised)
    assert all(map(str.startswith, others, advised))
