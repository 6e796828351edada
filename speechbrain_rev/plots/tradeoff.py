"""Time of a training step against its memory, where one is traded for the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechbrain_rev.plots.labels import write_names
from speechbrain_rev.plots.panels import check_panels
from speechbrain_rev.plots.style import (
    COLOURS,
    INK,
    caption,
    finish,
    new_figure,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^Dv"
_TICKS = [digit * 10.0**power for power in range(-4, 3) for digit in (1, 2, 5)]
_MARK = 5.0
_Curves = Mapping[str, Sequence[tuple[float, float, str]]]


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
        For each panel's name its curves by name; of each, GB per utterance, times the
        baseline's duration, and what distinguishes the point, which may be empty; what
        several curves of a panel have in common is written at the last of them.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.

    Raises
    ------
    ValueError
        If there is no panel, a panel has no curve or a curve no points, or a number is
        not above 0.

    Example
    -------
    >>> import os, tempfile
    >>> curves = {"stored": [(0.06, 1.0, "")], "ours": [(0.02, 1.3, "2 MB")]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "curves.png")
    ...     time_against_memory({"revnet57": curves}, path, title="T", source="S")
    """
    check_panels(
        {
            panel: {name: [p[:2] for p in points] for name, points in curves.items()}
            for panel, curves in panels.items()
        },
        "GB",
        "times",
    )
    figure = new_figure(7.2, 1.4 + 2.8 * len(panels))
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        for number, (name, points) in enumerate(curves.items()):
            memory, times, _ = zip(*points, strict=True)
            axes.plot(
                memory,
                times,
                color=COLOURS[number % len(COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=_MARK,
                lw=1.2,
                label=name,
            )
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"times storing, {panel}")
        finish(axes, grid="both")
    sizes = [m for c in panels.values() for points in c.values() for m, *_ in points]
    ticks = [t for t in _TICKS if min(sizes) <= t <= max(sizes)]
    grid[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    grid[-1].set_xticks([], minor=True)
    grid[-1].set_xlabel("GB per utterance")
    caption(figure, grid[0], title, source, columns=3)
    for axes, curves in zip(grid, panels.values(), strict=True):
        _write_words(figure, axes, curves)
    save(figure, path)


def _write_words(figure: Figure, axes: Axes, curves: _Curves) -> None:
    """Write each word once, at the last curve that has it: others have the same points."""
    points = [point for curve in curves.values() for point in curve]
    lines = [
        ((a[0], a[1]), (b[0], b[1]))
        for curve in curves.values()
        for a, b in itertools.pairwise(curve)
    ]
    places = {word: (x, y) for x, y, word in points if word}
    write_names(
        figure,
        axes,
        places,
        dict.fromkeys(places, INK),
        marks=[(x, y) for x, y, _ in points],
        mark_size=_MARK,
        lines=lines,
        font_size=7,
    )
