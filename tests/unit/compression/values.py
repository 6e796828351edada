"""Values like activations, and values that are hard to encode."""

import torch

from speechbrain_rev.compression import reference

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16,
            torch.bfloat16: torch.int16}  # fmt: skip
KINDS = ["normal", "relu", "sparse", "bits", "edges", "constant", "huge", "subnormal",
         "wide"]  # fmt: skip


def values(kind, size, dtype, seed, bound=0.01):
    """Values of a kind; the bound is one relative to about one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    limits = torch.finfo(dtype)
    if kind == "relu":
        x = x.relu()
    elif kind == "sparse":
        x = x * (x.abs() > 1)
    elif kind == "bits":
        bits = torch.randint(-(2**31), 2**31, (size,), generator=generator)
        bits = bits if dtype is torch.float32 else bits >> 16
        x = bits.to(INTEGERS[dtype]).view(dtype)
        return torch.where(x.isfinite(), x, torch.zeros_like(x))
    elif kind == "edges":
        # Where one quantum ends and another begins, and next to it.
        step = reference.scale_of(
            torch.tensor([0x3F800000, 1, 1]), torch.tensor(bound).double(), dtype
        )[0]
        q = torch.randint(-200, 200, (size,), generator=generator)
        x = (2 * step * q).clamp(-1, 1)
        x = torch.where(x > 0.3, x.nextafter(torch.tensor(float("inf"))), x)
        x = torch.where(x < -0.3, x.nextafter(torch.tensor(0.0)), x).clamp(-1, 1)
    elif kind == "constant":
        x = x[:1].expand(size).clone()
    elif kind == "huge":
        return (x.sign() * limits.max).to(dtype) * (x.abs() > 0.5)
    elif kind == "subnormal":
        return (x * 100).round().to(dtype) * limits.smallest_normal * limits.eps
    elif kind == "wide":
        x = x * torch.logspace(-12, 0, size)
    return x.to(dtype)
