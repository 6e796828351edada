"""Buffers that a step must leave as they were where its streams went out of range.

Fixed-point numbers turn NaN and what is out of range into numbers that look like any
other. Running statistics of such a step would take hundreds of steps to recover, though
the step itself is dropped by the loss scaler or the trainer.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


class KeptBuffers:
    """A copy of a module's floating-point buffers, put back if asked to on the device.

    Parameters
    ----------
    module : nn.Module
        The module, before its step.
    """

    def __init__(self, module: nn.Module) -> None:
        groups = defaultdict(list)
        for buffer in module.buffers():
            if buffer.is_floating_point() and buffer.numel():
                groups[buffer.device, buffer.dtype].append(buffer)
        self._groups = [(buffers, _joined(buffers)) for buffers in groups.values()]

    @torch.no_grad()
    def restore_where(self, poison: Tensor) -> None:
        """Put the copy back if poison is NaN, without waiting for the device.

        Parameters
        ----------
        poison : torch.Tensor, []
            0 or NaN.
        """
        for buffers, before in self._groups:
            fine = (poison == 0).to(before.device)
            chosen = torch.where(fine, _joined(buffers), before)
            parts = chosen.split([b.numel() for b in buffers])
            # Through data: a graph that saved a buffer need not fear this write.
            torch._foreach_copy_(
                [b.data for b in buffers],
                [part.view_as(b) for b, part in zip(buffers, parts, strict=True)],
            )


def _joined(buffers: list[Tensor]) -> Tensor:
    return torch.cat([b.detach().flatten() for b in buffers])
