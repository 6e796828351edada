"""Convolutions that work on a part of the batch at a time.

A convolution takes each utterance by itself. What it reads and the gradient that it hands
down therefore need to exist for a part of the batch only, while batch normalisation,
which takes each channel by itself, works on some channels at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from speechbrain_rev.compression.layers import Kind, layer_function
from speechbrain_rev.kernels.layout import format_of
from speechbrain_rev.reversible.autocast import Autocast, autocast_off
from speechbrain_rev.reversible.flags import Flags


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
            _pair, (conv.stride, conv.padding, conv.dilation)
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
            found = torch.ops.aten.convolution_backward(
                grad, x, narrow, None, self.stride, self.padding, self.dilation,
                False, [0, 0], self.groups, [of_x, of_weight, False],
            )  # fmt: skip
            return found[0], found[1]
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

    def _is_product(self, x: Tensor, weight: Tensor) -> bool:
        """Whether each utterance is a matrix that the weight is multiplied with.

        On a CPU that takes less time where channels are few. The weight's gradient is a
        matrix for each utterance, so that maps must be larger than these. Tensors without
        data are counted as on a CPU.
        """
        return (
            x.device.type in ("cpu", "meta")
            and self.groups == 1
            and set(self.stride) == {1}
            and set(self.padding) == {0}
            and weight.shape[2:].numel() == 1
            and 8 * weight.shape[0] <= x.shape[2:].numel()
            and x.is_contiguous()
            and not torch._C._is_tracing()
        )

    def shape(self, x: Sequence[int], weight: Tensor) -> list[int]:
        """Tell the shape of the output."""
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
    """Tell how many parts of a batch take as much as some channels of all of it.

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
            found, own = ctx.geometry.gradients(
                of_part, x[part], weight, of_x, total.wanted
            )
            total.add(own)
            return x.new_empty(len(x[part]), 0) if found is None else found

        parts = parts_of(len(x), ctx.parts)
        with ctx.flags():
            if torch.is_grad_enabled():  # to differentiate twice
                found = torch.cat([gradient(part) for part in parts])
            else:
                found = filled(len(x), ctx.parts, gradient)
        return found if of_x else None, total.value, None, None, None


class WeightGradient:
    """The gradient of a weight, summed over the parts of a batch in the weight's dtype."""

    def __init__(self, weight: Tensor, wanted: bool) -> None:
        self._dtype, self.wanted = weight.dtype, wanted
        self.value: Tensor | None = None

    def add(self, found: Tensor | None) -> None:
        """Add what a part gave."""
        if found is not None and self.wanted:
            found = found.to(self._dtype)
            if self.value is None:
                self.value = found
            elif torch.is_grad_enabled():
                self.value = self.value + found
            else:
                self.value.add_(found)


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


def split_spent(x: Tensor, channels: int) -> tuple[Tensor, ...]:
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
    parts: tuple[Tensor, ...] = _SplitSpent.apply(x, channels)
    return parts


class _SplitSpent(torch.autograd.Function):
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
        storages = {grad.untyped_storage()._cdata for grad in grads}
        found = [(grad.shape, grad.stride(), grad.storage_offset()) for grad in grads]
        if len(storages) == 1 and found == ctx.parts:
            return grads[0].as_strided(*ctx.places), None
        return torch.cat(grads, dim=1), None
