"""Losses of trainings that differ in one thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def loss_curves(
    curves: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str,
    source: str,
    first_step: int = 1,
    mean_of: int = 1,
) -> None:
    """Draw the loss of each training over its steps.

    Parameters
    ----------
    curves : mapping of str to sequence of float
        For each training's name its loss after each step, above 0.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.
    first_step : int
        The number of the first step.
    mean_of : int
        How many steps, up to its own, a point is the mean of.

    Raises
    ------
    ValueError
        If there is no curve, one has fewer losses than a point is the mean of, or a loss
        is not above 0.

    Example
    -------
    >>> import os, tempfile
    >>> curves = {"plain": [6.0, 5.5, 5.2], "compressed": [6.0, 5.6, 5.2]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "losses.png")
    ...     loss_curves(curves, path, title="T", source="S", mean_of=2)
    """
    points = {
        name: [
            (first_step + i - 1, sum(losses[i - mean_of : i]) / mean_of)
            for i in range(mean_of, len(losses) + 1)
        ]
        for name, losses in curves.items()
    }
    check_panels({"losses": points}, "steps", "losses")
    figure = new_figure(7.2, 4.0)
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(points.items()):
        axes.plot(
            [step for step, _ in curve],
            [loss for _, loss in curve],
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[number % len(DASHES)],
            lw=1.4,
            label=name,
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("loss" if mean_of == 1 else f"loss, mean of {mean_of} steps")
    finish(axes, grid="both")
    caption(figure, axes, title, source, columns=2)
    save(figure, path)
