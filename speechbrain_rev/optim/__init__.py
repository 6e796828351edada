"""Optimizers with states of 8 or 32 bit behind one door."""

from speechbrain_rev.optim.conversion import convert_checkpoint
from speechbrain_rev.optim.factory import build_optimizer, state_bytes

__all__ = ["build_optimizer", "convert_checkpoint", "state_bytes"]
