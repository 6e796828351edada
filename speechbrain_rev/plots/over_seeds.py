"""Courses of trainings that were done with several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from speechbrain_rev.plots.style import (
    COLOURS,
    DASHES,
    caption,
    finish,
    new_figure,
    save,
)


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
        For each panel's name, which its axis has, the trainings by name, [seeds, epochs];
        trainings of one name have one colour in all panels.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.

    Raises
    ------
    ValueError
        If there is no panel, no training, seed or epoch, a value is not finite, or seeds
        of one training have not the same number of epochs.

    Example
    -------
    >>> import os, tempfile
    >>> loss = {"resnet34": [[5.0, 4.0], [5.2, 4.1]], "revnet46": [[5.1, 3.9]]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "curves.png")
    ...     curves_over_seeds({"loss": loss}, path, title="T", source="S")
    """
    _check(panels)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    rows = -(-len(names) // 2)
    figure = new_figure(7.2, 0.9 + 2.6 * len(panels) + 0.2 * rows)
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        for name, seeds in curves.items():
            number = names.index(name)
            epochs = range(1, len(seeds[0]) + 1)
            after = list(zip(*seeds, strict=True))
            colour = COLOURS[number % len(COLOURS)]
            if len(seeds) > 1:
                least, most = map(min, after), map(max, after)
                axes.fill_between(
                    epochs, [*least], [*most], color=colour, alpha=0.15, lw=0
                )
            axes.plot(
                epochs,
                [sum(values) / len(values) for values in after],
                color=colour,
                linestyle=DASHES[number % len(DASHES)],
                lw=1.4,
                label=name,
                # One epoch is a point, too.
                marker="o" if len(after) == 1 else None,
            )
        axes.set_ylabel(panel)
        finish(axes, grid="both")
    grid[-1].set_xlabel("epoch")
    grid[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    figure.align_ylabels()
    caption(figure, grid[0], title, source, columns=2)
    save(figure, path)


def _check(panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> None:
    if not panels:
        raise ValueError("There is no panel to draw; give at least one.")
    for panel, curves in panels.items():
        if not curves:
            raise ValueError(f"{panel!r} has no curve; leave it out.")
        for name, seeds in curves.items():
            lengths = sorted({len(values) for values in seeds})
            if lengths in ([], [0]):
                raise ValueError(f"{name!r} of {panel!r} has no points; leave it out.")
            if len(lengths) > 1:
                raise ValueError(
                    f"Seeds of {name!r} of {panel!r} have {lengths} epochs; give as many "
                    "of each."
                )
            for values in seeds:
                for epoch, value in enumerate(values, start=1):
                    if not math.isfinite(value):
                        raise ValueError(
                            f"{name!r} of {panel!r} has {value} in epoch {epoch}; give "
                            "finite numbers."
                        )
