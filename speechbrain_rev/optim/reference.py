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
from collections.abc import Iterator, Sequence

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


def quantise(
    x: torch.Tensor, *, block_size: int, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store values as 8-bit codes and a scale for each block.

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
    tree = map_of(signed, x.device)
    codes, absmax = _encode(flat, tree, block_size)
    return codes.view(x.shape), absmax


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
    flat = codes.reshape(-1)
    blocks = _blocks(flat, block_size)
    if absmax.shape != blocks.shape[:1]:
        raise ValueError(
            f"absmax has shape {list(absmax.shape)}, but {codes.numel()} codes in blocks "
            f"of {block_size} need [{len(blocks)}]. Give codes and block_size of one call "
            f"of quantise."
        )
    x = _decode(flat, absmax, map_of(signed, codes.device), block_size)
    return x.view(codes.shape)


def clear_unless_finite(healthy: Tensor, table: TensorTable) -> None:
    """Clear a flag, [1], unless the squares of all gradients are finite."""
    if healthy.is_meta:
        return
    gradients = [g for g in table.gradients if g is not None]
    largest = torch.nn.utils.get_total_norm(gradients, math.inf)
    healthy.mul_(largest.square().isfinite())


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
        [2, tensors + 1], float64: one minus each beta to the power of the steps, for rules
        that correct the bias of their moments.
    maps : sequence of Map
        Of each moment.
    """
    if healthy.is_meta or not healthy:
        return
    block = packed.block or 0
    for tensors, part in _pieces(table, packed):
        trained = [t for t in tensors if table.gradients[t] is not None]
        weights = [table.weights[t] for t in trained]
        weight = _joined(weights)[part]
        gradient = _joined([table.gradients[t] for t in trained])[part]
        size = part.stop - part.start
        place = table.starts[tensors[0]] - table.starts[packed.first] + part.start
        moments = stored = [moment[place:][:size] for moment in packed.moments]
        scales = packed.scales
        # Shared blocks without a trained value keep their bits.
        own: slice | Tensor = slice(None)
        blocks, written = own, own
        if block:
            first = packed.first_blocks[tensors[0] - packed.first] + part.start // block
            scales = [scale[first:][: -(-size // block)] for scale in scales]
            rows = zip(stored, scales, maps, strict=True)
            moments = [_decode(*row, block) for row in rows]
            if len(trained) < len(tensors):
                own = _of_values(table.active, tensors, table).bool()
                blocks = any_trained = _blocks(own, block).any(dim=1)
                written = any_trained.repeat_interleave(block)[:size]
        now = [moment[own] for moment in moments]
        given = () if corrections is None else corrections
        of_values = [_of_values(correction, trained, table) for correction in given]
        _compute(rule, weight, gradient, now, of_values)
        if len(weights) > 1 or not weights[0].is_contiguous():
            parts = weight.split([w.numel() for w in weights])
            for w, new in zip(weights, parts, strict=True):
                w.copy_(new.view_as(w))
        for i, (codes, absmax) in enumerate(zip(stored, scales, strict=False)):
            if isinstance(own, Tensor):
                moments[i][own] = now[i]
            new_codes, new_absmax = _encode(moments[i], maps[i], block)
            # Adam divides by the root of second moments. Where one is lost, eps alone
            # divides, and the next step is many times too long.
            new_codes.clamp_(min=i)
            codes[written] = new_codes[written]
            absmax[blocks] = new_absmax[blocks]


def _compute(
    rule: UpdateRule,
    weight: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    corrections: Sequence[Tensor],
) -> None:
    """Take a step of values, [values], and of their moments."""
    lr, decay, keep, beta1, beta2, less1, less2, eps = scalars(rule)
    first = moments[0]
    if decay and rule.decoupled:
        weight.mul_(keep)
    elif decay:
        gradient = gradient + weight * decay
    if rule.kind == "adam":
        second, (correction1, correction2) = moments[1], corrections
        first.mul_(beta1).add_(gradient * less1)
        second.mul_(beta2).add_((gradient * gradient).mul_(less2))
        root = _root(second).div_(_root(correction2)).add_(eps)
        rate = torch.full_like(correction1, lr).div_(correction1)
        change = torch.div(first, root, out=root).mul_(rate)
    elif rule.kind == "momentum":
        first.mul_(beta1).add_(gradient)
        change = (gradient + first * beta1 if rule.nesterov else first) * lr
    elif rule.kind == "lion":
        change = (first * beta1 + gradient * less1).sign().mul_(lr)
        first.mul_(beta2).add_(gradient * less2)
    else:
        raise AssertionError(rule.kind)
    weight.sub_(change)


def _root(x: Tensor) -> Tensor:
    """Take the nearest float to each root, as a GPU does; torch's on a CPU is another."""
    if x.device.type != "cpu":
        return x.sqrt()
    return torch.as_tensor(np.sqrt(x.numpy()), dtype=torch.float32)


def _pieces(table: TensorTable, packed: Packed) -> Iterator[tuple[range, slice]]:
    """Cut what is trained into whole blocks: of some tensors, or of part of a large one."""
    starts, first = table.starts, packed.first
    for t in range(packed.first, packed.last):
        size = starts[t + 1] - starts[first]
        if t + 1 < packed.last and (
            packed.shared
            or (
                size % (packed.block or 1) == 0
                and starts[t + 2] - starts[first] <= _PIECE
                and (table.gradients[t] is None) == (table.gradients[t + 1] is None)
            )
        ):
            continue
        tensors, first = range(first, t + 1), t + 1
        if all(table.gradients[own] is None for own in tensors):
            continue
        whole = len(tensors) > 1 or not table.weights[t].is_contiguous()
        step = size if whole else _PIECE
        for low in range(0, size, step):
            yield tensors, slice(low, min(low + step, size))


def _joined(tensors: Sequence[Tensor | None]) -> Tensor:
    """Lay tensors one behind the other; a contiguous one alone is a view."""
    flat = [tensor.reshape(-1) for tensor in tensors if tensor is not None]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _of_values(
    of_tensors: Tensor, tensors: Sequence[int], table: TensorTable
) -> Tensor:
    """Give a float32 of each tensor to each of its values, or one if all are equal."""
    chosen = of_tensors[list(tensors)].float()
    if (chosen == chosen[0]).all():
        return chosen[0]
    sizes = [table.weights[t].numel() for t in tensors]
    return chosen.repeat_interleave(
        torch.tensor(sizes, device=chosen.device, dtype=torch.int64)
    )


def _blocks(flat: Tensor, block_size: int) -> Tensor:
    """Cut values into blocks, [blocks, block_size], the last filled up with zeros."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; a block has at least 1 value.")
    padding = -flat.numel() % block_size
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return flat.view(-1, block_size)


def _decode(codes: Tensor, absmax: Tensor, tree: Map, block_size: int) -> Tensor:
    """Read codes, [values], back as values, [values]."""
    values = tree.values.index_select(0, codes.int())
    return _blocks(values, block_size).mul_(absmax[:, None]).view(-1)[: len(codes)]


def _encode(x: Tensor, tree: Map, block_size: int) -> tuple[Tensor, Tensor]:
    """Store values, [values], as codes, [values], and scales, [blocks]."""
    blocks = _blocks(x, block_size)
    absmax = torch.linalg.vector_norm(blocks, math.inf, dim=1)
    absmax.masked_fill_(absmax.isinf(), math.nan)
    # Zeros may be divided by anything but zero.
    scales = absmax.masked_fill(absmax == 0, 1.0)
    normalised = (blocks / scales[:, None]).view(-1)[: len(x)]
    upper_bits = (normalised.view(torch.int32) >> 16).add_(2**15)
    lower = tree.lower.index_select(0, upper_bits)
    above = normalised > tree.midpoint.index_select(0, upper_bits)
    return lower.add_(above.view(torch.uint8)), absmax
