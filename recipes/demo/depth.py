"""The picture of a step in each memory mode, and of its memory against depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from speechbrain_rev.plots.style import MODE_COLOURS, log_ticks, picture
from speechbrain_rev.sizes import MIB


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
    peaks = [size / MIB for size, _ in steps.values()]
    seconds = [time for _, time in steps.values()]
    colours = [MODE_COLOURS[mode] for mode in steps]
    with picture(path, 7.2, 5.4, title=title, source=source, columns=3) as figure:
        grid = figure.add_gridspec(2, 2, height_ratios=(1, 2))
        for column, values, words in (
            (0, peaks, "peak of a step, MiB"),
            (1, seconds, "seconds of a step"),
        ):
            axes = figure.add_subplot(grid[0, column], xlabel=words)
            bars = axes.barh(list(steps), values, 0.8, color=colours)
            digits = [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values]
            axes.bar_label(bars, digits, padding=4)
            axes.invert_yaxis()
            axes.set_xlim(0, 1.2 * max(values))
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0, labelleft=column == 0)
        axes = figure.add_subplot(grid[1, :], xlabel="layers", yscale="log")
        for mode, curve in depths.items():
            layers = sorted(curve)
            sizes = [curve[each] / MIB for each in layers]
            axes.plot(layers, sizes, "o-", color=MODE_COLOURS[mode], label=mode)
        axes.set_ylabel("MiB per utterance")
        axes.set_xticks(sorted({each for curve in depths.values() for each in curve}))
        axes.set_xlim(left=0)
        log_ticks(axes.yaxis)
