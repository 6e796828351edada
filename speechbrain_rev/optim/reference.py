"""Block-wise quantisation to 8 bits in plain torch: the specification.

It is the scheme of Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR
2022, that the memory-efficient speaker embedding paper uses (section IV, equations 13 to
15): values are cut into blocks in the order of their shape, each block is divided by its
largest magnitude, and each quotient is stored as the nearest of 256 values. The paper's
blocks have 2048 values, those of bitsandbytes 256.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

# Number of values for which temporaries are made at a time: they fit the cache of a CPU.
_PIECE = 2**19
# That of bitsandbytes, on every device.
BLOCK_SIZE = 256


def dynamic_tree(*, signed: bool) -> torch.Tensor:
    """Return the values that the 256 codes stand for.

    The bits of a code are a sign, where there is one, then e zeros, a one, and f further
    bits. They stand for 10^-e times the middle of one of 2^f even intervals of [0.1, 1]:
    the smaller the value, the fewer bits locate it. Zeros alone are 0, and the
    one pattern without a use (minus zero; without a sign, zeros and a last one) is 1.

    Parameters
    ----------
    signed : bool
        With a sign, for momentum and the first moment of Adam, or without, for the
        second moment.

    Returns
    -------
    torch.Tensor, [256], float32
        In ascending order: codes are numbered by their values.

    Notes
    -----
    The arithmetic is float32, in the order in which bitsandbytes does it, so that both
    have the same bits.

    Example
    -------
    >>> dynamic_tree(signed=True)[[0, 126, 127, 128, 255]]
    tensor([-9.9297e-01, -5.5000e-07,  0.0000e+00,  5.5000e-07,  1.0000e+00])
    >>> dynamic_tree(signed=False)[[0, 1, 255]]
    tensor([0.0000e+00, 3.2500e-07, 1.0000e+00])
    """
    values = [torch.tensor([0.0, 1.0], device="cpu")]
    for zeros in range(7):
        intervals = 2 ** ((6 if signed else 7) - zeros)
        edges = torch.linspace(0.1, 1, intervals + 1, dtype=torch.float32, device="cpu")
        middles = 10**-zeros * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def quantise(
    x: torch.Tensor, *, block_size: int, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store values as codes of 8 bits and a scale for each block.

    Parameters
    ----------
    x : torch.Tensor, [...], of a floating-point type
        The values; taken as float32 and in the order of the shape, whatever the strides.
    block_size : int
        Values to a block, at least 1. The last block holds what is left.
    signed : bool
        Which values the codes stand for, see :func:`dynamic_tree`.

    Returns
    -------
    codes : torch.Tensor, the shape of x, uint8
        Of each value over its block's largest magnitude, the nearest code; midway
        between two, the lower one.
    absmax : torch.Tensor, [blocks], float32
        The largest magnitude in each block. NaN where a value of the block is not
        finite, so that the whole block is read back as NaN; 0 where all are zero, which
        are read back as exactly that.

    Raises
    ------
    ValueError
        If x is not of a floating-point type, if block_size is below 1, or if values are
        negative and codes have no sign.

    Example
    -------
    >>> codes, absmax = quantise(
    ...     torch.tensor([1.0, 0.0, -4.0, 2.0, 8.0]), block_size=4, signed=True
    ... )
    >>> codes
    tensor([201, 127,   0, 219, 255], dtype=torch.uint8)
    >>> absmax
    tensor([4., 8.])
    """
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; give a tensor of a floating-point type.")
    flat = x.detach().reshape(-1).float()
    if not signed and flat.numel() and flat.min() < 0:
        raise ValueError(
            f"x holds {flat.min():g}, but codes without a sign start at 0. Give signed="
            f"True, or values that are not negative."
        )
    absmax = block_maxima(flat, block_size=block_size)
    absmax.masked_fill_(absmax.isinf(), math.nan)
    # Zeros may be divided by anything but zero.
    scales = absmax.masked_fill(absmax == 0, 1.0)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    lookup = _lookup(signed, x.device)
    for values, scale, out in _pieces(flat, scales, codes.view(-1), block_size):
        normalised = (values / scale).view(-1)
        upper_bits = (normalised.view(torch.int32) >> 16).add_(2**15)
        lower = lookup.lower.index_select(0, upper_bits)
        above = normalised > lookup.midpoint.index_select(0, upper_bits)
        torch.add(lower, above.view(torch.uint8), out=out)
    return codes, absmax


def dequantise(
    codes: torch.Tensor, absmax: torch.Tensor, *, block_size: int, signed: bool
) -> torch.Tensor:
    """Read values back: each code's value times the largest magnitude of its block.

    Parameters
    ----------
    codes : torch.Tensor, [...], uint8
        As :func:`quantise` gives them.
    absmax : torch.Tensor, [blocks], float32
        As :func:`quantise` gives it.
    block_size : int
        As it was given to :func:`quantise`.
    signed : bool
        As it was given to :func:`quantise`.

    Returns
    -------
    torch.Tensor, the shape of codes, float32
        Off by at most half the distance between two neighbouring codes, which is at
        most 0.0071 of a block's largest magnitude with a sign and 0.0036 without.

    Raises
    ------
    ValueError
        If codes are not uint8, if block_size is below 1, or if absmax does not hold one
        value for each block.

    Example
    -------
    >>> x = torch.tensor([1.0, 0.0, -4.0, 2.0, 8.0])
    >>> codes, absmax = quantise(x, block_size=4, signed=True)
    >>> dequantise(codes, absmax, block_size=4, signed=True)
    tensor([ 0.9906,  0.0000, -3.9719,  2.0031,  8.0000])
    """
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}; give those of quantise, uint8.")
    blocks = _count_blocks(codes.numel(), block_size)
    if absmax.shape != (blocks,):
        raise ValueError(
            f"absmax has shape {list(absmax.shape)}, but {codes.numel()} codes in blocks "
            f"of {block_size} need [{blocks}]. Give codes and block_size of one call of "
            f"quantise."
        )
    values = _lookup(signed, codes.device).values
    flat = codes.reshape(-1)
    x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for part, scale, out in _pieces(flat, absmax, x.view(-1), block_size):
        torch.index_select(values, 0, part.reshape(-1).int(), out=out)
        out.view_as(part).mul_(scale)
    return x


