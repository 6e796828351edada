"""What stays in float32 whatever autocast says: pooling, cosines, the loss."""

from __future__ import annotations

import contextlib

import torch


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off for a device, meta devices included, which have none.

    Parameters
    ----------
    device : torch.device
        Where the arithmetic happens.

    Returns
    -------
    context manager
        To compute in.

    Examples
    --------
    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", dtype=torch.bfloat16), autocast_off(x.device):
    ...     (x @ x).dtype
    torch.float32
    """
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
