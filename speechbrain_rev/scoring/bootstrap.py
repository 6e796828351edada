"""Bootstrap intervals: the error rates of other speakers.

Trials are not independent: each speaker is in many of them. Therefore speakers are
drawn, not trials, as in Poh and Bengio, "Estimating the confidence interval of expected performance
curve in biometric authentication using joint bootstrap", ICASSP 2007. A speaker who was
drawn n times counts n times; a trial of two speakers as often as both were drawn together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechbrain_rev.bars import LONG_SECONDS, progress_bar
from speechbrain_rev.scoring.arrays import as_labels, as_values, same_length
from speechbrain_rev.scoring.metrics import (
    MEASURES,
    DetCurve,
    Measure,
    as_row,
    lowest_cost,
)

# Draws in a row without a target or an impostor trial, after which it is given up.
_MOST_EMPTY = 1000
# Of two, all draws with trials of both kinds are one: an interval of no width.
_FEWEST_SPEAKERS = 3


@dataclass(frozen=True, eq=False)
class BootstrapRates:
    """Measures of a trial list in each draw of its speakers.

    Parameters
    ----------
    draws : dict of Measure to numpy.ndarray, [replicates]
        Figures of each measure that is bootstrapped.
    thresholds : dict of Measure to numpy.ndarray, [replicates]
        The score from which on trials are accepted at the measure's point; infinite where
        refusing all is cheapest.

    Example
    -------
    >>> rates = BootstrapRates({MEASURES["eer"]: np.array([0.1, 0.2, 0.3])})
    >>> [round(bound, 3) for bound in interval(rates.eer, confidence=0.5)]
    [0.15, 0.25]
    """

    draws: dict[Measure, NDArray[np.float64]]
    thresholds: dict[Measure, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def eer(self) -> NDArray[np.float64]:
        """Equal error rates, as fractions, [replicates]."""
        return self.draws[MEASURES["eer"]]

    @property
    def min_dcf(self) -> dict[float, NDArray[np.float64]]:
        """Lowest detection costs, [replicates] each, by prior of a target."""
        return {
            measure.p_target: draws
            for measure, draws in self.draws.items()
            if measure.key == "min_dcf" and measure.p_target is not None
        }

    def intervals(self) -> dict[str, Any]:
        """Return 95 % intervals as a row of results.json has them.

        Example
        -------
        >>> BootstrapRates({MEASURES["eer"]: np.full(3, 0.25)}).intervals()
        {'eer_95': [0.25, 0.25], 'thresholds_95': {}}
        """
        bounds = {row: list(interval(draws)) for row, draws in self.draws.items()}
        cuts = {
            row.heading: list(interval(draws))
            for row, draws in self.thresholds.items()
            if np.isfinite(draws).all()
        }
        return {**as_row(bounds, "_95"), "thresholds_95": cuts}


def bootstrap(
    scores: ArrayLike,
    labels: ArrayLike,
    enrol_speakers: Sequence[str],
    test_speakers: Sequence[str],
    *,
    p_targets: Sequence[float] = (),
    replicates: int = 1000,
    seed: int = 0,
) -> BootstrapRates:
    """Compute all measures again and again, with speakers drawn with replacement.

    Scores are sorted once; each replicate takes time in proportion to the trials, and no
    memory beyond them.

    Parameters
    ----------
    scores : array-like, [trials]
        Higher means more alike.
    labels : array-like, [trials]
        1 where both sides are one speaker, 0 where not.
    enrol_speakers, test_speakers : sequence of str, [trials]
        Who speaks on either side of each trial.
    p_targets : sequence of float
        Prior probabilities of a target, for detection costs beside those of
        ``MEASURES``.
    replicates : int
        Number of draws.
    seed : int
        Of the draws. Equal seeds draw equal speakers, whatever the scores: differences
        between two systems may be taken replicate by replicate.

    Returns
    -------
    BootstrapRates
        Of each replicate.

    Raises
    ------
    ValueError
        If the lengths differ, a label does not say whether its two speakers are one,
        there are fewer than three speakers or two replicates, or as :func:`det_curve`.

    Example
    -------
    >>> rates = bootstrap(
    ...     [0.9, 0.2, 0.7, 0.3], [1, 0, 1, 0], "aabb", "abbc", replicates=20
    ... )
    >>> float(rates.eer.max())
    0.0
    """
    score, label = as_values("scores", scores), as_labels("labels", labels)
    names = np.array([*enrol_speakers, *test_speakers], dtype=str)
    count, speaker = np.unique(names, return_inverse=True)
    enrol, test = speaker[: len(enrol_speakers)], speaker[len(enrol_speakers) :]
    same_length(scores=score, labels=label, enrol_speakers=enrol, test_speakers=test)
    _check(label, enrol, test, names, replicates)
    order = np.argsort(score)
    score, is_target = score[order], label[order].astype(bool)
    enrol, test = enrol[order], test[order]
    points = np.flatnonzero(np.append(score[1:] != score[:-1], True))
    draws = np.random.default_rng(seed)
    rows = MEASURES | {row.name: row for row in map(lowest_cost, p_targets)}
    rates = {row: np.empty(replicates) for row in rows.values() if row.bootstrapped}
    cuts = {row: np.empty(replicates) for row in rates if row.threshold is not None}
    for i in progress_bar(
        "bootstrap", range(replicates), unit="draw", delay=LONG_SECONDS
    ):
        curve = _drawn(draws, len(count), is_target, enrol, test, score, points)
        for measure, figures in rates.items():
            figures[i] = measure.of(curve)
        for measure, scores_at in cuts.items():
            assert measure.threshold is not None
            scores_at[i] = measure.threshold(curve)
    return BootstrapRates(rates, cuts)


def interval(
    rates: NDArray[np.float64], *, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the percentile interval of a bootstrapped rate.

    Parameters
    ----------
    rates : numpy.ndarray, [replicates]
        Rates of a :class:`BootstrapRates`, or differences of such.
    confidence : float
        Share of the replicates inside, between 0 and 1.

    Returns
    -------
    low, high : float
        In the unit of the rates.

    Raises
    ------
    ValueError
        If the confidence is not between 0 and 1.

    Example
    -------
    >>> [round(bound, 3) for bound in interval(np.linspace(0, 1, 101))]
    [0.025, 0.975]
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(
            f"confidence is {confidence}; it must lie between 0 and 1, as 0.95 does."
        )
    outside = (1 - confidence) / 2
    low, high = np.quantile(rates, [outside, 1 - outside])
    return float(low), float(high)


def _drawn(
    draws: np.random.Generator,
    speakers: int,
    is_target: NDArray[np.bool_],
    enrol: NDArray[np.int64],
    test: NDArray[np.int64],
    score: NDArray[np.float64],
    points: NDArray[np.int64],
) -> DetCurve:
    """Draw speakers until both kinds of trials are there; sum up their sorted trials."""
    for _ in range(_MOST_EMPTY):
        drawn = np.bincount(draws.integers(speakers, size=speakers), minlength=speakers)
        weight = drawn[enrol]
        targets = np.where(is_target, weight, 0).cumsum()[points]
        impostors = np.where(is_target, 0, weight * drawn[test]).cumsum()[points]
        if targets[-1] and impostors[-1]:
            return DetCurve(
                np.append(score[points], np.inf),
                (impostors[-1] - np.append(0, impostors)) / impostors[-1],
                np.append(0, targets) / targets[-1],
            )
    raise ValueError(
        f"{_MOST_EMPTY} draws of {speakers} speakers had no target or no impostor trial: "
        "too few speakers have both. Give a list with more, or do without intervals."
    )


def _check(
    label: NDArray[np.int8],
    enrol: NDArray[np.int64],
    test: NDArray[np.int64],
    names: NDArray[np.str_],
    replicates: int,
) -> None:
    if type(replicates) is not int or replicates < 2:
        raise ValueError(
            f"replicates is {replicates!r}; a spread needs a whole number of at least 2."
        )
    wrong = np.flatnonzero((enrol == test) != label.astype(bool))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"labels[{row}] is {label[row]}, but its speakers are {str(names[row])!r} and "
            f"{str(names[len(label) + row])!r}. Give the speaker of each side, or do "
            "without intervals."
        )
    speakers = len({*enrol.tolist(), *test.tolist()})
    if speakers < _FEWEST_SPEAKERS:
        raise ValueError(
            f"the list has {speakers} speaker(s), of whom each draw has the same trials. "
            f"An interval takes {_FEWEST_SPEAKERS} or more: give a longer list, or do "
            "without intervals."
        )
