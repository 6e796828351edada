"""The course of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speechbrain_rev.plots.style import COLOURS, INK, finish, new_figure, save


def training_curves(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw loss, validation error and learning rate of each epoch.

    Parameters
    ----------
    rows : sequence of mapping
        One per epoch, as the lines of a run's ``train_log.jsonl``: ``epoch``,
        ``train_loss``, ``lr`` and, where it was measured, ``valid_eer_percent``. Other
        entries are not looked at.
    path : str or pathlib.Path
        The PNG file to write.

    Raises
    ------
    ValueError
        If there is no row, or one lacks an entry.

    Example
    -------
    >>> import os, tempfile
    >>> row = {"epoch": 1, "train_loss": 5.0, "lr": 0.1, "valid_eer_percent": 20.0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     training_curves([row], os.path.join(folder, "training.png"))
    """
    if not rows:
        raise ValueError("There is no epoch to draw; give at least one row.")
    for number, row in enumerate(rows):
        missing = [key for key in ("epoch", "train_loss", "lr") if key not in row]
        if missing:
            raise ValueError(
                f"Row {number} has no {', '.join(missing)}. Give one mapping per epoch "
                f"with epoch, train_loss, lr and, where measured, valid_eer_percent."
            )
    rows = sorted(rows, key=lambda row: row["epoch"])
    measured = [row for row in rows if row.get("valid_eer_percent") is not None]
    panels: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = [
        ("train_loss", "training loss", rows),
        ("valid_eer_percent", "validation EER, %", measured),
        ("lr", "learning rate", rows),
    ]
    panels = [panel for panel in panels if panel[2]]
    figure = new_figure(6.4, 1.9 * len(panels) + 0.5)
    shared = figure.subplots(len(panels), 1, sharex=True)
    for number, (axes, (key, label, points)) in enumerate(
        zip(shared, panels, strict=True)
    ):
        epochs = [row["epoch"] for row in points]
        values = [row[key] for row in points]
        marker = "o" if len(points) <= 40 else None
        axes.plot(
            epochs,
            values,
            color=COLOURS[number],
            marker=marker,
            markersize=3.5,
            lw=1.5,
        )
        axes.set_ylabel(label)
        finish(axes, grid="both")
        if key == "lr" and min(values) > 0:
            axes.set_yscale("log")
        elif key == "valid_eer_percent":
            axes.set_ylim(bottom=0)
            best = min(points, key=lambda row: row["valid_eer_percent"])
            axes.text(
                *(0.99, 0.95),
                f"lowest {best['valid_eer_percent']:.2f} % in epoch {best['epoch']}",
                transform=axes.transAxes,
                ha="right",
                va="top",
                fontsize=9,
                color=INK,
            )
    shared[-1].set_xlabel("epoch")
    shared[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    save(figure, path)
