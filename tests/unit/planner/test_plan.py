"""A plan keeps to its budget, is fast, changes numbers nowhere, and is a document."""

import contextlib
import copy
import functools
import itertools
import json
import math
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
from speechbrain.lobes.models.ResNet import ResNet
from torch import nn

from speechbrain_rev.devices import ASSUMED
from speechbrain_rev.planner import (
    Infeasible,
    Plan,
    largest_batch,
    plan,
    plan_step,
    profile,
    remedies,
    step_of,
    sweep,
)
from speechbrain_rev.planner.memory import make_gradients
from speechbrain_rev.planner.network import as_network
from speechbrain_rev.planner.plan import held_to_limit
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.reversible import Mode
from speechbrain_rev.sizes import enough_text
from tests.unit.lobes.encoders import feats
from tests.unit.planner.networks import (
    SCALARS,
    Chained,
    Scaled,
    assert_equal_tensors,
    chain,
    convolutions,
    encoder,
    gradients,
    half,
    peak_of,
    plain,
    profiled_on_meta,
    random_modes,
    run_within,
    side_by_side,
)
from tests.unit.planner.test_profiling import NETWORKS, X

SECONDS = {
    "store": 1.0,
    "selective": 1.5,
    "reconstruct": 2.0,
    "recompute": 3.0,
    "join": 3.0,
}


@functools.cache
def timed_on_meta(name):
    """A network and its profile, whose blocks are faster the more they keep."""
    network, step, counted = profiled_on_meta(name)
    taken = {(b.name, mode): SECONDS[mode] for b in counted.blocks for mode in b.modes}
    timed = counted.with_seconds({**taken, ("", ""): 0.0})
    light, most = (timed.peak_bytes(timed.uniform(m)) for m in ("reconstruct", "store"))
    return network, step, timed, light + SCALARS, most + SCALARS


