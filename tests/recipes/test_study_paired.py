"""Comparisons of systems trained with several seeds, on made-up worlds with known truth."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tests.recipes.study import study

paired = study("paired")
SeedRates, holm = paired.SeedRates, paired.holm
rate_difference, rate_over_seeds = paired.rate_difference, paired.rate_over_seeds
detectable_margin = paired.detectable_margin

SPEAKERS, REPLICATES, WORLDS = 60, 400, 400
#: Where a share near one in 20 is told from one in 12.
MANY_WORLDS = 2000
#: Wider than any difference, where only the interval is looked at.
ANY = 1e9
# Standard error of a share of WORLDS, of one world in 20.
OF_20TH = np.sqrt(0.05 * 0.95 / WORLDS)


class World:
    """Rates that are means over speakers of normal parts whose deviations are given.

    Each speaker is as difficult for all systems; a system has speakers of its own, each
    of its seeds a rate of its own, and each seed speakers of its own.
    """

    def __init__(self, seed, *, seeds=5, by_system=0.0, by_seed=0.0, by_both=0.0):
        self.draws = np.random.default_rng(seed)
        self.parts = seeds, by_system, by_seed, by_both
        self.difficulty = 10 * self.draws.standard_normal(SPEAKERS)
        even = np.full(SPEAKERS, 1 / SPEAKERS)
        self.drawn = self.draws.multinomial(SPEAKERS, even, size=REPLICATES) / SPEAKERS

    def system(self):
        """Train another system that is as good."""
        seeds, by_system, by_seed, by_both = self.parts
        normal = self.draws.standard_normal
        rates = self.difficulty + by_system * normal(SPEAKERS)
        rates = (
            rates + by_seed * normal((seeds, 1)) + by_both * normal((seeds, SPEAKERS))
        )
        return SeedRates(rates.mean(axis=1), rates @ self.drawn.T)


def compared(count=WORLDS, **parts):
    """Compare two systems that are as good, in each of many worlds."""
    pairs = [
        (w.system(), w.system()) for w in (World(n, **parts) for n in range(count))
    ]
    return [rate_difference(*p, margin=ANY, seed=n) for n, p in enumerate(pairs)]


@pytest.fixture
def few_draws(monkeypatch):
    """Leave to chance what is gone in the mean of worlds: 2 % of a bound's distance."""
    monkeypatch.setattr(paired, "DRAWS", 4000)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    "parts", [{"by_seed": 1.0}, {"by_system": 8.0}, {"by_system": 4.0, "by_seed": 0.5}]
)
def test_of_equal_systems_one_in_20_passes_and_intervals_hold_the_truth(parts):
    differences = compared(MANY_WORLDS, **parts)
    # A difference of exactly the margin is the limit: both are moved to zero.
    passed = np.mean([one.upper < 0 for one in differences])
    held = np.mean([one.low <= 0 <= one.high for one in differences])
    # Percentiles of 60 speakers and 400 replicates are a percent too near; chance is half
    # a percent.
    assert 0.035 < passed < 0.075
    assert 0.925 < held < 0.965


def test_intervals_are_about_the_rates_wherever_replicates_have_their_mean():
    world = World(0, by_seed=1.0)
    one, other = world.system(), world.system()
    moved = SeedRates(one.rates, one.draws + 7)
    assert rate_over_seeds(moved).low < one.rates.mean() < rate_over_seeds(moved).high
    plain, other = (rate_difference(x, other, margin=ANY) for x in (one, moved))
    for key in ("mean", "low", "high", "upper"):
        assert getattr(other, key) == pytest.approx(getattr(plain, key))


@pytest.mark.usefixtures("few_draws")
def test_what_seeds_do_to_some_speakers_makes_intervals_wider_never_narrower():
    differences = compared(by_both=8.0)
    assert np.mean([one.upper < 0 for one in differences]) < 0.05
    true = np.std([one.mean for one in differences])
    width = np.mean([one.upper - one.mean for one in differences]) / 1.645
    # It counts twice in the variance; Student's t of five seeds adds to that.
    assert 1 < width / true < 2


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"by_seed": 1.0}, 1.6449 + 0.8416),
        # The bound counts it twice in the variance.
        ({"by_both": 8.0}, (1.6449 * np.sqrt(2) + 0.8416) * 8 / np.sqrt(SPEAKERS)),
    ],
)
def test_the_margin_of_many_seeds_is_that_of_the_formula(parts, expected):
    systems = [World(seed, seeds=50, **parts).system() for seed in range(100)]
    margins = [
        detectable_margin(system, seed=seed, draws=REPLICATES)
        for seed, system in enumerate(systems)
    ]
    # Student's t of 49 degrees of freedom is 2 % wider.
    assert np.mean(margins) == pytest.approx(expected * np.sqrt(2 / 50), rel=0.05)


@pytest.mark.parametrize("seeds", [3, 5, 20])
def test_seeds_alone_have_student_s_interval(seeds):
    rates = stats.norm.ppf((np.arange(seeds) + 0.5) / seeds)
    over = rate_over_seeds(SeedRates(rates, np.zeros((seeds, 100_000))))
    error = rates.std(ddof=1) / np.sqrt(seeds)
    expected = stats.t.ppf(0.975, seeds - 1) * error
    # Means of three seeds have few values, not the normal distribution's.
    assert over.high == pytest.approx(expected, rel=0.04)
    assert over.low == pytest.approx(-expected, rel=0.04)


