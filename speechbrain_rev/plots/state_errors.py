"""What storing the states of an optimizer in few bits costs, over a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from speechbrain_rev.plots.panels import check_panels
from speechbrain_rev.plots.style import (
    COLOURS,
    DASHES,
    caption,
    finish,
    log_ticks,
    new_figure,
    save,
)


def state_errors(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw relative errors of stored states over the epochs of a training.

    Parameters
    ----------
    panels : mapping of str to mapping of str to sequence of (int, float)
        For each state's name, by layers, epochs from 1 and the norm of the error that
        storing makes there over the norm of what is stored; layers of one name have one
        colour in all panels.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.

    Raises
    ------
    ValueError
        If there is no panel, a panel without a curve or a curve without points, or an
        epoch or error is not above 0.

    Example
    -------
    >>> import os, tempfile
    >>> panels = {"first moment": {"all layers": [(1, 0.01), (2, 0.011)]}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "errors.png")
    ...     state_errors(panels, path, title="T", source="S")
    """
    check_panels(panels, "epochs", "error")
    figure = new_figure(7.2, 1.2 + 1.7 * len(panels))
    from matplotlib.ticker import MaxNLocator

    curves = [points for curves in panels.values() for points in curves.values()]
    percent = [100 * error for points in curves for _, error in points]
    epochs = [epoch for points in curves for epoch, _ in points]
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    rows = figure.subplots(len(panels), 1, squeeze=False, sharex=True, sharey=True)
    grid = rows[:, 0]
    grid[0].set_yscale("log")
    for axes, (panel, found) in zip(grid, panels.items(), strict=True):
        for number, name in enumerate(names):
            points = found.get(name, [])
            axes.plot(
                [epoch for epoch, _ in points],
                [100 * error for _, error in points],
                color=COLOURS[number % len(COLOURS)],
                linestyle=DASHES[number % len(DASHES)],
                lw=1.4,
                # One epoch is a point, too.
                marker="o" if len(points) == 1 else None,
                label=name,
            )
        axes.set_ylabel(f"{panel}, %")
        finish(axes, grid="both")
    # Room for a tick above and below, also of a curve that is level.
    grid[0].set_ylim(min(percent) / 2.5, 2.5 * max(percent))
    log_ticks(grid[0])
    grid[0].set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
    grid[0].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    grid[-1].set_xlabel("epoch")
    figure.align_ylabels()
    caption(figure, grid[0], title, source, columns=4)
    save(figure, path)
