"""Autocast: its state, to compute again as before, and what it must leave alone.

Pooling, cosines, the loss and sums of gradients stay in float32 whatever it says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.amp.autocast_mode import is_autocast_available


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a device type at one moment."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, devices: Collection[torch.device]) -> Autocast:
        """Read the state that is in force for an accelerator, else for the CPU."""
        kinds = {device.type for device in devices} - {"cpu"} or {"cpu"}
        kind = min(kinds)
        if not is_autocast_available(kind):
            return cls("cpu", False, torch.bfloat16)
        return cls(
            kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        )

    def __call__(self) -> torch.autocast:
        """Put the state in force again.

        The cache of weight casts stays off: it would hold copies of all weights, and
        a second run has leaves of its own to cast.
        """
        return torch.autocast(
            self.device_type, self.dtype, self.enabled, cache_enabled=False
        )


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
    if not is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
