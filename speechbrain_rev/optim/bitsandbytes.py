"""bitsandbytes' arithmetic on the states of this package: the one door to the library.

The library updates one tensor at a time and takes the number of the step from the host, which
waits for the device. On a CPU its quantiser rounds through a table of 65,536 even steps,
which loses values under 3e-5 of their block's largest and reads zeros back as 2e-5.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.kernels.optimizer import Map, Packed, TensorTable, UpdateRule


def update(
    table: TensorTable,
    packed: Packed,
    rule: UpdateRule,
    healthy: Tensor,
    corrections: Tensor | None,
    maps: Sequence[Map],
) -> None:
    """Take a step of some of the tensors, unless a flag is cleared; as the reference's."""
    assert packed.block == 256
    assert not packed.shared
    may_step, *steps = torch.cat([healthy, table.steps]).tolist()
    if not may_step:
        return
    functional, base = library().functional, table.starts[packed.first]
    for t in range(packed.first, packed.last):
        gradient, weight = table.gradients[t], table.weights[t]
        if gradient is None:
            continue
        places = slice(table.starts[t] - base, table.starts[t + 1] - base)
        blocks = slice(*packed.first_blocks[t - packed.first :][:2])
        # SGD has no second moment.
        codes = [*(moment[places] for moment in packed.moments), None][:2]
        scales = [*(scale[blocks] for scale in packed.scales), None][:2]
        values = [*(tree.values for tree in maps), None][:2]
        ordered = weight.contiguous()
        if rule.decoupled and rule.weight_decay:
            # As torch has it. The library's CUDA kernels shrink the update too.
            ordered.mul_(1 - rule.lr * rule.weight_decay)
        functional.optimizer_update_8bit_blockwise(
            "adam" if rule.adam else "momentum",
            gradient.contiguous().view(-1),
            ordered.view(-1),
            *codes,
            *rule.betas,
            0.0,
            0.0,
            rule.eps,
            int(steps[t]),
            rule.lr,
            *values,
            *scales,
            0.0 if rule.decoupled else rule.weight_decay,
        )
        if rule.adam:
            packed.moments[1][places].clamp_(min=1)
        if not weight.is_contiguous():
            weight.copy_(ordered)


def library() -> Any:
    """Import bitsandbytes.

    Raises
    ------
    ImportError
        If it cannot be imported here.
    """
    # On some CPUs the import warns of a kernel for 4-bit inference that is not there,
    # which has no part in training.
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def about_training(record: logging.LogRecord) -> bool:
        return "gemm_4bit" not in record.getMessage()

    logger.addFilter(about_training)
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError(
            "The backend 'bitsandbytes' of 8-bit optimizers cannot be imported here "
            f"({error}). Install it, or take the backend 'native' (optimizer_backend: "
            "native)."
        ) from error
    finally:
        logger.removeFilter(about_training)
    return bitsandbytes
