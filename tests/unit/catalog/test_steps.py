"""Profiles from shallow encoders, the search for a chunk, and what a device can do."""

import dataclasses
import functools
import json
import math

import pytest
import torch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.steps import (
    TrainingStep,
    calibrate,
    channels_to_try,
    encoder_step,
    shallow,
    training_step,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.lobes.geometry import AUTO, channels_by_level
from speechbrain_rev.planner import (
    Infeasible,
    Profile,
    largest_batch,
    memory,
    plan_step,
    profile,
    profiling,
)
from speechbrain_rev.planner.knapsack import Cost
from speechbrain_rev.planner.memory import SHARE, live_bytes_peak
from speechbrain_rev.planner.plan import choose
from speechbrain_rev.planner.profile import VARIABLE, BlockProfile
from speechbrain_rev.planner.timing import ASSUMED, Speed, fitted_speed
from speechbrain_rev.planner.trace import Work
from speechbrain_rev.sizes import GIB

SMALL = {"widths": (8, 12, 16, 24), "blocks": (3, 1, 2, 0)}


def built(name, **options):
    with torch.device("meta"):
        return build_encoder(name, **{**SMALL, **options})


@pytest.mark.parametrize("streams", ["exact", "float"])
def test_a_shallow_encoder_is_one_of_its_kind(streams):
    more = {"verify": None, "verify_every": 7, "sync_batchnorm": True}
    more |= {"pooling_variance": "unbiased", "streams": streams}
    encoder = built("df_revnet377", n_mels=24, embedding_dim=7, **more)
    encoder.set_channels([3, None, 5, 6])
    with torch.device("meta"):
        small = shallow(encoder)
    assert small.architecture.blocks == (2, 1, 2, 0)
    assert small.channels == encoder.channels
    assert [stage.chain.chunk for stage in small.stages] == encoder.channels
    assert small.streams == streams
    assert (small.n_mels, small.fc.out_features) == (24, 7)
    assert settings_of(small) == settings_of(encoder)
    assert more.items() <= settings_of(small).items()


def test_chosen_channels_are_those_of_a_chunk_that_was_built():
    feats = torch.randn(2, 20, 80)
    gradients = []
    for chosen in (False, True):
        torch.manual_seed(0)
        chunk = 200_000 if not chosen else None
        encoder = build_encoder("revnet57", **SMALL, chunk=chunk)
        if chosen:
            encoder.set_channels(channels_by_level(200_000, encoder.geometry))
        encoder(feats).square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("channels", [[0] * 4, [2.0] * 4, ["auto"] * 4, [True] * 4])
def test_what_are_no_channels_is_refused(channels):
    with pytest.raises(ValueError, match="at least 1, or None for all"):
        built("revnet57").set_channels(channels)


def test_each_level_has_its_channels():
    encoder = built("revnet57")
    before = list(encoder.channels)
    with pytest.raises(ValueError, match="one for each of the 4 levels"):
        encoder.set_channels([4, 4])
    assert encoder.channels == before


def test_a_vanilla_encoder_has_no_channels_to_choose():
    encoder = built("resnet34", blocks=(1, 1, 1, 1))
    assert channels_to_try(encoder) == [(None,) * 4]
    encoder.set_channels([None] * 4)
    with pytest.raises(ValueError, match="has no reversible blocks"):
        encoder.set_channels([8, 8, 8, 8])


def test_channels_are_tried_once_and_the_largest_first():
    with torch.device("meta"):
        full = build_encoder("df_revnet89")
    found = channels_to_try(full)
    assert len(set(found)) == len(found)
    assert [sizes[0] for sizes in found] == [None, 32, 16]
    assert found[2][0] == channels_by_level("auto", full.geometry)[0]
    assert channels_to_try(built("revnet57"))[0] == (None,) * 4
    assert AUTO == 16 * 4 * 80 * 200


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
    4: chain_of(stored=(60, 8.0), recomputed=(1, 9.0)),
}


