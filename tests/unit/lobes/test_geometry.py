"""Levels of any strides, channels at a time, and lengths: padding changes nothing."""

import dataclasses
import functools
import random
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import pad

from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.catalog.steps import channels_to_try
from speechbrain_rev.inference.graph import EmbeddingGraph, exported
from speechbrain_rev.lobes import build_encoder, inference_form
from speechbrain_rev.lobes.description import FrontEnd
from speechbrain_rev.lobes.geometry import AUTO, channels_by_level
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.segment import pieces_of
from tests.unit.hparams.files import TRAIN
from tests.unit.lobes.encoders import (
    IN_MODES,
    KINDS,
    LENGTHS,
    assert_padding_is_left_out,
    assert_same_bits,
    but_slow,
    feats,
    grads_of,
    modes_of,
    on_meta,
    tiny,
    trained,
    with_statistics,
)

#: Strides, and what follows from them: levels, downsampling, frequencies of 48 bands.
STRIDES = {
    (1, 2, 2, 1): (3, 4, (48, 24, 12)),
    (2, 2, 2, 2): (5, 16, (48, 24, 12, 6, 3)),
    (1, 2, 1, 2, 2): (4, 8, (48, 24, 12, 6)),
    (1, 1): (1, 1, (48,)),
    (1, 3, 2): (3, 6, (48, 16, 8)),
    ((2, 1), (2, 2), (2, 1), (2, 1)): (5, 2, (48, 24, 12, 6, 3)),
    (1, (1, 2), (2, 3)): (3, 6, (48, 48, 24)),
}
#: All of them with revnet57, which rearranges frames, and other ways from stage to stage.
CASES = [
    *(("revnet57", s) for s in STRIDES if all(isinstance(n, int) for n in s)),
    ("resnet34", (2, 2, 2, 2)),
    ("resnet101", (1, (1, 2), (2, 3))),
    ("df_resnet56", ((2, 1), (2, 2), (2, 1), (2, 1))),
    ("df_revnet66", ((2, 1), (2, 2), (2, 1), (2, 1))),
    ("df_resnet56", (1, 2, 1, 2, 2)),
    ("revnet46", (2, 2, 2, 2)),
    ("df_revnet66", (1, 2, 2, 1)),
]


def strided(name, strides):
    """Give a row of other strides, of widths that suit them."""
    sizes = {"widths": (36,) * len(strides), "blocks": (1,) * len(strides)}
    return dataclasses.replace(
        ARCHITECTURES[name], name="strided", strides=strides, **sizes
    )


