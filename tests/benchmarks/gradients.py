"""The check that every figure of memory or speed stands on: modes compute the same."""

from __future__ import annotations

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder

from .harness import NotEqual

#: Bytes that reversible encoders work on at a time: less than they have at this width.
CHUNK = 60_000
#: float64 rounding through a small network; an error of the method shows at 1e-3.
TOLERANCE = 1e-9


def check_modes(name: str, modes: list[str], device: torch.device) -> float:
    """Compare the gradients of memory modes with stored ones, in float64.

    Returns
    -------
    float
        The largest relative distance.
    """
    grads = {}
    for mode in ["store", *modes]:
        torch.manual_seed(0)
        encoder = build_encoder(
            name,
            mode=mode,
            widths=(8, 16, 16, 24),
            blocks=(1, 2, 2, 1),
            chunk=CHUNK if ARCHITECTURES[name].reversible else None,
        )
        encoder.to(device, torch.float64)
        feats = torch.randn(2, 40, 80, dtype=torch.float64, device=device)
        y = encoder(feats)
        (
            y * torch.linspace(-1, 1, y.numel(), device=device).view_as(y)
        ).sum().backward()
        grads[mode] = torch.cat([p.grad.flatten() for p in encoder.parameters()])
    expected = grads.pop("store")
    worst = max(float((g - expected).norm() / expected.norm()) for g in grads.values())
    if worst > TOLERANCE:
        raise NotEqual(
            f"Gradients of {name} in modes {modes} differ from stored ones by {worst:.1e}."
        )
    return worst
