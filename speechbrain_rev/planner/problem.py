"""What each choice of modes costs: the bytes at its peak, and its time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from speechbrain_rev.sizes import size_text

# Times are added as whole picoseconds: the same times in another order are then equal.
PICOSECONDS = 10**12


@dataclass(frozen=True)
class Cost:
    """What a block costs in one mode, after one mode of the block before it.

    Attributes
    ----------
    held_bytes : int
        Added to what is held between the block's forward and its backward pass;
        negative where a boundary between modes lets go of something.
    working_bytes : int
        At the worst moment of its passes, above what the blocks before it hold.
    seconds : float
        Of its forward and backward pass.
    squared_error : float
        Square of what it puts into the gradient, as a part of the gradient's norm; of
        several blocks these add up. 0 in every mode but "compress".

    Examples
    --------
    >>> Cost(held_bytes=8, working_bytes=9, seconds=0.001).picoseconds
    1000000000
    """

    held_bytes: int
    working_bytes: int
    seconds: float
    squared_error: float = 0.0

    def __post_init__(self) -> None:
        sizes: tuple[object, ...] = self.held_bytes, self.working_bytes
        for given in sizes:
            if not isinstance(given, Integral):
                raise ValueError(
                    f"{given!r} are no whole bytes; give an integer, rounded up."
                )
        if self.working_bytes < 0 or not 0 <= self.seconds < math.inf:
            raise ValueError(
                f"working_bytes is {self.working_bytes} and seconds {self.seconds}; "
                "neither may be negative, nor the time infinite or NaN. Only "
                "held_bytes may be below zero."
            )
        if not 0 <= self.squared_error < math.inf:
            raise ValueError(
                f"squared_error is {self.squared_error}; it must be finite and not "
                "negative."
            )

    @property
    def picoseconds(self) -> int:
        """The time as a whole number, for sums that do not depend on their order."""
        return round(self.seconds * PICOSECONDS)


@dataclass(frozen=True)
class Problem:
    """A chain of blocks, the mode of each of which is to be chosen.

    Attributes
    ----------
    base_bytes : int
        Alive before the first block.
    blocks : sequence of mapping
        For each block its costs by (mode of the block before, own mode). Before the
        first block the mode is None. A pair that is missing is not allowed.
    after_bytes : int
        What follows the last block works on, above what all blocks hold.

    Examples
    --------
    >>> store, reconstruct = Cost(8, 9, 1.0), Cost(0, 9, 1.5)
    >>> costs = {(None, "store"): store, (None, "reconstruct"): reconstruct}
    >>> problem = Problem(base_bytes=100, blocks=[costs], after_bytes=2)
    >>> peak_bytes(problem, ["store"]), peak_bytes(problem, ["reconstruct"])
    (110, 109)
    >>> seconds(problem, ["reconstruct"])
    1.5
    """

    base_bytes: int
    blocks: Sequence[Mapping[tuple[str | None, str], Cost]]
    after_bytes: int

    def __post_init__(self) -> None:
        if min(self.base_bytes, self.after_bytes) < 0 or not self.blocks:
            raise ValueError(
                f"base_bytes is {self.base_bytes}, after_bytes {self.after_bytes} and "
                f"there are {len(self.blocks)} blocks; bytes may not be negative, and "
                "at least one block is needed."
            )
        reached: set[str | None] = {None}
        for index, costs in enumerate(self.blocks):
            following: set[str | None] = {own for b, own in costs if b in reached}
            if not following:
                raise ValueError(
                    f"Block {index} follows {_words(reached)}, but its costs are for "
                    f"{_words(costs) or 'nothing'}. Add a cost for a pair that starts "
                    "with a mode the block before can have."
                )
            reached = following
        # The sums below are of int64.
        every = [cost for costs in self.blocks for cost in costs.values()]
        most = max(abs(c.held_bytes) + c.working_bytes for c in every)
        slowest = max(cost.seconds for cost in every)
        if (
            self.base_bytes + self.after_bytes + len(self.blocks) * most >= 2**62
            or len(self.blocks) * slowest * PICOSECONDS >= 2**62
        ):
            raise ValueError(
                f"One of {len(self.blocks)} blocks costs {most} bytes or {slowest} "
                "seconds; all together may reach 2**62 bytes and 50 days. Are the "
                "units bytes and seconds?"
            )


class Infeasible(ValueError):
    """No choice of modes fits into the budget.

    Attributes
    ----------
    needed_bytes : int
        The least peak of any choice.
    budget_bytes : int
        What was allowed.
    remedy : str
        What to do about it.

    Examples
    --------
    >>> print(Infeasible(needed_bytes=3 * 2**30, budget_bytes=2 * 2**30))
    Even the lightest plan peaks at 3.000 GiB (3221225472 bytes), but the budget is
    2.000 GiB (2147483648 bytes). Raise the budget, or lower the batch size or the
    length of the segments.
    """

    def __init__(
        self,
        needed_bytes: int,
        budget_bytes: int,
        remedy: str = "Raise the budget, or lower the batch size or the length of the "
        "segments.",
    ) -> None:
        super().__init__(needed_bytes, budget_bytes, remedy)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.remedy = remedy

    @property
    def lacking_bytes(self) -> int:
        """By how much the budget is too small."""
        return self.needed_bytes - self.budget_bytes

    def with_remedy(self, remedy: str) -> Infeasible:
        """Give the error with another remedy."""
        return Infeasible(self.needed_bytes, self.budget_bytes, remedy)

    def __str__(self) -> str:
        return (
            f"Even the lightest plan peaks at {size_text(self.needed_bytes)} "
            f"({self.needed_bytes} bytes), but the budget is "
            f"{size_text(self.budget_bytes)} ({self.budget_bytes} bytes). {self.remedy}"
        )


def peak_bytes(problem: Problem, modes: Sequence[str]) -> int:
    """Bytes at the worst moment of a training step with these modes.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.
    modes : sequence of str
        One mode for each block.

    Returns
    -------
    int
        For every block, what the blocks before it hold and what it works on must fit,
        and so must what follows the last block: the largest of these.

    Raises
    ------
    ValueError
        If there are more or fewer modes than blocks, or a pair is not allowed.
    """
    peak, held = 0, problem.base_bytes
    for cost in _chosen(problem, modes):
        peak = max(peak, held + cost.working_bytes)
        held += cost.held_bytes
    return max(peak, held + problem.after_bytes)


def seconds(problem: Problem, modes: Sequence[str]) -> float:
    """Time of a training step with these modes.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.
    modes : sequence of str
        One mode for each block.

    Returns
    -------
    float
        The sum over the blocks.

    Raises
    ------
    ValueError
        As :func:`peak_bytes`.
    """
    return math.fsum(cost.seconds for cost in _chosen(problem, modes))


def squared_error(problem: Problem, modes: Sequence[str]) -> float:
    """Square of the gradient's relative error with these modes.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.
    modes : sequence of str
        One mode for each block.

    Returns
    -------
    float
        The sum over the blocks, whose errors are taken as independent.

    Raises
    ------
    ValueError
        As :func:`peak_bytes`.
    """
    return math.fsum(cost.squared_error for cost in _chosen(problem, modes))


def _chosen(problem: Problem, modes: Sequence[str]) -> list[Cost]:
    if len(modes) != len(problem.blocks):
        raise ValueError(
            f"There are {len(modes)} modes for {len(problem.blocks)} blocks; give one "
            "for each."
        )
    chosen = []
    before: str | None = None
    for index, (own, costs) in enumerate(zip(modes, problem.blocks, strict=True)):
        if (before, own) not in costs:
            raise ValueError(
                f"Block {index} cannot be {own!r} after {before!r}; its pairs are "
                f"{_words(costs)}."
            )
        chosen.append(costs[before, own])
        before = own
    return chosen


def _words(items: Iterable[object]) -> str:
    return ", ".join(sorted(repr(item) for item in items))
