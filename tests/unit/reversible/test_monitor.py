"""Notes about exact streams: range, largest magnitude, and checksums of reconstruction."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Mode,
    ReversibleChain,
)
from speechbrain_rev.reversible.monitor import (
    Checks,
    StreamError,
    StreamWarning,
    checksum,
    kernels_may_differ,
)
from speechbrain_rev.reversible.streams import FORMATS

from .chains import (
    FLOAT32,
    FP16,
    Counting,
    as_global,
    chain_of,
    in_backward,
    module_with,
    step,
    streams,
)

STEP, LIMIT = 1 / FORMATS["exact"].steps, FORMATS["exact"].limit


every_mode = pytest.mark.parametrize("mode", Mode)


def out_of_range(mode, place):
    """A chain of two blocks that leaves its range in the second."""
    chain = chain_of("basic", 2, mode=mode, dtype=torch.float32)
    with torch.no_grad():
        getattr(chain.blocks[1], place).conv2.weight.fill_(1e5)
    return chain


def statistics(chain):
    return [b.clone() for b in chain.buffers() if b.is_floating_point()]


@every_mode
@pytest.mark.parametrize("place", ["f", "g"])
def test_outputs_and_gradients_are_nan_and_the_message_names_the_place(mode, place):
    chain = out_of_range(mode, place)
    chain.monitor.name = "stage 3"
    inputs = streams(torch.float32)
    outputs = chain(*inputs)
    assert all(y.isnan().all() for y in outputs)
    # Not a loss that passes a NaN on: its gradient is finite.
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert all(x.grad.isnan().any() for x in (*inputs, *chain.parameters()))
    message = rf"stage 3 .* 16384 at {place.upper()} of block 1.*rate"
    with pytest.warns(StreamWarning, match=message):
        chain(*streams(torch.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e9, -LIMIT])
@every_mode
def test_what_enters_has_a_range_and_leaves_running_statistics_as_they_were(mode, bad):
    for kind in ("basic", "torch"):
        chain = chain_of(kind, 2, mode=mode, dtype=torch.float32)
        step(chain, streams(torch.float32), FLOAT32)
        before = statistics(chain)
        x1, x2 = streams(torch.float32, requires_grad=False)
        x2[0, 0, 0, 0] = bad
        outputs = chain(x1.requires_grad_(), x2)
        assert outputs[1].isnan().all()
        sum(y.sum() for y in outputs).backward()
        assert all(map(torch.equal, statistics(chain), before))
        with pytest.warns(StreamWarning, match="at its input"):
            chain.check_streams()


def identities(depth):
    blocks = [AdditiveCoupling(nn.Identity(), nn.Identity()) for _ in range(depth)]
    return ReversibleChain(blocks, streams="exact")


def test_a_sum_that_wraps_around_is_seen():
    # Once and twice this are below and beyond the limit; four wrap around an int32.
    x = torch.full((1, 1), 0.99 * LIMIT)
    assert identities(3)(x, x)[0].isnan().all()


def test_the_largest_magnitude_is_that_since_the_last_call():
    chain = identities(1)
    chain(torch.tensor([3.0]), torch.tensor([-7.0]))
    # y1 = 3 - 7, y2 = -7 - 4.
    assert chain.largest_stream() == 11.0
    assert chain.largest_stream() == 0.0
    with pytest.raises(ValueError, match="streams='exact'"):
        chain_of("basic", 1, streams="float").largest_stream()


def test_the_loss_scaler_skips_the_step():
    chain, scaler = out_of_range("reconstruct", "g"), FP16.scaler()
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    before = [p.detach().clone() for p in chain.parameters()]
    scaler.scale(sum(y.sum() for y in chain(*streams(torch.float32)))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == FP16.scale / 2
    assert all(map(torch.equal, chain.parameters(), before))


@module_with(weight=lambda: nn.Parameter(torch.ones(())))
def disturbed(self, x):
    """Compute something else in the second run."""
    y = self.weight * x.sin()
    return self.globals.change(y) if in_backward() else y


def errors(places, steps):
    """Add steps to some places."""

    def change(y):
        error = torch.zeros_like(y).flatten()
        error[places] = STEP * torch.tensor(steps)
        return y + error.view_as(y)

    return change


def two_places_swapped(y):
    order = torch.arange(y.numel())
    order[[0, 1]] = order[[1, 0]]
    return y.flatten()[order].view_as(y)


def another_layout(y):
    # As if a kernel had written in another order than the next one reads.
    return y.transpose(2, 3).contiguous().view_as(y)


CHANGES = {
    "one_step_up": errors([5], [1.0]),
    "opposite_errors": errors([3, 40], [1.0, -1.0]),
    "second_difference": errors([4, 6, 8], [1.0, -2.0, 1.0]),
    "two_places_swapped": two_places_swapped,
    "another_layout": another_layout,
}


def trained(change, **settings):
    blocks = [AdditiveCoupling(disturbed(), nn.Identity()) for _ in range(2)]
    for block in blocks:
        block.f.globals = as_global(change=change)
    chain = ReversibleChain(blocks, streams="exact", **settings)
    step(chain, streams(torch.float32), FLOAT32)
    return chain


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_second_run_that_differs_raises_where_asked_and_is_reported_once(
    change, recwarn
):
    for verify in ("first", "raise"):
        with pytest.raises(
            StreamError, match=r"In block 1 of the chain: .*verify='warn'"
        ):
            trained(change, verify=verify)
    assert not recwarn
    chain = trained(change, verify="warn")
    for _ in range(3):
        step(chain, streams(torch.float32), FLOAT32)
    message = "does not compute the same twice"
    assert [message in str(w.message) for w in recwarn] == [True]
    assert trained(change, verify=None).largest_stream() > 0
    assert len(recwarn) == 1


def test_streams_are_compared_every_so_many_steps():
    changes = [lambda y: y]
    chain = trained(lambda y: changes[-1](y), verify="raise", verify_every=3)
    changes.append(CHANGES["one_step_up"])
    for _ in range(3):
        chain.check_streams()
        step(chain, streams(torch.float32), FLOAT32)
    with pytest.raises(StreamError):
        chain.check_streams()


def test_later_steps_warn_by_default():
    changes = [lambda y: y]
    chain = trained(lambda y: changes[-1](y), verify_every=2)
    changes.append(CHANGES["one_step_up"])
    for _ in range(2):
        step(chain, streams(torch.float32), FLOAT32)
    with pytest.warns(StreamWarning, match="In the chain: .*verify"):
        chain.check_streams()


def test_the_block_that_differs_in_a_first_step_is_named():
    blocks = [AdditiveCoupling(disturbed(), nn.Identity()) for _ in range(3)]
    for i, block in enumerate(blocks):
        change = CHANGES["one_step_up"] if i == 1 else lambda y: y
        block.f.globals = as_global(change=change)
    chain = ReversibleChain(blocks, streams="exact")
    with pytest.raises(StreamError, match="In block 1 of the chain"):
        step(chain, streams(torch.float32), FLOAT32)
    assert all(p.grad is None for p in chain.parameters())


def operations_of_a_first_step(depth):
    chain, inputs = identities(depth), streams(torch.float32)
    counts = []
    for _ in range(2):
        with Counting() as operations:
            step(chain, inputs, FLOAT32)
        counts.append(operations.counts.total())
    first, later = counts
    return first - later


def test_a_first_step_that_is_counted_compares_no_block():
    assert operations_of_a_first_step(2) == operations_of_a_first_step(4)


@pytest.mark.parametrize("flag", ["benchmark", "deterministic"])
def test_where_kernels_may_differ_the_first_step_warns(flag, monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert not kernels_may_differ(gpu)
    monkeypatch.setattr(torch.backends.cudnn, flag, flag == "benchmark")
    assert kernels_may_differ(gpu)
    assert not kernels_may_differ(cpu)


def weight(place):
    """Of a place in memory, in integers without a limit."""
    spread = -0x61C8864680B583EB
    mixed = (place * spread + 2**63) % 2**64 - 2**63
    mixed ^= mixed >> 32
    return (mixed * spread) % 2**64 | 1


@pytest.mark.parametrize("size", [1, 16, 2**12 + 3])
def test_a_checksum_is_the_weighted_sum_of_rows_and_columns_modulo_2_to_the_64(size):
    torch.manual_seed(0)
    value = torch.randint(-(2**31), 2**31, (size,)).int()
    columns = 2 ** (size.bit_length() // 2)
    whole = size // columns * columns
    rows = [value.tolist()[i : i + columns] for i in range(0, whole, columns)]
    sums = [*map(sum, rows), *map(sum, zip(*rows, strict=True))]
    sums += value.tolist()[whole:]
    expected = sum(weight(i) * v for i, v in enumerate(sums, 1))
    assert int(checksum([value])[0]) % 2**64 == expected % 2**64


@pytest.mark.parametrize(
    "errors", [{3: 1, 40: -1}, {4: 1, 6: -2, 8: 1}, {1: 1, 3: -3, 5: 3, 7: -1}]
)
def test_errors_that_cancel_in_simpler_sums_change_a_checksum(errors):
    value = torch.randint(-(2**20), 2**20, (64,), dtype=torch.int32)
    wrong = value.clone()
    for place, error in errors.items():
        wrong[place] += error
    assert checksum([wrong]) != checksum([value])


def test_a_checksum_follows_memory_so_that_layouts_do_not_matter():
    value = torch.randint(-9, 9, (2, 3, 4, 5)).int()
    last = value.to(memory_format=torch.channels_last)
    in_memory = last.permute(0, 2, 3, 1).contiguous()
    assert torch.equal(checksum([last]), checksum([in_memory]))


def test_copies_start_without_notes_and_a_chain_that_has_grown_goes_on():
    chain = chain_of("basic", 1, dtype=torch.float32)
    step(chain, streams(torch.float32), FLOAT32)
    twin = copy.deepcopy(chain)
    assert twin.largest_stream() == 0
    assert twin.monitor.verify == "raise"
    chain.blocks.append(twin.blocks[0])
    chain.set_mode("reconstruct")
    step(chain, streams(torch.float32), FLOAT32)
    assert chain.largest_stream() > 0


def test_verdicts_are_reported_when_they_have_arrived_and_none_is_lost():
    class Arrival:
        is_there = False

        def query(self):
            return self.is_there

    seen, checks = [], Checks()
    arrivals = Arrival(), Arrival()
    for arrival in arrivals:
        checks.report_later(torch.tensor([len(seen)]), seen.append)
        verdict, _, report = checks._under_way.pop()
        checks._under_way.append((verdict, arrival, report))
    checks.begin()
    assert seen == []
    arrivals[1].is_there = True
    checks.begin()
    assert len(seen) == 1
    arrivals[0].is_there = True
    checks.begin()
    assert len(seen) == 2


class Switched(nn.Module):
    """Draws from a generator of nobody's once ``is_bad``."""

    def __init__(self):
        super().__init__()
        self.linear, self.is_bad = nn.Linear(4, 4), False

    def forward(self, x):
        noise = torch.rand(4, generator=GENERATOR) if self.is_bad else 1.0
        return (self.linear(x) * noise).tanh()


