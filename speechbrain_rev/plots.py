"""Every picture of the package, from plain data to a PNG file.

matplotlib is imported when a picture is drawn. Figures are made without pyplot, so
neither the caller's backend nor its open figures are touched, and no display is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart; yellow is left out as
# it vanishes on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("-", "--", ":", "-.")
_MODE_COLOURS = {"store": "#8C8C8C", "recompute": "#56B4E9", "reconstruct": "#0072B2"}
_FAINT = "#888888"
_INK = "#333333"

# The first that fit are labelled.
_RATE_TICKS_PERCENT = (
    *(50, 10, 1, 0.1, 0.01, 0.001, 90, 20, 5, 0.5, 0.05, 0.005, 80),
    *(30, 2, 0.2, 0.02, 0.002, 70, 40, 60),
)


class ErrorRates(Protocol):
    """The error rates of one system, as ``scoring.det_curve`` gives them."""

    @property
    def false_alarm(self) -> NDArray[np.float64]:
        """Fraction of impostor trials accepted, [points], falling from 1 to 0."""

    @property
    def miss(self) -> NDArray[np.float64]:
        """Fraction of target trials refused, [points], rising from 0 to 1."""


def det_plot(curves: Mapping[str, ErrorRates], path: str | Path) -> None:
    """Draw detection error tradeoffs on normal-deviate axes, with their EERs.

    Where target and impostor scores are both normally distributed, a curve is a
    straight line: Martin et al., "The DET curve in assessment of detection task
    performance", Eurospeech 1997.

    Parameters
    ----------
    curves : mapping of str to ErrorRates
        Each system's curve by its name.
    path : str or pathlib.Path
        The PNG file to write.

    Raises
    ------
    ValueError
        If there is no curve, or one does not run from no misses to no false alarms.

    Example
    -------
    >>> import os, tempfile
    >>> from types import SimpleNamespace
    >>> curve = SimpleNamespace(
    ...     false_alarm=np.array([1.0, 0.2, 0.0]), miss=np.array([0.0, 0.1, 1.0])
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     det_plot({"ours": curve}, os.path.join(folder, "det.png"))
    """
    if not curves:
        raise ValueError("There is no curve to draw; give at least one.")
    rates = {name: _rates(name, curve) for name, curve in curves.items()}
    eers = {name: _crossing(*rate) for name, rate in rates.items()}
    low, high = _rate_limits(rates, eers)
    # The legend stands above the axes: inside it would cover some curve.
    figure = _figure(6.0, 5.8 + 0.2 * len(curves))
    axes = figure.add_subplot()
    axes.plot(*_deviates([low, high], [low, high]), color=_FAINT, lw=0.8, ls=":")
    for number, (name, (false_alarm, miss)) in enumerate(rates.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
        # Rates of zero lie at minus infinity; just outside the axes does as well.
        points = _deviates(
            np.clip(false_alarm, low / 10, 1 - low / 10),
            np.clip(miss, low / 10, 1 - low / 10),
        )
        label = f"{name}: EER {100 * eers[name]:.2f} %"
        axes.plot(*_thinned(points), color=colour, ls=dash, lw=1.6, label=label)
        # A perfect system's mark would lie at minus infinity; it sits in the corner.
        mark = max(eers[name], low)
        axes.plot(
            *_deviates([mark], [mark]),
            color=colour,
            marker="o",
            markersize=7,
            markeredgecolor="white",
            clip_on=False,
            zorder=3,
        )
    places, names = _rate_ticks(low, high)
    axes.set_xticks(places, names)
    axes.set_yticks(places, names)
    limits = _deviates([low, high], [low, high])
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])
    axes.set_aspect("equal")
    axes.set_xlabel("false alarms: impostor trials accepted, %")
    axes.set_ylabel("misses: target trials refused, %")
    _finish(axes, grid="both")
    figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    _save(figure, path)


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
    figure = _figure(6.4, 1.9 * len(panels) + 0.5)
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
            color=_COLOURS[number],
            marker=marker,
            markersize=3.5,
            lw=1.5,
        )
        axes.set_ylabel(label)
        _finish(axes, grid="both")
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
                color=_INK,
            )
    shared[-1].set_xlabel("epoch")
    shared[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    _save(figure, path)


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
    divisor, unit = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    # A gap of one bar's width lies between labels.
    height = 0.36 * (len(rows) + 0.7 * len(labels)) + 1.3
    figure = _figure(6.8, height)
    axes = figure.add_subplot()
    place, ticks = 0.0, []
    for bars in by_label.values():
        ticks.append(place + (len(bars) - 1) / 2)
        for _, mode, size in bars:
            axes.barh(place, size / divisor, 0.86, color=_MODE_COLOURS[mode])
            axes.annotate(
                f"{size / divisor:.3g} {unit}",
                (size / divisor, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=_INK,
            )
            place += 1
        place += 0.7
    axes.set_yticks(ticks, labels)
    axes.set_ylim(place - 1, -0.75)
    axes.set_xlim(0, 1.15 * largest / divisor)
    axes.set_xlabel(f"training memory per utterance, {unit}")
    _finish(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    used = {mode for _, mode, _ in rows}
    modes = [mode for mode in _MODE_COLOURS if mode in used]
    for mode in modes:
        axes.barh([0], [0], color=_MODE_COLOURS[mode], label=mode)
    figure.legend(
        loc="outside upper right", ncols=len(modes), frameon=False, fontsize=9
    )
    _save(figure, path)


def _check_bars(rows: Sequence[tuple[str, str, float]]) -> None:
    if not rows:
        raise ValueError("There is no bar to draw; give at least one row.")
    seen = set()
    for label, mode, size in rows:
        if mode not in _MODE_COLOURS:
            raise ValueError(
                f"The mode of {label!r} is {mode!r}; modes are "
                f"{', '.join(map(repr, _MODE_COLOURS))}."
            )
        if not 0 < size < np.inf:
            raise ValueError(
                f"{label!r} in mode {mode!r} has {size} bytes; a size must be above "
                f"zero and finite."
            )
        if (label, mode) in seen:
            raise ValueError(f"{label!r} has mode {mode!r} twice; leave one out.")
        seen.add((label, mode))


def _rates(
    name: str, curve: ErrorRates
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    false_alarm = np.asarray(curve.false_alarm, dtype=np.float64)
    miss = np.asarray(curve.miss, dtype=np.float64)
    runs = (
        false_alarm.ndim == 1
        and false_alarm.shape == miss.shape
        and len(miss) >= 2
        and (false_alarm[0], false_alarm[-1], miss[0], miss[-1]) == (1, 0, 0, 1)
        and bool(np.all(np.diff(false_alarm) <= 0) and np.all(np.diff(miss) >= 0))
    )
    if not runs:
        raise ValueError(
            f"The curve of {name!r} does not run from accepting all trials (false "
            f"alarms 1, misses 0) to refusing all (0, 1). Give what scoring.det_curve "
            f"returns."
        )
    return false_alarm, miss


def _crossing(false_alarm: NDArray[np.float64], miss: NDArray[np.float64]) -> float:
    """Equal error rate, interpolated as ``scoring.eer`` does."""
    return float(np.interp(0.0, miss - false_alarm, miss))


def _rate_limits(
    rates: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
    eers: Mapping[str, float],
) -> tuple[float, float]:
    # Rates of a twentieth of the EER rest on few errors, and below the finest step that
    # a curve can take there are none.
    finest = min(
        float(side[side > 0].min()) for pair in rates.values() for side in pair
    )
    low = min(max(min(eers.values()) / 20, finest, 1e-5), 0.02)
    high = min(max(0.5, 2 * max(eers.values())), 0.9)
    return low, high


def _rate_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Choose round rates, no closer than their labels are wide."""
    percents = [tick for tick in _RATE_TICKS_PERCENT if low <= tick / 100 <= high]
    fractions = [low, high, *(percent / 100 for percent in percents)]
    (start, end, *places), _ = _deviates(fractions, fractions)
    ticks: dict[float, str] = {}
    for place, percent in zip(places, percents, strict=True):
        if all(abs(place - other) >= (end - start) / 16 for other in ticks):
            ticks[place] = f"{percent:g}"
    return list(ticks), list(ticks.values())


def _deviates(
    x: NDArray[np.float64] | Sequence[float], y: NDArray[np.float64] | Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Map fractions to normal deviates."""
    fractions = torch.tensor(np.stack([x, y]), dtype=torch.float64)
    deviates: NDArray[np.float64] = torch.special.ndtri(fractions).numpy()
    return deviates[0], deviates[1]


def _thinned(
    points: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Drop points in the same fifth of a pixel as the one before."""
    grid = np.round(np.stack(points), 3)
    is_new = np.append(True, np.any(np.diff(grid, axis=1) != 0, axis=0))
    return points[0][is_new], points[1][is_new]


def _figure(width_inches: float, height_inches: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"Pictures need matplotlib, which cannot be imported here ({error}). "
            f"Install it, for instance with pip install 'speechbrain_rev[plot]'."
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def _finish(axes: Axes, *, grid: Literal["both", "x"]) -> None:
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(which="both", color=_FAINT, labelcolor=_INK, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)


def _save(figure: Figure, path: str | Path) -> None:
    figure.savefig(path, format="png", dpi=150, facecolor="white")
