import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from speechbrain.utils.metric_stats import EER, minDCF

from speechbrain_rev.scoring import det_curve, eer, min_dcf

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


def rates_by_counting(scores, labels, threshold):
    accepted = scores >= threshold
    return accepted[labels == 0].mean(), (~accepted[labels == 1]).mean()


def points_by_counting(scores, labels):
    thresholds = [*sorted(set(scores)), np.inf]
    return [rates_by_counting(scores, labels, threshold) for threshold in thresholds]


@given(scored_trials())
@settings(deadline=None)
def test_det_points_are_those_of_counting_at_every_distinct_score(trials):
    scores, labels = trials
    curve = det_curve(scores, labels)
    assert curve.thresholds.tolist() == [*sorted(set(scores)), np.inf]
    np.testing.assert_allclose(
        np.stack([curve.false_alarm, curve.miss], axis=1),
        points_by_counting(scores, labels),
        rtol=1e-15,
    )


@given(scored_trials())
@settings(deadline=None)
def test_eer_is_where_the_line_through_the_points_meets_the_diagonal(trials):
    scores, labels = trials
    points = points_by_counting(scores, labels)
    rate = eer(scores, labels)
    for (fa, miss), (next_fa, next_miss) in itertools.pairwise(points):
        if fa - miss > 0 >= next_fa - next_miss:
            # Both rates run linearly between the points, and must meet in the rate.
            share = (fa - miss) / ((fa - miss) - (next_fa - next_miss))
            assert rate == pytest.approx(fa + share * (next_fa - fa), abs=1e-12)
            assert rate == pytest.approx(miss + share * (next_miss - miss), abs=1e-12)
            return
    pytest.fail("the points never cross the diagonal")


@given(scored_trials(), st.floats(0.001, 0.999), st.floats(0.1, 10))
@settings(deadline=None)
def test_min_dcf_is_the_lowest_cost_of_counting(trials, p_target, c_miss):
    scores, labels = trials
    costs = [
        c_miss * p_target * miss + (1 - p_target) * fa
        for fa, miss in points_by_counting(scores, labels)
    ]
    lowest = min(costs) / min(c_miss * p_target, 1 - p_target)
    cost = min_dcf(scores, labels, p_target=p_target, c_miss=c_miss)
    assert cost == pytest.approx(lowest, rel=1e-12)
    assert 0 <= cost <= 1 + 1e-12


