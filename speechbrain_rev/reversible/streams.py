"""The two residual streams as they travel between the stages of a network.

A stream is a value and a tangent. The value holds the numbers and is no part of
autograd's graph; the tangent has the value's shape and no storage, and carries the
gradient. Values may thus be kept in a number format of their own, reconstructed in
place and dropped, while autograd sees an ordinary chain of tensors. ``enter`` makes
streams of floats and ``add`` the next ones; ``leave``, ``read``, ``read_both`` and
``join`` make floats of streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speechbrain_rev.kernels.layout import format_of
from speechbrain_rev.reversible.formats import StreamFormat


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep compilers out: what they make of values and tangents has lost the gradient.

    The switch itself would import the compiler, which takes a second.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)
        return function(*arguments, **options)

    return run


class Stream(NamedTuple):
    """One of the two halves: a value without gradient and the tangent that has it."""

    value: Tensor
    tangent: Tensor


class Streams(NamedTuple):
    """Both halves and the format of their values.

    ``poison`` is 0, or NaN once a value has been out of the format's range: it is added
    to what is made of the streams, and to its gradient. None where there is no limit.
    """

    first: Stream
    second: Stream
    format: StreamFormat
    poison: Tensor | None = None


def tangent_of(
    value: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> Tensor:
    """Make a tangent that takes no memory, of the value's shape or another one."""
    tangent = torch.empty((), dtype=dtype, device=value.device)
    return tangent.expand(value.shape if shape is None else shape)


@_eager
def enter(
    x1: Tensor,
    x2: Tensor,
    format: StreamFormat,
    largest: Tensor | None = None,
    own: bool = False,
) -> Streams:
    """Make streams of floats, with storage of their own if asked for."""
    return Streams(
        Stream(*_Enter.apply(x1, format, largest, own)),
        Stream(*_Enter.apply(x2, format, largest, own)),
        format,
    )


def read(
    stream: Stream, floats: Tensor, poison: Tensor | None = None, *, alone: bool = False
) -> Tensor:
    """Connect the floats that were made of a stream with its gradient.

    Parameters
    ----------
    stream : Stream
        The stream.
    floats : torch.Tensor
        What its value was decoded to.
    poison : torch.Tensor or None
        For the gradient.
    alone : bool
        Whether who reads hands down a new gradient that nobody else has, as a
        convolution does.

    Returns
    -------
    torch.Tensor
        The floats, which are not to be changed.
    """
    return _Read.apply(floats, stream.tangent, poison, alone)


def add(
    stream: Stream, f: Tensor, format: StreamFormat, largest: Tensor | None = None
) -> Stream:
    """Add a residual to a stream, in autograd's graph."""
    return Stream(*_Add.apply(*stream, f, format, largest))


@_eager
def leave(streams: Streams) -> tuple[Tensor, Tensor]:
    """Make floats of streams: copies, so that writing to them harms nothing."""
    first, second, format, poison = streams
    return (
        _Leave.apply(*first, format, poison),
        _Leave.apply(*second, format, poison),
    )


@_eager
def read_both(streams: Streams) -> tuple[Tensor, Tensor]:
    """Read both streams; what is returned may be their storage and is not to be changed."""
    first, second, format, poison = streams
    floats = [format.decode(s.value, s.tangent.dtype) for s in (first, second)]
    if poison is not None:
        # A format with a limit decodes to new floats.
        for x in floats:
            x.add_(poison.to(x.dtype))
    return read(first, floats[0], poison), read(second, floats[1], poison)


@_eager
def join(streams: Streams) -> Tensor:
    """Put both streams into one new tensor, one after the other along the channels."""
    first, second, format, poison = streams
    return _Join.apply(*first, *second, format, poison)


def joined(
    values: tuple[Tensor, Tensor],
    format: StreamFormat,
    dtype: torch.dtype,
    part: slice,
) -> Tensor:
    """Decode a part of the batch of both streams, side by side, without a graph."""
    first, second = (value[part] for value in values)
    x = torch.empty(
        (first.shape[0], 2 * first.shape[1], *first.shape[2:]),
        dtype=dtype,
        device=first.device,
        memory_format=format_of(first),
    )
    for half, value in zip(x.chunk(2, dim=1), (first, second), strict=True):
        format.decode(value, dtype, out=half)
    return x


def _poisoned(x: Tensor, poison: Tensor | None) -> Tensor:
    return x if poison is None else x + poison.to(x.dtype)


def _own(grad: Tensor, poison: Tensor | None) -> Tensor:
    """Make a gradient that is the stream's alone, which is added to in place."""
    return grad.clone() if poison is None else grad + poison.to(grad.dtype)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, format: StreamFormat, largest: Tensor | None, own: bool
    ) -> tuple[Tensor, Tensor]:
        # No zeros for the value, which has no gradient.
        ctx.set_materialize_grads(False)
        value = format.encode(x, largest)
        if own and value.untyped_storage()._cdata == x.untyped_storage()._cdata:
            value = value.clone()
        ctx.mark_non_differentiable(value)
        ctx.dtype = x.dtype
        dtype = torch.promote_types(x.dtype, torch.float32)
        return value, tangent_of(value, dtype)

    @staticmethod
    def backward(
        ctx: Any, _: Any, grad: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        return None if grad is None else grad.to(ctx.dtype), None, None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, floats: Tensor, tangent: Tensor, poison: Tensor | None, alone: bool
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.poison, ctx.alone = poison, alone
        return floats.detach()

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None
    ) -> tuple[None, Tensor | None, None, None]:
        if grad is None:
            return None, None, None, None
        if not ctx.alone:
            grad = _own(grad, ctx.poison)
        elif ctx.poison is not None:
            grad = grad.add_(ctx.poison.to(grad.dtype))
        return None, grad, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        tangent: Tensor,
        f: Tensor,
        format: StreamFormat,
        largest: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype = f.dtype
        total = format.add(value, f, largest)
        ctx.mark_non_differentiable(total)
        return total, tangent_of(total, tangent.dtype)

    @staticmethod
    def backward(
        ctx: Any, _: Any, grad: Tensor | None
    ) -> tuple[None, Tensor | None, Tensor | None, None, None]:
        if grad is None:
            return None, None, None, None, None
        # The stream's own is added to in place, so the residual gets another one.
        return None, grad, grad.to(ctx.dtype, copy=True), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        tangent: Tensor,
        format: StreamFormat,
        poison: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.poison = poison
        return _poisoned(
            format.decode(
                value, tangent.dtype, out=torch.empty_like(value, dtype=tangent.dtype)
            ),
            poison,
        )

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None
    ) -> tuple[None, Tensor | None, None, None]:
        own = None if grad is None else _own(grad, ctx.poison)
        return None, own, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value1: Tensor,
        tangent1: Tensor,
        value2: Tensor,
        tangent2: Tensor,
        format: StreamFormat,
        poison: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.poison, ctx.channels = poison, value1.shape[1]
        x = joined((value1, value2), format, tangent1.dtype, slice(None))
        return x if poison is None else x.add_(poison.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        grad1, grad2 = grad.split(ctx.channels, dim=1)
        return None, _own(grad1, ctx.poison), None, _own(grad2, ctx.poison), None, None
