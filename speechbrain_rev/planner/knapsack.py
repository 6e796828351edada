"""The fastest mode of every block that a memory budget allows: a knapsack.

For two modes it is the 0/1 knapsack of Jiang et al., "An efficient training framework
for reversible neural architectures" (equation 6, Algorithm 1), for more the
multiple-choice knapsack. The paper fills a table over bytes from the first block on.
Here dynamic programming goes from the last block back, over what the rest of the
network needs at its peak: so the worst moment of each block counts, as does what each
pair of neighbouring modes costs, and one pass answers every budget.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.planner.problem import (
    Cost,
    Infeasible,
    Problem,
    peak_bytes,
    squared_error,
)

#: Ways to run the rest of the network that are kept at each block.
STATES = 10_000

#: By how much a sum of errors may be above its limit by rounding alone.
ROUNDING = 1e-9

# Of the coefficients that scipy's solver sees.
_LARGEST = 1e5


def solve(
    problem: Problem, budget_bytes: int, *, exact: bool = False, states: int = STATES
) -> list[str]:
    """Choose the fastest modes whose peak is within the budget.

    Of equally fast choices (to the picosecond) it is the one with the lowest peak.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.
    budget_bytes : int
        What the peak may reach.
    exact : bool
        Whether to ask scipy's mixed-integer solver instead: seconds for 60 blocks of
        five modes, but no end may be in sight where many choices come close to the
        budget. Of equally fast choices it gives any.
    states : int
        Ways to run the rest of the network that are kept at each block, for each mode
        before it, at least 2. With more of them the choice may be nearer to the
        fastest; it is within the budget with any number, and for one number of states
        more budget is never slower.

    Returns
    -------
    list of str
        The mode of each block.

    Raises
    ------
    Infeasible
        If no choice is within the budget.
    ArithmeticError
        If ``exact`` and the solver's tolerances do not suffice for these bytes.

    Examples
    --------
    >>> costs = {"store": Cost(8, 9, 1.0), "reconstruct": Cost(0, 9, 1.5)}
    >>> first = {(None, mode): cost for mode, cost in costs.items()}
    >>> later = {(before, mode): costs[mode] for before in costs for mode in costs}
    >>> problem = Problem(base_bytes=100, blocks=[first, later, later], after_bytes=0)
    >>> solve(problem, 117)
    ['store', 'reconstruct', 'store']
    >>> solve(problem, 117, exact=True).count("store"), lightest(problem)
    (2, ['reconstruct', 'reconstruct', 'store'])
    """
    if states < 2:
        raise ValueError(f"states is {states}; at least 2 are needed.")
    fronts = _fronts(problem, states)
    needs = problem.base_bytes + fronts[0][None].need_bytes
    if budget_bytes < needs[0]:
        raise Infeasible(needed_bytes=int(needs[0]), budget_bytes=budget_bytes)
    if exact:
        return solve_exactly(problem, budget_bytes)
    return _read(fronts, int(np.searchsorted(needs, budget_bytes, side="right")) - 1)


def lightest(problem: Problem) -> list[str]:
    """Choose the modes of the lowest peak, and the fastest of these.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.

    Returns
    -------
    list of str
        The mode of each block, as in the example of :func:`solve`.
    """
    return next(frontier(problem))


def frontier(problem: Problem) -> Iterator[list[str]]:
    """List choices that none beats in both bytes and time, from the lightest on.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.

    Yields
    ------
    list of str
        The mode of each block.
    """
    fronts = _fronts(problem, states=STATES)
    for state in range(fronts[0][None].need_bytes.size):
        yield _read(fronts, state)


@dataclass(frozen=True, eq=False)
class _Front:
    """Ways to run the network from one block on, none beaten in both bytes and time.

    Attributes
    ----------
    need_bytes : numpy.ndarray, [state], rising
        At the peak of these blocks, above what the blocks before them hold.
    picoseconds : numpy.ndarray, [state], falling
        Of these blocks.
    origin : numpy.ndarray, [state]
        Where it came from, counted through the next block's fronts put end to end.
    modes : list of str
        Modes of this block, in the order of those fronts.
    starts : list of int
        Where each of those fronts starts in the count.
    """

    need_bytes: NDArray[np.int64]
    picoseconds: NDArray[np.int64]
    origin: NDArray[np.int64]
    modes: list[str]
    starts: list[int]


def _fronts(problem: Problem, states: int) -> list[dict[str | None, _Front]]:
    """For each block its front after each mode of the block before."""
    zero = np.zeros(1, np.int64)
    end = _Front(zero + problem.after_bytes, zero, zero, [], [])
    following: dict[str | None, _Front] = {own: end for _, own in problem.blocks[-1]}
    fronts = []
    for costs in reversed(problem.blocks):
        ways: dict[str | None, dict[str, tuple[Cost, _Front]]] = {}
        for (before, own), cost in costs.items():
            # After a mode that no mode of the next block may follow there is no way.
            if own in following:
                ways.setdefault(before, {})[own] = cost, following[own]
        following = {before: _front(onward, states) for before, onward in ways.items()}
        fronts.append(following)
    return fronts[::-1]


def _front(ways: Mapping[str, tuple[Cost, _Front]], states: int) -> _Front:
    """Run a block in any of its modes, and go on from any state of the front after."""
    need_bytes = np.concatenate(
        [
            np.maximum(cost.working_bytes, cost.held_bytes + front.need_bytes)
            for cost, front in ways.values()
        ]
    )
    picoseconds = np.concatenate(
        [cost.picoseconds + front.picoseconds for cost, front in ways.values()]
    )
    sizes = [front.need_bytes.size for _, front in ways.values()]

    origin = np.lexsort((picoseconds, need_bytes))
    fastest = np.minimum.accumulate(picoseconds[origin])
    origin = origin[np.append(True, fastest[1:] < fastest[:-1])]
    if origin.size > states:
        # At most one state per bin of bytes, the fastest, which needs the most of its
        # bin. Bins end at their last byte, so that the lightest state has the first to
        # itself; bytes stay exact, so that a way is never lighter on paper than when it
        # is run.
        above = need_bytes[origin] - need_bytes[origin[0]]
        width = max(1, -(-int(above[-1]) // (states - 1)))
        bins = -(-above // width)
        origin = origin[np.append(bins[1:] != bins[:-1], True)]
    return _Front(
        need_bytes=need_bytes[origin],
        picoseconds=picoseconds[origin],
        origin=origin,
        modes=list(ways),
        starts=list(itertools.accumulate(sizes[:-1], initial=0)),
    )


def _read(fronts: list[dict[str | None, _Front]], state: int) -> list[str]:
    """Modes of a state of the first block's front."""
    modes: list[str] = []
    before = None
    for by_before in fronts:
        front = by_before[before]
        origin = int(front.origin[state])
        way = bisect.bisect_right(front.starts, origin) - 1
        before, state = front.modes[way], origin - front.starts[way]
        modes.append(before)
    return modes


