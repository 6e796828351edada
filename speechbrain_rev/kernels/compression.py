"""The bit stream of compressed activations, in kernels.

The plain reference is ``speechbrain_rev.compression.reference``: same names, same
signatures, same bits. Triton is imported when a kernel is first launched.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

#: Values of a block, and values of one program: those of one block of bases.
LANES = 32
BLOCK = LANES * LANES
#: Values whose codes are between two kernels at a time; a power of two.
SLICE = 2**22


def _bits(x):
    """Return the bits of values as float32 numbers."""
    if x.dtype == tl.bfloat16:
        # Triton's interpreter loses subnormal numbers, so bits are moved instead.
        return x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return x.to(tl.float32).to(tl.int32, bitcast=True)


def _rounded(value, dtype: tl.constexpr):
    """Round float32 numbers to the nearest of a type, ties to even."""
    if dtype == tl.bfloat16:
        # Triton's interpreter would cut the bits off.
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


def _quantised(bits, inverse):
    """Return |q| of values that are not zero."""
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return tl.maximum(tl.ceil(magnitude * inverse), 1.0).to(tl.int32)


def _dequantised(q, step, largest):
    magnitude = tl.minimum((2 * tl.abs(q) - 1).to(tl.float32) * step, largest)
    magnitude = tl.where(q == 0, 0.0, magnitude)
    return tl.where(q < 0, -magnitude, magnitude)


def _width(code):
    """Return the number of bits of codes that have at most 24."""
    exponent = code.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - 126, 0), 24)


def _store_planes(words, start, code, width):
    """Store bit j of each block's codes as the word j from where the block starts."""
    lane = tl.arange(0, 32)[None, :]  # [block, lane]
    j = 0
    while j < tl.max(width, axis=0):
        word = tl.sum(((code >> j) & 1) << lane, axis=1)
        tl.store(words + start + j, word.to(tl.int32), mask=j < width)
        j += 1


def _statistics_kernel(x, statistics, counts, size, BLOCK: tl.constexpr):
    """Note the largest magnitude and count values by their sign."""
    program = tl.program_id(0).to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    bits = _bits(tl.load(x + offsets, mask=offsets < size, other=0.0))  # [BLOCK]
    magnitude = bits & 0x7FFFFFFF  # [BLOCK]
    nonzeros = tl.sum((magnitude != 0).to(tl.int32))
    tl.store(counts + program, nonzeros)
    if statistics is not None:
        negative = tl.sum(((bits < 0) & (magnitude != 0)).to(tl.int32))
        tl.atomic_max(statistics, tl.max(magnitude).to(tl.int64), sem="relaxed")
        tl.atomic_add(statistics + 1, nonzeros.to(tl.int64), sem="relaxed")
        tl.atomic_add(statistics + 2, negative.to(tl.int64), sem="relaxed")


