"""Fixed-point arithmetic of the exact streams in plain torch.

This is the specification and what runs on the CPU; ``speechbrain_rev.kernels`` has the
same functions in one pass over memory each. ``largest`` is float32, [2]: the largest
magnitudes up to now of what was added and of what resulted, NaN once there was a NaN,
or None where nothing is to be noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from speechbrain_rev.kernels.fixed_point import format_of, is_dense
from speechbrain_rev.torch_private import is_fake

_HALVES = (torch.float16, torch.bfloat16)
_PARTS = 8
#: Elements of the parts that are worked on from the first pass to the last: 128 KB each.
_CACHED = 2**15


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
    x, wide = x.detach(), torch.promote_types(x.dtype, torch.float32)
    scaled = torch.empty_like(x, dtype=wide, memory_format=format_of(x))
    _scale(x, steps, scaled)
    _note(largest, 0, _extremes(scaled), steps)
    value = _place_of_steps(scaled).copy_(scaled)
    _note(largest, 1, _extremes(value), steps)
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
        # One pass over memory, in float32 whatever torch's default dtype is.
        step = torch.tensor(1 / steps, dtype=torch.float32, device="cpu")
        return torch.mul(value, step, out=floats)
    return floats.copy_(value).mul_(1 / steps)


def add(
    value: Tensor,
    residuals: Sequence[Tensor],
    steps: float,
    largest: Tensor | None,
    out: Tensor | None,
    floats: Tensor | None = None,
    reuse: bool = False,
) -> Tensor:
    """Add rounded residuals, one after the other.

    Parameters
    ----------
    value : torch.Tensor, int32
        Steps.
    residuals : sequence of torch.Tensor
        Floats of the value's shape, in any layout; at most ``kernels.AT_ONCE``.
    steps : float
        Steps from 0 to 1.
    largest : torch.Tensor, [2], or None
        Notes.
    out : torch.Tensor or None
        Where the sum goes, which may be the value itself; None for a new tensor.
    floats : torch.Tensor, float32, or None
        Where the sum goes as floats too, in the value's layout.
    reuse : bool
        Whether residuals may be written to, which saves a tensor where they have the
        value's layout.

    Returns
    -------
    torch.Tensor, int32
        The sum, in the value's layout if it is new.
    """
    for f in residuals:
        if out is None or f.dtype not in _HALVES:
            value = out = _add(value, f, steps, largest, out, reuse)
            continue
        for part in _parts(value, f, out):
            _add(part[0], part[1], steps, largest, part[2], reuse)
        value = out
    if floats is not None:
        decode(value, steps, floats.dtype, floats)
    return value


def subtract(
    value: Tensor, f: Tensor, steps: float, out: Tensor | None, reuse: bool = False
) -> Tensor:
    """Subtract a rounded residual: the exact inverse of ``add``.

    Parameters
    ----------
    value, steps, out, reuse
        As for ``add``.
    f : torch.Tensor
        One of the residuals that were added.

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
    return _changed(torch.add, value, f, steps, largest, out, reuse)


def _subtract(
    value: Tensor, f: Tensor, steps: float, out: Tensor | None, reuse: bool
) -> Tensor:
    return _changed(torch.sub, value, f, steps, None, out, reuse)


def _changed(
    change: Callable[..., Tensor],
    value: Tensor,
    f: Tensor,
    steps: float,
    largest: Tensor | None,
    out: Tensor | None,
    reuse: bool,
) -> Tensor:
    """Add or subtract a rounded residual."""
    f, wide = f.detach(), torch.promote_types(f.dtype, torch.float32)
    own = reuse and f.dtype is torch.float32 and f.stride() == value.stride()
    scaled = f if own else torch.empty_like(value, dtype=wide)
    rounded = _place_of_steps(scaled)
    total = rounded if out is None else out
    notes: tuple[list[Tensor], list[Tensor]] = ([], [])
    for old, x, floats, numbers, new in _in_cache(value, f, scaled, rounded, total):
        _scale(x, steps, floats)
        if largest is not None:
            notes[0].extend(_extremes(floats))
        change(old, numbers.copy_(floats), out=new)
        if largest is not None:
            notes[1].extend(_extremes(new))
    for place, extremes in enumerate(notes):
        _note(largest, place, extremes, steps)
    return total


def _scale(x: Tensor, steps: float, out: Tensor) -> None:
    """Turn floats into whole numbers of steps, halves to the even one."""
    if x.dtype is out.dtype:
        torch.mul(x, steps, out=out)
    else:
        out.copy_(x).mul_(steps)
    out.round_()


def _place_of_steps(scaled: Tensor) -> Tensor:
    """Where numbers of steps go: element by element to the same place, if it is as wide."""
    if scaled.dtype is torch.float32:
        return scaled.view(torch.int32)
    return torch.empty_like(scaled, dtype=torch.int32)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors along their first axis: what halves are widened to is then small."""
    size = max(1, len(tensors[0]) // _PARTS) if tensors[0].dim() else 1
    return zip(*(x.split(size) if x.dim() else [x] for x in tensors), strict=True)


def _in_cache(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors of one dense layout into parts that stay in a CPU's cache.

    Several threads share an operation, which parts of this size would leave to one.
    """
    first = tensors[0]
    if (
        first.device.type != "cpu"
        or torch.get_num_threads() > 1
        or first.numel() <= _CACHED
        or any(is_fake(x) or x.stride() != first.stride() for x in tensors)
        or not is_dense(first)
    ):
        return [tensors]
    lines = [x.as_strided((first.numel(),), (1,)) for x in tensors]
    return zip(*(line.split(_CACHED) for line in lines), strict=True)


def _extremes(x: Tensor) -> Sequence[Tensor]:
    """Give the least and the largest element, NaN if there is a NaN."""
    if x.numel() == 0:
        return ()
    # Torch would copy what is in channels last first.
    dense = x.permute(0, 2, 3, 1) if format_of(x) is torch.channels_last else x
    return torch.aminmax(dense)


def _note(
    largest: Tensor | None, place: int, extremes: Sequence[Tensor], steps: float
) -> None:
    """Note the largest magnitude; NaN if there is a NaN."""
    if largest is None or not extremes:
        return
    # No zero may keep its sign: a kernel compares the bits of what is here.
    magnitude = torch.stack([*extremes]).float().abs().amax() / steps
    torch.maximum(largest[place], magnitude, out=largest[place])
