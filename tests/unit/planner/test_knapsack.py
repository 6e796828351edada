"""A plan is the fastest of all that fit, within its budget and its limit of the error."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint

from speechbrain_rev.planner.knapsack import (
    PICOSECONDS,
    ROUNDING,
    Cost,
    Infeasible,
    InRun,
    Problem,
    lightest,
    lightest_capped,
    peak_bytes,
    seconds,
    solve,
    solve_capped,
    squared_error,
)

MODES = ("store", "reconstruct", "recompute")
LOSSY = ("store", "recompute", "compress")


def solve_exactly(problem, budget_bytes, max_squared_error):
    """Find the fastest modes by scipy's mixed-integer solver; of equal ones any."""
    count = len(problem.blocks)
    pairs = [(i, *pair) for i, costs in enumerate(problem.blocks) for pair in costs]
    costs = [cost for costs in problem.blocks for cost in costs.values()]
    # A node is a block with the mode before it. A pair of modes leads from one to the
    # next; as many pairs leave a node as lead to it, and one leaves the first.
    nodes = list(dict.fromkeys((i, before) for i, before, _ in pairs))
    flow = [
        [((i + 1, own) == node) - ((i, before) == node) for i, before, own in pairs]
        for node in nodes
    ]
    source = [-(node == (0, None)) for node in nodes]
    block, moment = np.array([i for i, *_ in pairs]), np.arange(count + 1)[:, None]
    held, working, times, errors = np.array(
        [(c.held_bytes, c.working_bytes, c.seconds, c.squared_error) for c in costs]
    ).T
    left = np.full(count + 1, budget_bytes - problem.base_bytes)
    left[-1] -= problem.after_bytes
    answer = scipy.optimize.milp(
        times / times.max(),
        integrality=np.ones(len(pairs)),
        bounds=(0, 1),
        constraints=[
            LinearConstraint(np.array(flow), source, source),
            LinearConstraint(
                held * (block < moment) + working * (block == moment), ub=left
            ),
            LinearConstraint(errors, ub=max_squared_error),
        ],
        options={"mip_rel_gap": 0.0},
    )
    modes = [own for (*_, own), x in zip(pairs, answer.x, strict=True) if x > 0.5]
    assert within(problem, modes, budget_bytes, max_squared_error)
    return modes


def within(problem, modes, budget_bytes, max_squared_error):
    error, peak = squared_error(problem, modes), peak_bytes(problem, modes)
    return peak <= budget_bytes and error <= max_squared_error * (1 + ROUNDING)


def random_chain(generator, count, modes=MODES, scale=1, missing=0.0):
    """STORE is fast and holds much, COMPRESS alone has an error; pairs cost bytes."""
    blocks = []
    for i in range(count):
        costs = {}
        for mode in modes:
            held, slower = ((10, 60), 1) if mode == "store" else ((0, 15), 1.5)
            own = Cost(
                generator.randint(*held) * scale,
                generator.randint(0, 90) * scale + generator.randrange(scale),
                generator.randint(1, 20) / 1000 * slower,
                generator.random() ** 3 if mode == "compress" else 0.0,
            )
            for before in modes if i else (None,):
                more = (generator.randint(-3, 5) if before else 0) * scale
                if before in (mode, None) or generator.random() >= missing:
                    costs[before, mode] = replace(own, held_bytes=own.held_bytes + more)
        blocks.append(costs)
    return Problem(generator.randrange(100), blocks, generator.randrange(30) * scale)


