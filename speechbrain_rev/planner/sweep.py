"""Which batch size trains the most samples a second, each with its own best plan.

Section 3.4 of Jiang et al.: a larger batch uses the device better, but takes memory from
the blocks, which then reconstruct. The best is between the two, so all are tried.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speechbrain_rev.modes import ALONE
from speechbrain_rev.planner.choice import Choice, choose
from speechbrain_rev.planner.memory import unless_memory_runs_out
from speechbrain_rev.planner.profiling import Profiler, profiler_of
from speechbrain_rev.planner.refusals import refusal
from speechbrain_rev.planner.step import Channels, Step
from speechbrain_rev.sizes import size_text, whole_bytes

# Above this share times are reported as not linear in the batch.
_NOTICED_DEVIATION = 0.05

# Through two points there is always a line.
_FEWEST_FITTED = 3


@dataclass(frozen=True)
class BatchPlan:
    """The fastest plan of one batch size.

    Attributes
    ----------
    batch : int
        Samples.
    modes : mapping of str to str
        A mode for each block; empty if memory ran out while it was profiled.
    predicted_bytes : int
        What the step takes of the budget at its peak.
    seconds : float
        Of a step.
    channels : Channels or None
        Channels that blocks work on at a time, at each level.
    timed_batch : int or None
        Samples of the steps that were timed, fewer where the batch does not fit; times
        are scaled to the batch. None where that is not known, or times are estimated.
    """

    batch: int
    modes: Mapping[str, str]
    predicted_bytes: int
    seconds: float
    channels: Channels | None = None
    timed_batch: int | None = None

    @property
    def samples_per_second(self) -> float:
        """Throughput, 0 if memory ran out."""
        return self.batch / self.seconds if self.modes else 0.0


@dataclass(frozen=True)
class LinearTime:
    """Seconds of a step as t0 + batch t1, all blocks in one mode.

    Attributes
    ----------
    fixed_seconds : float
        t0.
    sample_seconds : float
        t1.
    worst_deviation : float
        The largest share by which a time is off; 0 from two batches, which prove nothing.
    """

    fixed_seconds: float
    sample_seconds: float
    worst_deviation: float


@dataclass(frozen=True)
class Sweep:
    """Plans of all batch sizes that were tried.

    Attributes
    ----------
    plans : sequence of BatchPlan
        From the smallest batch to the largest that fits.
    budget_bytes : int
        What a step may take: of a GPU, what its reserve leaves.
    other_seconds : float
        What a step takes beside forward and backward pass, whatever the batch.
    infeasible_batch : int or None
        The first that no plan makes fit, where the sweep ended.
    times : mapping of str to LinearTime
        By mode.
    about : mapping of str to str
        What was profiled, where and how, at the smallest batch.
    """

    plans: Sequence[BatchPlan]
    budget_bytes: int
    other_seconds: float
    infeasible_batch: int | None
    times: Mapping[str, LinearTime]
    about: Mapping[str, str]

    @property
    def best(self) -> BatchPlan:
        """The plan of the most samples a second, of equal ones the smallest batch."""
        return max(self.plans, key=lambda plan: plan.samples_per_second)

    @property
    def untried(self) -> str:
        """Which batches may be better where the best is the edge of those tried, else ""."""
        batches, best = [plan.batch for plan in self.plans], self.best.batch
        smaller = best == batches[0] > 1
        larger = best == batches[-1] and self.infeasible_batch is None
        return " and ".join(["smaller"] * smaller + ["larger"] * larger)

    @property
    def _planned(self) -> list[BatchPlan]:
        return [plan for plan in self.plans if plan.modes]

    @property
    def out_of_memory(self) -> list[int]:
        """Batches at which memory ran out while they were profiled."""
        return [plan.batch for plan in self.plans if not plan.modes]

    def __str__(self) -> str:
        best = self.best
        lines = [
            f"best batch {best.batch}: {best.samples_per_second:.1f} samples a second, "
            f"peak {size_text(best.predicted_bytes)} of {size_text(self.budget_bytes)}"
        ]
        if self.untried:
            lines.append(f"{self.untried} batches were not tried and may be better")
        if self.infeasible_batch is not None:
            lines.append(f"batch {self.infeasible_batch} does not fit with any plan")
        if self.out_of_memory:
            batches = ", ".join(map(str, self.out_of_memory))
            lines.append(f"there was too little memory to profile these: {batches}")
        lines.append("seconds of a step, all blocks in one mode: t0 + batch x t1")
        lines += [
            f"  {mode:<11} {self._fit(time)}" for mode, time in self.times.items()
        ]
        return "\n".join(lines)

    def _fit(self, time: LinearTime) -> str:
        """Put in words how seconds of a step grow with the batch, and how exactly."""
        fit = f"t0 {time.fixed_seconds:8.3g}  t1 {time.sample_seconds:8.3g}  "
        if len(self._planned) < _FEWEST_FITTED:
            return f"{fit}too few batches to know whether it is so"
        bent = ": not linear in the batch" * (time.worst_deviation > _NOTICED_DEVIATION)
        return f"{fit}off by {100 * time.worst_deviation:.1f} % at most{bent}"


def sweep(
    step: Step,
    batches: Iterable[int],
    budget_bytes: int | str,
    *,
    other_seconds: Callable[[], float] = lambda: 0.0,
    max_gradient_error: float | None = None,
    before_batch: Callable[[int], object] = lambda batch: None,
) -> Sweep:
    """Plan for each batch size and see which trains the most samples a second.

    Parameters
    ----------
    step : Step
        A step of any batch.
    batches : iterable of int
        Sizes to be tried, for instance ``range(lower, upper + 1)``. They are tried from
        the smallest on, until no plan makes one fit.
    budget_bytes : int or str
        What a step may take, as for ``plan_step``.
    other_seconds : callable
        Takes the time of a step beside forward and backward pass, whatever the batch: the
        optimizer and the way there. Larger batches gain by it.
    max_gradient_error : float or None
        As for ``plan``: blocks may then compress. What that does is tried on the smallest
        batch, or as much of it as fits; on larger ones it does less.
    before_batch : callable
        Is called with each batch before it is profiled, for a bar for instance.

    Returns
    -------
    Sweep
        Its plans are predicted and were not run; ``plan_step`` runs one.

    Raises
    ------
    ValueError
        If there is no batch, or one below 1, the budget is no size, or other seconds are
        below zero or not finite.
    Infeasible
        If no plan makes the smallest batch fit.
    MemoryError
        If memory ran out at every batch.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from speechbrain_rev.planner.step import step_of
    >>> from speechbrain_rev.devices import ASSUMED
    >>> network = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    >>> step = step_of(network, torch.randn(8, 64), blocks="?", speed=ASSUMED)
    >>> sweep(step, [8, 16], "1GB").best.batch
    16
    """
    budget = whole_bytes("budget_bytes", budget_bytes)
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1:
        raise ValueError(
            f"batches are {sizes}; there must be a batch, and none below 1."
        )
    with step.training():
        profiler = profiler_of(step.at(sizes[0]), max_gradient_error)
        return _swept(profiler, sizes, budget, other_seconds, before_batch)


def _swept(
    profiler: Profiler,
    sizes: Sequence[int],
    budget_bytes: int,
    other_seconds: Callable[[], float],
    before_batch: Callable[[int], object],
) -> Sweep:
    plans: list[BatchPlan] = []
    uniform: dict[str, dict[int, float]] = {}
    about: Mapping[str, str] = {}
    infeasible_batch, other = None, None
    for batch in sizes:
        before_batch(batch)
        own = profiler.at(profiler.step.at(batch))
        left = own.step.left_bytes(budget_bytes)
        chosen = unless_memory_runs_out(functools.partial(_chosen, own, left))
        if chosen is None:
            plans.append(BatchPlan(batch, {}, 0, 0.0))
            continue
        if not chosen.fits:
            if not uniform:
                raise refusal(own, budget_bytes, chosen.peak_bytes)
            infeasible_batch = batch
            break
        profile = chosen.profile
        about = about or profile.about
        other = _checked_seconds(other_seconds()) if other is None else other
        timed = profile.about.get("timed batch")
        plans.append(
            BatchPlan(
                batch,
                chosen.modes,
                chosen.peak_bytes + own.step.fixed_bytes(batch),
                chosen.seconds + other,
                chosen.channels,
                None if timed is None else int(timed),
            )
        )
        for mode in ALONE:
            if any(mode.value in block.modes for block in profile.blocks):
                points = uniform.setdefault(mode.value, {})
                points[batch] = profile.seconds(profile.uniform(mode)) + other
    if not uniform:
        raise MemoryError(
            f"Memory ran out while batches {list(sizes)} were profiled. Try smaller ones, "
            "or estimate times instead of measuring them."
        )
    times = {mode: _fitted(points) for mode, points in uniform.items()}
    may_take = budget_bytes - profiler.step.reserved_bytes(budget_bytes)
    return Sweep(plans, may_take, other or 0.0, infeasible_batch, times, about)


def _chosen(profiler: Profiler, left_bytes: int) -> Choice:
    """Choose a plan; of what does not fit by its bytes alone no time is taken."""
    counted = choose(profiler, left_bytes, is_timed=False)
    return choose(profiler, left_bytes) if counted.fits else counted


def _checked_seconds(other: float) -> float:
    if not 0 <= other < math.inf:
        raise ValueError(
            f"other_seconds gives {other}; it must be a finite time of at least 0."
        )
    return other


def _fitted(points: Mapping[int, float]) -> LinearTime:
    """Fit t0 + batch t1 to times, so that shares by which they are off are small."""
    batches = np.array(list(points), float)
    seconds = np.array(list(points.values()))
    if len(points) == 1 or not seconds.all():
        return LinearTime(float(seconds.mean()), 0.0, 0.0)
    slope, fixed = np.polyfit(batches, seconds, 1, w=1 / seconds)
    off = np.abs(fixed + slope * batches - seconds) / seconds
    return LinearTime(float(fixed), float(slope), float(off.max()))
