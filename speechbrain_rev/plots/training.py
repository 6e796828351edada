"""The course of a training run, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechbrain_rev.plots.style import (
    COLOURS,
    INK,
    finish,
    new_figure,
    save,
    stacked_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = dict(
    zip(("train_loss", "valid_eer_percent", "lr", "margin"), COLOURS, strict=False)
)


def training_curves(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw loss, validation error, learning rate and margin of each epoch.

    Parameters
    ----------
    rows : sequence of mapping
        One per epoch, as the lines of a run's ``train_log.jsonl``: ``epoch``,
        ``train_loss``, ``lr``, ``margin`` and, where it was measured,
        ``valid_eer_percent``. Other entries are not looked at.
    path : str or pathlib.Path
        The PNG file to write.

    Example
    -------
    >>> import os, tempfile
    >>> row = {"epoch": 1, "train_loss": 5.0, "lr": 0.1, "margin": 0.0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     training_curves([row], os.path.join(folder, "training.png"))
    """
    rows = sorted(rows, key=lambda row: row["epoch"])
    measured = [row for row in rows if row.get("valid_eer_percent") is not None]
    panels: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = [
        ("train_loss", "training loss", rows),
        ("valid_eer_percent", "validation EER, %", measured),
        ("lr", "learning rate", rows),
        ("margin", "margin, radians", rows),
    ]
    panels = [panel for panel in panels if panel[2]]
    figure = new_figure(6.4, 1.9 * len(panels) + 0.5)
    shared = stacked_axes(figure, len(panels))
    for axes, (key, label, points) in zip(shared, panels, strict=True):
        _curve(axes, key, points)
        axes.set_ylabel(label)
    # One epoch, too, stands at a whole number.
    shared[-1].set_xlim(rows[0]["epoch"] - 0.5, rows[-1]["epoch"] + 0.5)
    shared[-1].set_xlabel("epoch")
    shared[-1].locator_params(axis="x", integer=True, min_n_ticks=1)
    figure.align_ylabels()
    save(figure, path)


def _curve(axes: Axes, key: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Draw one quantity by epoch, on an axis that suits it."""
    values = [row[key] for row in points]
    axes.plot(
        [row["epoch"] for row in points],
        values,
        color=_COLOURS[key],
        marker="o" if len(points) <= 40 else None,
        markersize=3.5,
        lw=1.5,
    )
    finish(axes, grid="both")
    if key == "lr" and min(values) > 0:
        axes.set_yscale("log")
    elif key in ("margin", "valid_eer_percent"):
        # From 0: a level curve does not magnify the last digit.
        top = max(values) or 0.1
        axes.set_ylim(-0.05 * top, 1.1 * top)
    if key == "valid_eer_percent":
        best = min(points, key=lambda row: row["valid_eer_percent"])
        axes.set_title(
            f"lowest {best['valid_eer_percent']:.2f} % in epoch {best['epoch']}",
            loc="right",
            fontsize=9,
            color=INK,
        )
