"""Where an encoder can run."""

from __future__ import annotations

import torch


def usable_device(device: str | torch.device | None) -> torch.device:
    """Check that a device is one that embedding runs on, and that it is there.

    Parameters
    ----------
    device : str, torch.device or None
        ``cpu``, ``cuda`` or ``cuda:N``; None takes the GPU if there is one.

    Returns
    -------
    torch.device

    Raises
    ------
    ValueError
        If it is another one, or this machine has no such GPU.

    Example
    -------
    >>> usable_device("cpu")
    device(type='cpu')
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = torch.device("meta")
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device takes cpu, cuda, or cuda:N for the GPU of number N, not {device}."
        )
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (wanted.index or 0) >= count:
            raise ValueError(
                f"device {device} is not there: torch sees {count} CUDA devices. "
                "`speechbrain-rev env` shows them; cpu always works."
            )
    return wanted
