"""Whether one system is as good as another, when each was trained with several seeds.

Both are scored on one list. The difference of their rates has two sources of uncertainty,
speakers and seeds. Both are resampled:

- Speakers with replacement, by :func:`~speechbrain_rev.scoring.bootstrap`, the same for
  all systems and runs: replicates are paired (Poh and Bengio, ICASSP 2007).
- Seeds with replacement, the same for two systems that are compared: runs of one seed saw
  the same data in the same order. A drawn seed adds the distance of its rate on the whole
  list from the mean of all n seeds.

Few seeds give intervals that are too narrow, for two reasons. Both are corrected
(Hesterberg, "What teachers should know about the bootstrap", The American Statistician
2015, calls them narrowness bias):

- The variance of n drawn seeds is (n - 1)/n of what it should be. Deviations are
  multiplied by sqrt(n/(n - 1)) (Rao and Wu, "Resampling inference with complex survey
  data", JASA 1988).
- The variance is itself estimated from n seeds. Each replicate divides by
  sqrt(chi2/(n - 1)), chi2 drawn with n - 1 degrees of freedom. Normal deviations then
  have Student's t.

The mean of a rate's replicates differs a little from the rate of the whole list. Intervals
are centred on the rate; replicates give the distance from it.

An effect of some seeds on some speakers is in the spread of replicates and in that of
seeds. It counts twice, so intervals are too wide rather than too narrow. Drawn from one
table of speakers and seeds, it would count three times (Owen, "The pigeonhole bootstrap",
Annals of Applied Statistics 2007).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.scoring import interval

# Least number of draws of speakers and seeds together. Chance of the draws moves the bound
# of five seeds by 0.6 % of its distance from the mean; with 1000 draws, by 6 %.
DRAWS = 50_000
# Level of one-sided tests, and power that a margin is made for.
_LEVEL, _POWER = 0.05, 0.80


@dataclass(frozen=True, eq=False)
class SeedRates:
    """A rate of one system that was trained with several seeds, on one list.

    Parameters
    ----------
    rates : numpy.ndarray, [seeds]
        Equal error rate or detection cost of each run.
    draws : numpy.ndarray, [seeds, replicates]
        The same rate of resampled speakers, from ``bootstrap`` with one ``seed`` for all
        runs and all systems that are compared.
    """

    rates: NDArray[np.float64]
    draws: NDArray[np.float64]


@dataclass(frozen=True)
class RateOverSeeds:
    """How good a system is, whatever its seed.

    Parameters
    ----------
    mean : float
        Of the seeds' rates.
    low, high : float
        Bounds of the 95 % interval of the mean, over speakers and seeds.
    deviation : float
        Standard deviation of the seeds' rates.
    """

    mean: float
    low: float
    high: float
    deviation: float


@dataclass(frozen=True)
class RateDifference:
    """How much higher, so worse, a candidate's rate is than a reference's.

    Parameters
    ----------
    mean : float
        Of the seeds' differences, candidate less reference.
    low, high : float
        Bounds of its 95 % interval, over speakers and seeds.
    upper : float
        One-sided bound: the difference is below it with 95 %.
    margin : float
        Difference from which on the candidate counts as worse.
    p_value : float
        One-sided, of a difference of at least the margin: the share of replicates with
        such a difference, one more counted on either side (Davison and Hinkley,
        "Bootstrap methods and their application", 1997, section 4.2).
    """

    mean: float
    low: float
    high: float
    upper: float
    margin: float
    p_value: float

    @property
    def non_inferior(self) -> bool:
        """Whether the candidate is shown to be worse by less than the margin."""
        return self.upper < self.margin

    @property
    def power(self) -> float:
        """Approximate chance that a candidate as good as the reference is non-inferior.

        The difference is taken as normal about zero with the deviation of the interval,
        and the bound as far above it as here.
        """
        normal = NormalDist()
        deviation = (self.high - self.low) / (2 * normal.inv_cdf(0.975))
        headroom = self.margin - (self.upper - self.mean)
        if deviation == 0:
            return float(headroom > 0)
        return normal.cdf(headroom / deviation)

    @property
    def higher(self) -> bool:
        """Whether the candidate's rate is shown to be higher, even if by less than the margin."""
        return self.low > 0


def rate_over_seeds(system: SeedRates, *, seed: int = 0) -> RateOverSeeds:
    """Sum up the rates of one system.

    Parameters
    ----------
    system : SeedRates
        Its rates.
    seed : int
        Of the draws of seeds.

    Returns
    -------
    RateOverSeeds
    """
    drawn = _drawn_anew(system.rates, system.draws, seed)
    return RateOverSeeds(
        float(system.rates.mean()), *interval(drawn), float(system.rates.std(ddof=1))
    )


def rate_difference(
    candidate: SeedRates, reference: SeedRates, *, margin: float, seed: int = 0
) -> RateDifference:
    """Compare two systems, replicate by replicate and seed by seed.

    Parameters
    ----------
    candidate, reference : SeedRates
        Their rows are of the same seeds, their columns of the same drawn speakers.
    margin : float
        Difference from which on the candidate counts as worse, in the unit of the rates.
        Choose it before looking at the candidate.
    seed : int
        Of the draws of seeds.

    Returns
    -------
    RateDifference
    """
    rates = candidate.rates - reference.rates
    drawn = _drawn_anew(rates, candidate.draws - reference.draws, seed)
    replicates = candidate.draws.shape[1]
    return RateDifference(
        float(rates.mean()),
        *interval(drawn),
        upper=float(np.quantile(drawn, 1 - _LEVEL)),
        margin=float(margin),
        p_value=float((1 + replicates * np.mean(drawn >= margin)) / (1 + replicates)),
    )


