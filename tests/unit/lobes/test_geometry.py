"""A row with other strides, or more stages, is an encoder like all others."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import pad

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog.steps import channels_to_try, encoder_step
from speechbrain_rev.catalog.table import Training
from speechbrain_rev.inference.graph import EmbeddingGraph, exported
from speechbrain_rev.lobes import build_encoder, inference_form
from speechbrain_rev.lobes.geometry import channels_by_level
from speechbrain_rev.planner import plan_step
from speechbrain_rev.sizes import GIB
from tests.unit.hparams.files import TRAIN

from .encoders import feats, with_statistics

#: Strides, and what follows from them: levels, downsampling, frequencies of 48 bands.
STRIDES = {
    (1, 2, 2, 1): (3, 4, (48, 24, 12)),
    (2, 2, 2, 2): (5, 16, (48, 24, 12, 6, 3)),
    (1, 2, 1, 2, 2): (4, 8, (48, 24, 12, 6)),
    (1, 1): (1, 1, (48,)),
    (1, 3, 2): (3, 6, (48, 16, 8)),
}
#: All of them with revnet57, which rearranges frames, and other ways from stage to stage.
CASES = [
    *(("revnet57", strides) for strides in STRIDES),
    ("resnet34", (2, 2, 2, 2)),
    ("df_resnet56", (1, 2, 1, 2, 2)),
    ("revnet46", (2, 2, 2, 2)),
    ("revnet46", (1, 2, 1, 2, 2)),
    ("df_revnet66", (1, 2, 2, 1)),
]


LENGTHS = torch.tensor([1.0, 0.6])


@pytest.fixture
def row(request, monkeypatch):
    """A row of the table for the length of a test, of widths that suit its strides."""
    name, strides = request.param
    widths, blocks = (36,) * len(strides), (1,) * len(strides)
    row = dataclasses.replace(
        ARCHITECTURES[name],
        name="strided",
        widths=widths,
        blocks=blocks,
        strides=strides,
    )
    monkeypatch.setitem(ARCHITECTURES, row.name, row)
    return row


def built(row, **settings):
    torch.manual_seed(0)
    return build_encoder(row.name, n_mels=48, embedding_dim=8, **settings)


def speech(batch=2, time=61):
    return feats(batch, time, torch.float32)[:, :, :48]


@pytest.mark.parametrize("row", CASES, indirect=True)
def test_levels_follow_from_strides(row):
    geometry = row.geometry(n_mels=48)
    levels, downsampling, frequencies = STRIDES[row.strides]
    assert (geometry.levels, geometry.downsampling) == (levels, downsampling)
    assert geometry.frequencies == frequencies
    assert row.kind != dataclasses.replace(row, strides=(1, 2, 2, 2)).kind
    maps = []
    encoder = built(row)
    for stage in encoder.stages:
        stage.register_forward_hook(lambda stage, args, y: maps.append(y.shape[2:]))
    encoder(speech())
    frames = 61 + geometry.padding(61)
    assert maps == [
        (frequencies[level], -(-frames // geometry.level_strides[level]))
        for _, level in geometry.stage_levels
    ]


@pytest.mark.parametrize(
    ("chunk", "lengths"), [("auto", None), (20_000, LENGTHS)], ids=["", "lengths"]
)
@pytest.mark.parametrize("row", CASES, indirect=True)
def test_all_modes_train_to_the_bits_of_storing(row, chunk, lengths):
    found = {}
    modes = ["store", "recompute"] + ["reconstruct"] * row.reversible
    for mode in modes:
        encoder = built(row, mode=mode, chunk=chunk if row.reversible else None)
        y = encoder(speech(), lengths)
        y.square().sum().backward()
        found[mode] = [y, *encoder.buffers(), *(p.grad for p in encoder.parameters())]
    for mode in modes[1:]:
        assert all(map(torch.equal, found[mode], found["store"])), mode


@torch.no_grad()
@pytest.mark.parametrize("row", CASES, indirect=True)
def test_a_padded_utterance_has_the_embedding_that_it_has_alone(row):
    encoder = with_statistics(built(row))
    form = inference_form(encoder)
    for short in (20, 37, 43, 60):
        x = speech()
        x[1] = pad(x[1, :short], (0, 0, 0, 61 - short), value=7.0)
        lengths = torch.tensor([1.0, short / 61])
        alone = torch.cat([encoder(x[:1]), encoder(x[1:, :short])])
        # Float32 rounding through the network.
        for network in (encoder, form):
            torch.testing.assert_close(network(x, lengths), alone, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="needs at least"):
        encoder(x[:, : row.geometry().downsampling])


@pytest.mark.parametrize("row", CASES, indirect=True)
def test_channels_at_a_time_are_those_of_each_level(row):
    encoder = built(row)
    assert all(
        len(sizes) == encoder.geometry.levels for sizes in channels_to_try(encoder)
    )
    if not row.reversible:
        return
    sizes = channels_by_level(100_000, encoder.geometry)
    assert len(sizes) == encoder.geometry.levels
    encoder.set_channels(sizes)
    chunked = built(row, chunk=100_000)
    assert chunked.channels == sizes
    for a, b in zip(encoder.stages, chunked.stages, strict=True):
        assert a.chain.chunk == b.chain.chunk


@pytest.mark.parametrize(
    "row", [("revnet57", (1, 2, 2, 1)), ("revnet46", (2, 2, 2, 2))], indirect=True
)
def test_a_plan_fits_its_budget(row):
    training = Training(2 * GIB, 4, 200)
    step = encoder_step(row, training)
    found = plan_step(step, 2 * GIB)
    assert found.measured_bytes <= found.budget_bytes
    encoder = build_encoder(row.name)
    encoder.set_mode(found)
    assert encoder.block_modes() == found.modes
    assert tuple(encoder.channels) == tuple(found.channels)


@pytest.mark.parametrize("row", [("revnet57", (1, 2, 1, 2, 2))], indirect=True)
def test_a_graph_embeds_waveforms_as_the_encoder(row):
    encoder = with_statistics(built(row))
    graph = EmbeddingGraph(encoder, sample_rate=16000, front_end="kaldi")
    program = exported(graph)
    waves, samples = torch.randn(3, 14321), torch.tensor([14321, 8000, 4444])
    torch.testing.assert_close(program.module()(waves, samples), graph(waves, samples))


_SETTINGS = """
import dataclasses, sys
from speechbrain_rev.architectures import ARCHITECTURES
row = dataclasses.replace(
    ARCHITECTURES["revnet57"], name="five", widths=(48,) * 5, blocks=(1,) * 5,
    strides=(1, 2, 2, 2, 2),
)
ARCHITECTURES["five"] = row
from speechbrain_rev.hparams import resolve
resolve(sys.argv[1], {"arch": "five", "widths": [8, 8, 8, 8, 8], "n_mels": 64})
for name, value in {"widths": [8] * 4, "widths ": [8, 8, 8, 8, 6], "n_mels": 72}.items():
    try:
        resolve(sys.argv[1], {"arch": "five", "n_mels": 64} | {name.strip(): value})
    except ValueError as error:
        print(error)
"""


def test_settings_follow_the_row():
    done = subprocess.run(
        [sys.executable, "-c", _SETTINGS, str(TRAIN)],
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout.splitlines()
    assert len(said) == 3
    assert all(
        "Give a number for each of its 5 stages, multiples of 4." in s for s in said[:2]
    )
    assert "without a rest. Give a multiple of 16." in said[2]


@pytest.mark.parametrize("strides", [(1, 2, 0, 2), (1, 2, 2.0, 2), ()])
def test_strides_are_whole_numbers_of_at_least_one(strides):
    with pytest.raises(ValueError, match="strides"):
        dataclasses.replace(ARCHITECTURES["revnet57"], strides=strides)
