"""What storing the states of an optimizer in few bits costs, over a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from speechbrain_rev.plots.panels import check_panels
from speechbrain_rev.plots.style import (
    COLOURS,
    MARKERS,
    caption,
    finish,
    log_ticks,
    new_figure,
    save,
)


def state_errors(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw relative errors of stored states over the epochs of a training.

    Parameters
    ----------
    curves : mapping of str to sequence of (int, float)
        For each state's name, epochs from 1 and the norm of the error that storing makes
        there over the norm of what is stored.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.

    Raises
    ------
    ValueError
        If there is no curve or a curve without points, or an epoch or error is not above
        0.

    Example
    -------
    >>> import os, tempfile
    >>> curves = {"first moment": [(1, 0.01), (2, 0.011)], "next step": [(1, 0.3)]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "errors.png")
    ...     state_errors(curves, path, title="T", source="S")
    """
    check_panels({"errors": curves}, "epochs", "error")
    figure = new_figure(7.2, 4.0)
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    axes.set_yscale("log")
    for number, (name, points) in enumerate(curves.items()):
        axes.plot(
            [epoch for epoch, _ in points],
            [100 * error for _, error in points],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            # Where curves lie on each other all can be seen.
            markersize=7.0 - 2.0 * (number % 3),
            markerfacecolor="none",
            lw=1.2,
            label=name,
        )
    percent = [100 * error for points in curves.values() for _, error in points]
    # Room for a tick above and below, also of a curve that is level.
    axes.set_ylim(min(percent) / 2.5, 2.5 * max(percent))
    log_ticks(axes)
    epochs = [epoch for points in curves.values() for epoch, _ in points]
    axes.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch")
    axes.set_ylabel("relative error, %")
    finish(axes, grid="both")
    caption(figure, axes, title, source, columns=3)
    save(figure, path)
