"""The fastest modes that a memory budget and a limit of the gradient's error allow.

The knapsack knows bytes and time. A price on the error, added to the time, leads it to
plans of less error; the right price is searched for as in Lagrangian relaxation: each
answer of the knapsack is a point of (error, time), and the next price is the slope between
the best point below the limit and the one above it. What is then left of the limit is used
up by changing single blocks, from there and from the plan of the least error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speechbrain_rev.planner.knapsack import (
    ROUNDING,
    frontier,
    lightest,
    solve,
    solve_exactly,
)
from speechbrain_rev.planner.problem import (
    Cost,
    Infeasible,
    Problem,
    peak_bytes,
    seconds,
    squared_error,
)

# Prices that are tried; each but the last is nearer to the best one.
_PRICES = 50


def solve_capped(
    problem: Problem,
    budget_bytes: int,
    max_squared_error: float,
    *,
    exact: bool = False,
) -> list[str]:
    """Choose fast modes whose peak is within the budget and error within the limit.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.
    budget_bytes : int
        What the peak may reach.
    max_squared_error : float
        What the sum of the squared errors may reach; 0 for lossless modes.
    exact : bool
        Whether to ask scipy's mixed-integer solver, as for ``knapsack.solve``.

    Returns
    -------
    list of str
        The mode of each block. Without ``exact`` another choice may be faster: tests
        hold that there is one for at most 3 % of random chains of up to 6 blocks, whose
        times are less than 0.5 % above the fastest on average, and that chains of 40 and
        120 blocks are within 1 % of the exact solver.

    Raises
    ------
    Infeasible
        If no choice is known to be within both.
    ValueError
        If even without a budget no choice has so small an error.
    ArithmeticError
        As ``knapsack.solve``.

    Examples
    --------
    >>> costs = {"store": Cost(8, 8, 1.0), "compress": Cost(2, 8, 1.2, 1e-4)}
    >>> costs["recompute"] = Cost(1, 9, 1.5)
    >>> first = {(None, mode): cost for mode, cost in costs.items()}
    >>> later = {(before, mode): costs[mode] for before in costs for mode in costs}
    >>> problem = Problem(base_bytes=0, blocks=[first, later, later], after_bytes=0)
    >>> [solve_capped(problem, 12, limit).count("compress") for limit in (0, 1e-4, 1)]
    [0, 1, 2]
    """
    try:
        fastest = solve(problem, budget_bytes)
        if _within(problem, fastest, max_squared_error):
            return fastest
        careful = solve(_priced(problem, max_squared_error, None), budget_bytes)
    except Infeasible:
        careful = None
    if careful is None or not _within(problem, careful, max_squared_error):
        least = lightest_capped(problem, max_squared_error)
        raise Infeasible(peak_bytes(problem, least), budget_bytes)
    if exact:
        return solve_exactly(problem, budget_bytes, max_squared_error)
    above, below = fastest, careful
    for _ in range(_PRICES):
        gained = squared_error(problem, above) - squared_error(problem, below)
        price = (seconds(problem, below) - seconds(problem, above)) / gained
        if price <= 0:
            break
        found = solve(_priced(problem, max_squared_error, price), budget_bytes)
        known = _value(problem, below, price)
        if _value(problem, found, price) >= known * (1 - ROUNDING):
            break
        if _within(problem, found, max_squared_error):
            below = found
        else:
            above = found
    repaired = [
        _repaired(problem, modes, budget_bytes, max_squared_error)
        for modes in (below, careful)
    ]
    return min(repaired, key=lambda modes: seconds(problem, modes))


def lightest_capped(problem: Problem, max_squared_error: float) -> list[str]:
    """Choose the modes of the lowest peak whose error is within the limit.

    Parameters
    ----------
    problem : Problem
        The chain and its costs.
    max_squared_error : float
        What the sum of the squared errors may reach.

    Returns
    -------
    list of str
        The mode of each block.

    Raises
    ------
    ValueError
        If no choice has so small an error.
    """
    free = lightest(problem)
    if _within(problem, free, max_squared_error):
        return free
    for modes in frontier(_priced(problem, max_squared_error, None)):
        if _within(problem, modes, max_squared_error):
            return modes
    raise ValueError(
        f"No choice of modes has a squared error of at most {max_squared_error:g}. Allow "
        "more, or lossless modes for every block."
    )


def _within(problem: Problem, modes: Sequence[str], limit: float) -> bool:
    return squared_error(problem, modes) <= limit * (1 + ROUNDING)


def _value(problem: Problem, modes: Sequence[str], price: float) -> float:
    return seconds(problem, modes) + price * squared_error(problem, modes)


def _priced(problem: Problem, limit: float, price: float | None) -> Problem:
    """Add the error to the time, for a price; None to count the error alone.

    Times are brought to seconds or less, which a solver counts to the picosecond.
    """
    slowest = max(cost.seconds for costs in problem.blocks for cost in costs.values())

    def priced(cost: Cost) -> Cost:
        # What is above the limit by itself is beyond it, however far.
        shares = min(cost.squared_error / limit, 2.0) if limit else float(_lossy(cost))
        if price is None:
            return replace(cost, seconds=shares)
        per_share = price * limit
        whole = cost.seconds + per_share * shares
        return replace(cost, seconds=whole / (slowest + 2 * per_share))

    blocks = [{pair: priced(c) for pair, c in b.items()} for b in problem.blocks]
    return replace(problem, blocks=blocks)


def _lossy(cost: Cost) -> bool:
    return cost.squared_error > 0


def _repaired(
    problem: Problem, modes: list[str], budget_bytes: int, limit: float
) -> list[str]:
    """Change one block at a time, whichever gains most, while all stays within limits."""
    best, least = modes, seconds(problem, modes)
    while True:
        start = best
        for changed in _neighbours(problem, start):
            time = seconds(problem, changed)
            if (
                time < least
                and _within(problem, changed, limit)
                and peak_bytes(problem, changed) <= budget_bytes
            ):
                best, least = changed, time
        if best is start:
            return best


def _neighbours(problem: Problem, modes: list[str]) -> list[list[str]]:
    """List the choices that differ in one block, and whose pairs are allowed."""
    found = []
    last = len(modes) - 1
    for i, costs in enumerate(problem.blocks):
        before = modes[i - 1] if i else None
        for earlier, own in costs:
            follows = i == last or (own, modes[i + 1]) in problem.blocks[i + 1]
            if earlier == before and own != modes[i] and follows:
                found.append([*modes[:i], own, *modes[i + 1 :]])
    return found