GENERATOR = torch.Generator()


def switched_chain(**options):
    pairs = [(Switched(), Switched()) for _ in range(2)]
    return ReversibleChain([AdditiveCoupling(*pair) for pair in pairs], **options)


def one_pass(chain):
    return sum(y.sum() for y in chain(torch.ones(3, 4), torch.zeros(3, 4)))


@pytest.mark.parametrize("mode", ["reconstruct", "recompute"])
def test_a_first_step_ends_with_a_backward_pass_and_comes_again_with_another_mode(mode):
    chain, words = switched_chain(mode=mode), "of block 1 of |In block 1 of "
    one_pass(chain)  # without a backward pass
    chain.blocks[1].f.is_bad = True
    with pytest.raises(RuntimeError, match=words):
        one_pass(chain).backward()
    chain.blocks[1].f.is_bad = False
    one_pass(chain).backward()
    one_pass(chain).backward()
    chain.set_mode("store")
    chain.set_mode(mode)
    chain.blocks[1].f.is_bad = True
    with pytest.raises(RuntimeError, match=words):
        one_pass(chain).backward()


def test_recomputed_blocks_of_a_chain_are_compared_every_so_often():
    chain = switched_chain(mode="recompute", verify_every=2, verify="raise")
    one_pass(chain).backward()
    chain.blocks[0].g.is_bad = True
    one_pass(chain).backward()
    with pytest.raises(RuntimeError, match=r"G of block 0 of the chain \(Switched\)"):
        one_pass(chain).backward()
