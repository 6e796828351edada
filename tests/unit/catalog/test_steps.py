"""Steps of rows and of runs: what their profiles are tied to, and chunks."""

import dataclasses

import pytest
import torch

from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.steps import (
    channels_to_try,
    encoder_step,
    shallow,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.planner import (
    Profile,
    profile,
    profiling,
)
from speechbrain_rev.planner.choice import choose
from speechbrain_rev.planner.knapsack import Cost
from speechbrain_rev.planner.profile import BlockProfile
from speechbrain_rev.sizes import GIB
from tests.unit.training.recipe_steps import CPU

SMALL = {"widths": (8, 12, 16, 24), "blocks": (3, 1, 2, 0)}
ROW = dataclasses.replace(
    architecture("df_revnet149"), widths=(8, 8, 8, 8), blocks=(1, 3, 1, 1)
)


def built(name, **options):
    with torch.device("meta"):
        return build_encoder(name, **{**SMALL, **options})


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
    keys = [encoder_step(row, training).key for row in (like, deeper, other)]
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
