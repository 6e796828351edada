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

from speechbrain_rev.planner.problem import Infeasible
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.room import unless_memory_runs_out
from speechbrain_rev.reversible import Mode
from speechbrain_rev.sizes import size_text, whole_bytes

# Above this share it is said that times are not linear in the batch.
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
        Peak of live tensors that a step makes.
    seconds : float
        Of a step.
    """

    batch: int
    modes: Mapping[str, str]
    predicted_bytes: int
    seconds: float

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
        The largest share by which a time is off; 0 from two batches, which say nothing.
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
        What a step may allocate.
    other_seconds : float
        What a step takes beside forward and backward pass, whatever the batch.
    infeasible_batch : int or None
        The first that no plan makes fit, where the sweep ended.
    times : mapping of str to LinearTime
        By mode.
    about : mapping of str to str
        What was profiled, where and how, at the smallest batch.

    Examples
    --------
    >>> from speechbrain_rev.planner.problem import Cost
    >>> from speechbrain_rev.planner.block_profile import BlockProfile
    >>> def profile_for(batch):
    ...     store = Cost(9 * batch, 9 * batch, 1 + 0.1 * batch)
    ...     recompute = Cost(1 * batch, 9 * batch, 1 + 0.2 * batch)
    ...     costs = {(None, "store"): store, (None, "recompute"): recompute}
    ...     after = {"store": 2 * batch, "recompute": 2 * batch}
    ...     return Profile([BlockProfile("b.0", 0, costs)], 0, after, 0.0, {})
    >>> found = sweep(profile_for, range(1, 20), budget_bytes=110)
    >>> [(p.batch, p.modes["b.0"]) for p in found.plans][8:]
    [(9, 'store'), (10, 'store'), (11, 'recompute'), (12, 'recompute')]
    >>> found.best.batch, found.infeasible_batch, f"{found.times['store'].sample_seconds:.3f}"
    (10, 13, '0.100')
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
    def out_of_memory(self) -> list[int]:
        """Batches at which memory ran out while they were profiled."""
        return [plan.batch for plan in self.plans if not plan.modes]

    def __str__(self) -> str:
        best = self.best
        lines = [
            f"best batch {best.batch}: {best.samples_per_second:.1f} samples a second, "
            f"peak {size_text(best.predicted_bytes)} of {size_text(self.budget_bytes)}"
        ]
        largest = max(plan.batch for plan in self.plans if plan.modes)
        is_best = "that one" if largest == best.batch else str(largest)
        lines.append(f"the largest batch with a plan is {is_best}")
        if self.infeasible_batch is not None:
            lines.append(f"batch {self.infeasible_batch} does not fit with any plan")
        if self.out_of_memory:
            batches = ", ".join(map(str, self.out_of_memory))
            lines.append(f"there was too little memory to profile these: {batches}")
        lines.append("seconds of a step, all blocks in one mode: t0 + batch x t1")
        lines += [
            f"  {mode:<12} {self._fit(time)}" for mode, time in self.times.items()
        ]
        return "\n".join(lines)

    def _fit(self, time: LinearTime) -> str:
        """Tell how seconds of a step grow with the batch, and how far that is true."""
        fit = f"t0 {time.fixed_seconds:9.3g}  t1 {time.sample_seconds:9.3g}  "
        if sum(bool(plan.modes) for plan in self.plans) < _FEWEST_FITTED:
            return f"{fit}too few batches to tell whether it is so"
        fit += f"off by {100 * time.worst_deviation:.1f} % at most"
        if time.worst_deviation > _NOTICED_DEVIATION:
            fit += ": not linear in the batch"
        return fit


def sweep(
    profile_for: Callable[[int], Profile],
    batches: Iterable[int],
    budget_bytes: int | str,
    *,
    other_seconds: float = 0.0,
) -> Sweep:
    """Plan for each batch size and see which trains the most samples a second.

    Parameters
    ----------
    profile_for : callable
        Makes the profile of a batch size, for instance with ``profile_module``.
    batches : iterable of int
        Sizes to be tried, for instance ``range(lower, upper + 1)``. They are tried from
        the smallest on, until no plan makes one fit.
    budget_bytes : int or str
        What a step may allocate, as for ``plan``.
    other_seconds : float
        What a step takes beside forward and backward pass, whatever the batch: the
        optimizer and the way there. Larger batches gain by it.

    Returns
    -------
    Sweep
        Its plans are predicted and were not run; ``plan`` runs one.

    Raises
    ------
    ValueError
        If there is no batch, or one below 1, or a time below 0, or the budget is no size.
    Infeasible
        If no plan makes the smallest batch fit.
    MemoryError
        If memory ran out at every batch.
    """
    budget_bytes = whole_bytes("budget_bytes", budget_bytes)
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1 or not 0 <= other_seconds < math.inf:
        raise ValueError(
            f"batches are {sizes} and other_seconds {other_seconds}; there must be a "
            "batch, none below 1, and a time of at least 0."
        )
    plans: list[BatchPlan] = []
    uniform: dict[str, dict[int, float]] = {}
    about: Mapping[str, str] = {}
    infeasible_batch = None
    for batch in sizes:
        profile = unless_memory_runs_out(functools.partial(profile_for, batch))
        if profile is None:
            plans.append(BatchPlan(batch, {}, 0, 0.0))
            continue
        about = about or profile.about
        try:
            chosen = profile.fastest(budget_bytes)
        except Infeasible as error:
            if not any(plan.modes for plan in plans):
                raise Infeasible(
                    error.needed_bytes,
                    budget_bytes,
                    f"Raise the budget, or try batches below {batch}.",
                ) from None
            infeasible_batch = batch
            break
        seconds = profile.seconds(chosen) + other_seconds
        plans.append(BatchPlan(batch, chosen, profile.peak_bytes(chosen), seconds))
        for mode in Mode:
            if any(mode.value in block.modes for block in profile.blocks):
                points = uniform.setdefault(mode.value, {})
                points[batch] = profile.seconds(profile.uniform(mode)) + other_seconds
    if not any(plan.modes for plan in plans):
        raise MemoryError(
            f"Memory ran out while batches {sizes} were profiled. Try smaller ones, or "
            "profile on meta tensors."
        )
    times = {mode: _fitted(points) for mode, points in uniform.items()}
    return Sweep(plans, budget_bytes, other_seconds, infeasible_batch, times, about)


def _fitted(points: Mapping[int, float]) -> LinearTime:
    """Fit t0 + batch t1 to times, so that shares by which they are off are small."""
    batches = np.array(list(points), float)
    seconds = np.array(list(points.values()))
    if len(points) == 1 or not seconds.all():
        return LinearTime(float(seconds.mean()), 0.0, 0.0)
    slope, fixed = np.polyfit(batches, seconds, 1, w=1 / seconds)
    off = np.abs(fixed + slope * batches - seconds) / seconds
    return LinearTime(float(fixed), float(slope), float(off.max()))
