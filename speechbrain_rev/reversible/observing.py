"""Tell who watches a training step where one block ends and the next begins.

A network runs its blocks in order, and back in the backward pass. What is alive or what
time it is at these moments is what a planner wants to know of each block; hooks do not
show it, for chains call parts of their blocks by themselves.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator

from torch import Tensor, nn


class Moment(enum.Enum):
    """What happens to a block in a training step, in this order."""

    FORWARD_BEGINS = "forward begins"
    FORWARD_ENDS = "forward ends"
    BACKWARD_BEGINS = "backward begins"


#: Called with each block and moment; at a time there are none, or very few. One list for
#: all threads, for autograd runs the backward pass of a GPU in a thread of its own.
_observers: list[Callable[[nn.Module, Moment], None]] = []


@contextlib.contextmanager
def observed(observer: Callable[[nn.Module, Moment], None]) -> Iterator[None]:
    """Tell an observer of the moments of blocks for a while.

    Parameters
    ----------
    observer : callable
        Called with a block, which is a coupling of a chain, or a stem, transition or
        ordinary block of an encoder, and a moment.

    Examples
    --------
    >>> import torch
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> chain = ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())])
    >>> x = torch.randn(2, 4, requires_grad=True)
    >>> with observed(lambda block, moment: print(moment.value)):
    ...     torch.add(*chain(x, x)).sum().backward()
    forward begins
    forward ends
    backward begins
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def tell(block: nn.Module, moment: Moment) -> None:
    """Tell all observers of a moment."""
    for observer in _observers:
        observer(block, moment)


def tell_end(block: nn.Module, *outputs: Tensor) -> None:
    """Tell that a block's forward pass ends, and when the first gradient is there."""
    if not _observers:
        return
    tell(block, Moment.FORWARD_ENDS)
    told = False

    def begins(_: Tensor) -> None:
        nonlocal told
        if not told:
            told = True
            tell(block, Moment.BACKWARD_BEGINS)

    for output in outputs:
        if output.requires_grad:
            output.register_hook(begins)
