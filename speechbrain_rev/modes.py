"""What a block keeps between its forward and its backward pass."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ModeSpec:
    """All that the package knows of a memory mode: a row of the table of modes.

    Attributes
    ----------
    name : str
        As users write it.
    keeps : str
        What a block keeps for its backward pass, in words.
    column : str
        Short heading of a table's column.
    colour : str
        In pictures, as "#RRGGBB".
    lossless : bool
        Whether gradients are those of the other modes to the bit. A plan takes what is
        not lossless for ``max_gradient_error`` only.
    needs_inverse : bool
        Whether the block's input must follow from its output.
    runs_twice : bool
        Whether the block runs again in the backward pass.
    planned : bool
        Whether a plan may give it to blocks.
    joins : bool
        Whether the block runs again in one go with the block before it, which then has
        to run twice too.
    context : str
        Names what makes the context in which a block that runs once runs forward, as
        "package.module:function", which is imported when a block first asks for it.
    """

    name: str
    keeps: str
    column: str
    colour: str
    lossless: bool = True
    needs_inverse: bool = False
    runs_twice: bool = False
    planned: bool = True
    joins: bool = False
    context: str = "contextlib:nullcontext"

    @cached_property
    def around(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context that is put around a block."""
        make: Callable[[], AbstractContextManager[None]] = resolve_name(self.context)
        return make


#: Number formats of the streams of reversible blocks, as "package.module:Class".
STREAMS = {
    "exact": "speechbrain_rev.reversible.streams:ExactFormat",
    "float": "speechbrain_rev.reversible.streams:StreamFormat",
}
#: Memory formats of feature maps and of convolutions' weights, likewise.
MEMORY_FORMATS = {
    "contiguous": "torch:contiguous_format",
    "channels_last": "torch:channels_last",
}


class Mode(str, enum.Enum):
    """What a block keeps in memory for the backward pass.

    Each member is one row: knobs, tables, pictures and plans read all they know of a mode
    from its ``spec``. A block in a mode that neither needs an inverse nor runs twice runs
    within ``spec.around()``; a new mode of this kind is one row more.

    Members
    -------
    STORE
        All activations, as autograd does.
    SELECTIVE
        All activations but outputs of normalisation, ReLU and GELU whose input is kept:
        the backward pass makes them again.
    RECONSTRUCT
        Nothing: the inputs are reconstructed from the outputs. Needs an invertible
        block.
    RECOMPUTE
        The inputs, from which the activations are computed again.
    JOIN
        Nothing: the block before it, which recomputes or joins too, runs again first and
        makes the inputs. A run of blocks keeps the input of its first one, and in its
        backward pass all activations of the run.
    COMPRESS
        All activations, those that convolutions and batch normalisations take within an
        error bound. The one mode whose gradients differ from the others'.

    Attributes
    ----------
    spec : ModeSpec
        The row.

    Examples
    --------
    >>> as_mode("reconstruct")
    <Mode.RECONSTRUCT: 'reconstruct'>
    >>> [mode.value for mode in Mode if mode.spec.runs_twice]
    ['reconstruct', 'recompute', 'join']
    """

    _value_: str
    spec: ModeSpec

    def __new__(cls, spec: ModeSpec | str) -> Mode:
        """Make a member that is a str, its name. Types see look-ups by name here, too."""
        assert isinstance(spec, ModeSpec)
        mode = str.__new__(cls, spec.name)
        mode._value_, mode.spec = spec.name, spec
        return mode

    @property
    def alone(self) -> Mode:
        """What a block does in this mode that has none before it to join."""
        return Mode.RECOMPUTE if self.spec.joins else self

    def can_follow(self, before: Mode | str | None) -> bool:
        """Whether a block can have this mode after one that has another, or after none."""
        runs_again = before is not None and Mode(before).alone is Mode.RECOMPUTE
        return not self.spec.joins or runs_again

    STORE = ModeSpec("store", "all activations", "store", "#8C8C8C")
    SELECTIVE = ModeSpec(
        "selective",
        "its input and those of normalisations, whose outputs are made again",
        "sel.",
        "#CC79A7",
        context="speechbrain_rev.reversible.selective:selecting",
    )
    RECONSTRUCT = ModeSpec(
        "reconstruct",
        "nothing, as the input follows from the output",
        "reconstr.",
        "#0072B2",
        needs_inverse=True,
        runs_twice=True,
    )
    RECOMPUTE = ModeSpec(
        "recompute", "its input", "recomp.", "#56B4E9", runs_twice=True
    )
    JOIN = ModeSpec(
        "join",
        "nothing, as it runs again with the block before",
        "join",
        "#009E73",
        runs_twice=True,
        joins=True,
    )
    COMPRESS = ModeSpec(
        "compress",
        "all activations, compressed within an error bound",
        "compr.",
        "#D55E00",
        lossless=False,
        context="speechbrain_rev.compression.activations:registering",
    )


#: Modes that a block can have whatever the block before it has.
ALONE = tuple(mode for mode in Mode if mode.alone is mode)
#: Those with one gradient to the bit, which every coupling can have. Nothing takes another
#: without being asked to.
LOSSLESS = tuple(mode for mode in ALONE if mode.spec.lossless)
#: Lossless ones of a block whose input does not follow from its output.
WITHOUT_INVERSE = tuple(mode for mode in LOSSLESS if not mode.spec.needs_inverse)
#: Those of such a block that follows another one.
FOLLOWING = (*WITHOUT_INVERSE, Mode.JOIN)


def is_lossless(modes: Iterable[Mode | str]) -> bool:
    """Whether blocks with these modes have the gradients of stored ones to the bit.

    Examples
    --------
    >>> is_lossless(["store", "recompute"]), is_lossless(["store", "compress"])
    (True, False)
    """
    return all(Mode(mode).spec.lossless for mode in {*modes})


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
    for each in (mode, mode.alone, Mode.RECOMPUTE):
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
