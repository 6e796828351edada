"""The fastest modes by scipy's mixed-integer solver, which the knapsack is held to."""

import numpy as np
import scipy.optimize
from scipy.optimize import LinearConstraint

from speechbrain_rev.planner.knapsack import ROUNDING, peak_bytes, squared_error

# Of the coefficients that the solver sees.
_LARGEST = 1e5


def solve_exactly(problem, budget_bytes, max_squared_error=np.inf):
    """Find the fastest modes within a budget and a limit of the error.

    Seconds for 60 blocks of five modes, but no end may be in sight where many choices come
    close to the budget. Of equally fast choices it gives any. Where the solver's tolerances
    do not suffice it is an ArithmeticError.
    """
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
    answer = scipy.optimize.milp(
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
            f"scipy's solver found no plan, though there is one: {answer.message}"
        )
    modes = [
        own for (_, _, own), taken in zip(pairs, answer.x, strict=True) if taken > 0.5
    ]
    peak = peak_bytes(problem, modes)
    if peak > budget_bytes:
        raise ArithmeticError(
            f"The plan of scipy's solver peaks at {peak} bytes but the budget is "
            f"{budget_bytes}: its tolerance is larger than that."
        )
    error = squared_error(problem, modes)
    if error > max_squared_error * (1 + ROUNDING):
        raise ArithmeticError(
            f"The plan of scipy's solver has a squared error of {error:g}, above "
            f"{max_squared_error:g}: its tolerance is larger than that."
        )
    return modes


# Prices that are tried; each but the last is nearer to the best one.
_PRICES = 50
