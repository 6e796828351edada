"""A step is watched block by block, in order, and nobody notices that it is."""

import functools
import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from speechbrain_rev.modes import LOSSLESS
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.planner.network import NamedBlocks, as_network, compare_next
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.planner.trace import trace_bytes, trace_seconds
from speechbrain_rev.reversible.hooks import Moment, observed
from tests.unit.lobes.encoders import KINDS, feats
from tests.unit.planner.networks import (
    MIB,
    OTHERS,
    SCALARS,
    Chained,
    encoder,
    encoder_on_meta,
    gradients,
    on_meta,
    other_on_meta,
    peak_of,
    plain,
    random_modes,
    trace_work,
)

#: Made once each: every test gives all blocks their modes.
cached_on_meta = functools.cache(encoder_on_meta)

MODES = (*(mode.value for mode in LOSSLESS), "mixed")


def give(network, mode):
    """Give all blocks a mode, or random ones; those that cannot have it recompute."""
    modes = random_modes(network, seed=5)
    if mode != "mixed":
        for name, allowed in network.allowed_modes().items():
            modes[name] = mode if mode in {m.value for m in allowed} else "recompute"
    network.set_mode(modes)


def moments_of(network, step):
    names = {id(block): name for name, block in network.named_blocks().items()}
    seen = []
    with observed(lambda block, moment: seen.append((names[id(block)], moment))):
        if isinstance(network, NamedBlocks):
            with network.watched():
                step()
        else:
            step()
    return seen


def in_order(names):
    """What must be told: each block begins and ends, and all come back."""
    there = [
        (name, moment)
        for name in names
        for moment in (Moment.FORWARD_BEGINS, Moment.FORWARD_ENDS)
    ]
    return there + [(name, Moment.BACKWARD_BEGINS) for name in reversed(names)]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "mixed") for name in KINDS),
        *itertools.product(["revnet46", "df_revnet89", "resnet34"], MODES[:-1]),
    ],
)
def test_blocks_of_an_encoder_tell_in_their_order(name, mode):
    network, step = cached_on_meta(name)
    give(network, mode)
    assert moments_of(network, step) == in_order(list(network.named_blocks()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OTHERS)
def test_blocks_of_other_networks_tell_in_their_order(name, mode):
    network, step = other_on_meta(name)
    give(network, mode)
    names = [name for name in network.named_blocks() if name != "head"]
    if "head" in network.named_blocks():
        names.insert(0, "head")
    if "tail" in names:
        names.append(names.pop(names.index("tail")))
    assert moments_of(network, step) == in_order(names)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["revnet46", "df_revnet89", "resnet34"])
def test_who_watches_an_encoder_changes_no_gradient(name, mode):
    torch.manual_seed(0)
    module = encoder(name)
    give(module, mode)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    x = feats(dtype=torch.float32)
    alone = gradients(module, x)
    module.load_state_dict(state)
    with observed(lambda block, moment: None):
        watched = gradients(module, x)
    for key, value in alone.items():
        assert torch.equal(watched[key], value), key


@pytest.mark.parametrize("mode", MODES)
def test_who_watches_other_networks_changes_no_gradient(mode):
    torch.manual_seed(0)
    module, x = Chained(), torch.randn(32, 16)
    network = as_network(module, ["head", "tail"])
    give(network, mode)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    alone = gradients(module, x)
    module.load_state_dict(state)
    with observed(lambda block, moment: None), network.watched():
        watched = gradients(module, x)
    for key, value in alone.items():
        assert torch.equal(watched[key], value), key


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["revnet46", "df_revnet89", "resnet34", *OTHERS])
def test_who_watches_adds_nothing_to_the_peak(name, mode):
    if name in OTHERS:
        network, step = other_on_meta(name)
    else:
        network, step = cached_on_meta(name)
    give(network, mode)
    step()
    seen = trace_bytes(network, step).peak_bytes
    compare_next(network)
    assert seen == peak_of(step)


def test_no_observer_is_left_behind():
    from speechbrain_rev.reversible import hooks

    network, step = other_on_meta("chain and layers")

    def fails():
        step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace_bytes(network, fails)
    assert not hooks._observers
    hooks = [
        m
        for b in network.named_blocks().values()
        for m in (b._forward_hooks, b._forward_pre_hooks)
    ]
    assert not any(hooks)


