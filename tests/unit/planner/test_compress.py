"""Plans that compress: within their limit of the gradient's error, measured, and said."""

import copy
import functools
import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
from speechbrain.lobes.models.ResNet import ResNet
from torch import nn

from speechbrain_rev.compression import (
    ActivationCompression,
    RangeBound,
    compress_activations,
    reference,
)
from speechbrain_rev.planner import (
    Infeasible,
    Plan,
    Profile,
    Step,
    memory,
    plan,
    step_of,
)
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.planner.network import Compressible, as_network
from speechbrain_rev.planner.plan import held_to_limit, plan_within
from speechbrain_rev.planner.probe import CompressionProbe
from speechbrain_rev.planner.profiling import Profiler
from speechbrain_rev.reversible import AdditiveCoupling, Mode, ReversibleChain
from tests.unit.planner.networks import (
    SCALARS,
    encoder,
    gradients,
    peak_of,
)

BLOCKS = ["head", "tail"]


@pytest.fixture(scope="module", autouse=True)
def small_slices():
    """Tensors of a test are small: so let be what the codec works on at a time.

    With slices twice as large the lightest plan of all keeps the limit of the error.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SLICE", 2**13)
        yield


def layers(channels, count):
    return nn.Sequential(
        *(
            layer
            for _ in range(count)
            for layer in (
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            )
        )
    )


class Mixed(nn.Module):
    """Ordinary blocks around a chain; to recompute the first one saves next to nothing."""

    def __init__(self):
        super().__init__()
        self.head = layers(8, 8)
        self.body = ReversibleChain(
            [AdditiveCoupling(layers(4, 1), layers(4, 1)) for _ in range(2)],
            verify="raise",
            verify_every=1,
        )
        self.tail = layers(8, 1)

    def forward(self, x):
        x = self.head(x)
        return self.tail(torch.cat(self.body(*x.chunk(2, dim=1)), dim=1))


def probe_of(module, x, blocks=()):
    step = step_of(module, x, blocks=blocks)
    with step.training():
        return CompressionProbe(step, 1.0)


class Case:
    def __init__(self):
        torch.manual_seed(0)
        self.module, self.x = Mixed(), torch.randn(2, 8, 30, 40)
        self.step = step_of(self.module, self.x, blocks=BLOCKS)
        with self.step.training():
            self.probe = CompressionProbe(self.step, 1.0)
            self.profiler = Profiler(self.step, self.probe)
            counted = self.profiler.counted().profile
        no_errors = counted.with_errors(dict.fromkeys(self.probe.squared_errors, 0), 0)
        self.profile = replace(no_errors, max_gradient_error=None)
        lossless = self.profile.with_errors(self.probe.squared_errors, 0.0)
        #: The least that a lossless plan takes.
        self.lossless_bytes = lossless.peak_bytes(lossless.lightest()) + SCALARS
        self.plan = functools.cache(self._plan)

    def solve(self, profile, budget):
        return plan_within(profile, self.trial, budget)

    @property
    def trial(self):
        return self.probe.trial._replace(network=self.probe.network)

    def _plan(self, budget, limit):
        profile = self.profile.with_errors(self.probe.squared_errors, limit)
        solve = functools.partial(self.solve, budget=budget)
        return held_to_limit(profile, solve, self.probe.gradient_error)


@pytest.fixture(scope="module")
def case():
    return Case()


def error_of(module, modes, x):
    """By what part of its norm the gradient is off, found without the planner."""
    found = []
    for own in (dict.fromkeys(modes, "store"), modes):
        copied = copy.deepcopy(module)
        as_network(copied, BLOCKS).set_mode(own)
        copied(x).square().sum().backward()
        found.append({n: p.grad for n, p in copied.named_parameters()})
    exact, off = found
    error = sum(float((off[n] - exact[n]).square().sum()) for n in exact)
    return math.sqrt(error / sum(float(g.square().sum()) for g in exact.values()))


def test_a_plan_compresses_where_no_lossless_one_fits(case):
    budget = case.lossless_bytes * 8 // 10
    with pytest.raises(Infeasible) as caught:
        plan(case.module, case.x, budget, blocks=BLOCKS, measure=False)
    assert caught.value.needed_bytes <= case.lossless_bytes
    found = case.plan(budget, 0.05)
    assert found.modes["head"] == "compress"
    assert found.measured_bytes <= budget
    case.probe.network.set_mode(found.modes)
    assert peak_of(case.trial.run) <= budget
    assert 0 < found.measured_gradient_error <= 0.05
    # What is predicted of blocks by themselves is what is measured of all.
    ratio = found.measured_gradient_error / found.predicted_gradient_error
    assert 0.7 < ratio < 1.4
    own = error_of(case.module, found.modes, case.x)
    assert own == pytest.approx(found.measured_gradient_error, rel=1e-3)
    assert case.module.body.modes == [Mode.RECONSTRUCT] * 2


def test_no_plan_is_above_the_limit_of_its_error(case):
    """Limits between those of blocks; below all of them nothing compresses."""
    errors = sorted(e**0.5 for e in case.probe.squared_errors.values())
    assert len(errors) == 4
    compressing = []
    for limit in (0.5 * errors[0], *(1.01 * e for e in errors), 10.0):
        found = case.plan(case.lossless_bytes, limit)
        compressing.append("compress" in found.modes.values())
        assert found.measured_gradient_error <= limit
        assert error_of(case.module, found.modes, case.x) <= limit * 1.001
        assert found.measured_bytes <= case.lossless_bytes
    assert not compressing[0]


def test_an_error_that_is_above_its_prediction_is_heeded(case):
    """As where errors of blocks are not independent."""
    budget, limit = case.lossless_bytes * 8 // 10, 0.05
    profile = case.profile.with_errors(case.probe.squared_errors, limit)
    asked = []

    def solve(own):
        asked.append(own.max_gradient_error)
        return plan_within(own, case.trial, budget)

    first = held_to_limit(profile, solve, lambda modes: limit)
    assert asked == [limit]
    assert first.measured_gradient_error == limit
    asked.clear()
    with pytest.raises(Infeasible):
        held_to_limit(profile, solve, lambda modes: 2 * limit)
    assert asked[1] == pytest.approx(0.49 * first.predicted_gradient_error)


def test_what_a_plan_that_compresses_needs_is_reported_where_none_fits():
    torch.manual_seed(0)
    module, x = nn.Sequential(layers(8, 3), layers(8, 1)), torch.randn(2, 8, 20, 30)
    given = {"blocks": "?", "measure": False}
    needed = []
    for limit in (None, 0.1):
        with pytest.raises(Infeasible) as caught:
            plan(module, x, 1, **given, max_gradient_error=limit)
        needed.append(caught.value.needed_bytes)
    lossless, lossy = needed
    assert lossy < lossless
    assert plan(module, x, lossy + SCALARS, **given, max_gradient_error=0.1)


def test_where_no_plan_that_compresses_keeps_the_limit_it_is_lossless(case):
    first = case.plan(case.lossless_bytes * 8 // 10, 0.05)
    profile = case.profile.with_errors(case.probe.squared_errors, 0.05)
    lossless = replace(first, modes=dict.fromkeys(first.modes, "recompute"))

    def solve(own):
        return first if own.max_gradient_error else lossless

    assert held_to_limit(profile, solve, lambda modes: 0.06) == lossless
    assert held_to_limit(profile, solve, lambda modes: 0.04).modes == first.modes


def test_without_a_limit_and_with_one_of_zero_plans_are_lossless(case):
    free = plan(case.module, case.x, 10**9, blocks=BLOCKS, measure=False)
    assert set(free.modes.values()) == {"store"}
    assert (free.predicted_gradient_error, free.measured_gradient_error) == (0.0, 0.0)
    assert "gradient error" not in str(free)
    zero = case.profile.with_errors(case.probe.squared_errors, 0.0)
    found = case.solve(zero, case.lossless_bytes)
    assert "compress" not in found.modes.values()


def test_streams_that_blocks_hand_down_are_exact(case):
    """Checksums would raise; and the chain's output is that of storing to the bit."""
    modes = {"head": "store", "tail": "store"}
    kept = ["store", "reconstruct"]
    for own in (["compress", "compress"], ["reconstruct", "compress"], kept):
        module = copy.deepcopy(case.module)
        chained = dict(zip(["body.blocks.0", "body.blocks.1"], own, strict=True))
        as_network(module, BLOCKS).set_mode({**modes, **chained})
        y = module(case.x)
        y.square().sum().backward()
        module.body.check_streams()
        stored = copy.deepcopy(case.module)
        as_network(stored, BLOCKS).set_mode(
            dict.fromkeys(case.profile.uniform("store"), "store")
        )
        assert torch.equal(stored(case.x), y)