def between(light, most):
    return [light + i * (most - light) // 3 for i in range(4)]


@pytest.mark.parametrize("name", ["resnet34", "plain", "chain and layers"])
def test_no_plan_is_over_its_budget_and_more_budget_is_never_slower(name):
    network, step, timed, light, most = timed_on_meta(name)
    plans = [run_within(timed, network, step, b) for b in between(light, most)]
    for planned, budget in zip(plans, between(light, most), strict=True):
        network.set_mode(planned.modes)
        peak = peak_of(step)
        assert max(peak, planned.measured_bytes) <= budget == planned.budget_bytes
        assert abs(planned.measured_bytes - peak) <= SCALARS
        assert abs(planned.predicted_bytes - peak) <= 2 * SCALARS
        assert planned.seconds == timed.seconds(planned.modes)
    seconds = [planned.seconds for planned in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert set(planned.modes.values()) == {"store"}
    assert list(planned.modes) == [block.name for block in timed.blocks]
    with pytest.raises(Infeasible) as caught:
        run_within(timed, network, step, 1000)
    needed = caught.value.needed_bytes
    enough = run_within(timed, network, step, needed + SCALARS)
    assert enough.measured_bytes <= needed + SCALARS
    with pytest.raises(Infeasible):
        run_within(timed, network, step, needed - SCALARS)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [True, False])
def test_runs_of_blocks_fit_where_blocks_that_recompute_alone_do_not(measure):
    """What a plan of runs takes is counted, and an error names the least of them."""
    torch.manual_seed(0)
    module, x = plain(24, width=16), torch.randn(500, 16)
    given = {"blocks": "*", "measure": measure}
    step = step_of(module, x, blocks="*", speed=None if measure else ASSUMED)
    counted = profile(step)
    alone = counted.peak_bytes(counted.uniform("recompute"))
    with pytest.raises(Infeasible) as caught:
        plan(module, x, 1000, **given)
    least = caught.value.needed_bytes
    assert least < 0.7 * alone
    for budget in (least, (least + alone) // 2, alone):
        planned = plan(module, x, budget, **given)
        assert "join" in planned.modes.values()
        assert planned.measured_bytes <= budget
        # What a second run puts back first is not counted.
        assert planned.predicted_bytes == pytest.approx(
            planned.measured_bytes, rel=0.01
        )
        assert Plan.from_json(planned.to_json()) == planned
        own = copy.deepcopy(module)
        planned.apply(own)
        assert_equal_tensors(gradients(own, x), gradients(copy.deepcopy(module), x))
    with pytest.raises(Infeasible, match=f"peaks at .*{least} bytes"):
        plan(module, x, least - 1, **given)


class Scaling(nn.Sequential):
    """Does not give a block just what the one before it returned."""

    def forward(self, x):
        for block in self:
            x = block(x) * 1.0
        return x


class Listing(nn.Sequential):
    """Gives it to others, too."""

    def forward(self, x):
        outputs = [x]
        for block in self:
            outputs.append(block(outputs[-1]))
        return torch.stack(outputs).sum(0)


@pytest.mark.parametrize("kind", [Scaling, Listing])
def test_what_others_read_or_does_not_follow_the_block_before_joins_none(kind):
    module = kind(*plain(4))
    step = step_of(module, torch.randn(8, 64), blocks="*")
    modes = ["store", "selective", "recompute"]
    assert [b.modes for b in profile(step).blocks] == [modes] * 4


@pytest.mark.parametrize("returned", [1, 6])
def test_outputs_that_later_blocks_take_are_predicted_to_a_thousandth(returned):
    """Those of blocks that recompute are alive until the forward pass ends, by a name."""
    module, x, given = (
        side_by_side(5, returned),
        torch.randn(8, 4, 128),
        {"measure": False},
    )
    stored, seen = plan(module, x, "1GB", **given).measured_bytes, set()
    for percent in range(99, 60, -3):
        with contextlib.suppress(Infeasible):
            planned = plan(module, x, stored * percent // 100, **given)
            assert planned.predicted_bytes == pytest.approx(
                planned.measured_bytes, rel=1e-3
            )
            seen.add(planned.counts())
    assert len(seen) >= 3


def test_what_plans_take_above_their_prediction_is_heeded():
    network, step, timed, light, most = timed_on_meta("plain")
    more = 40_000

    def heavier():
        kept = torch.empty(more, dtype=torch.uint8, device="meta")
        step()
        return kept

    for budget in between(light + more, most):
        assert run_within(timed, network, heavier, budget).measured_bytes <= budget
    with pytest.raises(Infeasible) as caught:
        run_within(timed, network, heavier, light)
    assert caught.value.needed_bytes > light == caught.value.budget_bytes


def test_a_profile_that_promises_too_much_refuses_nothing_that_fits():
    """What no plan is predicted to need less than, the lightest is run with."""
    network, step, timed, *_ = timed_on_meta("plain")
    after = {mode: size + 10**6 for mode, size in timed.after_bytes.items()}
    dear = replace(timed, after_bytes=after)
    network.set_mode(dear.lightest())
    least = trace_bytes(network, step).peak_bytes
    planned = run_within(dear, network, step, least)
    assert planned.measured_bytes == least < planned.predicted_bytes
    with pytest.raises(Infeasible) as caught:
        run_within(dear, network, step, least - 1)
    assert caught.value.needed_bytes == least


MODES = {"0": "store", "1": "recompute"}
SOME = Plan(MODES, [8, None], 9, 8, 8, 0.5, {"network": "a test"})
NAN, INF, HUGE = float("nan"), float("inf"), 10**400


def test_a_plan_goes_through_json_and_files_and_describes_itself(tmp_path):
    lossy = replace(
        SOME,
        channels=None,
        modes={"0": "compress", "1": "store"},
        predicted_gradient_error=0.0123,
        measured_gradient_error=0.02,
    )
    for each in (SOME, lossy):
        each.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == Plan.from_json(each.to_json()) == each
        assert list(loaded.modes) == list(each.modes)
    peak = "peak 8 bytes counted (8 bytes predicted) of 9 bytes"
    assert str(SOME) == f"1 store, 1 recompute: {peak}"
    slower = SOME.with_about(stored_seconds=str(SOME.seconds / 1.5))
    assert str(slower) == f"{SOME}; 1.50 times the time of storing every block"
    errors = "gradient error 1.2 % predicted, 2 % measured"
    assert str(lossy) == f"1 store, 1 compress: {peak}; {errors}"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("modes", [None, "store", ["store"], {"0": "keep"}, {"0": ["store"]}]),
        ("channels", ["abcd", 4, [-1], [1.5], ["8"], [True], [[8]], [2**61]]),
        ("budget_bytes", [None, "8", -1, 0.5, NAN, True, 2**61, HUGE]),
        ("seconds", [None, "1", -1, NAN, INF, True, HUGE, 1e300]),
        ("about", [None, "a GPU", {"device": 3}]),
        ("predicted_gradient_error", [None, "0", -1, NAN, 1e300, 0.1]),
        ("other", [1]),
    ],
)
def test_a_plan_with_a_value_of_another_kind_is_refused(name, values):
    for value in values:
        document = {"plans": [asdict(SOME) | {name: value}]}
        with pytest.raises(ValueError, match=r"The text is no plan \(.*Plan anew"):
            Plan.from_json(json.dumps(document))


@pytest.mark.parametrize("name", [n for n in asdict(SOME) if "error" not in n])
def test_a_plan_without_one_of_its_values_is_refused(name):
    values = asdict(SOME)
    del values[name]
    with pytest.raises(ValueError, match=f"no plan .*missing .*'{name}'"):
        Plan.from_json(json.dumps({"plans": [values]}))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"measured_bytes": 10}, "measured_bytes is 10, more than budget_bytes, .* 9"),
        ({"measured_gradient_error": 0.1}, "errors are 0 and 0.1, and no block compr"),
        ({"about": {"memory_budget_bytes": "9" * 5000}}, "memory_budget_bytes is '999"),
        ({"about": {"card_bytes": "-1"}}, "card_bytes is '-1' and takes digits"),
        (b"{}", "missing"),
        (b"[]", "not a mapping"),
        (b"\xff", "can't decode byte 0xff"),
        (b"[" * 200_000, "recursion"),
        (SOME.to_json().replace('"1"', '"0"').encode(), "'0' is there twice"),
        (None, "more than 10,000,000 bytes"),  # It is not read to its end.
    ],
)
def test_a_file_that_no_plan_can_be_is_refused_in_a_line_that_names_it(
    tmp_path, changed, reason
):
    path = tmp_path / "plan.json"
    if isinstance(changed, dict):
        changed = json.dumps({"plans": [asdict(SOME) | changed]}).encode()
    with path.open("wb") as file:
        file.truncate(2**40) if changed is None else file.write(changed)
    with pytest.raises(
        ValueError, match=rf"plan\.json is no plan .*{reason}.*Plan anew"
    ) as error:
        Plan.load(path)
    assert len(str(error.value)) < 400 + len(str(tmp_path))
    assert "\n" not in str(error.value)


