"""What a training step really takes on a device, against what was counted without one."""

from __future__ import annotations

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder

from .counts import modes_of, training_step_peak
from .gradients import check_modes
from .harness import NotEqual, Result

FRAMES = 200
GIB = 2**30
#: Large enough that activations make the peak; on a CPU as small as can be counted.
BATCHES = {"cpu": 2, "cuda": 8}


def allocated(name: str, mode: str, batch: int, device: torch.device) -> dict[str, int]:
    """Ask the allocator what a step took beyond what was there before it."""
    encoder = build_encoder(name, mode=mode).to(device)
    for p in encoder.parameters():
        p.grad = torch.zeros_like(p)
    feats = torch.randn(batch, FRAMES, 80, device=device)
    # The first step allocates what is kept: workspaces of cuBLAS, choices of cuDNN.
    for _ in range(2):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        reserved_before = torch.cuda.memory_reserved(device)
        encoder(feats).square().sum().backward()
        torch.cuda.synchronize(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device) - before,
        "reserved": torch.cuda.max_memory_reserved(device) - reserved_before,
    }


def run(device: torch.device, names: list[str] | None = None) -> Result:
    """Measure all encoders; the baseline is the count on meta tensors."""
    batch = BATCHES[device.type]
    rows, worst = [], 0.0
    for name in names or ARCHITECTURES:
        modes = modes_of(name)
        worst = max(worst, check_modes(name, modes[1:], device))
        for mode in modes:
            size = {"mode": mode, "frames": FRAMES, "batch": batch}
            counted = training_step_peak(name, **size)
            if device.type == "cuda":
                taken = allocated(name, mode, batch, device)
            else:
                taken = {"live": training_step_peak(name, device=device, **size)}
                if taken["live"] != counted:
                    raise NotEqual(
                        f"{name} {mode} holds {taken['live']} bytes on {device}, but "
                        f"{counted} were counted on meta tensors."
                    )
            rows.append(
                {
                    "encoder": name,
                    "mode": mode,
                    "baseline": "counted on meta tensors",
                    "counted GiB": counted / GIB,
                    **{f"{kind} GiB": n / GIB for kind, n in taken.items()},
                    **{f"{kind} / counted": n / counted for kind, n in taken.items()},
                }
            )
            print(*rows[-1].values(), flush=True)
    return Result(
        "memory",
        "Does a training step take what was counted without the device?",
        f"float32, batch {batch}, {FRAMES} frames, beyond weights, gradients and input",
        rows,
        f"gradients within {worst:.1e} of stored ones in float64, reduced widths",
    )
