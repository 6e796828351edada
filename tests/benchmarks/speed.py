"""What not storing activations costs in time."""

from __future__ import annotations

import functools

import torch
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder

from .gradients import check_modes
from .harness import Result, interleaved_seconds

FRAMES = 200
CASES = {
    "resnet34": ["store", "recompute"],
    "revnet57": ["store", "recompute", "reconstruct"],
    "df_revnet89": ["store", "recompute", "reconstruct"],
}


def train_step(encoder: nn.Module, feats: torch.Tensor) -> None:
    """One forward and backward pass."""
    encoder(feats).square().sum().backward()


def run(device: torch.device, names: list[str] | None = None) -> Result:
    """Time training steps; the baseline is the same encoder, stored."""
    batch, repeats = (64, 10) if device.type == "cuda" else (4, 5)
    rows, worst = [], 0.0
    for name in names or CASES:
        modes = CASES.get(name, ["store", "recompute"])
        if ARCHITECTURES[name].reversible and "reconstruct" not in modes:
            modes = [*modes, "reconstruct"]
        worst = max(worst, check_modes(name, modes[1:], device))
        feats = torch.randn(batch, FRAMES, 80, device=device)
        steps = {}
        for mode in modes:
            encoder = build_encoder(name, mode=mode).to(device)
            steps[mode] = functools.partial(train_step, encoder, feats)
        seconds = interleaved_seconds(steps, device, repeats=repeats)
        for mode in modes:
            ratio = seconds[mode]["median"] / seconds["store"]["median"]
            rows.append(
                {
                    "encoder": name,
                    "mode": mode,
                    "s per step": seconds[mode]["median"],
                    "20 % to 80 %": "{p20:.3g} to {p80:.3g}".format(**seconds[mode]),
                    "baseline": f"{name} store",
                    "times the baseline": ratio,
                }
            )
    return Result(
        "speed",
        "What does a training step cost in time?",
        f"float32, batch {batch}, {FRAMES} frames, median of {repeats} interleaved steps",
        rows,
        f"gradients within {worst:.1e} of stored ones in float64, reduced widths",
    )
