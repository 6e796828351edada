"""The quantiser against its definition: values, nearest code, blocks, what is not finite."""

import math

import pytest
import torch

from speechbrain_rev.optim.map import dynamic_tree
from speechbrain_rev.optim.reference import dequantise, quantise
from tests.unit.optim.steps import by_block

SIGNS = [True, False]


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


@pytest.mark.parametrize("block_size", [1, 100, 10**6])
@pytest.mark.parametrize("signed", SIGNS)
def test_every_block_is_its_largest_magnitude_times_the_nearest_values(
    block_size, signed
):
    # More values than are worked on at a time, no whole number of blocks, blocks of zeros.
    x = torch.randn(2**19 + 4097, generator=torch.Generator().manual_seed(0))
    x[200:400] = 0
    x = x if signed else x.abs()
    codes, absmax = quantise(x, block_size=block_size, signed=signed)
    assert torch.equal(absmax, by_block(x, block_size).abs().amax(dim=1))
    scales = absmax.repeat_interleave(block_size)[: len(x)]
    some = (scales > 0).nonzero()[::31, 0]
    nearest = nearest_by_brute_force((x / scales)[some], signed)
    assert torch.equal(codes[some], nearest)
    read = dequantise(codes, absmax, block_size=block_size, signed=signed)
    assert torch.equal(read, dynamic_tree(signed=signed)[codes.long()] * scales)


@pytest.mark.parametrize("signed", SIGNS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [255, 256, 999])
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
    for values in (x, -x) if signed else (x,):
        assert read_back(values)[block].isnan().all()
    assert torch.equal(read_back(x)[~block], clean[~block])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_are_taken_as_float32_and_strides_do_not_matter(dtype):
    x = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, scales = quantise(x.float(), block_size=100, signed=True)
    moved = x.clone(memory_format=torch.channels_last)
    for given in (x, moved):
        codes, absmax = quantise(given, block_size=100, signed=True)
        assert torch.equal(codes, expected)
        assert torch.equal(absmax, scales)
        assert absmax.dtype == torch.float32
    codes = expected.clone(memory_format=torch.channels_last)
    read, same = (
        dequantise(each, scales, block_size=100, signed=True)
        for each in (codes, expected)
    )
    assert torch.equal(read, same)


def test_nothing_to_quantise_gives_no_blocks():
    codes, absmax = quantise(torch.empty(0, 3), block_size=256, signed=False)
    assert (codes.shape, absmax.shape) == ((0, 3), (0,))
    read = dequantise(codes, absmax, block_size=256, signed=False)
    assert read.shape == (0, 3)


def test_what_cannot_be_quantised_or_read_back_is_refused():
    ones = torch.ones(300)
    codes, absmax = quantise(ones, block_size=256, signed=True)
    for x, options, message in (
        (ones.int(), {}, r"x is torch\.int32; give a tensor of a fl"),
        (ones, {"block_size": 0}, "block_size is 0; a block has at least 1"),
        (-ones, {"signed": False}, "x holds -1, but codes without a sign"),
    ):
        with pytest.raises(ValueError, match=message):
            quantise(x, **{"block_size": 256, "signed": True, **options})
    for given, block_size, message in (
        (codes, 128, r"shape \[2\], but 300 codes in .* need \[3\]"),
        (codes.long(), 256, r"codes are torch\.int64; give those of quantise"),
        (codes, 0, "block_size is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dequantise(given, absmax, block_size=block_size, signed=True)
