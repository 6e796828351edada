"""Units: what stands between runs of reversible blocks, and how it is run.

Stems, transitions and ordinary blocks are units. They are called with the masks first
and then with their input: a tensor, or a reading of the streams that leave a stage.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from speechbrain_rev.kernels.layout import format_of
from speechbrain_rev.lobes.layers import ConvNorm, Masks, split_layers
from speechbrain_rev.lobes.pieces import can_be_split, norm_parts
from speechbrain_rev.reversible.convolution import (
    Reading,
    in_parts,
    parts_for,
    split_spent,
)
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.recompute import recompute, recompute_each, trains
from speechbrain_rev.reversible.replay import Flags
from speechbrain_rev.reversible.streams import Streams, join


class Channels(NamedTuple):
    """Channels at a time of maps of a unit's input size, and of its output size."""

    before: int
    after: int


#: Calls several modules: ``recompute_each`` or ``stored_each``.
CallEach = Callable[..., Tensor]


class Pieces(NamedTuple):
    """Modules whose outputs are parts of one tensor, with the arguments of each.

    ``channels`` are those of the whole; ``spend`` says which arguments of each are read
    by its module alone.
    """

    modules: list[nn.Module]
    inputs: list[tuple[Any, ...]]
    channels: int
    spend: tuple[int, ...] = ()

    def called(self, call: CallEach, *, last: bool = False) -> Tensor:
        """Call them; ``last`` says that the unit returns what comes of it as it is."""
        return call(
            self.modules,
            self.inputs,
            channels=self.channels,
            spend=self.spend,
            last=last,
        )


class Unit(nn.Module, abc.ABC):
    """What stands before reversible blocks, and can work on some channels at a time."""

    @abc.abstractmethod
    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Work on all channels at once."""

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Work on some channels at a time, in pieces that are called by ``call``.

        A unit of which no reversible encoder has any works on all at once.
        """
        result: Tensor = self(masks, given)
        return result

    def readers(self) -> list[nn.Conv2d]:
        """List the convolutions that read the input, if it may come as streams."""
        return []

    def is_one_layer(self) -> bool:
        """Whether nothing is made on the way that would have to be recomputed first."""
        return False


class InPieces(nn.Module):
    """A unit that works in pieces, as a module.

    Parameters
    ----------
    unit : Unit
        The unit.
    call : callable
        Calls the pieces.
    channels : Channels
        Channels at a time.
    """

    def __init__(self, unit: Unit, call: CallEach, channels: Channels) -> None:
        super().__init__()
        self.unit, self.call, self.channels = unit, call, channels

    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Run the unit."""
        return self.unit.in_pieces(self.call, self.channels, masks, given)


def stored_each(
    modules: Sequence[nn.Module],
    arguments: Sequence[tuple[Any, ...]],
    *,
    channels: int,
    spend: Collection[int] = (),
    last: bool = False,
) -> Tensor:
    """Call modules, as ``recompute_each`` does, and let autograd store.

    Gradients of a shared input are added up among these modules first, as there;
    nothing that is stored can be spent, and nothing runs a second time.
    """
    leaves, spec = tree_flatten(list(arguments))
    aliases: dict[int, Tensor] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.requires_grad:
            leaves[i] = aliases.setdefault(id(x), x.view_as(x))
    given = tree_unflatten(leaves, spec)
    outputs = [m(*inputs) for m, inputs in zip(modules, given, strict=True)]
    if len(outputs) == 1:
        return outputs[0]
    # Of one channel a piece is of two layouts, of which torch chooses either.
    layout = format_of(outputs[0])
    return torch.cat(outputs, dim=1).contiguous(memory_format=layout)


def first_layer(
    layer: ConvNorm, given: Tensor | Reading, mask: Tensor | None, channels: int
) -> Pieces:
    """Split the convolution that reads a unit's input, and its normalisation.

    Streams are read as a whole, in parts of the batch; a tensor in pieces, so that what
    is convolved exists for some channels only.
    """
    if isinstance(given, Reading):
        return _normalised(layer.norm, given.convolved(layer.conv, 0), mask, channels)
    layers = split_layers(layer.conv, layer.norm, channels)
    modules: list[nn.Module] = [ConvNorm(*split) for split in layers]
    inputs = [(given, mask)] * len(modules)
    return Pieces(modules, inputs, layer.norm.channels)


def later_layer(
    layer: ConvNorm, x: Tensor, mask: Tensor | None, channels: int
) -> Pieces:
    """Split a convolution within a unit, by the batch, and its normalisation."""
    conv = layer.conv
    y = in_parts(conv, x, parts_for(conv.in_channels, channels))
    return _normalised(layer.norm, y, mask, channels)


def _normalised(
    norm: BatchNorm, x: Tensor, mask: Tensor | None, channels: int
) -> Pieces:
    inputs = [(part, mask) for part in split_spent(x, channels)]
    return Pieces([*norm_parts(norm, channels)], inputs, norm.channels, spend=(0,))


def run_unit(
    unit: nn.Module,
    masks: Masks,
    given: Tensor | Streams,
    sizes: Sequence[int | None],
    *,
    recomputes: bool,
) -> Tensor:
    """Run a unit, in training on some channels at a time.

    Parameters
    ----------
    unit : nn.Module
        A unit; another module, which someone put in its place, is run as it is.
    masks : Masks
        At its input and output.
    given : torch.Tensor or Streams
        Its input.
    sizes : sequence of int or None
        Channels at a time of the blocks around it, before and after.
    recomputes : bool
        Whether it is computed again in the backward pass, not stored.

    Returns
    -------
    torch.Tensor
        Its output.
    """
    # Beside what is worked on there are whole maps of gradients here: half as much as
    # in a block is worked on, which costs little, for units are few.
    halves = [None if size is None else max(1, size // 2) for size in sizes]
    splits = isinstance(unit, Unit) and can_be_split(unit)
    recomputes = recomputes and trains(unit)
    x: Tensor | Reading
    if not isinstance(given, Streams):
        x = given
    else:
        x = _reading(unit, given, halves[0]) if splits else join(given)
    if not splits or not trains(unit) or None in halves:
        if recomputes:
            return cast(Tensor, recompute(unit, masks, x))
        return cast(Tensor, unit(masks, x))
    unit, channels = cast(Unit, unit), Channels(*cast(list[int], halves))
    if not recomputes and torch.compiler.is_compiling():
        # Pieces are modules made on the spot, which the compiler cannot follow.
        stored = torch.compiler.disable(unit.in_pieces)
        return cast(Tensor, stored(stored_each, channels, masks, x))
    if not recomputes:
        # By the kernels that computing again would take, as chains store.
        with Flags.now({x.device})():
            return unit.in_pieces(stored_each, channels, masks, x)
    if unit.is_one_layer() and isinstance(x, Tensor):
        return unit.in_pieces(_recomputed_alone, channels, masks, x)
    pieces = InPieces(unit, recompute_each, channels)
    return cast(Tensor, recompute(pieces, masks, x))


def _recomputed_alone(
    modules: Sequence[nn.Module],
    arguments: Sequence[tuple[Any, ...]],
    *,
    last: bool,
    **options: Any,
) -> Tensor:
    """Recompute modules of a unit that is not recomputed itself."""
    return recompute_each(modules, arguments, **options)


def _reading(unit: nn.Module, streams: Streams, channels: int | None) -> Reading:
    width = 2 * streams.first.value.shape[1]
    return Reading.of(streams, cast(Unit, unit).readers(), parts_for(width, channels))
