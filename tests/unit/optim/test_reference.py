"""The quantiser against its definition: values, nearest code, blocks, what is not finite."""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from speechbrain_rev.optim.reference import (
    block_maxima,
    dequantise,
    dynamic_tree,
    quantise,
)
from tests.unit.optim.steps import by_block

SIGNS = [True, False]


def value_of_bits(bits):
    """Read a code without its sign as the definition says, exactly."""
    zeros = len(bits) - len(bits.lstrip("0"))
    fraction = bits[zeros + 1 :]
    if "1" not in bits:
        return Fraction(0)
    intervals = 2 ** len(fraction)
    middle = Fraction(2 * int(fraction or "0", 2) + 1, 2 * intervals)
    return (Fraction(1, 10) + Fraction(9, 10) * middle) / 10**zeros


@pytest.mark.parametrize("signed", SIGNS)
def test_the_values_are_those_that_the_bits_of_the_codes_stand_for(signed):
    if signed:
        positive = [value_of_bits(f"{bits:07b}") for bits in range(128)]
        expected = positive + [-value for value in positive[1:]] + [Fraction(1)]
    else:
        # The pattern of seven zeros and a one is the one that stands for 1.
        expected = [value_of_bits(f"{bits:08b}") for bits in range(256) if bits != 1]
        expected.append(Fraction(1))
    exact = torch.tensor(sorted(map(float, expected)), dtype=torch.float64)
    values = dynamic_tree(signed=signed)
    assert values.dtype == torch.float32
    assert values.shape == (256,)
    # Two roundings to float32 for the edges, one for their sum, one for the power of
    # ten and one for the product.
    torch.testing.assert_close(values.double(), exact, rtol=5 * 2**-24, atol=0)
    assert (values[1:] > values[:-1]).all()


@pytest.mark.parametrize("signed", SIGNS)
def test_the_values_have_the_bits_of_the_librarys(signed):
    from bitsandbytes.functional import create_dynamic_map

    assert torch.equal(dynamic_tree(signed=signed), create_dynamic_map(signed=signed))


def test_a_caller_who_changes_the_values_changes_a_copy():
    dynamic_tree(signed=True).zero_()
    assert dynamic_tree(signed=True).any()


def nearest_by_brute_force(quotients, signed):
    """Compare with all 256 values, exactly; the first of two as near is the lower."""
    values = dynamic_tree(signed=signed).double()
    parts = quotients.double().view(-1, 1).split(4096)
    codes = [(part - values).abs().argmin(dim=1) for part in parts]
    return torch.cat(codes).to(torch.uint8)


def codes_of(quotients, signed):
    """The codes of numbers up to 1: one block with a 1 in it leaves them as they are."""
    with_one = torch.cat([quotients, torch.ones(1)])
    codes, absmax = quantise(with_one, block_size=len(with_one), signed=signed)
    assert absmax == 1
    return codes[:-1]


@pytest.mark.parametrize("signed", SIGNS)
def test_floats_of_every_magnitude_and_around_each_midpoint_get_the_nearest_code(
    signed,
):
    # The first, a middle and the last of each 65,536 floats with the upper bits equal.
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16
    last = torch.tensor([0, 30_000, 65_535], dtype=torch.int32)
    floats = (upper[:, None] + last).view(torch.float32)
    values = dynamic_tree(signed=signed).double()
    midpoints = ((values[1:] + values[:-1]) / 2).float()
    around = [values.float(), midpoints, midpoints]
    for _ in range(3):
        around[-1] = around[-1].nextafter(torch.tensor(-math.inf))
        around.append(around[-1])
        around.insert(0, around[0].nextafter(torch.tensor(math.inf)))
    inside = (floats <= 1) & (floats >= (-1 if signed else 0))
    quotients = torch.cat([floats[inside], *around]).clamp(-1 if signed else 0, 1)
    assert len(quotients) > 40_000
    expected = nearest_by_brute_force(quotients, signed)
    assert torch.equal(codes_of(quotients, signed), expected)


@pytest.mark.parametrize("signed", SIGNS)
def test_midway_between_two_codes_the_lower_is_taken(signed):
    values = dynamic_tree(signed=signed).double()
    exact = (values[1:] + values[:-1]) / 2
    ties = exact.float().double() == exact  # most need one bit more than float32 has
    assert ties.sum() > 20
    codes = codes_of(exact[ties].float(), signed)
    assert torch.equal(codes, torch.arange(255)[ties].to(torch.uint8))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@hypothesis.given(
    x=st.lists(FLOATS, max_size=40),
    block_size=st.integers(1, 50),
    signed=st.booleans(),
)
@hypothesis.settings(deadline=None)
def test_every_block_is_its_largest_magnitude_times_the_nearest_values(
    x, block_size, signed
):
    x = torch.tensor(x)
    if not signed:
        x = x.abs()
    codes, absmax = quantise(x, block_size=block_size, signed=signed)
    read = dequantise(codes, absmax, block_size=block_size, signed=signed)
    values = dynamic_tree(signed=signed)
    assert len(absmax) == math.ceil(len(x) / block_size)
    for index, largest in enumerate(absmax):
        inside = slice(index * block_size, (index + 1) * block_size)
        block = x[inside]
        assert largest == block.abs().max()
        if largest == 0:
            assert (read[inside] == 0).all()
            continue
        expected = nearest_by_brute_force(block / largest, signed)
        assert torch.equal(codes[inside], expected)
        assert torch.equal(read[inside], values[expected.long()] * largest)