def detectable_margin(
    reference: SeedRates, *, seed: int = 0, draws: int = DRAWS
) -> float:
    """Return the margin that this number of seeds and these speakers can show.

    It is computed from the reference alone, before anything is compared. Take two systems
    equal to the reference, each trained with its own seeds. :func:`rate_difference` shows
    one non-inferior to the other with a power of 80 %, at a one-sided level of 5 %.

    The usual sample size for non-inferiority, margin = (z_0.95 + z_0.80) sigma, is solved
    for the margin (Chow, Shao, Wang and Lokhnygina, "Sample size calculations in clinical
    research", 3rd edition 2018, section 3.2). Sigma is the standard deviation of the
    difference by chance. Quantiles of draws replace those of the normal distribution: the
    95 % by which the bound lies above the difference, and the 80 % that the difference is
    below. With many seeds that affect all speakers alike, that is the formula.

    The reference's spread is estimated from n seeds only, which costs power: five seeds
    keep about 75 %, three about 65 %. A candidate that errs on other speakers than the
    reference needs more seeds or speakers.

    Parameters
    ----------
    reference : SeedRates
        Its rates.
    seed : int
        Of the draws of seeds.
    draws : int
        Least number of draws of speakers and seeds together; by chance, 1000 draws move
        the margin of five seeds by 5 %.

    Returns
    -------
    float
        In the unit of the rates; 0 if all seeds are alike.
    """
    rates = reference.rates
    of_speakers, of_seeds = np.random.SeedSequence(seed).spawn(2)
    # What speakers do to some seeds only, which two systems do not have in common.
    own = reference.draws - reference.draws.mean(axis=0)
    own -= own.mean(axis=1, keepdims=True)
    own = np.tile(own, _times(own.shape[1], draws))
    by_speakers = _difference_of_drawn(own, of_speakers)
    everywhere = np.broadcast_to(rates[:, None], own.shape)
    by_seeds = _difference_of_drawn(everywhere, of_seeds)
    by_seeds /= _known(len(rates), len(by_seeds), of_seeds.spawn(1)[0])
    above = np.quantile(by_speakers + by_seeds, 1 - _LEVEL)
    return float(above + np.quantile(by_seeds, _POWER))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of several tests by Holm's step-down method.

    Parameters
    ----------
    p_values : sequence of float, [tests]
        Of tests that need not be independent.

    Returns
    -------
    list of float, [tests]
        In the order of the tests: those below a level are rejected, and with that
        probability none of them wrongly (Holm, "A simple sequentially rejective multiple
        test procedure", Scandinavian Journal of Statistics 1979).
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(stepped, 1)
    return [float(value) for value in corrected]


def _drawn_anew(
    rates: NDArray[np.float64], draws: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """Draw the mean rate of other speakers, each with some other seeds: [draws]."""
    of_speakers = draws.mean(axis=0)
    off = np.tile(of_speakers - of_speakers.mean(), _times(len(of_speakers), DRAWS))
    drawn: NDArray[np.float64] = (
        rates.mean() + off + _drawn_seeds(rates, (len(rates), len(off)), seed)
    )
    return drawn


def _times(replicates: int, draws: int) -> int:
    """Return how often each replicate is taken, so that there are enough draws."""
    return -(-draws // replicates)


def _drawn_seeds(
    rates: NDArray[np.float64], shape: tuple[int, ...], seed: int
) -> NDArray[np.float64]:
    """Draw the distance of other seeds' mean from that of these: [replicates]."""
    seeds, replicates = shape
    of_rows, of_chi2 = np.random.SeedSequence(seed).spawn(2)
    rows = np.random.default_rng(of_rows).integers(seeds, size=(seeds, replicates))
    off = (rates[rows] - rates.mean()).mean(axis=0)
    return _widened(off, seeds) / _known(seeds, replicates, of_chi2)


def _difference_of_drawn(
    table: NDArray[np.float64], seed: np.random.SeedSequence
) -> NDArray[np.float64]:
    """Draw two systems' rows of a table in each column: [replicates]."""
    rows = np.random.default_rng(seed).integers(len(table), size=(2, *table.shape))
    one, other = (np.take_along_axis(table, drawn, axis=0) for drawn in rows)
    return _widened((one - other).mean(axis=0), len(table))


def _widened(off: NDArray[np.float64], seeds: int) -> NDArray[np.float64]:
    """Give means of drawn seeds the variance of means of other seeds."""
    return off * math.sqrt(seeds / (seeds - 1))


def _known(
    seeds: int, replicates: int, seed: np.random.SeedSequence
) -> NDArray[np.float64]:
    """Draw the estimate of a deviation of 1 from this number of normal seeds."""
    chi2 = np.random.default_rng(seed).chisquare(seeds - 1, replicates)
    known: NDArray[np.float64] = np.sqrt(chi2 / (seeds - 1))
    return known
