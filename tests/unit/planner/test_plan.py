"""A plan keeps to its budget, is fast, changes numbers nowhere, and is a document."""

import copy
import functools
import json
import time
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from speechbrain_rev.modes import LOSSLESS
from speechbrain_rev.planner import Infeasible, Plan, Profile, plan
from speechbrain_rev.planner.memory import live_bytes_peak, make_gradients
from speechbrain_rev.planner.network import as_network
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
from speechbrain_rev.sizes import enough_text, size_text
from tests.unit.lobes.encoders import feats
from tests.unit.planner.networks import (
    OTHERS,
    SCALARS,
    Chained,
    encoder,
    gradients,
    half,
    on_meta,
    peak_of,
    plain,
    profile_module,
    profiled_on_meta,
    run_within,
)


def encoder_case(name):
    """An encoder on meta, what it is called with, and no names of blocks."""
    with torch.device("meta"):
        return encoder(name), torch.randn(4, 48, 80), ()


CASES = {
    "revnet57": lambda: encoder_case("revnet57"),
    "resnet34": lambda: encoder_case("resnet34"),
    **OTHERS,
}
every_case = pytest.mark.parametrize("name", CASES)


SOME_PLAN = Plan(
    {"0": "store", "1": "recompute"}, [8, None], 9, 8, 8, 0.5, {"network": "a test"}
)


class Case:
    """A profile and what tries its plans."""

    def __init__(self, name):
        self.module, self.x, self.blocks = CASES[name]()
        self.profile = profile_module(
            self.module, self.x, blocks=self.blocks, measure=False
        )
        module, self.step = on_meta(copy.deepcopy(self.module), self.x)
        self.network = as_network(module, self.blocks)
        stored = self.profile.uniform("store")
        lightest = self.profile.uniform("reconstruct")
        self.most_bytes = self.profile.peak_bytes(stored) + SCALARS
        self.light_bytes = self.profile.peak_bytes(lightest) + SCALARS

        self.plan = functools.cache(self._plan)

    def _plan(self, budget_bytes):
        return run_within(self.profile, self.network, self.step, budget_bytes)


@pytest.fixture(scope="module")
def cases():
    return functools.cache(Case)


def budgets_between(case, count=6):
    step = (case.most_bytes - case.light_bytes) // (count - 1)
    return [case.light_bytes + i * step for i in range(count)]


@every_case
def test_no_plan_is_over_its_budget_when_it_is_run(name, cases):
    case = cases(name)
    for budget in budgets_between(case):
        found = case.plan(budget)
        case.network.set_mode(found.modes)
        peak = peak_of(case.step)
        assert peak <= budget
        assert found.measured_bytes <= budget
        assert abs(found.measured_bytes - peak) <= SCALARS
        assert abs(found.predicted_bytes - found.measured_bytes) <= SCALARS
        assert found.seconds == case.profile.seconds(found.modes)
        assert found.budget_bytes == budget


