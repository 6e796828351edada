"""Memory of training, as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.plots.style import INK, MODE_COLOURS, finish, new_figure, save
from speechbrain_rev.sizes import GB, MB


def memory_bars(rows: Sequence[tuple[str, str, float]], path: str | Path) -> None:
    """Draw how many bytes of memory training takes per utterance.

    Parameters
    ----------
    rows : sequence of (label, mode, bytes per utterance)
        One per bar, in reading order; bars of one label stand together. Modes are
        "store", "reconstruct" and "recompute".
    path : str or pathlib.Path
        The PNG file to write.

    Raises
    ------
    ValueError
        If there is no row, a mode is unknown, a size is not positive and finite, or a
        label has a mode twice.

    Example
    -------
    >>> import os, tempfile
    >>> rows = [("resnet34", "store", 6.1e7), ("revnet57", "reconstruct", 2.3e7)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     memory_bars(rows, os.path.join(folder, "memory.png"))
    """
    _check_bars(rows)
    labels = list(dict.fromkeys(label for label, _, _ in rows))
    by_label = {label: [row for row in rows if row[0] == label] for label in labels}
    largest = max(size for _, _, size in rows)
    divisor, unit = (GB, "GB") if largest >= GB else (MB, "MB")
    # A gap of one bar's width lies between labels.
    height = 0.36 * (len(rows) + 0.7 * len(labels)) + 1.3
    figure = new_figure(6.8, height)
    axes = figure.add_subplot()
    place, ticks = 0.0, []
    for bars in by_label.values():
        ticks.append(place + (len(bars) - 1) / 2)
        for _, mode, size in bars:
            axes.barh(place, size / divisor, 0.86, color=MODE_COLOURS[mode])
            axes.annotate(
                f"{size / divisor:.3g} {unit}",
                (size / divisor, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=INK,
            )
            place += 1
        place += 0.7
    axes.set_yticks(ticks, labels)
    axes.set_ylim(place - 1, -0.75)
    axes.set_xlim(0, 1.15 * largest / divisor)
    axes.set_xlabel(f"training memory per utterance, {unit}")
    finish(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    used = {mode for _, mode, _ in rows}
    modes = [mode for mode in MODE_COLOURS if mode in used]
    for mode in modes:
        axes.barh([0], [0], color=MODE_COLOURS[mode], label=mode)
    figure.legend(
        loc="outside upper right", ncols=len(modes), frameon=False, fontsize=9
    )
    save(figure, path)


def _check_bars(rows: Sequence[tuple[str, str, float]]) -> None:
    if not rows:
        raise ValueError("There is no bar to draw; give at least one row.")
    seen = set()
    for label, mode, size in rows:
        if mode not in MODE_COLOURS:
            raise ValueError(
                f"The mode of {label!r} is {mode!r}; modes are "
                f"{', '.join(map(repr, MODE_COLOURS))}."
            )
        if not 0 < size < math.inf:
            raise ValueError(
                f"{label!r} in mode {mode!r} has {size} bytes; a size must be above "
                f"zero and finite."
            )
        if (label, mode) in seen:
            raise ValueError(f"{label!r} has mode {mode!r} twice; leave one out.")
        seen.add((label, mode))
