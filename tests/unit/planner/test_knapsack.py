"""A plan is the fastest of all that fit, and none ever exceeds its budget."""

import itertools
import random

import pytest
import scipy.optimize
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from speechbrain_rev.planner.knapsack import (
    Cost,
    Infeasible,
    Problem,
    lightest,
    peak_bytes,
    seconds,
    solve,
)
from tests.unit.planner.exact import solve_exactly

MODES = ("store", "reconstruct", "recompute")


def chain(*tables, base=1000, after=7, boundary=0):
    """Blocks of one table of mode -> (held, working, ms) each; a change costs bytes."""
    blocks = []
    previous = (None,)
    for table in tables:
        blocks.append(
            {
                (before, own): Cost(
                    held + boundary * (before not in (own, None)), working, ms / 1000
                )
                for before in previous
                for own, (held, working, ms) in table.items()
            }
        )
        previous = tuple(table)
    return Problem(base, blocks, after)


def all_plans(problem):
    """The time in ms, the peak and the modes of each plan, by the definitions."""
    plans = []
    names = [dict.fromkeys(own for _, own in costs) for costs in problem.blocks]
    for modes in itertools.product(*names):
        pairs = list(zip((None, *modes), modes, strict=False))
        if all(p in costs for p, costs in zip(pairs, problem.blocks, strict=True)):
            costs = [c[p] for p, c in zip(pairs, problem.blocks, strict=True)]
            held = [sum(c.held_bytes for c in costs[:i]) for i in range(len(costs) + 1)]
            moments = [
                before + cost.working_bytes
                for before, cost in zip(held, costs, strict=False)
            ]
            peak = problem.base_bytes + max([*moments, held[-1] + problem.after_bytes])
            ms = sum(round(1000 * cost.seconds) for cost in costs)
            plans.append((ms, peak, list(modes)))
    return plans


def measured(problem, modes):
    return round(1000 * seconds(problem, modes)), peak_bytes(problem, modes)


def assert_best(problem, plans, budget):
    within = [plan[:2] for plan in plans if plan[1] <= budget]
    if within:
        assert measured(problem, solve(problem, budget)) == min(within)
    else:
        with pytest.raises(Infeasible) as caught:
            solve(problem, budget)
        needed = min(peak for _, peak, _ in plans)
        assert (caught.value.needed_bytes, caught.value.budget_bytes) == (
            needed,
            budget,
        )


def random_chain(generator, blocks, modes=3, unit=1):
    """Random costs of each pair of modes; a change may cost bytes or give some back."""
    return Problem(
        generator.randrange(1000) * unit,
        [
            {
                (before, own): Cost(
                    generator.randint(-20, 60) * unit + generator.randrange(unit),
                    generator.randint(0, 90) * unit + generator.randrange(unit),
                    generator.randint(0, 20) / 1000,
                )
                for before in (MODES[:modes] if block else (None,))
                for own in MODES[:modes]
                # Some changes of mode are not allowed.
                if before in (own, None) or generator.random() < 0.8
            }
            for block in range(blocks)
        ],
        generator.randrange(100) * unit,
    )


chains = st.builds(
    random_chain,
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([1, 997, 10**9 + 7]),
)


@given(chains, st.randoms(use_true_random=False), st.integers(-1, 1))
def test_no_plan_is_faster_and_no_equally_fast_one_is_lighter(problem, pick, offset):
    plans = all_plans(problem)
    assert_best(problem, plans, pick.choice(plans)[1] + offset)


@pytest.mark.parametrize(("blocks", "modes"), [(7, 2), (6, 3), (7, 3)])
def test_it_is_so_at_each_byte_around_the_peak_of_any_plan(blocks, modes):
    problem = random_chain(random.Random(blocks), blocks, modes)
    plans = all_plans(problem)
    peaks = {peak for _, peak, _ in plans}
    assert len(peaks) > 50
    for budget in {peak + offset for peak in peaks for offset in (-1, 0, 1)}:
        assert_best(problem, plans, budget)


