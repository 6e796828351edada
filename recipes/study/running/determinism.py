"""What lets a training give the same weights again: algorithms without chance."""

from __future__ import annotations

import os

import torch


def compute_repeatably() -> None:
    """Have torch sum in one order, on a card as well; before CUDA starts.

    An operation that cannot raises when it is reached.
    """
    # cuBLAS sums in one order only with workspaces of a fixed size, which it reads here.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # It would write to all memory that is asked for, and no result depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
