"""Layers of an encoder: convolutions, masks, and both with a normalisation.

All work on [batch, channel, freq, time] and none of the convolutions has a bias.
Where frames are masked (padding of shorter utterances), invalid frames are zero before
every convolution, so that an utterance sees the same neighbours alone and in a batch:
the mask goes into each normalisation and multiplies each output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from speechbrain_rev.lobes.pieces import convs_by_outputs, norm_parts
from speechbrain_rev.reversible.convolution import Geometry, Reading
from speechbrain_rev.reversible.hooks import has_hooks
from speechbrain_rev.reversible.norm import BatchNorm


class Masks(NamedTuple):
    """Frame masks, [batch, 1, 1, time], at a unit's input and at its output."""

    before: Tensor | None = None
    after: Tensor | None = None


def conv3x3(
    channels: int, out_channels: int, *, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """Make a 3x3 convolution without bias that keeps the shape at stride 1."""
    return nn.Conv2d(
        channels, out_channels, 3, stride, padding=1, groups=groups, bias=False
    )


class PointwiseConv(nn.Conv2d):
    """1x1 convolution without bias, where that is faster a product of matrices."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__(channels, out_channels, 1, stride, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve [batch, channel, freq, time]."""
        return Geometry.of(self).convolve(input, self.weight)


def conv1x1(channels: int, out_channels: int, *, stride: int = 1) -> nn.Conv2d:
    """Make a 1x1 convolution without bias."""
    return PointwiseConv(channels, out_channels, stride)


def masked_(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set invalid frames to zero in place: a convolution does not need its output."""
    return x if mask is None else x.mul_(mask.to(x.dtype))


def convolved_and_masked(conv: nn.Conv2d, x: Tensor, mask: Tensor | None) -> Tensor:
    """Convolve, and set invalid frames to zero: in place where nobody sees the output."""
    y: Tensor = conv(x)
    if mask is None or (isinstance(conv, nn.Conv2d) and not has_hooks(conv)):
        return masked_(y, mask)
    return y * mask.to(y.dtype)


def convolved(conv: nn.Conv2d, given: Tensor | Reading) -> Tensor:
    """Convolve a tensor, or what the first convolution of a reading reads."""
    return conv(given) if isinstance(given, Tensor) else given.convolved(conv, 0)


class ConvNorm(nn.Module):
    """A convolution and its normalisation, with ReLU if the normalisation has one."""

    def __init__(self, conv: nn.Conv2d, norm: BatchNorm) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute [batch, channel, freq, time] of the convolution's channels."""
        return self.norm(self.conv(x), mask)


def split_layers(
    conv: nn.Conv2d, norm: BatchNorm, channels: int
) -> Iterator[tuple[nn.Conv2d, BatchNorm]]:
    """Split a convolution and its normalisation by their channels."""
    return zip(
        convs_by_outputs(conv, channels), norm_parts(norm, channels), strict=True
    )
