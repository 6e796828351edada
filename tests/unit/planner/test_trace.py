"""A step is watched block by block, in order, and nobody notices that it is."""

import copy
import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from speechbrain_rev.modes import LOSSLESS, Mode, fallback
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.planner.network import as_network, compare_next
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.planner.trace import trace_bytes, trace_seconds
from speechbrain_rev.reversible import hooks
from speechbrain_rev.reversible.hooks import Moment, observed
from tests.unit.planner.networks import (
    MIB,
    OTHERS,
    SCALARS,
    Chained,
    assert_equal_tensors,
    encoder_on_meta,
    gradients,
    on_meta,
    other_on_meta,
    peak_of,
    plain,
    profiled_on_meta,
    random_modes,
)

CPU = torch.device("cpu")
MODES = (*(mode.value for mode in LOSSLESS), "mixed")


def give(network, mode):
    """Give all blocks a mode, or random ones; those that cannot have it recompute."""
    modes = random_modes(network, seed=5)
    if mode != "mixed":
        allowed = network.allowed_modes().items()
        modes = {name: fallback(Mode(mode), own) for name, own in allowed}
    network.set_mode(modes)


def work_of(network, step):
    return trace_bytes(network, step, with_work=True).work


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["revnet46", "resnet34", *OTHERS])
def test_blocks_report_in_their_order_and_add_nothing_to_the_peak(name, mode):
    network, step, _ = profiled_on_meta(name)
    give(network, mode)
    names = {id(block): name for name, block in network.named_blocks().items()}
    seen = []
    with (
        observed(lambda block, moment: seen.append((names[id(block)], moment))),
        getattr(network, "watched", torch.enable_grad)(),
    ):
        step()
    order = [name for name, moment in seen if moment is Moment.FORWARD_BEGINS]
    ends = sorted(names.values(), key=lambda n: (n != "head", n == "tail"))
    assert order == ends
    there = itertools.product(order, (Moment.FORWARD_BEGINS, Moment.FORWARD_ENDS))
    back = [(name, Moment.BACKWARD_BEGINS) for name in reversed(order)]
    assert seen == [*there, *back]
    watched = trace_bytes(network, step).peak_bytes
    compare_next(network)
    assert watched == peak_of(step)


@pytest.mark.parametrize("mode", MODES)
def test_who_watches_changes_no_gradient(mode):
    torch.manual_seed(0)
    module, x, blocks = OTHERS["chain and layers"]()
    network = as_network(module, blocks)
    give(network, mode)
    state = copy.deepcopy(module.state_dict())
    alone = gradients(module, x)
    module.load_state_dict(state)
    with observed(lambda block, moment: None), network.watched():
        assert_equal_tensors(gradients(module, x), alone)


def test_no_observer_and_no_hook_is_left_behind():
    network, step = other_on_meta("chain and layers")

    def fails():
        step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace_bytes(network, fails)
    assert not hooks._observers
    for block in network.named_blocks().values():
        assert not block._forward_hooks
        assert not block._forward_pre_hooks


class Between(nn.Module):
    """Works on a MiB between its two blocks, which need next to nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x + 0 * torch.zeros(MIB // 4, device=x.device).sum())


def test_what_is_made_between_two_blocks_belongs_to_the_second():
    module, step = on_meta(Between(), torch.randn(2, 4))
    trace = trace_bytes(as_network(module, ["first", "second"]), step)
    assert trace.peak_bytes >= trace.blocks["second"].forward_peak_bytes >= MIB
    assert trace.blocks["first"].forward_peak_bytes < MIB // 100


def test_bytes_of_a_block_are_those_that_autograd_saves():
    module, step = on_meta(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(100, 64)
    )
    linear, tanh = trace_bytes(as_network(module, ["?"]), step).blocks.values()
    size = 4 * 100 * 64
    assert linear.before_bytes == 0
    # The input was there before; the output lives for tanh, whose own is kept.
    assert linear.after_bytes == tanh.before_bytes == size
    assert tanh.after_bytes == 2 * size


@pytest.mark.parametrize("before", ["store", "recompute"])
@pytest.mark.parametrize("streams", ["exact", "float"])
def test_a_run_that_begins_within_a_chain_keeps_no_values_of_the_blocks_before(
    streams, before
):
    module, step = on_meta(Chained(streams=streams), torch.randn(64, 16))
    network = as_network(module)
    modes = dict.fromkeys(network.named_blocks(), "reconstruct")
    network.set_mode(modes | {"body.blocks.0": before})
    _, *run = trace_bytes(network, step).blocks.values()
    *inner, last = [block.after_bytes for block in run]
    # Less than the size of a stream, 6,144 bytes.
    assert all(abs(held - last) <= SCALARS for held in inner)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_each_gradient_of_a_convolution_takes_what_its_forward_pass_does(
    groups, needs_gradient
):
    block = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False, device="meta")
    x = torch.randn(4, 8, 10, 6, device="meta", requires_grad=needs_gradient)
    network = as_network(nn.Sequential(block), ["0"])
    work = work_of(network, lambda: block(x).sum().backward())
    forward = 2 * 4 * 8 * 10 * 6 * (8 // groups) * 9
    assert work["0"].flops == (2 + needs_gradient) * forward


@pytest.mark.parametrize("mode", ["recompute", "reconstruct"])
def test_other_modes_run_each_residual_function_once_more(mode):
    network, step, _ = profiled_on_meta("chain and layers")
    give(network, "store")
    stored = work_of(network, step)
    give(network, mode)
    for name, again in work_of(network, step).items():
        if name.startswith("body"):
            assert again.flops == stored[name].flops * 4 / 3
            assert again.moved_bytes > stored[name].moved_bytes


class Slow(nn.Module):
    """Waits in its forward pass."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


