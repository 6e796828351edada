"""Modes that blocks can really have, by steps that try them."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.modes import Mode
from speechbrain_rev.planner import plan
from speechbrain_rev.planner.network import as_network
from speechbrain_rev.planner.tried_modes import reproduced, tried_modes
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    ReversibleChain,
)
from tests.unit.planner.networks import (
    Returning,
    assert_equal_tensors,
    chain,
    half,
    plain,
    profile_module,
)

WIDTH = 8
X = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH), torch.ones(16, WIDTH)


class Counting(nn.Module):
    """Changes with every call, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Wrong(AdditiveCoupling):
    def inverse(self, y1, y2, mask=None):
        return super().inverse(y2, y1, mask)


def noise(share=1.0):
    return Returning(lambda x: x + share * torch.randn_like(x))


def chain_with(*blocks):
    """Good blocks around some."""
    good = [AdditiveCoupling(half(WIDTH), half(WIDTH)) for _ in range(2)]
    return ReversibleChain([good[0], *blocks, good[1]])


TANH = nn.Tanh()
BAD = {
    "noise in f": lambda: AdditiveCoupling(noise(), TANH),
    "noise in g": lambda: AdditiveCoupling(TANH, noise()),
    "little noise": lambda: AdditiveCoupling(noise(0.02), TANH),
    "counting": lambda: AdditiveCoupling(Counting(), TANH),
    "wrong inverse": lambda: Wrong(TANH, nn.Linear(WIDTH, WIDTH)),
    "nan": lambda: AdditiveCoupling(TANH, Returning(lambda x: x / 0 * 0)),
    "inf": lambda: AdditiveCoupling(TANH, Returning(lambda x: x.exp() * torch.inf)),
    "dropout": lambda: AdditiveCoupling(nn.Dropout(0.5), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("half_type", [None, torch.bfloat16])
@pytest.mark.parametrize("name", BAD)
def test_a_block_that_does_not_come_back_is_noticed(name, half_type):
    torch.manual_seed(0)
    with torch.autocast("cpu", half_type, enabled=half_type is not None):
        first, *same = reproduced(chain_with(BAD[name]()), X).values()
    # Dropout does nothing in evaluation; autocast runs forward again, not the inverse.
    comes_back = name == "dropout" or (name == "wrong inverse" and half_type)
    # What follows NaN gets it, and cannot be judged.
    assert first
    assert same == [bool(comes_back), name not in ("nan", "inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_and_small_numbers_come_back_until_they_overflow(dtype):
    for scale in (1e-20, 1e-3, 1e3, 1e20):
        module = chain_with().to(dtype)
        assert all(reproduced(module, [scale * x.to(dtype) for x in X]).values())
    # The sum is infinite, and so is what is left of it.
    large = torch.full((2, 3), 0.9 * torch.finfo(dtype).max, dtype=dtype)
    only = ReversibleChain([AdditiveCoupling(nn.Identity(), nn.Tanh())])
    assert reproduced(only, (large, large)) == {"blocks.0": False}


@pytest.mark.parametrize("half_type", [torch.bfloat16, torch.float16])
def test_under_autocast_exact_streams_come_back_and_float_ones_do_not(half_type):
    torch.manual_seed(0)
    for streams in ("exact", "float"):
        module = chain(3, WIDTH, streams)
        assert all(reproduced(module, X).values())
        with torch.autocast("cpu", half_type):
            assert set(reproduced(module, X).values()) == {streams == "exact"}


def test_a_module_that_is_tried_is_left_as_it_was():
    module = chain_with(BAD["counting"](), BAD["noise in f"]())
    module.blocks[0].eval()
    state, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    training = [m.training for m in module.modules()]
    reproduced(module, X)
    assert [m.training for m in module.modules()] == training
    assert_equal_tensors(module.state_dict(), state)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks for m in module.modules())


@pytest.mark.parametrize("measure", [True, False])
def test_a_refused_block_is_named_never_reconstructed_and_trains(measure):
    torch.manual_seed(0)
    module = chain_with(BAD["little noise"]())
    words = r"Not reconstructed.*: blocks\.1\. Their"
    with pytest.warns(UserWarning, match=words) as caught:
        profile = profile_module(module, X, measure=measure)
    assert len(caught) == 1
    assert profile.about["reconstruction"] == "verified: 2 of 3 blocks"
    first, refused, last = (set(block.modes) for block in profile.blocks)
    assert refused == {"store", "selective", "recompute"}
    assert first == last == refused | {"reconstruct"}
    lightest = profile.uniform("reconstruct")
    budget = sum(map(profile.peak_bytes, (lightest, profile.uniform("store")))) // 2
    with pytest.warns(UserWarning, match=words):
        planned = plan(module, X, budget, measure=measure)
    assert planned.modes["blocks.1"] != "reconstruct"
    planned.apply(module)
    sum(y.sum() for y in module(*X)).backward()


def test_memory_that_runs_out_in_a_second_run_is_not_the_block_s_failure():
    network = as_network(plain(2), ["?"])

    def step():
        if "recompute" in network.block_modes().values():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        tried_modes(network, step)


def test_what_makes_another_input_for_the_next_block_recomputes_and_is_not_joined():
    draws = torch.Generator()

    class Adding(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh() + torch.rand(4, generator=draws)

    layers = nn.Linear(4, 4), Adding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    module, x = nn.Sequential(*layers).train(), torch.randn(3, 4)
    network = as_network(module, ["?"])
    modes = tried_modes(network, lambda: module(x).square().sum().backward())
    joining = {name for name, own in modes.items() if Mode.JOIN in own}
    assert joining == {"1", "3"}
    assert all(Mode.RECOMPUTE in own for own in modes.values())
