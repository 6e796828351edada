"""A corpus, the course of a training run, and the error rates of its encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechbrain_rev.plots.style import COLOURS, FAINT, picture

_BARS = 30
_RATE_TICKS_PERCENT = (0.001, 0.01, 0.1, 0.5, 2, 5, 10, 20, 40, 60, 80)


def corpus_histograms(
    seconds: Sequence[float],
    utterances: Sequence[int],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw histograms of the lengths of utterances, and of how many each speaker has.

    Parameters
    ----------
    seconds : sequence of float
        The length of each utterance.
    utterances : sequence of int
        How many each speaker has.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.

    Example
    -------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "corpus.png")
    ...     corpus_histograms([2.5, 4.0, 8.1], [1, 2], path, title="T", source="S")
    """
    fewest, most = min(utterances), max(utterances)
    step = 1 + (most - fewest) // _BARS
    # Bars of whole numbers stand around them.
    counts = np.arange(fewest, most + step + 1, step) - 0.5
    with picture(path, 7.2, 3.2, title=title, source=source) as figure:
        left, right = figure.subplots(1, 2)
        left.hist(seconds, bins=_BARS, color=COLOURS[0])
        left.set(xlabel="seconds of an utterance", ylabel="utterances")
        right.hist(utterances, bins=counts, color=COLOURS[1])
        right.set(xlabel="utterances of a speaker", ylabel="speakers")
        right.locator_params(axis="x", integer=True)
        for axes in (left, right):
            axes.set_xlim(left=0)
            axes.locator_params(axis="y", integer=True)


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
    labels = {
        "train_loss": "training loss",
        "valid_eer_percent": "validation EER, %",
        "lr": "learning rate",
        "margin": "margin, radians",
    }
    curves = {
        key: [(row["epoch"], row[key]) for row in rows if row.get(key) is not None]
        for key in labels
    }
    curves = {key: curve for key, curve in curves.items() if curve}
    with picture(path, 6.4, 1.9 * len(curves) + 0.5) as figure:
        grid = figure.subplots(len(curves), 1, sharex=True)
        for axes, (key, curve) in zip(grid, curves.items(), strict=True):
            axes.plot(*zip(*curve, strict=True), "o-", markersize=3.5)
            axes.set_ylabel(labels[key])
            if key in ("margin", "valid_eer_percent"):
                # From 0: a level curve does not magnify the last digit.
                axes.set_ylim(bottom=0)
            if key == "lr":
                axes.set_yscale("log")
            if key == "valid_eer_percent":
                epoch, lowest = min(curve, key=lambda point: point[1])
                axes.set_title(f"lowest {lowest:.2f} % in epoch {epoch}")
        grid[-1].set_xlabel("epoch")
        # One epoch, too, stands at a whole number.
        grid[-1].set_xlim(rows[0]["epoch"] - 0.5, rows[-1]["epoch"] + 0.5)
        grid[-1].locator_params(axis="x", integer=True, min_n_ticks=1)


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
    performance", Eurospeech 1997. It meets the dotted line at its EER.

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
    # Equal error rates, interpolated as ``scoring.eer`` does.
    eers = {
        name: float(np.interp(0.0, curve.miss - curve.false_alarm, curve.miss))
        for name, curve in curves.items()
    }
    # Rates of a twentieth of the EER rest on few errors.
    low = min(max(min(eers.values()) / 20, 1e-5), 0.02)
    high = min(max(0.5, 2 * max(eers.values())), 0.9)
    ticks = [tick for tick in _RATE_TICKS_PERCENT if low <= tick / 100 <= high]
    with picture(path, 6.0, 5.8 + 0.2 * len(curves)) as figure:
        axes = figure.add_subplot(box_aspect=1)
        ends = _deviates([low, high])
        axes.plot(ends, ends, color=FAINT, lw=0.8, ls=":")
        for name, curve in curves.items():
            # Rates of zero lie at minus infinity; just outside the axes does as well.
            rates = np.clip([curve.false_alarm, curve.miss], low / 10, 1 - low / 10)
            axes.plot(*_deviates(rates), label=f"{name}: EER {100 * eers[name]:.2f} %")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(_deviates(np.divide(ticks, 100)), [f"{t:g}" for t in ticks])
        axes.set_xlabel("false alarms: impostor trials accepted, %")
        axes.set_ylabel("misses: target trials refused, %")
        axes.axis((*ends, *ends))


def _deviates(fractions: ArrayLike) -> NDArray[np.float64]:
    """Map fractions to normal deviates."""
    # The other pictures do without torch, which takes seconds to import.
    import torch

    rates = torch.tensor(fractions, dtype=torch.float64)
    deviates: NDArray[np.float64] = torch.special.ndtri(rates).numpy()
    return deviates