def modes_of(network):
    return {name: mode.value for name, mode in network.block_modes().items()}


def test_an_encoder_and_a_chain_take_a_plan_for_modes():
    module = encoder("revnet46")
    modes = random_modes(module, seed=1)
    module.set_mode(replace(SOME, modes=modes, channels=module.channels))
    assert modes_of(module) == modes
    alone = chain(4, 8)
    modes = ["store", "reconstruct", "recompute", "reconstruct"]
    names = [f"blocks.{i}" for i in range(4)]
    own = replace(SOME, modes=dict(zip(names, modes, strict=True)), channels=None)
    own.apply(alone)
    assert [mode.value for mode in alone.modes] == modes
    with pytest.raises(ValueError, match=r"works on \[8\] channels at a time"):
        replace(own, channels=[8]).apply(alone)


def test_an_encoder_whose_first_stages_are_frozen_is_planned():
    with torch.device("meta"):
        module, x = encoder("resnet34"), torch.randn(2, 40, 80)
    module.stem.requires_grad_(False)
    module.stages[0].requires_grad_(False)
    budget = plan(module, x, 10**12).measured_bytes * 7 // 8
    planned = plan(module, x, budget)
    assert planned.measured_bytes <= budget
    frozen = [m for n, m in planned.modes.items() if n.startswith(("stem", "stages.0"))]
    assert set(frozen) == {"store"} != set(planned.modes.values())


def test_a_plan_for_another_network_names_both_and_changes_nothing():
    with torch.device("meta"):
        ours, other = map(encoder, ("revnet57", "resnet34"))
    modes = dict.fromkeys(ours.named_blocks(), "store")
    of_ours = Plan(modes, None, 1, 1, 1, 1.0, {"encoder": "revnet57"})
    for network in (other, plain(2), Chained(depth=2)):
        before = repr(network)
        with pytest.raises(ValueError, match=r"Plan anew|No submodule that is called"):
            of_ours.apply(network)
        assert repr(network) == before
    blocks = len(other.named_blocks())
    words = rf"made for revnet57 with .*is resnet34 with {blocks}, wh"
    with pytest.raises(ValueError, match=words) as error:
        of_ours.apply(other)
    assert len(str(error.value)) < 250


