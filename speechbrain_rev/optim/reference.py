"""8-bit states in plain torch: the specification, and what computes on a CPU.

The scheme is that of Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR
2022, which the memory-efficient speaker embedding paper uses (section IV, equations 13 to
15): values are cut into blocks in the order of their shape, each block is divided by its
largest magnitude, and each quotient is stored as the nearest of 256 values. The paper's
blocks have 2048 values, those of bitsandbytes 256. ``speechbrain_rev.kernels.optimizer``
has the same step for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speechbrain_rev.kernels.optimizer import (
    Map,
    Packed,
    TensorTable,
    UpdateRule,
    scalars,
)
from speechbrain_rev.optim.map import map_of

# Number of values for which temporaries are made at a time: they fit the cache of a CPU.
_PIECE = 2**18
# Those of bitsandbytes and of the paper.
BLOCK_SIZES = (256, 2048)


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
    blocks = _count_blocks(flat.numel(), block_size)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    absmax = flat.new_empty(blocks)
    for part, scale in _parts(flat.numel(), block_size):
        padded = _padded(flat[part], block_size)
        _write(padded, codes.view(-1)[part], absmax[scale], map_of(signed, x.device))
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
    flat, x = codes.reshape(-1), torch.empty(codes.shape, device=codes.device)
    values = map_of(signed, codes.device).values
    for part, scale in _parts(flat.numel(), block_size):
        read = _read(flat[part], absmax[scale], values, block_size)
        x.view(-1)[part] = read.view(-1)[: part.stop - part.start]
    return x


def moments_of(state: Mapping[str, Any], block_size: int) -> list[Tensor]:
    """Read the moments of a parameter's state, in float32.

    Parameters
    ----------
    state : mapping
        Of one parameter, in an optimizer with 8-bit states.
    block_size : int
        Values to a block.

    Returns
    -------
    list of Tensor
        [...], the shape of the parameter: one of SGD, two of Adam.

    Example
    -------
    >>> codes, absmax = quantise(torch.ones(3), block_size=256, signed=True)
    >>> moments_of({"state1": codes, "absmax1": absmax}, 256)
    [tensor([1., 1., 1.])]
    """
    moments = []
    for number in (1, 2):
        stored = state.get(f"state{number}")
        if stored is None:
            continue
        if stored.dtype is not torch.uint8:
            moments.append(stored.float())
            continue
        # Of shared blocks what lies before the parameter is left out.
        offset = state.get("offset", 0)
        codes = torch.nn.functional.pad(stored.reshape(-1), (offset, 0))
        scales = state[f"absmax{number}"]
        read = dequantise(codes, scales, block_size=block_size, signed=number == 1)
        moments.append(read[offset:].view(stored.shape))
    return moments


def clear_unless_finite(healthy: Tensor, table: TensorTable) -> None:
    """Clear a flag, [1], unless all gradients are finite."""
    gradients = [g for g in table.gradients if g is not None]
    largest = torch.nn.utils.get_total_norm(gradients, math.inf)
    healthy.mul_(largest.isfinite())


def update(
    table: TensorTable,
    packed: Packed,
    rule: UpdateRule,
    healthy: Tensor,
    corrections: Tensor | None,
    maps: Sequence[Map],
) -> None:
    """Take a step of some of the tensors, unless a flag is cleared.

    Parameters
    ----------
    table : TensorTable
        Weights and gradients.
    packed : Packed
        States of some of them.
    rule : UpdateRule
        What is computed.
    healthy : Tensor
        [1], zero if nothing is to be changed. It is read on the host.
    corrections : Tensor or None
        [2, tensors + 1], float64: one minus each beta to the power of the steps, of Adam.
    maps : sequence of Map
        Of each moment.
    """
    if not healthy:
        return
    lr, decay, keep, beta1, beta2, less1, less2, eps = scalars(rule)
    for spans in _pieces(table, packed):
        places, blocks = _extent(spans, table, packed)
        size = places.stop - places.start
        trained = [s for s in spans if table.gradients[s.tensor] is not None]
        weight = _gathered(table.weights, spans)
        gradient = _gathered(table.gradients, spans)
        moments = [
            _stored(packed, i, places, blocks, tree) for i, tree in enumerate(maps)
        ]
        before = [] if trained == spans else [m.clone() for m in moments]
        first, *seconds = (m.view(-1)[:size] for m in moments)
        if decay and rule.decoupled:
            weight.mul_(keep)
        elif decay:
            gradient = gradient + weight * decay
        if rule.adam:
            assert corrections is not None
            correction1, correction2 = (_of_values(c, spans) for c in corrections)
            first.mul_(beta1).add_(gradient * less1)
            seconds[0].mul_(beta2).add_((gradient * gradient).mul_(less2))
            root = _root(seconds[0]).div_(_root(correction2)).add_(eps)
            rate = torch.full_like(correction1, lr).div_(correction1)
            change = torch.div(first, root, out=root).mul_(rate)
        else:
            first.mul_(beta1).add_(gradient)
            change = (gradient + first * beta1 if rule.nesterov else first) * lr
        _scatter(weight.sub_(change), table.weights, spans, trained)
        still = None
        if before:
            still = _of_values(1 - table.active, spans).expand(size) > 0
            for old, new in zip(before, moments, strict=True):
                new.view(-1)[:size][still] = old.view(-1)[:size][still]
        for i, (moment, tree) in enumerate(zip(moments, maps, strict=True)):
            if packed.block is not None:
                codes, scales = packed.moments[i][places], packed.scales[i][blocks]
                _store(moment, codes, scales, tree, still)
                if i == 1:
                    # Adam divides by the root of second moments. Where one is lost,
                    # eps alone divides, and the next step is many times too long.
                    codes.clamp_(min=1)


def _root(x: Tensor) -> Tensor:
    """Take the nearest float to each root, as a GPU does; torch's on a CPU is another."""
    if x.device.type == "cuda":
        return x.sqrt()
    return torch.as_tensor(np.sqrt(x.numpy()))


