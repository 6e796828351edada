"""Weights that change between a forward and a backward pass, where no version counts it.

Written to through ``.data``, a weight is another one in the second run. Every so many runs
the norms of a module's weights are compared, on the device and without waiting for it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from speechbrain_rev.reversible.monitor import StreamWarning, has_values, to_host
from speechbrain_rev.reversible.replay import places_of

#: First runs of a module from one comparison to the next: a prime, so that each of the
#: pieces of a split function has its turn.
_EVERY = 101


class _Notes:
    """How many first runs a module had, and what was compared."""

    def __init__(self) -> None:
        self.runs = 0
        self._under_way: tuple[Tensor, Any] | None = None
        self._names: list[str] = []

    def send(self, differs: Tensor, names: list[str]) -> None:
        """Copy what a comparison gave to the host, and report it once it is there."""
        if self._under_way is None:
            self._under_way, self._names = to_host(differs), names
        self.report()

    def report(self) -> None:
        """Warn of weights that changed, if that is known by now."""
        if self._under_way is None:
            return
        differs, arrival = self._under_way
        if arrival is not None and not arrival.query():
            return
        self._under_way = None
        changed = [n for n, d in zip(self._names, differs.tolist(), strict=True) if d]
        if changed:
            warnings.warn(
                f"{changed[0]} was changed after the forward pass, through .data or the "
                "like. The second run of its block used other weights than the first. Change "
                "weights after the backward pass, or use mode='store' for this block.",
                StreamWarning,
                stacklevel=2,
            )


#: By the first weight of what ran, of which pieces of a module have a part.
_notes = WeakTensorKeyDictionary()


class WatchedWeights:
    """Norms of a module's weights in its first run."""

    def __init__(self, notes: _Notes, module: nn.Module) -> None:
        self._notes, kind = notes, type(module).__name__
        names = [name for name, _ in module.named_modules()]
        listed = [*places_of(module)]
        own = [f"{names[i]}.{n}".lstrip(".") for (i, n), _ in listed]
        self._names = [f"{name} of {kind}" for name in own]
        norms = _norms_of([p for _, p in listed])
        # Beside the activations nothing is held on the device that need not be.
        self._norms = norms if norms.is_cuda else norms.tolist()

    def compare(self, weights: Sequence[Tensor]) -> None:
        """Compare with those of the second run, in the same order."""
        if len(weights) != len(self._names):
            return  # the second run says so itself
        now = _norms_of(weights)
        before = torch.as_tensor(self._norms, dtype=now.dtype, device=now.device)
        differs = (now != before) & ~(now.isnan() & before.isnan())
        self._notes.send(differs, self._names)


def watched_weights(module: nn.Module) -> WatchedWeights | None:
    """Look at the weights of a module in one of many first runs.

    Parameters
    ----------
    module : nn.Module
        What is about to run.

    Returns
    -------
    WatchedWeights or None
        To compare with in the second run; None where it is not the turn of this one.
    """
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is None or not has_values(first):
        return None
    key = first if first._base is None else first._base
    notes = _notes.get(key)
    if notes is None:
        notes = _notes[key] = _Notes()
    notes.report()
    notes.runs += 1
    return WatchedWeights(notes, module) if notes.runs % _EVERY == 1 else None


@torch.no_grad()
def _norms_of(weights: Sequence[Tensor]) -> Tensor:
    """Give the norm of each weight; 0 of what is elsewhere or has none."""
    device = next(p.device for p in weights if p.is_floating_point())
    own = [p.is_floating_point() and p.device == device for p in weights]
    wide = [
        p.detach() if p.dtype.itemsize > 2 else p.detach().float()
        for p in itertools.compress(weights, own)
    ]
    norms = iter(torch._foreach_norm(wide))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([next(norms).double() if is_own else zero for is_own in own])