def test_what_a_chain_hands_down_is_off_by_what_f_and_g_compress_alone(case):
    """Streams add nothing to it: it is that of compressing F and G in plain autograd."""
    torch.manual_seed(1)
    chain = copy.deepcopy(case.module.body)
    x = torch.randn(2, 2, 4, 30, 40)

    def handed_down(modes):
        own = copy.deepcopy(chain)
        own.set_mode(modes)
        x1, x2 = (part.clone().requires_grad_() for part in x)
        sum(y.square().sum() for y in own(x1, x2)).backward()
        return torch.stack([x1.grad, x2.grad])

    exact = handed_down("store")
    off = handed_down("compress")
    assert not torch.equal(off, exact)
    # A block that reconstructs below one that compresses makes no difference to the bit.
    mixed = handed_down(["reconstruct", "compress"])
    assert torch.equal(mixed, handed_down(["store", "compress"]))
    own = copy.deepcopy(chain)
    compress_activations(own)
    own.set_mode("store")
    x1, x2 = (part.clone().requires_grad_() for part in x)
    sum(y.square().sum() for y in own(x1, x2)).backward()
    assert torch.equal(torch.stack([x1.grad, x2.grad]), off)


def test_a_plan_that_compresses_is_a_document_and_says_so(case, tmp_path):
    found = case.plan(case.lossless_bytes * 8 // 10, 0.05)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found
    predicted, measured = (
        f"{100 * e:.2g} %"
        for e in (found.predicted_gradient_error, found.measured_gradient_error)
    )
    assert str(found).endswith(
        f"; gradient error {predicted} predicted, {measured} measured"
    )
    old = asdict(found)
    for name in ("predicted_gradient_error", "measured_gradient_error"):
        del old[name]
    assert Plan.from_json(json.dumps(old)).measured_gradient_error == 0.0


def test_a_plan_is_given_to_another_copy_and_taken_back(case):
    found = case.plan(case.lossless_bytes * 8 // 10, 0.05)
    module = copy.deepcopy(case.module)
    found.apply(module)
    network = as_network(module, BLOCKS)
    assert {n: m.value for n, m in network.block_modes().items()} == found.modes
    off = gradients(copy.deepcopy(module), case.x)
    network.set_mode(dict.fromkeys(found.modes, "store"))
    assert "forward" not in vars(module)
    assert "forward" not in vars(module.head)
    assert module.state_dict().keys() == case.module.state_dict().keys()
    exact = gradients(copy.deepcopy(module), case.x)
    assert any(not torch.equal(off[n], exact[n]) for n in exact)


def test_a_profile_keeps_errors_in_its_file_and_old_files_have_none(case):
    profile = case.profile.with_errors(case.probe.squared_errors, 0.01)
    assert Profile.from_json(profile.to_json()) == profile
    old = json.loads(case.profile.to_json())
    del old["max_gradient_error"]
    for block in old["blocks"]:
        block["costs"] = [cost[:5] for cost in block["costs"]]
    lossless = Profile.from_json(json.dumps(old))
    assert lossless == case.profile
    assert lossless.gradient_error(lossless.uniform("compress")) == 0.0


def test_planning_changes_nothing(case):
    torch.manual_seed(3)
    layer = nn.Sequential(nn.Dropout(0.2), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))
    module, x = nn.Sequential(layer, nn.Flatten()), torch.randn(4, 4, 40)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    found = plan(module, x, 10**8, blocks=["?"], max_gradient_error=0.1)
    assert found.about["bytes"].startswith("counted in steps on cpu")
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in module.parameters())
    assert "forward" not in vars(module)