def solve_exactly(
    problem: Problem, budget_bytes: int, max_squared_error: float = np.inf
) -> list[str]:
    """Find the fastest path through the modes with scipy's mixed-integer solver.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.
    budget_bytes : int
        What the peak may reach.
    max_squared_error : float
        What the sum of the squared errors may reach.

    Returns
    -------
    list of str
        The mode of each block.

    Raises
    ------
    ArithmeticError
        If the solver's tolerances do not suffice, or there is no such choice.
    """
    from scipy.optimize import LinearConstraint, milp

    count = len(problem.blocks)
    pairs = [(i, *pair) for i, costs in enumerate(problem.blocks) for pair in costs]
    costs = [cost for costs in problem.blocks for cost in costs.values()]
    # A node is a block with the mode before it. A pair of modes leads from one to the
    # next; as many pairs leave a node as lead to it, and one leaves the first.
    begins = [(i, before) for i, before, _ in pairs]
    ends = [(i + 1, own) for i, _, own in pairs]
    nodes = [node for node in dict.fromkeys([*begins, *ends]) if node[0] < count]
    flow = [
        [
            (end == node) - (begin == node)
            for begin, end in zip(begins, ends, strict=True)
        ]
        for node in nodes
    ]
    source = [-(node == (0, None)) for node in nodes]

    block = np.array([i for i, _, _ in pairs])
    moment = np.arange(count + 1)[:, None]
    held_bytes = np.array([cost.held_bytes for cost in costs])
    working_bytes = np.array([cost.working_bytes for cost in costs])
    peaks = held_bytes * (block < moment) + working_bytes * (block == moment)
    room = np.full(count + 1, budget_bytes - problem.base_bytes)
    room[-1] -= problem.after_bytes

    # The solver's tolerances are absolute: large numbers make them small in bytes.
    byte_unit = max(1, int(np.abs(peaks).max())) / _LARGEST
    times = np.array([cost.seconds for cost in costs])
    errors = np.array([cost.squared_error for cost in costs])
    error_unit = (min(float(errors.max()), max_squared_error) or 1.0) / _LARGEST
    limits = [LinearConstraint(errors / error_unit, ub=max_squared_error / error_unit)]
    answer = milp(
        times * (_LARGEST / (times.max() or 1.0)),
        integrality=np.ones(len(pairs)),
        bounds=(0, 1),
        constraints=[
            LinearConstraint(np.array(flow), source, source),
            LinearConstraint(peaks / byte_unit, ub=room / byte_unit),
            *(limits if np.isfinite(max_squared_error) else []),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if answer.x is None:
        raise ArithmeticError(
            f"scipy's solver found no plan, though there is one: {answer.message} Use "
            "exact=False."
        )
    modes = [
        own for (_, _, own), taken in zip(pairs, answer.x, strict=True) if taken > 0.5
    ]
    peak = peak_bytes(problem, modes)
    if peak > budget_bytes:
        raise ArithmeticError(
            f"The plan of scipy's solver peaks at {peak} bytes but the budget is "
            f"{budget_bytes}: its tolerance is larger than that. Use exact=False."
        )
    error = squared_error(problem, modes)
    if error > max_squared_error * (1 + ROUNDING):
        raise ArithmeticError(
            f"The plan of scipy's solver has a squared error of {error:g}, above "
            f"{max_squared_error:g}: its tolerance is larger than that. Use exact=False."
        )
    return modes
