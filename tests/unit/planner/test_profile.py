"""From a profile follows the peak of any plan, to the byte but for scalars."""

import functools
import json
from dataclasses import replace

import pytest

from speechbrain_rev.planner import Infeasible, Profile
from speechbrain_rev.planner.knapsack import Cost, lightest, peak_bytes, solve
from speechbrain_rev.planner.network import compare_next
from speechbrain_rev.planner.profile import BlockProfile
from speechbrain_rev.planner.profiling import count
from speechbrain_rev.planner.step import Trial
from speechbrain_rev.planner.timing import ASSUMED
from tests.unit.lobes.encoders import KINDS
from tests.unit.planner.networks import (
    MIB,
    OTHERS,
    SCALARS,
    encoder_on_meta,
    other_on_meta,
    peak_of,
    profile_of,
    profiled_on_meta,
    random_modes,
)


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


#: Others take longer and are met at the width of the table.
FLOAT = [("revnet46", "float"), ("df_revnet89", "float")]


@pytest.mark.parametrize(("name", "streams"), [*((k, "exact") for k in KINDS), *FLOAT])
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
    network, step = other_on_meta(name)
    # Fewer have no run at whose peak gradients wait, or too few that differ.
    assert_predicted(network, step, profile_of(network, step), plans=24)


@pytest.mark.parametrize("name", ["revnet57", "resnet34"])
def test_a_deeper_network_is_predicted_from_a_shallow_one(name):
    deep, step = encoder_on_meta(name, blocks=(2, 4, 2, 3))
    shallow = profile_of(*encoder_on_meta(name, blocks=(2, 2, 2, 2)))
    assert_stretched(deep, step, shallow)


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["exact", "float"])
@pytest.mark.parametrize("name", KINDS)
def test_every_deeper_encoder_is_predicted_from_a_shallow_one(name, streams):
    deep, step = encoder_on_meta(name, blocks=(3, 4, 2, 3), streams=streams)
    shallow = profile_of(*encoder_on_meta(name, blocks=(2, 2, 2, 2), streams=streams))
    assert_stretched(deep, step, shallow)


def assert_stretched(deep, step, shallow):
    profile = shallow.stretched(list(deep.named_blocks()), {})
    assert [block.name for block in profile.blocks] == list(deep.named_blocks())
    # The monitor's counters grow with the blocks, and a block's weight gradients may be
    # alive beside its activations or not. Neither grows with the batch.
    gradients = max(block.gradient_bytes for block in profile.blocks)
    assert_predicted(deep, step, profile, 4, tolerance=SCALARS + gradients)


def test_what_cannot_be_stretched_is_refused():
    _, _, profile = profiled_on_meta("revnet46", "exact")
    with pytest.raises(ValueError, match=r"'stages\.4\.chain\.0' is like none of stem"):
        profile.stretched(["stem", "stages.4.chain.0"], {})
    with pytest.raises(ValueError, match="Profile this network itself"):
        profile.stretched(["stages.0.chain.last"], {})


def test_every_pair_of_modes_that_may_meet_has_a_cost():
    network, _, profile = profiled_on_meta("revnet46", "exact")
    allowed = network.allowed_modes()
    assert [block.name for block in profile.blocks] == list(allowed)
    before = [None]
    for block in profile.blocks:
        own = [mode.value for mode in allowed[block.name]]
        assert set(block.costs) == {(b, o) for b in before for o in own}
        assert sorted(block.modes) == sorted(own)
        before = own
    assert set(profile.after_bytes) == set(before)


@pytest.mark.parametrize(
    "on_meta",
    [
        lambda: encoder_on_meta("resnet34", blocks=(1, 2, 1, 1)),
        lambda: other_on_meta("chain and layers"),
    ],
)
def test_profiling_leaves_the_modes_as_they_were(on_meta):
    network, step = on_meta()
    network.set_mode(random_modes(network, seed=3))
    modes = dict(network.block_modes())
    profile_of(network, step)
    assert network.block_modes() == modes

    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        profile_of(network, fails)
    assert network.block_modes() == modes


def test_what_the_solver_counts_is_never_less_than_what_a_plan_takes():
    network, _, profile = profiled_on_meta("revnet155", "exact")
    problem = profile.problem()
    for seed in range(50):
        modes = random_modes(network, seed)
        solved = peak_bytes(problem, [*modes.values(), "end"])
        assert profile.peak_bytes(modes) <= solved
    # Runs to the end of their chains, it says, are what they take.
    for mode in ("store", "recompute", "reconstruct"):
        modes = profile.uniform(mode)
        solved = peak_bytes(problem, [*modes.values(), "end"])
        assert solved == profile.peak_bytes(modes)


def test_uniform_modes_recompute_what_cannot_have_them():
    network, _, profile = profiled_on_meta("revnet46", "exact")
    network.set_mode("reconstruct")
    assert profile.uniform("reconstruct") == network.block_modes()
    assert set(profile.uniform("store").values()) == {"store"}


def test_a_profile_goes_through_json():
    network, step = other_on_meta("chain and layers")
    profile = replace(profile_of(network, step), after_seconds=0.1 + 0.2)
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert lightest(again.problem()) == lightest(profile.problem())
    modes = random_modes(network, seed=0)
    assert again.peak_bytes(modes) == profile.peak_bytes(modes)


