"""What a block keeps between its forward and its backward pass."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable


class Mode(str, enum.Enum):
    """What a block keeps in memory for the backward pass.

    Members
    -------
    STORE
        All activations, as autograd does.
    RECONSTRUCT
        Nothing: the inputs are reconstructed from the outputs. Needs an invertible
        block.
    RECOMPUTE
        The inputs, from which the activations are computed again.
    COMPRESS
        All activations, those that convolutions and batch normalisations take within an
        error bound. The one mode whose gradients differ from the others'.

    Examples
    --------
    >>> as_mode("reconstruct")
    <Mode.RECONSTRUCT: 'reconstruct'>
    """

    STORE = "store"
    RECONSTRUCT = "reconstruct"
    RECOMPUTE = "recompute"
    COMPRESS = "compress"


#: Modes with one gradient to the bit, which every coupling can have. Nothing takes another
#: without being asked to.
LOSSLESS = (Mode.STORE, Mode.RECONSTRUCT, Mode.RECOMPUTE)
#: Modes in which a block runs once and autograd keeps its activations.
STORING = (Mode.STORE, Mode.COMPRESS)
#: Lossless ones of a block whose input does not follow from its output.
WITHOUT_INVERSE = (Mode.STORE, Mode.RECOMPUTE)


@runtime_checkable
class AppliedPlan(Protocol):
    """What gives blocks their modes by itself, as a ``planner.Plan`` does."""

    def apply(self, module: Any, /) -> None:
        """Give the blocks of a module modes."""


def fallback(mode: Mode, allowed: Collection[str]) -> Mode:
    """Give a block a mode, or let it recompute, which every trained block can.

    Parameters
    ----------
    mode : Mode
        The mode that is wanted.
    allowed : collection of Mode or str
        Those that the block can have, or their names.

    Returns
    -------
    Mode
        One of these; the first where it cannot even recompute.

    Examples
    --------
    >>> fallback(Mode.RECONSTRUCT, WITHOUT_INVERSE)
    <Mode.RECOMPUTE: 'recompute'>
    """
    for each in (mode, Mode.RECOMPUTE):
        if each in allowed:
            return each
    return Mode(next(iter(allowed)))


def as_mode(mode: Mode | str) -> Mode:
    """Turn a mode's name into the mode.

    Parameters
    ----------
    mode : Mode or str
        A mode or its name.

    Returns
    -------
    Mode
        The mode.

    Raises
    ------
    ValueError
        If there is no mode of this name.
    """
    try:
        return Mode(mode)
    except ValueError:
        names = ", ".join(repr(m.value) for m in Mode)
        raise ValueError(
            f"There is no memory mode {mode!r}; the modes are {names}."
        ) from None