def block_maxima(x: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """Return the largest magnitude in each block.

    Parameters
    ----------
    x : torch.Tensor, [...]
        The values, in the order of the shape.
    block_size : int
        Values to a block, at least 1. The last block holds what is left.

    Returns
    -------
    torch.Tensor, [blocks]
        NaN where a block holds one, else inf where it holds one. Nothing waits for
        the device.

    Raises
    ------
    ValueError
        If block_size is below 1.

    Example
    -------
    >>> block_maxima(torch.tensor([1.0, -3.0, 2.0]), block_size=2)
    tensor([3., 2.])
    """
    flat = x.reshape(-1)
    absmax = torch.empty(
        _count_blocks(flat.numel(), block_size), dtype=x.dtype, device=x.device
    )
    whole = flat.numel() // block_size
    for blocks, out in (
        (flat[: whole * block_size].view(whole, block_size), absmax[:whole]),
        (flat[whole * block_size :].view(1, -1), absmax[whole:]),
    ):
        if out.numel():
            torch.linalg.vector_norm(blocks, math.inf, dim=1, out=out)
    return absmax


def read_moments(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the moments that a state of the library stands for, in float32.

    Example
    -------
    >>> read_moments(write_moments([torch.tensor([-1.0, 0.0, 2.0])]))
    [tensor([-1.0016,  0.0000,  2.0000])]
    """
    return [
        dequantise(
            state[f"state{number}"],
            state[f"absmax{number}"],
            block_size=BLOCK_SIZE,
            signed=number == 1,
        )
        if state[f"state{number}"].dtype == torch.uint8
        else state[f"state{number}"]
        for number in (1, 2)
        if f"state{number}" in state
    ]


def write_moments(moments: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantise moments as the library stores them, but no second one as zero.

    Example
    -------
    >>> state = write_moments(torch.ones(2, 1000))
    >>> {name: list(tensor.shape) for name, tensor in state.items()}
    {'state1': [1000], 'absmax1': [4], 'state2': [1000], 'absmax2': [4]}
    """
    state: dict[str, torch.Tensor] = {}
    for number, moment in enumerate(moments, 1):
        codes, absmax = quantise(moment, block_size=BLOCK_SIZE, signed=number == 1)
        state |= {f"state{number}": codes, f"absmax{number}": absmax}
    raise_second(state)
    return state


def raise_second(state: Mapping[str, Any]) -> None:
    """Give second moments that were stored as zero the least value above zero.

    Adam divides by their root. Where one is lost, eps alone divides the first moment, and
    the next step is many times too long.
    """
    second = state.get("state2")
    if second is not None and second.dtype == torch.uint8:
        second.clamp_(min=1)


def _count_blocks(values: int, block_size: int) -> int:
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; a block has at least 1 value.")
    return -(-values // block_size)


def _pieces(
    flat: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, block_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield views of some whole blocks each, the shorter last block on its own.

    Shapes: [blocks, block_size], [blocks, 1] and [blocks * block_size].
    """
    whole = flat.numel() // block_size
    cuts = [*range(0, whole, max(1, _PIECE // block_size)), whole, absmax.numel()]
    for start, stop in itertools.pairwise(cuts):
        if start < stop:
            inside = slice(start * block_size, stop * block_size)
            blocks = flat[inside].view(stop - start, -1)
            yield blocks, absmax[start:stop, None], out[inside]


class _Lookup(NamedTuple):
    """The nearest code, by the upper 16 of a float32's 32 bits as a signed number.

    Floats that share those bits lie so close together that at most one midpoint between
    codes is among them: one comparison decides.
    """

    values: torch.Tensor  # [256], what the codes stand for
    lower: torch.Tensor  # [65536], the code below the midpoint
    midpoint: torch.Tensor  # [65536], infinite where there is none


@functools.cache
def _lookup(signed: bool, device: torch.device) -> _Lookup:
    values = dynamic_tree(signed=signed)
    exact = (values[:-1].double() + values[1:].double()) / 2
    # The largest float32 that is not above the exact midpoint has the floats above the
    # midpoint above it too.
    midpoints = exact.float()
    below = midpoints.nextafter(torch.tensor(-math.inf, device="cpu"))
    midpoints = torch.where(midpoints.double() > exact, below, midpoints)
    first = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu") * 2**16
    limits = torch.stack([first, first + (2**16 - 1)]).view(torch.float32)
    lower, upper = torch.bucketize(limits.sort(dim=0).values, midpoints)
    midpoint = midpoints[lower.clamp(max=254)].masked_fill(lower == upper, math.inf)
    tables = values, lower.to(torch.uint8), midpoint
    return _Lookup(*(table.to(device) for table in tables))
