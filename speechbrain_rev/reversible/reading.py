"""Convolutions that read the streams which leave a stage.

Streams are floats only where they are needed: for a part of the batch, once in the
forward pass and once in the backward pass, where all convolutions that read them hand
down their gradients together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speechbrain_rev.reversible.autocast import Autocast
from speechbrain_rev.reversible.convolution import (
    Geometry,
    WeightGradient,
    filled,
    parts_of,
)
from speechbrain_rev.reversible.flags import Flags
from speechbrain_rev.reversible.formats import StreamFormat
from speechbrain_rev.reversible.streams import (
    Stream,
    Streams,
    joined,
    read,
    tangent_of,
)


class Reading(NamedTuple):
    """Streams that convolutions read: what each makes of them is computed when asked.

    A tangent stands for each convolution's output, so that its gradient can wait for
    the others' and reach the streams in one pass.
    """

    values: tuple[Tensor, Tensor]
    dtype: torch.dtype
    format: StreamFormat
    poison: Tensor | None
    parts: int
    tangents: tuple[Tensor, ...]

    @classmethod
    def of(cls, streams: Streams, convs: Sequence[nn.Conv2d], parts: int) -> Reading:
        """Connect convolutions with streams.

        Parameters
        ----------
        streams : Streams
            What leaves a stage.
        convs : sequence of nn.Conv2d
            All that will read them, each without bias.
        parts : int
            Parts of the batch that exist as floats one after the other.

        Returns
        -------
        Reading
            To be asked once for each of the convolutions, by its place among them.
        """
        first, second, format, poison = streams
        tangents = _Read.apply(
            tuple(map(Geometry.of, convs)), format, poison, parts, *first, *second,
            *(conv.weight for conv in convs),
        )  # fmt: skip
        values = first.value, second.value
        return cls(values, first.tangent.dtype, format, poison, parts, tangents)

    @property
    def device(self) -> torch.device:
        """Where the streams are."""
        return self.values[0].device

    def convolved(self, conv: nn.Conv2d, place: int) -> Tensor:
        """Compute what a convolution makes of the streams, connected with its gradient.

        Parameters
        ----------
        conv : nn.Conv2d
            One of those that were given.
        place : int
            Its place among them.

        Returns
        -------
        torch.Tensor
            The output, for one reader that hands down a gradient of its own.
        """
        geometry, tangent = Geometry.of(conv), self.tangents[place]

        def convolve(part: slice) -> Tensor:
            x = joined(self.values, self.format, self.dtype, part)
            return geometry.convolve(x, conv.weight)

        with torch.no_grad():
            y = filled(len(self.values[0]), self.parts, convolve)
            if self.poison is not None:
                y.add_(self.poison.to(y.dtype))
        return read(Stream(y, tangent), y, alone=True)


class _Read(torch.autograd.Function):
    """Gradients of streams and weights; the outputs are computed elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        geometries: Sequence[Geometry],
        format: StreamFormat,
        poison: Tensor | None,
        parts: int,
        value1: Tensor,
        tangent1: Tensor,
        value2: Tensor,
        tangent2: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.geometries, ctx.format, ctx.poison = geometries, format, poison
        ctx.parts, ctx.flags = parts, Flags.now({value1.device})
        ctx.save_for_backward(value1, tangent1, value2, tangent2, *weights)
        autocast = Autocast.now({value1.device})
        dtype = autocast.dtype if autocast.enabled else tangent1.dtype
        batch, half, *sides = value1.shape
        return tuple(
            tangent_of(value1, dtype, geometry.shape([batch, 2 * half, *sides], weight))
            for geometry, weight in zip(geometries, weights, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        value1, tangent1, value2, tangent2, *weights = ctx.saved_tensors
        streams = Stream(value1, tangent1), Stream(value2, tangent2)
        wanted = ctx.needs_input_grad[8:]
        sums = [WeightGradient(w, n) for w, n in zip(weights, wanted, strict=True)]
        of_x = ctx.needs_input_grad[5] or ctx.needs_input_grad[7]

        def gradient(x: Tensor, part: slice) -> Tensor | None:
            total: Tensor | None = None
            ends = zip(ctx.geometries, grads, weights, sums, strict=True)
            for geometry, grad, weight, own in ends:
                if grad is not None:
                    of_part, of_weight = geometry.gradients(
                        grad[part], x, weight, of_x, own.wanted
                    )
                    own.add(of_weight)
                    if of_part is not None:
                        of_part = of_part.to(x.dtype)
                        total = of_part if total is None else total + of_part
            return total

        with ctx.flags():
            if torch.is_grad_enabled():
                halves = _differentiable(ctx, streams, gradient)
            else:
                halves = _part_by_part(ctx, streams, gradient, of_x)
        if ctx.poison is not None and of_x:
            poison = ctx.poison.to(tangent1.dtype)
            add = torch.add if torch.is_grad_enabled() else Tensor.add_
            halves = [add(half, poison) for half in halves]
        return (
            None, None, None, None, None, halves[0], None, halves[1],
            *(own.value for own in sums),
        )  # fmt: skip


_Gradient = Callable[[Tensor, slice], "Tensor | None"]


def _part_by_part(
    ctx: Any, streams: tuple[Stream, Stream], gradient: _Gradient, of_x: bool
) -> Any:
    """Fill the gradients of both streams, with the floats of one part at a time."""
    values, dtype = (streams[0].value, streams[1].value), streams[0].tangent.dtype
    half = values[0].shape[1]
    halves = [torch.empty_like(v, dtype=dtype) if of_x else None for v in values]
    for part in parts_of(len(values[0]), ctx.parts):
        of_part = gradient(joined(values, ctx.format, dtype, part), part)
        if of_part is not None:
            for whole, own in zip(halves, of_part.split(half, dim=1), strict=True):
                assert whole is not None
                whole[part] = own
    return halves


def _differentiable(
    ctx: Any, streams: tuple[Stream, Stream], gradient: _Gradient
) -> Any:
    """Compute the gradients of both streams as a function of the streams."""
    floats = [ctx.format.decode(s.value, s.tangent.dtype) for s in streams]
    x = torch.cat([read(s, y) for s, y in zip(streams, floats, strict=True)], dim=1)
    of_x = gradient(x, slice(None))
    return (None, None) if of_x is None else of_x.split(floats[0].shape[1], dim=1)
