"""Detection error tradeoffs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.plots.style import (
    FAINT,
    finish,
    look,
    new_figure,
    save,
)

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
    rates = {name: (curve.false_alarm, curve.miss) for name, curve in curves.items()}
    eers = {name: _crossing(*rate) for name, rate in rates.items()}
    low, high = _rate_limits(rates, eers)
    # The legend stands above the axes: inside it would cover some curve.
    figure = new_figure(6.0, 5.8 + 0.2 * len(curves))
    axes = figure.add_subplot()
    axes.plot(*_deviates([low, high], [low, high]), color=FAINT, lw=0.8, ls=":")
    for number, (name, (false_alarm, miss)) in enumerate(rates.items()):
        line = look(number)
        # Rates of zero lie at minus infinity; just outside the axes does as well.
        points = _deviates(
            np.clip(false_alarm, low / 10, 1 - low / 10),
            np.clip(miss, low / 10, 1 - low / 10),
        )
        label = f"{name}: EER {100 * eers[name]:.2f} %"
        axes.plot(*_thinned(points), lw=1.6, label=label, **line)
        # A perfect system's mark would lie at minus infinity; it sits in the corner.
        mark = max(eers[name], low)
        axes.plot(
            *_deviates([mark], [mark]),
            color=line["color"],
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
    finish(axes, grid="both")
    figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    save(figure, path)


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
    # The other pictures do without torch, which takes seconds to import.
    import torch

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
