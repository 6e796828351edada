"""Reconstruct only what comes back: undo each block once before anything is planned.

What does not compute the same twice (noise, counters, an inverse of its own that is
wrong) would train on activations that never were. Exact streams notice it in training;
here such a block is found before a plan is made for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.planner.calling import call, own_batch, tensors_of
from speechbrain_rev.planner.network import as_network
from speechbrain_rev.reversible import AdditiveCoupling

#: The largest difference, as a share of the largest number that goes in or comes out.
#: To undo an addition in float32 is exact to 1e-7 of that, and residual functions may
#: make it 10,000 times as much. What computes something else the second time differs by
#: parts of what it adds: other masks of dropout, for instance, by all of it.
TOLERANCE = 1e-3


def reproduced(
    module: nn.Module, example_batch: Any, blocks: Sequence[str] = ()
) -> dict[str, bool]:
    """Run a network in evaluation and undo each coupling of its chains.

    Parameters
    ----------
    module : nn.Module
        A network that has numbers. It is left as it is: a copy runs.
    example_batch : tensor, or tuple, list or dict of such
        What it is called with.
    blocks : sequence of str
        Names of blocks, as for ``plan``.

    Returns
    -------
    dict of str to bool
        For each coupling that ran, by its block's name, whether its inverse gave back
        what went in. NaN and infinity are never given back.

    Examples
    --------
    >>> from speechbrain_rev.reversible import ReversibleChain
    >>> class Noise(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.randn_like(x)
    >>> pairs = [(nn.Tanh(), nn.Tanh()), (nn.Tanh(), Noise())]
    >>> chain = ReversibleChain(AdditiveCoupling(f, g) for f, g in pairs)
    >>> reproduced(chain, (torch.ones(2, 3), torch.ones(2, 3)))
    {'blocks.0': True, 'blocks.1': False}
    """
    own = copy.deepcopy(module).eval()
    found: dict[str, bool] = {}
    for name, block in as_network(own, blocks).named_blocks().items():
        if isinstance(block, AdditiveCoupling):
            block.register_forward_hook(_noting(found, name))
    devices = {x.device for x in tensors_of(example_batch) if x.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        call(own, own_batch(example_batch))
    return found


def _noting(found: dict[str, bool], name: str) -> Callable[..., None]:
    def note(
        block: AdditiveCoupling,
        given: tuple[Tensor, Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor],
    ) -> None:
        x1, x2, mask = given
        again1, again2 = block.inverse(*outputs, mask)
        largest = _largest(x1, x2, *outputs)
        # Not so where one of these is NaN.
        found[name] = (
            _largest(again1 - x1, again2 - x2) <= TOLERANCE * largest < math.inf
        )

    return note


def _largest(*tensors: Tensor) -> float:
    """Give the largest magnitude; NaN if there is one."""
    return float(torch.stack([x.abs().max() for x in tensors]).max())
