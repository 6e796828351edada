"""Equal error rate, detection cost and DET curve, by sorting the scores once.

A measure is a row of ``MEASURES``: tables, results.json, intervals and model cards show
what stands there.

A trial is accepted when its score reaches the threshold. Trials of equal score are
accepted or refused together, whichever kind they are: no threshold can separate
them, so their order must not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechbrain_rev.scoring.arrays import as_labels, as_values, same_length


@dataclass(frozen=True, eq=False)
class DetCurve:
    """The error rates at every threshold that makes a difference.

    Parameters
    ----------
    thresholds : numpy.ndarray, [points]
        Rising; a trial is accepted when its score is at least this. The first is the
        lowest score (all accepted), the last is infinity (none).
    false_alarm : numpy.ndarray, [points]
        Fraction of impostor trials accepted, falling from 1 to 0.
    miss : numpy.ndarray, [points]
        Fraction of target trials refused, rising from 0 to 1.

    Example
    -------
    >>> curve = det_curve([0.9, 0.1], [1, 0])
    >>> curve.thresholds.tolist(), curve.false_alarm.tolist(), curve.miss.tolist()
    ([0.1, 0.9, inf], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0])
    """

    thresholds: NDArray[np.float64]
    false_alarm: NDArray[np.float64]
    miss: NDArray[np.float64]

    def eer(self) -> float:
        """Compute the equal error rate, as :func:`eer`."""
        excess = self.miss - self.false_alarm
        # It rises from -1 to 1, so a sign change always lies between two points.
        after = int(np.searchsorted(excess, 0.0))
        before = after - 1
        share = -excess[before] / (excess[after] - excess[before])
        return float(self.miss[before] + share * (self.miss[after] - self.miss[before]))

    def eer_threshold(self) -> float:
        """Return the threshold whose two error rates are nearest to each other.

        Scores of trials lie on either side of it, not on it, so that rounding moves none
        across; all thresholds between the same two scores decide alike.

        Example
        -------
        >>> det_curve([0.9, 0.4, 0.6, 0.1], [1, 1, 0, 0]).eer_threshold()
        0.5
        """
        # Of equals the first, which is finite: one of the two ends is never nearer.
        return self._threshold(int(np.abs(self.miss - self.false_alarm).argmin()))

    def min_dcf(
        self,
        *,
        p_target: float = 0.01,
        c_miss: float = 1.0,
        c_false_alarm: float = 1.0,
    ) -> float:
        """Compute the lowest detection cost, as :func:`min_dcf`."""
        return float(self._costs(p_target, c_miss, c_false_alarm).min())

    def min_dcf_threshold(
        self,
        *,
        p_target: float = 0.01,
        c_miss: float = 1.0,
        c_false_alarm: float = 1.0,
    ) -> float:
        """Return the threshold of the lowest detection cost.

        It lies between scores, as that of ``eer_threshold``; it is infinite where
        refusing all trials is cheapest.

        Example
        -------
        >>> curve = det_curve([0.9, 0.8, 0.6, 0.1], [1, 1, 0, 0])
        >>> round(curve.min_dcf_threshold(), 6)
        0.7
        """
        costs = self._costs(p_target, c_miss, c_false_alarm)
        return self._threshold(int(costs.argmin()))

    def _threshold(self, point: int) -> float:
        high = self.thresholds[point]
        if point == 0 or np.isinf(high):
            return float(high)
        low = self.thresholds[point - 1]
        between = low / 2 + high / 2
        # Between neighbours among floats there is none.
        return float(between if low < between else high)

    def _costs(
        self, p_target: float, c_miss: float, c_false_alarm: float
    ) -> NDArray[np.float64]:
        """Compute the normalised detection cost of every point."""
        if not 0.0 < p_target < 1.0:
            raise ValueError(
                f"p_target is {p_target}; it is a probability and must lie between 0 "
                f"and 1 (0.01 and 0.05 are usual)."
            )
        if not (0.0 < c_miss < np.inf and 0.0 < c_false_alarm < np.inf):
            raise ValueError(
                f"c_miss is {c_miss} and c_false_alarm {c_false_alarm}; costs must be "
                f"positive and finite."
            )
        miss_weight = c_miss * p_target
        false_alarm_weight = c_false_alarm * (1.0 - p_target)
        cost = miss_weight * self.miss + false_alarm_weight * self.false_alarm
        normalised: NDArray[np.float64] = cost / min(miss_weight, false_alarm_weight)
        return normalised


def det_curve(scores: ArrayLike, labels: ArrayLike) -> DetCurve:
    """Compute the detection error tradeoff of scored trials.

    Parameters
    ----------
    scores : array-like, [trials]
        Higher means more alike.
    labels : array-like, [trials]
        1 where both sides are one speaker, 0 where not.

    Returns
    -------
    DetCurve
        One point per distinct score, and one more for refusing all.

    Raises
    ------
    ValueError
        If the lengths differ, a score is not finite, a label is neither 0 nor 1, or
        only one kind of label is present.

    Example
    -------
    >>> det_curve([0.2, 0.2, 0.7], [0, 1, 1]).miss.tolist()
    [0.0, 0.5, 1.0]
    """
    score, label = as_values("scores", scores), as_labels("labels", labels)
    same_length(scores=score, labels=label)
    order = np.argsort(score)
    score, label = score[order], label[order]
    is_last_of_equals = np.append(score[1:] != score[:-1], True)
    refused = np.flatnonzero(is_last_of_equals) + 1
    refused_targets = label.cumsum(dtype=np.int64)[refused - 1]
    refused_impostors = refused - refused_targets
    targets = refused_targets[-1]
    impostors = refused_impostors[-1]
    return DetCurve(
        thresholds=np.append(score[is_last_of_equals], np.inf),
        false_alarm=np.append(impostors, impostors - refused_impostors) / impostors,
        miss=np.append(0, refused_targets) / targets,
    )


def eer(scores: ArrayLike, labels: ArrayLike) -> float:
    """Compute the equal error rate.

    It is where the line through the points of the DET curve has as many misses as
    false alarms. Between two points it is interpolated, as in WeSpeaker. Kaldi's
    ``compute-eer`` takes the rate of false alarms at the nearest point, and SpeechBrain's
    ``EER`` the middle of both rates there; the latter differs from the interpolated one by
    at most half the gap between the rates.

    Parameters
    ----------
    scores : array-like, [trials]
        Higher means more alike.
    labels : array-like, [trials]
        1 where both sides are one speaker, 0 where not.

    Returns
    -------
    float
        A fraction from 0 to 1; multiply by 100 to print percent.

    Raises
    ------
    ValueError
        As :func:`det_curve`.

    Example
    -------
    >>> eer([0.9, 0.4, 0.6, 0.1], [1, 1, 0, 0])
    0.5
    """
    return det_curve(scores, labels).eer()


def min_dcf(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    p_target: float = 0.01,
    c_miss: float = 1.0,
    c_false_alarm: float = 1.0,
) -> float:
    """Compute the lowest normalised detection cost over all thresholds.

    The cost ``c_miss * p_target * miss + c_false_alarm * (1 - p_target) *
    false_alarm`` is divided by that of the better of accepting all and refusing all,
    as in the NIST evaluations: 1 is as good as chance. (SpeechBrain's
    ``minDCF`` is not divided.)

    Parameters
    ----------
    scores : array-like, [trials]
        Higher means more alike.
    labels : array-like, [trials]
        1 where both sides are one speaker, 0 where not.
    p_target : float
        Prior probability of a target trial, between 0 and 1.
    c_miss, c_false_alarm : float
        Cost of either error, positive.

    Returns
    -------
    float
        From 0 to 1.

    Raises
    ------
    ValueError
        If ``p_target`` or a cost is out of range, or as :func:`det_curve`.

    Example
    -------
    >>> min_dcf([0.9, 0.8, 0.6, 0.1], [1, 0, 1, 0], p_target=0.5)
    0.5
    """
    return det_curve(scores, labels).min_dcf(
        p_target=p_target, c_miss=c_miss, c_false_alarm=c_false_alarm
    )


@dataclass(frozen=True)
class Measure:
    """One measure of how well scores separate speakers.

    Parameters
    ----------
    key : str
        Key in results.json.
    heading : str
        Heading in tables; also the name of its threshold.
    of : callable
        Function of a :class:`DetCurve`. A curve holds the distributions of both
        kinds of scores, so a measure of the scores themselves can be computed as well.
    digits : int
        Digits after the point.
    percent : bool
        Whether it is a fraction that is shown in percent.
    p_target : float or None
        Prior probability of a target trial. It separates measures of one key.
    threshold : callable or None
        From a :class:`DetCurve` to the score from which on trials are accepted at this
        point; None if the measure is of no one point.
    bootstrapped : bool
        Whether an interval is computed from speakers drawn with replacement.

    Example
    -------
    >>> measure = MEASURES["min_dcf_0.01"]
    >>> row = {"min_dcf": {"0.01": 0.25}, "min_dcf_95": {"0.01": [0.125, 0.5]}}
    >>> measure.column, measure.shown(row)
    ('minDCF(0.01)', '0.250 [0.125, 0.500]')
    """

    key: str
    heading: str
    of: Callable[[DetCurve], float]
    digits: int = 3
    percent: bool = False
    p_target: float | None = None
    threshold: Callable[[DetCurve], float] | None = None
    bootstrapped: bool = True

    @property
    def name(self) -> str:
        """Name in ``MEASURES``."""
        return self.key if self.p_target is None else f"{self.key}_{self.p_target}"

    @property
    def column(self) -> str:
        """Heading with its unit."""
        return f"{self.heading} %" if self.percent else self.heading

    def figure(self, row: Mapping[str, Any], ending: str = "") -> Any:
        """Return this measure's figure in a row of results.json; None without one.

        Parameters
        ----------
        row : mapping of str to object
            A row of ``results``.
        ending : str
            Of the key: ``"_95"`` for the interval.

        Raises
        ------
        ValueError
            If the figures of all priors are not a mapping.
        """
        figures = row.get(f"{self.key}{ending}")
        if self.p_target is None or figures is None:
            return figures
        if not isinstance(figures, Mapping):
            raise ValueError(f"{self.key}{ending} has no figure for each prior")
        return figures.get(str(self.p_target))

    def text(self, figure: float) -> str:
        """Write a figure as tables show it, without its unit."""
        return f"{(100 if self.percent else 1) * figure:.{self.digits}f}"

    def shown(self, row: Mapping[str, Any]) -> str:
        """Write the figure of a row of results.json, its interval in brackets."""
        figure, bounds = self.figure(row), self.figure(row, "_95")
        if figure is None:
            return ""
        if bounds is None:
            return self.text(figure)
        return f"{self.text(figure)} [{', '.join(map(self.text, bounds))}]"


def lowest_cost(p_target: float) -> Measure:
    """Make the row of the lowest detection cost at a prior.

    Parameters
    ----------
    p_target : float
        Prior probability of a target trial, between 0 and 1.

    Returns
    -------
    Measure
        Named as ``min_dcf_0.01``.

    Example
    -------
    >>> lowest_cost(0.5).of(det_curve([0.9, 0.8, 0.6, 0.1], [1, 0, 1, 0]))
    0.5
    """
    return Measure(
        "min_dcf",
        f"minDCF({p_target})",
        partial(DetCurve.min_dcf, p_target=p_target),
        p_target=p_target,
        threshold=partial(DetCurve.min_dcf_threshold, p_target=p_target),
    )


_ROWS = (
    Measure(
        "eer",
        "EER",
        DetCurve.eer,
        digits=2,
        percent=True,
        threshold=DetCurve.eer_threshold,
    ),
    lowest_cost(0.01),
    lowest_cost(0.05),
)
#: Every measure that is computed of a scored trial list, by name, in the order shown.
MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ROWS}


def measured(curve: DetCurve) -> dict[str, Any]:
    """Compute all measures of a scored list, as a row of results.json has them.

    Parameters
    ----------
    curve : DetCurve
        Of the list.

    Returns
    -------
    dict of str to object
        Figures by key, or by key and prior; and ``thresholds`` by heading, None where
        refusing all is cheapest.

    Example
    -------
    >>> row = measured(det_curve([0.9, 0.4, 0.6, 0.1], [1, 1, 0, 0]))
    >>> row["eer"], row["min_dcf"], row["thresholds"]["EER"]
    (0.5, {'0.01': 0.5, '0.05': 0.5}, 0.5)
    """
    cuts = {m.heading: m.threshold(curve) for m in MEASURES.values() if m.threshold}
    return {
        **as_row({measure: measure.of(curve) for measure in MEASURES.values()}),
        "thresholds": {n: None if np.isinf(cut) else cut for n, cut in cuts.items()},
    }


def as_row(figures: Mapping[Measure, object], ending: str = "") -> dict[str, Any]:
    """Lay figures out as a row of results.json has them.

    Parameters
    ----------
    figures : mapping of Measure to object
        What each measure gave.
    ending : str
        Of the keys: ``"_95"`` for intervals.

    Returns
    -------
    dict of str to object
        By key, or by key and prior.

    Example
    -------
    >>> as_row({MEASURES["eer"]: [0.1, 0.2], lowest_cost(0.01): [0.5, 0.625]}, "_95")
    {'eer_95': [0.1, 0.2], 'min_dcf_95': {'0.01': [0.5, 0.625]}}
    """
    row: dict[str, Any] = {}
    for measure, figure in figures.items():
        key = f"{measure.key}{ending}"
        if measure.p_target is None:
            row[key] = figure
        else:
            row.setdefault(key, {})[str(measure.p_target)] = figure
    return row


def measures_in(rows: Iterable[Mapping[str, Any]]) -> list[Measure]:
    """List the measures of which any of some rows of results.json has a figure.

    Parameters
    ----------
    rows : iterable of mappings
        What ``results`` of results.json holds.

    Returns
    -------
    list of Measure
        In the order of ``MEASURES``: the columns of a table.

    Example
    -------
    >>> [measure.column for measure in measures_in([{"eer": 0.5}])]
    ['EER %']
    """
    listed = list(rows)
    return [
        measure
        for measure in MEASURES.values()
        if any(measure.figure(row) is not None for row in listed)
    ]