@pytest.fixture(scope="module")
def plain_document():
    return profile_of(*other_on_meta("plain")).to_json()


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("blocks"),
        lambda document: document.pop("base_bytes"),
        lambda document: document["blocks"][0].pop("costs"),
        lambda document: document["blocks"][0]["costs"][0].clear(),
        lambda document: document["blocks"][0]["costs"][0].__delitem__(slice(4, 6)),
        lambda document: document["blocks"][0]["costs"][0].__setitem__(5, -1.0),
        lambda document: document.update(other=1),
        *(
            functools.partial(dict.update, **{name: value})
            for name, values in {
                "blocks": (3, None, [], [None], {"0": {}}),
                "base_bytes": ("5", -5, 5.5, None, True, float("nan"), 10**30),
                "after_bytes": (None, {}, [], {"store": "1", "recompute": "2"}),
                "after_seconds": ("1", -5, None, True, float("nan"), float("inf")),
                "about": (None, [], "x", {"device": 3}),
            }.items()
            for value in values
        ),
        *(
            lambda document, name=name, value=value: document["blocks"][1].update(
                {name: value}
            )
            for name, value in [
                ("name", None),
                ("name", 3),
                ("gradient_bytes", "x"),
                ("gradient_bytes", -1),
                ("costs", None),
                ("costs", []),
                ("costs", [[]]),
            ]
        ),
        *(
            lambda document, i=i, value=value: document["blocks"][1]["costs"][
                0
            ].__setitem__(i, value)
            for i, values in {
                0: ("evil", 3, []),
                1: ("evil", None, []),
                2: (1.5, None, "1", True, -(10**30)),
                3: (1.5, None, "1", True, -1, 10**30),
                4: (None, "1", True, -1.0, float("nan"), float("inf"), 1e300),
            }.items()
            for value in values
        ),
        lambda document: document["blocks"][1]["costs"].pop(),
    ],
)
def test_what_is_no_profile_is_refused(change, plain_document):
    document = json.loads(plain_document)
    change(document)
    with pytest.raises(ValueError, match=r"This is no profile .* Profile anew"):
        Profile.from_json(json.dumps(document))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '{"blocks": []}', "[" * 200_000]
)
def test_other_documents_are_refused(text):
    with pytest.raises(ValueError, match="This is no profile"):
        Profile.from_json(text)


@pytest.mark.parametrize("ask", ["peak_bytes", "seconds"])
def test_modes_that_a_block_lacks_are_refused(ask):
    profile = profile_of(*other_on_meta("plain"))
    with pytest.raises(ValueError, match="Block '0' has None where one of store, rec"):
        getattr(profile, ask)({})
    with pytest.raises(ValueError, match="Block '3' has 'reconstruct' where one of"):
        getattr(profile, ask)(profile.uniform("store") | {"3": "reconstruct"})


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


def test_modes_that_fit_by_their_exact_peak_are_found():
    """Gradients of a run that ends before its chain are counted too many in a problem."""
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


def test_blocks_that_are_refused_are_not_reconstructed_and_others_are():
    _, _, whole = profiled_on_meta("revnet46", "exact")
    refused = {"stages.1.chain.1"}
    profile = whole.without_reconstruction(refused)
    modes = profile.uniform("reconstruct")
    usual = whole.uniform("reconstruct")
    assert {name for name in modes if modes[name] != usual[name]} == refused
    assert profile.peak_bytes(modes) == whole.peak_bytes(modes)
    for budget in (whole.peak_bytes(usual) * 2, 10**12):
        assert profile.fastest(budget)["stages.1.chain.1"] != "reconstruct"
    assert profile.lightest()["stages.1.chain.1"] != "reconstruct"
    with pytest.raises(ValueError, match=r"where one of store, recompute is needed"):
        profile.peak_bytes(usual)


def test_other_times_change_no_byte():
    profile = two_blocks()
    taken = {(b.name, mode): 3.0 for b in profile.blocks for mode in b.modes}
    timed = profile.with_seconds({**taken, ("", ""): 1.0})
    modes = profile.lightest()
    assert timed.peak_bytes(modes) == profile.peak_bytes(modes)
    assert (timed.seconds(modes), profile.seconds(modes)) == (7.0, 3.0)


def test_a_profile_keeps_the_work_of_its_blocks_and_those_of_version_0_1_0_have_none():
    network, step = other_on_meta("plain")
    profile = count(Trial(network, network, step), {}, with_work=True)
    modes = {(block.name, mode) for block in profile.blocks for mode in block.modes}
    assert profile.work.keys() == modes | {("", "")}
    assert Profile.from_json(profile.to_json()) == profile
    document = json.loads(profile.to_json())
    del document["work"]
    old = Profile.from_json(json.dumps(document))
    assert old == replace(profile, work={})
    modes = profile.uniform("store")
    assert old.peak_bytes(modes) == profile.peak_bytes(modes)
    assert profile.with_speed(ASSUMED).seconds(modes) > 0
    with pytest.raises(ValueError, match=r"no counts of operations.* Profile anew"):
        old.with_speed(ASSUMED)


@pytest.mark.parametrize(
    "work",
    [3, [3], [["0"]], [["0", "store", -1, 0, 0]], [["0", "store", 1, 0, 0, 0, 0]]],
)
def test_work_that_is_none_is_refused(work, plain_document):
    document = json.loads(plain_document) | {"work": work}
    with pytest.raises(ValueError, match=r"This is no profile .* Profile anew"):
        Profile.from_json(json.dumps(document))