def snapshot(module):
    """Copies of all tensors that training could change, and all else of a module."""
    named = dict(module.state_dict(keep_vars=True))
    named |= {f"{n}.grad": p.grad for n, p in module.named_parameters()}
    tensors = {n: x.detach().clone() for n, x in named.items() if x is not None}
    hooks = [(len(m._forward_hooks), m.training) for m in module.modules()]
    return tensors, ({n: id(x) for n, x in named.items()}, hooks, repr(module))


@pytest.mark.parametrize(
    "given", [{"measure": True}, {"measure": False}, {"max_gradient_error": 0.1}]
)
def test_what_is_planned_is_not_changed(given):
    torch.manual_seed(0)
    first = convolutions(4, 1), nn.Flatten(), nn.Linear(24, 16)
    module = nn.Sequential(*first, Chained(depth=2), nn.Dropout(0.3), nn.Linear(8, 4))
    x = torch.randn(16, 4, 2, 3, requires_grad=True)
    if "measure" in given:
        module(x).sum().backward()
        x.grad = None
    module[3].tail.eval()
    as_network(module).set_mode({"3.body.blocks.0": "recompute"})
    (tensors, others), state = snapshot(module), torch.get_rng_state()
    planned = plan(module, x, 10**9, blocks=["[05]"], **given)
    assert ("max_gradient_error" in given) == ("gradient error" in planned.about)
    after, others_after = snapshot(module)
    assert others_after == others
    assert_equal_tensors(after, tensors)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert "forward" not in vars(module[0])


def test_gradients_under_every_plan_are_those_of_storing_to_the_bit():
    x = feats(batch=4, time=48, dtype=torch.float32)
    torch.manual_seed(0)
    module = encoder("revnet46", streams="exact", verify="raise", verify_every=1)
    network, step, timed, light, most = timed_on_meta("revnet46")
    module.set_mode("store")
    expected, seen = gradients(copy.deepcopy(module), x), set()
    for budget in between(light, most)[:3]:
        planned = run_within(timed, network, step, budget)
        seen.add(tuple(planned.modes.values()))
        own = copy.deepcopy(module)
        planned.apply(own)
        assert_equal_tensors(gradients(own, x), expected)
        own.check_streams()
    assert len(seen) == 3


def test_one_pattern_and_a_size_with_its_unit_are_taken_as_such():
    x, given = torch.randn(8, 64), {"measure": False}
    planned = plan(plain(3), x, "1GB", blocks="?", **given)
    assert planned == plan(plain(3), x, 2**30, blocks=["?"], **given)
    about = {"network": "Sequential", "inputs": "[[8, 64]]", "torch": torch.__version__}
    assert about.items() <= planned.about.items()


@pytest.mark.parametrize(
    ("budget", "limit", "message"),
    [
        ("8", None, "budget_bytes is '8', which is no size"),
        *(
            (10**9, limit, r"max_gradient_error is .* above 0 and finite")
            for limit in (0, math.nan, math.inf, "1 %", True)
        ),
    ],
)
def test_budgets_and_limits_that_are_none_are_refused(budget, limit, message):
    given = {"blocks": "?", "max_gradient_error": limit}
    with pytest.raises(ValueError, match=message):
        plan(plain(2), torch.randn(8, 64), budget, **given)