class TestStrides:
    """A row with other strides, or more stages, is an encoder like all others."""

    @pytest.fixture(params=CASES, ids=str)
    def row(self, request, monkeypatch):
        row = strided(*request.param)
        monkeypatch.setitem(ARCHITECTURES, row.name, row)
        return row

    def built(self, row, **settings):
        torch.manual_seed(0)
        return build_encoder(row.name, n_mels=48, embedding_dim=8, **settings)

    def speech(self):
        return feats(3, 61, torch.float32, n_mels=48)

    def test_levels_follow(self, row):
        geometry = row.geometry(n_mels=48)
        levels, downsampling, frequencies = STRIDES[row.strides]
        assert (geometry.levels, geometry.downsampling) == (levels, downsampling)
        assert geometry.frequencies == frequencies
        assert row.kind != dataclasses.replace(row, strides=(1, 2, 2, 2)).kind
        maps, encoder = [], self.built(row)
        for stage in encoder.stages:
            stage.register_forward_hook(lambda stage, args, y: maps.append(y.shape[2:]))
        encoder(self.speech())
        frames = 61 + geometry.padding(61)
        assert maps == [
            (frequencies[level], -(-frames // geometry.level_strides[level]))
            for _, level in geometry.stage_levels
        ]

    def test_all_modes_train_to_the_bits_of_storing(self, row):
        chunk, steps = 160_000 if row.reversible else None, []
        for mode in modes_of(row.name):
            encoder = self.built(row, mode=mode, chunk=chunk)
            steps.append(trained(encoder, self.speech(), LENGTHS))
            assert_same_bits(steps[-1], steps[0])

    def test_a_padded_utterance_has_the_embedding_that_it_has_alone(self, row):
        encoder = with_statistics(self.built(row))
        for short in (20, 37, 60):
            x = self.speech()[:2]
            assert_padding_is_left_out(encoder, x, short, inference_form(encoder))
        with pytest.raises(ValueError, match="needs at least"):
            encoder(x[:, : row.geometry().downsampling])

    def test_channels_at_a_time_are_those_of_each_level(self, row):
        encoder = self.built(row)
        levels = encoder.geometry.levels
        assert {len(sizes) for sizes in channels_to_try(encoder)} <= {
            levels,
            2 * levels,
        }
        if row.reversible:
            sizes = channels_by_level(100_000, encoder.architecture, encoder.geometry)
            encoder.set_channels(sizes)
            chunked = self.built(row, chunk=100_000)
            assert chunked.channels == sizes
            for a, b in zip(encoder.stages, chunked.stages, strict=True):
                assert a.chain.chunk == b.chain.chunk

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "row",
        [
            ("revnet57", (1, 2, 1, 2, 2)),
            ("df_resnet56", ((2, 1), (2, 2), (2, 1), (2, 1))),
        ],
        indirect=True,
    )
    def test_a_graph_embeds_waveforms_as_the_encoder(self, row):
        encoder = with_statistics(self.built(row))
        graph = EmbeddingGraph(encoder, FrontEnd("kaldi", 16000, encoder.n_mels))
        given = torch.randn(3, 14321), torch.tensor([14321, 8000, 4444])
        torch.testing.assert_close(exported(graph).module()(*given), graph(*given))

    @pytest.mark.parametrize(
        "strides", [(1, 2, 0, 2), (1, 2, 2.0, 2), (), (1, (2, 1), 2, 2)]
    )
    def test_they_are_whole_numbers_of_at_least_one(self, strides):
        with pytest.raises(ValueError, match="strides"):
            strided("revnet57", strides)


_REFUSED = """
import dataclasses, sys
from speechbrain_rev.architectures import ARCHITECTURES as rows
sizes = {"widths": [8] * 5, "blocks": [1] * 5}
rows["five"] = dataclasses.replace(rows["revnet57"], strides=(1, 2, 2, 2, 2), **sizes)
from speechbrain_rev.hparams import resolve
sizes |= {"arch": "five", "n_mels": 64}
resolve(sys.argv[1], sizes)
for other in {"widths": [8] * 4}, {"widths": [8, 8, 8, 8, 6]}, {"n_mels": 72}:
    try:
        resolve(sys.argv[1], sizes | other)
    except ValueError as error:
        print(error)
"""


def test_settings_follow_the_row():
    command = [sys.executable, "-c", _REFUSED, str(TRAIN)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *widths, n_mels = done.stdout.splitlines()
    assert len(widths) == 2
    assert all("one number for each" in line for line in widths)
    assert "n_mels is 72" in n_mels


@pytest.mark.parametrize("n_mels", [24, 40, 80])
def test_channels_do_not_depend_on_the_utterance(n_mels):
    row = architecture("revnet57")
    channels = channels_by_level(AUTO, row, row.geometry(n_mels))
    for level, number in enumerate(channels):
        size = 4 * -(-n_mels // 2**level) * -(-200 // 2**level)
        assert number * size <= AUTO < (number + 1) * size


def _step(encoder, x):
    encoder(x).sum().backward()


@pytest.mark.parametrize(
    "name", ["revnet46", "revnet155", "df_revnet66", "df_revnet89"]
)
def test_chunks_are_where_the_peak_is(name):
    peaks, pieces = [], []
    for chunk in (AUTO, "auto"):
        encoder = on_meta(name, blocks=(1, 1, 1, 1), chunk=chunk)
        x = torch.randn(64, 200, 80, device="meta")
        step = functools.partial(_step, encoder, x)
        peaks.append(trace_bytes(encoder, step).peak_bytes)
        chains = [stage.chain for stage in encoder.stages]
        pieces.append(sum(len(pieces_of(c.blocks[0].f, c.chunk)) for c in chains))
    # Fewer or evener pieces, for hardly more memory than where every level has small ones.
    assert peaks[1] <= 1.05 * peaks[0]
    assert pieces[1] <= pieces[0]


class TestLengths:
    """An utterance has one embedding, alone or padded in a batch, and it costs nothing."""

    @pytest.mark.parametrize("name", KINDS)
    def test_padded_utterances_have_the_embedding_that_they_have_alone(self, name):
        encoder, rng = with_statistics(tiny(name)), random.Random(name)
        for _ in range(5):
            short, long = sorted(rng.sample(range(9, 120), 2))
            assert_padding_is_left_out(encoder, feats(2, long, torch.float32), short)

    @torch.no_grad()
    def test_relative_lengths_are_rounded_to_frames(self):
        encoder = with_statistics(tiny("df_revnet89"))
        x = feats(1, 3001, torch.float32)
        for frames in (9, 1999, 3001):
            padded = encoder(x, torch.tensor([frames / 3001]))
            alone = encoder(x[:, :frames])
            torch.testing.assert_close(padded, alone, atol=1e-4, rtol=0)

    @pytest.mark.parametrize(("name", "mode"), IN_MODES)
    def test_training_leaves_the_padding_out(self, name, mode):
        short, steps = feats(2, 24), []
        longer = pad(short, (0, 0, 0, 24), value=9.0)
        for x, lengths in ((short, None), (longer, torch.tensor([0.5, 0.5]))):
            encoder = tiny(name, mode=mode).double()
            # No sum of squares: at the end it would not see the deviations' gradient turn.
            y = encoder(x, lengths=lengths)
            (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
            steps.append((grads_of(encoder), dict(encoder.named_buffers())))
        torch.testing.assert_close(*steps)

    @pytest.mark.parametrize(
        ("name", "mode"),
        but_slow(
            IN_MODES,
            ("resnet34", "recompute"),
            ("revnet46", "store"),
            ("df_revnet89", "reconstruct"),
        ),
    )
    def test_masks_and_pooled_means_are_stored_and_nothing_more(self, name, mode):
        batch, frames = 16, 200
        held, peaks = [], []
        for lengths in (None, torch.full((batch,), 0.5, device="meta")):
            encoder = on_meta(name, mode=mode)
            x = torch.randn(batch, frames, 80, device="meta")
            with LiveBytes() as meter:
                y = encoder(x, lengths)
                held.append(meter.live)
                y.square().sum().backward()
            peaks.append(meter.peak)
        pooled = batch * encoder.fc.in_features * 4
        # The input, as masked, masks of 4 levels, and some numbers for each channel.
        masked_input, masks = batch * frames * 80 * 4, batch * frames * 2 * 4
        numbers = sum(b.numel() for b in encoder.buffers()) * 8
        assert held[1] - held[0] <= masked_input + masks + pooled + numbers
        # At the peak a normalisation may hold one copy more, of one block's middle or chunk.
        assert peaks[1] <= peaks[0] + max(0.03 * peaks[0], batch * AUTO)

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("name", KINDS)
    def test_nothing_waits_for_the_device(self, name, training):
        # A meta tensor has no value: asking for one, as .item() or a branch does, fails.
        encoder = tiny(name).to("meta").train(training)
        y = encoder(feats(3, 43, torch.float32).to("meta"), LENGTHS.to("meta"))
        if training:
            y.sum().backward()
        with pytest.raises(RuntimeError, match=r"item\(\).*meta"):
            bool(y[0, 0, 0] > 0)

    @pytest.mark.filterwarnings("ignore:.*fire in both of its runs")
    @pytest.mark.parametrize(
        "name", ["resnet34", "revnet46", "revnet57", "df_revnet66"]
    )
    @pytest.mark.parametrize("time", [40, 43])
    def test_without_them_there_is_no_mask(self, name, time):
        encoder, masks = tiny(name), []
        for norm in encoder.modules():
            if isinstance(norm, BatchNorm):
                norm.register_forward_pre_hook(
                    lambda m, inputs: masks.extend(inputs[1:])
                )
        encoder(feats(2, time, torch.float32)).sum().backward()
        padded = ARCHITECTURES[name].type == "II" and time % 8
        assert {mask is None for mask in masks} == {not padded}

    @pytest.mark.parametrize(
        ("lengths", "words"),
        [
            (torch.ones(3), r"one for each utterance: \[2\]"),
            (torch.tensor([1.0, 0.6]).half(), "pass them in float32"),
            (torch.tensor([1.0, 0.6]).bfloat16(), "pass them in float32"),
            *(
                (torch.tensor([1.0, length]), "above 0 and at most 1")
                for length in (0.0, -0.5, 20.0, float("nan"))
            ),
        ],
    )
    def test_what_is_no_relative_lengths_is_refused(self, lengths, words):
        with pytest.raises(ValueError, match=words):
            tiny("revnet57")(feats(2, 20, torch.float32), lengths)