@given(scored_trials(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_trials_does_not_matter(trials, random):
    scores, labels = trials
    order = list(range(len(scores)))
    random.shuffle(order)
    assert eer(scores[order], labels[order]) == eer(scores, labels)
    assert min_dcf(scores[order], labels[order]) == min_dcf(scores, labels)


@given(scored_trials())
@settings(deadline=None)
def test_eer_is_the_same_with_classes_swapped_and_scores_turned(trials):
    scores, labels = trials
    assert eer(-scores, 1 - labels) == pytest.approx(eer(scores, labels), abs=1e-12)


@given(scored_trials(tied_scores))
@settings(deadline=None)
def test_a_rising_change_of_all_scores_changes_nothing(trials):
    scores, labels = trials
    assert eer(np.exp(scores), labels) == eer(scores, labels)
    assert min_dcf(5 * scores - 2, labels) == min_dcf(scores, labels)


def test_scores_that_are_all_equal_tell_nothing():
    labels = [0, 1, 1, 0, 1]
    assert eer([0.5] * 5, labels) == 0.5
    assert min_dcf([0.5] * 5, labels) == 1.0


def test_a_tie_between_the_classes_is_one_threshold():
    # Split in either order, the tie at 0.5 would give 0 or 0.5.
    scores = [0.9, 0.5, 0.5, 0.1]
    for labels in ([1, 1, 0, 0], [1, 0, 1, 0]):
        assert eer(scores, labels) == 0.25


def test_perfect_and_reversed_scores_have_the_extreme_rates():
    assert eer([1.0, 2.0, 3.0], [0, 0, 1]) == 0.0
    assert eer([3.0, 2.0, 1.0], [0, 0, 1]) == 1.0
    assert min_dcf([1.0, 2.0, 3.0], [0, 0, 1]) == 0.0
    assert min_dcf([3.0, 2.0, 1.0], [0, 0, 1]) == 1.0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ties", [False, True])
def test_eer_agrees_with_speechbrain_within_half_the_gap_of_the_rates(seed, ties):
    rng = np.random.default_rng(seed)
    labels = np.append(rng.integers(0, 2, size=60), [0, 1])
    scores = rng.normal(size=62) + labels
    scores = scores.round(1 if ties else 6)
    theirs, threshold = EER(
        torch.tensor(scores[labels == 1]), torch.tensor(scores[labels == 0])
    )
    # SpeechBrain accepts above its threshold only, and may put it at a score.
    false_alarm = (scores[labels == 0] > threshold).mean()
    miss = (scores[labels == 1] <= threshold).mean()
    gap = abs(false_alarm - miss)
    # Its rates are float32, whose rounding is 6e-8.
    assert abs(eer(scores, labels) - theirs) <= gap / 2 + 1e-7
    if not ties:
        assert gap < 0.05


@pytest.mark.parametrize("seed", range(10))
def test_eer_equals_speechbrains_where_the_rates_meet_in_a_point(seed):
    rng = np.random.default_rng(seed)
    targets, impostors = rng.normal(1, 1, size=40), rng.normal(0, 1, size=40)
    scores = np.append(targets, impostors)
    labels = np.repeat([1, 0], 40)
    # As many trials of either kind without ties: some threshold has equal counts.
    theirs, _ = EER(torch.tensor(targets), torch.tensor(impostors))
    assert eer(scores, labels) == pytest.approx(theirs, abs=1e-7)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("p_target", [0.01, 0.05, 0.5])
def test_min_dcf_is_speechbrains_divided_by_that_of_refusing_all(seed, ties, p_target):
    rng = np.random.default_rng(seed)
    labels = np.append(rng.integers(0, 2, size=60), [0, 1])
    scores = (rng.normal(size=62) + 2 * labels).round(1 if ties else 6)
    theirs, _ = minDCF(
        torch.tensor(scores[labels == 1]),
        torch.tensor(scores[labels == 0]),
        p_target=p_target,
    )
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
        ([0.1, np.nan, np.nan], [0, 1, 1], r"scores\[1\] \(and 1 more\) of 3.*NaN"),
        ([0.1, np.inf], [0, 1], r"scores\[1\] of 2 holds NaN or infinity"),
        ([0.1, 0.2], [0, 1, 1], "scores 2, labels 3"),
        ([0.1, 0.2], [1, 1], "2 labels, all of them 1"),
        ([0.1, 0.2], [0, 0], "2 labels, all of them 0"),
        ([0.1, 0.2], [0, 2], r"labels\[1\] of 2 holds a label that is neither 1"),
        ([0.1, 0.2], [0, np.nan], "neither 1"),
        ([0.1, 0.2], [-1, 1], "neither 1"),
        ([[0.1], [0.2]], [0, 1], r"scores has shape \[2, 1\]"),
        ([0.1, 0.2], [[0, 1]], r"labels has shape \[1, 2\]"),
        ([], [], "at least one"),
        ([0.1, 0.2], ["0", "1"], "real numbers"),
    ],
)
def test_trials_without_a_meaning_are_refused(metric, scores, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(scores, labels)


@pytest.mark.parametrize(
    "wrong",
    [
        {"p_target": 0.0},
        {"p_target": 1.0},
        {"p_target": float("nan")},
        {"c_miss": 0.0},
        {"c_false_alarm": -1.0},
        {"c_miss": float("inf")},
    ],
)
def test_costs_without_a_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        min_dcf([0.1, 0.2], [0, 1], **wrong)


def test_tensors_and_booleans_are_taken():
    scores = torch.tensor([0.9, 0.4, 0.6, 0.1], requires_grad=True)
    labels = torch.tensor([True, True, False, False])
    assert eer(scores, labels) == eer(scores.tolist(), [1, 1, 0, 0]) == 0.5


def rates_at(threshold, scores, labels):
    accepted = np.asarray(scores) >= threshold
    labels = np.asarray(labels, dtype=bool)
    return float(accepted[~labels].mean()), float((~accepted[labels]).mean())


@pytest.mark.parametrize("seed", range(20))
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


def test_a_threshold_between_neighbours_among_floats_decides_as_its_point():
    low, high = 0.5, np.nextafter(0.5, 1)
    threshold = det_curve([low, high], [0, 1]).eer_threshold()
    assert rates_at(threshold, [low, high], [0, 1]) == (0.0, 0.0)


def test_where_refusing_all_is_cheapest_no_threshold_is_finite():
    assert det_curve([0.9, 0.1], [0, 1]).min_dcf_threshold() == np.inf
    assert np.isfinite(det_curve([0.5, 0.5], [0, 1]).eer_threshold())
