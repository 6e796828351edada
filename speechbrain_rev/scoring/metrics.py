"""Equal error rate, detection cost and DET curve, by sorting the scores once.

A trial is accepted when its score reaches the threshold. Trials of equal score are
accepted or refused together, whichever kind they are: no threshold can tell them
apart, so an order among them that happens to be kind must not count.
"""

from dataclasses import dataclass

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
        """Give the threshold whose two error rates are nearest to each other.

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
        """Give the threshold of the lowest detection cost.

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
    as in the NIST evaluations: 1 is as good as not listening. (SpeechBrain's
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
