"""From a profile follows the peak of any plan; profiles are kept as files."""

import json

import pytest

from speechbrain_rev.devices import ASSUMED
from speechbrain_rev.planner import Infeasible, Profile
from speechbrain_rev.planner.knapsack import Cost, peak_bytes, solve
from speechbrain_rev.planner.network import compare_next
from speechbrain_rev.planner.profile import BlockProfile
from tests.unit.lobes.encoders import KINDS
from tests.unit.planner.networks import (
    MIB,
    OTHERS,
    SCALARS,
    WITH_RUNS,
    encoder_on_meta,
    other_on_meta,
    peak_of,
    profile_of,
    profiled_on_meta,
    random_modes,
    with_runs_on_meta,
)

#: The module, whose name is a function of the package too.


def assert_predicted(network, step, profile, plans, tolerance=SCALARS):
    """Run plans with nobody watching, and compare what they take."""
    peaks = set()
    for seed in range(plans):
        modes = random_modes(network, seed)
        network.set_mode(modes)
        compare_next(network)
        peak = peak_of(step)
        assert abs(profile.peak_bytes(modes) - peak) <= tolerance, modes
        peaks.add(peak)
    assert len(peaks) >= min(plans, 8) - 2


# Other kinds take longer and are met at the width of the table.
QUICK = [("df_resnet56", "exact"), ("revnet46", "exact"), ("df_revnet89", "float")]


@pytest.mark.parametrize(("name", "streams"), QUICK)
def test_the_peak_of_any_plan_of_an_encoder_is_as_predicted(name, streams):
    assert_predicted(*profiled_on_meta(name, streams), plans=4)


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["exact", "float"])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_so_at_the_width_of_the_table(name, streams):
    settings = {"widths": None, "blocks": (1, 3, 1, 1), "chunk": "auto"}
    network, step = encoder_on_meta(name, streams=streams, **settings)
    profile = profile_of(network, step)
    assert profile.peak_bytes(profile.uniform("store")) > 20 * MIB
    assert_predicted(network, step, profile, plans=6)


@pytest.mark.parametrize("name", OTHERS)
def test_the_peak_of_any_plan_of_another_network_is_as_predicted(name):
    # Fewer have no run at whose peak gradients wait, or too few that differ.
    assert_predicted(*profiled_on_meta(name), plans=24)


@pytest.mark.parametrize("name", WITH_RUNS)
def test_the_peak_of_any_run_of_another_network_is_as_predicted(name):
    network, step, profile = with_runs_on_meta(name)
    _first, *others = profile.blocks
    assert all("join" in block.modes for block in others)
    assert_predicted(network, step, profile, plans=16)


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("revnet57", "exact"),
        *(
            pytest.param(name, streams, marks=pytest.mark.slow)
            for name in KINDS
            for streams in ("exact", "float")
        ),
    ],
)
def test_a_deeper_encoder_is_predicted_from_a_shallow_one(name, streams):
    deep, step = encoder_on_meta(name, blocks=(2, 4, 2, 3), streams=streams)
    shallow = encoder_on_meta(name, blocks=(2, 2, 2, 2), streams=streams)
    profile = profile_of(*shallow).stretched(list(deep.named_blocks()), {})
    assert [block.name for block in profile.blocks] == list(deep.named_blocks())
    # The monitor's counters grow with the blocks, and a block's weight gradients may be
    # alive beside its activations or not. Neither grows with the batch.
    gradients = max(block.gradient_bytes for block in profile.blocks)
    assert_predicted(deep, step, profile, 4, tolerance=SCALARS + gradients)


def test_what_cannot_be_stretched_is_refused():
    _, _, profile = profiled_on_meta("revnet46")
    with pytest.raises(ValueError, match=r"'stages\.4\.chain\.0' is like none of stem"):
        profile.stretched(["stem", "stages.4.chain.0"], {})
    with pytest.raises(ValueError, match="Profile this network itself"):
        profile.stretched(["stages.0.chain.last"], {})


def test_a_step_that_fails_leaves_the_modes_as_they_were():
    network, _ = other_on_meta("chain and layers")
    network.set_mode(random_modes(network, seed=3))
    modes = dict(network.block_modes())
    with pytest.raises(ZeroDivisionError):
        profile_of(network, lambda: 1 / 0)
    assert network.block_modes() == modes


def test_what_the_solver_counts_is_never_less_than_what_a_plan_takes():
    network, _, profile = profiled_on_meta("revnet46")
    problem = profile.problem()
    for seed in range(50):
        modes = random_modes(network, seed)
        assert profile.peak_bytes(modes) <= peak_bytes(
            problem, [*modes.values(), "end"]
        )
    # Where runs go to the end of their chains it is what they take.
    for mode in ("store", "recompute", "reconstruct"):
        modes = profile.uniform(mode)
        solved = peak_bytes(problem, [*modes.values(), "end"])
        assert solved == profile.peak_bytes(modes)


def two_blocks():
    """The second only recomputes, and is in the first one's chain."""
    first = {
        (None, "store"): Cost(50, 55, 1.0),
        (None, "reconstruct"): Cost(0, 10, 2.0),
        (None, "recompute"): Cost(50, 55, 1.5),
    }
    second = {(before, "recompute"): Cost(5, 10, 1.0) for _, before in first}
    blocks = [BlockProfile("c.0", 100, first), BlockProfile("c.1", 100, second)]
    return Profile(blocks, 0, {"recompute": 3}, 0.0, {})


