"""Reversible networks whose activations are reconstructed instead of stored."""

from speechbrain_rev.modes import Mode
from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.flags import cudnn_flags
from speechbrain_rev.reversible.monitor import StreamError, StreamWarning
from speechbrain_rev.reversible.recompute import Recompute
from speechbrain_rev.reversible.segment import AdditiveCoupling
from speechbrain_rev.reversible.wrapping import recompute_blocks

__all__ = [
    "AdditiveCoupling",
    "Mode",
    "Recompute",
    "ReversibleChain",
    "StreamError",
    "StreamWarning",
    "cudnn_flags",
    "recompute_blocks",
]
