"""Differences between systems, their intervals, and the margins they should be within."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechbrain_rev.plots.style import (
    COLOURS,
    FAINT,
    INK,
    finish,
    new_figure,
    save,
    source_below,
)


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

    Raises
    ------
    ValueError
        If a number is not finite or the interval has its ends the wrong way round.

    Example
    -------
    >>> found = Difference("revnet46 - resnet34", 0.1, -0.4, 0.6, 0.5, shown=True)
    >>> found.bound
    0.5
    """

    label: str
    mean: float
    low: float
    high: float
    bound: float
    shown: bool

    def __post_init__(self) -> None:
        if not (
            all(map(math.isfinite, (self.mean, self.low, self.high, self.bound)))
            and self.low <= self.high
        ):
            raise ValueError(
                f"{self.label!r} has the mean {self.mean}, the interval {self.low} to "
                f"{self.high} and the bound {self.bound}; give finite numbers, the lower "
                "end first."
            )


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

    Raises
    ------
    ValueError
        If there is no panel or no difference, labels of panels differ, or a margin is no
        number or below 0.

    Example
    -------
    >>> import os, tempfile
    >>> rows = [Difference("revnet46 - resnet34", 0.1, -0.4, 0.6, 0.5, shown=True)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "forest.png")
    ...     forest_plot({"a list": (1.0, rows)}, path, unit="%", title="T", source="S")
    """
    labels = _check(panels)
    figure = new_figure(8.6, 1.7 + 0.27 * len(labels))
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True, sharex=True)[0]
    for axes, (panel, (margin, rows)) in zip(grid, panels.items(), strict=True):
        axes.axvline(0, color=FAINT, lw=0.8)
        axes.axvline(margin, color=COLOURS[1], lw=1.2, ls="--", label="margin")
        for place, row in enumerate(rows):
            colour = COLOURS[0] if row.shown else INK
            axes.plot([row.low, row.high], [place, place], color=colour, lw=1.0)
            axes.plot([row.bound], [place], "|", color=colour, mew=1.6, markersize=9)
            axes.plot(
                [row.mean],
                [place],
                "o",
                color=colour,
                markerfacecolor=colour if row.shown else "white",
                markersize=5,
            )
        axes.set_title(panel, fontsize=9.5, color=INK, loc="left")
        axes.set_xlabel(unit)
        finish(axes, grid="x")
    grid[0].set_yticks(range(len(labels)), labels)
    grid[0].set_ylim(len(labels) - 0.4, -0.6)
    for axes in grid:
        axes.tick_params(axis="y", length=0)
    grid[0].plot([], [], "|", color=INK, mew=1.6, markersize=9, label="bound")
    grid[0].plot([], [], "o-", color=COLOURS[0], label="shown to be within")
    grid[0].plot(
        [], [], "o-", color=INK, markerfacecolor="white", label="not shown to be"
    )
    figure.suptitle(title, fontsize=11.5, color=INK, x=0.01, ha="left")
    source_below(figure, source)
    handles, words = grid[0].get_legend_handles_labels()
    figure.legend(
        handles,
        words,
        loc="outside upper right",
        ncols=4,
        columnspacing=1.2,
        handletextpad=0.4,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    save(figure, path)


def _check(panels: Mapping[str, tuple[float, Sequence[Difference]]]) -> list[str]:
    """Refuse what cannot be drawn; give the labels."""
    if not panels:
        raise ValueError("There is no panel to draw; give at least one.")
    labels = [[row.label for row in rows] for _, rows in panels.values()]
    if not labels[0]:
        raise ValueError("There is no difference to draw; give at least one.")
    for (panel, (margin, _)), found in zip(panels.items(), labels, strict=True):
        if found != labels[0]:
            raise ValueError(
                f"{panel!r} has the labels {found}, the first panel {labels[0]}; give "
                "each the same ones in one order."
            )
        if not 0 <= margin < math.inf:
            raise ValueError(
                f"The margin of {panel!r} is {margin}; give a number, not below 0."
            )
    return labels[0]
