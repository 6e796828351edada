"""Draw the pictures that no other command draws: python -m tests.docs.figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.plots.style import FAINT, INK, MODE_COLOURS, picture
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
from speechbrain_rev.sizes import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parents[2] / "docs"

BLOCKS = 12
CHANNELS = 24
SHAPE = (2, CHANNELS, 40, 100)
MODES = ("store", "recompute", "reconstruct")

# The diagram's own coordinates: streams at two heights, functions on the way between.
_X1, _X2 = 2.0, 0.4
_LEFT, _F, _G, _RIGHT = 0.0, 1.25, 2.75, 4.0


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


def reversible_step(
    alive: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw a reversible block beside the bytes alive during a training step.

    Parameters
    ----------
    alive : mapping of str to pair of sequence of float
        For each mode the bytes alive after each operation of the forward pass, and after
        each of the backward pass. Passes are drawn equally long, as modes differ in how
        many operations they have.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network the bytes are of.
    """
    with picture(path, 10.0, 4.4, title=title, source=source, columns=3) as figure:
        grid = figure.add_gridspec(2, 2, width_ratios=[1.0, 1.15])
        _draw_block(figure.add_subplot(grid[0, 0]), forward=True)
        _draw_block(figure.add_subplot(grid[1, 0]), forward=False)
        axes = figure.add_subplot(grid[:, 1], xlim=(0, 2), ylabel="MiB alive")
        for mode, passes in alive.items():
            moments = [
                np.linspace(start, start + 1, len(sizes))
                for start, sizes in enumerate(passes)
            ]
            sizes = np.concatenate(passes) / MIB
            colour = MODE_COLOURS[mode]
            axes.plot(np.concatenate(moments), sizes, "-", color=colour, label=mode)
        axes.axvline(1, color=FAINT, lw=0.8, ls=":")
        axes.set_ylim(bottom=0)
        axes.set_xticks([0.5, 1.5], ["forward pass", "backward pass"])
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")


def _draw_block(axes: Axes, *, forward: bool) -> None:
    """Draw both streams, F and G, from left to right or back again."""
    axes.set_xlim(-0.9, 4.9)
    axes.set_ylim(-0.35, 2.75)
    axes.set_axis_off()
    for height in (_X1, _X2):
        start, end = (_LEFT, _RIGHT) if forward else (_RIGHT, _LEFT)
        _arrow(axes, (start, height), (end, height))
    # F reads the second stream and adds to the first, G the other way round.
    for place, name, reads, adds in ((_F, "F", _X2, _X1), (_G, "G", _X1, _X2)):
        _arrow(axes, (place, reads), (place, adds))
        _write(axes, place, (reads + adds) / 2, name, "round,pad=0.35")
        _write(
            axes, place, adds, "+" if forward else "\N{MINUS SIGN}", "circle,pad=0.15"
        )
    for x, letter in ((_LEFT - 0.35, "x"), (_RIGHT + 0.35, "y")):
        for height, stream in ((_X1, 1), (_X2, 2)):
            words = f"${letter}_{stream}$"
            axes.text(
                x, height, words, ha="center", va="center", color=INK, fontsize=12
            )
    words = (
        "forward: F, then G"
        if forward
        else "backward: G runs again, then F; the inputs come back"
    )
    axes.text(_LEFT - 0.5, 2.55, words, color=INK, fontsize=9, va="bottom")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def _write(axes: Axes, x: float, y: float, words: str, shape: str) -> None:
    box = {"boxstyle": shape, "facecolor": "white", "edgecolor": INK, "lw": 1.1}
    axes.text(x, y, words, ha="center", va="center", color=INK, fontsize=11, bbox=box)


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
