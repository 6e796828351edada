"""Optimizers with 8-bit or 32-bit states."""

from speechbrain_rev.optim.checkpoint import convert_checkpoint
from speechbrain_rev.optim.optimizer import (
    SGD,
    Adam,
    AdamW,
    build_optimizer,
    state_bytes,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "build_optimizer",
    "convert_checkpoint",
    "state_bytes",
]