def _compact_kernel(
    x, scale, statistics, ranks, ring, mask, first, size, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the codes of values that are not zero next to each other."""
    program = first + tl.program_id(0).to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    bits = _bits(tl.load(x + offsets, mask=offsets < size, other=0.0))  # [BLOCK]
    present = ((bits & 0x7FFFFFFF) != 0).to(tl.int32)  # [BLOCK]
    code = _quantised(bits, tl.load(scale + 1)) - 1  # [BLOCK]
    if tl.load(statistics + 2) > 0:
        code = 2 * code + (bits < 0).to(tl.int32)
    rank = tl.load(ranks + program) + tl.cumsum(present, axis=0) - present  # [BLOCK]
    tl.store(ring + (rank & (capacity - 1)), code, mask=present != 0)
    if mask is not None:
        block = tl.arange(0, BLOCK // 32)  # [BLOCK / 32]
        lanes = tl.reshape(present, [BLOCK // 32, 32])  # [BLOCK / 32, lane]
        word = tl.sum(lanes << tl.arange(0, 32)[None, :], axis=1)  # [BLOCK / 32]
        index = program * (BLOCK // 32) + block  # [BLOCK / 32]
        tl.store(mask + index, word.to(tl.int32), mask=index * 32 < size)


def _blocks_kernel(ring, ranks, widths, starts, words, first, last, capacity):
    """Find the widths of blocks, or store them where they start."""
    begin = tl.load(ranks + first) // 32
    end = tl.load(ranks + last)
    stop = (end + 31) // 32  # a block that is not complete is stored again when it is
    block = begin + tl.program_id(0) * 32 + tl.arange(0, 32)  # [block]
    rank = block[:, None] * 32 + tl.arange(0, 32)[None, :]  # [block, lane]
    inside = (block < stop)[:, None] & (rank < end)  # [block, lane]
    code = tl.load(
        ring + (rank & (capacity - 1)), mask=inside, other=0
    )  # [block, lane]
    if words is None:
        width = _width(tl.max(code, axis=1))  # [block]
        tl.store(widths + block, width.to(tl.uint8), mask=block < stop)
    else:
        width = tl.load(widths + block, mask=block < stop, other=0).to(tl.int32)
        start = tl.load(starts + block, mask=block < stop, other=0)  # [block]
        _store_planes(words, start, code, width)


def _dense_kernel(
    x, scale, statistics, widths, base_widths, starts, base_starts, words, base_words,
    size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the widths of blocks and of their bases, or store both where they start."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, 32)  # [block]
    index = program * 32 + block  # [block]
    offsets = index[:, None] * 32 + tl.arange(0, 32)[None, :]  # [block, lane]
    inside = offsets < size  # [block, lane]
    bits = _bits(tl.load(x + offsets, mask=inside, other=0.0))  # [block, lane]
    q = _quantised(bits, tl.load(scale + 1))
    full = tl.load(statistics + 1) == size
    k = tl.where(bits < 0, -q, tl.where(full, q - 1, q))  # [block, lane]
    k = tl.where((bits & 0x7FFFFFFF) == 0, 0, k)
    base = tl.min(tl.where(inside, k, 0x7FFFFFFF), axis=1)  # [block]
    base = tl.where(index * 32 < size, base, 0)
    code = tl.where(inside, k - base[:, None], 0)  # [block, lane]
    zigzag = (base << 1) ^ (base >> 31)  # [block]
    if words is None:
        width = _width(tl.max(code, axis=1))  # [block]
        tl.store(widths + index, width.to(tl.uint8), mask=index * 32 < size)
        tl.store(base_widths + program, _width(tl.max(zigzag, axis=0)).to(tl.uint8))
    else:
        width = tl.load(widths + index, mask=index * 32 < size, other=0).to(tl.int32)
        start = tl.load(starts + index, mask=index * 32 < size, other=0)  # [block]
        _store_planes(words, start, code, width)
        width = tl.load(base_widths + program).to(tl.int32)
        base_words += tl.load(base_starts + program)
        j = 0
        while j < width:
            word = tl.sum(((zigzag >> j) & 1) << block, axis=0)
            tl.store(base_words + j, word.to(tl.int32))
            j += 1


def _mask_counts_kernel(mask, counts, blocks):
    """Count the bits of 32 words."""
    program = tl.program_id(0).to(tl.int64)
    index = program * 32 + tl.arange(0, 32)  # [block]
    word = tl.load(mask + index, mask=index < blocks, other=0)  # [block]
    bits = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1  # [block, lane]
    tl.store(counts + program, tl.sum(tl.sum(bits, axis=1), axis=0).to(tl.int32))


def _unpack_sparse_kernel(
    mask, words, widths, starts, ranks, out, step, largest, size,
    NEGATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode values that are not zero, and put them among zeros."""
    program = tl.program_id(0).to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < size  # [BLOCK]
    word = tl.load(mask + offsets // 32, mask=inside, other=0)  # [BLOCK]
    present = (word >> (offsets % 32).to(tl.int32)) & 1  # [BLOCK]
    rank = tl.load(ranks + program) + tl.cumsum(present, axis=0) - present  # [BLOCK]
    block, lane = rank // 32, (rank % 32).to(tl.int32)  # [BLOCK]
    width = tl.load(widths + block, mask=present != 0, other=0).to(tl.int32)  # [BLOCK]
    start = tl.load(starts + block, mask=present != 0, other=0)  # [BLOCK]
    code = tl.zeros([BLOCK], tl.int32)  # [BLOCK]
    j = 0
    while j < tl.max(width, axis=0):
        word = tl.load(words + start + j, mask=j < width, other=0)
        code = code | (((word >> lane) & 1) << j)
        j += 1
    q = code + 1
    if NEGATIVE:
        q = ((code >> 1) + 1) * (1 - 2 * (code & 1))
    value = _dequantised(q * present, step, largest)  # [BLOCK]
    tl.store(out + offsets, _rounded(value, out.dtype.element_ty), mask=inside)


def _unpack_dense_kernel(
    words, widths, starts, base_words, base_widths, base_starts, out, step, largest,
    size, FULL: tl.constexpr,
):  # fmt: skip
    """Decode bases, and values from there."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 32)  # [lane]
    index = program * 32 + tl.arange(0, 32)  # [block]
    zigzag = tl.zeros([32], tl.int32)  # [block]
    base_start = tl.load(base_starts + program)
    j = 0
    while j < tl.load(base_widths + program).to(tl.int32):
        word = tl.load(base_words + base_start + j)
        zigzag = zigzag | (((word >> lane) & 1) << j)
        j += 1
    base = (zigzag >> 1) ^ -(zigzag & 1)  # [block]
    width = tl.load(widths + index, mask=index * 32 < size, other=0).to(tl.int32)
    start = tl.load(starts + index, mask=index * 32 < size, other=0)  # [block]
    code = tl.zeros([32, 32], tl.int32)  # [block, lane]
    j = 0
    while j < tl.max(width, axis=0):
        word = tl.load(words + start + j, mask=j < width, other=0)  # [block]
        code = code | (((word[:, None] >> lane[None, :]) & 1) << j)
        j += 1
    q = base[:, None] + code  # [block, lane]
    if FULL:
        q = q + (q >= 0).to(tl.int32)
    value = _dequantised(q, step, largest)  # [block, lane]
    offsets = index[:, None] * 32 + lane[None, :]  # [block, lane]
    tl.store(out + offsets, _rounded(value, out.dtype.element_ty), mask=offsets < size)


def statistics(x: Tensor) -> Tensor:
    """Count what must be known before values are quantised."""
    total = torch.zeros(3, dtype=torch.int64, device=x.device)
    _count(x, total)
    return total


def sizes(x: Tensor, scale: Tensor, statistics: Tensor) -> Tensor:
    """Count the words that the two forms would take."""
    # As many blocks as there could be, for nothing has been looked at yet.
    sparse = x.new_zeros(_ceil(len(x), LANES), dtype=torch.uint8)
    _sparse(x, scale, statistics, sparse)
    dense = _dense_widths(x, scale, statistics)
    return torch.stack([w.sum(dtype=torch.int64) for w in (sparse, *dense)])


def pack_sparse(
    x: Tensor, scale: Tensor, statistics: Tensor, nonzeros: int, words: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the sparse form."""
    mask = x.new_empty(_ceil(len(x), LANES), dtype=torch.int32)
    out = x.new_empty(words, dtype=torch.int32)
    widths = x.new_empty(_ceil(nonzeros, LANES), dtype=torch.uint8)
    _sparse(x, scale, statistics, widths)
    _sparse(x, scale, statistics, widths, out, mask)
    return mask, out, widths


def pack_dense(
    x: Tensor, scale: Tensor, statistics: Tensor, words: int, base_words: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make the dense form."""
    widths, base_widths = _dense_widths(x, scale, statistics)
    out = x.new_empty(words, dtype=torch.int32)
    bases = x.new_empty(base_words, dtype=torch.int32)
    _launch(
        _dense_kernel, _ceil(len(x), BLOCK), x, scale, statistics, widths, base_widths,
        _starts(widths), _starts(base_widths), out, bases, len(x), BLOCK=BLOCK,
    )  # fmt: skip
    return out, widths, bases, base_widths


def unpack_sparse(
    mask: Tensor, words: Tensor, widths: Tensor, step: float, largest: float,
    negative: bool, out: Tensor,
) -> Tensor:  # fmt: skip
    """Decode the sparse form."""
    programs = _ceil(len(out), BLOCK)
    counts = mask.new_empty(programs)
    _launch(_mask_counts_kernel, programs, mask, counts, len(mask))
    _launch(
        _unpack_sparse_kernel, programs, mask, words, widths, _starts(widths),
        _starts(counts), out, step, largest, len(out), NEGATIVE=negative, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def unpack_dense(
    words: Tensor, widths: Tensor, base_words: Tensor, base_widths: Tensor, step: float,
    largest: float, full: bool, out: Tensor,
) -> Tensor:  # fmt: skip
    """Decode the dense form."""
    _launch(
        _unpack_dense_kernel, _ceil(len(out), BLOCK), words, widths, _starts(widths),
        base_words, base_widths, _starts(base_widths), out, step, largest, len(out),
        FULL=full,
    )  # fmt: skip
    return out


@functools.cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton can be imported and compiles for these floats; tried once."""
    x = torch.tensor([0.0, 1.0], dtype=dtype, device=device)
    scale = torch.tensor([0.5, 1.0, 1.0], device=device, dtype=torch.float32)
    try:
        counted = statistics(x)
        sizes(x, scale, counted)
        sparse = pack_sparse(x, scale, counted, 1, 0)
        unpack_sparse(*sparse, 0.5, 1.0, False, x)
        dense = pack_dense(x, scale, counted, 1, 0)
        unpack_dense(*dense, 0.5, 1.0, False, x)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"Triton's kernels do not run on {device} in {dtype} "
            f"({type(error).__name__}: {error}). Activations are compressed by plain "
            "torch operations there: the same bits, several times slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _count(x: Tensor, total: Tensor | None) -> Tensor:
    """Count values that are not zero in each program; note statistics of all."""
    programs = _ceil(len(x), BLOCK)
    counts = x.new_empty(programs, dtype=torch.int32)
    _launch(_statistics_kernel, programs, x, total, counts, len(x), BLOCK=BLOCK)
    return counts


def _sparse(
    x: Tensor, scale: Tensor, statistics: Tensor, widths: Tensor,
    words: Tensor | None = None, mask: Tensor | None = None,
) -> None:  # fmt: skip
    """Find the widths of the sparse form's blocks, or store words where they start."""
    programs, at_a_time = _ceil(len(x), BLOCK), SLICE // BLOCK
    ranks = _starts(_count(x, None))
    starts = None if words is None else _starts(widths)
    # Codes of a block that is not complete stay there until others complete it.
    capacity = min(2 * SLICE, 1 << (len(x) - 1).bit_length())
    ring = x.new_empty(capacity, dtype=torch.int32)
    for first in range(0, programs, at_a_time):
        last = min(first + at_a_time, programs)
        _launch(
            _compact_kernel, last - first, x, scale, statistics, ranks, ring, mask,
            first, len(x), capacity, BLOCK=BLOCK,
        )  # fmt: skip
        _launch(
            _blocks_kernel, last - first + 1, ring, ranks, widths, starts, words, first,
            last, capacity,
        )  # fmt: skip


def _dense_widths(x: Tensor, scale: Tensor, statistics: Tensor) -> tuple[Tensor, ...]:
    blocks = _ceil(len(x), LANES)
    widths = x.new_empty(blocks, dtype=torch.uint8)
    base_widths = x.new_empty(_ceil(blocks, LANES), dtype=torch.uint8)
    _launch(
        _dense_kernel, _ceil(len(x), BLOCK), x, scale, statistics, widths, base_widths,
        None, None, None, None, len(x), BLOCK=BLOCK,
    )  # fmt: skip
    return widths, base_widths


def _starts(counts: Tensor) -> Tensor:
    """Return where parts of given sizes start and, at last, where they end."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int64), (1, 0))


def _ceil(size: int, of: int) -> int:
    return -(-size // of)


def _launch(
    kernel: Callable[..., None], programs: int, *arguments: Any, **constants: Any
) -> None:
    tensor = next(x for x in arguments if isinstance(x, Tensor))
    with torch.cuda.device_of(tensor):
        _compiled(kernel)[(programs,)](*arguments, **constants)


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Any:
    import triton

    # Kernels look names up among their module's, which must not import Triton.
    names = globals()
    names["tl"] = triton.language
    for part in (_bits, _rounded, _quantised, _dequantised, _width, _store_planes):
        if not hasattr(part, "fn"):
            names[part.__name__] = triton.jit(part)
    sizes = ["size", "first", "last", "blocks", "capacity"]
    return triton.jit(kernel, do_not_specialize=sizes)