@pytest.mark.usefixtures("few_draws")
def test_the_power_is_the_part_of_equal_candidates_that_is_shown_to_be():
    differences = compared(by_seed=1.0, seeds=20)
    for margin in (0.6, 1.2):
        of_margin = [dataclasses.replace(one, margin=margin) for one in differences]
        shown = np.mean([one.non_inferior for one in of_margin])
        # Seeds and speakers of 20 runs show deviations well, if not quite.
        power = np.mean([one.power for one in of_margin])
        assert power == pytest.approx(shown, abs=0.06)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("parts", [{"by_seed": 1.0}, {"by_seed": 0.5, "by_both": 4.0}])
def test_equal_systems_are_within_the_margin_with_the_power_it_was_made_for(parts):
    shown = []
    for seed in range(WORLDS):
        world = World(seed, seeds=20, **parts)
        reference, candidate, other = (world.system() for _ in range(3))
        # What chance adds by few draws is gone in the mean of worlds.
        margin = detectable_margin(other, draws=REPLICATES)
        shown.append(rate_difference(candidate, reference, margin=margin).non_inferior)
    # The margin is itself of 20 seeds, which takes some of the power.
    error = np.sqrt(0.80 * 0.20 / WORLDS)
    assert -0.05 - 3 * error < np.mean(shown) - 0.80 < 3 * error


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_verdicts_do_not_depend_on_which_seeds_are_drawn(seeds):
    """A verdict is of what was trained, not of the numbers that chance gives here."""
    world = World(0, by_seed=1.0, by_system=4.0, seeds=seeds)
    pair = world.system(), world.system()
    differences = [rate_difference(*pair, margin=ANY, seed=n) for n in range(20)]
    margins = [detectable_margin(pair[0], seed=seed) for seed in range(20)]
    # Of two seeds the distribution has no variance, and its quantile wanders more.
    above, limits = {2: (0.03, 0.03), 3: (0.01, 0.015), 5: (0.01, 0.015)}[seeds]
    uppers = [one.upper - one.mean for one in differences]
    assert np.std(uppers) < above * np.mean(uppers)
    assert np.std(margins) < limits * np.mean(margins)


def test_the_margin_does_not_know_how_difficult_speakers_are_for_all():
    assert detectable_margin(World(0).system()) == pytest.approx(0, abs=1e-12)


def test_pairing_replicates_and_seeds_narrows_the_interval():
    reference = World(0, by_seed=1.0).system()
    draws = np.random.default_rng(1)
    near = 0.1 * draws.standard_normal(5)
    candidate = SeedRates(reference.rates + near, reference.draws + near[:, None])
    paired = rate_difference(candidate, reference, margin=ANY)
    columns, rows = draws.permutation(REPLICATES), [1, 2, 3, 4, 0]
    for rates, replicates in (
        (candidate.rates, candidate.draws[:, columns]),
        (candidate.rates[rows], candidate.draws[rows]),
    ):
        other = SeedRates(rates, replicates)
        unpaired = rate_difference(other, reference, margin=ANY)
        assert unpaired.mean == pytest.approx(paired.mean)
        assert paired.high - paired.low < 0.5 * (unpaired.high - unpaired.low)


@pytest.mark.usefixtures("few_draws")
def test_a_mean_has_the_interval_of_speakers_and_seeds_together():
    systems = [World(seed, by_seed=1.0).system() for seed in range(WORLDS)]
    over = [rate_over_seeds(system, seed=seed) for seed, system in enumerate(systems)]
    held = np.mean([one.low <= 0 <= one.high for one in over])
    assert abs(held - 0.95) < 3 * OF_20TH
    true = np.hypot(np.sqrt(100 / SPEAKERS), 0.2**0.5)
    assert np.std([one.mean for one in over]) == pytest.approx(true, rel=0.15)


def test_bound_margin_and_p_value_agree():
    world = World(2, by_seed=1.0, by_system=3.0)
    candidate, reference = world.system(), world.system()
    wide = rate_difference(candidate, reference, margin=ANY)
    assert wide.non_inferior
    assert wide.p_value == 1 / (1 + REPLICATES)
    for margin in np.linspace(0.5, 1.5, 9) * wide.upper:
        at = rate_difference(candidate, reference, margin=margin)
        # A replicate more on either side: the two may disagree in its share.
        assert at.non_inferior == (at.p_value < 0.05) or margin == wide.upper
    with_more = SeedRates(candidate.rates + 9, candidate.draws + 9)
    at = rate_difference(with_more, reference, margin=0.1)
    assert (at.non_inferior, at.higher) == (False, True)
    assert at.p_value > 0.999


def test_a_system_is_as_good_as_itself_and_deviates_by_its_seeds():
    system = World(0, by_seed=1.0).system()
    same = rate_difference(system, system, margin=1e-6)
    assert (same.mean, same.low, same.high, same.upper) == (0, 0, 0, 0)
    assert (same.non_inferior, same.higher, same.power) == (True, False, 1.0)
    over = rate_over_seeds(SeedRates(np.array([0.1, 0.2, 0.3]), np.zeros((3, 5))))
    assert (over.mean, over.deviation) == pytest.approx((0.2, 0.1))


def test_equal_seeds_of_the_draws_give_equal_figures():
    world = World(0, by_seed=1.0)
    one, other = world.system(), world.system()
    for compute in (
        lambda seed: rate_difference(one, other, margin=0.1, seed=seed),
        lambda seed: rate_over_seeds(one, seed=seed),
        lambda seed: detectable_margin(one, seed=seed),
    ):
        assert compute(0) == compute(0)
        assert compute(0) != compute(1)


def test_holm_multiplies_by_the_tests_that_are_left_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []
