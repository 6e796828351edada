"""Which modes blocks can really have, found in steps that try them."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from speechbrain_rev.modes import Mode
from speechbrain_rev.planner.memory import is_out_of_memory
from speechbrain_rev.planner.network import (
    Network,
    all_stored,
    as_network,
    call,
    keeping_modes,
    own_batch,
    tensors_of,
    warn_caller,
)
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
from speechbrain_rev.reversible.recompute import JoinWarning, kept_its_input
from speechbrain_rev.reversible.replay import Autocast

#: The largest difference, as a share of the largest number that goes in or comes out.
#: Reconstruction in float32 is exact to 1e-7 of that, and residual functions may make it
#: 10,000 times as much. What computes something else the second time differs by
#: parts of what it adds: other masks of dropout, for instance, by all of it.
TOLERANCE = 1e-3


def reproduced(
    module: nn.Module, example_batch: Any, blocks: str | Sequence[str] = ()
) -> dict[str, bool]:
    """Run a network in evaluation and reconstruct the input of each coupling.

    Exact streams come back to the bit, whatever residual functions do, if these compute the
    same twice. Float streams lose something, and each further block loses more: under
    autocast none is reconstructed.

    Parameters
    ----------
    module : nn.Module
        A network that has numbers. A copy runs, under the autocast that is in force.
    example_batch : tensor, or tuple, list or dict of such
        What it is called with.
    blocks : sequence of str
        Names of blocks, as for ``plan``.

    Returns
    -------
    dict of str to bool
        For each coupling that ran, by its block's name, whether its inverse gave back
        its input. NaN and infinity never come back.

    Examples
    --------
    >>> class Noise(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.randn_like(x)
    >>> pairs = [(nn.Tanh(), nn.Tanh()), (nn.Tanh(), Noise())]
    >>> chain = ReversibleChain(AdditiveCoupling(f, g) for f, g in pairs)
    >>> reproduced(chain, (torch.ones(2, 3), torch.ones(2, 3)))
    {'blocks.0': True, 'blocks.1': False}
    """
    own = copy.deepcopy(module).eval()
    same: dict[str, bool] = {}
    chains = [m for m in own.modules() if isinstance(m, ReversibleChain)]
    exact = {id(b) for c in chains if c.format_name == "exact" for b in c.blocks}

    def compare(name: str, block: nn.Module, given: Any, outputs: Any) -> None:
        (x1, x2, mask), (y1, y2) = given, outputs
        largest = _largest(x1, x2, y1, y2)
        if Autocast.now({y1.device}).enabled:
            again = block.forward(*given)
            pairs = zip(again, outputs, strict=True)
            equal = largest < math.inf and all(torch.equal(a, y) for a, y in pairs)
            same[name] = id(block) in exact and equal
            return
        back1, back2 = cast(AdditiveCoupling, block).inverse(y1, y2, mask)
        off = _largest(back1 - x1, back2 - x2)
        same[name] = off <= TOLERANCE * largest < math.inf  # False where one is NaN.

    for name, block in as_network(own, blocks).named_blocks().items():
        if isinstance(block, AdditiveCoupling):
            block.register_forward_hook(functools.partial(compare, name))
    devices = {x.device for x in tensors_of(example_batch) if x.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        call(own, own_batch(example_batch))
    return same


def _largest(*tensors: Tensor) -> float:
    """Give the largest magnitude; NaN if there is one."""
    return float(torch.stack([x.abs().max() for x in tensors]).max())


def tried_modes(
    network: Network, run: Callable[[], Any]
) -> dict[str, tuple[Mode, ...]]:
    """Try which blocks can run a second time in a step, and which in one go.

    Parameters
    ----------
    network : Network
        Its blocks are recomputed for a while, all together; if that fails, one by one.
        Then they join.
    run : callable
        A training step, which runs where all blocks store.

    Returns
    -------
    dict of str to tuple of Mode
        By block those of its modes that it can really have. One that writes into its
        input, uses tensors with gradients that it was not given, or has a ``forward`` of
        its own, for instance, cannot recompute. One whose input is not just what the
        block before it returned, both times, cannot join.

    Warns
    -----
    UserWarning
        If some cannot recompute, with what each raises.
    """
    stored = all_stored(network)
    allowed = dict(network.allowed_modes())
    able = [n for n, own in allowed.items() if {Mode.STORE, Mode.RECOMPUTE} <= {*own}]

    def failure(names: Sequence[str], joins: Sequence[str] = ()) -> Exception | None:
        modes = dict.fromkeys(names, Mode.RECOMPUTE) | dict.fromkeys(joins, Mode.JOIN)
        try:
            network.set_mode(stored | modes)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", JoinWarning)
                run()
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return error.with_traceback(None)
        return None

    with keeping_modes(network):
        together = failure(able)
        once: dict[str, Exception] = {}
        if together is not None:
            once = {n: error for n in able if (error := failure([n]))}
            if not once:
                raise together
            warn_caller(
                "Not recomputed, for a second run fails: "
                + "; ".join(
                    str(error) if str(error).startswith(name) else f"{name}: {error}"
                    for name, error in once.items()
                )
            )
        again = [name for name in able if name not in once]
        may_join = getattr(network, "may_join", ())
        joins = [n for n in again if n in may_join or Mode.JOIN in allowed[n]]
        if joins and failure(again, joins) is not None:
            # A block that runs again may make another input of the next one than before.
            joins = [name for name in joins if failure(again, [name]) is None]
            if failure(again, joins) is not None:
                joins = []
    blocks = network.named_blocks()
    joined = [name for name in joins if not kept_its_input(blocks[name])]
    own = {n: tuple(m for m in allowed[n] if m is not Mode.JOIN) for n in allowed}
    own |= {n: tuple(m for m in own[n] if m is not Mode.RECOMPUTE) for n in once}
    return own | {name: (*own[name], Mode.JOIN) for name in joined}
