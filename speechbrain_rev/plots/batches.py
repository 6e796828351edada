"""Time of a training step over the batch size, as Figure 5 of Jiang et al. has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from speechbrain_rev.plots.panels import check_panels
from speechbrain_rev.plots.style import (
    COLOURS,
    DASHES,
    caption,
    finish,
    new_figure,
    save,
)

_MARKERS = "os^Dv<>"


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
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        for number, name in enumerate(names):
            # An empty curve has a place in the legend.
            points = sorted(curves.get(name, {}).items())
            axes.plot(
                [batch for batch, _ in points],
                [seconds for _, seconds in points],
                color=COLOURS[number % len(COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
                markersize=5,
                lw=1.2,
                label=name,
            )
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
