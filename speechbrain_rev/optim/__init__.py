"""Optimizers with states of 8 or 32 bit."""

from speechbrain_rev.optim.conversion import convert_checkpoint
from speechbrain_rev.optim.factory import (
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
