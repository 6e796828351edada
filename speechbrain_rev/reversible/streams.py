"""The two residual streams: their number formats, and how they travel through a network.

A stream is a value and a tangent. The value holds the numbers and is no part of
autograd's graph; the tangent has the value's shape and no storage, and carries the
gradient. Values may thus be kept in a number format of their own, reconstructed in
place and dropped, while autograd sees an ordinary chain of tensors. ``enter`` makes
streams of floats and ``add`` the next ones; ``leave``, ``read``, ``read_both`` and
``join`` make floats of streams.

In the float format adding and subtracting a residual rounds twice, so that what is
reconstructed is the input up to an error that grows with depth. In the exact format
the value is a fixed-point integer; a sum of integers loses nothing, and subtracting gives
its last bit back (Gomez et al., "The Reversible Residual Network", 2017, after Maclaurin et
al., 2015), which makes the gradients of all memory modes equal bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.kernels.fixed_point import format_of, is_dense
from speechbrain_rev.modes import STREAMS
from speechbrain_rev.reversible import fixed_point as reference
from speechbrain_rev.torch_private import is_fake, storage_key


class StreamFormat:
    """Streams held as floats, at least float32: a half has too few bits to add to.

    Other formats are derived from it.

    Attributes
    ----------
    limit : float
        Magnitudes from here on are out of range.
    """

    limit = math.inf

    def encode(self, x: Tensor, largest: Tensor | None) -> Tensor:
        """Turn floats into a stream's value; may share the floats' storage.

        Parameters
        ----------
        x : torch.Tensor
            Floats.
        largest : torch.Tensor, [2], or None
            Where a format with a limit notes the largest magnitude that is put in and
            that results.

        Returns
        -------
        torch.Tensor
            The value, dense.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.detach().to(wide).contiguous(memory_format=format_of(x))

    def decode(
        self, value: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Turn a stream's value into floats; may share the value's storage."""
        return value.detach() if out is None else out.copy_(value)

    def add(
        self,
        value: Tensor,
        residuals: Sequence[Tensor],
        largest: Tensor | None,
        *,
        out: Tensor | None = None,
        floats: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """Add residuals, one after the other.

        Parameters
        ----------
        value : torch.Tensor
            The stream's.
        residuals : sequence of torch.Tensor
            At most ``AT_ONCE``.
        largest : torch.Tensor, [2], or None
            As for ``encode``.
        out : torch.Tensor or None
            Where the sum goes, as the value itself; None for a new tensor.
        floats : torch.Tensor or None
            Of ``place_of_floats``: where the sum goes as floats too.
        reuse : bool
            Whether the residuals' storage may be written to: nobody needs it any more.

        Returns
        -------
        torch.Tensor
            The sum.
        """
        for f in residuals:
            value = out = torch.add(value, f, out=out)
        return value

    def subtract(
        self,
        value: Tensor,
        f: Tensor,
        *,
        out: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """Subtract a residual: the inverse of ``add``, here up to rounding."""
        return torch.sub(value, f, out=out)

    def place_of_floats(self, value: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Make a place for what a sum is decoded to; None if it needs no decoding."""
        return None


class ExactFormat(StreamFormat):
    """Streams held in fixed point: int32 in steps of 2**-16.

    An int32 reaches to +-32,768. Half of that is the limit: two magnitudes below it
    have a sum that cannot wrap around, so a look at each number that is added and at
    each sum is enough to see every overflow. A stream of 128 or more has coarser steps
    in float32; the rounding of half-precision residuals is coarser from 2**-7 on.
    """

    steps = 2.0**16
    limit = 2.0**14

    def encode(self, x: Tensor, largest: Tensor | None) -> Tensor:
        """Round floats to the nearest step, halves to the even one."""
        return _arithmetic(x).encode(x, self.steps, largest)

    def decode(
        self, value: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Turn steps into floats, new ones."""
        fused = value.is_cuda and not is_fake(value)
        arithmetic = kernels if fused else reference
        return arithmetic.decode(value, self.steps, dtype, out)

    def add(
        self,
        value: Tensor,
        residuals: Sequence[Tensor],
        largest: Tensor | None,
        *,
        out: Tensor | None = None,
        floats: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """Add rounded residuals, one after the other."""
        arithmetic = _arithmetic(residuals[0], value)
        return arithmetic.add(value, residuals, self.steps, largest, out, floats, reuse)

    def subtract(
        self,
        value: Tensor,
        f: Tensor,
        *,
        out: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """Subtract a rounded residual: the exact inverse of ``add``."""
        arithmetic = _arithmetic(f, value)
        return arithmetic.subtract(value, f, self.steps, out, reuse)

    def place_of_floats(self, value: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Make a place for what a sum is decoded to."""
        return torch.empty_like(value, dtype=dtype)


FORMATS: dict[str, StreamFormat] = {
    name: resolve_name(path)() for name, path in STREAMS.items()
}


def as_format(streams: str) -> StreamFormat:
    """Look a stream format up by its name.

    Parameters
    ----------
    streams : str
        The name.

    Raises
    ------
    ValueError
        If there is no format of this name.
    """
    if streams not in FORMATS:
        raise ValueError(
            f"There is no stream format {streams!r}; the formats are "
            f"{', '.join(map(repr, FORMATS))}."
        )
    return FORMATS[streams]


def _arithmetic(x: Tensor, value: Tensor | None = None) -> Any:
    """Choose what computes on a tensor, and on a stream's value beside it."""
    fused = (
        x.is_cuda
        and not is_fake(x)
        and x.dtype in kernels.DTYPES
        and (value is None or is_dense(value))
        and kernels.usable(x.device, x.dtype)
    )
    return kernels if fused else reference


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

    ``validity`` is 0, or NaN once a value has been out of the format's range: it is added
    to what is made of the streams, and to its gradient. None where there is no limit.
    """

    first: Stream
    second: Stream
    format: StreamFormat
    validity: Tensor | None = None


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
    stream: Stream,
    floats: Tensor,
    validity: Tensor | None = None,
    *,
    alone: bool = False,
) -> Tensor:
    """Connect the floats that were made of a stream with its gradient.

    Parameters
    ----------
    stream : Stream
        The stream.
    floats : torch.Tensor
        What its value was decoded to.
    validity : torch.Tensor or None
        For the gradient.
    alone : bool
        Whether who reads hands down a new gradient that nobody else has, as a
        convolution does.

    Returns
    -------
    torch.Tensor
        The floats, which are not to be changed.
    """
    return _Read.apply(floats, stream.tangent, validity, alone)


def add(
    stream: Stream, f: Tensor, format: StreamFormat, largest: Tensor | None = None
) -> Stream:
    """Add a residual to a stream, in autograd's graph."""
    return Stream(*_Add.apply(*stream, f, format, largest))


@_eager
def leave(streams: Streams) -> tuple[Tensor, Tensor]:
    """Make floats of streams: copies, so that writing to them harms nothing."""
    first, second, format, validity = streams
    return (
        _Leave.apply(*first, format, validity),
        _Leave.apply(*second, format, validity),
    )


@_eager
def read_both(streams: Streams) -> tuple[Tensor, Tensor]:
    """Read both streams; what is returned may be their storage and is not to be changed."""
    first, second, format, validity = streams
    floats = [format.decode(s.value, s.tangent.dtype) for s in (first, second)]
    if validity is not None:
        # A format with a limit decodes to new floats.
        for x in floats:
            x.add_(validity.to(x.dtype))
    return read(first, floats[0], validity), read(second, floats[1], validity)


@_eager
def join(streams: Streams) -> Tensor:
    """Put both streams into one new tensor, one after the other along the channels."""
    first, second, format, validity = streams
    return _Join.apply(*first, *second, format, validity)


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


def _marked(x: Tensor, validity: Tensor | None) -> Tensor:
    return x if validity is None else x + validity.to(x.dtype)


def _own(grad: Tensor, validity: Tensor | None, layout: torch.memory_format) -> Tensor:
    """Make a gradient in a stream's layout, its alone, which is added to in place."""
    if validity is not None and grad.is_contiguous(memory_format=layout):
        return grad + validity.to(grad.dtype)
    own = grad.clone(memory_format=layout)
    return own if validity is None else own.add_(validity.to(own.dtype))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, format: StreamFormat, largest: Tensor | None, own: bool
    ) -> tuple[Tensor, Tensor]:
        # No zeros for the value, which has no gradient.
        ctx.set_materialize_grads(False)
        value = format.encode(x, largest)
        if own and storage_key(value) == storage_key(x):
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
        ctx: Any, floats: Tensor, tangent: Tensor, validity: Tensor | None, alone: bool
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.validity, ctx.alone, ctx.layout = validity, alone, format_of(floats)
        return floats.detach()

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None
    ) -> tuple[None, Tensor | None, None, None]:
        if grad is None:
            return None, None, None, None
        if not ctx.alone:
            grad = _own(grad, ctx.validity, ctx.layout)
        elif ctx.validity is not None:
            grad = grad.add_(ctx.validity.to(grad.dtype))
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
        total = format.add(value, [f], largest)
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
        validity: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.validity, ctx.layout = validity, format_of(value)
        return _marked(
            format.decode(
                value, tangent.dtype, out=torch.empty_like(value, dtype=tangent.dtype)
            ),
            validity,
        )

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None
    ) -> tuple[None, Tensor | None, None, None]:
        own = None if grad is None else _own(grad, ctx.validity, ctx.layout)
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
        validity: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.validity, ctx.channels = validity, value1.shape[1]
        ctx.layout = format_of(value1)
        x = joined((value1, value2), format, tangent1.dtype, slice(None))
        return x if validity is None else x.add_(validity.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        grad1, grad2 = grad.split(ctx.channels, dim=1)
        return (
            None,
            _own(grad1, ctx.validity, ctx.layout),
            None,
            _own(grad2, ctx.validity, ctx.layout),
            None,
            None,
        )
