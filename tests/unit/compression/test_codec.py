"""Compressed activations: the bound, what is exact, the stream, and its size."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speechbrain_rev.compression import Form, codec, decode, encode, reference
from tests.unit.compression.values import FLOATS, INTEGERS, KINDS, values
from tests.unit.kernels.process import poisoned

NAN, INF = float("nan"), float("inf")
BOUNDS = st.floats(-7, 2).map(lambda exponent: 10.0**exponent)


def round_trip(x, bound):
    """Encode and decode, assert what always holds, and return what was encoded."""
    compressed = poisoned(encode, x, bound)
    y = poisoned(decode, compressed)
    assert (y.shape, y.dtype, y.device, y.stride()) == (
        x.shape, x.dtype, x.device, x.stride(),
    )  # fmt: skip
    if compressed.form is Form.RAW:
        assert torch.equal(y.view(INTEGERS[y.dtype]), x.view(INTEGERS[x.dtype]))
        assert compressed.reason
    else:
        assert y.isfinite().all()
        assert (y.double() - x.double()).abs().max() <= bound
        assert torch.equal(y == 0, x == 0)
        assert torch.equal(y > 0, x > 0)
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
@pytest.mark.parametrize("exponent", [-100, -30, 0, 60, 127])
def test_many_values_next_to_the_edges_of_quanta_are_within_the_bound(
    relative, exponent
):
    largest = 2.0**exponent
    bound = relative * largest
    bits = torch.tensor(largest).view(torch.int32)
    scale = reference.scale_of(
        torch.stack([bits, bits, bits]).long(),
        torch.tensor(bound).double(),
        torch.float32,
    )
    assert scale[0] > 0
    q = torch.cat([torch.arange(2000), torch.randint(0, 2**21, (8000,))])
    # Computed in float64: the nearest float32, and those around it.
    x = (2 * scale[0].double() * q).float()
    around = [x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(INF))]
    x = torch.cat([*around, torch.tensor([1.0, 1 - 2**-24]) * largest])
    x = x.clamp(max=largest)
    for zeros in (0, 20000):
        compressed = round_trip(torch.cat([x, x.new_zeros(zeros)]), bound)
        assert compressed.form is not Form.RAW


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relative", [0.5, 0.1, 0.05, 0.02, 0.01, 0.002])
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
    compressed = round_trip(x.repeat(9), bound * 2.0**-24)
    assert compressed.form is not Form.RAW


@pytest.mark.parametrize(
    ("dtype", "slack"),
    [(torch.float32, 2.0**-22), (torch.float16, 2.0**-11 + 2.0**-22),
     (torch.bfloat16, 2.0**-8 + 2.0**-22)],
)  # fmt: skip
@pytest.mark.parametrize("exponent", [-5, 0, 7])
def test_from_twice_the_slack_on_values_are_encoded(dtype, slack, exponent):
    x = values("relu", 3000, torch.float32, 0)
    x = (x / x.max() * 2.0**exponent).to(dtype)
    limit = 2 * slack * 2.0**exponent
    assert round_trip(x, limit * (1 - 1e-9)).reason == "bound below precision"
    assert round_trip(x, limit).form is not Form.RAW


@pytest.mark.parametrize("bound", [1e-37, 2e-37, 1.0, 5e37, 1e38, 3e38, 1e300])
def test_flushing_subnormal_numbers_changes_no_bits(bound):
    x = torch.cat([values(k, 500, torch.float32, 0) for k in ("bits", "subnormal")])
    if bound == 1e-37:
        x = x * (x.abs() < 1e-31)
    elif bound == 2e-37:
        x = x * (x.abs() < torch.finfo(torch.float32).tiny)
    expected = encode(x, bound)
    assert expected.form is not Form.RAW or bound == 1.0
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps subnormal numbers")
    try:
        found = encode(x, bound)
        decoded = decode(found)
    finally:
        torch.set_flush_denormal(False)
    assert (found.step, found.largest) == (expected.step, expected.largest)
    for one, other in zip(found.payload, expected.payload, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(decoded.view(torch.int32), decode(expected).view(torch.int32))
    round_trip(x, bound)


def test_minus_zero_is_not_below_zero():
    x = torch.tensor([-0.0, 0.0, 2.0, -3.0, 1e-45, -1e-45])
    assert reference.statistics(x).tolist() == [0x40400000, 4, 2]
    assert reference.statistics(x.relu()).tolist()[1:] == [2, 0]
    assert not encode(x[:3].repeat(99), 0.1).negative


def test_decoded_values_do_not_exceed_the_largest():
    x = torch.tensor([3.4e38, -3.4e38, 1e30, 0.0] * 100)
    compressed = round_trip(x, 1e38)
    assert decode(compressed).abs().max() <= 3.4e38
    round_trip(x, 1e300)
    assert torch.equal(
        decode(encode(torch.full((99,), 0.5), 7.0)), torch.full((99,), 0.5)
    )


def base(*shape):
    return values("sparse", math.prod(shape), torch.float32, 1).view(shape)


LAYOUTS = {
    "contiguous": base(4, 5, 6, 7),
    "channels last": base(4, 5, 6, 7).contiguous(memory_format=torch.channels_last),
    "permuted": base(4, 5, 6, 7).permute(2, 0, 3, 1),
    "part of a storage": base(40, 50)[10:30],
    "expanded": base(1, 50, 1).expand(7, 50, 6),
    "expanded everywhere": base(1).expand(700),
    "overlapping": base(400).unfold(0, 30, 2),
    "gaps": base(40, 50)[:, :20],
    "gaps and a step": base(40, 50)[::2, ::3],
    "gaps and expanded": base(40, 50)[:, None, :9].expand(40, 3, 9),
    "gaps and overlapping": base(4000).unfold(0, 30, 200).unfold(1, 10, 5),
    "a column": base(300, 9)[:, 4],
    "without dimensions": torch.tensor(3.0),
    "one value": base(1, 1, 1),
    "dimensions of one": base(1, 30, 1, 30),
    "empty": torch.empty(0),
    "empty and expanded": torch.empty(3, 1, 0).expand(3, 5, 0),
    "a parameter": torch.nn.Parameter(base(40, 50)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_kept(name):
    x = LAYOUTS[name]
    compressed = round_trip(x.detach(), 0.02) if x.numel() else encode(x, 0.02)
    assert not decode(encode(x, 0.02)).requires_grad
    assert compressed.values < 2 or compressed.form is not Form.RAW
    meta = x.detach().to("meta").as_strided(x.shape, x.stride())
    counted = encode(meta, 0.02)
    assert counted.values == compressed.values
    y = decode(counted) if x.numel() else decode(compressed)
    assert (y.shape, y.stride()) == (x.shape, x.stride())


def test_expanded_and_overlapping_values_are_encoded_once():
    assert encode(LAYOUTS["expanded"], 0.02).values == 50
    assert encode(LAYOUTS["overlapping"], 0.02).values <= 400
    assert encode(LAYOUTS["gaps"], 0.02).values == 800
    assert encode(LAYOUTS["gaps and expanded"], 0.02).values == 360


@pytest.mark.parametrize("bits", [codec.ASSUMED_BITS, 3.3, 15.9])
def test_without_data_memory_is_assumed(bits):
    x = torch.empty(3, 5, 7, dtype=torch.bfloat16, device="meta")
    compressed = encode(x, 1e-3, assumed_bits=bits)
    (payload,) = compressed.payload
    assert payload.is_meta
    assert compressed.nbytes == payload.nbytes == math.ceil(105 * bits / 8)
    y = decode(compressed)
    assert y.is_meta
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert encode(x, 1e-3).nbytes == 105
    assert encode(x, torch.tensor(1e-3, device="meta")).nbytes == 105


@pytest.mark.parametrize("bits", [16.0, 64.0])
def test_what_is_assumed_to_be_no_smaller_stays_as_it_is(bits):
    x = torch.empty(3, 5, 7, dtype=torch.bfloat16, device="meta")
    compressed = encode(x, 1e-3, assumed_bits=bits)
    assert compressed.form is Form.RAW
    kept = decode(compressed)
    assert kept.untyped_storage()._cdata == x.untyped_storage()._cdata


@pytest.mark.parametrize("special", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_are_kept_bit_by_bit(dtype, special):
    x = values("relu", 500, dtype, 0)
    x[77] = special
    compressed = round_trip(x, 0.1)
    assert (compressed.form, compressed.reason) == (Form.RAW, "NaN or inf")
    assert compressed.nbytes == x.nbytes
    assert decode(compressed).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("x", "bound", "reason"),
    [
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
)  # fmt: skip
def test_the_reason_why_is_told(x, bound, reason):
    compressed = encode(x, bound)
    assert compressed.form == "raw"
    assert compressed.reason == reason
    assert compressed.nbytes == x.nbytes


def test_zeros_alone_take_one_bit_each():
    compressed = round_trip(torch.tensor([0.0, -0.0] * 512), 1.0)
    assert (compressed.nbytes, compressed.nonzeros) == (32 + 1, 0)


def test_forms_are_chosen_by_size():
    x = values("relu", 3000, torch.float32, 0)
    assert encode(x, 0.01).form is Form.SPARSE
    assert encode(x + 5, 0.01).form is Form.DENSE


@pytest.mark.parametrize("bound", [0.0, -1.0, NAN, INF])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("size", [0, 50])
def test_bounds_that_are_no_bounds_are_refused(bound, as_tensor, size):
    with pytest.raises(
        ValueError, match=r"error_bound is .*must be positive and finite"
    ):
        encode(torch.zeros(size), torch.tensor(bound) if as_tensor else bound)


def test_one_bound_for_a_tensor():
    x = values("relu", 500, torch.float32, 0)
    for bound in (torch.tensor(0.125), torch.tensor([0.125]), torch.tensor([[0.125]])):
        compressed = encode(x, bound)
        assert compressed.error_bound == 0.125
        assert torch.equal(decode(compressed), decode(encode(x, 0.125)))
    with pytest.raises(ValueError, match="error_bound has 2 values"):
        encode(x, torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool], ids=str)
def test_other_types_are_refused(dtype):
    with pytest.raises(
        ValueError, match=rf"are {dtype}, but .*float32, float16, bfloat16"
    ):
        encode(torch.zeros(5, dtype=dtype), 0.1)


@pytest.mark.parametrize("bits", [0.0, -1.0, NAN])
def test_assumed_bits_are_positive(bits):
    with pytest.raises(ValueError, match="assumed_bits is"):
        encode(torch.empty(5, device="meta"), 0.1, assumed_bits=bits)