def test_blocks_that_compression_does_not_cover_have_no_such_mode():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv1d(4, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(152, 4)
    )
    probe = probe_of(module, torch.randn(4, 4, 40), ["?"])
    assert list(probe.squared_errors) == ["0"]
    allowed = probe.network.allowed_modes()
    assert {n for n, modes in allowed.items() if Mode.COMPRESS in modes} == {"0"}


@pytest.mark.parametrize("limit", [0, -0.1, math.nan, math.inf, "1 %", True])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(
        ValueError, match=r"max_gradient_error is .* above 0 and finite"
    ):
        plan(
            layers(4, 1), torch.randn(2, 4, 9, 9), 10**9, blocks="?",
            max_gradient_error=limit,
        )  # fmt: skip


def test_without_numbers_it_is_refused():
    module, x = layers(4, 1).to("meta"), torch.randn(2, 4, 9, 9, device="meta")
    with pytest.raises(ValueError, match="max_gradient_error needs numbers"):
        plan(module, x, 10**9, blocks="?", max_gradient_error=0.1)


def test_what_may_help_where_nothing_fits_is_said():
    module, x = nn.Sequential(layers(8, 6), layers(8, 1)), torch.randn(2, 8, 20, 30)
    limit = {"measure": False, "max_gradient_error": 1e-7}
    with pytest.raises(Infeasible) as caught:
        plan(module, x, 1, blocks="?", **limit)
    helps = str(caught.value).partition("What helps: ")[2].split("; ")
    assert helps[-1] == "more than max_gradient_error=1e-07."
    assert "more blocks than blocks='?': what is outside of blocks stores" in helps


