"""Draw the pictures that no other command draws: python -m tests.docs.figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.plots import reversible_step
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

DOCS = Path(__file__).resolve().parents[2] / "docs"

BLOCKS = 12
CHANNELS = 24
SHAPE = (2, CHANNELS, 40, 100)
MODES = ("store", "recompute", "reconstruct")


class Recorded(LiveBytes):
    """Note what is alive after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        self.noted.append(self.live)
        return outputs


def alive(mode: str, blocks: int = BLOCKS) -> tuple[list[int], list[int]]:
    """Count bytes beyond input, weights and gradients, in the forward and backward pass."""
    torch.manual_seed(0)
    chain = ReversibleChain(
        (AdditiveCoupling(_residual(), _residual()) for _ in range(blocks)), mode=mode
    )
    for p in chain.parameters():
        p.grad = torch.zeros_like(p)
    x1, x2 = torch.randn(SHAPE), torch.randn(SHAPE)
    with Recorded() as meter:
        loss = torch.stack([y.square().mean() for y in chain(x1, x2)]).sum()
        forward = len(meter.noted)
        loss.backward()
    return meter.noted[:forward], meter.noted[forward - 1 :]


def _residual() -> nn.Sequential:
    c = CHANNELS
    return nn.Sequential(
        nn.Conv2d(c, c, 3, padding=1, bias=False),
        nn.BatchNorm2d(c),
        nn.ReLU(),
        nn.Conv2d(c, c, 3, padding=1, bias=False),
    )


def draw(path: Path) -> None:
    """Draw the block, and what each mode keeps alive."""
    batch, _, frequencies, frames = SHAPE
    reversible_step(
        {mode: alive(mode) for mode in MODES},
        path,
        title=f"A reversible block, and bytes alive in a training step of {BLOCKS} of them",
        source=f"Float32, exact streams, batch {batch}, {2 * CHANNELS} channels, "
        f"{frequencies} x {frames} values each; beyond input, weights and gradients. "
        f"Counted on a CPU, torch {torch.__version__}.",
    )


if __name__ == "__main__":
    draw(DOCS / "reversible.png")