@given(chains)
def test_the_lightest_plan_has_the_least_peak_and_is_the_fastest_of_those(problem):
    least_peak, ms = min((peak, ms) for ms, peak, _ in all_plans(problem))
    assert measured(problem, lightest(problem)) == (ms, least_peak)


def test_the_lightest_plan_is_not_the_lightest_mode_of_each_block():
    # Reconstructing the first block holds least, but a change of mode costs 50.
    greedy = {"store": (10, 10, 1), "reconstruct": (0, 10, 2)}
    problem = chain(greedy, {"store": (10, 10, 1)}, boundary=50)
    assert lightest(problem) == ["store", "store"]


USUAL = {"store": (8, 12, 2), "recompute": (2, 10, 3), "reconstruct": (0, 9, 4)}


@pytest.mark.parametrize("boundary", [0, 5, -2])
def test_without_a_limit_every_block_stores(boundary):
    problem = chain(*[USUAL] * 9, boundary=boundary)
    assert solve(problem, 10**15) == ["store"] * 9


@pytest.mark.parametrize("blocks", [1, 2, 60])
def test_what_reconstruction_needs_is_enough_and_a_byte_less_is_not(blocks):
    equal = {mode: USUAL[mode] for mode in ("store", "reconstruct")}
    problem = chain(*[equal] * blocks)
    peak = 1000 + 9
    assert solve(problem, peak) == ["reconstruct"] * blocks
    with pytest.raises(Infeasible, match=rf"peaks at .*\({peak} bytes\).* budget") as e:
        solve(problem, peak - 1)
    assert (e.value.needed_bytes, e.value.budget_bytes) == (peak, peak - 1)


@pytest.mark.parametrize("slow", range(6))
def test_the_block_that_is_slow_to_reconstruct_stores(slow):
    equal = {mode: USUAL[mode] for mode in ("store", "reconstruct")}
    tables = [equal] * 6
    one = 1000 + 8 + 12
    assert solve(chain(*tables), one - 1).count("store") <= 1
    tables[slow] = equal | {"reconstruct": (0, 9, 40)}
    # Another that stores works on 12 above its 8.
    plan = solve(chain(*tables), one - 1)
    assert plan == ["store" if i == slow else "reconstruct" for i in range(6)]


