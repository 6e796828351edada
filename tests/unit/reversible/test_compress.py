"""Chains some of whose blocks compress what F and G save."""

import pytest
import torch
from torch import nn

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    RangeBound,
)
from speechbrain_rev.reversible import AdditiveCoupling, Recompute, ReversibleChain

from .chains import as_global


def residual(channels=4):
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
    )


def chain_of(modes):
    torch.manual_seed(0)
    blocks = [AdditiveCoupling(residual(), residual()) for _ in modes]
    chain = ReversibleChain(blocks, mode=modes, verify="raise", verify_every=1)
    chain.compression = ActivationCompression(
        convolutions=RangeBound(1e-2), normalisations=DeviationBound(1e-2)
    )
    return chain


def run(chain):
    torch.manual_seed(1)
    x1, x2 = torch.randn(2, 2, 4, 20, 30).requires_grad_().unbind()
    y1, y2 = chain(x1, x2)
    (y1.square().mean() + y2.square().mean()).backward()
    chain.check_streams()
    return (y1, y2), {n: p.grad for n, p in chain.named_parameters()}


MIXED = ["reconstruct", "compress", "recompute", "compress", "reconstruct"]


def test_streams_stay_exact_where_blocks_compress():
    """So blocks below reconstruct what they were given, which their checksums hold."""
    stored, _ = run(chain_of(["store"] * 5))
    mixed, _ = run(chain_of(MIXED))
    assert all(torch.equal(a, b) for a, b in zip(mixed, stored, strict=True))


def test_blocks_after_the_last_that_compresses_have_exact_gradients():
    _, exact = run(chain_of(["store"] * 5))
    _, found = run(chain_of(MIXED))
    differing = {n.split(".")[1] for n in exact if not torch.equal(found[n], exact[n])}
    # The error of a batch normalisation's input goes down to the blocks before.
    assert differing == {"0", "1", "2", "3"}
    for name, grad in exact.items():
        assert (found[name] - grad).norm() < 0.1 * grad.norm(), name


def test_only_blocks_that_compress_are_compressed():
    chain = chain_of([*MIXED, "store"])
    run(chain)
    assert {name.split(".")[1] for name in chain.compression.records} == {"1", "3"}


def test_running_statistics_are_those_of_storing():
    stored, mixed = chain_of(["store"] * 5), chain_of(MIXED)
    run(stored), run(mixed)
    for name, buffer in stored.named_buffers():
        assert torch.equal(dict(mixed.named_buffers())[name], buffer), name


def test_what_is_recomputed_around_a_chain_is_not_compressed():
    """The second run is in the backward pass, where it would save nothing."""
    chain = chain_of(["compress"] * 5)
    runs = []
    variables = as_global(note=runs.append)

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = chain

        def forward(self, x):
            variables.note(1)
            return torch.cat(self.chain(*x.chunk(2, 1)), 1)

    torch.manual_seed(1)
    x = torch.randn(2, 8, 20, 30)
    Recompute(Joined())(x).square().mean().backward()
    found = {n: p.grad.clone() for n, p in chain.named_parameters()}
    assert not chain.compression.records
    assert len(runs) == 2
    chain.zero_grad()
    chain.set_mode("store")
    Joined()(x).square().mean().backward()
    for name, p in chain.named_parameters():
        assert torch.equal(found[name], p.grad), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_under_autocast_are_compressed_where_their_precision_allows(dtype):
    chain = chain_of(["compress"] * 2)
    with torch.autocast("cpu", dtype=dtype):
        _, found = run(chain)
    assert all(g.isfinite().all() for g in found.values())
    forms = {r.form for r in chain.compression.records.values()}
    assert forms <= {"dense", "sparse", "raw"}
    assert forms & {"dense", "sparse"}
