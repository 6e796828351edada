"""The bit stream of compressed activations in plain torch.

This is the specification and what runs on the CPU; ``speechbrain_rev.kernels`` has the
same functions for CUDA devices. All take one row of values, in the order of memory.

Source: error-bounded lossy compression of activations is proposed in "A Novel
Memory-Efficient Deep Learning Training Framework via Error-Bounded Lossy Compression",
with a compressor that predicts each value from its neighbours. On the activations of
speaker encoders the two forms below are smaller, and they keep zeros and signs.

**Quantising.** A value x other than zero becomes q = sign(x) max(1, ceil(|x| inverse)),
zero stays zero, and q is decoded as sign(q) min((2|q| - 1) step, largest). The three
numbers are ``scale``, float32, [3]: step, inverse = 1 / (2 step), and largest = max |x|
or, if that is subnormal, the smallest number that is not. The step is the error bound
less a slack for the roundings of float32 and of the tensor's own type. One multiplication and a ceiling, or one multiplication and a minimum,
are rounded in one way only; zero is what has no bit but the sign. So all devices make
the same bits, whether or not they take subnormal numbers for zero.

**Blocks of 32 codes.** The width of a block is the number of bits of its largest code. It
takes that many 32-bit words: bit i of word j is bit j of code i. Blocks follow each
other without gaps. Their widths are a byte each; where they start is the sum of the
widths before. Codes that are missing in the last block are zero.

**Sparse form.** ``mask``: bit i of word j is set if value 32 j + i is other than zero.
``words, widths``: the blocks of the values that are, in their order. The code is |q| - 1
if no value is below zero, otherwise 2 (|q| - 1) + (q < 0).

**Dense form.** If no value is zero, k = q - (q > 0), else k = q. The base of a block of 32
values is its smallest k, and codes are k - base: ``words, widths``. The bases are
themselves coded in blocks of 32, as 2 base or, below zero, -2 base - 1: ``base_words,
base_widths``.

Numbers are counted in bytes from the lowest on, as all machines do that torch runs on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Values of a block.
LANES = 32


def compacted(values: Tensor, present: Tensor) -> Tensor:
    """Return the values that are present: several times faster than by a mask."""
    ranks = present.cumsum(0)
    out = values.new_empty(int(ranks[-1]) + 1)
    # Absent values all go to the first place, in front of the others.
    return out.scatter_(0, ranks.mul_(present), values)[1:]


def expanded(values: Tensor, present: Tensor) -> Tensor:
    """Put values where they are present, zeros elsewhere."""
    ranks = present.cumsum(0).mul_(present)
    return torch.cat([values.new_zeros(1), values]).index_select(0, ranks)


def mask_words(present: Tensor) -> Tensor:
    """Turn booleans into bits, a word for each 32."""
    present = torch.nn.functional.pad(present, (0, -len(present) % LANES))
    eights = present.view(torch.uint8).view(torch.int64)
    # A product moves bit 8 i to bit 56 + i for all i: no two of its terms meet.
    bits = (eights * 0x0102040810204080) >> 56
    return bits.to(torch.uint8).view(torch.int32)


def mask_bits(words: Tensor) -> Tensor:
    """Turn the bits of words into booleans."""
    eights = words.view(torch.uint8).to(torch.int64)
    eights *= 0x0101010101010101
    eights &= 0x8040201008040201 - 2**64
    return eights.view(torch.uint8) != 0


def widths_of(codes: Tensor) -> Tensor:
    """Return the number of bits of the largest code of each block."""
    # Codes have at most 24 bits, so that floats are exact and their exponents are the widths.
    exponents = codes.amax(1).float().view(torch.int32) >> 23
    return exponents.sub_(126).clamp_(min=0).to(torch.uint8)


def starts_of(widths: Tensor) -> Tensor:
    """Return where blocks start and, at last, where they end."""
    return torch.nn.functional.pad(widths.cumsum(0), (1, 0))


def _used(widths: Tensor, octets: int) -> Tensor:
    planes = torch.arange(8 * octets, dtype=torch.uint8, device=widths.device)
    return (planes < widths[:, None]).flatten()


def packed(codes: Tensor, widths: Tensor) -> Tensor:
    """Turn blocks of codes into words."""
    octets = (int(widths.max()) + 7) // 8
    planes = codes.new_empty(len(codes), octets, 8, 4, dtype=torch.uint8)
    for octet in range(octets):
        eights = (codes >> (8 * octet)).to(torch.uint8).view(torch.int64)
        eights = _transposed(eights).view(torch.uint8).view(-1, 4, 8)
        planes[:, octet] = eights.transpose(1, 2)
    words = planes.view(torch.int32).flatten()
    return compacted(words, _used(widths, octets)) if octets else words


def unpacked(words: Tensor, widths: Tensor, starts: Tensor, some: slice) -> Tensor:
    """Turn the words of some of the blocks into their codes."""
    widths = widths[some]
    codes = torch.zeros(len(widths), LANES, dtype=torch.int32, device=words.device)
    octets = (int(widths.max()) + 7) // 8 if len(widths) else 0
    if not octets:
        return codes
    words = words[starts[some.start] : starts[some.stop]]
    planes = expanded(words, _used(widths, octets)).view(torch.uint8)
    planes = planes.view(-1, octets, 8, 4)
    for octet in range(octets):
        eights = planes[:, octet].transpose(1, 2).contiguous().view(torch.int64)
        eights = _transposed(eights.flatten()).view(torch.uint8)
        codes += eights.view(-1, LANES).int() << (8 * octet)
    return codes


def _transposed(eights: Tensor) -> Tensor:
    """Exchange bit 8 i + j and bit 8 j + i of each number, in place."""
    for shift, mask in (
        (7, 0x00AA00AA00AA00AA),
        (14, 0x0000CCCC0000CCCC),
        (28, 0x00000000F0F0F0F0),
    ):
        moved = (eights >> shift).bitwise_xor_(eights).bitwise_and_(mask)
        eights ^= moved
        eights ^= moved << shift
    return eights


class Writer:
    """Fills a new tensor part by part."""

    def __init__(self, like: Tensor, size: int, dtype: torch.dtype):
        self._out = like.new_empty(size, dtype=dtype)
        self._end = 0

    def write(self, part: Tensor) -> None:
        """Append a part."""
        self._out[self._end : self._end + len(part)] = part
        self._end += len(part)

    def done(self) -> Tensor:
        """Return the tensor."""
        assert self._end == len(self._out)
        return self._out


class Packer:
    """Writes blocks as words and widths."""

    def __init__(self, like: Tensor, words: int, blocks: int):
        self._words = Writer(like, words, torch.int32)
        self._widths = Writer(like, blocks, torch.uint8)

    def write(self, codes: Tensor) -> None:
        """Append blocks."""
        if len(codes):
            widths = widths_of(codes)
            self._widths.write(widths)
            self._words.write(packed(codes, widths))

    def done(self) -> tuple[Tensor, Tensor]:
        """Return all words, and the widths of the blocks."""
        return self._words.done(), self._widths.done()


#: Values that are worked on at a time; whole blocks of bases. It changes no bits.
SLICE = 2**18

#: The inverse of twice as much is not subnormal.
_LARGEST_STEP = 2.0**125


def scale_of(statistics: Tensor, error_bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Choose how values are quantised.

    In float64 and on the tensor's device, without a look at any number. A decoded value
    is off by half a quantum, which is the step, and by roundings: 2**-23 |x| for two on
    the way in, at most 2**-24 |x| for each of the step and of one on the way out. Where
    the step is beyond the largest magnitude, that is decoded instead. Halves are rounded
    once more, by half a unit in their last place, and are no zero even so.

    Parameters
    ----------
    statistics : torch.Tensor, int64, [3]
        What ``statistics`` counted.
    error_bound : torch.Tensor, float64, []
        By how much a decoded value may differ.
    dtype : torch.dtype
        That of the values.

    Returns
    -------
    torch.Tensor, float32, [3]
        Step, inverse and largest; step and inverse are zero where the bound is below
        the precision of the values.
    """
    limits = torch.finfo(torch.float32)
    largest = statistics[0].int().view(torch.float32).double().clamp(min=limits.tiny)
    slack = largest * 2.0**-22
    if dtype is not torch.float32:
        half = torch.finfo(dtype)
        slack = slack + largest.clamp(min=half.tiny) * (half.eps / 2)
    bound = error_bound.clamp(max=_LARGEST_STEP)
    step = (bound - slack).float().double()
    # Beyond twice the slack |q| is below 2**22.
    coded = (bound >= 2 * slack) & (step >= limits.tiny)
    scale = torch.stack([step, 0.5 / step, largest])
    scale[:2] = torch.where(coded, scale[:2], 0.0)
    return scale.float()


