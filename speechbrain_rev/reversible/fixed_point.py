"""Fixed-point arithmetic of the exact streams in plain torch.

This is the specification and what runs on the CPU; ``speechbrain_rev.kernels`` has the
same functions in one pass over memory each. ``largest`` is float32, [2]: the largest
magnitudes up to now of what was added and of what resulted, NaN once there was a NaN,
or None where nothing is to be noted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from speechbrain_rev.kernels.fixed_point import format_of

_HALVES = (torch.float16, torch.bfloat16)
_PARTS = 8


def encode(x: Tensor, steps: float, largest: Tensor | None) -> Tensor:
    """Round floats to the nearest step, halves to the even one.

    Parameters
    ----------
    x : torch.Tensor
        Floats.
    steps : float
        Steps from 0 to 1, a power of two.
    largest : torch.Tensor, [2], or None
        Notes.

    Returns
    -------
    torch.Tensor, int32
        Dense: channels last if x is, else contiguous.
    """
    value = _rounded(x, steps, largest, x, format_of(x))
    _note(largest, 1, value, steps)
    return value


def decode(
    value: Tensor, steps: float, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """Turn steps into floats.

    Parameters
    ----------
    value : torch.Tensor, int32
        Steps.
    steps : float
        Steps from 0 to 1.
    dtype : torch.dtype
        Of the floats: float32 or float64.
    out : torch.Tensor or None
        Where they go, in any layout; None for a new tensor.

    Returns
    -------
    torch.Tensor
        The floats, in the value's layout if they are new.
    """
    floats = torch.empty_like(value, dtype=dtype) if out is None else out
    if floats.dtype is torch.float32:
        # An integer times a number is at least float32: one pass over memory.
        return torch.mul(value, 1 / steps, out=floats)
    return floats.copy_(value).mul_(1 / steps)


def add(
    value: Tensor,
    f: Tensor,
    steps: float,
    largest: Tensor | None,
    out: Tensor | None,
    reuse: bool = False,
) -> Tensor:
    """Add a rounded residual.

    Parameters
    ----------
    value : torch.Tensor, int32
        Steps.
    f : torch.Tensor
        Floats of the value's shape, in any layout.
    steps : float
        Steps from 0 to 1.
    largest : torch.Tensor, [2], or None
        Notes.
    out : torch.Tensor or None
        Where the sum goes, which may be the value itself; None for a new tensor.
    reuse : bool
        Whether f may be written to, which saves a tensor where it has the value's
        layout.

    Returns
    -------
    torch.Tensor, int32
        The sum, in the value's layout if it is new.
    """
    if out is None or f.dtype not in _HALVES:
        return _add(value, f, steps, largest, out, reuse)
    for part in _parts(value, f, out):
        _add(part[0], part[1], steps, largest, part[2], reuse)
    return out


def subtract(
    value: Tensor, f: Tensor, steps: float, out: Tensor | None, reuse: bool = False
) -> Tensor:
    """Subtract a rounded residual: the exact inverse of ``add``.

    Parameters
    ----------
    value, f, steps, out, reuse
        As for ``add``.

    Returns
    -------
    torch.Tensor, int32
        The difference.
    """
    if out is None or f.dtype not in _HALVES:
        return _subtract(value, f, steps, out, reuse)
    for part in _parts(value, f, out):
        _subtract(part[0], part[1], steps, part[2], reuse)
    return out


def _add(
    value: Tensor,
    f: Tensor,
    steps: float,
    largest: Tensor | None,
    out: Tensor | None,
    reuse: bool,
) -> Tensor:
    rounded = _rounded(f, steps, largest, value, reuse=reuse)
    total = torch.add(value, rounded, out=rounded if out is None else out)
    _note(largest, 1, total, steps)
    return total


def _subtract(
    value: Tensor, f: Tensor, steps: float, out: Tensor | None, reuse: bool
) -> Tensor:
    rounded = _rounded(f, steps, None, value, reuse=reuse)
    return torch.sub(value, rounded, out=rounded if out is None else out)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors along their first axis: what halves are widened to is then small."""
    size = max(1, len(tensors[0]) // _PARTS) if tensors[0].dim() else 1
    return zip(*(x.split(size) if x.dim() else [x] for x in tensors), strict=True)


def _rounded(
    x: Tensor,
    steps: float,
    largest: Tensor | None,
    like: Tensor,
    memory_format: torch.memory_format = torch.preserve_format,
    *,
    reuse: bool = False,
) -> Tensor:
    """Round floats; the steps are laid out like another tensor of their shape."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if reuse and x.dtype is torch.float32 and x.stride() == like.stride():
        scaled = x.detach().mul_(steps)
    else:
        scaled = torch.empty_like(like, dtype=wide, memory_format=memory_format)
        if x.dtype is wide:
            torch.mul(x.detach(), steps, out=scaled)
        else:
            scaled.copy_(x.detach()).mul_(steps)
    scaled.round_()
    _note(largest, 0, scaled, steps)
    if wide is torch.float32:
        # Element by element in the same place: one tensor less at the peak.
        return scaled.view(torch.int32).copy_(scaled)
    return scaled.to(torch.int32)


def _note(largest: Tensor | None, place: int, x: Tensor, steps: float) -> None:
    """Note the largest magnitude of a tensor; NaN if there is a NaN."""
    if largest is None or x.numel() == 0:
        return
    if format_of(x) is torch.channels_last:
        # Torch would copy it first.
        x = x.permute(0, 2, 3, 1)
    low, high = torch.aminmax(x)
    # No zero may keep its sign: a kernel compares the bits of what is here.
    magnitude = torch.maximum(low.float().abs(), high.float().abs()) / steps
    torch.maximum(largest[place], magnitude, out=largest[place])
