"""Compressed activations: the bound, what is exact, and what is left as it is."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speechbrain_rev.compression import Form, codec, decode, encode, reference
from tests.unit.compression.values import FLOATS, INTEGERS, KINDS, values
from tests.unit.kernels.process import with_nan

NAN, INF = float("nan"), float("inf")
BOUNDS = st.floats(-7, 2).map(lambda exponent: 10.0**exponent)


def same_bits(x, y):
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def round_trip(x, bound):
    """Encode and decode, assert what always holds, and return what was encoded."""
    compressed = with_nan(encode, x, bound)
    y = with_nan(decode, compressed)
    assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride())
    if compressed.form is Form.RAW:
        assert torch.equal(y.view(INTEGERS[y.dtype]), x.view(INTEGERS[x.dtype]))
        assert compressed.reason
    else:
        assert y.isfinite().all()
        assert (y.double() - x.double()).abs().max() <= bound
        assert torch.equal(y.sign(), x.sign())
        assert compressed.nbytes == sum(p.nbytes for p in compressed.payload)
        assert compressed.nbytes < compressed.values * x.itemsize
        assert compressed.reason is None
    return compressed


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(1, 3000), st.sampled_from(FLOATS),
    st.integers(0, 1000), BOUNDS,
)  # fmt: skip
@example("huge", 500, torch.float32, 0, 0.3)
@example("subnormal", 500, torch.float32, 0, 1e-4)
@example("constant", 500, torch.float32, 0, 1.0)
def test_any_finite_value_is_decoded_within_the_bound(kind, size, dtype, seed, bound):
    x = values(kind, size, dtype, seed, bound)
    round_trip(x, bound)
    largest = float(x.abs().max())
    if largest > 0:
        round_trip(x, min(bound * largest, 1e300))


@pytest.mark.parametrize("relative", [1e-1, 1e-3, 1e-5, 2.0**-21, 2.0**-20.99])
@pytest.mark.parametrize("exponent", [-100, 0, 127])
def test_values_next_to_the_edges_of_quanta_are_within_the_bound(relative, exponent):
    largest = 2.0**exponent
    bits = torch.tensor(largest).view(torch.int32).long()
    bound = torch.tensor(relative * largest).double()
    scale = reference.scale_of(bits.expand(3), bound, torch.float32)
    q = torch.cat([torch.arange(2000), torch.randint(0, 2**21, (8000,))])
    # Computed in float64: the nearest float32, and those around it.
    x = (2 * scale[0].double() * q).float()
    around = [x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(INF))]
    x = torch.cat([*around, torch.tensor([1.0, 1 - 2**-24]) * largest])
    x = x.clamp(max=largest)
    for zeros in (0, 20000):
        compressed = round_trip(torch.cat([x, x.new_zeros(zeros)]), float(bound))
        assert compressed.form is not Form.RAW


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relative", [0.5, 0.1, 0.02, 0.01, 0.002])
def test_all_halves_are_within_the_bound(dtype, relative):
    x = torch.arange(-(2**15), 2**15).short().view(dtype)
    x = x[x.isfinite()]
    for largest in (torch.finfo(dtype).max, 1.0, 2.0**-12):
        few = x[x.abs() <= largest]
        compressed = round_trip(few, relative * largest)
        limit = torch.finfo(dtype).eps  # twice the slack is about this
        assert (compressed.form is Form.RAW) == (relative < limit)


@pytest.mark.parametrize("bound", [1.1, 1.25, 1.5, 2.0, 3.0])
def test_no_half_is_decoded_as_zero(bound):
    x = (torch.arange(-20.0, 20.0) * 2.0**-24).half()
    assert round_trip(x.repeat(9), bound * 2.0**-24).form is not Form.RAW


@pytest.mark.parametrize(
    ("dtype", "slack"),
    [(torch.float32, 2.0**-22), (torch.float16, 2.0**-11 + 2.0**-22),
     (torch.bfloat16, 2.0**-8 + 2.0**-22)],
)  # fmt: skip
def test_from_twice_the_slack_on_values_are_encoded(dtype, slack):
    x = values("relu", 3000, torch.float32, 0)
    x = (x / x.max() * 2.0**7).to(dtype)
    limit = 2 * slack * 2.0**7
    assert round_trip(x, limit * (1 - 1e-9)).reason == "bound below precision"
    assert round_trip(x, limit).form is not Form.RAW


@pytest.mark.parametrize(
    ("bound", "below"), [(1e-37, 1e-31), (2e-37, 2.0**-126), (1e38, INF), (1e300, INF)]
)
def test_flushing_subnormal_numbers_changes_no_bits(bound, below):
    x = torch.cat([values(k, 500, torch.float32, 0) for k in ("bits", "subnormal")])
    x = x * (x.abs() < below)
    expected = encode(x, bound)
    assert expected.form is not Form.RAW
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps subnormal numbers")
    try:
        flushed = encode(x, bound)
        decoded = decode(flushed)
    finally:
        torch.set_flush_denormal(False)
    assert (flushed.step, flushed.largest) == (expected.step, expected.largest)
    assert all(map(same_bits, flushed.payload, expected.payload))
    assert same_bits(decoded, decode(expected))


def test_minus_zero_is_zero_and_zeros_take_one_bit_each():
    x = torch.tensor([-0.0, 0.0, 2.0, -3.0, 1e-45, -1e-45])
    assert reference.statistics(x).tolist() == [0x40400000, 4, 2]
    assert not encode(x[:3].repeat(99), 0.1).negative
    compressed = round_trip(torch.tensor([0.0, -0.0] * 512), 1.0)
    assert (compressed.nbytes, compressed.nonzeros) == (32 + 1, 0)


@pytest.mark.parametrize("bound", [1e38, 1e300])
def test_decoded_values_do_not_exceed_the_largest(bound):
    compressed = round_trip(torch.tensor([3.4e38, -3.4e38, 1e30, 0.0] * 100), bound)
    assert decode(compressed).abs().max() <= 3.4e38


def base(*shape):
    return values("sparse", math.prod(shape), torch.float32, 1).view(shape)


#: Tensors, and how many values of them are encoded: each that lies in memory once.
LAYOUTS = {
    "channels last": (base(4, 5, 6, 7).to(memory_format=torch.channels_last), 840),
    "permuted": (base(4, 5, 6, 7).permute(2, 0, 3, 1), 840),
    "part of a storage": (base(40, 50)[10:30], 1000),
    "expanded": (base(1, 50, 1).expand(7, 50, 6), 50),
    "expanded everywhere": (base(1).expand(700), 1),
    "overlapping": (base(400).unfold(0, 30, 2), 400),
    "gaps and a step": (base(40, 50)[::2, ::3], 340),
    "gaps and expanded": (base(40, 50)[:, None, :9].expand(40, 3, 9), 360),
    "gaps and overlapping": (base(4000).unfold(0, 30, 200).unfold(1, 10, 5), 1000),
    "without dimensions": (torch.tensor(3.0), 1),
    "dimensions of one": (base(1, 30, 1, 30), 900),
    "empty and expanded": (torch.empty(3, 1, 0).expand(3, 5, 0), 0),
    "a parameter": (torch.nn.Parameter(base(40, 50)), 2000),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_kept(name):
    x, count = LAYOUTS[name]
    meta = x.detach().to("meta").as_strided(x.shape, x.stride())
    for compressed in (encode(x, 0.02), encode(meta, 0.02)):
        assert compressed.values == count
        y = decode(compressed)
        assert (y.shape, y.stride(), y.requires_grad) == (x.shape, x.stride(), False)
    assert count < 2 or round_trip(x.detach(), 0.02).form is not Form.RAW


@pytest.mark.parametrize("bits", [codec.ASSUMED_BITS, 3.3, 15.9, 16.0, 64.0])
def test_without_data_memory_is_assumed(bits):
    x = torch.empty(3, 5, 7, dtype=torch.bfloat16, device="meta")
    compressed = encode(x, torch.tensor(1e-3, device="meta"), assumed_bits=bits)
    (payload,) = compressed.payload
    assert compressed.nbytes == payload.nbytes == min(210, math.ceil(105 * bits / 8))
    # What is assumed to be no smaller stays as it is.
    assert (compressed.form is Form.RAW) == (bits >= 16)
    y = decode(compressed)
    kept = y.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert kept == (bits >= 16)
    assert (y.is_meta, y.shape, y.dtype) == (True, x.shape, x.dtype)


def with_a(special, dtype):
    x = values("relu", 500, dtype, 0)
    x[77] = special
    return x


@pytest.mark.parametrize(
    ("x", "bound", "reason"),
    [
        *((with_a(s, d), 0.1, "NaN or inf") for s in (NAN, INF, -INF) for d in FLOATS),
        (base(500), 1e-8, "bound below precision"),
        (base(500).half(), 1e-3, "bound below precision"),
        (base(500).bfloat16(), 1e-2, "bound below precision"),
        (base(500) * 1e-41, 1e-42, "bound below precision"),
        (base(500) * 0, 1e-39, "bound below precision"),
        ((base(500) * 1e-7).half(), 2.0**-25, "bound below precision"),
        (torch.tensor([1.0, -2.0, 0.0]), 1e-3, "no smaller"),
        (torch.tensor(1.0), 0.1, "no smaller"),
        (torch.empty(0, 3), 0.1, "empty"),
    ],
)
def test_what_is_left_as_it_is_has_a_reason(x, bound, reason):
    compressed = encode(x, bound)
    assert (compressed.form, compressed.reason) == ("raw", reason)
    assert compressed.nbytes == x.nbytes
    assert decode(compressed).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("bound", [0.0, -1.0, NAN, INF])
def test_bounds_that_are_no_bounds_are_refused(bound):
    for x in (torch.zeros(0), torch.zeros(50)):
        for given_bound in (bound, torch.tensor(bound)):
            with pytest.raises(ValueError, match=r"error_bound is .*positive and fin"):
                encode(x, given_bound)
    with pytest.raises(ValueError, match="assumed_bits is"):
        encode(torch.empty(5, device="meta"), 0.1, assumed_bits=bound)


def test_one_bound_for_a_tensor_of_a_float_type():
    x = values("relu", 500, torch.float32, 0)
    for bound in (torch.tensor(0.125), torch.tensor([0.125]), torch.tensor([[0.125]])):
        compressed = encode(x, bound)
        assert compressed.error_bound == 0.125
        assert torch.equal(decode(compressed), decode(encode(x, 0.125)))
    with pytest.raises(RuntimeError, match="size 2"):
        encode(x, torch.tensor([0.1, 0.2]))
    for dtype in (torch.float64, torch.int32, torch.bool):
        with pytest.raises(
            ValueError, match=rf"are {dtype}, but .*float32, float16, b"
        ):
            encode(x.to(dtype), 0.1)