def statistics(x: Tensor) -> Tensor:
    """Count what must be known before values are quantised.

    Parameters
    ----------
    x : torch.Tensor, [values]
        Floats.

    Returns
    -------
    torch.Tensor, int64, [3]
        The bits of the largest magnitude as a float32, in which infinity and NaN are
        beyond all numbers; how many values are not zero; how many are below zero.
    """
    total = torch.zeros(3, dtype=torch.int64, device=x.device)
    for part in x.split(SLICE):
        bits = _bits(part)
        # Minus zero as an integer is its own negative, and below zero: it is not counted.
        total[2] += bits.neg().gt(0).sum()
        magnitudes = bits.bitwise_and_(0x7FFFFFFF)
        total[1] += magnitudes.ne(0).sum()
        total[0] = torch.maximum(total[0], magnitudes.max())
    return total


def sizes(x: Tensor, scale: Tensor, statistics: Tensor) -> Tensor:
    """Count the words that the two forms would take.

    Parameters
    ----------
    x : torch.Tensor, [values]
        Floats.
    scale : torch.Tensor, float32, [3]
        How values are quantised; zeros are returned where they cannot be.
    statistics : torch.Tensor, int64, [3]
        What was counted.

    Returns
    -------
    torch.Tensor, int64, [3]
        The number of words of the sparse form, of the dense form, and of its bases.
    """
    total = torch.zeros(3, dtype=torch.int64, device=x.device)
    if not scale[0] > 0:
        return total
    for _, codes in _sparse_blocks(x, scale, statistics):
        total[0] += widths_of(codes).sum()
    for codes, bases in _dense_blocks(x, scale, statistics):
        total[1] += widths_of(codes).sum()
        total[2] += widths_of(bases).sum()
    return total


