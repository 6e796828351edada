"""What units of an encoder are made of: convolutions, masks, steps of pieces.

All work on [batch, channel, freq, time] and none of the convolutions has a bias.
Where frames are masked (padding of shorter utterances), invalid frames are zero before
every convolution, so that an utterance sees the same neighbours alone and in a batch:
the mask goes into each normalisation and multiplies each output.

Stems, transitions and ordinary blocks are units. They are called with the masks first
and then with their input: a tensor, or the streams that leave a reversible stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from speechbrain_rev.lobes.pieces import (
    can_be_split,
    convs_by_inputs,
    convs_by_outputs,
    norm_parts,
)
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.recompute import recompute_each
from speechbrain_rev.reversible.streams import Streams, join, read_both


class Masks(NamedTuple):
    """Frame masks, [batch, 1, 1, time], at a unit's input and at its output."""

    before: Tensor | None = None
    after: Tensor | None = None


class Step(NamedTuple):
    """A part of a unit's work, in pieces whose outputs follow each other by channel.

    ``joins`` says what of the unit's input the pieces take beside the step before:
    nothing, all of it, or each its own channels.
    """

    pieces: Sequence[nn.Module]
    joins: Literal["nothing", "input", "channels"] = "nothing"

    def run(
        self,
        call: Callable[..., list[Tensor]],
        masks: Masks,
        now: Tensor | Streams,
        given: Tensor | Streams,
    ) -> Tensor:
        """Call the pieces, and put what they return into one tensor.

        ``call`` takes the pieces and the arguments of each.
        """
        taken: Iterable[Any] = itertools.repeat(now)
        if self.joins == "input":
            taken = itertools.repeat((now, given))
        elif self.joins == "channels":
            sizes = [cast(BatchNorm, piece.norm).channels for piece in self.pieces]
            parts = cast(Tensor, given).split(sizes, dim=1)
            taken = ((now, part) for part in parts)
        given_each = zip(self.pieces, taken, strict=False)
        outputs = call(self.pieces, [((masks, x), {}) for _, x in given_each])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def stored_each(
    modules: Sequence[nn.Module], arguments: Sequence[tuple[tuple[Any, ...], Any]]
) -> list[Tensor]:
    """Call each module, as ``recompute_each`` does, and let autograd store.

    Gradients of a shared input are added up among these modules first, as there.
    """
    leaves, spec = tree_flatten(list(arguments))
    aliases: dict[int, Tensor] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.requires_grad:
            leaves[i] = aliases.setdefault(id(x), x.view_as(x))
    given = tree_unflatten(leaves, spec)
    return [m(*inputs) for m, (inputs, _) in zip(modules, given, strict=True)]


class RecomputedSteps(nn.Module):
    """Steps that are recomputed piece by piece, for a unit that is recomputed itself.

    Of such a unit nothing but the input waits for the backward pass; the outputs of its
    steps live from the unit's second run on, and those of a piece while it runs again.

    Parameters
    ----------
    steps : sequence of Step
        In their order.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.pieces = nn.ModuleList(piece for step in steps for piece in step.pieces)

    def forward(self, masks: Masks, given: Tensor | Streams) -> Tensor:
        """Run the steps one after the other."""
        now = given
        for step in self.steps:
            now = step.run(recompute_each, masks, now, given)
        return cast(Tensor, now)


def conv3x3(
    channels: int, out_channels: int, *, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """Make a 3x3 convolution without bias that keeps the shape at stride 1."""
    return nn.Conv2d(
        channels, out_channels, 3, stride, padding=1, groups=groups, bias=False
    )


def conv1x1(channels: int, out_channels: int, *, stride: int = 1) -> nn.Conv2d:
    """Make a 1x1 convolution without bias."""
    return nn.Conv2d(channels, out_channels, 1, stride, bias=False)


def masked_(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set invalid frames to zero in place: a convolution does not need its output."""
    return x if mask is None else x.mul_(mask.to(x.dtype))


class ConvNorm(nn.Module):
    """A convolution and its normalisation, with ReLU if the normalisation has one.

    Parameters
    ----------
    conv : nn.Conv2d
        The convolution.
    norm : BatchNorm
        The normalisation.
    strided : bool
        Whether the output has the frames after the unit, not those before it.
    """

    def __init__(self, conv: nn.Conv2d, norm: BatchNorm, strided: bool = True) -> None:
        super().__init__()
        self.conv, self.norm, self.strided = conv, norm, strided

    def forward(self, masks: Masks, given: Tensor | Streams) -> Tensor:
        """Compute [batch, channel, freq, time] of the convolution's channels."""
        mask = masks.after if self.strided else masks.before
        return cast(Tensor, self.norm(convolved(self.conv, given), mask))


def split_layers(
    conv: nn.Conv2d, norm: BatchNorm, channels: int
) -> Iterable[tuple[nn.Conv2d, BatchNorm]]:
    """Split a convolution and its normalisation by their channels."""
    return zip(
        convs_by_outputs(conv, channels), norm_parts(norm, channels), strict=True
    )


def convolved(conv: nn.Conv2d, given: Tensor | Streams) -> Tensor:
    """Convolve one tensor, or streams half by half."""
    if isinstance(given, Tensor):
        return cast(Tensor, conv(given))
    if not can_be_split(conv):
        return cast(Tensor, conv(join(given)))
    first, second = read_both(given, alone=True)
    halves = convs_by_inputs(conv, first.shape[1])
    return cast(Tensor, halves[0](first) + halves[1](second))
