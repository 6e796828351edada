"""The engine and the encoders on a CUDA device: the same promises as on the CPU."""

import pytest
import torch
from torch import nn

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.modes import MEMORY_FORMATS
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.reversible import Recompute
from speechbrain_rev.reversible.comparison import RecomputeWarning
from tests.unit.reversible.chains import (
    EXACT,
    MODES,
    RESIDUALS,
    WITHOUT_STORAGE,
    Plain,
    chain_of,
    distance,
    loss_of,
    step,
    streams,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_gpu(inputs):
    return [x.detach().cuda().requires_grad_() for x in inputs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", RESIDUALS)
def test_gradients_and_buffers_equal_plain_autograds(kind, mode):
    chain = chain_of(kind, mode=mode).cuda()
    plain = Plain(chain)
    _, grads, buffers = step(chain, on_gpu(streams()))
    _, expected, expected_buffers = step(plain, on_gpu(streams()))
    assert distance(grads, expected) < EXACT
    if expected_buffers or buffers:  # normalisation has some, dropout has none
        assert distance(buffers, expected_buffers) < EXACT


def test_the_default_device_may_be_the_gpu():
    chain = chain_of("basic").cuda()
    with torch.device("cuda"):
        for _ in range(3):  # what streams report is copied to the host meanwhile
            _, grads, _ = step(chain, on_gpu(streams()))
    assert all(grad.isfinite().all() for grad in grads.values() if grad is not None)


@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_the_random_state_of_the_device_is_left_as_found(mode):
    chain = chain_of("dropout", mode=mode).cuda()
    step(Plain(chain), on_gpu(streams()))
    expected = torch.rand(3, device="cuda")
    step(chain, on_gpu(streams()))
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_allocated_memory_does_not_grow_with_depth():
    peaks = {}
    for depth in (8, 64):
        chain = chain_of("basic", depth, dtype=torch.float32).cuda()
        chain.requires_grad_(False)
        x = on_gpu(streams(torch.float32, batch=32, time=200))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(chain(*x)).backward()
        peaks[depth] = torch.cuda.max_memory_allocated() - before
    assert peaks[64] <= 1.01 * peaks[8]


class Scattered(nn.Module):
    """Adds many values to few places, in the order in which threads get there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        places = torch.arange(len(x), device=x.device) % 3
        y = self.linear(x)
        sums = y.new_zeros(3, 64).index_add(0, places, y)
        return sums[places].exp().log()  # saves what was added up


def test_a_block_that_adds_with_atomics_is_named_and_trains_with_a_warning():
    x = torch.randn(100_000, 64, device="cuda") / 100
    block = Recompute(Scattered().cuda(), verify="raise")
    with pytest.raises(RuntimeError, match=r"Scattered .* verify='warn' if it adds by"):
        block(x).square().mean().backward()
    block = Recompute(Scattered().cuda(), verify="warn")
    with pytest.warns(RecomputeWarning, match="adds by atomics on purpose"):
        block(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        Recompute(Scattered().cuda(), verify="raise")(x).square().mean().backward()
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize("name", ["revnet57", "revnet140", "df_revnet66"])
def test_modes_of_an_encoder_have_equal_bits_in_either_memory_format(
    name, memory_format
):
    feats, grads = torch.randn(4, 96, 80, device="cuda"), {}
    for mode in MODES:
        torch.manual_seed(0)
        encoder = build_encoder(
            name, widths=(16, 16, 32, 32), blocks=(1, 1, 2, 1), chunk=200_000,
            mode=mode, memory_format=memory_format, verify="raise", verify_every=1,
        ).cuda()  # fmt: skip
        encoder(feats).square().sum().backward()
        encoder.check_streams()
        grads[mode] = [p.grad for p in encoder.parameters()]
    for own in grads.values():
        assert all(map(torch.equal, own, grads[MODES[0]]))


@pytest.mark.parametrize("name", ["revnet57", "df_revnet66", "resnet34"])
@pytest.mark.parametrize("bits", [8, 32])
def test_encoders_train(name, bits):
    torch.manual_seed(0)
    encoder = build_encoder(name, widths=(16, 16, 32, 32), blocks=(1, 1, 2, 1)).cuda()
    optimizer = build_optimizer(encoder.parameters(), name="adamw", bits=bits, lr=1e-3)
    feats = torch.randn(8, 96, 80, device="cuda")
    target = torch.randn(8, 1, 256, device="cuda")
    losses = []
    for _ in range(20):
        loss = (encoder(feats) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