@every_case
def test_more_budget_is_never_slower(name, cases):
    case = cases(name)
    seconds = [case.plan(budget).seconds for budget in budgets_between(case)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


@every_case
def test_with_budget_enough_every_block_stores(name, cases):
    case = cases(name)
    found = case.plan(10**15)
    assert set(found.modes.values()) == {"store"}
    assert list(found.modes) == [block.name for block in case.profile.blocks]
    assert case.plan(case.most_bytes).modes == found.modes


@every_case
def test_what_reconstruction_takes_is_enough(name, cases):
    case = cases(name)
    case.network.set_mode(case.profile.uniform("reconstruct"))
    case.step()
    peak = peak_of(case.step) + SCALARS
    assert case.plan(peak).measured_bytes <= peak


@every_case
def test_less_than_the_least_is_refused_and_what_it_needs_is_enough(name, cases):
    case = cases(name)
    with pytest.raises(Infeasible) as caught:
        case.plan(1000)
    assert caught.value.budget_bytes == 1000
    needed = caught.value.needed_bytes
    assert str(needed) in str(caught.value)
    assert case.plan(needed + SCALARS).measured_bytes <= needed + SCALARS
    with pytest.raises(Infeasible):
        case.plan(needed - SCALARS)


@pytest.mark.parametrize("name", ["resnet34", "plain", "chain and layers"])
def test_a_module_s_plan_is_that_of_its_profile(name, cases):
    case = cases(name)
    given = {"blocks": case.blocks, "measure": False}
    budget = (case.light_bytes + case.most_bytes) // 2
    assert plan(case.module, case.x, budget, **given) == case.plan(budget)


def test_a_module_s_plan_for_too_small_a_budget_is_refused_as_that_of_its_profile(
    cases,
):
    case = cases("plain")
    with pytest.raises(Infeasible) as expected:
        case.plan(1000)
    needed = expected.value.needed_bytes
    budget = needed // 2
    with pytest.raises(Infeasible) as caught:
        plan(case.module, case.x, budget, blocks=case.blocks, measure=False)
    assert caught.value.needed_bytes == needed
    words = str(caught.value)
    assert words.startswith("Even the lightest plan peaks at ")
    lacking = f". It lacks {size_text(needed - budget)}. What helps: a batch of "
    assert lacking in words
    assert words.endswith(f"; a budget of {enough_text(needed)}.")
    assert "\n" not in words


def test_what_plans_take_above_their_prediction_is_heeded():
    """A profile that promises too little is corrected by what is measured."""
    case = Case("plain")
    promised = case.profile
    lower = {mode: max(0, size - 40_000) for mode, size in promised.after_bytes.items()}
    blocks = [
        replace(
            block,
            costs={
                pair: replace(cost, working_bytes=max(0, cost.working_bytes - 40_000))
                for pair, cost in block.costs.items()
            },
        )
        for block in promised.blocks
    ]
    promised = replace(promised, after_bytes=lower, blocks=blocks)
    for budget in budgets_between(case):
        found = run_within(promised, case.network, case.step, budget)
        assert found.measured_bytes <= budget
    least = case.light_bytes - 20_000
    with pytest.raises(Infeasible) as caught:
        run_within(promised, case.network, case.step, least)
    assert caught.value.needed_bytes > least == caught.value.budget_bytes


def test_a_profile_that_promises_too_much_refuses_nothing_that_fits():
    """What no plan is predicted to need less than, the lightest is run with."""
    case = Case("plain")
    after = {mode: size + 10**6 for mode, size in case.profile.after_bytes.items()}
    dear = replace(case.profile, after_bytes=after)
    case.network.set_mode(dear.lightest())
    least = trace_bytes(case.network, case.step).peak_bytes
    found = run_within(dear, case.network, case.step, least)
    assert found.measured_bytes == least < found.predicted_bytes
    with pytest.raises(Infeasible) as caught:
        run_within(dear, case.network, case.step, least - 1)
    assert caught.value.needed_bytes == least


@every_case
def test_a_plan_goes_through_json_and_files(name, cases, tmp_path):
    case = cases(name)
    found = case.plan(case.light_bytes)
    assert Plan.from_json(found.to_json()) == found
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found
    assert list(Plan.load(tmp_path / "plan.json").modes) == list(found.modes)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("modes"),
        lambda document: document.update(other=1),
        lambda document: document.update(modes=["store"]),
        lambda document: document.update(modes={}),
        lambda document: document["modes"].update({"0": "keep"}),
        lambda document: document["modes"].update({"0": None}),
        lambda document: document["modes"].update({"0": ["store"]}),
    ],
)
def test_what_is_no_plan_is_refused(change):
    document = asdict(SOME_PLAN)
    change(document)
    with pytest.raises(ValueError, match=r"This is no plan .* Plan anew"):
        Plan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("modes", [None, "store", 3]),
        ("channels", ["abcd", 4, {}, [], [0], [-5], [1.5], ["8"], [True], [[8]]]),
        ("channels", [[2**61], [10**400], [10**7]]),
        ("budget_bytes", [None, "8", -1, 0.5, float("nan"), True, [], 2**61, 10**400]),
        ("predicted_bytes", ["8", -1, 0.5, 2**61, 10**400]),
        ("measured_bytes", ["8", -1, 0.5, 2**61, 10]),
        ("seconds", [None, "1", -1, float("nan"), float("inf"), True, 10**400, 1e300]),
        ("about", [None, "a card", [], {"device": 3}, {"device": None}]),
        ("predicted_gradient_error", [None, "0", -1, float("nan"), 1e300]),
        ("measured_gradient_error", [None, "0", -1, float("inf"), 1e300]),
    ],
)
def test_a_plan_with_a_value_of_another_kind_is_refused(name, values):
    for value in values:
        document = asdict(SOME_PLAN) | {name: value}
        with pytest.raises(ValueError, match=rf"This is no plan \({name}.*Plan anew"):
            Plan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"measured_bytes": 10}, "measured_bytes is 10, more than budget_bytes, .* 9"),
        (
            {"measured_gradient_error": 0.1},
            "errors are 0 and 0.1, and no block compresses",
        ),
        ({"predicted_gradient_error": 0.1}, "errors are 0.1 and 0, and no block"),
        ({"about": {"card_bytes": "much"}}, "card_bytes is 'much' and takes digits"),
        ({"about": {"staying_bytes": "-5"}}, "staying_bytes is '-5' and takes digits"),
        ({"about": {"memory_budget_bytes": "9" * 5000}}, "memory_budget_bytes is '999"),
        ({"about": {"card_bytes": "nan"}}, "card_bytes is 'nan' and takes digits"),
        ({"about": {"card_bytes": "0"}}, "card_bytes is '0' and takes .* at least 1"),
        ({"about": {"batch": "-128"}}, "batch is '-128' and takes .* at least 1"),
        ({"about": {"frames": "0"}}, "frames is '0' and takes .* at least 1"),
        ({"about": {"blocks": "many"}}, "blocks is 'many' and takes digits"),
        ({"about": {"timed batch": "1.5"}}, "timed batch is '1.5' and takes digits"),
        ({"modes": {"": "store"}}, "a block's name is '' and takes a text, not empty"),
    ],
)
def test_numbers_that_no_plan_has_together_are_refused_in_a_line_of_the_file(
    tmp_path, changed, said
):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(asdict(SOME_PLAN) | changed))
    with pytest.raises(
        ValueError, match=rf"plan\.json: This is no plan .*{said}.*Plan anew"
    ) as error:
        Plan.load(path)
    assert len(str(error.value)) < 400 + len(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_value_is_there_once_and_shown_in_part(tmp_path):
    text = SOME_PLAN.to_json()
    twice = text.replace('"1": "recompute"', '"0": "recompute"')
    with pytest.raises(ValueError, match=r"This is no plan .'0' is there twice"):
        Plan.from_json(twice)
    long = text.replace('"seconds": 0.5', f'"seconds": "{"a" * 10_000}"')
    with pytest.raises(ValueError, match="seconds is 'aaa") as error:
        Plan.from_json(long)
    assert len(str(error.value)) < 300


def test_a_file_that_no_plan_fills_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "plan.json"
    with path.open("w") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"plan\.json: .* more than 10,000,000 bytes"):
        Plan.load(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '{"modes": {}}', "[" * 200_000]
)
def test_other_documents_are_refused(text):
    with pytest.raises(ValueError, match="This is no plan"):
        Plan.from_json(text)


