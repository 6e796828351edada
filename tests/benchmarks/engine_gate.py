"""What a way of training may get wrong, and whether it does.

A step of the way is compared with plain autograd: in float64, where rounding leaves
nothing to argue about, or under autocast with a step in float32, from which it may be
twice as far as stored activations are. Exact streams are rounded, too: whatever keeps
them must have the bits of stored ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.architectures import architecture
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.blocks import RESIDUALS

from .harness import distance, require
from .peers import (
    STORE,
    NotInstalled,
    Plain,
    RebuiltEncoder,
    Way,
    our_way,
    plain,
    rebuilt,
)
from .steps import TOLERANCE, Precision

#: Streams in steps of 2**-16 turn some ReLUs: 0.6 % were measured at 32 blocks, where
#: each mistake below is one of 40 % and more.
ROUNDED = 2e-2
#: Under autocast: times as far from float32 as stored activations.
FACTOR = 2
FLOAT = Precision()
FEW_BLOCKS = 4
NOT_INSTALLED = "not installed"


class Network(NamedTuple):
    """A network, and what has parameters in it, in the order of the encoder."""

    module: nn.Module
    parts: Sequence[nn.Module]


@dataclass(frozen=True)
class Scenario:
    """What a user may do in a step, and how a failure is called."""

    name: str = ""
    dropout: bool = False
    input_needs_grad: bool = True
    writes: bool = False
    half: bool = False


PLAIN = Scenario()
SCENARIOS = (
    Scenario("dropout: ", dropout=True),
    Scenario("input without gradient: ", input_needs_grad=False),
    Scenario("output written to: ", writes=True),
    Scenario("input in half: ", half=True),
)


class Dropout(nn.Module):
    """Dropout of half of the values, by the first mask of another one if given."""

    def __init__(self, given: Dropout | None = None) -> None:
        super().__init__()
        self.given = given and given.first
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drop values, as torch draws them."""
        mask = F.dropout(torch.ones_like(x)) if self.given is None else self.given
        if self.first is None:
            self.first = mask
        return x * mask.to(x.dtype)


@dataclass(frozen=True)
class Chain:
    """A chain of blocks of one kind, always with the same weights."""

    name: str
    depth: int
    channels: int = 16

    def by(self, way: Way, scenario: Scenario = PLAIN) -> Network:
        """Build the chain in a way."""
        functions = self._functions(of_torch=not way.ours)
        if scenario.dropout:
            functions = [nn.Sequential(f, Dropout()) for f in functions]
        return Network(way.build(_pairs(functions)), functions)

    def reference(self, network: Network, scenario: Scenario = PLAIN) -> Network:
        """Build it in plain autograd, with the dropout that a network has drawn."""
        functions = self._functions(of_torch=True)
        if scenario.dropout:
            functions = [
                nn.Sequential(f, Dropout(part[1]))
                for f, part in zip(functions, network.parts, strict=True)
            ]
        return Network(Plain(_pairs(functions)), functions)

    def input(self, batch: int, frames: int, freqs: int = 80) -> Tensor:
        """Make an input that needs a gradient."""
        shape = batch, 2 * self.channels, freqs, frames
        return torch.randn(shape, requires_grad=True)

    def small_input(self) -> Tensor:
        """Make an input of few values."""
        return self.input(4, 10, freqs=8)

    def _functions(self, *, of_torch: bool) -> list[nn.Module]:
        torch.manual_seed(0)
        kind = RESIDUALS[self.name]
        functions = [kind(self.channels) for _ in range(2 * self.depth)]
        return [plain(f) for f in functions] if of_torch else functions


@dataclass(frozen=True)
class Encoder:
    """An encoder, always with the same weights; small, unless it is to be measured."""

    name: str
    small: bool = True

    @property
    def depth(self) -> int:
        """How many blocks its stages have."""
        return sum(architecture(self.name).blocks)

    def by(self, way: Way, scenario: Scenario = PLAIN) -> Network:
        """Build the encoder in a way."""
        torch.manual_seed(0)
        module = rebuilt(way, self.name, **self._row())
        return Network(module, [module] if way.ours else module.parts)

    def reference(self, network: Network, scenario: Scenario = PLAIN) -> Network:
        """Build it in plain autograd."""
        torch.manual_seed(0)
        encoder = build_encoder(self.name, **self._row())
        module = RebuiltEncoder(encoder, Plain, checkpoints=False)
        return Network(module, module.parts)

    def input(self, batch: int, frames: int) -> Tensor:
        """Make features."""
        return torch.randn(batch, frames, 80)

    def small_input(self) -> Tensor:
        """Make an input of few values."""
        return self.input(4, 40)

    def _row(self) -> dict[str, tuple[int, ...]]:
        small = {"widths": (32, 32, 32, 48), "blocks": (1, 2, 2, 1)}
        return small if self.small else {}


Subject = Chain | Encoder


class Step(NamedTuple):
    """What a training step leaves behind: the input's gradient is the last one."""

    gradients: list[Tensor | None]
    statistics: list[Tensor]
    counts: list[int]


