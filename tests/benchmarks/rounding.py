"""What the rounding of exact streams does to outputs and gradients of one step.

Both are compared with those of float64, beside float streams, stored and reconstructed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.blocks import BasicResidual
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

from .harness import Result, distance, require
from .steps import PRECISIONS

DEPTH, CHANNELS = 64, 16
BASELINE = "float, stored"
CASES = {
    BASELINE: ("float", "store"),
    "float, reconstructed": ("float", "reconstruct"),
    "exact": ("exact", "reconstruct"),
}
#: A rounding that turns a ReLU on or off changes a gradient by a jump, which is rare.
DRAWS = 3
#: Of a step.
WHAT = ("output", "gradients")


class Chain(nn.Module):
    """A deep chain of basic blocks whose residuals are scaled."""

    def __init__(self, scale: float, *, streams: str) -> None:
        super().__init__()
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


_encoder = functools.partial(
    build_encoder, widths=(16, 32, 48, 64), n_mels=40, verify=None
)
#: What builds a network, what it is given beside the format, and its input's shape.
NETWORKS: dict[str, tuple[Callable[..., nn.Module], Any, tuple[int, ...]]] = {
    f"{DEPTH} blocks": (Chain, 1.0, (4, 2 * CHANNELS, 8, 24)),
    f"{DEPTH} blocks, residuals / 1000": (Chain, 1e-3, (4, 2 * CHANNELS, 8, 24)),
    "revnet57": (_encoder, "revnet57", (4, 64, 40)),
    "df_revnet89": (_encoder, "df_revnet89", (4, 64, 40)),
}


def steps(
    module: nn.Module, mode: str, shape: tuple[int, ...], precision: str
) -> dict[str, list[Tensor]]:
    """Give outputs of each draw of the input, and all gradients, the input's too."""
    module.set_mode(mode)
    left: dict[str, list[Tensor]] = {what: [] for what in WHAT}
    some = next(module.parameters())
    for seed in range(DRAWS):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        x = x.to(some).requires_grad_()
        with PRECISIONS[precision].autocast(x.device):
            y = module(x)
        module.zero_grad()
        (y * torch.linspace(-1, 1, y.numel()).to(some).view_as(y)).sum().backward()
        left["output"].append(y.detach())
        left["gradients"] += [x.grad, *(p.grad for p in module.parameters())]
    return left


def rows_of(network: str, device: torch.device) -> list[dict[str, Any]]:
    """Compare all formats of a network with float64."""
    build, given, shape = NETWORKS[network]

    def built(streams: str) -> nn.Module:
        torch.manual_seed(0)
        return build(given, streams=streams).to(device)

    truth = steps(built("float").double(), "store", shape, "float32")
    rows: list[dict[str, Any]] = []
    for precision, case in itertools.product(PRECISIONS, CASES):
        streams, mode = CASES[case]
        module = built(streams)
        left = steps(module, mode, shape, precision)
        stored = steps(module, "store", shape, precision)
        equal = all(all(map(torch.equal, left[what], stored[what])) for what in WHAT)
        require(equal or streams == "float", f"{case} streams lose bits: {module}")
        off = {what: distance(left[what], truth[what]) for what in WHAT}
        if case == BASELINE:
            first = off
        rows.append(
            {
                "network": network,
                "precision": precision,
                "streams": case,
                "bits of storing": "equal" if equal else "lost",
                **{f"{what} from float64": off[what] for what in WHAT},
                "baseline": BASELINE,
                **{f"{w}, times the baseline": off[w] / first[w] for w in WHAT},
            }
        )
    return rows


def run(device: torch.device) -> Result:
    """Compare formats with float64; the baseline is stored float streams."""
    return Result(
        "rounding",
        "What does the rounding of exact streams do to outputs and gradients?",
        f"relative distance from float64 without rounding over {DRAWS} draws of the "
        f"input; chains of {DEPTH} basic blocks, encoders of full depth and reduced "
        "widths, freshly initialised",
        [row for network in NETWORKS for row in rows_of(network, device)],
        "outputs and gradients of exact streams equal stored ones to the bit",
    )
