"""Reversible networks whose activations are reconstructed instead of stored."""

from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.coupling import AdditiveCoupling
from speechbrain_rev.reversible.modes import Mode
from speechbrain_rev.reversible.monitor import StreamError, StreamWarning
from speechbrain_rev.reversible.recompute import Recompute

__all__ = [
    "AdditiveCoupling",
    "Mode",
    "Recompute",
    "ReversibleChain",
    "StreamError",
    "StreamWarning",
]
