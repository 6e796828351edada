"""How far gradients from reconstructed activations are turned, over a training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from speechbrain_rev.plots.style import (
    COLOURS,
    MARKERS,
    caption,
    finish,
    new_figure,
    save,
)


def gradient_angles(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw angles over training steps; the axis is logarithmic down to an exact zero.

    Parameters
    ----------
    curves : mapping of str to sequence of (int, float)
        For each curve's name, steps and angles in degrees between the gradients of one
        batch with reconstructed and with stored activations.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.

    Raises
    ------
    ValueError
        If there is no curve or a curve without points, or an angle is not between 0 and
        180 degrees.

    Example
    -------
    >>> import os, tempfile
    >>> curves = {"float": [(0, 1e-3), (10, 0.02)], "exact": [(0, 0.0), (10, 0.0)]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "angles.png")
    ...     gradient_angles(curves, path, title="T", source="S")
    """
    _check(curves)
    figure = new_figure(7.2, 4.4)
    axes = figure.add_subplot()
    angles = [angle for points in curves.values() for _, angle in points]
    # Below the smallest angle the axis is linear, so that zero has a place on it.
    smallest = min([angle for angle in angles if angle > 0], default=1.0)
    least = 10.0 ** math.floor(math.log10(smallest))
    most = 10.0 ** math.ceil(math.log10(max([*angles, 10 * least])))
    axes.set_yscale("symlog", linthresh=least, linscale=0.6)
    axes.set_ylim(-0.25 * least, most)
    decades = round(math.log10(most / least))
    ticks = [least * 10.0**k for k in range(decades + 1)]
    axes.set_yticks([0.0, *ticks], ["0", *(f"{tick:g}" for tick in ticks)])
    axes.set_yticks([], minor=True)
    for number, (name, points) in enumerate(curves.items()):
        axes.plot(
            [step for step, _ in points],
            [angle for _, angle in points],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            # Where curves lie on each other, as at zero, all can be seen.
            markersize=8.0 - 2.0 * (number % 3),
            markerfacecolor="none",
            lw=1.2,
            label=name,
            clip_on=False,
            zorder=3,
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("angle between gradients, degrees")
    finish(axes, grid="both")
    caption(figure, axes, title, source, columns=2)
    save(figure, path)


def _check(curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    if not curves:
        raise ValueError("There is no curve to draw; give at least one.")
    for name, points in curves.items():
        if not points:
            raise ValueError(f"{name!r} has no points; leave it out.")
        for step, angle in points:
            if not 0 <= angle <= 180:
                raise ValueError(
                    f"{name!r} has an angle of {angle} at step {step}; give degrees "
                    "from 0 to 180."
                )