class _Span(NamedTuple):
    """Elements of a tensor, in the order of its shape."""

    tensor: int
    begin: int
    end: int


def _pieces(table: TensorTable, packed: Packed) -> Iterator[list[_Span]]:
    """Cut what is trained into spans of whole blocks, one behind the other."""
    starts, spans = table.starts, list[_Span]()
    if packed.shared:
        base, total = starts[packed.first], starts[packed.last]
        for low in range(base, total, _PIECE):
            high = min(low + _PIECE, total)
            spans = [
                _Span(t, max(low - starts[t], 0), min(high, starts[t + 1]) - starts[t])
                for t in range(packed.first, packed.last)
                if starts[t] < high and starts[t + 1] > low
            ]
            if any(table.gradients[s.tensor] is not None for s in spans):
                yield spans
        return
    for t in range(packed.first, packed.last):
        size, gradient = starts[t + 1] - starts[t], table.gradients[t]
        if gradient is None or size >= _PIECE:
            if spans:
                yield spans
            spans = []
        if gradient is None:
            continue
        if size >= _PIECE and table.weights[t].is_contiguous():
            for low in range(0, size, _PIECE):
                yield [_Span(t, low, min(low + _PIECE, size))]
            continue
        spans.append(_Span(t, 0, size))
        values = sum(s.end for s in spans)
        if size % (packed.block or 1) or values >= _PIECE:
            yield spans
            spans = []
    if spans:
        yield spans


def _extent(
    spans: list[_Span], table: TensorTable, packed: Packed
) -> tuple[slice, slice]:
    """Give where the values of spans lie among those that are packed, and their blocks."""
    tensor, begin, _ = spans[0]
    place = table.starts[tensor] - table.starts[packed.first] + begin
    size = sum(s.end - s.begin for s in spans)
    if packed.block is None:
        return slice(place, place + size), slice(0, 0)
    block = place // packed.block
    if not packed.shared:
        block = packed.first_blocks[tensor - packed.first] + begin // packed.block
    count = _count_blocks(size, packed.block)
    return slice(place, place + size), slice(block, block + count)


