"""Networks to plan, small enough for a test, and training steps of them on meta."""

import functools
import random

import torch
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner import profile, step_of
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.planner.network import as_network
from speechbrain_rev.planner.plan import plan_within
from speechbrain_rev.planner.profiling import count
from speechbrain_rev.planner.step import Trial
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

MIB = 2**20

#: Runs of up to three blocks; a chunk that makes several pieces of the first levels'
#: residual functions.
SMALL = {"widths": (16, 16, 32, 32), "blocks": (1, 3, 1, 1), "embedding_dim": 32}
CHUNK = 900_000

#: What may be alive at one peak and not at another: the loss, and checksums and counters
#: of a chain's monitor in steps at which it looks, the first one among them.
SCALARS = 4096


class Chained(nn.Module):
    """A chain between two ordinary layers, as in a network that somebody else wrote."""

    def __init__(self, depth=5, width=24, streams="exact"):
        super().__init__()
        self.head = nn.Linear(16, 2 * width)
        self.body = ReversibleChain(
            [AdditiveCoupling(half(width), half(width)) for _ in range(depth)],
            streams=streams,
        )
        self.tail = nn.Linear(2 * width, 8)

    def forward(self, x):
        return self.tail(torch.cat(self.body(*self.head(x).chunk(2, dim=1)), dim=1))


def half(width):
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())


def plain(depth=6, width=64):
    """Blocks of different sizes in a row."""
    return nn.Sequential(*(layers(width, width * (1 + i % 3)) for i in range(depth)))


def layers(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


#: Modules, their inputs, and the names of blocks to be given.
OTHERS = {
    "plain": lambda: (plain(), torch.randn(128, 64), ("?",)),
    "chain": lambda: (Chained(), torch.randn(1024, 16), ()),
    "chain and layers": lambda: (Chained(), torch.randn(1024, 16), ("head", "tail")),
    "float chain and layers": lambda: (
        Chained(streams="float"),
        torch.randn(1024, 16),
        ("head", "tail"),
    ),
}


def on_meta(module, *inputs):
    """A module without contents, and a training step of it."""
    module = module.to("meta")
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
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


def profile_of(network, step):
    """Bytes only, as if no block took any time."""
    return count(Trial(network, network, step), {"network": "small"})


def profile_module(module, x, *, measure=True, **given):
    """The profile of any module."""
    speed = None if measure else ASSUMED
    return profile(step_of(module, x, speed=speed, **given))


@functools.cache
def profiled_on_meta(name, streams):
    """An encoder, a step of it and its profile, made once: each test gives it modes."""
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
    pick = random.Random(seed)
    return {name: pick.choice(m).value for name, m in network.allowed_modes().items()}


def gradients(module, x, loss_seed=7):
    """Gradients of a step on fresh gradients, and buffers after it, by name."""
    module.zero_grad(set_to_none=True)
    y = module(x)
    generator = torch.Generator().manual_seed(loss_seed)
    (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum().backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters()}
    return found | {name: b.clone() for name, b in module.named_buffers()}


def trace_work(network, step):
    """What each block does in a training step."""
    return trace_bytes(network, step, with_work=True).work


def estimated_seconds(network, step, speed=ASSUMED):
    """Times by block and mode, from counts of operations."""
    work = count(Trial(network, network, step), {}, with_work=True).work
    return {key: speed.seconds(each) for key, each in work.items()}


def run_within(profile, network, step, budget_bytes):
    """The plan of a profile, run."""
    return plan_within(profile, Trial(network, network, step), budget_bytes)