def test_a_gradient_that_tells_nothing_is_refused():
    module, x = layers(4, 1), torch.full((2, 4, 9, 9), math.nan)
    with pytest.raises(ValueError, match=r"gradient is nan.*Give a batch"):
        plan(module, x, 10**9, blocks="?", max_gradient_error=0.1)


class Scaling(nn.Sequential):
    def __init__(self):
        super().__init__(layers(4, 1))

    def forward(self, x, scale):
        return super().forward(x * scale)


def test_a_batch_that_does_not_fit_is_tried_in_part(monkeypatch):
    module, x = nn.Sequential(layers(4, 2), layers(4, 2)), torch.randn(8, 4, 20, 20)
    step = step_of(module, x, blocks="?")
    with step.training():
        trial = step.trial()
        trial.network.set_mode({"0": "store", "1": "store"})
        stored = step.copy_bytes + peak_of(trial.run)
        free = int(stored / 2 / memory.SHARE) + SCALARS
        monkeypatch.setattr(memory, "available_ram_bytes", lambda: free)
        assert CompressionProbe(step, 0.1).batch == 4


def test_what_the_memory_does_not_hold_is_not_tried(monkeypatch):
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: 0)
    monkeypatch.setattr(Step, "trial", None)
    given = {"blocks": "?", "max_gradient_error": 0.1}
    with pytest.raises(MemoryError, match=r"one sample on cpu takes .*leave it out"):
        plan(layers(4, 1), torch.randn(2, 4, 9, 9), 10**9, **given)
    # Of a batch that cannot be divided no smaller one is tried.
    batch = torch.randn(2, 4, 9, 9), torch.ones(1, 4, 1, 1)
    with pytest.raises(MemoryError, match=r"not fit on cpu.* same number of rows"):
        plan(Scaling(), batch, 10**9, **given)


def test_bounds_are_those_that_the_network_was_given():
    torch.manual_seed(0)
    module, x = nn.Sequential(layers(4, 1), layers(4, 1)), torch.randn(2, 4, 30, 40)
    errors = []
    for fraction in (1e-1, 1e-3):
        rule = RangeBound(fraction)
        module.compression = ActivationCompression(
            convolutions=rule, normalisations=rule
        )
        probe = probe_of(module, x, "?")
        errors.append(probe.gradient_error(dict.fromkeys("01", "compress")))
    assert errors[0] > 10 * errors[1] > 0
    as_network(module, "?").set_mode({"0": "compress"})
    module(x).sum().backward()
    assert module.compression.records
    module.compression = RangeBound(1e-3)
    with pytest.raises(ValueError, match="give it to an ActivationCompression"):
        as_network(module, "?")


def test_a_network_without_bounds_of_its_own_has_those_of_its_plan():
    module = nn.Sequential(layers(4, 1), layers(4, 1))
    as_network(module, "?").set_mode({"0": "compress"})
    module(torch.randn(2, 4, 30, 40)).sum().backward()
    assert module.compression.records.keys() == {"0.0", "0.1"}
    with pytest.raises(ValueError, match="blocks that compress, by a plan"):
        compress_activations(module)


def test_a_limit_that_holds_nothing_up_is_no_remedy():
    module, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), torch.randn(64, 32)
    with pytest.raises(Infeasible) as caught:
        plan(module, x, 1, blocks="?", measure=False, max_gradient_error=0.1)
    assert "max_gradient_error" not in str(caught.value)


