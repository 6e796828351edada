"""The precisions that training steps are measured in."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The type that autocast computes in, or None for float32."""

    half: torch.dtype | None = None

    def autocast(self, device: torch.device) -> torch.autocast:
        """Compute in this precision."""
        half = self.half or torch.bfloat16
        return torch.autocast(device.type, half, enabled=self.half is not None)


PRECISIONS = {
    "float32": Precision(),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}
