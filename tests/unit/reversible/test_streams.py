"""Number formats of the streams: layouts, precision, and what computes on a device."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    ReversibleChain,
    fixed_point,
    streams,
)
from speechbrain_rev.reversible.convolution import Reading, convolve_stream
from speechbrain_rev.reversible.streams import FORMATS

from .chains import in_backward, module_with

EXACT = FORMATS["exact"]
STEP, LIMIT = 1 / EXACT.steps, EXACT.limit
INF, NAN = float("inf"), float("nan")
CHANNELS_LAST = torch.channels_last
LAYOUTS = [torch.contiguous_format, CHANNELS_LAST]
NAMES = {form: name for name, form in FORMATS.items()}
each_format = pytest.mark.parametrize("stream_format", FORMATS.values(), ids=FORMATS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_format
@each_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_half_of_the_channels_becomes_a_dense_value(stream_format, dtype, layout):
    both = torch.randn(2, 6, 5, 7).to(dtype).contiguous(memory_format=layout)
    for half in both.chunk(2, dim=1):
        value = stream_format.encode(half, None)
        assert value.is_contiguous(memory_format=layout)
        floats = stream_format.decode(value, torch.promote_types(dtype, torch.float32))
        assert floats.stride() == value.stride()
        assert (floats - half).abs().max() <= STEP / 2


@each_format
@each_layout
@pytest.mark.parametrize("other", LAYOUTS)
def test_sums_have_the_layout_of_the_value(stream_format, layout, other):
    x, f = torch.randn(2, 2, 3, 5, 7)
    value = stream_format.encode(x.contiguous(memory_format=layout), None)
    f = f.contiguous(memory_format=other)
    total = stream_format.add(value, [f], None)
    assert total.stride() == value.stride()
    assert stream_format.subtract(total, f).stride() == value.stride()


@each_format
@each_layout
@pytest.mark.parametrize("validity", [None, torch.zeros(()), torch.tensor(NAN)])
@pytest.mark.parametrize("ends", [streams.leave, streams.read_both, streams.join])
def test_gradients_have_the_layout_of_the_stream(stream_format, layout, validity, ends):
    x = [x.contiguous(memory_format=layout) for x in torch.randn(2, 2, 3, 5, 7)]
    entered = streams.enter(*(x.requires_grad_() for x in x), stream_format)
    y = ends(entered._replace(validity=validity))
    y = y if isinstance(y, torch.Tensor) else torch.cat(y, dim=1)
    other = LAYOUTS[layout is torch.contiguous_format]
    given = torch.randn(y.shape).contiguous(memory_format=other)
    grads = torch.autograd.grad(y, x, given)
    for grad, expected in zip(grads, given.chunk(2, dim=1), strict=True):
        assert grad.is_contiguous(memory_format=layout)
        if validity is not None:
            expected = expected + validity
        torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)


@each_format
@each_layout
def test_a_residual_function_sees_one_layout_in_both_runs(stream_format, layout):
    seen = {False: [], True: []}

    @module_with(weight=lambda: nn.Parameter(torch.ones(())))
    def reordered(self, x):
        """Note the layout and return the other one."""
        seen[in_backward()].append(x.stride())
        last = x.is_contiguous(memory_format=CHANNELS_LAST)
        return (self.weight * x.sin()).contiguous(memory_format=LAYOUTS[not last])

    blocks = [AdditiveCoupling(reordered(), reordered()) for _ in range(2)]
    chain = ReversibleChain(blocks, streams=NAMES[stream_format], verify="raise")
    x1, x2 = (x.contiguous(memory_format=layout) for x in torch.randn(2, 2, 3, 5, 7))
    torch.add(*chain(x1, x2.requires_grad_())).sum().backward()
    chain.check_streams()
    assert len(seen[False]) == 4
    assert set(seen[False] + seen[True]) == {x1.stride()}


@pytest.mark.parametrize("scale", [STEP / 2, 1e-3, 1.0, LIMIT / 4, LIMIT, INF, NAN])
def test_adding_and_subtracting_loses_nothing_and_writes_to_nothing_given(scale):
    torch.manual_seed(0)
    x, f = torch.randn(3, 4, 5), scale * torch.randn(3, 4, 5)
    value = EXACT.encode(x, None)
    given = [x.clone(), f.nan_to_num(7), value.clone()]
    total = EXACT.add(value, [f], None)
    assert torch.equal(EXACT.subtract(total, f), value)
    for own in (EXACT.decode(value, torch.float32), total, EXACT.encode(x, None)):
        own.zero_()
    assert all(map(torch.equal, (x, f.nan_to_num(7), value), given))
    assert EXACT.add(value, [f], None, out=value) is value
    assert torch.equal(EXACT.subtract(value, f, out=value), given[2])


def test_values_are_the_nearest_steps():
    x = torch.tensor([0.0, STEP, 0.4 * STEP, 0.6 * STEP, -3.7, LIMIT - 1])
    decoded = EXACT.decode(EXACT.encode(x, None), torch.float64)
    assert (decoded - x.double()).abs().max() <= STEP / 2
    assert torch.equal(decoded / STEP, (decoded / STEP).round())
    assert decoded[[0, 1, 2, 3, 5]].tolist() == [0.0, STEP, 0.0, STEP, LIMIT - 1]


def test_float64_is_rounded_as_float64():
    # The nearest float32 is three steps off, or half a step.
    high, low = LIMIT - 124, 128
    x = torch.tensor([high + 3 * STEP, low + 0.6 * STEP], dtype=torch.float64)
    assert (x.float() - x).abs().min() > 0.3 * STEP
    value = EXACT.encode(x, None)
    assert value.tolist() == [high / STEP + 3, low / STEP + 1]
    assert EXACT.add(value - value, [x], None).tolist() == value.tolist()
    assert EXACT.decode(value, torch.float64).tolist() == [high + 3 * STEP, low + STEP]


def test_of_nothing_nothing_is_noted_and_a_nan_stays_noted():
    for shape in ((0,), (2, 0, 3, 4)):
        largest = torch.tensor([1.0, 2.0])
        value = EXACT.encode(torch.randn(shape), largest)
        EXACT.add(value, [torch.randn(shape)], largest, out=value)
        assert largest.tolist() == [1.0, 2.0]
    for x in (float("nan"), 1.0, float("inf")):
        EXACT.encode(torch.tensor([x]), largest)
    assert largest[0].isnan()


def on_cuda(dtype, like):
    """What is asked of a tensor on a device that need not be here."""
    x = {
        name: getattr(like, name)
        for name in ("dim", "stride", "is_contiguous", "shape")
    }
    return SimpleNamespace(
        **x, is_cuda=True, dtype=dtype, device=torch.device("cuda", 0)
    )


DENSE = torch.zeros(2, 3, 4, 5)
GAPS = torch.zeros(2, 6, 4, 5)[:, :3]


@pytest.mark.parametrize(
    ("dtype", "like", "usable", "computes"),
    [
        (torch.float32, DENSE, True, kernels),
        (torch.bfloat16, DENSE.contiguous(memory_format=CHANNELS_LAST), True, kernels),
        (torch.float16, DENSE, True, kernels),
        (torch.float64, DENSE, True, fixed_point),
        (torch.float32, GAPS, True, fixed_point),
        (torch.float32, DENSE, False, fixed_point),
    ],
)
def test_on_cuda_kernels_compute_what_they_can(
    dtype, like, usable, computes, monkeypatch
):
    monkeypatch.setattr(kernels, "usable", lambda *_: usable)
    value = on_cuda(torch.int32, like)
    assert streams._arithmetic(on_cuda(dtype, DENSE), value) is computes


def test_elsewhere_and_without_values_the_reference_computes():
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(3, device="cuda")
    assert fake.is_cuda
    for x in (torch.zeros(1), fake):
        assert streams._arithmetic(x) is fixed_point


@pytest.mark.parametrize("value", [0.0, NAN])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("bare", [False, True])
def test_what_reads_streams_in_parts_hands_on_whether_they_left_their_range(
    value, parts, bare
):
    conv = nn.Conv2d(4, 3, 3, padding=1, bias=False)
    results = []
    for validity in (None, torch.tensor(value)):
        x = [x.requires_grad_() for x in torch.ones(2, 3, 2, 5, 7)]
        entered = streams.enter(*x, EXACT)._replace(validity=validity)
        reading = Reading.of(entered, [conv], parts)
        y = reading.convolved(conv, 0)
        given = torch.ones_like(y)
        # As where second derivatives are wanted, and as usual.
        grads = torch.autograd.grad(y, x, given, create_graph=bare)
        results.append([y.detach(), *(grad.detach() for grad in grads)])
    for plain, marked in zip(*results, strict=True):
        expected = plain if value == 0 else torch.full_like(plain, NAN)
        torch.testing.assert_close(marked, expected, rtol=0, atol=0, equal_nan=True)


def through_a_convolution(x, conv, *, plain):
    """Convolve the first of two float streams, and give what leaves them beside it."""
    if plain:
        return conv(x[0]), *x
    entered = streams.enter(*x, FORMATS["float"])
    first = entered.first
    floats = entered.format.decode(first.value, first.tangent.dtype)
    read = streams.read(first, floats, alone=True)
    y, tangent = convolve_stream(conv, read, first.tangent)
    return y, *streams.leave(entered._replace(first=first._replace(tangent=tangent)))


@each_layout
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("kernel", "size", "stride"),
    [(1, (16, 10), 1), (1, (2, 3), 1), (3, (16, 10), 1)],
    ids=["product", "small map", "no product"],
)
def test_gradients_of_a_convolution_are_added_to_those_of_the_stream(
    kernel, size, stride, twice, layout
):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, kernel, stride, padding=kernel // 2, bias=False).double()
    given = torch.randn(2, 3, 4, *size, dtype=torch.float64)
    results = []
    for plain in (True, False):
        x = [x.contiguous(memory_format=layout).requires_grad_() for x in given]
        y, *left = through_a_convolution(x, conv, plain=plain)
        loss = y.pow(3).sum() + sum(half.pow(3).sum() for half in left)
        leaves = [*x, conv.weight]
        grads = torch.autograd.grad(loss, leaves, create_graph=twice)
        if twice:
            loss = sum(grad.pow(2).sum() for grad in grads)
            grads = torch.autograd.grad(loss, leaves)
        results.append(grads)
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("used", ["both", "stream", "convolution"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_stream_is_added_to_where_it_is(used, dtype):
    torch.manual_seed(0)
    conv, x = nn.Conv2d(4, 6, 1, bias=False), torch.randn(3, 4, 16, 10)
    tangent = streams.tangent_of(x, x.dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        y, after = convolve_stream(conv, x, tangent)
    total, of_y = torch.randn(x.shape), torch.randn(y.shape).to(dtype)
    weight = conv.weight.detach().to(dtype)
    parts = {"stream": total.clone(), "convolution": F.conv_transpose2d(of_y, weight)}
    outputs = {"stream": (after, total), "convolution": (y, of_y)}
    kept = list(parts) if used == "both" else [used]
    roots, given = zip(*(outputs[name] for name in kept), strict=True)
    (grad,) = torch.autograd.grad(roots, [tangent], given)
    assert grad.dtype is torch.float32
    torch.testing.assert_close(grad, sum(parts[name].float() for name in kept))
    assert used == "convolution" or grad.data_ptr() == total.data_ptr()


def test_a_stream_without_gradient_has_none_behind_a_convolution():
    conv, x = nn.Conv2d(4, 6, 1, bias=False), torch.randn(3, 4, 16, 10)
    y, after = convolve_stream(conv, x, streams.tangent_of(x, x.dtype))
    assert y.requires_grad
    assert not after.requires_grad
    y.sum().backward()
    assert conv.weight.grad is not None
