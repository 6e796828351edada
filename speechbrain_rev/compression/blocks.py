"""Bits of many numbers rearranged by plain torch, quickly on the CPU too.

Numbers are counted in bytes from the lowest on, as all machines do that torch runs on.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Values of a block.
LANES = 32


def compacted(values: Tensor, present: Tensor) -> Tensor:
    """Return the values that are present: several times faster than by a mask."""
    ranks = present.cumsum(0)
    out = values.new_empty(int(ranks[-1]) + 1)
    # Those that are not all go to the first place, in front of the others.
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
    if not len(codes):
        return torch.empty(0, dtype=torch.uint8, device=codes.device)
    # Codes have at most 24 bits, so that floats are exact and their exponents tell.
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
