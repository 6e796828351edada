"""An utterance has one embedding, alone or padded in a batch, and it costs nothing."""

import random

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.geometry import AUTO
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.reversible.norm import BatchNorm
from tests.unit.lobes.encoders import KINDS, feats, tiny

ALL_MODES = [
    (name, mode)
    for name in KINDS
    for mode in ("store", "recompute", "reconstruct")
    if mode != "reconstruct" or ARCHITECTURES[name].reversible
]


def trained(name):
    """An encoder whose normalisation moves zeros, as that of a trained one does."""
    encoder = tiny(name).eval()
    for norm in encoder.modules():
        if isinstance(norm, BatchNorm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.5)
            nn.init.normal_(norm.running_mean, std=0.5)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return encoder


def random_lengths(name):
    """Ten pairs of a longer and a shorter number of frames."""
    rng = random.Random(name)
    for _ in range(10):
        short, long = sorted(rng.sample(range(9, 120), 2))
        yield long, short


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_padded_utterances_have_the_embedding_that_they_have_alone(name):
    encoder, blind = trained(name), 0.0
    for long, short in random_lengths(name):
        first, second = feats(2, long, torch.float32).split(1)
        second = second[:, :short]
        padded = torch.cat([first, pad(second, (0, 0, 0, long - short), value=7.0)])
        together = encoder(padded, lengths=torch.tensor([1.0, short / long]))
        alone = torch.cat([encoder(first), encoder(second)])
        # Float32 rounding through the network.
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
        blind = max(blind, float((encoder(padded) - alone)[1].abs().max()))
    # What lengths that are ignored would do.
    assert blind > 0.05


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_what_stands_in_the_padding_does_not_matter(name):
    encoder, lengths = trained(name), torch.tensor([1.0, 0.6])
    padded = feats(2, 45, torch.float32)
    expected = encoder(padded, lengths)
    for value in (0.0, 1e30, float("inf"), float("nan")):
        padded[1, 27:] = value
        assert torch.equal(encoder(padded, lengths), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet34", "df_revnet89"])
@pytest.mark.parametrize("frames", [9, 200, 1999, 3001])
def test_relative_lengths_are_rounded_to_frames(name, frames):
    encoder = trained(name)
    x = feats(1, 3001, torch.float32)
    alone = encoder(x[:, :frames])
    padded = encoder(x, torch.tensor([frames / 3001]))
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "mode"), ALL_MODES)
def test_training_with_lengths_leaves_the_padding_out(name, mode):
    short = feats(2, 24)
    results = []
    for batch, lengths in (
        (short, None),
        (pad(short, (0, 0, 0, 24), value=9.0), torch.tensor([0.5, 0.5])),
    ):
        encoder = tiny(name, mode=mode).double()
        # No sum of squares: at the end it would not see the deviations' gradient turn.
        y = encoder(batch, lengths=lengths)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        grads = [p.grad for p in encoder.parameters()]
        results.append((grads, list(encoder.buffers())))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        # Wide bottlenecks have many pieces, which take seconds.
        pytest.param(
            name,
            mode,
            marks=[pytest.mark.slow]
            if name in ("revnet140", "revnet155") and mode != "reconstruct"
            else [],
        )
        for name, mode in ALL_MODES
    ],
)
def test_lengths_store_masks_and_pooled_means_and_nothing_more(name, mode):
    batch, frames = 16, 200
    held, peaks = [], []
    for lengths in (None, torch.full((batch,), 0.5, device="meta")):
        with torch.device("meta"):
            encoder = build_encoder(name, mode=mode, blocks=(1, 1, 1, 1))
            for p in encoder.parameters():
                p.grad = torch.zeros_like(p)
            x = torch.randn(batch, frames, 80)
        with LiveBytes() as meter:
            y = encoder(x, lengths)
            held.append(meter.live)
            y.square().sum().backward()
        peaks.append(meter.peak)
    pooled = batch * encoder.fc.in_features * 4
    # The input, as masked, masks of 4 levels, and some numbers for each channel.
    masked_input, masks = batch * frames * 80 * 4, batch * frames * 2 * 4
    numbers = sum(b.numel() for b in encoder.buffers()) * 8
    allowed = masked_input + masks + pooled + numbers
    assert held[1] - held[0] <= allowed
    # At the peak a normalisation may hold one copy more, of one block's middle or chunk.
    assert peaks[1] <= peaks[0] + max(0.03 * peaks[0], batch * AUTO)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_waits_for_the_device(name, training):
    # A meta tensor has no value: asking for one, as .item() or a branch does, fails.
    encoder = tiny(name).to("meta").train(training)
    x, lengths = feats(3, 43, torch.float32), torch.tensor([1.0, 0.5, 0.2])
    y = encoder(x.to("meta"), lengths.to("meta"))
    if training:
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"item\(\).*meta"):
        bool(y[0, 0, 0] > 0)


@pytest.mark.filterwarnings("ignore:.*fire in both of its runs")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("time", [40, 43])
def test_without_lengths_there_is_no_mask(name, time):
    encoder, masks = tiny(name), []
    for norm in encoder.modules():
        if isinstance(norm, BatchNorm):
            norm.register_forward_pre_hook(lambda m, inputs: masks.extend(inputs[1:]))
    encoder(feats(2, time, torch.float32)).sum().backward()
    padded = ARCHITECTURES[name].type == "II" and time % 8
    assert {mask is None for mask in masks} == {not padded}


def test_lengths_must_be_one_per_utterance():
    with pytest.raises(ValueError, match=r"one for each utterance: \[2\]"):
        tiny("revnet57")(feats(2, 20, torch.float32), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lengths_in_half_precision_are_refused(dtype):
    lengths = torch.tensor([1.0, 0.6]).to(dtype)
    with pytest.raises(ValueError, match="pass them in float32"):
        tiny("revnet57")(feats(2, 20, torch.float32), lengths)


@pytest.mark.parametrize("length", [0.0, -0.5, 20.0, float("nan")])
def test_lengths_must_be_relative(length):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        tiny("revnet57")(feats(2, 20, torch.float32), torch.tensor([1.0, length]))
