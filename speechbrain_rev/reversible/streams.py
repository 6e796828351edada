"""The two residual streams as they travel between the stages of a network.

A stream is a value and a tangent. The value holds the numbers and is no part of
autograd's graph; the tangent has the value's shape and no storage, and carries the
gradient. Values may thus be kept in a number format of their own, reconstructed in
place and dropped, while autograd sees an ordinary chain of tensors. Only ``enter``
makes streams of floats and only ``leave`` makes floats of streams.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class FloatFormat:
    """Streams held as floats, at least float32: a half has too few bits to add to."""

    name = "float"

    def encode(self, x: Tensor) -> Tensor:
        """Turn floats into a stream's value; may share the floats' storage."""
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        channels_last = x.dim() == 4 and x.stride(1) == 1
        return wide.contiguous(
            memory_format=torch.channels_last
            if channels_last
            else torch.contiguous_format
        )

    def decode(self, value: Tensor) -> Tensor:
        """Turn a stream's value into floats; may share the value's storage."""
        return value.detach()

    def add(self, value: Tensor, f: Tensor) -> Tensor:
        """Add a residual; the value stays as it is."""
        return torch.add(value, f)

    def add_(self, value: Tensor, f: Tensor) -> Tensor:
        """Add a residual in place."""
        return value.add_(f)

    def subtract(self, value: Tensor, f: Tensor) -> Tensor:
        """Subtract a residual; the value stays as it is."""
        return torch.sub(value, f)

    def subtract_(self, value: Tensor, f: Tensor) -> Tensor:
        """Subtract a residual in place: the inverse of ``add_``."""
        return value.sub_(f)

    def tangent(self, value: Tensor) -> Tensor:
        """Make a tangent of the value's shape that takes no memory."""
        return torch.empty((), dtype=value.dtype, device=value.device).expand_as(value)


FORMATS: dict[str, FloatFormat] = {"float": FloatFormat()}


def as_format(streams: str) -> FloatFormat:
    """Look a stream format up by its name.

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


class Stream(NamedTuple):
    """One of the two halves: a value without gradient and the tangent that has it."""

    value: Tensor
    tangent: Tensor


class Streams(NamedTuple):
    """Both halves and the format of their values."""

    first: Stream
    second: Stream
    format: FloatFormat


def enter(x1: Tensor, x2: Tensor, format: FloatFormat) -> Streams:
    """Make streams of floats."""
    return Streams(
        Stream(*_Enter.apply(x1, format)), Stream(*_Enter.apply(x2, format)), format
    )


def read(stream: Stream, format: FloatFormat) -> Tensor:
    """Give a stream to a residual function, with its gradient connected."""
    return _Read.apply(*stream, format)


def add(stream: Stream, f: Tensor, format: FloatFormat) -> Stream:
    """Add a residual to a stream, in autograd's graph."""
    return Stream(*_Add.apply(*stream, f, format))


def leave(streams: Streams) -> tuple[Tensor, Tensor]:
    """Make floats of streams: copies, so that writing to them harms nothing."""
    first, second, format = streams
    return _Leave.apply(*first, format), _Leave.apply(*second, format)


def read_both(streams: Streams) -> tuple[Tensor, Tensor]:
    """Read both streams; what is returned may be their storage and is not to be changed."""
    first, second, format = streams
    return read(first, format), read(second, format)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: FloatFormat) -> tuple[Tensor, Tensor]:
        value = format.encode(x)
        ctx.mark_non_differentiable(value)
        ctx.dtype = x.dtype
        return value, format.tangent(value)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, tangent: Tensor, format: FloatFormat
    ) -> Tensor:
        return format.decode(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, grad, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, tangent: Tensor, f: Tensor, format: FloatFormat
    ) -> tuple[Tensor, Tensor]:
        ctx.dtype = f.dtype
        total = format.add(value, f)
        ctx.mark_non_differentiable(total)
        return total, format.tangent(total)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        return None, grad, grad.to(ctx.dtype), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, tangent: Tensor, format: FloatFormat
    ) -> Tensor:
        return format.decode(value).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, grad, None