def _gathered(tensors: Sequence[Tensor | None], spans: list[_Span]) -> Tensor:
    """Lay elements one behind the other; those of one contiguous tensor are a view."""
    parts = []
    for tensor, begin, end in spans:
        x = tensors[tensor]
        flat = torch.zeros(end) if x is None else x.detach().reshape(-1)
        parts.append(flat[begin:end])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scatter(
    flat: Tensor, weights: list[Tensor], spans: list[_Span], trained: list[_Span]
) -> None:
    """Write values to where they were gathered from."""
    parts = flat.split([s.end - s.begin for s in spans])
    for span, part in zip(spans, parts, strict=True):
        weight = weights[span.tensor].detach()
        if span not in trained or part.data_ptr() == weight.data_ptr():
            continue
        ordered = weight.contiguous().view(-1)
        ordered[span.begin : span.end] = part
        if not weight.is_contiguous():
            weight.copy_(ordered.view_as(weight))


def _stored(
    packed: Packed, number: int, places: slice, blocks: slice, tree: Map
) -> Tensor:
    """Read a moment, [blocks, block], the last one filled up with zeros."""
    moment = packed.moments[number][places]
    if packed.block is None:
        return moment
    scales = packed.scales[number][blocks]
    return _read(moment, scales, tree.values, packed.block)


def _of_values(of_tensors: Tensor, spans: list[_Span]) -> Tensor:
    """Give a float32 of each tensor to each of its values, or one if all are equal."""
    index = torch.tensor([s.tensor for s in spans], device=of_tensors.device)
    chosen = of_tensors[index].float()
    if (chosen == chosen[0]).all():
        return chosen[0]
    sizes = torch.tensor([s.end - s.begin for s in spans], device=chosen.device)
    return chosen.repeat_interleave(sizes)


def _store(
    x: Tensor, codes: Tensor, absmax: Tensor, tree: Map, still: Tensor | None
) -> None:
    """Write a moment, but for blocks of which nothing is trained: they keep their bits."""
    if still is None:
        _write(x, codes, absmax, tree)
        return
    new_codes, new_absmax = torch.empty_like(codes), torch.empty_like(absmax)
    _write(x, new_codes, new_absmax, tree)
    width = x.shape[1]
    trained = _padded(~still, width).any(dim=1)
    absmax.copy_(torch.where(trained, new_absmax, absmax))
    values = trained.repeat_interleave(width)[: codes.numel()]
    codes.copy_(torch.where(values, new_codes, codes))


def _parts(values: int, block_size: int) -> Iterator[tuple[slice, slice]]:
    """Cut values into slices of some whole blocks each, beside those of their scales."""
    step = max(1, _PIECE // block_size)
    blocks = _count_blocks(values, block_size)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        end = min(last * block_size, values)
        yield slice(first * block_size, end), slice(first, last)


def _padded(flat: Tensor, block_size: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(
        -1, block_size
    )


def _read(codes: Tensor, scales: Tensor, values: Tensor, block_size: int) -> Tensor:
    """Read values back, [blocks, block_size]."""
    x = scales.new_zeros(scales.numel() * block_size)
    torch.index_select(values, 0, codes.int(), out=x[: codes.numel()])
    return x.view(-1, block_size).mul_(scales[:, None])


def _write(x: Tensor, codes: Tensor, absmax: Tensor, tree: Map) -> None:
    """Store values, [blocks, block_size], as codes and scales."""
    torch.linalg.vector_norm(x, math.inf, dim=1, out=absmax)
    absmax.masked_fill_(absmax.isinf(), math.nan)
    # Zeros may be divided by anything but zero.
    scales = absmax.masked_fill(absmax == 0, 1.0)
    normalised = (x / scales[:, None]).view(-1)[: codes.numel()]
    upper_bits = (normalised.view(torch.int32) >> 16).add_(2**15)
    lower = tree.lower.index_select(0, upper_bits)
    above = normalised > tree.midpoint.index_select(0, upper_bits)
    torch.add(lower, above.view(torch.uint8), out=codes)


def _count_blocks(values: int, block_size: int) -> int:
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; a block has at least 1 value.")
    return -(-values // block_size)
