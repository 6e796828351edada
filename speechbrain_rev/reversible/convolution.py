"""Convolutions that work on a part of the batch at a time, and read streams so.

A convolution takes each utterance by itself. What it reads and the gradient that it hands
down therefore need to exist for a part of the batch only, while batch normalisation,
which takes each channel by itself, works on some channels at a time.

Streams are floats only where they are needed: for a part of the batch, once in the
forward pass and once in the backward pass, where all convolutions that read them hand
down their gradients together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.compression.layers import Kind, layer_function
from speechbrain_rev.kernels.fixed_point import format_of
from speechbrain_rev.reversible.flags import Flags
from speechbrain_rev.reversible.replay import Autocast, autocast_off
from speechbrain_rev.reversible.streams import (
    Stream,
    StreamFormat,
    Streams,
    joined,
    read,
    tangent_of,
)
from speechbrain_rev.torch_private import is_tracing, pair, storage_key


class Geometry(NamedTuple):
    """How a convolution slides, along frequency and along time, and its groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, conv: nn.Conv2d) -> Geometry:
        """Read it off a convolution."""
        if isinstance(conv.padding, str):
            raise ValueError(
                f"{conv} has padding={conv.padding!r}; give numbers, as (1, 1)."
            )
        # A number stands for two, if someone set it after the convolution was made.
        stride, padding, dilation = map(
            pair, (conv.stride, conv.padding, conv.dilation)
        )
        return cls(stride, padding, dilation, conv.groups)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve without bias."""
        if not self._is_product(x, weight):
            return F.conv2d(x, weight, None, *self)
        return _product(x, weight)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute gradients of input and weight, in the dtype of the output's gradient."""
        product = self._is_product(x, weight)
        x, narrow = x.to(grad.dtype), weight.to(grad.dtype)
        if not product:
            slope = torch.ops.aten.convolution_backward(
                grad, x, narrow, None, self.stride, self.padding, self.dilation,
                False, [0, 0], self.groups, [of_x, of_weight, False],
            )  # fmt: skip
            return slope[0], slope[1]
        first = second = None
        flat = grad.flatten(2)
        # A backward pass under autocast would round to half.
        with autocast_off(grad.device):
            if of_x:
                matrices = narrow.flatten(1).t().expand(len(x), -1, -1)
                first = torch.bmm(matrices, flat).unflatten(2, x.shape[2:])
            if of_weight:
                products = torch.bmm(flat, x.flatten(2).transpose(1, 2))
                second = products.sum(0, dtype=weight.dtype).view_as(weight)
        return first, second

    def gradients_added(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        total: Tensor | None,
        of_weight: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Add the input's gradient to a total, in its place; give the weight's as well.

        As products add to what is there, the input's gradient is not written apart.
        """
        product = (
            total is not None
            and total.dtype is grad.dtype
            and self._is_matrix(weight)
            and total.is_contiguous()
            and grad.is_contiguous()
            and (grad.is_cuda or self._is_product(x, weight))
        )
        of_x, slope = self.gradients(grad, x, weight, not product, of_weight)
        if total is None:
            assert of_x is not None
            wide = torch.promote_types(of_x.dtype, torch.float32)
            return of_x.to(wide), slope
        if not product:
            assert of_x is not None
            return total.add_(of_x), slope
        matrices = weight.to(grad.dtype).flatten(1).t().expand(len(x), -1, -1)
        with autocast_off(grad.device):
            total.flatten(2).baddbmm_(matrices, grad.flatten(2))
        return total, slope

    def _is_matrix(self, weight: Tensor) -> bool:
        """Whether each position is multiplied by the weight, alone."""
        return (
            self.groups == 1
            and set(self.stride) == {1}
            and set(self.padding) == {0}
            and weight.shape[2:].numel() == 1
        )

    def _is_product(self, x: Tensor, weight: Tensor) -> bool:
        """Whether each utterance is a matrix that the weight is multiplied with.

        On a CPU that takes less time where channels are few. The weight's gradient is a
        matrix for each utterance, so that maps must be larger than these. Tensors without
        data are counted as on a CPU.
        """
        return (
            x.device.type in ("cpu", "meta")
            and self._is_matrix(weight)
            and 8 * weight.shape[0] <= x.shape[2:].numel()
            and x.is_contiguous()
            and not is_tracing()
        )

    def shape(self, x: Sequence[int], weight: Tensor) -> list[int]:
        """Give the shape of the output."""
        stride, padding, dilation = self.stride, self.padding, self.dilation
        sizes = [
            (n + 2 * padding[i] - dilation[i] * (k - 1) - 1) // stride[i] + 1
            for i, (n, k) in enumerate(zip(x[2:], weight.shape[2:], strict=True))
        ]
        return [x[0], weight.shape[0], *sizes]


@layer_function(Kind.CONVOLUTION)
def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve with a 1x1 weight, as a product of matrices."""
    matrices = weight.flatten(1).expand(len(x), -1, -1)
    y = torch.bmm(matrices, x.flatten(2))
    return y.unflatten(2, x.shape[2:])


def parts_of(batch: int, parts: int) -> list[slice]:
    """Split a batch into parts of one size, the last of which may be smaller.

    Parameters
    ----------
    batch : int
        Utterances.
    parts : int
        How many parts are wanted; there are more where the batch is no multiple of it.

    Returns
    -------
    list of slice
        Of at least one utterance each.

    Examples
    --------
    >>> parts_of(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    size = max(1, batch // parts)
    return [slice(start, start + size) for start in range(0, batch, size)]


def parts_for(width: int, channels: int | None) -> int:
    """Return how many parts of a batch take as much as some channels of all of it.

    Parameters
    ----------
    width : int
        Channels of the map that is taken in parts.
    channels : int or None
        Channels of all utterances that may be taken at a time; None for all.

    Returns
    -------
    int
        A power of two, so that batches which are one are split evenly.

    Examples
    --------
    >>> parts_for(96, 12), parts_for(96, 10), parts_for(96, None)
    (8, 16, 1)
    """
    return (
        1 if channels is None else 1 << max(0, -(-width // channels) - 1).bit_length()
    )


def in_parts(
    conv: nn.Conv2d, x: Tensor, parts: int, mask: Tensor | None = None
) -> Tensor:
    """Convolve the parts of a batch one after the other, forward and backward.

    Parameters
    ----------
    conv : nn.Conv2d
        Without bias.
    x : torch.Tensor, [batch, channel, freq, time]
        What is convolved.
    parts : int
        How many parts; gradients depend on it within rounding.
    mask : torch.Tensor, [batch, 1, 1, time], or None
        The output is multiplied by it.

    Returns
    -------
    torch.Tensor
        The output.
    """
    autocast = Autocast.now({x.device})
    x = x.to(autocast.dtype) if autocast.enabled else x
    return _in_parts(x, conv.weight, Geometry.of(conv), parts, mask)


@layer_function(Kind.CONVOLUTION)
def _in_parts(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    y: Tensor = _InParts.apply(x, weight, *others)
    return y


class _InParts(torch.autograd.Function):
    #: What is saved may be compressed.
    saves_layer_input = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        geometry: Geometry,
        parts: int,
        mask: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.geometry, ctx.parts, ctx.mask = geometry, parts, mask
        ctx.flags = Flags.now({x.device})
        ctx.save_for_backward(x, weight)

        def convolve(part: slice) -> Tensor:
            y = geometry.convolve(x[part], weight)
            return y if mask is None else y.mul_(mask[part].to(y.dtype))

        return filled(len(x), parts, convolve)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        total = WeightGradient(weight, of_weight)

        def gradient(part: slice) -> Tensor:
            of_part = grad[part]
            if ctx.mask is not None:
                of_part = of_part * ctx.mask[part].to(grad.dtype)
            slope, own = ctx.geometry.gradients(
                of_part, x[part], weight, of_x, total.wanted
            )
            total.add(own)
            return x.new_empty(len(x[part]), 0) if slope is None else slope

        parts = parts_of(len(x), ctx.parts)
        with ctx.flags():
            if torch.is_grad_enabled():  # to differentiate twice
                slope = torch.cat([gradient(part) for part in parts])
            else:
                slope = filled(len(x), ctx.parts, gradient)
        return slope if of_x else None, total.value, None, None, None


def convolve_stream(
    conv: nn.Conv2d, x: Tensor, tangent: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve floats of a stream, whose gradient is added to where it is.

    Parameters
    ----------
    conv : nn.Conv2d
        Without bias.
    x : torch.Tensor, [batch, channel, freq, time]
        What a stream's value was decoded to.
    tangent : torch.Tensor, [batch, channel, freq, time]
        The stream's.

    Returns
    -------
    y : torch.Tensor
        The output.
    tangent : torch.Tensor
        What stands for the stream from here on: the gradient that it is given is the
        storage of the first one's.
    """
    autocast = Autocast.now({x.device})
    x = x.to(autocast.dtype) if autocast.enabled else x
    after: list[Tensor] = []
    y = _convolve_stream(x, conv.weight, tangent, Geometry.of(conv), after)
    return y, after.pop()


@layer_function(Kind.CONVOLUTION)
def _convolve_stream(
    x: Tensor, weight: Tensor, tangent: Tensor, geometry: Geometry, after: list[Tensor]
) -> Tensor:
    y, tangent = _ConvolveStream.apply(x, weight, tangent, geometry)
    after.append(tangent)
    return y


class _ConvolveStream(torch.autograd.Function):
    #: What is saved may be compressed.
    saves_layer_input = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tangent: Tensor, geometry: Geometry
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.geometry, ctx.flags = geometry, Flags.now({x.device})
        ctx.save_for_backward(x, weight)
        after = tangent.detach()
        if not tangent.requires_grad:
            ctx.mark_non_differentiable(after)
        return geometry.convolve(x, weight), after

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if grad is None:
            return None, None, total, None
        x, weight = ctx.saved_tensors
        _, of_weight, of_stream, _ = ctx.needs_input_grad
        with ctx.flags():
            if torch.is_grad_enabled():  # to differentiate twice
                of_x, slope = ctx.geometry.gradients(
                    grad, x, weight, ctx.needs_input_grad[0], of_weight
                )
                return of_x, slope, total, None
            if not of_stream:
                return None, ctx.geometry.gradients(
                    grad, x, weight, False, of_weight
                )[1], None, None  # fmt: skip
            total, slope = ctx.geometry.gradients_added(
                grad, x, weight, total, of_weight
            )
        return None, slope, total, None


class WeightGradient:
    """The gradient of a weight, summed over the parts of a batch in the weight's dtype."""

    def __init__(self, weight: Tensor, wanted: bool) -> None:
        self._dtype, self.wanted = weight.dtype, wanted
        self.value: Tensor | None = None

    def add(self, slope: Tensor | None) -> None:
        """Add what a part gave."""
        if slope is not None and self.wanted:
            slope = slope.to(self._dtype)
            if self.value is None:
                self.value = slope
            elif torch.is_grad_enabled():
                self.value = self.value + slope
            else:
                self.value.add_(slope)


def filled(batch: int, parts: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """Compute the parts of a tensor, none of which waits for the others.

    Parameters
    ----------
    batch : int
        Utterances.
    parts : int
        How many parts.
    compute : callable
        From a part of the batch to its values, without a graph.

    Returns
    -------
    torch.Tensor
        In the layout of the first part.
    """
    first, *others = parts_of(batch, parts)
    value = compute(first)
    if not others:
        return value
    whole = torch.empty(
        (batch, *value.shape[1:]),
        dtype=value.dtype,
        device=value.device,
        memory_format=format_of(value),
    )
    whole[first] = value
    del value
    for part in others:
        whole[part] = compute(part)
    return whole


def split_for_reuse(x: Tensor, channels: int) -> tuple[Tensor, ...]:
    """Split a tensor by its channels for readers that it has no others beside.

    Where they left their gradients in its storage, nothing is copied to join these.

    Parameters
    ----------
    x : torch.Tensor, [batch, channel, freq, time]
        The tensor.
    channels : int
        Of each part; the last may have fewer.

    Returns
    -------
    tuple of torch.Tensor
        The parts.
    """
    parts: tuple[Tensor, ...] = _SplitForReuse.apply(x, channels)
    return parts


class _SplitForReuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # The tensor itself is not kept: its contents are not needed here.
        ctx.places = x.shape, x.stride(), x.storage_offset()
        parts = x.split(channels, dim=1)
        ctx.parts = [
            (part.shape, part.stride(), part.storage_offset()) for part in parts
        ]
        return tuple(part.detach() for part in parts)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, None]:
        example = next((grad for grad in given if grad is not None), None)
        if example is None:
            return None, None
        grads = [
            example.new_zeros(shape) if grad is None else grad
            for grad, (shape, *_) in zip(given, ctx.parts, strict=True)
        ]
        storages = {storage_key(grad) for grad in grads}
        places = [(grad.shape, grad.stride(), grad.storage_offset()) for grad in grads]
        if len(storages) == 1 and places == ctx.parts:
            return grads[0].as_strided(*ctx.places), None
        return torch.cat(grads, dim=1), None


class Reading(NamedTuple):
    """Streams that convolutions read: what each makes of them is computed when asked.

    A tangent stands for each convolution's output, so that its gradient can wait for
    the others' and reach the streams in one pass.
    """

    values: tuple[Tensor, Tensor]
    dtype: torch.dtype
    format: StreamFormat
    validity: Tensor | None
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
        first, second, format, validity = streams
        tangents = _ReadConvolved.apply(
            tuple(map(Geometry.of, convs)), format, validity, parts, *first, *second,
            *(conv.weight for conv in convs),
        )  # fmt: skip
        values = first.value, second.value
        return cls(values, first.tangent.dtype, format, validity, parts, tangents)

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
        with torch.no_grad():
            weight = _marked(conv.weight, self.validity)

            def convolve(part: slice) -> Tensor:
                x = joined(self.values, self.format, self.dtype, part)
                return geometry.convolve(x, weight)

            y = filled(len(self.values[0]), self.parts, convolve)
        return read(Stream(y, tangent), y, alone=True)


class _ReadConvolved(torch.autograd.Function):
    """Gradients of streams and weights; the outputs are computed elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        geometries: Sequence[Geometry],
        format: StreamFormat,
        validity: Tensor | None,
        parts: int,
        value1: Tensor,
        tangent1: Tensor,
        value2: Tensor,
        tangent2: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.geometries, ctx.format, ctx.validity = geometries, format, validity
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
        if ctx.validity is not None and of_x:
            validity = ctx.validity.to(tangent1.dtype)
            add = torch.add if torch.is_grad_enabled() else Tensor.add_
            halves = [add(half, validity) for half in halves]
        return (
            None, None, None, None, None, halves[0], None, halves[1],
            *(own.value for own in sums),
        )  # fmt: skip


def _marked(weight: Tensor, validity: Tensor | None) -> Tensor:
    """Make all that a weight is multiplied with NaN where streams were out of range."""
    return weight if validity is None else weight + validity.to(weight.dtype)


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
