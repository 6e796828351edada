"""How much memory a training step needs per utterance, against the vanilla encoders."""

from __future__ import annotations

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.memory import live_bytes_peak

from .gradients import check_modes
from .harness import Result

FRAMES = 200
GB = 1e9
#: Large enough that activations make the peak, not a stage's parameter gradients.
BATCHES = {"store": (2, 4), "recompute": (2, 4), "reconstruct": (8, 16)}


def peak_bytes(name: str, mode: str, batch: int, device: torch.device) -> int:
    """Live-tensor peak of forward and backward; gradients of parameters exist before."""
    torch.manual_seed(0)
    encoder = build_encoder(name, mode=mode).to(device)
    for p in encoder.parameters():
        p.grad = torch.zeros_like(p)
    feats = torch.randn(batch, FRAMES, 80, device=device)
    return live_bytes_peak(lambda: encoder(feats).square().sum().backward())


def gb_per_utterance(name: str, mode: str, device: torch.device) -> float:
    """Slope between two batch sizes, so that parameters drop out."""
    few, many = BATCHES[mode]
    grown = peak_bytes(name, mode, many, device) - peak_bytes(name, mode, few, device)
    return grown / (many - few) / GB


def run(device: torch.device, names: list[str] | None = None) -> Result:
    """Measure all encoders; the baseline is the vanilla counterpart, stored."""
    rows, worst = [], 0.0
    stored: dict[str, float] = {}
    for name in names or ARCHITECTURES:
        row = ARCHITECTURES[name]
        modes = ["reconstruct"] if row.reversible else ["store", "recompute"]
        checked = [mode for mode in modes if mode != "store"]
        worst = max(worst, check_modes(name, checked, device))
        baseline = row.counterpart or name
        for mode in modes:
            gb = gb_per_utterance(name, mode, device)
            if mode == "store":
                stored[name] = gb
            rows.append(
                {
                    "encoder": name,
                    "mode": mode,
                    "GB per utterance": gb,
                    "baseline": f"{baseline} store",
                    "share of the baseline": gb / stored[baseline],
                    "published GB": row.published_memory_gb,
                }
            )
            print(f"{name:14}{mode:12} {gb:.4f}", flush=True)
    return Result(
        "memory",
        "How much memory does a training step need for each utterance of 2 seconds?",
        f"float32, {FRAMES} frames, live tensors, slope between batches of 2 and 4, "
        "or 8 and 16 where activations are reconstructed",
        rows,
        f"gradients within {worst:.1e} of stored ones in float64, reduced widths",
    )
