"""Residual functions that begin and end with convolutions.

Where they are narrow between these, as bottlenecks are, what they read of a stream and what
they add to one is most of the memory. Both are computed for a part of the batch at a time,
and so are the gradients that reach the streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from speechbrain_rev.reversible.convolution import (
    Geometry,
    WeightGradient,
    filled,
    in_parts,
    parts_of,
)
from speechbrain_rev.reversible.formats import StreamFormat
from speechbrain_rev.reversible.gradients import Gradients, Root
from speechbrain_rev.reversible.replay import Recording, repeated


class LinearEnds(nn.Module):
    """A residual function whose convolutions work on a part of the batch at a time.

    Parameters
    ----------
    first : nn.Conv2d
        Without bias, as the last ones.
    middle : nn.Module
        Called with the first one's output, and with the mask or None.
    last : sequence of nn.Conv2d
        One after the other.
    parts : int
        Parts of the batch.
    """

    def __init__(
        self, first: nn.Conv2d, middle: nn.Module, last: Sequence[nn.Conv2d], parts: int
    ) -> None:
        super().__init__()
        self.first, self.middle, self.last = first, middle, nn.ModuleList(last)
        self.parts = parts

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the residual, [batch, channel, freq, time]."""
        x = self.middle(in_parts(self.first, x, self.parts), mask)
        *convs, end = self.last
        for conv in convs:
            x = in_parts(cast(nn.Conv2d, conv), x, self.parts)
        return in_parts(cast(nn.Conv2d, end), x, self.parts, mask)


def undo_ends(
    f: LinearEnds,
    recording: Recording,
    gradients: Gradients,
    run: int,
    format: StreamFormat,
    mask: Tensor | None,
    kept: tuple[Tensor, Tensor],
    changed: tuple[Tensor, Tensor],
) -> None:
    """Run a residual function again, subtract it, and add its gradients, all in place.

    Parameters
    ----------
    f : LinearEnds
        The function.
    recording : Recording
        Of its first run.
    gradients : Gradients
        Where those of its parameters go.
    run : int
        Its place among the runs of the backward pass.
    format : StreamFormat
        Of the streams.
    mask : torch.Tensor or None
        As in the first run.
    kept, changed : tuple of torch.Tensor
        Value and gradient of the stream that it reads, and of that which it was added
        to.
    """
    leaves = gradients.leaves(run)
    places = {id(module): (i, "weight") for i, module in enumerate(f.modules())}
    with repeated(f, recording, leaves):
        x = _read(f, kept, format)
        hidden = f.middle(x, mask)
        of_hidden, of_weights = _subtract(f, hidden.detach(), changed, format, mask)
    for conv, of_weight in zip(f.last, of_weights, strict=True):
        gradients.keep(run, places[id(conv)], of_weight)
    root = Root(hidden, of_hidden)
    del hidden, of_hidden
    with recording.flags():
        (of_x,) = gradients.backward(run, [root], [x])
        del x, root
        assert of_x is not None
        first = places[id(f.first)]
        gradients.keep(run, first, _add(leaves[first], f, of_x, kept, format))


@torch.no_grad()
def _read(f: LinearEnds, kept: tuple[Tensor, Tensor], format: StreamFormat) -> Tensor:
    """Run the first convolution; what it returns begins a graph."""
    value, grad = kept

    def convolve(part: slice) -> Tensor:
        return f.first(format.decode(value[part], grad.dtype))

    return filled(len(value), f.parts, convolve).requires_grad_()


@torch.no_grad()
def _subtract(
    f: LinearEnds,
    hidden: Tensor,
    changed: tuple[Tensor, Tensor],
    format: StreamFormat,
    mask: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Subtract what the last convolutions return; give their gradients."""
    value, grad = changed
    convs = [cast(nn.Conv2d, conv) for conv in f.last]
    totals = [WeightGradient(c.weight, c.weight.requires_grad) for c in convs]

    def gradient(part: slice) -> Tensor:
        given = [hidden[part]]
        for conv in convs:
            given.append(conv(given[-1]))
        y = given.pop()
        found = grad[part].to(y.dtype)
        if mask is not None:
            y.mul_(mask[part].to(y.dtype))
            found = found * mask[part].to(y.dtype)
        format.subtract_(value[part], y, spend=True)
        del y
        for conv, total in zip(reversed(convs), reversed(totals), strict=True):
            of_x, of_weight = Geometry.of(conv).gradients(
                found, given.pop(), conv.weight, True, total.wanted
            )
            total.add(of_weight)
            assert of_x is not None
            found = of_x
        return found

    of_hidden = filled(len(value), f.parts, gradient)
    return of_hidden, [total.value for total in totals]


@torch.no_grad()
def _add(
    weight: Tensor,
    f: LinearEnds,
    of_x: Tensor,
    kept: tuple[Tensor, Tensor],
    format: StreamFormat,
) -> Tensor | None:
    """Add the first convolution's gradient to the stream's; give its weight's."""
    value, grad = kept
    geometry = Geometry.of(f.first)
    total = WeightGradient(weight, weight.requires_grad)
    for part in parts_of(len(value), f.parts):
        x = format.decode(value[part], grad.dtype)
        of_part, of_weight = geometry.gradients(
            of_x[part], x, weight, True, total.wanted
        )
        del x
        total.add(of_weight)
        assert of_part is not None
        grad[part].add_(of_part)
        del of_part
    return total.value
