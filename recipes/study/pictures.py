"""How runs of a study train, and how their results differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from speechbrain_rev.plots.style import COLOURS, FAINT, INK, picture


@dataclass(frozen=True)
class Difference:
    """How much worse one system is than another.

    Parameters
    ----------
    label : str
        Which two.
    mean : float
        The difference; above 0 is worse.
    low, high : float
        Its interval.
    bound : float
        What must be below the margin.
    shown : bool
        Whether it is shown to be below the margin.
    """

    label: str
    mean: float
    low: float
    high: float
    bound: float
    shown: bool


def forest_plot(
    panels: Mapping[str, tuple[float, Sequence[Difference]]],
    path: str | Path,
    *,
    unit: str,
    title: str,
    source: str,
) -> None:
    """Draw differences with their intervals, a panel with a margin for each list.

    Parameters
    ----------
    panels : mapping of str to (float, sequence of Difference)
        For each panel's name its margin and its differences, the same labels in each.
    path : str or pathlib.Path
        The PNG file to write.
    unit : str
        Of all numbers.
    title, source : str
        What is shown, and what it is from.
    """
    labels = [row.label for row in next(iter(panels.values()))[1]]
    bound = {"ls": "", "marker": "|", "mew": 1.6, "markersize": 9}
    height = 1.7 + 0.27 * len(labels)
    with picture(path, 8.6, height, title=title, source=source, columns=4) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True, sharex=True)
        for axes, (panel, (margin, rows)) in zip(grid[0], panels.items(), strict=True):
            axes.axvline(0, color=FAINT, lw=0.8)
            axes.axvline(margin, color=COLOURS[1], lw=1.2, ls="--", label="margin")
            for place, row in enumerate(rows):
                mean, colour, words = "white", INK, "not shown to be within"
                if row.shown:
                    mean, colour, words = COLOURS[0], COLOURS[0], "shown to be within"
                axes.plot(
                    [row.low, row.high], [place] * 2, color=colour, lw=1.0, ls="-"
                )
                axes.plot(row.bound, place, color=colour, label="bound", **bound)
                axes.plot(row.mean, place, "o", color=colour, mfc=mean, label=words)
            axes.set_title(panel)
            axes.set_xlabel(unit)
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)


def curves_over_seeds(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw the mean over seeds after each epoch, and a band from least to most.

    Parameters
    ----------
    panels : mapping of str to mapping of str to sequence of sequence of float
        For each panel's name, which its axis has, the same runs by name, [seeds, epochs].
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    height = 0.9 + 2.6 * len(panels) + 0.1 * len(names)
    with picture(path, 7.2, height, title=title, source=source, columns=2) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
            for name in names:
                after = list(zip(*curves[name], strict=True))
                epochs = range(1, len(after) + 1)
                means = [fmean(values) for values in after]
                # One epoch is a point, too.
                marker = "o" if len(after) == 1 else None
                (line,) = axes.plot(epochs, means, label=name, marker=marker)
                least, most = [*map(min, after)], [*map(max, after)]
                axes.fill_between(
                    epochs, least, most, color=line.get_color(), alpha=0.15, lw=0
                )
            axes.set_ylabel(panel)
        axes.set_xlabel("epoch")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        figure.align_ylabels()
