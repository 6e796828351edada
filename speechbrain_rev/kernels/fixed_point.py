"""Fixed-point arithmetic of the exact streams, each function in one pass over memory.

The plain reference is ``speechbrain_rev.reversible.fixed_point``: same names, same
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

#: What is taken: floats whose steps float32 holds.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Elements of one program.
BLOCK = 1024


def format_of(x: Tensor) -> torch.memory_format:
    """Name the layout in which the values of a stream like this tensor are held."""
    # Of one channel both are the same, whatever strides torch wrote down.
    channels_last = x.dim() == 4 and x.shape[1] > 1 and x.stride(1) == 1
    return torch.channels_last if channels_last else torch.contiguous_format


def is_dense(value: Tensor) -> bool:
    """Whether a value is held in one of the layouts, as all are that we make."""
    return value.is_contiguous(memory_format=format_of(value))


def _add_kernel(
    value, f, out, largest, size, STEPS: tl.constexpr, SUBTRACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round f to steps, add it to the value or subtract it, and note magnitudes."""
    # An int32 would wrap around at 2**31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < size  # [BLOCK]
    scaled = tl.load(f + offsets, mask=inside, other=0.0).to(tl.float32) * STEPS
    # From 2**23 on float32 has no bits below one: a sum there is rounded, ties to even.
    far = tl.where(scaled < 0, -8388608.0, 8388608.0)  # [BLOCK]
    rounded = tl.where(tl.abs(scaled) < 8388608.0, (scaled + far) - far, scaled)
    total = rounded.to(tl.int32)  # [BLOCK]
    if value is not None:
        old = tl.load(value + offsets, mask=inside, other=0)  # [BLOCK]
        total = old - total if SUBTRACT else old + total
    tl.store(out + offsets, total, mask=inside)
    if largest is not None:
        # Without their sign floats are ordered as integers, with NaN beyond infinity.
        added = (rounded * (1 / STEPS)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        most = tl.max(added, axis=0).to(tl.uint32, bitcast=True)
        # What is there only grows, so that an old look saves most of the atomics.
        tl.atomic_max(largest, most, mask=most > tl.load(largest), sem="relaxed")
        # Through float, for the smallest int32 has no opposite.
        results = (total.to(tl.float32) * (1 / STEPS)).to(tl.int32, bitcast=True)
        most = tl.max(results & 0x7FFFFFFF, axis=0).to(tl.uint32, bitcast=True)
        largest += 1
        tl.atomic_max(largest, most, mask=most > tl.load(largest), sem="relaxed")


def encode(x: Tensor, steps: float, largest: Tensor | None) -> Tensor:
    """Round floats to the nearest step, halves to the even one."""
    value = torch.empty_like(x, dtype=torch.int32, memory_format=format_of(x))
    return _launch(None, x, steps, largest, value)


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
    f: Tensor,
    steps: float,
    largest: Tensor | None,
    out: Tensor | None,
    reuse: bool = False,
) -> Tensor:
    """Add a rounded residual to dense steps."""
    out = torch.empty_like(value) if out is None else out
    return _launch(value, f, steps, largest, out)


def subtract(
    value: Tensor, f: Tensor, steps: float, out: Tensor | None, reuse: bool = False
) -> Tensor:
    """Subtract a rounded residual from dense steps."""
    out = torch.empty_like(value) if out is None else out
    return _launch(value, f, steps, None, out, subtract=True)


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
    f: Tensor,
    steps: float,
    largest: Tensor | None,
    out: Tensor,
    *,
    subtract: bool = False,
) -> Tensor:
    if out.numel() == 0:
        return out
    assert is_dense(out)
    assert value is None or value.stride() == out.stride()
    f = f.detach()
    if f.stride() != out.stride():
        f = torch.empty_like(out, dtype=f.dtype).copy_(f)
    with torch.cuda.device_of(out):
        _compiled(_add_kernel)[(-(-out.numel() // BLOCK),)](
            value,
            f,
            out,
            None if largest is None else largest.view(torch.uint32),
            out.numel(),
            STEPS=steps,
            SUBTRACT=subtract,
            BLOCK=BLOCK,
        )
    for written in (out, largest):
        # Autograd sees what torch writes, but not what a kernel of ours does.
        if written is not None:
            torch.autograd.graph.increment_version(written)
    return out


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Any:
    import triton

    # Kernels look names up among their module's, which must not import Triton.
    globals()["tl"] = triton.language
    return triton.jit(kernel, do_not_specialize=["largest"])
