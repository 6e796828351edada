"""Convolutional blocks of the encoders: residual functions, stems and transitions.

All work on [batch, channel, freq, time] and none of the convolutions has a bias.
Where frames are masked (padding of shorter utterances), invalid frames are zero before
every convolution, so that an utterance sees the same neighbours alone and in a batch:
the mask goes into each normalisation and multiplies each output.

Stems, transitions and ordinary blocks are called with the masks first and then with
their input, whole or as the two halves of its channels that leave a reversible stage.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.streams import Streams, join


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


def conv1x1(channels: int, out_channels: int, *, stride: int = 1) -> nn.Conv2d:
    """Make a 1x1 convolution without bias."""
    return nn.Conv2d(channels, out_channels, 1, stride, bias=False)


def masked_(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set invalid frames to zero in place: a convolution does not need its output."""
    return x if mask is None else x.mul_(mask.to(x.dtype))


class BasicResidual(nn.Module):
    """F of a basic block: two 3x3 convolutions (equation 5).

    Parameters
    ----------
    channels : int
        Channels of the stream, half a stage's width.
    sync : bool
        Whether batch statistics are shared between processes.

    Examples
    --------
    >>> import torch
    >>> BasicResidual(8)(torch.randn(2, 8, 16, 10)).shape
    torch.Size([2, 8, 16, 10])
    """

    def __init__(self, channels: int, *, sync: bool = False) -> None:
        super().__init__()
        self.conv1 = conv3x3(channels, channels)
        self.norm = BatchNorm(channels, relu=True, sync=sync)
        self.conv2 = conv3x3(channels, channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the residual, [batch, channel, freq, time]."""
        return masked_(self.conv2(self.norm(self.conv1(x), mask)), mask)


class BottleneckResidual(nn.Module):
    """F of a bottleneck block: 1x1, 3x3 and 1x1 convolutions (equation 6).

    Parameters
    ----------
    channels : int
        Channels of the stream, a multiple of 4; the 3x3 has a fourth of them.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    def __init__(self, channels: int, *, sync: bool = False) -> None:
        super().__init__()
        middle = channels // 4
        self.conv1 = conv1x1(channels, middle)
        self.norm = BatchNorm(middle, relu=True, sync=sync)
        self.conv2 = conv3x3(middle, middle)
        self.conv3 = conv1x1(middle, channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the residual, [batch, channel, freq, time]."""
        x = self.norm(self.conv1(x), mask)
        return masked_(self.conv3(self.conv2(x)), mask)


class DFBottleneckResidual(nn.Module):
    """F of a depth-first bottleneck: 1x1 to four times, depthwise 3x3, 1x1 back.

    Equation 10.

    Parameters
    ----------
    channels : int
        Channels of the stream, half a stage's width.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    def __init__(self, channels: int, *, sync: bool = False) -> None:
        super().__init__()
        wide = 4 * channels
        self.conv1 = conv1x1(channels, wide)
        self.norm = BatchNorm(wide, relu=True, sync=sync)
        self.conv2 = conv3x3(wide, wide, groups=wide)
        self.conv3 = conv1x1(wide, channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the residual, [batch, channel, freq, time]."""
        x = self.norm(self.conv1(x), mask)
        return masked_(self.conv3(self.conv2(x)), mask)


class Stem(nn.Module):
    """3x3 convolutions from one channel, each with batch normalisation and ReLU.

    Parameters
    ----------
    width : int
        Output channels.
    convolutions : int
        How many; type I DF-RevNets have two.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    def __init__(self, width: int, convolutions: int = 1, *, sync: bool) -> None:
        super().__init__()
        inputs = [1] + [width] * (convolutions - 1)
        self.convs = nn.ModuleList(conv3x3(c, width) for c in inputs)
        self.norms = nn.ModuleList(
            BatchNorm(width, relu=True, sync=sync) for _ in inputs
        )

    def forward(self, masks: Masks, given: Tensor | Streams) -> Tensor:
        """Map [batch, 1, freq, time] to [batch, width, freq, time]."""
        x = _floats(given)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x), masks.after)
        return x


class StridedTransition(nn.Module):
    """3x3 convolution with stride 2 and batch normalisation, no ReLU.

    Parameters
    ----------
    channels, out_channels : int
        Channels before and after.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    def __init__(self, channels: int, out_channels: int, *, sync: bool) -> None:
        super().__init__()
        self.conv = conv3x3(channels, out_channels, stride=2)
        self.norm = BatchNorm(out_channels, sync=sync)

    def forward(self, masks: Masks, given: Tensor | Streams) -> Tensor:
        """Halve frequency and time, rounding up."""
        return self.norm(self.conv(_floats(given)), masks.after)


class SpaceToDepthTransition(nn.Module):
    """3x3 convolution, batch normalisation and ReLU, then space to depth (equation 9).

    [channel, freq, time] becomes [4 channel, freq / 2, time / 2] in the order of
    ``torch.pixel_unshuffle``. That normalisation and ReLU follow the convolution is
    our reading: the paper names the convolution only.

    Parameters
    ----------
    channels, out_channels : int
        Channels before and after; the convolution makes a fourth of the latter.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    def __init__(self, channels: int, out_channels: int, *, sync: bool) -> None:
        super().__init__()
        self.conv = conv3x3(channels, out_channels // 4)
        self.norm = BatchNorm(out_channels // 4, relu=True, sync=sync)

    def forward(self, masks: Masks, given: Tensor | Streams) -> Tensor:
        """Halve frequency and time, both even."""
        x = self.norm(self.conv(_floats(given)), masks.before)
        return F.pixel_unshuffle(x, 2)


class _Shortcut(nn.Module):
    """1x1 convolution and batch normalisation where a block changes the shape."""

    def __init__(
        self, channels: int, out_channels: int, stride: int, *, sync: bool
    ) -> None:
        super().__init__()
        self.conv = conv1x1(channels, out_channels, stride=stride)
        self.norm = BatchNorm(out_channels, sync=sync)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.norm(self.conv(x), mask)


class _OrdinaryBlock(nn.Module, abc.ABC):
    """What ordinary, post-activation residual blocks have in common.

    Parameters
    ----------
    channels : int
        Channels of the input.
    width : int
        The block's width, before any expansion.
    stride : int
        2 to halve frequency and time.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, *, sync: bool) -> None:
        super().__init__()
        out_channels = self.expansion * width
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels != out_channels:
            self.shortcut = _Shortcut(channels, out_channels, stride, sync=sync)

    def forward(self, masks: Masks, given: Tensor | Streams) -> Tensor:
        """Compute [batch, expansion * width, freq / stride, time / stride]."""
        x = _floats(given)
        y = self.residual(x, masks)
        y = y + (x if self.shortcut is None else self.shortcut(x, masks.after))
        return y.relu_()

    @abc.abstractmethod
    def residual(self, x: Tensor, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""


class BasicBlock(_OrdinaryBlock):
    """Two 3x3 convolutions; the first has the stride."""

    def __init__(self, channels: int, width: int, stride: int, *, sync: bool) -> None:
        super().__init__(channels, width, stride, sync=sync)
        self.conv1 = conv3x3(channels, width, stride=stride)
        self.norm1 = BatchNorm(width, relu=True, sync=sync)
        self.conv2 = conv3x3(width, width)
        self.norm2 = BatchNorm(width, sync=sync)

    def residual(self, x: Tensor, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""
        x = self.norm1(self.conv1(x), masks.after)
        return self.norm2(self.conv2(x), masks.after)


class BottleneckBlock(_OrdinaryBlock):
    """1x1, 3x3 and 1x1 convolutions, expanding four times; the 3x3 has the stride."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, *, sync: bool) -> None:
        super().__init__(channels, width, stride, sync=sync)
        self.conv1 = conv1x1(channels, width)
        self.norm1 = BatchNorm(width, relu=True, sync=sync)
        self.conv2 = conv3x3(width, width, stride=stride)
        self.norm2 = BatchNorm(width, relu=True, sync=sync)
        self.conv3 = conv1x1(width, 4 * width)
        self.norm3 = BatchNorm(4 * width, sync=sync)

    def residual(self, x: Tensor, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""
        x = self.norm1(self.conv1(x), masks.before)
        x = self.norm2(self.conv2(x), masks.after)
        return self.norm3(self.conv3(x), masks.after)


class DFBottleneckBlock(_OrdinaryBlock):
    """1x1 to four times the width, depthwise 3x3, 1x1 back."""

    def __init__(self, channels: int, width: int, stride: int, *, sync: bool) -> None:
        super().__init__(channels, width, stride, sync=sync)
        wide = 4 * width
        self.conv1 = conv1x1(channels, wide)
        self.norm1 = BatchNorm(wide, relu=True, sync=sync)
        self.conv2 = conv3x3(wide, wide, stride=stride, groups=wide)
        self.norm2 = BatchNorm(wide, relu=True, sync=sync)
        self.conv3 = conv1x1(wide, width)
        self.norm3 = BatchNorm(width, sync=sync)

    def residual(self, x: Tensor, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""
        x = self.norm1(self.conv1(x), masks.before)
        x = self.norm2(self.conv2(x), masks.after)
        return self.norm3(self.conv3(x), masks.after)


RESIDUALS: dict[str, type[nn.Module]] = {
    "basic": BasicResidual,
    "bottleneck": BottleneckResidual,
    "df_bottleneck": DFBottleneckResidual,
}
ORDINARY_BLOCKS: dict[str, type[_OrdinaryBlock]] = {
    "basic": BasicBlock,
    "bottleneck": BottleneckBlock,
    "df_bottleneck": DFBottleneckBlock,
}


def _floats(given: Tensor | Streams) -> Tensor:
    return join(given) if isinstance(given, Streams) else given
