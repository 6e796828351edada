"""The alternative to the exact format that was not taken: floats on a coarse grid.

A float32 that is a multiple of 2**-14 and below 1024 in magnitude adds and subtracts
such numbers without rounding, so streams of them are as reversible as integers and
need no conversion. What that saves and what it costs is measured here, once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.blocks import BasicResidual
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
from speechbrain_rev.reversible.streams import FORMATS, StreamFormat

from .harness import NotEqual, Result
from .precisions import PRECISIONS, Precision

DEPTH, CHANNELS = 64, 16
#: Float streams that are reconstructed are no format of their own.
CASES = {
    "float, stored": ("float", "store"),
    "float, reconstructed": ("float", "reconstruct"),
    "exact": ("exact", "reconstruct"),
    "grid": ("grid", "reconstruct"),
}
BASELINE = "float, stored"
#: A rounding that turns a ReLU on or off changes a gradient by a jump, which is rare.
DRAWS = 3


class GridFormat(StreamFormat):
    """Streams held as float32 on multiples of 2**-14.

    Adding 768 rounds a float32 to the grid, as its last bit is 2**-14 from 512 to 1024:
    right for magnitudes up to 256, which is the limit.
    """

    name = "grid"
    limit = 256.0
    shift = 1.5 * 2.0 ** (23 - 14)

    def encode(self, x: Tensor, largest: Tensor | None) -> Tensor:
        """Round floats to the grid."""
        value = super().encode(self._rounded(x), None)
        _note(largest, 1, value)
        return value

    def add(
        self,
        value: Tensor,
        f: Tensor,
        largest: Tensor | None,
        *,
        out: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """Add a rounded residual."""
        _note(largest, 0, f)
        rounded = self._rounded(f)
        total = torch.add(value, rounded, out=rounded if out is None else out)
        _note(largest, 1, total)
        return total

    def subtract(
        self,
        value: Tensor,
        f: Tensor,
        *,
        out: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """Subtract a rounded residual: the exact inverse of ``add``."""
        return torch.sub(value, self._rounded(f), out=out)

    def _rounded(self, x: Tensor) -> Tensor:
        x = x.detach()
        if x.dtype is torch.float32:
            return (x + self.shift).sub_(self.shift)
        return x.to(torch.float32, copy=True).add_(self.shift).sub_(self.shift)


def _note(largest: Tensor | None, place: int, x: Tensor) -> None:
    # As the exact format does, which it is compared with.
    if largest is not None:
        low, high = torch.aminmax(x)
        magnitude = torch.maximum(-low.float(), high.float())
        torch.maximum(largest[place], magnitude, out=largest[place])


@contextlib.contextmanager
def grid_among_the_formats() -> Iterator[None]:
    """Let ``streams="grid"`` be a format for a while."""
    FORMATS[GridFormat.name] = GridFormat()
    try:
        yield
    finally:
        del FORMATS[GridFormat.name]


class Chain(nn.Module):
    """A deep chain of basic blocks whose residuals are scaled."""

    def __init__(self, streams: str, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        halves = [BasicResidual(CHANNELS) for _ in range(2 * DEPTH)]
        with torch.no_grad():
            for half in halves:
                half.conv2.weight.mul_(scale)
        pairs = zip(halves[::2], halves[1::2], strict=True)
        self.chain = ReversibleChain(
            (AdditiveCoupling(f, g) for f, g in pairs), streams=streams, verify=None
        )
        self.set_mode = self.chain.set_mode

    def forward(self, x: Tensor) -> Tensor:
        """Run the chain on both halves of the channels."""
        return torch.cat(self.chain(*x.chunk(2, dim=1)), dim=1)


def chain_of(scale: float) -> Any:
    """How to build the chain, and its input's shape."""
    return lambda streams: Chain(streams, scale), (4, 2 * CHANNELS, 8, 24)


def encoder_of(name: str) -> Any:
    """How to build an encoder of full depth and reduced widths, and its input's shape."""

    def build(streams: str) -> nn.Module:
        torch.manual_seed(0)
        return build_encoder(
            name, widths=(16, 32, 48, 64), n_mels=40, streams=streams, verify=None
        )

    return build, (4, 64, 40)


NETWORKS = {
    f"{DEPTH} blocks": chain_of(1.0),
    f"{DEPTH} blocks, residuals / 1000": chain_of(1e-3),
    "revnet57": encoder_of("revnet57"),
    "df_revnet89": encoder_of("df_revnet89"),
}


def steps(
    module: nn.Module, mode: str, shape: tuple[int, ...], precision: Precision
) -> list[tuple[Tensor, Tensor]]:
    """For each draw of the input: output and all gradients, the input's too, in float64."""
    module.set_mode(mode)
    found = []
    some = next(module.parameters())
    for seed in range(DRAWS):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        x = x.to(some).requires_grad_()
        with precision.autocast(x.device):
            y = module(x)
        module.zero_grad()
        (y * torch.linspace(-1, 1, y.numel()).to(some).view_as(y)).sum().backward()
        grads = [x.grad, *(p.grad for p in module.parameters())]
        line = torch.cat([g.double().flatten() for g in grads])
        found.append((y.detach().double(), line))
    return found


def distance(found: list[Tensor], truth: list[Tensor]) -> float:
    """Relative distance over all draws."""
    return float((torch.cat(found) - torch.cat(truth)).norm() / torch.cat(truth).norm())


def run(device: torch.device) -> Result:
    """Compare formats with float64; the baseline is stored float streams."""
    rows = []
    with grid_among_the_formats():
        for network, (build, shape) in NETWORKS.items():
            wide = build("float").to(device, torch.float64)
            truth = steps(wide, "store", shape, PRECISIONS["float32"])
            for name, precision in PRECISIONS.items():
                where = {"network": network, "precision": name}
                found = _compare(build, shape, device, precision, truth)
                rows += [where | row for row in found]
    return Result(
        "grid",
        "Would streams of float32 on multiples of 2**-14 serve as well as int32 in "
        "steps of 2**-16? Bits and accuracy here, time and memory in 'streams'.",
        f"relative distance from float64 without rounding over {DRAWS} draws of the "
        f"input; chains of {DEPTH} basic blocks, encoders of full depth and reduced "
        "widths, freshly initialised",
        rows,
        "outputs and gradients of grid and exact streams equal stored ones to the bit",
    )


def _compare(
    build: Any,
    shape: tuple[int, ...],
    device: torch.device,
    precision: Precision,
    truth: list[tuple[Tensor, Tensor]],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    outputs, grads = map(list, zip(*truth, strict=True))
    for case, (streams, mode) in CASES.items():
        module = build(streams).to(device)
        found = steps(module, mode, shape, precision)
        stored = steps(module, "store", shape, precision)
        equal = all(map(torch.equal, itertools.chain(*found), itertools.chain(*stored)))
        if streams != "float" and not equal:
            raise NotEqual(f"{case} streams lose bits: {module}")
        our_outputs, our_grads = map(list, zip(*found, strict=True))
        row = {
            "streams": case,
            "bits of storing": "equal" if equal else "lost",
            "output from float64": distance(our_outputs, outputs),
            "gradients from float64": distance(our_grads, grads),
            "baseline": BASELINE,
        }
        first = rows[0] if rows else row
        for what in ("output", "gradients"):
            key = f"{what} from float64"
            row[f"{what}, times the baseline"] = row[key] / first[key]
        rows.append(row)
    return rows
