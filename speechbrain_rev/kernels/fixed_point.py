"""Fixed-point arithmetic of the exact streams, each function in one pass over memory.

The plain reference is ``speechbrain_rev.reversible.fixed_point``: same names, same
signatures, same bits. Triton is imported when a kernel is first launched.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

#: What is taken: floats whose steps float32 holds.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Elements of one program.
BLOCK = 1024
#: Residuals that are added in one pass.
AT_ONCE = 3


def format_of(x: Tensor) -> torch.memory_format:
    """Name the layout in which the values of a stream like this tensor are held."""
    # Of one channel both are the same, whatever strides torch wrote down.
    channels_last = x.dim() == 4 and x.shape[1] > 1 and x.stride(1) == 1
    return torch.channels_last if channels_last else torch.contiguous_format


def is_dense(value: Tensor) -> bool:
    """Whether a value is held in one of the layouts, as all are that we make."""
    return value.is_contiguous(memory_format=format_of(value))


def _add_kernel(
    value, first, second, third, out, floats, largest, size, item, step,
    STEPS: tl.constexpr, COUNT: tl.constexpr, SUBTRACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round residuals to steps, add them to the value or subtract them, note magnitudes."""
    # An int32 would wrap around at 2**31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < size  # [BLOCK]
    places = offsets  # [BLOCK]
    if step is not None:
        places = offsets // item * step + offsets % item
    total = tl.zeros([BLOCK], tl.int32)
    if value is not None:
        total = tl.load(value + offsets, mask=inside, other=0)
    # Without their sign floats are ordered as integers, with NaN beyond infinity.
    most_added = tl.zeros([BLOCK], tl.int32)
    most_total = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(COUNT):
        f = first if k == 0 else (second if k == 1 else third)
        scaled = tl.load(f + places, mask=inside, other=0.0).to(tl.float32) * STEPS
        # From 2**23 on float32 has no bits below one: a sum there is rounded, ties to even.
        far = tl.where(scaled < 0, -8388608.0, 8388608.0)  # [BLOCK]
        rounded = tl.where(tl.abs(scaled) < 8388608.0, (scaled + far) - far, scaled)
        steps = rounded.to(tl.int32)  # [BLOCK]
        total = total - steps if SUBTRACT else total + steps
        if largest is not None:
            added = (rounded * (1 / STEPS)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            most_added = tl.maximum(most_added, added)
            # Through float, for the smallest int32 has no opposite.
            sums = (total.to(tl.float32) * (1 / STEPS)).to(tl.int32, bitcast=True)
            most_total = tl.maximum(most_total, sums & 0x7FFFFFFF)
    tl.store(out + offsets, total, mask=inside)
    if floats is not None:
        tl.store(floats + offsets, total.to(tl.float32) * (1 / STEPS), mask=inside)
    if largest is not None:
        # What is there only grows, so that an old look saves most of the atomics.
        most = tl.max(most_added, axis=0).to(tl.uint32, bitcast=True)
        tl.atomic_max(largest, most, mask=most > tl.load(largest), sem="relaxed")
        most = tl.max(most_total, axis=0).to(tl.uint32, bitcast=True)
        largest += 1
        tl.atomic_max(largest, most, mask=most > tl.load(largest), sem="relaxed")


def encode(x: Tensor, steps: float, largest: Tensor | None) -> Tensor:
    """Round floats to the nearest step, halves to the even one."""
    value = torch.empty_like(x, dtype=torch.int32, memory_format=format_of(x))
    return _launch(None, [x], steps, largest, value)


def decode(
    value: Tensor, steps: float, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """Turn steps into floats."""
    # Torch's own kernel converts while it multiplies, and takes this from the host.
    step = torch.tensor(1 / steps, dtype=dtype, device="cpu")
    out = torch.empty_like(value, dtype=dtype) if out is None else out
    return torch.mul(value, step, out=out)


def add(
    value: Tensor,
    residuals: Sequence[Tensor],
    steps: float,
    largest: Tensor | None,
    out: Tensor | None,
    floats: Tensor | None = None,
    reuse: bool = False,
) -> Tensor:
    """Add rounded residuals to dense steps."""
    out = torch.empty_like(value) if out is None else out
    return _launch(value, residuals, steps, largest, out, floats)


def subtract(
    value: Tensor, f: Tensor, steps: float, out: Tensor | None, reuse: bool = False
) -> Tensor:
    """Subtract a rounded residual from dense steps."""
    out = torch.empty_like(value) if out is None else out
    return _launch(value, [f], steps, None, out, subtract=True)


@functools.cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton can be imported and compiles for these floats; tried once."""
    try:
        encode(torch.zeros(1, dtype=dtype, device=device), 1.0, None)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"Triton's kernels do not run on {device} in {dtype} "
            f"({type(error).__name__}: {error}). Exact streams are added by plain torch "
            "operations there: the same numbers, in more time.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _launch(
    value: Tensor | None,
    residuals: Sequence[Tensor],
    steps: float,
    largest: Tensor | None,
    out: Tensor,
    floats: Tensor | None = None,
    *,
    subtract: bool = False,
) -> Tensor:
    if out.numel() == 0:
        return out
    assert is_dense(out)
    assert value is None or value.stride() == out.stride()
    assert floats is None or floats.stride() == out.stride()
    item, step = None, None
    if len(residuals) == 1 and _is_dense_but_for_step(residuals[0], out):
        item, step = out.stride(0), residuals[0].stride(0)
    given = [
        f if step is not None or f.stride() == out.stride() else _laid_out_as(out, f)
        for f in (f.detach() for f in residuals)
    ]
    with torch.cuda.device_of(out):
        _compiled(_add_kernel)[(-(-out.numel() // BLOCK),)](
            value,
            *given,
            *[None] * (AT_ONCE - len(given)),
            out,
            floats,
            None if largest is None else largest.view(torch.uint32),
            out.numel(),
            item,
            step,
            STEPS=steps,
            COUNT=len(given),
            SUBTRACT=subtract,
            BLOCK=BLOCK,
        )
    for written in (out, floats, largest):
        # Autograd sees what torch writes, but not what a kernel of ours does.
        if written is not None:
            torch.autograd.graph.increment_version(written)
    return out


def _is_dense_but_for_step(f: Tensor, out: Tensor) -> bool:
    """Whether a residual's samples are apart, as those of some channels of a map are."""
    return (
        f.dim() > 1
        and f.stride() != out.stride()
        and f.stride()[1:] == out.stride()[1:]
        and out.stride(0) == out.shape[1:].numel()
        and f.stride(0) >= out.stride(0)
    )


def _laid_out_as(out: Tensor, f: Tensor) -> Tensor:
    return torch.empty_like(out, dtype=f.dtype).copy_(f)


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Any:
    import triton

    # Kernels look names up among their module's, which must not import Triton.
    globals()["tl"] = triton.language
    return triton.jit(kernel, do_not_specialize=["largest"])
