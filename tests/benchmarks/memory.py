"""What a training step really takes on a device, against what was counted without one."""

from __future__ import annotations

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog.steps import training_step
from speechbrain_rev.sizes import GIB

from .counts import modes_of, training_step_peak
from .harness import Result, require, step_bytes
from .steps import FRAMES, check_modes

#: Large enough that activations make the peak; on a CPU as small as can be counted.
BATCHES = {"cpu": 2, "cuda": 8}


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
            taken = step_bytes(training_step(name, device=device, **size)[1], device)
            require(
                taken.get("live", counted) == counted,
                f"{name} {mode} holds {taken} bytes on {device}, but {counted} were "
                "counted on meta tensors.",
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
