"""The number formats that an encoder computes in."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

#: As the knob ``precision`` of training has them.
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def usable_precision(precision: str, device: torch.device) -> Precision:
    """Check that an encoder computes in a format on a device, and gains by it.

    Parameters
    ----------
    precision : {"fp32", "bf16", "fp16"}
        The format of convolutions under autocast; features, pooling and embeddings stay
        in float32.
    device : torch.device
        Where it runs.

    Returns
    -------
    Precision

    Raises
    ------
    ValueError
        If there is no such format, or the device has no use for it.

    Example
    -------
    >>> usable_precision("bf16", torch.device("cpu"))
    'bf16'
    """
    known: dict[object, Precision] = {name: name for name in get_args(Precision)}
    if precision not in known:
        raise ValueError(
            f"precision takes {', '.join(get_args(Precision))}, not {precision!r}."
        )
    if precision == "fp16" and device.type == "cpu":
        raise ValueError(
            "precision fp16 is for GPUs: a CPU computes convolutions in it many times "
            "slower than in float32. Give precision bf16 or fp32, or another device."
        )
    if precision == "bf16" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise ValueError(
                f"precision bf16 needs a GPU of compute capability 8.0, and {device} has "
                f"{'.'.join(map(str, capability))}. Give precision fp16 or fp32."
            )
    return known[precision]


def computing_in(precision: Precision, device: torch.device) -> torch.autocast:
    """Let what follows compute in a format: a context manager.

    Example
    -------
    >>> with computing_in("bf16", torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    half = precision != "fp32"
    dtype = _DTYPES[precision] if half else None
    return torch.autocast(device.type, dtype, enabled=half)
