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

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.blocks import RESIDUALS

from .harness import NotEqual
from .peers import STORE, Plain, PlainEncoder, Way, encoder_by, our_way, plain
from .precisions import Precision

#: float64 rounding through a chain of 32 blocks.
TOLERANCE = 1e-9
#: Streams in steps of 2**-16 turn some ReLUs: 0.6 % were measured at 32 blocks, where
#: each mistake found below is one of 40 % and more.
ROUNDED = 2e-2
#: Under autocast: times as far from float32 as stored activations.
FACTOR = 2
FLOAT = Precision()
FEW_BLOCKS = 4


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

    kind: str
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

    def small_input(self) -> Tensor:
        """Make an input of few values."""
        return _noise(4, 2 * self.channels, 8, 10)

    def _functions(self, *, of_torch: bool) -> list[nn.Module]:
        torch.manual_seed(0)
        kind = RESIDUALS[self.kind]
        functions = [kind(self.channels) for _ in range(2 * self.depth)]
        return [plain(f) for f in functions] if of_torch else functions


@dataclass(frozen=True)
class Encoder:
    """A small encoder of a name, always with the same weights."""

    name: str

    def by(self, way: Way, scenario: Scenario = PLAIN) -> Network:
        """Build the encoder in a way."""
        torch.manual_seed(0)
        module = encoder_by(way, self.name, **self._row())
        return Network(module, [module] if way.ours else module.parts)

    def reference(self, network: Network, scenario: Scenario = PLAIN) -> Network:
        """Build it in plain autograd."""
        torch.manual_seed(0)
        encoder = build_encoder(self.name, **self._row())
        module = PlainEncoder(encoder, Plain, checkpoints=False)
        return Network(module, module.parts)

    def small_input(self) -> Tensor:
        """Make an input of few values."""
        return _noise(4, 40, 80)

    def _row(self) -> dict[str, tuple[int, ...]]:
        return {"widths": (32, 32, 32, 48), "blocks": (1, 2, 2, 1)}


class Step(NamedTuple):
    """What a training step leaves behind: the input's gradient is the last one."""

    gradients: list[Tensor | None]
    statistics: list[Tensor | None]
    counts: list[int]


def step(network: Network, x: Tensor, precision: Precision, scenario: Scenario) -> Step:
    """Take a step whose loss has no preferred direction."""
    x = x.clone().requires_grad_(scenario.input_needs_grad)
    # What follows trains, so that a graph which ends at the output goes unnoticed.
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.ones((), dtype=wide, device=x.device, requires_grad=True)
    with precision.autocast(x.device):
        # A peer empties what it is given, which a stem has made.
        outputs = network.module(x * 1)
    halve = torch.Tensor.mul_ if scenario.writes else torch.Tensor.mul
    outputs = [halve(y, 0.5) for y in tensors(outputs)]
    batch, channels, *others = outputs[0].shape
    weights = _noise(batch, len(outputs) * channels, *others).to(scale)
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


def distance(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    """Return the relative distance; a gradient that is missing counts as zero."""
    difference = total = 0.0
    for a, b in zip(got, want, strict=True):
        if b is None:
            continue
        wanted = b.double()
        found = torch.zeros_like(wanted) if a is None else a.double()
        difference += float((found - wanted).square().sum())
        total += float(wanted.square().sum())
    return (difference / total) ** 0.5


def steps(
    subject: Chain | Encoder,
    way: Way,
    precision: Precision,
    scenario: Scenario,
    device: torch.device,
) -> tuple[Step, Step]:
    """Take a step in a way, and the same in plain autograd without autocast."""
    dtype = torch.float64 if precision == FLOAT else torch.float32
    x = subject.small_input().to(device, dtype)
    half = (precision.half if scenario.half else None) or dtype
    x = x.to(half)
    network = subject.by(way, scenario)
    network.module.to(device, dtype)
    got = step(network, x, precision, scenario)
    x = x.to(dtype)
    reference = subject.reference(network, scenario)
    reference.module.to(device, dtype)
    return got, step(reference, x, FLOAT, replace(scenario, writes=False))


@functools.cache
def stored_distances(
    subject: Chain | Encoder,
    precision: Precision,
    scenario: Scenario,
    device: torch.device,
) -> tuple[float, float]:
    """Return how far stored activations are, in gradients and in running statistics."""
    got, want = steps(subject, STORE, precision, scenario, device)
    return (
        distance(got.gradients, want.gradients),
        distance(got.statistics, want.statistics),
    )


def mistakes(
    subject: Chain | Encoder,
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
    rounding = ROUNDED if way.exact else TOLERANCE
    limits, compared = (rounding, rounding), ""
    if precision != FLOAT:
        stored = stored_distances(subject, precision, scenario, device)
        limits = FACTOR * stored[0], FACTOR * stored[1]
        compared = f", stored {_percent(stored[0])}"
    found = []
    off = distance(got.gradients, want.gradients)
    if not off <= limits[0]:
        found.append(f"{scenario.name}gradients {_percent(off)} off{compared}")
    if scenario == PLAIN:
        off = distance(got.statistics, want.statistics)
        if got.counts != want.counts:
            found.append(f"statistics updated {max(got.counts)} times")
        elif not off <= limits[1]:
            found.append(f"statistics {_percent(off)} off")
    return found


def differing_bits(
    subject: Chain | Encoder, way: Way, precision: Precision, device: torch.device
) -> list[str]:
    """Say whether exact streams have other bits than stored ones."""
    stored = our_way("stored", **{**(way.settings or {}), "mode": "store"})
    found = []
    for each in (way, stored):
        network = subject.by(each)
        network.module.to(device)
        x = subject.small_input().to(device)
        found.append(step(network, x, precision, PLAIN))
    for what in ("gradients", "statistics"):
        pairs = zip(getattr(found[0], what), getattr(found[1], what), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return [f"{what} have other bits than stored ones"]
    return []


def wrongs(
    subjects: Sequence[tuple[Chain | Encoder, Scenario]],
    way: Way,
    precision: Precision,
    device: torch.device,
) -> list[str]:
    """List what a way gets wrong; where it is ours, that is the end.

    Raises
    ------
    NotEqual
        If a way of ours gets anything wrong.
    NotInstalled
        If the way needs a package that is not there.
    """
    found: list[str] = []
    for subject, scenario in subjects:
        found += mistakes(subject, way, precision, device, scenario)
        if way.exact and scenario == PLAIN:
            found += differing_bits(subject, way, precision, device)
    if found and way.ours:
        raise NotEqual(f"{way.name} in {precision}, {subjects}: {'; '.join(found)}")
    return found


def _pairs(functions: list[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    return list(zip(functions[::2], functions[1::2], strict=True))


def _noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator)


def tensors(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """List a network's outputs: one, or one for each stream."""
    return [outputs] if isinstance(outputs, Tensor) else outputs


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