#: Networks of SpeechBrain at full size, and their blocks.
OF_SPEECHBRAIN = [
    (ECAPA_TDNN, ["blocks.*", "mfa", "asp.*"]),
    (ResNet, ["layer?.*"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "blocks"), OF_SPEECHBRAIN)
def test_networks_of_speechbrain_fit_into_half_of_what_they_store(build, blocks):
    with torch.device("meta"):
        module, x = build(80), torch.randn(8, 200, 80)
    stored = plan(module, x, 10**12, blocks=blocks)
    assert set(stored.modes.values()) == {"store"}
    budget = stored.measured_bytes // 2
    planned = plan(module, x, budget, blocks=blocks)
    planned.apply(module)
    make_gradients(module)
    peak = peak_of(lambda: module(x).square().sum().backward())
    assert peak <= budget
    assert abs(peak - planned.predicted_bytes) <= 1e-6 * peak + SCALARS
    modes = {*planned.modes.values()}
    assert {"store", "recompute"} <= modes
    assert modes <= {"store", "selective", "recompute", "join"}
    assert planned.seconds < 1.5 * stored.seconds


def test_parts_in_evaluation_are_planned_as_they_are():
    """What is in evaluation stores, whatever its mode."""
    network, x = nn.Sequential(*(half(64) for _ in range(6))), torch.randn(512, 64)
    network[:4].eval()
    with pytest.raises(Infeasible) as error:
        plan(network, x, 1, blocks=["?"], measure=False)
    needed_bytes = error.value.needed_bytes
    plan(network, x, needed_bytes, blocks=["?"], measure=False).apply(network)
    make_gradients(network)
    assert peak_of(lambda: network(x).square().sum().backward()) <= needed_bytes


BLOCKS = {"blocks": "?"}
STEPS = {
    "plain": lambda: step_of(plain(3), torch.randn(16, 64), **BLOCKS),
    "chain": lambda: step_of(Chained(depth=1), torch.randn(64, 16), speed=ASSUMED),
    # It does not run with one sample, of which there are no batch statistics.
    "normalised": lambda: step_of(
        nn.Sequential(half(32), half(32)), torch.randn(16, 32), **BLOCKS, speed=ASSUMED
    ),
    "made in its first step": lambda: step_of(
        NETWORKS["first_step"][0](), X[:4], blocks="b.*"
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_largest_batch_has_a_plan_and_one_more_has_none(name):
    step = STEPS[name]()
    lightest = profile(step)
    budget = 4 * lightest.peak_bytes(lightest.lightest())
    batch = largest_batch(step, budget)
    assert batch > step.batch
    # Of few samples other modes may be the lightest.
    assert largest_batch(step.at(2), budget) == batch
    assert plan_step(step.at(batch), budget).measured_bytes <= budget
    larger = profile(step.at(batch + 1))
    assert larger.peak_bytes(larger.lightest()) > budget


class Eight(nn.Sequential):
    """Runs with eight samples alone."""

    def forward(self, x):
        return super().forward(x.view(8, 64))


UNKNOWN = {
    "plan for each batch, as sweep": lambda: step_of(
        NETWORKS["item"][0](), X[:4], blocks="b.*"
    ),
    "same number of rows": lambda: step_of(
        Scaled(*plain(2)), (torch.randn(8, 64), torch.ones(1, 64)), **BLOCKS
    ),
    "A step of 2 samples does not run": lambda: step_of(
        Eight(*plain(2)), torch.randn(8, 64), **BLOCKS
    ),
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_a_network_of_which_other_batches_are_not_known_has_no_largest_one(reason):
    step = UNKNOWN[reason]()
    with pytest.raises(ValueError, match=reason):
        largest_batch(step, "1GB")
    with pytest.raises(Infeasible, match="a budget of") as caught:
        plan_step(step, 1000)
    assert "a batch of" not in str(caught.value)


def test_remedies_are_those_of_the_refusal_and_each_is_enough():
    step = step_of(plain(3), torch.randn(256, 64), **BLOCKS, speed=ASSUMED)
    lightest = profile(step)
    budget = lightest.peak_bytes(lightest.lightest()) // 2
    with pytest.raises(Infeasible) as caught:
        plan_step(step, budget)
    changes = remedies(step, caught.value)
    assert str(caught.value).endswith(f" What helps: {'; '.join(changes)}.")
    batch, shorter, blocks, size = changes
    assert batch == f"a batch of {largest_batch(step, budget)}"
    assert plan_step(step.at(int(batch.split()[-1])), budget)
    assert shorter == "shorter or smaller inputs"
    assert blocks == "more blocks than blocks='?', for what is outside of blocks stores"
    assert size == f"a budget of {enough_text(caught.value.needed_bytes)}"
    assert plan_step(step, size.removeprefix("a budget of "))
    assert largest_batch(step, 1000) == 0
    # Of nothing no batch fits; a chain has no other blocks to name.
    few = remedies(STEPS["chain"](), Infeasible(needed_bytes=9, budget_bytes=0))
    assert few == ["shorter or smaller inputs", "a budget of 9 B"]


@pytest.mark.parametrize("use", [profile, lambda step: sweep(step, [4], "1GB")])
def test_warnings_are_reported_at_the_caller_s_line(use):
    step = step_of(
        nn.Sequential(*plain(2), nn.ReLU(inplace=True)), torch.randn(8, 64), **BLOCKS
    )
    with pytest.warns(UserWarning, match="Not recomputed") as caught:
        use(step)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.slow
def test_more_samples_fit_where_the_gradient_may_have_an_error():
    """Four samples fit 1 MiB without loss, and more with."""
    torch.manual_seed(0)
    module, x = (
        nn.Sequential(convolutions(8, 3), convolutions(8, 3)),
        torch.randn(2, 8, 20, 25),
    )
    step = step_of(module, x, **BLOCKS, speed=ASSUMED)
    lossless = largest_batch(step, "1MB")
    lossy = largest_batch(step, "1MB", max_gradient_error=0.5)
    assert step.batch < lossless < lossy
    result = sweep(step, [2, lossy], "1MB", max_gradient_error=0.5)
    assert result.infeasible_batch is None
    assert set(result.plans[0].modes.values()) == {"store"}
    assert "compress" in result.plans[1].modes.values()
    assert result.about["gradient error"] == "measured at batch 2, of the example batch"


def error_of(case, modes):
    """The gradient's relative error, measured without the planner."""
    of_modes = []
    for own in (dict.fromkeys(modes, "store"), modes):
        copied = copy.deepcopy(case.module)
        as_network(copied, copied.blocks).set_mode(own)
        copied(case.x).square().sum().backward()
        of_modes.append(torch.cat([p.grad.flatten() for p in copied.parameters()]))
    exact, other = of_modes
    return float((other - exact).norm() / exact.norm())


@pytest.mark.slow
def test_a_plan_compresses_where_no_lossless_one_fits(compressing):
    case, budget = compressing, compressing.lossless_bytes * 8 // 10
    given = {"blocks": case.module.blocks, "measure": False}
    with pytest.raises(Infeasible) as caught:
        plan(case.module, case.x, budget, **given)
    assert caught.value.needed_bytes <= case.lossless_bytes
    planned = case.plan(budget, 0.05)
    assert planned.modes["head"] == "compress"
    case.probe.network.set_mode(planned.modes)
    assert max(planned.measured_bytes, peak_of(case.trial.run)) <= budget
    assert 0 < planned.measured_gradient_error <= 0.05
    # What is predicted of blocks by themselves is what is measured of all.
    ratio = planned.measured_gradient_error / planned.predicted_gradient_error
    assert 0.7 < ratio < 1.4
    own = error_of(case, planned.modes)
    assert own == pytest.approx(planned.measured_gradient_error, rel=1e-3)
    assert case.module.body.modes == [Mode.RECONSTRUCT] * 2
    # It is given to a copy and taken back.
    module = copy.deepcopy(case.module)
    planned.apply(module)
    network = as_network(module, module.blocks)
    assert modes_of(network) == planned.modes
    network.set_mode(dict.fromkeys(planned.modes, "store"))
    assert not any("forward" in vars(part) for part in module.modules())
    assert modes_of(network) == dict.fromkeys(planned.modes, "store")


def test_no_plan_is_above_the_limit_of_its_error(compressing):
    """Limits between those of blocks; below all of them nothing compresses."""
    case = compressing
    least, _, middle, _ = sorted(e**0.5 for e in case.probe.squared_errors.values())
    for limit in (0.0, 0.5 * least, 1.01 * least, 1.01 * middle, 10.0):
        planned = case.plan(case.lossless_bytes, limit)
        assert planned.measured_bytes <= case.lossless_bytes
        assert planned.measured_gradient_error <= limit
        assert error_of(case, planned.modes) <= limit * 1.001
        assert limit > least or "compress" not in planned.modes.values()


def test_an_error_that_is_above_its_prediction_is_heeded(compressing):
    """As where errors of blocks are not independent."""
    case, limit = compressing, 0.05
    budget, asked = case.lossless_bytes * 8 // 10, []

    def solve(own):
        asked.append(own.max_gradient_error)
        return case.solve(own, budget)

    first = held_to_limit(case.limited(limit), solve, lambda modes: limit)
    assert asked == [limit]
    assert first.measured_gradient_error == limit
    asked.clear()
    with pytest.raises(Infeasible):
        held_to_limit(case.limited(limit), solve, lambda modes: 2 * limit)
    assert asked[1] == pytest.approx(0.49 * first.predicted_gradient_error)


def test_where_no_plan_that_compresses_keeps_the_limit_it_is_lossless(compressing):
    first = compressing.plan(compressing.lossless_bytes * 8 // 10, 0.05)
    lossless = replace(first, modes=dict.fromkeys(first.modes, "recompute"))

    def solve(own):
        return first if own.max_gradient_error else lossless

    assert held_to_limit(compressing.limited(0.05), solve, lambda m: 0.06) == lossless


@pytest.fixture
def held(compressing, monkeypatch):
    """Hold a plan to 1000 bytes where the whole batch takes others."""
    profiled, module = compressing.profile, sys.modules[held_to_limit.__module__]
    profiler = SimpleNamespace(
        step=None,
        probe=SimpleNamespace(gradient_error=lambda modes: 0.0),
        counted=lambda channels: SimpleNamespace(trial=None),
    )

    def held(peaks, lossy_from=-math.inf):
        seen, asked = iter(peaks), []

        def solve(own, left):
            asked.append((left, own.max_gradient_error))
            lossy = own.max_gradient_error and left >= lossy_from
            modes = profiled.uniform("compress" if lossy else "recompute")
            return Plan(modes, None, left, 1, 1, 1.0, {})

        monkeypatch.setattr(module, "_peak_bytes", lambda *_: next(seen))
        chosen = module.Choice(None, profiled, {}, 1, fits=True)
        return module._held(profiler, chosen, solve, 1000), asked

    return held


@pytest.mark.parametrize(
    ("peaks", "budgets"),
    [
        ([1000], [1000]),
        ([1100, 990], [1000, 900]),
        ([None, 1001, 1000], [1000, 900, 899]),
    ],
)
def test_a_whole_batch_that_takes_more_than_its_budget_is_heeded(held, peaks, budgets):
    """Sizes of few utterances are not those of all; and memory may run out."""
    plan, asked = held(peaks)
    assert [left for left, _ in asked] == budgets
    assert (plan.measured_bytes, plan.budget_bytes) == (peaks[-1], 1000)


@pytest.mark.parametrize("lossy_from", [-math.inf, 1000])
def test_a_lossless_plan_after_one_that_took_too_much_has_the_whole_budget(
    held, lossy_from
):
    plan, asked = held(itertools.repeat(2000), lossy_from)
    assert "compress" not in plan.modes.values()
    assert plan.budget_bytes == 1000
    assert asked[-1] == (1000, 0.0)


def test_a_whole_batch_is_run_for_its_peak(compressing):
    step, modes = compressing.step, compressing.profile.uniform("recompute")
    planned = Plan(modes, None, 1, 1, 1, 1.0, {})
    with step.training():
        peak = sys.modules[held_to_limit.__module__]._peak_bytes(step, planned)
    assert peak == pytest.approx(compressing.profile.peak_bytes(modes), rel=0.02)


@pytest.mark.slow
def test_what_a_plan_that_compresses_needs_is_reported_where_none_fits():
    torch.manual_seed(0)
    module = nn.Sequential(convolutions(8, 3), convolutions(8, 1))
    x, needed, words = torch.randn(2, 8, 20, 30), {}, {}
    given = {"blocks": "?", "measure": False}
    for limit in (None, 1e-7, 0.1):
        with pytest.raises(Infeasible) as caught:
            plan(module, x, 1, **given, max_gradient_error=limit)
        needed[limit] = caught.value.needed_bytes
        words[limit] = str(caught.value).partition("What helps: ")[2].split("; ")
    assert needed[0.1] < needed[1e-7] <= needed[None]
    assert plan(module, x, needed[0.1] + SCALARS, **given, max_gradient_error=0.1)
    assert words[1e-7][-1] == "more than max_gradient_error=1e-07."
    # A limit that holds nothing up is no remedy.
    assert not any("max_gradient_error" in each for each in (*words[0.1], *words[None]))