def test_what_is_compressed_as_a_whole_is_refused():
    module, x = layers(4, 1), torch.randn(2, 4, 9, 9)
    compress_activations(module)
    for limit in (0.1, None):
        with pytest.raises(ValueError, match="has all its activations compressed"):
            plan(module, x, 10**9, blocks="?", max_gradient_error=limit)
    own = encoder("resnet34")
    compress_activations(own)
    with pytest.raises(ValueError, match="has all its activations compressed"):
        plan(own, torch.randn(2, 64, 16), 10**9, max_gradient_error=0.1)


def test_times_are_taken_of_what_compresses_too(case):
    with case.step.training():
        measured = case.profiler.timed()
    assert measured.about["seconds"].startswith("measured on cpu")
    for block in measured.blocks:
        assert "compress" in block.modes
        assert all(cost.seconds > 0 for cost in block.costs.values())
    assert replace(measured, about={}).peak_bytes(
        measured.uniform("compress")
    ) == case.profile.peak_bytes(case.profile.uniform("compress"))
    assert set(Compressible(as_network(Mixed(), BLOCKS)).allowed_modes()) == set(
        case.profile.uniform("store")
    )


def test_an_encoder_is_planned_with_its_channels_and_its_rules():
    torch.manual_seed(0)
    module = encoder("resnet34", widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1))
    module.compression = ActivationCompression(convolutions=RangeBound(1e-4))
    x = torch.randn(2, 24, 80)
    free = plan(module, x, 10**9, measure=False)
    found = plan(module, x, 10**9, measure=False, max_gradient_error=0.05)
    # Estimated, and so the same each time.
    assert found.about["seconds"].startswith("estimated from counts of operations")
    assert found.channels == free.channels == module.channels
    assert found.modes == free.modes
    probe = probe_of(module, x)
    # Of the rules that it has: finer bounds, less error.
    module.compression = ActivationCompression(convolutions=RangeBound(1e-1))
    coarse = probe_of(module, x)
    assert probe.squared_errors.keys() == coarse.squared_errors.keys()
    for name, error in probe.squared_errors.items():
        assert error < coarse.squared_errors[name], name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "names"),
    [
        (lambda: ECAPA_TDNN(80, channels=[64] * 4 + [192]), ["blocks.*", "mfa"]),
        (
            lambda: ResNet(80, channels=[8, 8, 16, 16], block_sizes=[1] * 4),
            ["layer?.*"],
        ),
    ],
)
def test_networks_of_speechbrain_are_planned_by_names_of_blocks(network, names):
    torch.manual_seed(0)
    module, x = network(), torch.randn(2, 80, 80)
    profile_bytes = []
    for limit in (None, 0.05):
        stored = plan(
            module, x, 10**9, blocks=names, measure=False, max_gradient_error=limit
        )
        assert set(stored.modes.values()) == {"store"}
        profile_bytes.append(stored.measured_bytes)
    # Counted on meta and on the device it is the same.
    assert profile_bytes[0] == pytest.approx(profile_bytes[1], rel=0.02)
    probe = probe_of(module, x, names)
    assert probe.squared_errors
    modes = dict.fromkeys(probe.squared_errors, "compress")
    predicted = math.sqrt(sum(probe.squared_errors.values()))
    assert probe.gradient_error(modes) == pytest.approx(predicted, rel=0.5)


def test_what_two_blocks_save_of_one_tensor_is_one_copy():
    """The ReLU at the end of one and the convolution that begins the next."""
    torch.manual_seed(0)
    module, x = nn.Sequential(layers(8, 2), layers(8, 2)), torch.randn(2, 8, 60, 80)
    held = []
    for modes in ({"0": "compress", "1": "compress"}, {"0": "store", "1": "store"}):
        as_network(module, ["?"]).set_mode(modes)
        with LiveBytes() as meter:
            y = module(x)
            held.append(meter.live - y.nbytes)
        del y
    # All but the last output, which the caller holds.
    assert held[0] < held[1] / 2


def test_a_plan_of_other_blocks_leaves_none_that_compresses():
    torch.manual_seed(0)
    module = nn.Sequential(layers(4, 1), layers(4, 1))
    as_network(module, ["?"]).set_mode(dict.fromkeys("01", "compress"))
    finer = as_network(module, ["?.*"])
    finer.set_mode(dict.fromkeys(finer.named_blocks(), "store"))
    assert not any("forward" in vars(part) for part in module.modules())


def test_the_one_chain_s_bounds_are_those_of_the_network():
    torch.manual_seed(0)
    network = as_network(Mixed(), BLOCKS)
    chain = next(m for m in network.module.modules() if isinstance(m, ReversibleChain))
    assert network.compression is chain.compression