def with_runs(problem, generator, scale):
    """Blocks that recompute may do so together with the block before them."""
    blocks = []
    for costs in problem.blocks:
        sizes = [generator.randint(0, 60) * scale for _ in range(3)]
        run = InRun(*sizes)
        known = {
            (before, own): replace(cost, in_run=run if own == "recompute" else None)
            for (before, own), cost in costs.items()
        }
        for before, cost in [(b, c) for (b, own), c in known.items() if c.in_run]:
            if before == "recompute":
                joined = replace(cost, held_bytes=generator.randint(-9, 9), joins=True)
                known |= {(b, "join"): joined for b in ("recompute", "join")}
        after = {("join", own): c for (b, own), c in known.items() if b == "recompute"}
        blocks.append(
            known | {pair: after[pair] for pair in after if pair not in known}
        )
    return replace(problem, blocks=blocks)


def worst_moment(problem, costs):
    """Go through a step: forward, and backward run by run."""
    moments, held, runs = [], [problem.base_bytes], []
    for i, cost in enumerate(costs):
        moments.append(held[-1] + cost.working_bytes)
        held.append(held[-1] + cost.held_bytes)
        if cost.joins:
            runs[-1].append(i)
        else:
            runs.append([i])
    moments.append(held[-1] + problem.after_bytes)
    for first, *others in runs:
        now = held[first]
        if others:
            # A run's first block works alone only where it is alone.
            moments[first] = now
        for i in [first, *others] if others else []:
            run = costs[i].in_run
            is_last = i == others[-1]
            moments.append(now + (run.last_bytes if is_last else run.working_bytes))
            now += run.held_bytes
    return max(moments)


def all_plans(problem):
    """The time, the peak and the modes of each plan, by the definitions."""
    names = [dict.fromkeys(own for _, own in costs) for costs in problem.blocks]
    for modes in itertools.product(*names):
        pairs = zip((None, *modes), modes, problem.blocks, strict=False)
        costs = [costs.get((before, own)) for before, own, costs in pairs]
        if None not in costs:
            peak = worst_moment(problem, costs)
            yield sum(c.picoseconds for c in costs), peak, list(modes)


def measured(problem, modes):
    return round(PICOSECONDS * seconds(problem, modes)), peak_bytes(problem, modes)


def chain_of(generator, count, modes, scale, missing, runs):
    problem = random_chain(generator, count, modes, scale, missing)
    return with_runs(problem, generator, scale) if runs else problem


