"""Number formats of the residual streams: what a value holds and how it is added to.

In the float format adding and subtracting a residual rounds twice, so that what is
reconstructed is the input up to an error that grows with depth. In the exact format
the value is a fixed-point integer; a sum of integers loses nothing and is undone to the
last bit (Gomez et al., "The Reversible Residual Network", 2017, after Maclaurin et
al., 2015), which makes the gradients of all memory modes equal bit for bit.
"""

from __future__ import annotations

import abc
import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.kernels.layout import format_of, is_dense
from speechbrain_rev.reversible import fixed_point as reference
from speechbrain_rev.reversible.compiled import FixedPoint


class StreamFormat(abc.ABC):
    """What a stream's value is, made of floats, added to, and turned into floats.

    Attributes
    ----------
    name : str
        What ``streams=`` calls it.
    limit : float
        Magnitudes from here on are out of range.
    """

    name: str
    limit: float

    @abc.abstractmethod
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
            The value.
        """

    @abc.abstractmethod
    def decode(
        self, value: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Turn a stream's value into floats; may share the value's storage."""

    @abc.abstractmethod
    def add(
        self, value: Tensor, f: Tensor, largest: Tensor | None, *, spend: bool = False
    ) -> Tensor:
        """Add a residual; the value stays as it is.

        Parameters
        ----------
        value : torch.Tensor
            The stream's.
        f : torch.Tensor
            The residual.
        largest : torch.Tensor, [2], or None
            As for ``encode``.
        spend : bool
            Whether the residual's storage may be written to: nobody needs it any more.

        Returns
        -------
        torch.Tensor
            The sum.
        """

    @abc.abstractmethod
    def add_(
        self, value: Tensor, f: Tensor, largest: Tensor | None, *, spend: bool = False
    ) -> Tensor:
        """Add a residual in place."""

    @abc.abstractmethod
    def subtract(self, value: Tensor, f: Tensor, *, spend: bool = False) -> Tensor:
        """Subtract a residual; the value stays as it is."""

    @abc.abstractmethod
    def subtract_(self, value: Tensor, f: Tensor, *, spend: bool = False) -> Tensor:
        """Subtract a residual in place: the inverse of ``add_``."""


class FloatFormat(StreamFormat):
    """Streams held as floats, at least float32: a half has too few bits to add to."""

    name = "float"
    limit = math.inf

    def encode(self, x: Tensor, largest: Tensor | None) -> Tensor:
        """Keep floats, widened and dense."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.detach().to(wide).contiguous(memory_format=format_of(x))

    def decode(
        self, value: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Give the value itself, unless a place is given."""
        return value.detach() if out is None else out.copy_(value)

    def add(
        self, value: Tensor, f: Tensor, largest: Tensor | None, *, spend: bool = False
    ) -> Tensor:
        """Add a residual; the value stays as it is."""
        return torch.add(value, f)

    def add_(
        self, value: Tensor, f: Tensor, largest: Tensor | None, *, spend: bool = False
    ) -> Tensor:
        """Add a residual in place."""
        return value.add_(f)

    def subtract(self, value: Tensor, f: Tensor, *, spend: bool = False) -> Tensor:
        """Subtract a residual; the value stays as it is."""
        return torch.sub(value, f)

    def subtract_(self, value: Tensor, f: Tensor, *, spend: bool = False) -> Tensor:
        """Subtract a residual in place: up to rounding the inverse of ``add_``."""
        return value.sub_(f)


class ExactFormat(StreamFormat):
    """Streams held in fixed point: int32 in steps of 2**-16.

    An int32 reaches to +-32,768. Half of that is the limit: two magnitudes below it
    have a sum that cannot wrap around, so a look at each number that is added and at
    each sum is enough to see every overflow. A stream of 128 or more has coarser steps
    in float32; the rounding of half-precision residuals is coarser from 2**-7 on.

    Parameters
    ----------
    backend : str or None
        Who compiles the adding of residuals, where no kernel of ours does it.
    """

    name = "exact"
    steps = 2.0**16
    limit = 2.0**14

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend

    def encode(self, x: Tensor, largest: Tensor | None) -> Tensor:
        """Round floats to the nearest step, halves to the even one."""
        return _arithmetic(x).encode(x, self.steps, largest)

    def decode(
        self, value: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Turn steps into floats, new ones."""
        fused = value.is_cuda and not isinstance(value, FakeTensor)
        arithmetic = kernels if fused else reference
        return arithmetic.decode(value, self.steps, dtype, out)

    def add(
        self, value: Tensor, f: Tensor, largest: Tensor | None, *, spend: bool = False
    ) -> Tensor:
        """Add a rounded residual; the value stays as it is."""
        return _arithmetic(f, value, self.backend).add(
            value, f, self.steps, largest, None, spend
        )

    def add_(
        self, value: Tensor, f: Tensor, largest: Tensor | None, *, spend: bool = False
    ) -> Tensor:
        """Add a rounded residual in place."""
        return _arithmetic(f, value, self.backend).add(
            value, f, self.steps, largest, value, spend
        )

    def subtract(self, value: Tensor, f: Tensor, *, spend: bool = False) -> Tensor:
        """Subtract a rounded residual; the value stays as it is."""
        return _arithmetic(f, value, self.backend).subtract(
            value, f, self.steps, None, spend
        )

    def subtract_(self, value: Tensor, f: Tensor, *, spend: bool = False) -> Tensor:
        """Subtract a rounded residual in place: the exact inverse of ``add_``."""
        return _arithmetic(f, value, self.backend).subtract(
            value, f, self.steps, value, spend
        )


FORMATS: dict[str, StreamFormat] = {f.name: f for f in (FloatFormat(), ExactFormat())}


def as_format(streams: str, backend: str | None = None) -> StreamFormat:
    """Look a stream format up by its name.

    Parameters
    ----------
    streams : str
        The name.
    backend : str or None
        Who compiles its arithmetic, if that pays: floats are added by one operation.

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
    if streams == ExactFormat.name and backend is not None:
        return _compiled_exact(backend)
    return FORMATS[streams]


@functools.cache
def _compiled_exact(backend: str) -> ExactFormat:
    return ExactFormat(backend)


def _arithmetic(
    x: Tensor, value: Tensor | None = None, backend: str | None = None
) -> Any:
    """Choose what computes on a tensor, and on a stream's value beside it."""
    fused = (
        x.is_cuda
        and not isinstance(x, FakeTensor)
        and x.dtype in kernels.DTYPES
        and (value is None or is_dense(value))
        and kernels.usable(x.device, x.dtype)
    )
    if fused:
        return kernels
    return reference if backend is None or x.is_cuda else FixedPoint(backend)