def pack_sparse(
    x: Tensor, scale: Tensor, statistics: Tensor, nonzeros: int, words: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the sparse form.

    Parameters
    ----------
    x : torch.Tensor, [values]
        Floats.
    scale : torch.Tensor, float32, [3]
        How values are quantised.
    statistics : torch.Tensor, int64, [3]
        What was counted.
    nonzeros, words : int
        How many values are not zero, and the words of their codes.

    Returns
    -------
    mask : torch.Tensor, int32, [ceil(values / 32)]
        Which values are not zero.
    words : torch.Tensor, int32, [words]
        Their codes.
    widths : torch.Tensor, uint8, [ceil(nonzeros / 32)]
        Widths of the blocks.
    """
    mask = Writer(x, -(-len(x) // LANES), torch.int32)
    codes = Packer(x, words, -(-nonzeros // LANES))
    for present, blocks in _sparse_blocks(x, scale, statistics):
        mask.write(mask_words(present))
        codes.write(blocks)
    return mask.done(), *codes.done()


def pack_dense(
    x: Tensor, scale: Tensor, statistics: Tensor, words: int, base_words: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make the dense form.

    Parameters
    ----------
    x : torch.Tensor, [values]
        Floats.
    scale : torch.Tensor, float32, [3]
        How values are quantised.
    statistics : torch.Tensor, int64, [3]
        What was counted.
    words, base_words : int
        The words of the codes and of the bases.

    Returns
    -------
    words : torch.Tensor, int32, [words]
        Codes.
    widths : torch.Tensor, uint8, [ceil(values / 32)]
        Widths of the blocks.
    base_words : torch.Tensor, int32, [base_words]
        Bases.
    base_widths : torch.Tensor, uint8, [ceil(values / 1024)]
        Widths of the blocks of bases.
    """
    blocks = -(-len(x) // LANES)
    codes = Packer(x, words, blocks)
    bases = Packer(x, base_words, -(-blocks // LANES))
    for some_codes, some_bases in _dense_blocks(x, scale, statistics):
        codes.write(some_codes)
        bases.write(some_bases)
    return *codes.done(), *bases.done()


def unpack_sparse(
    mask: Tensor,
    words: Tensor,
    widths: Tensor,
    step: float,
    largest: float,
    negative: bool,
    out: Tensor,
) -> Tensor:
    """Decode the sparse form.

    Parameters
    ----------
    mask, words, widths : torch.Tensor
        What ``pack_sparse`` made.
    step, largest : float
        How values were quantised.
    negative : bool
        Whether there are values below zero.
    out : torch.Tensor, [values]
        Where the values go.

    Returns
    -------
    torch.Tensor, [values]
        The values.
    """
    starts = starts_of(widths)
    first = 0
    for part, bits in zip(out.split(SLICE), mask.split(SLICE // LANES), strict=True):
        present = mask_bits(bits)[: len(part)]
        last = first + int(present.sum())
        # Blocks at either end may go on in another slice.
        some = slice(first // LANES, -(-last // LANES))
        codes = unpacked(words, widths, starts, some)
        codes = codes.flatten()[first % LANES :][: last - first]
        q = (codes >> 1) + 1 if negative else codes + 1
        if negative:
            q *= 1 - 2 * (codes & 1)
        part.copy_(expanded(_dequantised(q, step, largest), present))
        first = last
    return out


def unpack_dense(
    words: Tensor,
    widths: Tensor,
    base_words: Tensor,
    base_widths: Tensor,
    step: float,
    largest: float,
    full: bool,
    out: Tensor,
) -> Tensor:
    """Decode the dense form.

    Parameters
    ----------
    words, widths, base_words, base_widths : torch.Tensor
        What ``pack_dense`` made.
    step, largest : float
        How values were quantised.
    full : bool
        Whether no value is zero.
    out : torch.Tensor, [values]
        Where the values go.

    Returns
    -------
    torch.Tensor, [values]
        The values.
    """
    starts, base_starts = starts_of(widths), starts_of(base_widths)
    for number, part in enumerate(out.split(SLICE)):
        blocks = -(-len(part) // LANES)
        first = number * (SLICE // LANES)
        k = unpacked(words, widths, starts, slice(first, first + blocks))
        first //= LANES
        some = slice(first, first - (-blocks // LANES))
        zigzag = unpacked(base_words, base_widths, base_starts, some)
        bases = (zigzag >> 1) ^ -(zigzag & 1)
        k += bases.view(-1, 1)[:blocks]
        q = k.flatten()[: len(part)]
        if full:
            q += q >= 0
        part.copy_(_dequantised(q, step, largest))
    return out


def _bits(x: Tensor) -> Tensor:
    """Copy values as float32 numbers and return the bits of these."""
    return x.to(torch.float32, copy=True).view(torch.int32)


def _quantised(bits: Tensor, inverse: Tensor) -> Tensor:
    """Return |q| of values that are not zero."""
    magnitudes = bits.bitwise_and(0x7FFFFFFF).view(torch.float32)
    return magnitudes.mul_(inverse).ceil_().clamp_(min=1).int()


def _dequantised(q: Tensor, step: float, largest: float) -> Tensor:
    magnitudes = q.abs().mul_(2).sub_(1).float()
    # A product with a Python number would be one with a float64 in some places.
    magnitudes.mul_(torch.tensor(step, dtype=torch.float32, device=q.device))
    return magnitudes.clamp_(0, largest).mul_(q.sign())


def _sparse_blocks(
    x: Tensor, scale: Tensor, statistics: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield which values of a slice are not zero, and blocks that are complete then."""
    negative = bool(statistics[2] > 0)
    rest = torch.empty(0, dtype=torch.int32, device=x.device)
    parts = x.split(SLICE)
    for number, part in enumerate(parts):
        bits = _bits(part)
        present = bits.bitwise_and(0x7FFFFFFF).ne_(0).bool()
        codes = _quantised(bits, scale[1]).sub_(1)
        if negative:
            codes.mul_(2).sub_(bits >> 31)
        codes = torch.cat([rest, compacted(codes, present)])
        if number == len(parts) - 1:
            codes = torch.nn.functional.pad(codes, (0, -len(codes) % LANES))
        complete = len(codes) // LANES * LANES
        rest = codes[complete:]
        yield present, codes[:complete].view(-1, LANES)


def _dense_blocks(
    x: Tensor, scale: Tensor, statistics: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of codes of a slice, and blocks of their bases."""
    full = bool(statistics[1] == len(x))
    for part in x.split(SLICE):
        bits = _bits(part)
        sign = bits >> 31
        k = _quantised(bits, scale[1]).bitwise_xor_(sign).sub_(sign)
        if full:
            k.sub_(sign.add_(1))
        else:
            k.mul_(bits.bitwise_and_(0x7FFFFFFF).ne_(0))
        missing = -len(k) % LANES
        if missing:
            k = torch.cat([k, k[-1:].expand(missing)])
        codes = k.view(-1, LANES)
        bases = codes.amin(1)
        codes -= bases[:, None]
        if missing:
            codes[-1, -missing:] = 0
        zigzag = (bases << 1) ^ (bases >> 31)
        zigzag = torch.nn.functional.pad(zigzag, (0, -len(zigzag) % LANES))
        yield codes, zigzag.view(-1, LANES)
