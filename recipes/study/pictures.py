"""How runs of a study train, and how their results differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechbrain_rev.plots.style import (
    COLOURS,
    FAINT,
    INK,
    caption,
    finish,
    look,
    new_figure,
    save,
    stacked_axes,
    title_and_source,
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
    title_and_source(figure, title, source)
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
        For each panel's name, which its axis has, the runs by name, [seeds, epochs]; runs
        of one name have one colour in all panels.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    rows = -(-len(names) // 2)
    figure = new_figure(7.2, 0.9 + 2.6 * len(panels) + 0.2 * rows)
    grid = stacked_axes(figure, len(panels))
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        for name, seeds in curves.items():
            number = names.index(name)
            epochs = range(1, len(seeds[0]) + 1)
            after = list(zip(*seeds, strict=True))
            line = look(number, dashes=1)
            if len(seeds) > 1:
                least, most = map(min, after), map(max, after)
                axes.fill_between(
                    epochs, [*least], [*most], color=line["color"], alpha=0.15, lw=0
                )
            axes.plot(
                epochs,
                [sum(values) / len(values) for values in after],
                lw=1.4,
                label=name,
                # One epoch is a point, too.
                marker="o" if len(after) == 1 else None,
                **line,
            )
        axes.set_ylabel(panel)
        finish(axes, grid="both")
    grid[-1].set_xlabel("epoch")
    grid[-1].locator_params(axis="x", integer=True, min_n_ticks=1)
    figure.align_ylabels()
    caption(figure, grid[0], title, source, columns=2)
    save(figure, path)