def step(network: Network, x: Tensor, precision: Precision, scenario: Scenario) -> Step:
    """Take a step whose loss has no preferred direction."""
    x = x.detach().clone().requires_grad_(scenario.input_needs_grad)
    # What follows trains, so that a graph which ends at the output goes unnoticed.
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.ones((), dtype=wide, device=x.device, requires_grad=True)
    with precision.autocast(x.device):
        # A peer empties what it is given, which a stem has made.
        outputs = network.module(x * 1)
    halve = torch.Tensor.mul_ if scenario.writes else torch.Tensor.mul
    outputs = [halve(y, 0.5) for y in tensors(outputs)]
    batch, channels, *others = outputs[0].shape
    draw = torch.Generator().manual_seed(1)
    shape = batch, len(outputs) * channels, *others
    weights = torch.randn(shape, generator=draw).to(scale)
    loss = sum(
        (y.to(scale.dtype) * w).sum()
        for y, w in zip(outputs, weights.chunk(len(outputs), dim=1), strict=True)
    )
    (loss * scale).backward()
    buffers = [b for part in network.parts for b in part.buffers()]
    return Step(
        [*(p.grad for part in network.parts for p in part.parameters()), x.grad],
        [b for b in buffers if b.is_floating_point()],
        [int(b) for b in buffers if not b.is_floating_point()],
    )


def off_by(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    """Return the relative distance; a gradient that is missing counts as zero."""
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if b is not None]
    ours = [torch.zeros_like(b) if a is None else a for a, b in pairs]
    return distance(ours, [b for _, b in pairs])


def steps(
    subject: Subject,
    way: Way,
    precision: Precision,
    scenario: Scenario,
    device: torch.device,
) -> tuple[Step, Step]:
    """Take a step in a way, and the same in plain autograd without autocast."""
    dtype = torch.float64 if precision == FLOAT else torch.float32
    torch.manual_seed(1)
    x = subject.small_input().to(device, dtype)
    x = x.to((precision.half if scenario.half else None) or dtype)
    network = subject.by(way, scenario)
    network.module.to(device, dtype)
    got = step(network, x, precision, scenario)
    reference = subject.reference(network, scenario)
    reference.module.to(device, dtype)
    return got, step(reference, x.to(dtype), FLOAT, replace(scenario, writes=False))


@functools.cache
def stored_distances(
    subject: Subject, precision: Precision, scenario: Scenario, device: torch.device
) -> tuple[float, float]:
    """Return how far stored activations are, in gradients and in running statistics."""
    got, want = steps(subject, STORE, precision, scenario, device)
    return (
        off_by(got.gradients, want.gradients),
        distance(got.statistics, want.statistics),
    )


def mistakes(
    subject: Subject,
    way: Way,
    precision: Precision,
    device: torch.device,
    scenario: Scenario = PLAIN,
) -> list[str]:
    """Say in few words what a way gets wrong in one scenario.

    Raises
    ------
    NotInstalled
        If the way needs a package that is not there.
    """
    try:
        got, want = steps(subject, way, precision, scenario, device)
    except (RuntimeError, AssertionError, TypeError, AttributeError) as error:
        if way.ours:
            raise
        return [f"{scenario.name}raises {type(error).__name__}"]
    if all(g is None for g in got.gradients[:-1]):
        return [f"{scenario.name}nothing trains"]
    limits, compared = [ROUNDED if way.exact else TOLERANCE] * 2, ""
    if precision != FLOAT:
        stored = stored_distances(subject, precision, scenario, device)
        limits = [FACTOR * off for off in stored]
        compared = f", stored {100 * stored[0]:.3g} %"
    wrong = []
    off = off_by(got.gradients, want.gradients)
    if not off <= limits[0]:
        wrong.append(f"{scenario.name}gradients {100 * off:.3g} % off{compared}")
    if scenario == PLAIN:
        off = distance(got.statistics, want.statistics)
        if got.counts != want.counts:
            wrong.append(f"statistics updated {max(got.counts)} times")
        elif not off <= limits[1]:
            wrong.append(f"statistics {100 * off:.3g} % off")
    return wrong


def differing_bits(
    subject: Subject, way: Way, precision: Precision, device: torch.device
) -> list[str]:
    """Say whether exact streams have other bits than stored ones."""
    stored = our_way("stored", **{**(way.settings or {}), "mode": "store"})
    left = []
    for each in (way, stored):
        network = subject.by(each)
        network.module.to(device)
        torch.manual_seed(1)
        x = subject.small_input().to(device)
        left.append(step(network, x, precision, PLAIN))
    for what in ("gradients", "statistics"):
        if not all(map(torch.equal, *(getattr(each, what) for each in left))):
            return [f"{what} have other bits than stored ones"]
    return []


def wrongs(
    subjects: Sequence[tuple[Subject, Scenario]],
    way: Way,
    precision: Precision,
    device: torch.device,
) -> list[str]:
    """List what a way gets wrong, or say that it cannot be judged here.

    Raises
    ------
    NotEqual
        If a way of ours gets anything wrong.
    """
    wrong: list[str] = []
    try:
        for subject, scenario in subjects:
            wrong += mistakes(subject, way, precision, device, scenario)
            if way.exact and scenario == PLAIN:
                wrong += differing_bits(subject, way, precision, device)
    except NotInstalled as error:
        return [f"{NOT_INSTALLED}: {error}"]
    require(
        not (wrong and way.ours),
        f"{way.name} in {precision}, {subjects}: {'; '.join(wrong)}",
    )
    return wrong


def _pairs(functions: list[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    return list(zip(functions[::2], functions[1::2], strict=True))


def tensors(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """List a network's outputs: one, or one for each stream."""
    return [outputs] if isinstance(outputs, Tensor) else outputs
