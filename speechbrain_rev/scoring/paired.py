"""Whether one system is as good as another, when each was trained with several seeds.

Both are scored on one list. The difference of their rates is uncertain for two reasons,
other speakers and other trainings, and both are drawn anew:

- Speakers with replacement, by :func:`~speechbrain_rev.scoring.bootstrap`, the same for
  all systems and trainings: replicates are paired (Poh and Bengio, ICASSP 2007).
- Seeds with replacement, the same for two systems that are compared: trainings of one
  seed met the same data in the same order. What a drawn seed adds is how far its rate on
  the whole list is from the mean of all n seeds. Two things make n drawn seeds too sure
  where n is small, and are mended: their variance is (n - 1)/n of what it should be, so
  deviations are multiplied by sqrt(n/(n - 1)) (Rao and Wu, "Resampling inference with
  complex survey data", JASA 1988); and the variance itself is known from n seeds only,
  so each replicate divides by sqrt(chi2/(n - 1)), chi2 drawn with n - 1 degrees of
  freedom, which makes of normal deviations Student's t (Hesterberg, "What teachers should
  know about the bootstrap", The American Statistician 2015, calls both narrowness bias).

Replicates of a rate have a mean of their own, a little off the rate of the whole list:
intervals are centred on the rate, and the replicates give the way off it.

What only some seeds do to only some speakers is in the spread of replicates and in that
of seeds, so it counts twice: intervals are wider than they need be, never narrower. Were
speakers and seeds drawn from one table at once, it would count three times (Owen, "The
pigeonhole bootstrap", Annals of Applied Statistics 2007).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.scoring.arrays import as_array, as_values, same_length
from speechbrain_rev.scoring.bootstrap import interval

# Of speakers and seeds together, at least: with 1000 the bound of five seeds would be off
# by 6 % of its distance from the mean, by chance of the draws alone; with these by 0.6 %.
DRAWS = 50_000
# Level of one-sided tests, and the power that a margin is found for.
_LEVEL, _POWER = 0.05, 0.80


@dataclass(frozen=True, eq=False)
class SeedRates:
    """A rate of one system that was trained with several seeds, on one list.

    Parameters
    ----------
    rates : numpy.ndarray, [seeds]
        The equal error rate or detection cost of each training.
    draws : numpy.ndarray, [seeds, replicates]
        The same of speakers drawn anew, from ``bootstrap`` with one ``seed`` for all
        trainings and all systems that are compared.

    Raises
    ------
    ValueError
        If there are fewer than two seeds or replicates, or not as many rates as rows of
        draws, or one is not finite.

    Example
    -------
    >>> draws = np.array([[0.1, 0.11, 0.09], [0.2, 0.19, 0.21]])
    >>> system = SeedRates(np.array([0.1, 0.2]), draws)
    >>> system.draws.shape
    (2, 3)
    """

    rates: NDArray[np.float64]
    draws: NDArray[np.float64]

    def __post_init__(self) -> None:
        rates = as_values("rates", self.rates)
        draws = as_array("draws", self.draws).astype(np.float64, copy=False)
        if draws.ndim != 2:
            raise ValueError(
                f"draws has shape {list(draws.shape)}; it must be [seeds, replicates], a "
                "row of bootstrapped rates for each training."
            )
        same_length(rates=rates, draws=draws)
        if len(rates) < 2:
            raise ValueError(
                "There is one seed; its rate tells no spread. Train with at least two."
            )
        if draws.shape[1] < 2:
            raise ValueError(
                f"draws has {draws.shape[1]} replicates; at least 2 tell a spread."
            )
        if not np.isfinite(draws).all():
            row, column = np.argwhere(~np.isfinite(draws))[0]
            raise ValueError(
                f"draws[{row}, {column}] is {draws[row, column]}, no finite rate. Look at "
                "how it was computed."
            )
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "draws", draws)


@dataclass(frozen=True)
class RateOverSeeds:
    """How good a system is, whatever its seed.

    Parameters
    ----------
    mean : float
        Of the seeds' rates.
    low, high : float
        Of the 95 % interval of the mean, were speakers and seeds others.
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
        Of its 95 % interval, were speakers and seeds others.
    upper : float
        What it is below with 95 %, one-sided.
    margin : float
        From which on the candidate counts as worse.
    p_value : float
        Of the one-sided test of differences of at least the margin: the part of the
        replicates with such a one, a replicate more counted on either side (Davison and
        Hinkley, "Bootstrap methods and their application", 1997, section 4.2).

    Example
    -------
    >>> found = RateDifference(0.001, -0.002, 0.004, 0.0035, margin=0.01, p_value=0.001)
    >>> found.non_inferior, found.higher, round(found.power, 2)
    (True, False, 1.0)
    """

    mean: float
    low: float
    high: float
    upper: float
    margin: float
    p_value: float

    @property
    def non_inferior(self) -> bool:
        """Whether it is shown that the candidate is worse by less than the margin."""
        return self.upper < self.margin

    @property
    def power(self) -> float:
        """About the chance that a candidate as good as the reference had of being shown so.

        Were its difference normal about zero, with the deviation that the interval tells,
        and the bound as far above it as here.
        """
        normal = NormalDist()
        deviation = (self.high - self.low) / (2 * normal.inv_cdf(0.975))
        room = self.margin - (self.upper - self.mean)
        if deviation == 0:
            return float(room > 0)
        return normal.cdf(room / deviation)

    @property
    def higher(self) -> bool:
        """Whether it is shown that the candidate's rate is higher, be it within the margin."""
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

    Example
    -------
    >>> draws = np.array([[0.1, 0.11, 0.09], [0.2, 0.19, 0.21]])
    >>> system = SeedRates(np.array([0.1, 0.2]), draws)
    >>> round(rate_over_seeds(system).mean, 3)
    0.15
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
        From which difference on the candidate counts as worse, in the unit of the rates.
        It must be chosen before the candidate was looked at.
    seed : int
        Of the draws of seeds.

    Returns
    -------
    RateDifference

    Raises
    ------
    ValueError
        If the two have not as many seeds and replicates, or the margin is no number or below 0.

    Example
    -------
    >>> draws = np.array([[0.1, 0.11, 0.09], [0.12, 0.13, 0.11]])
    >>> one = SeedRates(np.array([0.10, 0.12]), draws)
    >>> other = SeedRates(one.rates + 0.01, one.draws + 0.01)
    >>> round(rate_difference(other, one, margin=0.02).upper, 3)
    0.01
    """
    if candidate.draws.shape != reference.draws.shape:
        raise ValueError(
            f"The candidate has [seeds, replicates] {list(candidate.draws.shape)}, the "
            f"reference {list(reference.draws.shape)}. Give both the same seeds, in one "
            "order, and as many replicates of one seed of bootstrap."
        )
    if not 0 <= margin < np.inf:
        raise ValueError(
            f"margin is {margin}; give the smallest difference of rates that counts as "
            "worse: a number, not below 0."
        )
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
    """Give the margin that as many seeds and these speakers suffice to show.

    Computed from the reference alone, so before anything is compared. Of two systems that
    are both equal to it, trained with seeds of their own, one is found non-inferior to
    the other by :func:`rate_difference` with a power of 80 %, at a one-sided level of
    5 %. This is the usual size of samples for non-inferiority, margin = (z_0.95 + z_0.80)
    sigma, solved for the margin (Chow, Shao, Wang and Lokhnygina, "Sample size
    calculations in clinical research", 3rd edition 2018, section 3.2), where sigma is the
    standard deviation of the difference that chance makes. In place of the normal
    distribution's quantiles are those of draws: the 95 % by which the bound will lie
    above the difference, and the 80 % that the difference itself will be below. With many
    seeds and nothing that only some seeds do to only some speakers, that is the formula.

    The reference's spread is itself known from n seeds only, which takes some of the
    power: of five seeds about 75 %, of three about 65 % are left. A candidate that errs
    on other speakers than the reference needs more seeds or speakers than the reference
    tells.

    Parameters
    ----------
    reference : SeedRates
        Its rates.
    seed : int
        Of the draws of seeds.
    draws : int
        Of speakers and seeds together, at least; of 1000 the margin of five seeds is off
        by 5 % by their chance alone.

    Returns
    -------
    float
        In the unit of the rates; 0 if all seeds are alike.

    Example
    -------
    >>> draws = np.random.default_rng(0)
    >>> rates, speakers = draws.standard_normal(50), draws.standard_normal(1000)
    >>> system = SeedRates(rates, rates[:, None] + speakers)
    >>> sigma = float(rates.std(ddof=1)) * (2 / 50) ** 0.5
    >>> round(detectable_margin(system) / sigma, 1)
    2.5
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
    """Say how often each replicate is taken, so that there are enough draws."""
    return -(-draws // replicates)


def _drawn_seeds(
    rates: NDArray[np.float64], shape: tuple[int, ...], seed: int
) -> NDArray[np.float64]:
    """Draw how far the mean of other seeds would be from that of these: [replicates]."""
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
    """Draw what a deviation of 1 is estimated as from so many normal seeds."""
    chi2 = np.random.default_rng(seed).chisquare(seeds - 1, replicates)
    known: NDArray[np.float64] = np.sqrt(chi2 / (seeds - 1))
    return known
