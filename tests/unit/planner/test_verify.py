"""A block is reconstructed only if its inverse gives back what went in."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.planner import plan
from speechbrain_rev.planner.probe import reproduced
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
from tests.unit.lobes.encoders import KINDS, feats
from tests.unit.planner.networks import (
    ARCHITECTURES,
    Chained,
    encoder,
    half,
    plain,
    profile_module,
)

WIDTH = 8
X = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH), torch.ones(16, WIDTH)


class Noise(nn.Module):
    """Another function each time, by a share of its input."""

    def __init__(self, share=1.0):
        super().__init__()
        self.share = share

    def forward(self, x):
        return x + self.share * torch.randn_like(x)


class Counting(nn.Module):
    """Changes with every call, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Nan(nn.Module):
    def forward(self, x):
        return x / 0 * 0


class Inf(nn.Module):
    def forward(self, x):
        return x.exp() * torch.inf


class Wrong(AdditiveCoupling):
    def inverse(self, y1, y2, mask=None):
        return super().inverse(y2, y1, mask)


def chain_with(*blocks):
    """Good blocks around some."""
    good = [AdditiveCoupling(half(WIDTH), half(WIDTH)) for _ in range(2)]
    return ReversibleChain([good[0], *blocks, good[1]])


BAD = {
    "noise in f": lambda: AdditiveCoupling(Noise(), nn.Tanh()),
    "noise in g": lambda: AdditiveCoupling(nn.Tanh(), Noise()),
    "little noise": lambda: AdditiveCoupling(Noise(0.02), nn.Tanh()),
    "counting": lambda: AdditiveCoupling(Counting(), nn.Tanh()),
    "wrong inverse": lambda: Wrong(nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_block_that_does_not_come_back_is_found(name):
    torch.manual_seed(0)
    found = reproduced(chain_with(BAD[name]()), X)
    assert found == {"blocks.0": True, "blocks.1": False, "blocks.2": True}


@pytest.mark.parametrize("function", [Nan, Inf])
def test_what_is_not_finite_never_comes_back(function):
    found = reproduced(chain_with(AdditiveCoupling(nn.Tanh(), function())), X)
    # What follows gets it, and cannot be judged.
    assert found == {"blocks.0": True, "blocks.1": False, "blocks.2": False}


def test_what_overflows_never_comes_back():
    # The sum is infinite, and so is what is left of it.
    chain = ReversibleChain([AdditiveCoupling(nn.Identity(), nn.Tanh())])
    large = torch.full((2, 3), 3e38)
    assert reproduced(chain, (large, large)) == {"blocks.0": False}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [k for k in KINDS if ARCHITECTURES[k].reversible])
def test_blocks_of_encoders_come_back(name, seed):
    torch.manual_seed(seed)
    module = encoder(name)
    if seed:
        # Statistics of a network that has been trained, not those it is born with.
        with torch.no_grad():
            module(feats(dtype=torch.float32))
    found = reproduced(module, (feats(dtype=torch.float32), torch.tensor([1.0, 0.6])))
    assert found == dict.fromkeys(sorted(module.reversible_blocks()), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_and_small_numbers_come_back(dtype):
    for scale in (1e-20, 1e-3, 1e3, 1e20):
        module = chain_with().to(dtype)
        assert all(reproduced(module, [scale * x.to(dtype) for x in X]).values())


def test_dropout_does_nothing_in_evaluation():
    block = AdditiveCoupling(nn.Dropout(0.5), nn.Dropout(0.5))
    assert all(reproduced(chain_with(block), X).values())


def test_the_module_is_left_as_it_was():
    module = chain_with(BAD["counting"]())
    module.train()
    module.blocks[0].eval()
    state = copy.deepcopy(module.state_dict())
    training = [m.training for m in module.modules()]
    random = torch.get_rng_state()
    reproduced(module, X)
    assert [m.training for m in module.modules()] == training
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks for m in module.modules())


def test_a_refused_block_is_named_and_never_reconstructed():
    torch.manual_seed(0)
    chain = chain_with(BAD["noise in f"]())
    with pytest.warns(
        UserWarning, match=r"Not reconstructed.*: blocks\.1\. Their"
    ) as w:
        profile = profile_module(chain, X, measure=False)
    assert len(w) == 1
    assert profile.about["reconstruction"] == "verified: 2 of 3 blocks"
    modes = {block.name: set(block.modes) for block in profile.blocks}
    assert modes["blocks.1"] == {"store", "recompute"}
    assert (
        modes["blocks.0"] == modes["blocks.2"] == {"store", "recompute", "reconstruct"}
    )
    assert profile.uniform("reconstruct")["blocks.1"] == "recompute"


@pytest.mark.parametrize("measure", [True, False])
def test_a_plan_around_a_refused_block_trains(measure):
    torch.manual_seed(0)
    chain = chain_with(BAD["little noise"]())
    with pytest.warns(UserWarning, match="Not reconstructed"):
        most = plan(chain, X, 10**9, measure=False).measured_bytes
    with pytest.warns(UserWarning, match="Not reconstructed"):
        found = plan(chain, X, 4 * most // 5, measure=measure)
    assert found.modes["blocks.1"] != "reconstruct"
    found.apply(chain)
    sum(y.sum() for y in chain(*X)).backward()


@pytest.mark.parametrize(
    ("module", "x", "words"),
    [
        (Chained(depth=2), torch.randn(4, 16), "verified: 2 of 2 blocks"),
        (
            Chained(depth=2).to("meta"),
            torch.randn(4, 16, device="meta"),
            "not verified: no n",
        ),
        (plain(2), torch.randn(4, 64), "no block reconstructs"),
    ],
)
def test_a_profile_says_whether_it_was_looked_at(module, x, words):
    blocks = [] if isinstance(module, Chained) else ["?"]
    profile = profile_module(module, x, blocks=blocks, measure=False)
    assert profile.about["reconstruction"].startswith(words)


@pytest.mark.parametrize("half_type", [torch.bfloat16, torch.float16])
def test_under_autocast_exact_streams_come_back_and_float_ones_do_not(half_type):
    torch.manual_seed(0)
    blocks = [AdditiveCoupling(half(WIDTH), half(WIDTH)) for _ in range(3)]
    for streams, same in (("exact", True), ("float", False)):
        chain = ReversibleChain(copy.deepcopy(blocks), streams=streams)
        with torch.autocast("cpu", half_type):
            found = reproduced(chain, X)
        assert set(found.values()) == {same}
        assert all(reproduced(chain, X).values())


@pytest.mark.parametrize("name", ["noise in f", "noise in g", "counting"])
def test_under_autocast_a_block_that_differs_is_found(name):
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        found = reproduced(chain_with(BAD[name]()), X)
    assert found == {"blocks.0": True, "blocks.1": False, "blocks.2": True}


def test_under_autocast_what_is_not_finite_never_comes_back():
    with torch.autocast("cpu", torch.bfloat16):
        found = reproduced(chain_with(AdditiveCoupling(nn.Tanh(), Inf())), X)
    assert not found["blocks.1"]
