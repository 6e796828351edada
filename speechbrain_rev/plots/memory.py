"""Memory of training, and the time that it is traded for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from speechbrain_rev.plots.style import (
    COLOURS,
    INK,
    MODE_COLOURS,
    caption,
    check_mode,
    check_panels,
    check_some,
    finish,
    legend_above,
    log_ticks,
    look,
    new_figure,
    note,
    save,
    source_below,
    stacked_axes,
    title_and_source,
    write_names,
)
from speechbrain_rev.sizes import GB, GIB, MB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNIT_BYTES = {"GiB": GIB, "GB": GB}
_SMALLER = {"GiB": ("MiB", MIB), "GB": ("MB", MB)}
# One colour for each part in every picture; what is no concern of ours is grey.
_PART_COLOURS = {
    "activations": COLOURS[0],
    "held": COLOURS[0],
    "working": COLOURS[4],
    "optimizer_states": COLOURS[1],
    "weights": COLOURS[2],
    "gradients": COLOURS[5],
    "others": "#B0B0B0",
}
_TICKS = [digit * 10.0**power for power in range(-1, 6) for digit in (1, 2, 5)]
_MARK = 5.0
_Curves = Mapping[str, Sequence[tuple[float, float, str]]]


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

    Raises
    ------
    ValueError
        If there is no mode, a mode is unknown or has no depth, or a number is not above 0.

    Example
    -------
    >>> import os, tempfile
    >>> steps = {"store": (1.5e9, 1.6), "reconstruct": (7e7, 2.4)}
    >>> depths = {"store": {89: 2e8, 377: 8e8}, "reconstruct": {89: 1.2e7, 377: 1.2e7}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "memory.png")
    ...     memory_by_depth(steps, depths, path, title="T", source="S")
    """
    for mode in (*steps, *depths):
        check_mode(mode, "a bar or curve")
    points = {mode: list(curve.items()) for mode, curve in depths.items()}
    check_panels({"memory against depth": points}, "layers", "bytes")
    bars = {mode: [pair] for mode, pair in steps.items()}
    check_panels({"a step": bars}, "bytes", "seconds")
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


@dataclass(frozen=True)
class PartsBar:
    """One bar.

    Attributes
    ----------
    group : str
        Bars of one group stand together under this head, an encoder's name.
    label : str
        What distinguishes the bar in its group.
    parts : mapping of str to float
        Bytes of "activations", or of those of them that are "held" and of those that
        are "working", of "optimizer_states", "weights", "gradients" and "others", or of
        some of these.
    """

    group: str
    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def memory_parts(
    bars: Sequence[PartsBar],
    path: str | Path,
    *,
    title: str,
    source: str,
    unit: Literal["GiB", "GB"] = "GiB",
) -> None:
    """Draw the parts of each bar in size, and beside it in percent of the bar.

    Parameters
    ----------
    bars : sequence of PartsBar
        In reading order.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    unit : {"GiB", "GB"}
        2**30 or 1e9 bytes.

    Raises
    ------
    ValueError
        If there is no bar, a part is unknown, or a size is below zero or not finite, or
        all are zero.

    Example
    -------
    >>> import os, tempfile
    >>> stored = PartsBar("revnet57", "store", {"activations": 4e9, "weights": 4e7})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "parts.png")
    ...     memory_parts([stored], path, title="Memory", source="Counted.")
    """
    _check_parts(bars)
    divisor = _UNIT_BYTES[unit]
    places = _places(bars)
    figure = new_figure(9.6, 1.7 + 0.3 * (places[-1] + 1))
    sizes, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for bar, place in zip(bars, places, strict=True):
        for axes, scale in ((sizes, 1 / divisor), (shares, 100 / bar.total)):
            done = 0.0
            for part, colour in _PART_COLOURS.items():
                size = bar.parts.get(part, 0.0) * scale
                axes.barh(place, size, 0.84, left=done, color=colour)
                done += size
        size = bar.total / divisor
        note(sizes, _size(bar.total, unit), (size, place), (4, -3), va="baseline")
    backwards = zip(bars[::-1], places[::-1], strict=True)
    for group, place in {bar.group: place for bar, place in backwards}.items():
        note(sizes, group, (0, place - 0.45), (1, 3), va="baseline", weight="bold")
    sizes.set_yticks(places, [bar.label for bar in bars])
    sizes.set_ylim(places[-1] + 0.6, -1.3)
    sizes.set_xlim(0, 1.2 * max(bar.total for bar in bars) / divisor)
    sizes.set_xlabel(unit)
    shares.set_xlim(0, 100)
    shares.set_xlabel("percent of the bar")
    for axes in (sizes, shares):
        finish(axes, grid="x")
        axes.tick_params(axis="y", length=0)
    used = [part for part in _PART_COLOURS if any(part in bar.parts for bar in bars)]
    for part in used:
        sizes.barh(0, 0, color=_PART_COLOURS[part], label=part.replace("_", " "))
    source_below(figure, source)
    legend_above(figure, sizes, title, columns=len(used))
    save(figure, path)


def _size(size_bytes: float, unit: str) -> str:
    """Write a size in a unit, or in the next smaller one below a tenth of it."""
    size = size_bytes / _UNIT_BYTES[unit]
    if size < 0.1:
        unit, smaller_bytes = _SMALLER[unit]
        size = size_bytes / smaller_bytes
    return f"{size:.3g} {unit}"


def _places(bars: Sequence[PartsBar]) -> list[float]:
    """Heights of bars: one apart, and space for a head above each group."""
    places: list[float] = []
    for number, bar in enumerate(bars):
        new = number > 0 and bar.group != bars[number - 1].group
        places.append(places[-1] + (1.9 if new else 1.0) if places else 0.0)
    return places


def _check_parts(bars: Sequence[PartsBar]) -> None:
    check_some(bars, "bar")
    for bar in bars:
        for part, size in bar.parts.items():
            if part not in _PART_COLOURS:
                raise ValueError(
                    f"{bar.group!r} has a part {part!r}; parts are "
                    f"{', '.join(_PART_COLOURS)}."
                )
            if not 0 <= size < math.inf:
                raise ValueError(
                    f"{part} of {bar.group!r} has {size} bytes; a part has at least 0, "
                    "and finitely many."
                )
        if bar.total == 0:
            raise ValueError(f"{bar.group!r} has nothing to draw; leave it out.")


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

    Raises
    ------
    ValueError
        If there is no panel, a panel has no curve or a curve no points, or a number is
        not above 0.

    Example
    -------
    >>> import os, tempfile
    >>> curves = {"stored": {2: 0.4}, "planned": {2: 0.4, 4: 0.5}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "batches.png")
    ...     time_by_batch({"revnet57": curves}, path, title="T", source="S")
    """
    check_panels(
        {
            panel: {name: list(curve.items()) for name, curve in curves.items()}
            for panel, curves in panels.items()
        },
        "utterances",
        "seconds",
    )
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

    Raises
    ------
    ValueError
        If there is no panel, a panel has no curve or a curve no points, or a number is
        not above 0.

    Example
    -------
    >>> import os, tempfile
    >>> curves = {"stored": [(60.0, 1.0, "")], "ours": [(20.0, 1.3, "2 MB")]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "curves.png")
    ...     time_against_memory({"revnet57": curves}, path, title="T", source="S")
    """
    check_panels(
        {
            panel: {name: [p[:2] for p in points] for name, points in curves.items()}
            for panel, curves in panels.items()
        },
        "MiB",
        "times",
    )
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
