"""Curves that benchmarks draw: losses, angles between gradients, time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechbrain_rev.plots.style import (
    INK,
    caption,
    finish,
    look,
    new_figure,
    save,
    stacked_axes,
    write_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TICKS = [digit * 10.0**power for power in range(-1, 6) for digit in (1, 2, 5)]
_MARK = 5.0
_Curves = Mapping[str, Sequence[tuple[float, float, str]]]


def loss_curves(
    curves: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str,
    source: str,
    quantity: str = "loss",
    mean_of: int = 1,
) -> None:
    """Draw the loss of each training run, or another quantity, over its steps.

    Parameters
    ----------
    curves : mapping of str to sequence of float
        For each run's name its loss after each step, above 0.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.
    quantity : str
        What is drawn.
    mean_of : int
        How many steps, up to its own, a point is the mean of.
    """
    points = {
        name: [
            (i, sum(losses[i - mean_of : i]) / mean_of)
            for i in range(mean_of, len(losses) + 1)
        ]
        for name, losses in curves.items()
    }
    figure = new_figure(7.2, 4.0)
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(points.items()):
        line = look(number, dashes=1)
        axes.plot(*zip(*curve, strict=True), lw=1.4, label=name, **line)
    axes.set_xlabel("training step")
    axes.set_ylabel(
        quantity if mean_of == 1 else f"{quantity}, mean of {mean_of} steps"
    )
    finish(axes, grid="both")
    caption(figure, axes, title, source, columns=2)
    save(figure, path)


def gradient_angles(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw angles over training steps; the axis is logarithmic down to an exact zero.

    Parameters
    ----------
    curves : mapping of str to sequence of (int, float)
        For each curve's name, steps and angles in degrees between the gradients of one
        batch with reconstructed and with stored activations.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.
    """
    figure = new_figure(7.2, 4.4)
    axes = figure.add_subplot()
    angles = [angle for points in curves.values() for _, angle in points]
    # Below the smallest angle the axis is linear, so that zero has a place on it.
    smallest = min([angle for angle in angles if angle > 0], default=1.0)
    least = 10.0 ** math.floor(math.log10(smallest))
    most = 10.0 ** math.ceil(math.log10(max([*angles, 10 * least])))
    axes.set_yscale("symlog", linthresh=least, linscale=0.6)
    axes.set_ylim(-0.25 * least, most)
    decades = round(math.log10(most / least))
    ticks = [least * 10.0**k for k in range(decades + 1)]
    axes.set_yticks([0.0, *ticks], ["0", *(f"{tick:g}" for tick in ticks)])
    axes.set_yticks([], minor=True)
    for number, (name, points) in enumerate(curves.items()):
        axes.plot(
            *zip(*points, strict=True),
            **look(number, dashes=0, marked=True),
            # Where curves lie on each other, as at zero, all can be seen.
            markersize=8.0 - 2.0 * (number % 3),
            markerfacecolor="none",
            lw=1.2,
            label=name,
            clip_on=False,
            zorder=3,
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("angle between gradients, degrees")
    finish(axes, grid="both")
    caption(figure, axes, title, source, columns=2)
    save(figure, path)


def time_by_batch(
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw seconds for each utterance against the batch size, a panel for each encoder.

    Parameters
    ----------
    panels : mapping of str to mapping of str to mapping of int to float
        For each panel's name its curves by name; of each, seconds by batch size. A way
        has the same colour in all panels.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    """
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    batches = sorted(
        {b for c in panels.values() for curve in c.values() for b in curve}
    )
    figure = new_figure(7.2, 1.6 + 2.8 * len(panels))
    grid = stacked_axes(figure, len(panels))
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        for number, name in enumerate(names):
            # An empty curve has a place in the legend.
            points = sorted(curves.get(name, {}).items())
            sizes, seconds = [x for x, _ in points], [y for _, y in points]
            line = look(number, marked=True)
            axes.plot(sizes, seconds, markersize=_MARK, lw=1.2, label=name, **line)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds per utterance")
        axes.set_title(panel, loc="right", fontsize=9)
        finish(axes, grid="both")
    grid[-1].set_xticks(batches, [str(batch) for batch in batches])
    grid[-1].set_xticks([], minor=True)
    grid[-1].set_xlabel("batch size")
    caption(figure, grid[0], title, source, columns=3)
    save(figure, path)


def time_against_memory(
    panels: Mapping[str, _Curves],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw curves of times and memory, a panel for each encoder.

    Parameters
    ----------
    panels : mapping of str to mapping of str to sequence of (float, float, str)
        For each panel's name its curves by name; of each, MiB per utterance, times the
        baseline's duration, and what distinguishes the point, which may be empty; what
        several curves of a panel have in common is written at the last of them.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    """
    figure = new_figure(7.2, 1.4 + 2.8 * len(panels))
    grid = stacked_axes(figure, len(panels))
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        for number, (name, points) in enumerate(curves.items()):
            memory, times, _ = zip(*points, strict=True)
            line = look(number, dashes=0, marked=True)
            axes.plot(memory, times, markersize=_MARK, lw=1.2, label=name, **line)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"times storing, {panel}")
        finish(axes, grid="both")
    sizes = [m for c in panels.values() for points in c.values() for m, *_ in points]
    ticks = [t for t in _TICKS if min(sizes) <= t <= max(sizes)]
    grid[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    grid[-1].set_xticks([], minor=True)
    grid[-1].set_xlabel("MiB per utterance")
    caption(figure, grid[0], title, source, columns=3)
    for axes, curves in zip(grid, panels.values(), strict=True):
        _write_words(figure, axes, curves)
    save(figure, path)


def _write_words(figure: Figure, axes: Axes, curves: _Curves) -> None:
    """Write each word once, at the last curve that has it: others have the same points."""
    points = [point for curve in curves.values() for point in curve]
    places = {word: (x, y) for x, y, word in points if word}
    write_names(
        figure,
        axes,
        places,
        dict.fromkeys(places, INK),
        marks=[(x, y) for x, y, _ in points],
        mark_size=_MARK,
        font_size=7,
    )