def test_what_is_alive_between_blocks_is_part_of_some_block():
    """The peak of the whole step is that of a block, or of what follows the last one."""
    for name, seed in itertools.product(("chain and layers", "plain"), range(6)):
        network, step = other_on_meta(name)
        network.set_mode(random_modes(network, seed))
        trace = trace_bytes(network, step)
        peaks = [trace.between_peak_bytes]
        for block in trace.blocks.values():
            peaks += [block.forward_peak_bytes, block.backward_peak_bytes]
            assert max(peaks) >= block.after_bytes
        assert trace.peak_bytes == max(peaks)


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
    assert trace.blocks["second"].forward_peak_bytes >= MIB
    assert trace.blocks["first"].forward_peak_bytes < MIB // 100
    assert trace.peak_bytes >= MIB


def test_bytes_of_a_block_are_those_that_autograd_saves():
    batch, width = 100, 64
    module, step = on_meta(
        nn.Sequential(nn.Linear(width, width), nn.Tanh()), torch.randn(batch, width)
    )
    trace = trace_bytes(as_network(module, ["?"]), step)
    size = 4 * batch * width
    linear, tanh = trace.blocks["0"], trace.blocks["1"]
    assert linear.before_bytes == 0
    # The input was there before; the output lives for tanh, whose own is kept.
    assert linear.after_bytes == tanh.before_bytes == size
    assert tanh.after_bytes == 2 * size


@pytest.mark.parametrize("before", ["store", "recompute"])
@pytest.mark.parametrize("streams", ["exact", "float"])
def test_a_run_that_begins_within_a_chain_keeps_no_values_of_the_blocks_before(
    streams, before
):
    module, step = on_meta(Chained(depth=5, streams=streams), torch.randn(64, 16))
    network = as_network(module)
    modes = dict.fromkeys(network.named_blocks(), "reconstruct")
    network.set_mode(modes | {"body.blocks.0": before})
    _, *run = trace_bytes(network, step).blocks.values()
    *inner, last = [block.after_bytes for block in run]
    # Less than the size of a stream, 6,144 bytes.
    assert all(abs(held - last) <= SCALARS for held in inner)


@pytest.mark.parametrize("mode", ["store", "recompute", "reconstruct"])
def test_twice_the_batch_is_twice_the_work(mode):
    found = []
    for batch in (2, 4):
        network, step = cached_on_meta("revnet46", batch=batch)
        give(network, mode)
        found.append(trace_work(network, step))
    for name in found[0]:
        assert found[1][name].flops == 2 * found[0][name].flops
        assert found[0][name].moved_bytes < found[1][name].moved_bytes
        assert found[1][name].moved_bytes <= 2 * found[0][name].moved_bytes


def test_flops_are_those_of_the_formula():
    batch, width, hidden = 10, 64, 128
    module = nn.Sequential(nn.Linear(width, hidden), nn.Linear(hidden, width))
    module, step = on_meta(module, torch.randn(batch, width))
    work = trace_work(as_network(module, ["?"]), step)
    product = 2 * batch * width * hidden
    # Forward, gradient of the weights, and of the input where it needs one.
    assert work["0"].flops == 2 * product
    assert work["1"].flops == 3 * product
    assert work[""].flops == 0


@pytest.mark.parametrize(("mode", "more"), [("recompute", 1), ("reconstruct", 1)])
def test_other_modes_run_each_residual_function_once_more(mode, more):
    network, step = other_on_meta("chain and layers")
    works = []
    for chosen in ("store", mode):
        give(network, chosen)
        works.append(trace_work(network, step))
    for name in network.named_blocks():
        if name in ("head", "tail"):
            continue
        stored = works[0][name].flops
        assert works[1][name].flops == stored + more * stored / 3
        assert works[1][name].moved_bytes > works[0][name].moved_bytes


