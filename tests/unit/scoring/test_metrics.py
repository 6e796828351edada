"""Error rates, costs and thresholds against counting and SpeechBrain's."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from speechbrain.utils.metric_stats import EER, minDCF

from speechbrain_rev.scoring import det_curve, eer, min_dcf


def rates_at(threshold, scores, labels):
    accepted = np.asarray(scores) >= threshold
    labels = np.asarray(labels, dtype=bool)
    return accepted[~labels].mean(), (~accepted[labels]).mean()


# Few distinct values, so that most examples have ties within and across the classes.
tied_scores = st.integers(-3, 3).map(float)
free_scores = st.floats(-1e3, 1e3, allow_subnormal=False)


@st.composite
def scored_trials(draw, scores=st.one_of(tied_scores, free_scores)):  # noqa: B008
    size = draw(st.integers(2, 30))
    values = draw(st.lists(scores, min_size=size, max_size=size))
    labels = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    assume(0 < sum(labels) < size)
    return np.array(values), np.array(labels)


def points_by_counting(scores, labels):
    return [rates_at(t, scores, labels) for t in [*sorted(set(scores)), np.inf]]


@given(scored_trials(), st.floats(0.001, 0.999), st.floats(0.1, 10))
@settings(deadline=None)
def test_points_and_lowest_cost_are_those_of_counting(trials, p_target, c_miss):
    scores, labels = trials
    points = points_by_counting(scores, labels)
    curve = det_curve(scores, labels)
    assert curve.thresholds.tolist() == [*sorted(set(scores)), np.inf]
    counted = np.stack([curve.false_alarm, curve.miss], axis=1)
    np.testing.assert_allclose(counted, points, rtol=1e-15)
    costs = [c_miss * p_target * miss + (1 - p_target) * fa for fa, miss in points]
    lowest = min(costs) / min(c_miss * p_target, 1 - p_target)
    cost = min_dcf(scores, labels, p_target=p_target, c_miss=c_miss)
    assert cost == pytest.approx(lowest, rel=1e-12)
    assert 0 <= cost <= 1 + 1e-12


@given(scored_trials())
@settings(deadline=None)
def test_eer_is_where_the_line_through_the_points_meets_the_diagonal(trials):
    points = points_by_counting(*trials)
    rate = eer(*trials)
    for (fa, miss), (next_fa, next_miss) in itertools.pairwise(points):
        if fa - miss > 0 >= next_fa - next_miss:
            # Both rates run linearly between the points, and must meet in the rate.
            share = (fa - miss) / ((fa - miss) - (next_fa - next_miss))
            assert rate == pytest.approx(fa + share * (next_fa - fa), abs=1e-12)
            assert rate == pytest.approx(miss + share * (next_miss - miss), abs=1e-12)
            return
    pytest.fail("the points never cross the diagonal")


# Scores, labels, equal error rate and lowest cost.
EXTREMES = [
    ([0.5] * 5, [0, 1, 1, 0, 1], 0.5, 1.0),
    # Split in either order, a tie between the classes would give 0 or 0.5.
    ([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0], 0.25, 0.5),
    ([0.9, 0.5, 0.5, 0.1], [1, 0, 1, 0], 0.25, 0.5),
    ([1.0, 2.0, 3.0], [0, 0, 1], 0.0, 0.0),
    ([3.0, 2.0, 1.0], [0, 0, 1], 1.0, 1.0),
    (torch.tensor([0.9, 0.4], requires_grad=True), torch.tensor([False, True]), 1, 1),
]


@pytest.mark.parametrize(("scores", "labels", "rate", "cost"), EXTREMES)
def test_ties_tensors_perfect_and_reversed_scores_have_known_rates(
    scores, labels, rate, cost
):
    assert eer(scores, labels) == rate
    assert min_dcf(scores, labels) == cost


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
def test_rates_agree_with_speechbrains(seed, ties):
    rng = np.random.default_rng(seed)
    labels = np.append(rng.integers(0, 2, size=60), [0, 1])
    scores = (rng.normal(size=62) + labels).round(1 if ties else 6)
    given_scores = [torch.tensor(scores[labels == kind]) for kind in (1, 0)]
    theirs, threshold = EER(*given_scores)
    # SpeechBrain accepts above its threshold only, and may put it at a score.
    false_alarm = (scores[labels == 0] > threshold).mean()
    miss = (scores[labels == 1] <= threshold).mean()
    gap = abs(false_alarm - miss)
    # Its rates are float32, whose rounding is 6e-8.
    assert abs(eer(scores, labels) - theirs) <= gap / 2 + 1e-7
    assert ties or gap < 0.05
    for p_target in (0.01, 0.05, 0.5):
        # SpeechBrain's cost is not divided by that of refusing all.
        theirs, _ = minDCF(*given_scores, p_target=p_target)
        ours = min_dcf(scores, labels, p_target=p_target)
        assert ours == pytest.approx(theirs / p_target, rel=1e-5, abs=1e-6)


def test_voxceleb_sized_trials_are_scored_in_memory_of_their_own_size():
    rng = np.random.default_rng(0)
    trials = 580_000
    labels = rng.integers(0, 2, size=trials)
    # Normal scores two deviations apart cross at the normal tail beyond one.
    scores = rng.normal(size=trials) + 2 * labels
    tracemalloc.start()
    rate, cost = eer(scores, labels), min_dcf(scores, labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rate == pytest.approx(0.158655, abs=0.002)
    assert 0.8 < cost < 1
    # 20 float64 vectors of the trials' number; trials squared would be 1.3 TB.
    assert peak < 20 * 8 * trials


@pytest.mark.parametrize("metric", [det_curve, eer, min_dcf])
@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.1, np.nan, np.inf], [0, 1, 1], r"scores\[1\] \(and 1 more\) of 3.*NaN"),
        ([0.1, 0.2], [0, 1, 1], "scores 2, labels 3"),
        ([0.1, 0.2], [1, 1], "2 labels, all of them 1"),
        ([0.1, 0.2], [0, np.nan], r"labels\[1\] of 2 holds a label that is neither 1"),
        ([[0.1], [0.2]], [0, 1], r"scores has shape \[2, 1\]"),
        ([0.1, 0.2], [[0, 1]], r"labels has shape \[1, 2\]"),
        ([], [], "at least one"),
        ([0.1, 0.2], ["0", "1"], "real numbers"),
    ],
)
def test_trials_without_a_meaning_are_refused(metric, scores, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(scores, labels)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["p_target", "c_miss", "c_false_alarm"])
def test_costs_without_a_meaning_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        min_dcf([0.1, 0.2], [0, 1], **{name: value})


@pytest.mark.parametrize("seed", range(5))
def test_thresholds_are_those_of_the_points_they_are_named_after(seed):
    draw = np.random.default_rng(seed)
    labels = np.array([1, 0, *draw.integers(0, 2, 40)])
    # Rounded, so that some are equal.
    scores = (draw.standard_normal(42) + 1.5 * labels).round(1)
    curve = det_curve(scores, labels)
    false_alarm, miss = rates_at(curve.eer_threshold(), scores, labels)
    assert abs(false_alarm - miss) == np.abs(curve.false_alarm - curve.miss).min()
    for p in (0.01, 0.05, 0.5, 0.99):
        threshold = curve.min_dcf_threshold(p_target=p)
        false_alarm, miss = rates_at(threshold, scores, labels)
        cost = (p * miss + (1 - p) * false_alarm) / min(p, 1 - p)
        assert cost == pytest.approx(curve.min_dcf(p_target=p))
    assert curve.eer_threshold() not in scores[1:] or len(set(scores)) == 1


def test_thresholds_at_the_edges_decide_as_their_points():
    low, high = 0.5, np.nextafter(0.5, 1)
    threshold = det_curve([low, high], [0, 1]).eer_threshold()
    assert rates_at(threshold, [low, high], [0, 1]) == (0.0, 0.0)
    # Where refusing all is cheapest no threshold is finite.
    assert det_curve([0.9, 0.1], [0, 1]).min_dcf_threshold() == np.inf
    assert np.isfinite(det_curve([0.5, 0.5], [0, 1]).eer_threshold())
