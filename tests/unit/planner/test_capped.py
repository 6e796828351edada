"""Modes within a limit of the gradient's error are fast, and always within it."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechbrain_rev.planner.knapsack import (
    Cost,
    Infeasible,
    Problem,
    lightest,
    lightest_capped,
    peak_bytes,
    seconds,
    solve,
    solve_capped,
    squared_error,
)
from tests.unit.planner.exact import solve_exactly

MODES = ("store", "recompute", "compress")
ROUNDING = 1 + 1e-9


def random_chain(generator, count, modes=MODES):
    """STORE is fast and holds much, COMPRESS alone has an error; pairs cost bytes."""
    blocks = []
    for i in range(count):
        own = {
            mode: Cost(
                generator.randint(10, 60)
                if mode == "store"
                else generator.randint(0, 15),
                generator.randint(0, 90),
                generator.randint(1, 20) / 1000 * (1 if mode == "store" else 1.5),
                generator.random() ** 3 if mode == "compress" else 0.0,
            )
            for mode in modes
        }
        blocks.append(
            {
                (before, mode): Cost(
                    c.held_bytes + (generator.randint(-3, 5) if before else 0),
                    c.working_bytes,
                    c.seconds,
                    c.squared_error,
                )
                for before in (modes if i else (None,))
                for mode, c in own.items()
            }
        )
    return Problem(generator.randrange(100), blocks, generator.randrange(30))


def every_choice(problem):
    return itertools.product(*[MODES] * len(problem.blocks))


def within(problem, modes, budget, limit):
    error = squared_error(problem, modes)
    return peak_bytes(problem, modes) <= budget and error <= limit * ROUNDING


def fastest(problem, budget, limit):
    """By trying all of them; None if there is none."""
    times = (
        seconds(problem, modes)
        for modes in every_choice(problem)
        if within(problem, modes, budget, limit)
    )
    return min(times, default=None)


def case(seed):
    generator = random.Random(seed)
    problem = random_chain(generator, generator.randint(1, 6))
    peaks = sorted(peak_bytes(problem, modes) for modes in every_choice(problem))
    budget = peaks[int(generator.random() ** 2 * (len(peaks) - 1))]
    return problem, budget, generator.choice([0, 0.01, 0.1, 0.3, 1, 3])


def test_choices_are_within_both_limits_and_nearly_the_fastest():
    """The gap is stated in ``solve_capped``; infeasible is what has no choice at all."""
    gaps = []
    for seed in range(150):
        problem, budget, limit = case(seed)
        best = fastest(problem, budget, limit)
        if best is None:
            with pytest.raises(Infeasible):
                solve_capped(problem, budget, limit)
            continue
        modes = solve_capped(problem, budget, limit)
        assert within(problem, modes, budget, limit), seed
        gaps.append(seconds(problem, modes) / best - 1)
    assert min(gaps) > -1e-9
    assert sum(gap > 1e-9 for gap in gaps) <= 0.03 * len(gaps)
    assert sum(gaps) / len(gaps) < 0.005


@pytest.mark.parametrize("seed", range(25))
def test_the_integer_solver_finds_the_fastest(seed):
    problem, budget, limit = case(seed)
    best = fastest(problem, budget, limit)
    if best is not None:
        modes = solve_exactly(problem, budget, limit)
        assert within(problem, modes, budget, limit)
        assert seconds(problem, modes) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(10))
def test_a_limit_of_zero_is_lossless_and_a_huge_one_is_none(seed):
    problem, _, _ = case(seed)
    lossless = Problem(
        problem.base_bytes,
        [
            {pair: c for pair, c in costs.items() if "compress" not in pair}
            for costs in problem.blocks
        ],
        problem.after_bytes,
    )
    least = lightest_capped(problem, 0)
    assert peak_bytes(problem, least) == peak_bytes(lossless, lightest(lossless))
    budget = peak_bytes(lossless, lightest(lossless)) + 20
    exact = solve(lossless, budget)
    found = solve_capped(problem, budget, 0)
    assert seconds(problem, found) == pytest.approx(seconds(problem, exact))
    assert squared_error(problem, found) == 0
    for limit in (1e6, float("inf")):
        assert solve_capped(problem, budget, limit) == solve(problem, budget)
        assert lightest_capped(problem, limit) == lightest(problem)


@given(
    st.integers(0, 10**6),
    st.integers(-14, 14),
    st.integers(-9, 9),
    st.floats(0, 2, allow_subnormal=False),
)
@settings(max_examples=60, deadline=None)
def test_units_change_no_promise(seed, error_unit, time_unit, limit):
    """Errors of any size, and times from nothing to days."""
    plain, budget, _ = case(seed)
    blocks = [
        {
            pair: Cost(
                c.held_bytes,
                c.working_bytes,
                c.seconds * min(10.0**time_unit, 1e6),
                c.squared_error * 10.0**error_unit,
            )
            for pair, c in costs.items()
        }
        for costs in plain.blocks
    ]
    problem = Problem(plain.base_bytes, blocks, plain.after_bytes)
    limit *= 10.0**error_unit
    try:
        modes = solve_capped(problem, budget, limit)
    except Infeasible:
        assert fastest(problem, budget, limit) is None
    else:
        assert within(problem, modes, budget, limit)


@pytest.mark.parametrize(
    ("count", "seed", "share"),
    [(40, 3, 0.005), pytest.param(120, 0, 0.02, marks=pytest.mark.slow)],
)
def test_long_chains_are_near_the_integer_solver_s_fastest(count, seed, share):
    modes = (*MODES, "reconstruct")
    problem = random_chain(random.Random(seed), count, modes)
    light = peak_bytes(problem, lightest(problem))
    budget = (light + peak_bytes(problem, ["store"] * count)) // 2
    limit = share * count
    found = solve_capped(problem, budget, limit)
    assert within(problem, found, budget, limit)
    assert squared_error(problem, solve(problem, budget)) > limit
    best = solve_exactly(problem, budget, limit)
    assert seconds(problem, found) <= 1.01 * seconds(problem, best)


def test_what_is_needed_is_said_for_the_limit_that_is_given():
    problem = random_chain(random.Random(1), 5)
    for limit in (0.0, 0.1, 10.0):
        with pytest.raises(Infeasible) as caught:
            solve_capped(problem, 1, limit)
        needed = caught.value.needed_bytes
        light = solve_capped(problem, needed, limit)
        assert within(problem, light, needed, limit)


def test_a_limit_that_no_choice_keeps_is_refused():
    lossy = Cost(1, 1, 1.0, squared_error=0.5)
    problem = Problem(0, [{(None, "compress"): lossy}], 0)
    for what in (lightest_capped, lambda p, limit: solve_capped(p, 100, limit)):
        with pytest.raises(ValueError, match="No choice of modes has a squared error"):
            what(problem, 0.1)
    with pytest.raises(ValueError, match="squared_error is -1"):
        Cost(1, 1, 1.0, squared_error=-1)