@pytest.mark.parametrize("block_size", [1, 100, 256, 10**6])
@pytest.mark.parametrize(
    ("signed", "half_step"), [(True, 0.45 / 64), (False, 0.45 / 128)]
)
def test_values_are_read_back_within_half_a_code_step(block_size, signed, half_step):
    # More values than are worked on at a time, and no whole number of blocks.
    x = torch.randn(2**19 + 4097, generator=torch.Generator().manual_seed(0))
    x = x if signed else x.square()
    codes, absmax = quantise(x, block_size=block_size, signed=signed)
    read = dequantise(codes, absmax, block_size=block_size, signed=signed)
    assert torch.equal(absmax, by_block(x, block_size).abs().amax(dim=1))
    error = by_block(read - x, block_size).abs() / absmax[:, None]
    # The steps are widest in [0.1, 1]. float32 rounds quotients and products.
    assert error.max() <= half_step + 2 * 2**-24
    if block_size > 1:
        assert error.max() > 0.9 * half_step


@pytest.mark.parametrize("signed", SIGNS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 255, 256, 768, 999])
def test_a_block_with_a_value_that_is_not_finite_is_read_back_as_nan(
    bad, position, signed
):
    def read_back(x):
        codes, absmax = quantise(x, block_size=256, signed=signed)
        return dequantise(codes, absmax, block_size=256, signed=signed)

    x = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    clean = read_back(x)
    x[position] = bad
    block = torch.arange(1000) // 256 == position // 256
    maxima = block_maxima(x, block_size=256)
    assert (~maxima.isfinite()).nonzero().tolist() == [[position // 256]]
    for values in (x, -x) if signed else (x,):
        assert read_back(values)[block].isnan().all()
    assert torch.equal(read_back(x)[~block], clean[~block])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floating_point_types_are_taken_as_float32(dtype):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, absmax = quantise(x, block_size=256, signed=True)
    expected, expected_absmax = quantise(x.float(), block_size=256, signed=True)
    assert torch.equal(codes, expected)
    assert torch.equal(absmax, expected_absmax)
    assert absmax.dtype == torch.float32


def test_codes_are_in_the_order_of_the_shape_whatever_the_strides():
    x = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    moved = x.clone(memory_format=torch.channels_last)
    codes, absmax = quantise(x, block_size=100, signed=True)
    others, other_absmax = quantise(moved, block_size=100, signed=True)
    assert torch.equal(codes, others)
    assert torch.equal(absmax, other_absmax)
    read = dequantise(codes, absmax, block_size=100, signed=True)
    moved_codes = codes.clone(memory_format=torch.channels_last)
    assert torch.equal(
        read, dequantise(moved_codes, absmax, block_size=100, signed=True)
    )


def test_nothing_to_quantise_gives_no_blocks():
    codes, absmax = quantise(torch.empty(0, 3), block_size=256, signed=False)
    assert (codes.shape, absmax.shape) == ((0, 3), (0,))
    read = dequantise(codes, absmax, block_size=256, signed=False)
    assert read.shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (
            torch.ones(3, dtype=torch.int32),
            {},
            r"x is torch\.int32; give a tensor of a fl",
        ),
        (torch.ones(3), {"block_size": 0}, "block_size is 0; a block has at least 1"),
        (-torch.ones(3), {"signed": False}, "x holds -1, but codes without a sign"),
    ],
)
def test_what_cannot_be_quantised_is_refused(x, options, message):
    with pytest.raises(ValueError, match=message):
        quantise(x, **{"block_size": 256, "signed": True, **options})


def test_codes_and_scales_that_do_not_belong_together_are_refused():
    codes, absmax = quantise(torch.ones(300), block_size=256, signed=True)
    with pytest.raises(
        ValueError, match=r"shape \[2\], but 300 codes in .* need \[3\]"
    ):
        dequantise(codes, absmax, block_size=128, signed=True)
    with pytest.raises(
        ValueError, match=r"codes are torch\.int64; give those of quantise"
    ):
        dequantise(codes.long(), absmax, block_size=256, signed=True)
    with pytest.raises(ValueError, match="block_size is 0"):
        dequantise(codes, absmax, block_size=0, signed=True)