@given(chains, st.integers(2, 9), st.lists(st.integers(0, 300), min_size=2))
def test_with_any_number_of_states_more_budget_is_never_slower(problem, states, more):
    unit = max(1, peak_bytes(problem, lightest(problem)) // 300)
    times = []
    for extra in sorted(more):
        budget = peak_bytes(problem, lightest(problem)) + extra * unit
        plan = solve(problem, budget, states=states)
        assert peak_bytes(problem, plan) <= budget
        times.append(round(1000 * seconds(problem, plan)))
    assert times == sorted(times, reverse=True)


@given(chains, st.integers(2, 9))
def test_with_any_number_of_states_the_least_budget_is_found(problem, states):
    needed = min(peak for _, peak, _ in all_plans(problem))
    assert peak_bytes(problem, solve(problem, needed, states=states)) == needed
    with pytest.raises(Infeasible) as caught:
        solve(problem, needed - 1, states=states)
    assert caught.value.needed_bytes == needed


# Bytes of five modes of block i: sums of the first have every value, of the second and
# third few, and of the fourth all are different and far apart.
ADVERSARIAL = {
    "powers of two": lambda i, mode: mode * 2 ** (i % 36),
    "one prime": lambda i, mode: mode * 2147483647,
    "primes": lambda i, mode: mode * (2147483647, 1073741789, 999999937)[i % 3],
    "random": lambda i, mode: mode * random.Random(i).randrange(10**8, 10**10),
}
BYTES_PER_SECOND = 10**11


def adversarial(bytes_of, blocks=60, modes=5):
    """Each byte that is held saves the same time: what is left of a budget is lost."""
    every = [f"mode {mode}" for mode in range(modes)]
    held = [[bytes_of(i, mode) for mode in range(modes)] for i in range(blocks)]
    return Problem(
        10**9,
        [
            {
                (before, own): Cost(h, h, 2 * (block[-1] - h / 2) / BYTES_PER_SECOND)
                for before in (every if i else [None])
                for own, h in zip(every, block, strict=True)
            }
            for i, block in enumerate(held)
        ],
        after_bytes=0,
    ), sum(block[-1] for block in held)


@pytest.mark.parametrize("sizes", ADVERSARIAL)
@pytest.mark.parametrize("share", [0.01, 0.37, 0.9])
def test_at_adversarial_sizes_a_plan_is_within_a_percent_of_the_least_time(
    sizes, share
):
    problem, every_byte = adversarial(ADVERSARIAL[sizes])
    room = int(share * every_byte)
    budget = problem.base_bytes + room
    plan = solve(problem, budget)
    assert peak_bytes(problem, plan) <= budget
    # No plan is faster than one that holds just what there is room for; of one prime
    # only multiples can be held.
    if sizes == "one prime":
        room -= room % 2147483647
    least = (2 * every_byte - room) / BYTES_PER_SECOND
    assert least * (1 - 1e-9) <= seconds(problem, plan) <= 1.01 * least
    for states in (2, 50):
        assert peak_bytes(problem, solve(problem, budget, states=states)) <= budget


def opposed(seed, blocks=60, modes=5):
    """What is lighter is slower, by no exact rule; a change of mode costs bytes."""
    generator = random.Random(seed)
    names = [f"mode {mode}" for mode in range(modes)]
    costs = []
    for block in range(blocks):
        size = generator.randrange(10**8, 10**10)
        levels = [generator.random() for _ in names]
        costs.append(
            {
                (before, own): Cost(
                    int(size * level) + change,
                    int(size * level) + max(change, 0) + generator.randrange(10**9),
                    size * (1.5 - level) / 1e11,
                )
                for before in (names if block else [None])
                for own, level in zip(names, levels, strict=True)
                for change in [
                    generator.randint(-(10**8), 10**8)
                    if before not in (own, None)
                    else 0
                ]
            }
        )
    return Problem(10**9, costs, after_bytes=10**8)


@pytest.mark.parametrize("share", [0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_sixty_blocks_of_five_modes_are_within_a_percent_of_the_exact_solver(share):
    problem = opposed(seed=0)
    least = peak_bytes(problem, lightest(problem))
    most = peak_bytes(problem, solve(problem, 10**15))
    budget = int(least + share * (most - least))
    exact = seconds(problem, solve_exactly(problem, budget))
    plan = solve(problem, budget)
    assert peak_bytes(problem, plan) <= budget
    assert exact * (1 - 1e-9) <= seconds(problem, plan) <= 1.01 * exact
    small = solve(problem, budget, states=50)
    assert peak_bytes(problem, small) <= budget
    assert seconds(problem, small) <= 1.05 * exact


@settings(max_examples=30, deadline=None)
@given(chains, st.randoms(use_true_random=False))
def test_the_exact_solver_finds_the_fastest_of_all_plans(problem, pick):
    plans = all_plans(problem)
    budget = pick.choice(plans)[1]
    # Nearer to the budget than its tolerance it may refuse to answer.
    assume(not any(0 < peak - budget < 1e-6 * budget for _, peak, _ in plans))
    ms, peak = measured(problem, solve_exactly(problem, budget))
    assert peak <= budget
    assert ms == min(ms for ms, peak, _ in plans if peak <= budget)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("after_bytes", [0, 10**10])
def test_it_does_so_for_longer_chains_whatever_makes_the_peak(seed, after_bytes):
    problem = opposed(seed, blocks=7, modes=3)
    problem = Problem(problem.base_bytes, problem.blocks, after_bytes)
    plans = all_plans(problem)
    peaks = sorted(peak for _, peak, _ in plans)
    for share in (0.01, 0.1, 0.5):
        budget = peaks[int(share * len(peaks))] + 1000
        times = [seconds(problem, modes) for _, peak, modes in plans if peak <= budget]
        plan = solve_exactly(problem, budget)
        assert peak_bytes(problem, plan) <= budget
        assert seconds(problem, plan) == pytest.approx(min(times), rel=1e-9)
        assert seconds(problem, solve(problem, budget)) == seconds(problem, plan)


def test_the_exact_solver_never_returns_a_plan_that_is_over_the_budget(monkeypatch):
    milp = scipy.optimize.milp

    def careless(times, *, constraints, **options):
        return milp(times, constraints=constraints[:1], **options)

    monkeypatch.setattr(scipy.optimize, "milp", careless)
    problem = chain(*[USUAL] * 3)
    with pytest.raises(ArithmeticError, match=r"peaks at 1031 bytes .* 1030"):
        solve_exactly(problem, 1030)


def test_of_equal_times_in_another_order_the_lighter_plan_is_taken():
    # As floats the heavier plan, added from the last block on, seems the faster one.
    assert (0.3 + 0.2) + 0.1 < (0.1 + 0.2) + 0.3
    problem = Problem(
        0,
        [
            {(None, "heavy"): Cost(5, 5, 0.1), (None, "light"): Cost(4, 4, 0.3)},
            {(mode, mode): Cost(0, 0, 0.2) for mode in ("heavy", "light")},
            {
                ("heavy", "heavy"): Cost(0, 0, 0.3),
                ("light", "light"): Cost(0, 0, 0.1),
            },
        ],
        after_bytes=0,
    )
    assert solve(problem, 100) == ["light"] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cost(0, -1, 1.0), "working_bytes is -1 .* may be negative"),
        (lambda: Cost(0, 0, -1.0), "seconds -1.0"),
        (lambda: Cost(0, 0, float("nan")), "seconds nan"),
        (lambda: Cost(0, 0, float("inf")), "seconds inf"),
        (lambda: Cost(1.5, 2, 1.0), "1.5 are no whole bytes"),
        (lambda: Problem(0, [], 0), "there are 0 blocks"),
        (lambda: chain(USUAL, base=-1), "base_bytes is -1"),
        (lambda: chain(USUAL, after=-1), "after_bytes -1"),
        (lambda: Problem(0, [{}], 0), "Block 0 .* nothing"),
        (
            lambda: Problem(
                0, [{(None, "a"): Cost(0, 0, 0)}, {("b", "a"): Cost(0, 0, 0)}], 0
            ),
            r"Block 1 follows 'a', but its costs are for \('b', 'a'\)",
        ),
        (lambda: chain({"a": (2**61, 2**61, 1)}), "Are the units bytes and seconds"),
        (lambda: chain({"a": (0, 0, 1e12)}), "Are the units bytes and seconds"),
        (lambda: solve(chain(USUAL), 2000, states=1), "states is 1"),
        (lambda: seconds(chain(USUAL), []), "0 modes for 1 blocks"),
        (lambda: peak_bytes(chain(USUAL), ["stor"]), "Block 0 cannot be 'stor' after"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_way_that_cannot_go_on_is_not_taken():
    # "b" is light and fast, but nothing may follow it.
    first = {(None, "a"): Cost(9, 9, 1.0), (None, "b"): Cost(0, 0, 0.0)}
    problem = Problem(0, [first, {("a", "a"): Cost(0, 0, 1.0)}], 0)
    assert solve(problem, 100) == solve_exactly(problem, 100) == ["a", "a"]
    assert lightest(problem) == ["a", "a"]


def test_few_plans_are_all_kept_however_close_they_are():
    costs = {
        "store": (60_000, 1.0),
        "recompute": (59_999, 2.0),
        "reconstruct": (1, 3.0),
    }
    only = {(None, mode): Cost(0, *cost) for mode, cost in costs.items()}
    assert solve(Problem(0, [only], 0), 59_999) == ["recompute"]
