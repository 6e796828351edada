"""A step is watched block by block, in order, and nobody notices that it is."""

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from speechbrain_rev.devices import ASSUMED
from speechbrain_rev.modes import Mode, fallback
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.planner.network import as_network, compare_next
from speechbrain_rev.planner.trace import trace_bytes, trace_seconds
from speechbrain_rev.reversible import hooks
from speechbrain_rev.reversible.hooks import Moment, observed
from tests.unit.planner.networks import (
    MIB,
    Chained,
    encoder_on_meta,
    on_meta,
    other_on_meta,
    peak_of,
    profiled_on_meta,
    random_modes,
)

CPU = torch.device("cpu")
MODES = ("store", "reconstruct", "mixed")


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
@pytest.mark.parametrize("name", ["revnet46", "resnet34", "plain", "chain and layers"])
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
    order = sorted(names.values(), key=lambda n: (n != "head", n == "tail"))
    there = itertools.product(order, (Moment.FORWARD_BEGINS, Moment.FORWARD_ENDS))
    back = [(name, Moment.BACKWARD_BEGINS) for name in reversed(order)]
    assert seen == [*there, *back]
    watched = trace_bytes(network, step).peak_bytes
    compare_next(network)
    assert watched == peak_of(step)


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
    peaks = [block.forward_peak_bytes for block in run]
    assert max(peaks) - min(peaks) < 6144 / 2  # half of a stream


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


@pytest.mark.parametrize("name", ["revnet46", "df_revnet66"])
def test_chunks_take_as_many_operations_as_all_channels_at_once(name):
    works = [
        work_of(as_network(module), step)
        for module, step in (
            encoder_on_meta(name, mode="store", chunk=chunk) for chunk in (None, 8192)
        )
    ]
    whole, chunked = (sum(block.flops for block in work.values()) for work in works)
    launched = [sum(block.operations for block in work.values()) for work in works]
    assert launched[1] > 1.5 * launched[0]
    assert chunked == whole


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
    module, x = nn.Sequential(Slow(0), Slow(0.05), Slow(0)), torch.randn(4, 8)

    def step():
        y = module(x)
        time.sleep(0.02)
        y.sum().backward()

    network = as_network(module, ["?"])
    seconds = trace_seconds(network, step, CPU)
    assert set(seconds) == {"", "0", "1", "2"}
    assert seconds["1"] >= 0.05
    assert seconds[""] >= 0.02
    network.set_mode({"1": "recompute"})
    assert trace_seconds(network, step, CPU)["1"] >= 0.1


class Two(nn.Module):
    """Two layers, called by a function."""

    def __init__(self, call):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self.a, self.b, x)


REFUSED = {
    "a ran more than once": lambda a, b, x: a(b(a(x))),
    "b ran more than once": lambda a, b, x: a(x) * b(x).detach() + b(x.detach()).sum(),
    "a did not run": lambda a, b, x: b(x),
    "b had no backward pass": lambda a, b, x: (a(x), b(x))[0],
    "a, b had no backward pass": lambda a, b, x: b(a(x)).detach() + x.requires_grad_(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_blocks_that_do_not_run_one_after_the_other_are_refused(reason):
    module, step = on_meta(Two(REFUSED[reason]), torch.randn(2, 4))
    with pytest.raises(ValueError, match=reason):
        trace_bytes(as_network(module, ["a", "b"]), step)


VALUES = 100
#: What runs on two tensors of so many values, and how many such tensors it reads and writes.
MOVES = {
    "allocates": (lambda x, y: torch.empty_like(x), 0),
    "sets to zero": (lambda x, y: torch.zeros_like(x), 1),
    "fills": (lambda x, y: x.fill_(1), 1),
    "copies": (lambda x, y: x.copy_(y), 2),
    "adds": (lambda x, y: x + y, 3),
    "adds in place": (lambda x, y: x.add_(y), 3),
    "adds into another": (lambda x, y: torch.add(x, x, out=y), 3),
    "adds to a list": (lambda x, y: torch._foreach_add_([x, y], 1.0), 4),
}


@pytest.mark.parametrize("what", MOVES)
def test_memory_that_an_operation_moves_is_what_it_reads_and_what_it_writes(what):
    run, tensors = MOVES[what]
    block = nn.Linear(2, 2, bias=False)
    x, y = torch.empty(2, VALUES, device="meta")
    network = as_network(nn.Sequential(block).to("meta"), ["0"])

    def moved(also):
        def step():
            block(torch.empty(1, 2, device="meta")).sum().backward()
            also(x, y)

        return sum(work.moved_bytes for work in work_of(network, step).values())

    # The first step has no gradient to add to.
    _, alone, together = map(moved, (lambda x, y: None, lambda x, y: None, run))
    assert together - alone == tensors * 4 * VALUES


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
    cpu, meta = (live_bytes_peak(step, device=torch.device(d)) for d in ("cpu", "meta"))
    trace = trace_bytes(as_network(module, ["?"]), step, with_work=True)
    assert trace.blocks["2"].held_bytes >= 2 * size
    assert trace.peak_bytes == meta
    assert cpu == size
    assert meta <= live_bytes_peak(step, device=None) <= meta + size
    copied = {name: work.host_bytes for name, work in trace.work.items()}
    assert copied == {"": 0, "0": 0, "1": size, "2": 0}
    slow = replace(ASSUMED, host_bytes_per_second=size / 8)
    fast = replace(ASSUMED, host_bytes_per_second=math.inf)
    more = {name: slow.seconds(w) - fast.seconds(w) for name, w in trace.work.items()}
    assert more == pytest.approx({"": 0, "0": 0, "1": 8, "2": 0})


def test_what_is_kept_on_the_host_can_be_traced_without_contents():
    module = nn.Sequential(nn.Linear(50, 50), nn.Tanh(), nn.Tanh())
    module, step = on_meta(module, torch.randn(200, 50))
    network = as_network(module, ["?"])
    kept = trace_bytes(network, step).blocks["2"]
    with torch.autograd.graph.save_on_cpu():
        moved = trace_bytes(network, step, with_work=True)
    last, size = moved.blocks["2"], 4 * 200 * 50
    assert kept.held_bytes == 2 * size
    assert last.held_bytes == size
    # Each is copied to the host and back.
    assert moved.work["1"].host_bytes == 2 * size
