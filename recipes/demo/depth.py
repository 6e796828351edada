"""The picture of a step in each memory mode, and of its memory against depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from speechbrain_rev.plots.style import (
    MODE_COLOURS,
    finish,
    log_ticks,
    new_figure,
    note,
    save,
    title_and_source,
)
from speechbrain_rev.sizes import MIB

_MARK = 5.0


def memory_by_depth(
    steps: Mapping[str, tuple[float, float]],
    depths: Mapping[str, Mapping[int, float]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw the peak and the time of a step in each mode, and its memory against depth.

    Parameters
    ----------
    steps : mapping of str to (float, float)
        For each mode, as "store" and "reconstruct", bytes at the peak of a step and the
        seconds that it takes. Bars stand in this order.
    depths : mapping of str to mapping of int to float
        For each mode bytes per utterance, by the number of layers.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    """
    figure = new_figure(7.2, 5.4)
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 2))
    peaks = [size / MIB for size, _ in steps.values()]
    seconds = [time for _, time in steps.values()]
    panels = ((peaks, "peak of a step, MiB"), (seconds, "seconds of a step"))
    for column, (values, words) in enumerate(panels):
        axes = figure.add_subplot(grid[0, column])
        axes.barh(
            list(steps), values, 0.8, color=[MODE_COLOURS[mode] for mode in steps]
        )
        for place, value in enumerate(values):
            size = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            note(axes, size, (value, place), (4, 0))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(values))
        axes.set_xlabel(words)
        finish(axes, grid="x")
        axes.tick_params(axis="y", length=0, labelleft=column == 0)
    axes = figure.add_subplot(grid[1, :])
    for mode, curve in depths.items():
        layers = sorted(curve)
        sizes = [curve[each] / MIB for each in layers]
        axes.plot(
            layers, sizes, "o-", color=MODE_COLOURS[mode], markersize=_MARK, lw=1.2
        )
        note(axes, mode, (layers[-1], sizes[-1]), (6, 0))
    axes.set_yscale("log")
    log_ticks(axes)
    axes.set_xticks(sorted({each for curve in depths.values() for each in curve}))
    axes.set_xlim(0, 1.2 * max(each for curve in depths.values() for each in curve))
    axes.set_xlabel("layers")
    axes.set_ylabel("MiB per utterance")
    finish(axes, grid="both")
    title_and_source(figure, title, source)
    save(figure, path)