def test_time_is_attributed_to_the_block_that_takes_it():
    module = nn.Sequential(Slow(0), Slow(0.05), Slow(0), nn.Tanh())
    x = torch.randn(4, 8)

    def step():
        y = module(x)
        time.sleep(0.02)
        y.sum().backward()

    network = as_network(module, ["0", "1", "2"])
    seconds = trace_seconds(network, step, CPU)
    assert set(seconds) == {"", "0", "1", "2"}
    assert seconds["1"] >= 0.05
    assert seconds[""] >= 0.02
    network.set_mode({"1": "recompute"})
    assert trace_seconds(network, step, CPU)["1"] >= 0.1


class Two(nn.Module):
    """Two layers, called by a function."""

    def __init__(self, call, a=None):
        super().__init__()
        self.a, self.b = a or nn.Linear(4, 4), nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


def twice(own, x):
    return own.a(own.b(own.a(x)))


def unused(own, x):
    y = own.a(x)
    own.b(y)
    return y


REFUSED = {
    "a ran more than once": lambda: Two(twice),
    "b ran more than once": lambda: Two(
        lambda own, x: own.a(x) * own.b(x).detach() + own.b(x.detach()).sum()
    ),
    "a did not run": lambda: Two(lambda own, x: own.b(x), a=Two(twice)),
    "b had no backward pass": lambda: Two(unused),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_blocks_that_do_not_run_one_after_the_other_are_refused(reason):
    module, step = on_meta(REFUSED[reason](), torch.randn(2, 4))
    with pytest.raises(ValueError, match=reason):
        trace_bytes(as_network(module, ["a", "b"]), step)


def test_a_step_without_a_backward_pass_is_refused():
    module, x = plain(2).to("meta"), torch.randn(4, 64, device="meta")
    with pytest.raises(ValueError, match="0, 1 had no backward pass"):
        trace_bytes(as_network(module, ["?"]), lambda: module(x))


def test_bytes_are_of_a_step_that_compares_streams_and_work_of_one_that_does_not():
    traces, later = [], []
    for verify in ("warn", None):
        network, step = encoder_on_meta("revnet57", verify=verify)
        give(network, "reconstruct")
        traces.append(trace_bytes(network, step, with_work=True))
        later.append(peak_of(step))
        assert trace_bytes(network, step).work == {}
    comparing, quiet = traces
    assert comparing.work == quiet.work
    assert comparing.peak_bytes > max(quiet.peak_bytes, *later)


class FromTheMachine(nn.Module):
    """Copies what it adds from another device."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(50, 50)

    def forward(self, x):
        return self.linear(x) + torch.ones(200, 50, device="cpu").to(x.device)


def test_tensors_of_the_network_s_device_are_counted_and_copies_from_others_take_time():
    size = 4 * 200 * 50
    module = nn.Sequential(nn.Linear(50, 50), FromTheMachine(), nn.Tanh())
    module, step = on_meta(module, torch.randn(200, 50))
    network = as_network(module, ["?"])
    cpu, meta, every = (
        live_bytes_peak(step, device=device and torch.device(device))
        for device in ("cpu", "meta", None)
    )
    trace = trace_bytes(network, step, with_work=True)
    assert trace.blocks["2"].after_bytes >= 2 * size
    assert trace.peak_bytes == meta
    assert cpu == size
    assert meta <= every <= meta + size
    copied = {name: work.host_bytes for name, work in trace.work.items()}
    assert copied == {"": 0, "0": 0, "1": size, "2": 0}
    slow = replace(ASSUMED, host_bytes_per_second=size / 8)
    fast = replace(ASSUMED, host_bytes_per_second=math.inf)
    more = {name: slow.seconds(w) - fast.seconds(w) for name, w in trace.work.items()}
    assert more == pytest.approx({"": 0, "0": 0, "1": 8, "2": 0})


def test_what_is_kept_on_the_host_can_be_traced_without_contents():
    module = nn.Sequential(nn.Linear(50, 50), nn.Tanh())
    module, step = on_meta(module, torch.randn(200, 50))
    network = as_network(module, ["?"])
    kept = trace_bytes(network, step)
    with torch.autograd.graph.save_on_cpu():
        moved = trace_bytes(network, step, with_work=True)
    assert moved.backward_bytes < kept.backward_bytes
    # Each is copied to the host and back.
    assert moved.work["1"].host_bytes == 2 * 4 * 200 * 50