@pytest.mark.parametrize(
    ("budget", "chosen", "tried"),
    [
        (405, None, [None]),  # all store: nothing is faster
        (330, None, [None, 32]),  # 2 recompute, 1 at 32, yet larger chunks are faster
        (300, 32, [None, 32, 16]),  # 3 recompute at None, only 1 at 32
        (150, 32, [None, 32, 16]),  # nothing fits at None
        (60, 16, [None, 32, 16]),  # nor at 32
        (30, 8, [None, 32, 16, 8]),  # small ones until something fits
        (5, 4, [None, 32, 16, 8, 4]),  # nothing fits at all: the lightest
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
        found = choose(Profiled(step), budget)
    assert (found.channels[0], found.profile) == (chosen, PROFILES[chosen])
    assert asked == tried
    assert found.fits == (budget > 5)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


ROW = dataclasses.replace(
    architecture("df_revnet149"), widths=(8, 8, 8, 8), blocks=(1, 3, 1, 1)
)
CPU = torch.device("cpu")


def profiled(batch, *, channels=None, **options):
    step = encoder_step(ROW, Training(None, batch, 200), **options)
    return profile(step, channels=channels)


@pytest.mark.slow
def test_a_profile_on_a_device_is_measured_once_and_names_it(own_folder):
    first = profiled(2, device=CPU)
    assert "measured on cpu" in first.about["seconds"]
    # Bytes are counted first, and kept without times.
    assert len(list(own_folder.iterdir())) == 2
    # Times of the clock are never equal twice: these were read.
    assert profiled(2, device=CPU) == first
    estimated = profiled(2)
    assert estimated.about["seconds"].startswith("estimated from counts")
    assert len(list(own_folder.iterdir())) == 2
    assert {b.name: b.gradient_bytes for b in estimated.blocks} == {
        b.name: b.gradient_bytes for b in first.blocks
    }


@pytest.mark.slow
def test_what_does_not_fit_all_stored_is_timed_in_part(own_folder, monkeypatch):
    monkeypatch.setattr(profiling, "batch_that_fits", lambda peak, batch, device: 1)
    some, whole = profiled(3, device=CPU), profiled(3)
    assert some.about["timed batch"] == "1"
    assert some.about["batch"] == "3"
    stored = whole.uniform("store")
    assert some.peak_bytes(stored) == whole.peak_bytes(stored)


@pytest.mark.slow
def test_chunks_change_bytes_and_speeds_change_times(own_folder):
    usual, narrow = profiled(4), profiled(4, channels=(2, 2, 4, 4))
    slow = profiled(4, speed=dataclasses.replace(ASSUMED, flops_per_second=1e9))
    modes = usual.uniform("reconstruct")
    assert narrow.peak_bytes(modes) < usual.peak_bytes(modes) == slow.peak_bytes(modes)
    assert narrow.seconds(modes) > usual.seconds(modes) < slow.seconds(modes)
    assert len(list(own_folder.iterdir())) == 2


@pytest.mark.slow
def test_profiles_of_the_recipe_are_kept_apart_by_their_shallow_encoders(own_folder):
    plans = []
    for blocks in [(1, 1, 1, 1), (1, 3, 1, 1), (1, 5, 1, 1)]:
        encoder = build_encoder("revnet57", widths=(4, 8, 8, 8), blocks=blocks)
        step = TrainingStep(
            encoder,
            CosineClassifier(256, 10),
            AAMSoftmax(),
            functools.partial(torch.optim.SGD, lr=0.1),
            optimizer_name="sgd",
            optimizer_bits=32,
            batch=2,
            frames=20,
            precision="fp32",
            device=CPU,
        )
        plans.append(plan_step(step.step(), 10**9))
    # Of the last two the stages' first two blocks are the same. Bytes have a file, and
    # so have times.
    assert len(list(own_folder.iterdir())) == 4
    assert [len(plan.modes) for plan in plans] == [8, 10, 12]
    for plan in plans:
        assert plan.predicted_bytes == pytest.approx(plan.measured_bytes, rel=1e-3)


def test_a_row_without_a_gpu_is_planned_for_any_and_its_largest_batch_has_a_plan():
    step = encoder_step(ROW, Training(None, 16, 200))
    budget = plan_step(step, "3GB").budget_bytes
    assert budget < 3 * GIB - step.fixed_bytes(16)
    fits = largest_batch(step, "1.5GB")
    assert plan_step(step.at(fits), "1.5GB").measured_bytes
    with pytest.raises(Infeasible, match=r"What helps: a batch of \d+; a GPU of"):
        plan_step(step.at(fits + 1), "1.5GB")


WORKS = [
    Work(10**9, 10**6, 50),
    Work(10**8, 10**8, 10),
    Work(10**7, 10**5, 90),
    Work(10**9, 10**8, 20),
]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_speeds_are_found_from_times(noise):
    true = Speed(2e12, 3e11, 4e4, {"device": "a test"})
    turns = [1 + noise, 1 - noise, 1, 1 + noise]
    seconds = [t * true.seconds(w) for w, t in zip(WORKS, turns, strict=True)]
    found = fitted_speed(WORKS, seconds, {"device": "a test"})
    for work in WORKS:
        assert found.seconds(work) == pytest.approx(
            true.seconds(work), rel=3 * noise + 1e-9
        )
    assert found.about["device"] == "a test"
    assert found.about["error of a block's time"].startswith("median ")


def test_what_costs_nothing_is_infinitely_fast_and_written_so():
    only_flops = Speed(1e12, math.inf, math.inf, {"device": "a test"})
    seconds = [only_flops.seconds(w) for w in WORKS]
    found = fitted_speed(WORKS, seconds, only_flops.about)
    assert found.bytes_per_second > 1e15
    assert Speed.from_json(only_flops.to_json()) == only_flops
    assert "Infinity" not in only_flops.to_json()


def assumed_but(**changes):
    return json.dumps(json.loads(ASSUMED.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "takes names with values"),
        ("{}", "missing 4 required"),
        ('{"flops_per_second": 1}', "missing 3 required"),
        (assumed_but(flops_per_second=-1), "each must be above zero"),
        (assumed_but(bytes_per_second=0), "each must be above zero"),
        (assumed_but(flops_per_second="1"), "each must be above zero"),
        (assumed_but(flops_per_second=True), "each must be above zero"),
        (assumed_but(flops_per_second=[1]), "each must be above zero"),
        (assumed_but(flops_per_second=math.nan), "each must be above zero"),
        (
            assumed_but(
                flops_per_second=None,
                bytes_per_second=math.inf,
                operations_per_second=None,
            ),
            "No speed is finite",
        ),
        (assumed_but(about={"torch": "2"}), "must name the device, under 'device'"),
        (assumed_but(about="a card"), "about is 'a card'"),
        (assumed_but(about=None), "about is inf"),
        (assumed_but(about={"device": 3}), "about has 3 under 'device'"),
        ("[" * 200_000, "recursion"),
        (assumed_but(cards=3), "unexpected keyword argument 'cards'"),
    ],
)
def test_what_is_no_speed_is_refused(text, reason):
    with pytest.raises(ValueError, match=f"no speed of a device .*{reason}"):
        Speed.from_json(text)


def test_a_speed_names_its_device_wherever_that_is_among_what_is_known():
    speed = Speed(1e12, 2**37, 1e5, {"torch": "2", "device": "a test"})
    told = "a test, 1 TFLOP/s, 128 GiB/s, 1e+05 operations/s (torch: 2)"
    assert str(speed) == told


@pytest.mark.slow
def test_a_calibration_takes_as_many_utterances_as_fit(monkeypatch):
    _, step = training_step(
        "resnet34", mode="store", blocks=(2, 2, 2, 2), frames=20, batch=2
    )
    peak = live_bytes_peak(step)
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: peak / SHARE)
    speed = calibrate(torch.device("cpu"), names=("resnet34",), frames=20, repeats=1)
    assert "batch 2, 20 frames" in speed.about["measured"]


@pytest.mark.slow
def test_the_bar_of_a_calibration_tells_each_step(capsys):
    words = {"names": ("resnet34",), "frames": 9, "repeats": 1, "progress": True}
    calibrate(torch.device("cpu"), **words)
    assert "resnet34, step 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_calibration_explains_the_times_that_it_was_made_of():
    speed = calibrate(torch.device("cpu"), names=("resnet34",), frames=20, repeats=1)
    assert set(speed.about) == {
        "device",
        "torch",
        "measured",
        "error of a block's time",
    }
    with pytest.raises(ValueError, match="must be a CPU or a GPU"):
        calibrate(torch.device("meta"))
