"""WeSpeaker's deeper networks on a GPU of 11 GB, at batches of large-margin fine-tuning.

Bytes are counted on meta tensors; times are estimated from counts of operations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from speechbrain_rev.architectures import WESPEAKER_ARCHITECTURES, architecture
from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.plans import plan_encoders
from speechbrain_rev.catalog.steps import encoder_step
from speechbrain_rev.catalog.table import parameters_of
from speechbrain_rev.devices import parse_card
from speechbrain_rev.modes import Mode
from speechbrain_rev.planner import largest_batch
from speechbrain_rev.sizes import GB, GIB

from .harness import Result, require
from .joined import ALIKE, check_bits


@dataclass(frozen=True)
class Setting:
    """Which encoders, at which batch and length."""

    names: tuple[str, ...] = tuple(WESPEAKER_ARCHITECTURES)
    batch: int = 64
    frames: int = 600
    card: str = "11GB"


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Plan the batch, or the largest that fits; the baseline stores every block."""
    setting = setting or Setting()
    gpu = parse_card(setting.card)
    asked = Training(gpu.memory_bytes, batch=setting.batch, frames=setting.frames)
    rows, worst = [], 0.0
    for name in setting.names:
        check_bits(name)
        row = architecture(name)
        largest = largest_batch(
            encoder_step(row, asked, speed=gpu.speed), gpu.memory_bytes
        )
        training = asked.at(min(largest, setting.batch))
        (planned,) = plan_encoders(training, names=[name], speed=gpu.speed)
        assert planned.counted_bytes is not None
        off = abs(planned.predicted_bytes / planned.counted_bytes - 1)
        worst = max(worst, off)
        require(off <= ALIKE, f"{name}: the counted peak is {off:.2%} off.")
        require(not planned.lacking_bytes, f"{name} does not fit at {training.batch}.")
        modes = Counter(planned.modes.values())
        rows.append(
            {
                "encoder": name,
                "parameters, M": parameters_of(row) / 1e6,
                "largest batch": largest,
                "batch": training.batch,
                "GB": planned.needed_bytes / GB,
                "baseline": "store",
                "times the baseline": planned.seconds / planned.stored_seconds,
                "days": planned.days,
                "blocks": ", ".join(
                    f"{m.value} {modes[m.value]}" for m in Mode if m.value in modes
                ),
            }
        )
    return Result(
        "converted",
        "Which of WeSpeaker's deeper networks can be fine-tuned on a small GPU?",
        f"float32, {setting.frames} frames; largest batch: any plan that fits "
        f"{gpu.memory_bytes / GIB:.0f} GiB with weights, gradients, 8-bit states, a "
        f"classifier and a reserve; plan: of batch {setting.batch}, or of the largest; "
        "peaks of live tensors, counted on meta tensors; times are estimated for "
        f"{gpu.speed}",
        rows,
        "gradients of recomputed blocks equal those of stored ones to the bit (small "
        f"widths); counted peaks are within {100 * worst:.2f} % of predicted ones",
    )
