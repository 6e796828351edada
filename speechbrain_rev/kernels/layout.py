"""The two dense layouts in which the values of a stream are held."""

from __future__ import annotations

import torch
from torch import Tensor


def format_of(x: Tensor) -> torch.memory_format:
    """Tell in which layout the values of a stream like this tensor are held."""
    # Of one channel both are the same, whatever strides torch wrote down.
    channels_last = x.dim() == 4 and x.shape[1] > 1 and x.stride(1) == 1
    return torch.channels_last if channels_last else torch.contiguous_format


def is_dense(value: Tensor) -> bool:
    """Whether a value is held in one of the layouts, as all are that we make."""
    return value.is_contiguous(memory_format=format_of(value))