def test_a_file_that_is_no_plan_is_named(tmp_path):
    path = tmp_path / "speed.json"
    for content in (b"{}", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"speed\.json: .*no plan"):
            Plan.load(path)


def test_an_encoder_takes_a_plan_for_modes(cases):
    case = cases("revnet57")
    found = case.plan((case.light_bytes + case.most_bytes) // 2)
    module = encoder("revnet57")
    module.set_channels([None] * 4)
    module.set_mode(found)
    assert {n: m.value for n, m in module.block_modes().items()} == found.modes
    assert module.channels == found.channels


@every_case
def test_a_plan_is_given_to_a_module_or_its_like(name, cases):
    case = cases(name)
    middle = case.plan((case.light_bytes + case.most_bytes) // 2)
    assert len(set(middle.modes.values())) > 1
    module = CASES[name]()[0]
    middle.apply(module)
    network = as_network(module, case.blocks)
    assert {n: m.value for n, m in network.block_modes().items()} == middle.modes
    # Another plan takes the place of the first.
    case.plan(10**12).apply(module)
    assert {m.value for m in network.block_modes().values()} == {"store"}


def modes_of(network):
    return {name: mode.value for name, mode in network.block_modes().items()}


def test_an_encoder_that_cannot_have_a_plan_s_modes_keeps_its_channels_too():
    with torch.device("meta"):
        module = encoder("revnet57")
    before = modes_of(module), module.channels
    modes = before[0] | {"stem": "reconstruct"}
    with pytest.raises(ValueError, match="'stem' of revnet57 is not reversible"):
        replace(SOME_PLAN, modes=modes, channels=[1, 1, 1, 1]).apply(module)
    assert (modes_of(module), module.channels) == before
    assert [stage.chain.chunk for stage in module.stages] == before[1]
    with pytest.raises(ValueError, match="there must be one for each of the 4 levels"):
        replace(SOME_PLAN, modes=dict.fromkeys(modes, "store")).apply(module)
    assert (modes_of(module), module.channels) == before


def test_channels_for_a_network_that_has_none_are_refused_and_no_mode_is_given():
    module = plain(2)
    with pytest.raises(ValueError, match=r"works on \[8, None\] channels at a time"):
        SOME_PLAN.apply(module)
    assert "Recompute" not in repr(module)


def test_a_plan_that_one_block_cannot_have_is_given_to_none():
    module = plain(3)
    module[2].forward = module[2].forward
    modes = dict.fromkeys("012", "recompute")
    with pytest.raises(ValueError, match=r"2 .* has a forward of its own"):
        replace(SOME_PLAN, modes=modes, channels=None).apply(module)
    assert "Recompute" not in repr(module)


@every_case
def test_plans_lose_nothing_unless_somebody_asks(name, cases):
    case = cases(name)
    lossless = {mode.value for mode in LOSSLESS}
    assert {m for block in case.profile.blocks for m in block.modes} <= lossless
    assert {m for modes in case.network.allowed_modes().values() for m in modes} <= {
        *LOSSLESS
    }
    for budget in budgets_between(case, 3):
        assert set(case.plan(budget).modes.values()) <= lossless


def test_an_encoder_that_compresses_is_planned_without_loss():
    with torch.device("meta"):
        module = encoder("revnet57", blocks=(1, 1, 1, 1))
    module.set_mode("compress")
    x = torch.randn(2, 24, 80, device="meta")
    found = plan(module, x, 10**12)
    assert set(found.modes.values()) == {"store"}
    assert set(modes_of(module).values()) == {"compress"}


def test_a_plan_is_given_to_a_chain_alone():
    chain = ReversibleChain(AdditiveCoupling(half(8), half(8)) for _ in range(4))
    found = plan(chain, (torch.randn(64, 8), torch.randn(64, 8)), 10**9, measure=False)
    modes = ["store", "reconstruct", "recompute", "reconstruct"]
    given = dict(zip(found.modes, modes, strict=True))
    replace(found, modes=given).apply(chain)
    assert [mode.value for mode in chain.modes] == modes


@pytest.mark.parametrize("name", ["revnet57", "plain", "chain"])
def test_a_plan_for_another_network_is_refused(name, cases):
    found = cases(name).plan(10**12)
    for other in (plain(2), Chained(depth=2), encoder("revnet46", blocks=(1, 1, 1, 1))):
        modes = repr(other)
        with pytest.raises(ValueError, match=r"Plan anew|No submodule that is called"):
            found.apply(other)
        assert repr(other) == modes


def snapshot(module):
    """Everything that training could change."""
    tensors = {
        name: (id(t), t.clone())
        for name, t in module.state_dict(keep_vars=True).items()
    }
    grads = {
        name: None if p.grad is None else (id(p.grad), p.grad.clone())
        for name, p in module.named_parameters()
    }
    training = [m.training for m in module.modules()]
    hooks = [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()
    ]
    return (
        tensors,
        grads,
        training,
        hooks,
        [type(m) for m in module.modules()],
        repr(module),
    )


def assert_same(before, after):
    assert before[2:] == after[2:]
    for old, new in zip(before[:2], after[:2], strict=True):
        assert old.keys() == new.keys()
        for name, kept in old.items():
            if kept is None:
                assert new[name] is None
            else:
                assert kept[0] == new[name][0]
                assert torch.equal(kept[1], new[name][1]), name


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_what_is_planned_is_not_changed(measure, with_gradients):
    torch.manual_seed(0)
    module = nn.Sequential(Chained(depth=2), nn.Dropout(0.3), nn.Linear(8, 4))
    x = torch.randn(16, 16, requires_grad=True)
    if with_gradients:
        module(x).sum().backward()
        x.grad = None
    module[0].tail.eval()
    as_network(module).set_mode({"0.body.blocks.0": "recompute"})
    before, state = snapshot(module), torch.get_rng_state()
    plan(module, x, 10**9, blocks=["2"], measure=measure)
    assert_same(before, snapshot(module))
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None


def exact_encoder(name):
    torch.manual_seed(0)
    return encoder(name, streams="exact", verify="raise", verify_every=1)


@pytest.mark.parametrize("name", ["revnet46", "df_revnet89"])
def test_gradients_under_every_plan_are_those_of_storing_to_the_bit(name):
    # Of the sizes that are profiled.
    x = feats(batch=4, time=48, dtype=torch.float32)
    module = exact_encoder(name)
    tried, step, profile = profiled_on_meta(name, "exact")
    times = {"store": 1.0, "recompute": 3.0, "reconstruct": 2.0, "": 0.0}
    profile = profile.with_seconds(
        {
            (block, mode): t
            for block in ["", *tried.named_blocks()]
            for mode, t in times.items()
        }
    )
    stored, least = (
        profile.peak_bytes(profile.uniform(mode)) for mode in ("store", "reconstruct")
    )
    module.set_mode("store")
    expected = gradients(copy.deepcopy(module), x)
    seen = set()
    for share in (0.0, 0.1, 0.3, 0.6):
        budget = int(least + share * (stored - least)) + SCALARS
        found = run_within(profile, tried, step, budget)
        seen.add(tuple(found.modes.values()))
        planned = copy.deepcopy(module)
        found.apply(planned)
        for key, value in gradients(planned, x).items():
            assert torch.equal(value, expected[key]), (share, key)
        planned.check_streams()
    assert len(seen) == 4


class Scaled(nn.Module):
    """Takes two arguments, by place or by name."""

    def __init__(self):
        super().__init__()
        self.body = plain(2)

    def forward(self, feats, scale):
        return self.body(feats * scale)


def test_batches_may_be_tuples_or_dicts_and_losses_ones_own():
    x, scale = torch.randn(64, 64), torch.rand(64, 1)
    found = [
        plan(Scaled(), batch, 10**9, blocks=["body.?"], loss=loss, measure=False)
        for batch in ((x, scale), [x, scale], {"scale": scale, "feats": x})
        for loss in (None, lambda y: y.square().sum())
    ]
    peaks = [f.measured_bytes for f in found]
    assert max(peaks) - min(peaks) <= SCALARS
    assert found[0].about["inputs"] == "[[64, 64], [64, 1]]"


def test_times_are_measured_where_the_module_is():
    module, x = plain(3, width=16), torch.randn(8, 16)
    measured = profile_module(module, x, blocks=["?"])
    estimated = profile_module(module, x, blocks=["?"], measure=False)
    assert measured.about["seconds"].startswith("measured on cpu")
    assert "estimated" in estimated.about["seconds"]
    assert all(c.seconds > 0 for b in measured.blocks for c in b.costs.values())
    assert all(c.seconds > 0 for b in estimated.blocks for c in b.costs.values())
    assert measured.peak_bytes(measured.uniform("store")) == estimated.peak_bytes(
        estimated.uniform("store")
    )
    meta = profile_module(module.to("meta"), x.to("meta"), blocks=["?"], measure=True)
    assert "estimated" in meta.about["seconds"]
    assert Profile.from_json(measured.to_json()) == measured


class Slow(nn.Module):
    """Waits in its forward pass."""

    def __init__(self, inner, seconds=0.05):
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, x):
        if not x.is_meta:
            time.sleep(self.seconds)
        return self.inner(x)


@pytest.mark.parametrize("slow", [0, 2, 4])
def test_a_slow_block_is_stored_before_others_if_times_are_measured(slow):
    width = 32
    blocks = [AdditiveCoupling(half(width), half(width)) for _ in range(5)]
    blocks[slow].f = Slow(blocks[slow].f)
    chain, x = ReversibleChain(blocks), (torch.randn(512, width),) * 2
    profile = profile_module(chain, x)
    on_meta_, step = on_meta_with_two(chain, x)
    least, most = (
        profile.peak_bytes(profile.uniform(mode)) for mode in ("reconstruct", "store")
    )
    # Enough for one block to store, or two.
    budget = least + int(0.4 * (most - least))
    found = run_within(profile, as_network(on_meta_), step, budget)
    assert found.modes[f"blocks.{slow}"] == "store"
    assert list(found.modes.values()).count("store") < 5


def on_meta_with_two(module, inputs):
    module = copy.deepcopy(module).to("meta")
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    inputs = [x.to("meta") for x in inputs]
    return module, lambda: sum(y.square().sum() for y in module(*inputs)).backward()


def test_what_a_plan_says_of_itself():
    found = plan(plain(3), torch.randn(8, 64), 10**9, blocks=["?"], measure=False)
    peak = f"peak {size_text(found.measured_bytes)} counted (86280 bytes predicted)"
    assert str(found) == f"3 store: {peak} of 953.7 MiB"
    assert found.about["network"] == "Sequential"
    assert found.about["inputs"] == "[[8, 64]]"
    assert found.about["torch"] == torch.__version__


def test_one_pattern_and_a_size_with_its_unit_are_taken_as_such():
    x, given = torch.randn(8, 64), {"measure": False}
    found = plan(plain(3), x, "1GB", blocks="?", **given)
    assert found == plan(plain(3), x, 2**30, blocks=["?"], **given)


@pytest.mark.parametrize(
    ("budget", "blocks", "message"),
    [
        ("8", "?", "budget_bytes is '8', which is no size"),
        (10**9, None, r"blocks is None: give names of submodules .* 'blocks\.\*'"),
    ],
)
def test_what_is_no_budget_or_no_name_is_refused(budget, blocks, message):
    with pytest.raises(ValueError, match=message):
        plan(plain(3), torch.randn(8, 64), budget, blocks=blocks, measure=False)


def test_more_blocks_are_advised_where_blocks_were_named():
    with pytest.raises(Infeasible, match=r"more blocks than blocks='\[01\]': what is"):
        plan(plain(3), torch.randn(8, 64), 1000, blocks="[01]", measure=False)
    chain = ReversibleChain(AdditiveCoupling(half(8), half(8)) for _ in range(2))
    with pytest.raises(Infeasible) as caught:
        plan(chain, (torch.randn(8, 8),) * 2, 1000, measure=False)
    assert "more blocks" not in str(caught.value)


def test_a_plan_of_another_encoder_names_both_and_not_all_blocks():
    with torch.device("meta"):
        two = [encoder(name) for name in ("revnet57", "resnet34")]
    names = [list(one.named_blocks()) for one in two]
    modes = dict.fromkeys(names[0], "store")
    about = {"encoder": "revnet57"}
    of_first = Plan(modes, None, 1, 1, 1, 1.0, about)
    with pytest.raises(ValueError, match=r"made for revnet57 with .*is resnet34") as e:
        of_first.apply(two[1])
    assert f"this is resnet34 with {len(names[1])}, which has no block" in str(e.value)
    assert len(str(e.value)) < 250


def speechbrain_case(name):
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
    from speechbrain.lobes.models.ResNet import ResNet

    with torch.device("meta"):
        if name == "ecapa":
            return ECAPA_TDNN(80), ["blocks.*", "mfa", "asp.*"]
        return ResNet(80), ["layer?.*"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ecapa", "resnet"])
def test_networks_of_speechbrain_fit_into_half_of_what_they_store(name):
    module, blocks = speechbrain_case(name)
    x = torch.randn(8, 200, 80, device="meta")
    stored = plan(module, x, 10**12, blocks=blocks)
    assert set(stored.modes.values()) == {"store"}
    budget = stored.measured_bytes // 2
    found = plan(module, x, budget, blocks=blocks)
    found.apply(module)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    peak = peak_of(lambda: module(x).square().sum().backward())
    assert peak <= budget
    assert abs(peak - found.predicted_bytes) <= 1e-6 * peak + SCALARS
    assert set(found.modes.values()) == {"store", "recompute"}
    assert found.seconds < 1.5 * stored.seconds


def test_parts_in_evaluation_are_planned_as_they_are():
    """What is in evaluation stores, whatever its mode."""

    def block():
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU())

    torch.manual_seed(0)
    network, x = nn.Sequential(*(block() for _ in range(6))), torch.randn(512, 64)
    for part in network[:4]:
        part.eval()
    with pytest.raises(Infeasible) as error:
        plan(network, x, 1, blocks=["?"], measure=False)
    needed_bytes = error.value.needed_bytes
    least = plan(network, x, needed_bytes, blocks=["?"], measure=False)
    least.apply(network)
    make_gradients(network)
    peak = live_bytes_peak(lambda: network(x).square().sum().backward())
    assert peak <= needed_bytes
