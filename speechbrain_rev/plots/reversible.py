"""A reversible block forward and backward, and what is alive during a step of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from speechbrain_rev.plots.style import (
    FAINT,
    INK,
    MODE_COLOURS,
    caption,
    check_mode,
    check_some,
    finish,
    new_figure,
    save,
)
from speechbrain_rev.sizes import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Passes = tuple[Sequence[float], Sequence[float]]

# The diagram's own coordinates: streams at two heights, functions on the way between.
_X1, _X2 = 2.0, 0.4
_LEFT, _F, _G, _RIGHT = 0.0, 1.25, 2.75, 4.0


def reversible_step(
    alive: Mapping[str, _Passes], path: str | Path, *, title: str, source: str
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

    Raises
    ------
    ValueError
        If there is no mode, one is unknown, a pass has fewer than two moments, or a number
        is negative.

    Example
    -------
    >>> import os, tempfile
    >>> alive = {"store": ([1e6, 2e6], [2e6, 0]), "reconstruct": ([1e6, 1e6], [1e6, 0])}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "reversible.png")
    ...     reversible_step(alive, path, title="T", source="S")
    """
    _check(alive)
    figure = new_figure(10.0, 4.4)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.0, 1.15])
    _draw_block(figure.add_subplot(grid[0, 0]), forward=True)
    _draw_block(figure.add_subplot(grid[1, 0]), forward=False)
    axes = figure.add_subplot(grid[:, 1])
    for mode, passes in alive.items():
        moments = [
            np.linspace(start, start + 1, len(sizes))
            for start, sizes in enumerate(passes)
        ]
        axes.plot(
            np.concatenate(moments),
            np.concatenate(passes) / MIB,
            color=MODE_COLOURS[mode],
            lw=1.4,
            label=mode,
        )
    axes.axvline(1, color=FAINT, lw=0.8, ls=":")
    axes.set_xlim(0, 2)
    axes.set_ylim(bottom=0)
    axes.set_xticks([0.5, 1.5], ["forward pass", "backward pass"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("MiB alive")
    finish(axes, grid="both")
    axes.grid(visible=False, axis="x")
    caption(figure, axes, title, source, columns=len(alive))
    save(figure, path)


def _check(alive: Mapping[str, _Passes]) -> None:
    check_some(alive, "mode")
    for mode, passes in alive.items():
        check_mode(mode, "One curve")
        for sizes in passes:
            if len(sizes) < 2:
                raise ValueError(
                    f"A pass of mode {mode!r} has {len(sizes)} moment(s); give at least 2."
                )
            if min(sizes) < 0:
                raise ValueError(
                    f"{min(sizes)} bytes are alive in mode {mode!r}; none can be below 0."
                )


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
