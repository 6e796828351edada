"""Networks to plan, small enough for a test, and training steps of them on meta."""

import copy
import functools
import random

import torch
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.devices import ASSUMED
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner import profile, step_of
from speechbrain_rev.planner.memory import LiveBytes, make_gradients
from speechbrain_rev.planner.network import Restricted, as_network
from speechbrain_rev.planner.plan import plan_within
from speechbrain_rev.planner.profiling import count
from speechbrain_rev.planner.step import Trial
from speechbrain_rev.planner.tried_modes import tried_modes
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

MIB = 2**20

#: Runs of up to three blocks; a chunk that makes several pieces of the first levels'
#: residual functions.
SMALL = {"widths": (16, 16, 32, 32), "blocks": (1, 3, 1, 1), "embedding_dim": 32}
CHUNK = 900_000

#: What may be alive at one peak and not at another: the loss, and checksums and counters
#: of a chain's monitor in steps at which it looks, the first one among them.
SCALARS = 4096


def half(width):
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())


def chain(depth, width, streams="exact"):
    couplings = [AdditiveCoupling(half(width), half(width)) for _ in range(depth)]
    return ReversibleChain(couplings, streams=streams)


class Chained(nn.Module):
    """A chain between two ordinary layers, as in a network that somebody else wrote."""

    def __init__(self, depth=5, width=24, streams="exact"):
        super().__init__()
        self.head = nn.Linear(16, 2 * width)
        self.body = chain(depth, width, streams)
        self.tail = nn.Linear(2 * width, 8)

    def forward(self, x):
        return self.tail(torch.cat(self.body(*self.head(x).chunk(2, dim=1)), dim=1))


def layers(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def plain(depth=6, width=64):
    """Blocks of different sizes in a row."""
    return nn.Sequential(*(layers(width, width * (1 + i % 3)) for i in range(depth)))


class Staged(nn.Module):
    """Stages of blocks; the input of a stage has a name until the stage has run."""

    def __init__(self, *first):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(
                *(nn.Sequential(*first, *layers(16, 32)) for _ in range(depth))
            )
            for depth in (3, 4, 2)
        )

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Dense(nn.Module):
    """Gives each block all earlier outputs, side by side or added up; returns the last ones."""

    def __init__(self, gathered, widths, returned):
        super().__init__()
        self.gathered, self.returned = gathered, returned
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU()
            )
            for width in widths
        )

    def forward(self, x):
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(self.gathered(outputs)))
        return self.gathered(outputs[-self.returned :]).mean(2)


def side_by_side(depth, returned):
    widths = range(4, 4 + 8 * depth, 8)
    return Dense(functools.partial(torch.cat, dim=1), widths, returned)


class Scaled(nn.Sequential):
    """Takes two arguments, by place or by name."""

    def forward(self, feats, scale):
        return super().forward(feats * scale)


def convolutions(channels, count):
    """Layers whose inputs can be compressed."""

    def convolved():
        convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(channels), nn.ReLU()

    return nn.Sequential(*(layer for _ in range(count) for layer in convolved()))


#: Modules, their inputs, and the names of blocks to be given.
OTHERS = {
    "plain": lambda: (plain(), torch.randn(128, 64), ("?",)),
    "chain": lambda: (Chained(), torch.randn(1024, 16), ()),
    "chain and layers": lambda: (Chained(), torch.randn(1024, 16), AROUND),
    "float chain and layers": lambda: (
        Chained(streams="float"),
        torch.randn(1024, 16),
        AROUND,
    ),
    "dense": lambda: (side_by_side(8, 1), torch.randn(8, 4, 128), ("blocks.*",)),
    "summed": lambda: (Dense(sum, [8] * 5, 6), torch.randn(8, 8, 128), ("blocks.*",)),
}
AROUND = "head", "tail"


def on_meta(module, *inputs):
    """A copy of a module without contents, and a training step of it."""
    module = copy.deepcopy(module).to("meta")
    make_gradients(module)
    inputs = [x.to("meta") for x in inputs]
    return module, lambda: module(*inputs).square().sum().backward()


def encoder(name, **settings):
    chunk = CHUNK if ARCHITECTURES[name].reversible else None
    return build_encoder(name, **(SMALL | {"chunk": chunk} | settings))


def encoder_on_meta(name, batch=4, frames=48, **settings):
    with torch.device("meta"):
        module = encoder(name, **settings)
    return on_meta(module, torch.randn(batch, frames, 80))


def other_on_meta(name):
    module, x, blocks = OTHERS[name]()
    module, step = on_meta(module, x)
    return as_network(module, blocks), step


def profile_of(network, step, **given):
    """Bytes only, as if no block took any time."""
    return count(Trial(network, network, step), {"network": "small"}, **given)


def profile_module(module, x, *, measure=True, **given):
    """The profile of any module."""
    return profile(step_of(module, x, speed=None if measure else ASSUMED, **given))


#: Blocks that may join each other: all equal, in stages, and such as drop their input
#: where they store, for their first layer saves what it returns.
WITH_RUNS = {
    "equal": lambda: (equal(9), torch.randn(512, 64), "?"),
    "stages": lambda: (Staged(), torch.randn(2048, 16), "stages.*.?"),
    "dropped input": lambda: (Staged(nn.Tanh()), torch.randn(2048, 16), "stages.*.?"),
}


def equal(depth, width=64):
    return nn.Sequential(*(layers(width, 2 * width) for _ in range(depth)))


def with_runs_on_meta(name):
    """A network of ``WITH_RUNS``, with steps and profile, on meta."""
    module, x, blocks = WITH_RUNS[name]()
    module, step = on_meta(module, x)
    network = as_network(module, blocks)
    network = Restricted(network, tried_modes(network, step))
    return network, step, profile_of(network, step)


@functools.cache
def profiled_on_meta(name, streams="exact"):
    """A network, a step of it and its profile, made once: each test gives it modes."""
    if name in OTHERS:
        network, step = other_on_meta(name)
    else:
        network, step = encoder_on_meta(name, streams=streams)
    return network, step, profile_of(network, step)


def peak_of(step):
    """What a step allocates at its peak, with nobody watching.

    No garbage is collected before, which would take most of the time of a small step.
    """
    with LiveBytes() as meter:
        step()
    return meter.peak


def random_modes(network, seed):
    """One mode for each block, in the order of execution."""
    pick, before, modes = random.Random(seed), None, {}
    for name, allowed in network.allowed_modes().items():
        before = pick.choice([mode for mode in allowed if mode.can_follow(before)])
        modes[name] = before.value
    return modes


def gradients(module, x, loss_seed=7):
    """Gradients of a step on fresh gradients, and buffers after it, by name."""
    module.zero_grad(set_to_none=True)
    y = module(x)
    generator = torch.Generator().manual_seed(loss_seed)
    (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum().backward()
    of_weights = {name: p.grad.clone() for name, p in module.named_parameters()}
    return of_weights | {name: b.clone() for name, b in module.named_buffers()}


def assert_equal_tensors(first, second):
    """Hold that two dicts have the same tensors to the bit."""
    assert first.keys() == second.keys()
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def run_within(profile, network, step, budget_bytes):
    """The plan of a profile, run."""
    return plan_within(profile, Trial(network, network, step), budget_bytes)


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)
