"""Exact streams: every memory mode gives the same bits, at any depth and precision."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.reversible import AdditiveCoupling, Mode, ReversibleChain
from speechbrain_rev.reversible.monitor import StreamError, StreamWarning, checksum
from speechbrain_rev.reversible.streams import FORMATS
from tests.unit.reversible.chains import (
    BF16,
    CHANNELS,
    FLOAT32,
    FP16,
    RESIDUALS,
    as_global,
    chain_of,
    in_backward,
    make_chain,
    step,
    streams,
)

AGAIN = ["reconstruct", "recompute"]
STEP, LIMIT = 1 / FORMATS["exact"].steps, FORMATS["exact"].limit
PRECISIONS = [FLOAT32, BF16, FP16]


@pytest.fixture(autouse=True, params=["exact"])
def stream_format():
    """These are of the exact format alone."""


def bits(module, precision=FLOAT32, *, mask=None, batch=2, time=12):
    """Outputs, gradients of parameters and inputs, and buffers of one step."""
    inputs = streams(torch.float32, batch=batch, time=time)
    outputs, grads, buffers = step(module, inputs, precision, mask=mask)
    return dict(enumerate(outputs)) | grads | buffers


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        assert value is None or torch.equal(found[name], value), name


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("mode", AGAIN)
@pytest.mark.parametrize("kind", RESIDUALS)
@pytest.mark.parametrize("depth", [16])
def test_every_mode_has_the_bits_of_storing(kind, mode, precision, depth):
    chain = chain_of(kind, depth, mode="store", dtype=torch.float32)
    expected = bits(copy.deepcopy(chain), precision)
    chain.set_mode(mode)
    assert_same_bits(bits(chain, precision), expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("depth", [188])
@pytest.mark.parametrize("kind", ["basic", "bottleneck", "df_bottleneck"])
def test_depth_changes_no_bit(kind, precision, depth):
    test_every_mode_has_the_bits_of_storing(kind, "reconstruct", precision, depth)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("mode", [*AGAIN, ["store", "reconstruct", "reconstruct"]])
def test_shared_weights_change_no_bit(mode, precision):
    torch.manual_seed(0)
    f, g = (RESIDUALS["basic"](CHANNELS) for _ in range(2))
    f.conv2.weight = f.conv1.weight
    twice = nn.Sequential(g, nn.Tanh(), g)
    blocks = [AdditiveCoupling(f, twice), AdditiveCoupling(g, f)]
    chain = make_chain([*blocks, blocks[0]], mode="store")
    expected = bits(copy.deepcopy(chain), precision)
    chain.set_mode(mode)
    assert_same_bits(bits(chain, precision), expected)
    # Aliases of shared weights are gone.
    assert all(isinstance(p, nn.Parameter) for p in chain.parameters())


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("mode", AGAIN)
def test_a_layer_that_is_used_twice_changes_no_bit(mode, precision):
    def make():
        layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        return nn.Sequential(layer, nn.Tanh(), layer)

    torch.manual_seed(0)
    chain = make_chain([AdditiveCoupling(make(), make())], mode="store")
    expected = bits(copy.deepcopy(chain), precision)
    chain.set_mode(mode)
    assert_same_bits(bits(chain, precision), expected)


@pytest.mark.parametrize("mode", AGAIN)
def test_masked_frames_change_no_bit(mode):
    mask = (torch.arange(12) < 7).float().view(1, 1, 1, 12)
    chain = chain_of("basic", 8, mode="store", dtype=torch.float32)
    expected = bits(copy.deepcopy(chain), mask=mask)
    chain.set_mode(mode)
    assert_same_bits(bits(chain, mask=mask), expected)


def test_what_is_reconstructed_is_the_input_to_the_bit():
    chain = chain_of("basic", 64, dtype=torch.float32)
    seen = {"forward": [], "backward": []}
    variables = as_global(note=lambda phase, x: seen[phase].append(x))

    class Watched(nn.Module):
        def __init__(self, f):
            super().__init__()
            self.f = f

        def forward(self, x):
            phase = "backward" if in_backward() else "forward"
            variables.note(phase, x.detach().clone())
            return self.f(x)

    for block in chain.blocks:
        block.f, block.g = Watched(block.f), Watched(block.g)
    bits(chain)
    for x, again in zip(seen["forward"], reversed(seen["backward"]), strict=True):
        assert torch.equal(x, again)


@pytest.mark.parametrize("scale", [STEP / 2, 1e-3, 1.0, LIMIT / 4])
def test_adding_and_subtracting_loses_nothing(scale):
    exact = FORMATS["exact"]
    torch.manual_seed(0)
    value = exact.encode(torch.randn(3, 4, 5), None)
    f = scale * torch.randn(3, 4, 5)
    start = value.clone()
    assert torch.equal(exact.subtract(exact.add(value, f, None), f), start)
    assert torch.equal(exact.subtract_(exact.add_(value, f, None), f), start)


def test_values_are_the_nearest_steps():
    x = torch.tensor([0.0, STEP, 0.4 * STEP, 0.6 * STEP, -3.7, LIMIT - 1])
    exact = FORMATS["exact"]
    decoded = exact.decode(exact.encode(x, None), torch.float64)
    assert (decoded - x.double()).abs().max() <= STEP / 2
    assert torch.equal(decoded / STEP, (decoded / STEP).round())
    assert decoded[[0, 1, 2, 3, 5]].tolist() == [0.0, STEP, 0.0, STEP, LIMIT - 1]


class TestRange:
    def out_of_range(self, mode, place):
        """A chain of two blocks that leaves its range in the second."""
        chain = chain_of("basic", 2, mode=mode, dtype=torch.float32)
        with torch.no_grad():
            getattr(chain.blocks[1], place).conv2.weight.fill_(1e5)
        return chain

    @pytest.mark.parametrize("mode", Mode)
    @pytest.mark.parametrize("place", ["f", "g"])
    def test_outputs_and_gradients_are_nan_and_the_message_names_the_place(
        self, mode, place
    ):
        chain = self.out_of_range(mode, place)
        chain.monitor.name = "stage 3"
        inputs = streams(torch.float32)
        y1, y2 = chain(*inputs)
        assert y1.isnan().all()
        assert y2.isnan().all()
        # Not a loss that passes a NaN on: its gradient is finite.
        torch.autograd.backward([y1, y2], [torch.ones_like(y1)] * 2)
        assert all(x.grad.isnan().any() for x in inputs)
        assert all(p.grad.isnan().any() for p in chain.parameters())
        with pytest.warns(
            StreamWarning,
            match=rf"stage 3 .* 16384 at {place.upper()} of block 1.*rate",
        ):
            chain(*streams(torch.float32))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e9, -LIMIT])
    @pytest.mark.parametrize("mode", Mode)
    def test_what_enters_is_looked_at_too(self, mode, bad):
        chain = chain_of("basic", 1, mode=mode, dtype=torch.float32)
        x1, x2 = streams(torch.float32, requires_grad=False)
        x1[0, 0, 0, 0] = bad
        assert chain(x1, x2)[1].isnan().all()
        with pytest.warns(StreamWarning, match="at its input"):
            chain.monitor.report(LIMIT, wait=True)

    @pytest.mark.filterwarnings("ignore:The streams:UserWarning")
    @pytest.mark.parametrize("kind", ["basic", "torch"])
    @pytest.mark.parametrize("mode", Mode)
    def test_running_statistics_stay_as_they_were(self, mode, kind):
        chain = chain_of(kind, 2, mode=mode, dtype=torch.float32)
        step(chain, streams(torch.float32), FLOAT32)
        before = {n: b.clone() for n, b in chain.named_buffers()}
        x1, x2 = streams(torch.float32, requires_grad=False)
        for bad in (float("nan"), 1e6):
            x2[0, 0, 0, 0] = bad
            loss = sum(y.sum() for y in chain(x1.clone().requires_grad_(), x2))
            loss.backward()
        for name, buffer in chain.named_buffers():
            if buffer.is_floating_point():
                assert torch.equal(buffer, before[name]), name

    def test_a_sum_that_wraps_around_is_seen(self):
        # Once and twice this are below and beyond the limit; four wrap around an int32.
        chain = ReversibleChain(
            [AdditiveCoupling(nn.Identity(), nn.Identity())] * 3, streams="exact"
        )
        x = torch.full((1, 1), 0.99 * LIMIT)
        assert chain(x, x)[0].isnan().all()

    def test_the_largest_magnitude_is_reported(self):
        chain = ReversibleChain(
            [AdditiveCoupling(nn.Identity(), nn.Identity())], streams="exact"
        )
        chain(torch.tensor([3.0]), torch.tensor([-7.0]))
        chain.monitor.report(LIMIT, wait=True)
        # y1 = 3 - 7, y2 = -7 - 4.
        assert chain.monitor.pop_largest() == 11.0
        assert chain.monitor.pop_largest() == 0.0

    def test_the_loss_scaler_skips_the_step(self):
        chain = self.out_of_range("reconstruct", "g")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
        before = [p.detach().clone() for p in chain.parameters()]
        loss = sum(y.sum() for y in chain(*streams(torch.float32)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        for p, old in zip(chain.parameters(), before, strict=True):
            assert torch.equal(p, old)


class Disturbed(nn.Module):
    """A residual function whose second run differs from the first."""

    def __init__(self, change):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.change = change

    def forward(self, x):
        y = self.weight * x.sin()
        return self.change(y) if in_backward() else y


def one_step_up(y):
    return y + nn.functional.one_hot(torch.tensor(5), y.numel()).view_as(y) * STEP


def opposite_errors(y):
    error = torch.zeros_like(y).flatten()
    error[3], error[40] = STEP, -STEP
    return y + error.view_as(y)


def second_difference(y):
    error = torch.zeros_like(y).flatten()
    error[[4, 6, 8]] = STEP * torch.tensor([1.0, -2.0, 1.0])
    return y + error.view_as(y)


def two_places_swapped(y):
    order = torch.arange(y.numel())
    order[[0, 1]] = order[[1, 0]]
    return y.flatten()[order].view_as(y)


def another_layout(y):
    # As if a kernel had written in another order than the next one reads.
    return y.transpose(2, 3).contiguous().view_as(y)


CHANGES = [
    one_step_up,
    opposite_errors,
    second_difference,
    two_places_swapped,
    another_layout,
]


@pytest.mark.parametrize("change", CHANGES)
class TestVerification:
    def trained(self, change, **settings):
        blocks = [AdditiveCoupling(Disturbed(change), nn.Identity()) for _ in range(2)]
        chain = ReversibleChain(blocks, streams="exact", **settings)
        step(chain, streams(torch.float32), FLOAT32)
        return chain

    def test_a_second_run_that_differs_is_reported_once(self, change, recwarn):
        chain = self.trained(change)
        with pytest.warns(StreamWarning, match="does not compute the same twice"):
            chain(*streams(torch.float32))
        recwarn.clear()
        for _ in range(3):
            step(chain, streams(torch.float32), FLOAT32)
        assert not recwarn

    def test_it_raises_where_asked(self, change):
        chain = self.trained(change, verify="raise")
        with pytest.raises(StreamError, match="recompute"):
            chain(*streams(torch.float32))

    def test_it_looks_every_so_many_steps(self, change):
        chain = self.trained(lambda y: y, verify="raise", verify_every=3)
        for block in chain.blocks:
            block.f.change = change
        for _ in range(2):
            step(chain, streams(torch.float32), FLOAT32)
        step(chain, streams(torch.float32), FLOAT32)  # the third after the first
        with pytest.raises(StreamError):
            chain.monitor.report(LIMIT, wait=True)

    def test_it_can_be_left_out(self, change, recwarn):
        assert self.trained(change, verify=None).largest_stream() > 0
        assert not recwarn


@pytest.mark.parametrize("size", [1, 7, 2**17, 2**20 + 3])
def test_a_checksum_is_the_weighted_sum_modulo_2_to_the_64(size):
    torch.manual_seed(0)
    value = torch.randint(-(2**31), 2**31, (size,)).int()
    expected = sum(weight(i) * v for i, v in enumerate(value.tolist()))
    assert int(checksum([value])[0]) % 2**64 == expected % 2**64


def weight(place):
    """Of a place in memory, in integers without a limit."""
    spread = -0x61C8864680B583EB
    mixed = (place * spread + 2**63) % 2**64 - 2**63
    mixed ^= mixed >> 32
    return (mixed * spread) % 2**64 | 1


def test_weights_of_a_checksum_are_all_different_and_have_no_pattern():
    weights = [weight(i) for i in range(4096)]
    assert len(set(weights)) == len(weights)
    steps = {(b - a) % 2**64 for a, b in zip(weights, weights[2:], strict=False)}
    assert len(steps) == len(weights) - 2


@pytest.mark.parametrize(
    ("places", "errors"),
    [
        ([3, 40], [1, -1]),
        ([4, 6, 8], [1, -2, 1]),
        ([4, 5, 8, 9], [1, -1, -1, 1]),
        ([1, 3, 5, 7], [1, -3, 3, -1]),
    ],
)
def test_errors_that_cancel_in_simpler_sums_change_a_checksum(places, errors):
    value = torch.randint(-(2**20), 2**20, (64,), dtype=torch.int32)
    wrong = value.clone()
    wrong[places] += torch.tensor(errors, dtype=torch.int32)
    assert checksum([wrong]) != checksum([value])


def test_a_checksum_follows_memory_so_that_layouts_do_not_matter():
    value = torch.randint(-9, 9, (2, 3, 4, 5)).int()
    last = value.to(memory_format=torch.channels_last)
    in_memory = last.permute(0, 2, 3, 1).contiguous()
    assert torch.equal(checksum([last]), checksum([in_memory]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"verify": "shout"}, "'warn', 'raise', or None"),
        ({"verify_every": 0}, "verify_every is 0.* at least 1"),
        ({"verify_every": float("nan")}, "verify_every is nan"),
        ({"verify_every": 1.5}, "verify_every is 1.5"),
        ({"streams": "half"}, "'float', 'exact'"),
    ],
)
def test_other_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        chain_of("basic", 1, **settings)


def test_a_chain_that_has_grown_goes_on():
    chain = chain_of("basic", 1, dtype=torch.float32)
    step(chain, streams(torch.float32), FLOAT32)
    chain.blocks.append(chain_of("basic", 1, dtype=torch.float32).blocks[0])
    chain.set_mode("reconstruct")
    step(chain, streams(torch.float32), FLOAT32)
    assert chain.largest_stream() > 0


def test_float_streams_are_not_measured():
    with pytest.raises(ValueError, match="streams='exact'"):
        chain_of("basic", 1, streams="float").largest_stream()


def test_copies_start_without_notes():
    chain = chain_of("basic", 1, dtype=torch.float32)
    step(chain, streams(torch.float32), FLOAT32)
    twin = copy.deepcopy(chain)
    assert twin.monitor.verify == "raise"
    assert twin.monitor._largest is None
    assert twin.blocks[0].f.conv1.weight.shape[0] == CHANNELS