class Slow(nn.Module):
    """Waits in its forward pass."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


def test_time_is_found_where_it_is_spent():
    module = nn.Sequential(Slow(0), Slow(0.05), Slow(0), nn.Tanh())
    x = torch.randn(4, 8)

    def step():
        y = module(x)
        time.sleep(0.02)
        y.sum().backward()

    network = as_network(module, ["0", "1", "2"])
    seconds = trace_seconds(network, step, torch.device("cpu"))
    assert set(seconds) == {"", "0", "1", "2"}
    assert seconds["1"] >= 0.05
    assert seconds[""] >= 0.02
    network.set_mode({"1": "recompute"})
    assert trace_seconds(network, step, torch.device("cpu"))["1"] >= 0.1


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(self.b(self.a(x)))


class Parallel(Twice):
    def forward(self, x):
        return self.a(x) * self.b(x).detach() + self.b(x.detach()).sum()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Twice(), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(x)


class Unused(Twice):
    def forward(self, x):
        y = self.a(x)
        self.b(y)
        return y


@pytest.mark.parametrize(
    ("module", "blocks", "what"),
    [
        (Twice(), ["a", "b"], "a ran more than once"),
        (Parallel(), ["a", "b"], "b ran more than once"),
        (Nested(), ["a", "b"], "a did not run"),
        (Unused(), ["a", "b"], "b had no backward pass"),
    ],
)
def test_blocks_that_do_not_run_one_after_the_other_are_refused(module, blocks, what):
    module, step = on_meta(module, torch.randn(2, 4))
    with pytest.raises(ValueError, match=what):
        trace_bytes(as_network(module, blocks), step)


def test_a_step_without_a_backward_pass_is_refused():
    module = plain(2).to("meta")
    x = torch.randn(4, 64, device="meta")
    with pytest.raises(ValueError, match="0, 1 had no backward pass"):
        trace_bytes(as_network(module, ["?"]), lambda: module(x))


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("first", [False, True])
def test_each_gradient_of_a_convolution_takes_what_its_forward_pass_does(groups, first):
    block = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False, device="meta")
    x = torch.randn(4, 8, 10, 6, device="meta", requires_grad=not first)
    network = as_network(nn.Sequential(block), ["0"])
    work = trace_work(network, lambda: block(x).sum().backward())
    forward = 2 * 4 * 8 * 10 * 6 * (8 // groups) * 9
    assert work["0"].flops == (2 if first else 3) * forward


@pytest.mark.parametrize("mode", ["store", "reconstruct"])
def test_every_trace_is_of_a_step_in_which_chains_compare_their_streams(mode):
    module, step = on_meta(Chained(depth=5), torch.randn(64, 16))
    network = as_network(module)
    give(network, mode)
    first = trace_bytes(network, step).peak_bytes
    later = peak_of(step)
    assert trace_bytes(network, step).peak_bytes == first > later


class FromTheMachine(nn.Module):
    """Copies what it adds from another device."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(50, 50)

    def forward(self, x):
        made = torch.ones(200, 50, device="cpu")
        return self.linear(x) + made.to(x.device)


SIZE = 4 * 200 * 50


def machine_on_meta():
    module = nn.Sequential(nn.Linear(50, 50), FromTheMachine(), nn.Tanh())
    module, step = on_meta(module, torch.randn(200, 50))
    return as_network(module, ["?"]), step


def test_tensors_of_the_network_s_device_alone_are_counted():
    network, step = machine_on_meta()
    cpu, meta, every = (
        live_bytes_peak(step, device=device and torch.device(device))
        for device in ("cpu", "meta", None)
    )
    trace = trace_bytes(network, step)
    assert trace.blocks["2"].after_bytes >= 2 * SIZE
    assert trace.peak_bytes == meta
    assert cpu == SIZE
    assert meta <= every <= meta + SIZE


def test_what_is_kept_on_the_host_can_be_traced_without_contents():
    module, step = on_meta(
        nn.Sequential(nn.Linear(50, 50), nn.Tanh()), torch.randn(200, 50)
    )
    network = as_network(module, ["?"])
    kept = trace_bytes(network, step)
    with torch.autograd.graph.save_on_cpu():
        moved = trace_bytes(network, step)
    assert moved.backward_bytes < kept.backward_bytes
    with torch.autograd.graph.save_on_cpu():
        work = trace_work(network, step)
    # Each is copied to the host and back.
    assert work["1"].host_bytes == 2 * SIZE


def test_copies_from_one_device_to_another_are_counted_as_such():
    network, step = machine_on_meta()
    work = trace_work(network, step)
    assert {name: each.host_bytes for name, each in work.items()} == {
        "": 0, "0": 0, "1": SIZE, "2": 0,
    }  # fmt: skip
    slow = replace(ASSUMED, host_bytes_per_second=SIZE / 8)
    fast = replace(ASSUMED, host_bytes_per_second=math.inf)
    assert slow.seconds(work["1"]) - fast.seconds(work["1"]) == pytest.approx(8)
    assert slow.seconds(work["0"]) == fast.seconds(work["0"])


def test_work_is_that_of_a_step_that_compares_no_streams_and_bytes_are_not():
    traces = {}
    for verify in ("warn", None):
        network, step = encoder_on_meta("revnet57", verify=verify)
        give(network, "reconstruct")
        traces[verify] = trace_bytes(network, step, with_work=True)
    assert traces["warn"].work == traces[None].work
    assert traces["warn"].peak_bytes > traces[None].peak_bytes
    plain_bytes = trace_bytes(*encoder_on_meta("revnet57"))
    assert plain_bytes.work == {}