chains = st.builds(
    chain_of,
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.sampled_from([MODES[:1], MODES[:2], MODES, ("store", "recompute")]),
    st.sampled_from([1, 997, 10**9 + 7]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
)


@given(chains, st.randoms(use_true_random=False), st.integers(-1, 1))
def test_no_plan_is_faster_and_no_equally_fast_one_is_lighter(problem, pick, offset):
    plans = [plan[:2] for plan in all_plans(problem)]
    least, time = min((peak, time) for time, peak in plans)
    assert measured(problem, lightest(problem)) == (time, least)
    budget = pick.choice(plans)[1] + offset
    fitting = [plan for plan in plans if plan[1] <= budget]
    if fitting:
        assert measured(problem, solve(problem, budget)) == min(fitting)
        return
    with pytest.raises(Infeasible) as caught:
        solve(problem, budget)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (least, budget)


#: Each has a budget that is met only if every block of a run counts.
@pytest.mark.parametrize("seed", [17, 25, 39])
def test_the_worst_moment_of_a_run_may_be_in_any_of_its_blocks(seed):
    draws = random.Random(seed)
    chain = random_chain(draws, draws.randint(2, 5), ("store", "recompute"))
    problem = with_runs(chain, draws, 1)
    plans = [plan[:2] for plan in all_plans(problem)]
    for _, budget in plans:
        fastest = min(plan for plan in plans if plan[1] <= budget)
        assert measured(problem, solve(problem, budget)) == fastest


@given(chains, st.integers(2, 9), st.lists(st.integers(0, 300), min_size=2))
def test_with_few_states_the_least_budget_is_known_and_more_is_never_slower(
    problem, states, more
):
    needed = min(peak for _, peak, _ in all_plans(problem))
    with pytest.raises(Infeasible) as caught:
        solve(problem, needed - 1, states=states)
    assert caught.value.needed_bytes == needed
    times = []
    for extra in sorted([0, *more]):
        budget = needed + extra * max(1, needed // 300)
        modes = solve(problem, budget, states=states)
        time, peak = measured(problem, modes)
        assert peak <= budget
        times.append(time)
    assert times == sorted(times, reverse=True)


# Bytes of five modes of block i: sums of the first have every value, of the second few,
# and of the third all are different and far apart.
ADVERSARIAL = {
    "powers of two": lambda i, mode: mode * 2 ** (i % 36),
    "one prime": lambda i, mode: mode * 2147483647,
    "random": lambda i, mode: mode * random.Random(i).randrange(10**8, 10**10),
}


@pytest.mark.parametrize("sizes", ADVERSARIAL)
@pytest.mark.parametrize("share", [0.01, 0.9])
def test_at_adversarial_sizes_a_plan_is_within_a_percent_of_the_least_time(
    sizes, share
):
    """Each byte that is held saves the same time: what is left of a budget is lost."""
    names, rate = "abcde", 10**11
    held = [[ADVERSARIAL[sizes](i, mode) for mode in range(5)] for i in range(60)]
    blocks = [
        {
            (before, own): Cost(h, h, 2 * (row[-1] - h / 2) / rate)
            for before in (names if i else [None])
            for own, h in zip(names, row, strict=True)
        }
        for i, row in enumerate(held)
    ]
    problem, every_byte = Problem(10**9, blocks, 0), sum(row[-1] for row in held)
    left = int(share * every_byte)
    budget = problem.base_bytes + left
    # No plan is faster than one that holds just what is left; of one prime only
    # multiples can be held.
    if sizes == "one prime":
        left -= left % 2147483647
    least = (2 * every_byte - left) / rate
    modes = solve(problem, budget)
    assert least * (1 - 1e-9) <= seconds(problem, modes) <= 1.01 * least
    assert peak_bytes(problem, modes) <= budget


def test_a_mode_that_none_may_follow_is_not_taken():
    # "b" is light and fast.
    first = {(None, "a"): Cost(9, 9, 1.0), (None, "b"): Cost(0, 0, 0.0)}
    problem = Problem(0, [first, {("a", "a"): Cost(0, 0, 1.0)}], 0)
    assert solve(problem, 100) == lightest(problem) == ["a", "a"]


def test_few_plans_are_all_kept_however_close_they_are():
    only = {"store": (60_000, 1.0), "recompute": (59_999, 2.0), "reconstruct": (1, 3.0)}
    costs = {(None, mode): Cost(0, *cost) for mode, cost in only.items()}
    assert solve(Problem(0, [costs], 0), 59_999) == ["recompute"]


def one(*cost, base=0, after=0):
    """A chain of one block with one mode."""
    return Problem(base, [{(None, "store"): Cost(*(cost or (8, 12, 2.0)))}], after)


BROKEN = {(None, "a"): Cost(0, 0, 0)}, {("b", "a"): Cost(0, 0, 0)}
ALL_LOSSY = Problem(0, [{(None, "compress"): Cost(1, 1, 1.0, squared_error=0.5)}], 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cost(0, -1, 1.0), "working_bytes is -1 .* may be negative"),
        (lambda: Cost(0, 0, -1.0), "seconds -1.0"),
        (lambda: Cost(0, 0, math.nan), "seconds nan"),
        (lambda: Cost(0, 0, math.inf), "seconds inf"),
        (lambda: Cost(1.5, 2, 1.0), "1.5 are no whole bytes"),
        (lambda: Cost(1, 1, 1.0, squared_error=-1), "squared_error is -1"),
        (lambda: Problem(0, [], 0), "there are 0 blocks"),
        (lambda: one(base=-1), "base_bytes is -1"),
        (lambda: one(after=-1), "after_bytes -1"),
        (lambda: Problem(0, [{}], 0), "Block 0 .* nothing"),
        (lambda: Problem(0, BROKEN, 0), r"1 follows 'a', but its .* for \('b', 'a'\)"),
        (lambda: one(2**61, 2**61, 1), "Are the units bytes and sec"),
        (lambda: one(0, 0, 1e9), "Are the units bytes and seconds"),
        (lambda: solve(one(), 2000, states=1), "states is 1"),
        (lambda: seconds(one(), []), "0 modes for 1 blocks"),
        (lambda: peak_bytes(one(), ["a"]), "Block 0 cannot be 'a' after"),
        (lambda: lightest_capped(ALL_LOSSY, 0.1), "No choice .* has a squared error"),
        (lambda: solve_capped(ALL_LOSSY, 100, 0.1), "No choice .* a squared error"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def lossy_case(seed):
    """A chain, all its plans, a budget and a limit of the error.

    Of every second one errors are of any size, and times from nothing to days.
    """
    generator = random.Random(seed)
    problem = random_chain(generator, generator.randint(1, 6), LOSSY)
    slower, worse = 10.0 ** generator.randint(-9, 6), 10.0 ** generator.randint(-14, 14)
    if seed % 2 == 0:
        slower = worse = 1

    def scaled(c):
        seconds, error = c.seconds * slower, c.squared_error * worse
        return replace(c, seconds=seconds, squared_error=error)

    blocks = [{pair: scaled(c) for pair, c in b.items()} for b in problem.blocks]
    problem = replace(problem, blocks=blocks)
    plans = [modes for _, _, modes in all_plans(problem)]
    peaks = sorted(peak_bytes(problem, modes) for modes in plans)
    budget = peaks[int(generator.random() ** 2 * (len(peaks) - 1))]
    return problem, plans, budget, worse * generator.choice([0, 0.01, 0.1, 0.3, 1, 3])


def test_choices_are_within_both_limits_and_nearly_the_fastest():
    """The gap is stated in ``solve_capped``; infeasible is what has no choice at all."""
    gaps = []
    for seed in range(150):
        problem, plans, *limits = lossy_case(seed)
        fitting = [seconds(problem, m) for m in plans if within(problem, m, *limits)]
        if not fitting:
            with pytest.raises(Infeasible):
                solve_capped(problem, *limits)
            continue
        modes = solve_capped(problem, *limits)
        assert within(problem, modes, *limits), seed
        gaps.append(seconds(problem, modes) / min(fitting) - 1)
    assert min(gaps) > -1e-9
    assert sum(gap > 1e-9 for gap in gaps) <= 0.03 * len(gaps)
    assert sum(gaps) / len(gaps) < 0.005


@pytest.mark.parametrize(
    ("count", "seed", "share"),
    [(40, 3, 0.005), pytest.param(120, 0, 0.02, marks=pytest.mark.slow)],
)
def test_long_chains_are_near_the_integer_solver_s_fastest(count, seed, share):
    problem = random_chain(random.Random(seed), count, (*LOSSY, "reconstruct"))
    light = peak_bytes(problem, lightest(problem))
    budget = (light + peak_bytes(problem, ["store"] * count)) // 2
    limit = share * count
    modes = solve_capped(problem, budget, limit)
    assert within(problem, modes, budget, limit)
    assert squared_error(problem, solve(problem, budget)) > limit
    best = solve_exactly(problem, budget, limit)
    assert seconds(problem, modes) <= 1.01 * seconds(problem, best)


def test_what_is_needed_is_reported_for_the_limit_that_is_given():
    problem = random_chain(random.Random(1), 5, LOSSY)
    for limit in (0.0, 0.1, 10.0):
        with pytest.raises(Infeasible) as caught:
            solve_capped(problem, 1, limit)
        needed = caught.value.needed_bytes
        assert within(problem, solve_capped(problem, needed, limit), needed, limit)
