"""Masks of the frames that count, from relative lengths."""

from __future__ import annotations

import torch
from torch import Tensor


def plausible(lengths: Tensor) -> Tensor:
    """Tell which relative lengths can be: above 0, at most 1."""
    # Some way above 1 for a quotient that was rounded up.
    return (lengths > 0) & (lengths.float() < 1 + 1e-4)


def missing_frames(frames: int, multiple: int) -> int:
    """Tell how many frames are missing to a whole multiple."""
    return multiple * ((frames - 1) // multiple + 1) - frames


def level_masks(
    x: Tensor, frames: int, lengths: Tensor | None, padding: int
) -> list[Tensor | None]:
    """Masks [batch, 1, 1, time] of the frames that count, at each of the 4 levels."""
    if lengths is None and not padding:
        return [None] * 4
    if lengths is None:
        valid = torch.full((x.shape[0], 1), float(frames), device=x.device)
    else:
        # Not waiting for the copy: the step must not wait for the device either.
        relative = lengths.to(x.device, non_blocking=True).float().unsqueeze(1)
        valid = (relative * frames).round().clamp_min(1)
        valid = valid.where(plausible(relative), torch.nan)
    masks: list[Tensor | None] = []
    time = x.shape[3]
    for _ in range(4):
        positions = torch.arange(time, device=x.device)
        masks.append((positions < valid).float()[:, None, None, :])
        valid, time = (valid / 2).ceil(), (time - 1) // 2 + 1
    return masks
