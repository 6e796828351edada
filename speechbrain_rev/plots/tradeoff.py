"""Time of a training step against its memory, where one is traded for the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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

_MARKERS = "os^Dv"
_TICKS = [digit * 10.0**power for power in range(-4, 3) for digit in (1, 2, 5)]
#: Points that are nearer than this share of the memory would have words on each other.
_APART = 1.08


def time_against_memory(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, str]]]],
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
        baseline's duration, and what distinguishes the point, which may be empty.
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
    _check(panels)
    figure = new_figure(7.2, 1.4 + 2.8 * len(panels))
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        for number, (name, points) in enumerate(curves.items()):
            memory, times, words = zip(*points, strict=True)
            axes.plot(
                memory,
                times,
                color=COLOURS[number % len(COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=5,
                lw=1.2,
                label=name,
            )
            _annotate(axes, memory, times, words)
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
    save(figure, path)


def _annotate(
    axes: Axes, memory: Sequence[float], times: Sequence[float], words: Sequence[str]
) -> None:
    """Put words at points, the ones of least memory first, where there is room."""
    last = 0.0
    for x, y, word in sorted(zip(memory, times, words, strict=True)):
        if x > _APART * last:
            axes.annotate(
                word, (x, y), (4, 3), textcoords="offset points", fontsize=7, color=INK
            )
            last = x


def _check(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, str]]]],
) -> None:
    if not panels:
        raise ValueError("There is no panel to draw; give at least one.")
    for panel, curves in panels.items():
        if not curves:
            raise ValueError(f"{panel!r} has no curve; leave it out.")
        for name, points in curves.items():
            if not points:
                raise ValueError(f"{name!r} of {panel!r} has no points; leave it out.")
            for memory, time, _ in points:
                if not (memory > 0 and time > 0):
                    raise ValueError(
                        f"{name!r} of {panel!r} has a point of {memory} GB and {time} "
                        "times; both must be above 0."
                    )
