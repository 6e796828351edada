"""Training runs: their course, what changes it, and how their results differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechbrain_rev.plots.style import (
    COLOURS,
    FAINT,
    INK,
    caption,
    check_panels,
    check_some,
    finish,
    look,
    new_figure,
    save,
    stacked_axes,
    title_and_source,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NEEDED = ("epoch", "train_loss", "lr", "margin")
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

    Raises
    ------
    ValueError
        If there is no row, or one lacks an entry.

    Example
    -------
    >>> import os, tempfile
    >>> row = {"epoch": 1, "train_loss": 5.0, "lr": 0.1, "margin": 0.0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     training_curves([row], os.path.join(folder, "training.png"))
    """
    check_some(rows, "epoch")
    for number, row in enumerate(rows):
        missing = [key for key in _NEEDED if key not in row]
        if missing:
            raise ValueError(
                f"Row {number} has no {', '.join(missing)}. Give one mapping per epoch "
                f"with {', '.join(_NEEDED)} and, where measured, valid_eer_percent."
            )
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
    _count_epochs(shared[-1])
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


def loss_curves(
    curves: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str,
    source: str,
    quantity: str = "loss",
    first_step: int = 1,
    mean_of: int = 1,
) -> None:
    """Draw the loss of each training run, or another quantity, over its steps.

    Parameters
    ----------
    curves : mapping of str to sequence of float
        For each run's name its loss after each step, above 0.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.
    quantity : str
        What is drawn.
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
        line = look(number, dashes=1)
        axes.plot(*zip(*curve, strict=True), lw=1.4, label=name, **line)
    axes.set_xlabel("training step")
    axes.set_ylabel(
        quantity if mean_of == 1 else f"{quantity}, mean of {mean_of} steps"
    )
    finish(axes, grid="both")
    caption(figure, axes, title, source, columns=2)
    save(figure, path)


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
        For each panel's name, which its axis has, the runs by name, [seeds, epochs]; runs
        of one name have one colour in all panels.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.

    Raises
    ------
    ValueError
        If there is no panel, no run, seed or epoch, a value is not finite, or seeds of
        one run have not the same number of epochs.

    Example
    -------
    >>> import os, tempfile
    >>> loss = {"resnet34": [[5.0, 4.0], [5.2, 4.1]], "revnet46": [[5.1, 3.9]]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "curves.png")
    ...     curves_over_seeds({"loss": loss}, path, title="T", source="S")
    """
    _check_seeds(panels)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    rows = -(-len(names) // 2)
    figure = new_figure(7.2, 0.9 + 2.6 * len(panels) + 0.2 * rows)
    grid = stacked_axes(figure, len(panels))
    for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
        for name, seeds in curves.items():
            number = names.index(name)
            epochs = range(1, len(seeds[0]) + 1)
            after = list(zip(*seeds, strict=True))
            line = look(number, dashes=1)
            if len(seeds) > 1:
                least, most = map(min, after), map(max, after)
                axes.fill_between(
                    epochs, [*least], [*most], color=line["color"], alpha=0.15, lw=0
                )
            axes.plot(
                epochs,
                [sum(values) / len(values) for values in after],
                lw=1.4,
                label=name,
                # One epoch is a point, too.
                marker="o" if len(after) == 1 else None,
                **line,
            )
        axes.set_ylabel(panel)
        finish(axes, grid="both")
    _count_epochs(grid[-1])
    figure.align_ylabels()
    caption(figure, grid[0], title, source, columns=2)
    save(figure, path)


def _check_seeds(panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> None:
    check_some(panels, "panel")
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
    _check_angles(curves)
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
            *zip(*points, strict=True),
            **look(number, dashes=0, marked=True),
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


def _check_angles(curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    check_some(curves, "curve")
    for name, points in curves.items():
        if not points:
            raise ValueError(f"{name!r} has no points; leave it out.")
        for step, angle in points:
            if not 0 <= angle <= 180:
                raise ValueError(
                    f"{name!r} has an angle of {angle} at step {step}; give degrees "
                    "from 0 to 180."
                )


@dataclass(frozen=True)
class Difference:
    """How much worse one system is than another.

    Parameters
    ----------
    label : str
        Which two.
    mean : float
        The difference; above 0 is worse.
    low, high : float
        Its interval.
    bound : float
        What must be below the margin.
    shown : bool
        Whether it is shown to be below the margin.

    Raises
    ------
    ValueError
        If a number is not finite or the interval has its ends the wrong way round.

    Example
    -------
    >>> difference = Difference("revnet46 - resnet34", 0.1, -0.4, 0.6, 0.5, shown=True)
    >>> difference.bound
    0.5
    """

    label: str
    mean: float
    low: float
    high: float
    bound: float
    shown: bool

    def __post_init__(self) -> None:
        if not (
            all(map(math.isfinite, (self.mean, self.low, self.high, self.bound)))
            and self.low <= self.high
        ):
            raise ValueError(
                f"{self.label!r} has the mean {self.mean}, the interval {self.low} to "
                f"{self.high} and the bound {self.bound}; give finite numbers, the lower "
                "end first."
            )


def forest_plot(
    panels: Mapping[str, tuple[float, Sequence[Difference]]],
    path: str | Path,
    *,
    unit: str,
    title: str,
    source: str,
) -> None:
    """Draw differences with their intervals, a panel with a margin for each list.

    Parameters
    ----------
    panels : mapping of str to (float, sequence of Difference)
        For each panel's name its margin and its differences, the same labels in each.
    path : str or pathlib.Path
        The PNG file to write.
    unit : str
        Of all numbers.
    title, source : str
        What is shown, and what it is from.

    Raises
    ------
    ValueError
        If there is no panel or no difference, labels of panels differ, or a margin is no
        number or below 0.

    Example
    -------
    >>> import os, tempfile
    >>> rows = [Difference("revnet46 - resnet34", 0.1, -0.4, 0.6, 0.5, shown=True)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "forest.png")
    ...     forest_plot({"a list": (1.0, rows)}, path, unit="%", title="T", source="S")
    """
    labels = _check_differences(panels)
    figure = new_figure(8.6, 1.7 + 0.27 * len(labels))
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True, sharex=True)[0]
    for axes, (panel, (margin, rows)) in zip(grid, panels.items(), strict=True):
        axes.axvline(0, color=FAINT, lw=0.8)
        axes.axvline(margin, color=COLOURS[1], lw=1.2, ls="--", label="margin")
        for place, row in enumerate(rows):
            colour = COLOURS[0] if row.shown else INK
            axes.plot([row.low, row.high], [place, place], color=colour, lw=1.0)
            axes.plot([row.bound], [place], "|", color=colour, mew=1.6, markersize=9)
            axes.plot(
                [row.mean],
                [place],
                "o",
                color=colour,
                markerfacecolor=colour if row.shown else "white",
                markersize=5,
            )
        axes.set_title(panel, fontsize=9.5, color=INK, loc="left")
        axes.set_xlabel(unit)
        finish(axes, grid="x")
    grid[0].set_yticks(range(len(labels)), labels)
    grid[0].set_ylim(len(labels) - 0.4, -0.6)
    for axes in grid:
        axes.tick_params(axis="y", length=0)
    grid[0].plot([], [], "|", color=INK, mew=1.6, markersize=9, label="bound")
    grid[0].plot([], [], "o-", color=COLOURS[0], label="shown to be within")
    grid[0].plot(
        [], [], "o-", color=INK, markerfacecolor="white", label="not shown to be"
    )
    title_and_source(figure, title, source)
    handles, words = grid[0].get_legend_handles_labels()
    figure.legend(
        handles,
        words,
        loc="outside upper right",
        ncols=4,
        columnspacing=1.2,
        handletextpad=0.4,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    save(figure, path)


def _check_differences(
    panels: Mapping[str, tuple[float, Sequence[Difference]]],
) -> list[str]:
    """Refuse what cannot be drawn; give the labels."""
    check_some(panels, "panel")
    labels = [[row.label for row in rows] for _, rows in panels.values()]
    check_some(labels[0], "difference")
    for (panel, (margin, _)), own in zip(panels.items(), labels, strict=True):
        if own != labels[0]:
            raise ValueError(
                f"{panel!r} has the labels {own}, the first panel {labels[0]}; give "
                "each the same ones in one order."
            )
        if not 0 <= margin < math.inf:
            raise ValueError(
                f"The margin of {panel!r} is {margin}; give a number, not below 0."
            )
    return labels[0]


def _count_epochs(axes: Axes) -> None:
    axes.set_xlabel("epoch")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
