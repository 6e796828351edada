"""Reconstruct only what comes back: undo each block once before anything is planned.

What does not compute the same twice (noise, counters, an inverse of its own that is
wrong) would train on activations that never were. Exact streams notice it in training;
here such a block is found before a plan is made for it.

Under autocast to a half, residual functions round what they are given. Exact streams
give it back to the bit, so that a function need only compute the same twice. Of float
streams something is lost, and each further block loses more: none is reconstructed.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.planner.calling import call, own_batch, tensors_of
from speechbrain_rev.planner.network import (
    Network,
    all_stored,
    as_network,
    keeping_modes,
)
from speechbrain_rev.planner.room import is_out_of_memory
from speechbrain_rev.planner.trace import Step
from speechbrain_rev.reversible import AdditiveCoupling, Mode, ReversibleChain
from speechbrain_rev.reversible.autocast import Autocast

#: The largest difference, as a share of the largest number that goes in or comes out.
#: To undo an addition in float32 is exact to 1e-7 of that, and residual functions may
#: make it 10,000 times as much. What computes something else the second time differs by
#: parts of what it adds: other masks of dropout, for instance, by all of it.
TOLERANCE = 1e-3


def reproduced(
    module: nn.Module, example_batch: Any, blocks: str | Sequence[str] = ()
) -> dict[str, bool]:
    """Run a network in evaluation and undo each coupling of its chains.

    Parameters
    ----------
    module : nn.Module
        A network that has numbers. It is left as it is: a copy runs, under the autocast
        that is in force.
    example_batch : tensor, or tuple, list or dict of such
        What it is called with.
    blocks : sequence of str
        Names of blocks, as for ``plan``.

    Returns
    -------
    dict of str to bool
        For each coupling that ran, by its block's name, whether its inverse gave back
        what went in. NaN and infinity are never given back, nor is, under autocast to
        a half, a float stream.

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
    chains = [m for m in own.modules() if isinstance(m, ReversibleChain)]
    exact = {id(b) for c in chains if c.format_name == "exact" for b in c.blocks}
    for name, block in as_network(own, blocks).named_blocks().items():
        if isinstance(block, AdditiveCoupling):
            note = _noting(found, name, is_exact=id(block) in exact)
            block.register_forward_hook(note)
    devices = {x.device for x in tensors_of(example_batch) if x.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        call(own, own_batch(example_batch))
    return found


def warn_refused(found: Mapping[str, bool], stacklevel: int) -> list[str]:
    """Name the blocks that do not come back, and warn of them, if there are any.

    Parameters
    ----------
    found : mapping of str to bool
        As ``reproduced`` gives it.
    stacklevel : int
        As ``warnings.warn`` takes it, counted from the caller.

    Returns
    -------
    list of str
        Their names.
    """
    refused = [name for name, same in found.items() if not same]
    if refused:
        warnings.warn(
            f"Not reconstructed, for their inverse does not give back what went in: "
            f"{', '.join(refused)}. Their residual functions must compute the same twice "
            "in evaluation, and no NaN, and streams must be exact under autocast; plans "
            "without it store or recompute them.",
            stacklevel=stacklevel + 1,
        )
    return refused


def run_once(network: Network, step: Step) -> list[str]:
    """Name blocks that cannot run a second time in a step, and warn of them.

    Parameters
    ----------
    network : Network
        Its blocks are recomputed for a while, all together; if that fails, one by one.
    step : callable
        A training step, which runs where all blocks store.

    Returns
    -------
    list of str
        Names of blocks that write into their input, use tensors with gradients that
        they were not given, or have a ``forward`` of their own, for instance.

    Warns
    -----
    UserWarning
        If there are any, with what each raises.
    """
    allowed = network.allowed_modes()
    stored = all_stored(network)
    able = [n for n, own in allowed.items() if {Mode.STORE, Mode.RECOMPUTE} <= {*own}]

    def failure(names: list[str]) -> Exception | None:
        try:
            network.set_mode(stored | dict.fromkeys(names, Mode.RECOMPUTE))
            step()
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return error.with_traceback(None)
        return None

    with keeping_modes(network):
        together = failure(able)
        if together is None:
            return []
        alone = {name: error for name in able if (error := failure([name]))}
    if not alone:
        raise together
    warnings.warn(
        "Not recomputed, for a second run fails: "
        + "; ".join(f"{name}: {error}" for name, error in alone.items()),
        stacklevel=5,
    )
    return list(alone)


def _noting(
    found: dict[str, bool], name: str, *, is_exact: bool
) -> Callable[..., None]:
    def note(
        block: AdditiveCoupling,
        given: tuple[Tensor, Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor],
    ) -> None:
        if Autocast.now({outputs[0].device}).enabled:
            found[name] = is_exact and _same_twice(block, given, outputs)
            return
        x1, x2, mask = given
        again1, again2 = block.inverse(*outputs, mask)
        largest = _largest(x1, x2, *outputs)
        # Not so where one of these is NaN.
        found[name] = (
            _largest(again1 - x1, again2 - x2) <= TOLERANCE * largest < math.inf
        )

    return note


def _same_twice(
    block: AdditiveCoupling,
    given: tuple[Tensor, Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor],
) -> bool:
    again = block.forward(*given)
    return _largest(*outputs) < math.inf and all(
        torch.equal(new, old) for new, old in zip(again, outputs, strict=True)
    )


def _largest(*tensors: Tensor) -> float:
    """Give the largest magnitude; NaN if there is one."""
    return float(torch.stack([x.abs().max() for x in tensors]).max())
