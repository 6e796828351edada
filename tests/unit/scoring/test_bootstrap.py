"""Intervals of error rates: of speakers that are drawn, as if their trials were repeated."""

import numpy as np
import pytest

from speechbrain_rev.scoring import bootstrap, det_curve, eer, interval, min_dcf

SPEAKERS = 7


class Listed:
    """Trials between all utterances of some speakers, whose scores overlap and tie.

    Speakers are as easily known as they are.
    """

    def __init__(self, seed=0, *, speakers=SPEAKERS, utterances=4):
        draws = np.random.default_rng(seed)
        ease = 2 + draws.standard_normal(speakers)
        owners = np.repeat(np.arange(speakers), utterances)
        rows = [(a, b) for a in range(len(owners)) for b in range(a)]
        self.enrol, self.test = (
            [f"id{owners[pair[side]]}" for pair in rows] for side in (0, 1)
        )
        self.labels = np.array(
            [int(a == b) for a, b in zip(self.enrol, self.test, strict=True)]
        )
        known = self.labels * ease[[owners[a] for a, _ in rows]]
        self.scores = (known + draws.standard_normal(len(rows))).round(1)

    def bootstrap(self, **how):
        given = self.scores, self.labels, self.enrol, self.test
        return bootstrap(*given, **({"replicates": 30} | how))


def repeated(listed, drawn):
    """The list with each trial as often as its speakers were drawn."""
    counts = [
        drawn[int(a[2:])] * (1 if label else drawn[int(b[2:])])
        for a, b, label in zip(listed.enrol, listed.test, listed.labels, strict=True)
    ]
    return np.repeat(listed.scores, counts), np.repeat(listed.labels, counts)


def test_rates_are_those_of_trials_that_are_repeated():
    listed = Listed()
    rates = listed.bootstrap(seed=5)
    draws = np.random.default_rng(5)
    for i in range(30):
        drawn = np.bincount(draws.integers(SPEAKERS, size=SPEAKERS), minlength=SPEAKERS)
        scores, labels = repeated(listed, drawn)
        assert rates.eer[i] == pytest.approx(eer(scores, labels), abs=1e-12)
        for p in (0.01, 0.05):
            expected = min_dcf(scores, labels, p_target=p)
            assert rates.min_dcf[p][i] == pytest.approx(expected, abs=1e-12)


def test_equal_seeds_draw_equal_speakers_for_systems_to_be_compared():
    one, other = Listed(seed=1), Listed(seed=1)
    other.scores = -7 + 3 * other.scores
    assert np.array_equal(one.bootstrap().eer, other.bootstrap().eer)
    assert not np.array_equal(one.bootstrap().eer, one.bootstrap(seed=1).eer)


def test_an_interval_holds_the_rate_and_narrows_with_more_speakers():
    widths = []
    for speakers in (5, 25):
        listed = Listed(speakers=speakers)
        low, high = interval(listed.bootstrap(replicates=300).eer)
        assert low <= det_curve(listed.scores, listed.labels).eer() <= high
        widths.append(high - low)
    assert widths[1] < widths[0]


def test_intervals_are_as_wide_as_lists_of_other_speakers_differ():
    """Not of trials, which would be too narrow: ease belongs to the speaker."""
    lists = [Listed(seed, speakers=25, utterances=8) for seed in range(20)]
    spread = np.std([eer(x.scores, x.labels) for x in lists])
    width = np.mean([x.bootstrap(replicates=60).eer.std() for x in lists])
    assert 0.75 < width / spread < 1.5
    draws = np.random.default_rng(0)
    first = lists[0]
    rows = draws.integers(len(first.labels), size=(60, len(first.labels)))
    by_trials = np.std([eer(first.scores[r], first.labels[r]) for r in rows])
    assert by_trials < 0.6 * width


def test_draws_without_both_kinds_are_drawn_again():
    # Of three speakers some draws lack a, who alone has a target, or both b and c.
    rates = bootstrap([1.0, 0.0, 0.0], [1, 0, 0], "aaa", "abc", replicates=20)
    assert rates.eer.tolist() == [0.0] * 20


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"enrol": ["x"] * 3}, r"labels\[\d\] is|enrol_speakers"),
        ({"labels": [0, 1]}, r"labels\[0\] is 0.*'a' and 'a'"),
        ({"replicates": 1}, "at least 2"),
        ({"replicates": 10.5}, "a whole number of at least 2"),
        ({"scores": [1.0, np.nan]}, "NaN"),
        ({}, r"has 2 speaker\(s\), of whom each draw .* takes 3 or more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changed, message):
    given = {"scores": [1.0, 0.0], "labels": [1, 0], "enrol": "aa", "test": "ab"}
    given |= changed
    how = {"replicates": given.pop("replicates", 5)}
    with pytest.raises(ValueError, match=message):
        bootstrap(*given.values(), **how)


def test_a_confidence_that_is_none_is_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        interval(np.ones(3), confidence=95)
