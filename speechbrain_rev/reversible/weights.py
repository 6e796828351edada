"""Weights that change between a forward and a backward pass, where no version counts it.

Written to through ``.data``, a weight is another one in the second run. Every so many runs
the norms of a module's weights are compared, on the device and without waiting for it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from speechbrain_rev.reversible.monitor import StreamWarning, has_values, to_host

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
        self._notes = notes
        self._names, norms = _norms_of(module)
        # Beside the activations nothing is held on the device that need not be.
        self._norms = norms if norms.is_cuda else norms.tolist()

    def compare(self, module: nn.Module) -> None:
        """Compare with those in the second run."""
        names, now = _norms_of(module)
        if names != self._names:
            return  # the second run fails for another reason
        before = torch.as_tensor(self._norms, dtype=now.dtype, device=now.device)
        differs = (now != before) & ~(now.isnan() & before.isnan())
        kind = type(module).__name__
        self._notes.send(differs, [f"{name} of {kind}" for name in names])


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
def _norms_of(module: nn.Module) -> tuple[list[str], Tensor]:
    """Name the weights that are where the first one is, and give their norms."""
    named = {
        n: p.detach() for n, p in module.named_parameters() if p.is_floating_point()
    }
    device = next(iter(named.values())).device
    wide = {
        n: p if p.dtype.itemsize > 2 else p.float()
        for n, p in named.items()
        if p.device == device
    }
    norms = torch._foreach_norm([*wide.values()])
    return [*wide], torch.stack([x.double() for x in norms])
