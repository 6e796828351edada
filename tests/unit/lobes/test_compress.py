"""Encoders in mode "compress"."""

import copy

import pytest
import torch

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    GradientBound,
    RangeBound,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.reversible import Mode

SMALL = {"widths": (16, 16, 32, 32), "blocks": (2, 1, 1, 1)}
#: One of each kind of block, vanilla and reversible.
ENCODERS = [
    "resnet34",
    "revnet57",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("resnet101", "df_resnet56", "df_revnet89", "revnet140")
    ),
]


def encoder_of(name, mode, fraction=1e-3, **options):
    torch.manual_seed(0)
    encoder = build_encoder(name, **SMALL, **options)
    encoder.compression = ActivationCompression(
        convolutions=RangeBound(fraction), normalisations=DeviationBound(fraction)
    )
    encoder.set_mode(mode)
    return encoder


def step(encoder, lengths=None):
    torch.manual_seed(1)
    feats = torch.randn(4, 40, 80)
    with LiveBytes() as meter:
        loss = encoder(feats, lengths).square().mean()
        held = meter.live
        loss.backward()
    return held, {n: p.grad.clone() for n, p in encoder.named_parameters()}


def distance(found, exact):
    error = sum(float((found[n] - exact[n]).square().sum()) for n in exact)
    return (error / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


@pytest.mark.parametrize("name", ENCODERS)
def test_compressing_is_storing_within_the_bounds_in_less_memory(name):
    stored_bytes, exact = step(encoder_of(name, "store"))
    held, found = step(encoder_of(name, "compress"))
    assert 0 < distance(found, exact) < 0.02
    coarse = step(encoder_of(name, "compress", 1e-2))[1]
    assert distance(coarse, exact) > 2 * distance(found, exact)
    # Streams of reversible encoders are integers, which stay as they are.
    assert held < stored_bytes / (2.5 if "rev" not in name else 1.3)


@pytest.mark.parametrize("name", ["resnet34", "revnet57"])
def test_blocks_can_have_any_mode_beside(name):
    encoder = encoder_of(name, "store")
    _, exact = step(encoder)
    encoder.zero_grad()
    modes = ["compress", "store", "recompute"]
    names = list(encoder.block_modes())
    encoder.set_mode({n: modes[i % 3] for i, n in enumerate(names)})
    _, found = step(encoder)
    assert 0 < distance(found, exact) < 0.01
    compressing = [n for n, m in encoder.block_modes().items() if m is Mode.COMPRESS]
    prefixes = tuple(n.replace(".chain.", ".chain.blocks.") for n in compressing)
    assert encoder.compression.records
    assert all(layer.startswith(prefixes) for layer in encoder.compression.records)


def test_masked_frames_stay_zero():
    lengths = torch.tensor([1.0, 0.5, 0.75, 0.25])
    _, exact = step(encoder_of("resnet34", "store"), lengths)
    _, found = step(encoder_of("resnet34", "compress"), lengths)
    assert 0 < distance(found, exact) < 0.02


def test_evaluation_is_that_of_any_mode():
    encoder = encoder_of("resnet34", "compress").eval()
    feats = torch.randn(2, 64, 80)
    found = encoder(feats)
    encoder.set_mode("store")
    assert torch.equal(found, encoder(feats))


def test_a_compressing_encoder_can_be_copied():
    encoder = copy.deepcopy(encoder_of("resnet34", "compress"))
    assert step(encoder)[1]


def test_the_state_dict_knows_no_mode():
    assert (
        encoder_of("resnet34", "compress").state_dict().keys()
        == encoder_of("resnet34", "store").state_dict().keys()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet34", "revnet57"])
def test_both_kinds_at_the_recipes_bounds_leave_the_gradient_within_a_percent(name):
    """Which is what the README states of it after some hundred steps."""
    encoder = encoder_of(name, "compress")
    bound = GradientBound(0.01)
    encoder.compression = ActivationCompression(convolutions=bound)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01, momentum=0.9)
    encoder.compression.follow(optimizer)
    torch.manual_seed(1)
    target = torch.randn(4, 256)

    def backward():
        optimizer.zero_grad()
        (encoder(feats) - target).square().mean().backward()
        return {n: p.grad.clone() for n, p in encoder.named_parameters()}

    for _ in range(12):
        feats = torch.randn(4, 64, 80)
        backward()
        optimizer.step()
    assert len(bound.bounds) > 10
    found = backward()
    encoder.set_mode("store")
    assert 0 < distance(found, backward()) < 0.01
