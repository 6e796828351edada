"""Number formats of the streams: layouts, precision, and who computes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    ReversibleChain,
    fixed_point,
    streams,
)
from speechbrain_rev.reversible.streams import FORMATS
from tests.unit.reversible.chains import in_backward

CHANNELS_LAST = torch.channels_last
LAYOUTS = [torch.contiguous_format, CHANNELS_LAST]


@pytest.fixture(autouse=True, params=FORMATS)
def stream_format(request):
    """Give the format itself: nothing here makes chains by its name."""
    return FORMATS[request.param]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_half_of_the_channels_becomes_a_dense_value(stream_format, dtype, layout):
    both = torch.randn(2, 6, 5, 7).to(dtype).contiguous(memory_format=layout)
    for half in both.chunk(2, dim=1):
        value = stream_format.encode(half, None)
        assert value.is_contiguous(memory_format=layout)
        floats = stream_format.decode(value, torch.promote_types(dtype, torch.float32))
        assert floats.stride() == value.stride()
        assert (floats - half).abs().max() <= 0.5 / FORMATS["exact"].steps


@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_have_the_layout_of_the_value(stream_format, layout, other):
    x, f = torch.randn(2, 2, 3, 5, 7)
    value = stream_format.encode(x.contiguous(memory_format=layout), None)
    f = f.contiguous(memory_format=other)
    total = stream_format.add(value, f, None)
    assert total.stride() == value.stride()
    assert stream_format.subtract(total, f).stride() == value.stride()


class Reordered(nn.Module):
    """A residual function that notes the layout it gets and returns the other one."""

    def __init__(self, seen):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen = seen

    def forward(self, x):
        self.seen[in_backward()].append(x.stride())
        last = x.is_contiguous(memory_format=CHANNELS_LAST)
        y = self.weight * x.sin()
        return y.contiguous(memory_format=LAYOUTS[not last])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_residual_function_sees_one_layout_in_both_runs(stream_format, layout):
    seen = {False: [], True: []}
    chain = ReversibleChain(
        [AdditiveCoupling(Reordered(seen), Reordered(seen)) for _ in range(2)],
        streams=stream_format.name,
        verify="raise",
    )
    x1, x2 = (x.contiguous(memory_format=layout) for x in torch.randn(2, 2, 3, 5, 7))
    y1, y2 = chain(x1, x2.requires_grad_())
    (y1 + y2).sum().backward()
    chain.check_streams()
    assert len(seen[False]) == 4
    assert set(seen[False] + seen[True]) == {x1.stride()}


@pytest.mark.parametrize("stream_format", ["exact"], indirect=True)
class TestExact:
    def test_float64_is_rounded_as_float64(self, stream_format):
        # The nearest float32 is three steps off, or half a step.
        step, high, low = 1 / stream_format.steps, 2**14 - 124, 128
        x = torch.tensor([high + 3 * step, low + 0.6 * step], dtype=torch.float64)
        assert (x.float() - x).abs().min() > 0.3 * step
        value = stream_format.encode(x, None)
        assert value.tolist() == [high / step + 3, low / step + 1]
        assert stream_format.add(value - value, x, None).tolist() == value.tolist()
        decoded = stream_format.decode(value, torch.float64)
        assert decoded.tolist() == [high + 3 * step, low + step]

    def test_nothing_given_is_written_to(self, stream_format):
        x, f = torch.randn(5), torch.randn(5)
        value = stream_format.encode(x, None)
        given = [t.clone() for t in (x, f, value)]
        stream_format.decode(value, torch.float32).zero_()
        stream_format.subtract(stream_format.add(value, f, None), f).zero_()
        stream_format.encode(x, None).zero_()
        assert all(map(torch.equal, (x, f, value), given))

    @pytest.mark.parametrize("shape", [(0,), (2, 0, 3, 4)])
    def test_of_nothing_nothing_is_noted(self, stream_format, shape):
        largest = torch.tensor([1.0, 2.0])
        value = stream_format.encode(torch.randn(shape), largest)
        stream_format.add_(value, torch.randn(shape), largest)
        assert largest.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("bad", [float("nan"), -float("nan")])
    def test_a_nan_stays_noted(self, stream_format, bad):
        largest = torch.zeros(2)
        for x in (bad, 1.0, float("inf")):
            stream_format.encode(torch.tensor([x]), largest)
        assert largest[0].isnan()


def on_cuda(dtype, layout=torch.contiguous_format):
    """What is asked of a tensor on a device that need not be here."""
    like = torch.zeros(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=layout)
    return SimpleNamespace(
        is_cuda=True,
        shape=like.shape,
        dtype=dtype,
        device=torch.device("cuda", 0),
        dim=like.dim,
        stride=like.stride,
        is_contiguous=like.is_contiguous,
    )


@pytest.mark.parametrize("stream_format", ["exact"], indirect=True)
class TestWhoComputes:
    @pytest.fixture(autouse=True)
    def _usable(self, monkeypatch):
        monkeypatch.setattr(kernels, "usable", lambda *_: True)

    @pytest.mark.parametrize(
        ("dtype", "computes"),
        [
            (torch.float32, kernels),
            (torch.bfloat16, kernels),
            (torch.float16, kernels),
            (torch.float64, fixed_point),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_kernels_do_on_cuda_what_they_can(self, dtype, computes, layout):
        value = on_cuda(torch.int32, layout)
        assert streams._arithmetic(on_cuda(dtype, layout), value) is computes
        assert streams._arithmetic(on_cuda(dtype)) is computes

    def test_a_value_with_gaps_is_left_to_the_reference(self):
        value = on_cuda(torch.int32)
        value.is_contiguous = torch.zeros(2, 6, 4, 5)[:, :3].is_contiguous
        assert streams._arithmetic(on_cuda(torch.float32), value) is fixed_point

    def test_without_triton_the_reference_does(self, monkeypatch):
        monkeypatch.setattr(kernels, "usable", lambda *_: False)
        assert streams._arithmetic(on_cuda(torch.float32)) is fixed_point

    def test_on_the_cpu_the_reference_does(self):
        assert streams._arithmetic(torch.zeros(1)) is fixed_point

    def test_of_tensors_without_storage_the_reference_does(self):
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(3, device="cuda")
        assert x.is_cuda
        assert streams._arithmetic(x) is fixed_point