def test_modes_that_fit_by_their_exact_peak_are_chosen():
    """Gradients of a run that stops before its chain are counted too many in a problem."""
    profile = two_blocks()
    mixed = {"c.0": "reconstruct", "c.1": "recompute"}
    assert profile.peak_bytes(mixed) == 10
    with pytest.raises(Infeasible):
        solve(profile.problem(), 59)
    assert profile.fastest(59) == profile.lightest() == mixed
    assert profile.fastest(60) == {"c.0": "store", "c.1": "recompute"}
    with pytest.raises(Infeasible) as caught:
        profile.fastest(9)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (10, 9)
    # Other times change no byte.
    taken = {(b.name, mode): 3.0 for b in profile.blocks for mode in b.modes}
    timed = profile.with_seconds({**taken, ("", ""): 1.0})
    assert timed.peak_bytes(mixed) == 10
    assert (timed.seconds(mixed), profile.seconds(mixed)) == (7.0, 3.0)


@pytest.mark.parametrize("ask", ["peak_bytes", "seconds", "gradient_error"])
def test_modes_that_a_block_lacks_are_refused(ask):
    ask = getattr(two_blocks(), ask)
    with pytest.raises(ValueError, match=r"Block 'c\.0' has None where one of store, "):
        ask({})
    with pytest.raises(ValueError, match=r"Block 'c\.1' has 'store' where one of"):
        ask({"c.0": "store", "c.1": "store"})


def test_a_profile_keeps_errors_and_work_in_its_document():
    network, step = other_on_meta("plain")
    profile = profile_of(network, step, with_work=True)
    keys = {(block.name, mode) for block in profile.blocks for mode in block.modes}
    assert profile.work.keys() == keys | {("", "")}
    cost = Cost(9, 9, 0.1 + 0.2, dropped_bytes=2, forward_bytes=8, left_bytes=1)
    lossy = BlockProfile("b", 4, {(None, "compress"): cost})
    other = Profile([lossy], 3, {"compress": 2}, 0.1, {}).with_errors({"b": 0.01}, 0.3)
    assert other.gradient_error({"b": "compress"}) == 0.1
    for each in (profile, other):
        assert Profile.from_json(each.to_json()) == each
    assert profile.with_speed(ASSUMED).seconds(profile.uniform("store")) > 0
    with pytest.raises(ValueError, match=r"no counts of operations.* Profile anew"):
        other.with_speed(ASSUMED)


NAN, INF = float("nan"), float("inf")
BAD_VALUES = {
    ("blocks",): (3, None, [], [None], {"0": {}}),
    ("base_bytes",): ("5", -5, 5.5, True, NAN, 10**30),
    ("after_bytes",): (None, {}, {"store": "1"}),
    ("after_seconds",): ("1", -5, True, NAN, INF),
    ("about",): (None, {"device": 3}),
    ("max_gradient_error",): ("1", -1),
    ("work",): (
        [["0"]],
        [["0", "store", -1, 0, 0, 0]],
        [["0", "store", *[1] * 3]],
        [["0", "store", *[1] * 5]],
    ),
    ("other",): (1,),
    ("blocks", 1, "name"): (None, 3),
    ("blocks", 1, "gradient_bytes"): ("x", -1),
    ("blocks", 1, "costs"): (
        None,
        [],
        [[]],
        [["store", "store", 1, 1]],
        [[None, "store", 1, 1, 1.0, 0.0, 0, 0, 0]],
    ),
    ("blocks", 1, "costs", 0, 0): ("evil", 3, []),
    ("blocks", 1, "costs", 0, 1): ("evil", None, []),
    ("blocks", 1, "costs", 0, 2): (1.5, None, -(10**30)),
    ("blocks", 1, "costs", 0, 3): (1.5, True, -1, 10**30),
    ("blocks", 1, "costs", 0, 4): (None, -1.0, NAN, INF, 1e300),
    ("blocks", 1, "costs", 0, 5): (-1.0, NAN),
    ("blocks", 1, "costs", 0): (["store", "store", 1, 2, 0.5],),
}


def document_of_two_blocks():
    costs = [[before, "store", 1, 2, 0.5, 0.0, 0, 0, 0] for before in (None, "store")]
    blocks = [
        {"name": str(i), "gradient_bytes": 4, "costs": [cost]}
        for i, cost in enumerate(costs)
    ]
    about = {"after_bytes": {"store": 2}, "after_seconds": 0.5, "about": {}}
    about |= {"max_gradient_error": None, "work": []}
    return {"blocks": blocks, "base_bytes": 3, **about}


@pytest.mark.parametrize("place", BAD_VALUES, ids=str)
def test_a_profile_with_a_value_of_another_kind_is_refused(place):
    assert Profile.from_json(json.dumps(document_of_two_blocks()))
    *outer, last = place
    for value in BAD_VALUES[place]:
        document = inner = document_of_two_blocks()
        for key in outer:
            inner = inner[key]
        inner[last] = value
        with pytest.raises(ValueError, match=r"The text is no profile .* Profile anew"):
            Profile.from_json(json.dumps(document))
    if place not in (("other",), ("max_gradient_error",)):
        del document[place[0]]
        with pytest.raises(ValueError, match=r"missing.* Profile anew"):
            Profile.from_json(json.dumps(document))
