"""Blocks of the encoders: residual functions, and ordinary residual blocks."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor, nn

from speechbrain_rev.lobes.layers import (
    ConvNorm,
    Masks,
    Step,
    conv1x1,
    conv3x3,
    convolved,
    masked_,
    split_layers,
)
from speechbrain_rev.lobes.pieces import (
    can_be_split,
    convs_by_inputs,
    convs_by_outputs,
    norm_parts,
    with_modules,
)
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.streams import Streams


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

    def pieces(self, channels: int) -> Sequence[nn.Module]:
        """Split into functions of some hidden channels each, which add up to this one."""
        if channels >= self.norm.channels or not can_be_split(self):
            return [self]
        layers = zip(
            convs_by_outputs(self.conv1, channels),
            norm_parts(self.norm, channels),
            convs_by_inputs(self.conv2, channels),
            strict=True,
        )
        return [with_modules(self, conv1=a, norm=n, conv2=b) for a, n, b in layers]


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

    def pieces(self, channels: int) -> Sequence[nn.Module]:
        """Split into functions of some hidden channels each, which add up to this one."""
        if channels >= self.norm.channels or not can_be_split(self):
            return [self]
        layers = zip(
            convs_by_outputs(self.conv1, channels),
            norm_parts(self.norm, channels),
            convs_by_outputs(self.conv2, channels),
            convs_by_inputs(self.conv3, channels),
            strict=True,
        )
        return [
            with_modules(self, conv1=a, norm=n, conv2=b, conv3=c)
            for a, n, b, c in layers
        ]


class _Shortcut(nn.Module):
    """1x1 convolution and batch normalisation where a block changes the shape."""

    def __init__(
        self, channels: int, out_channels: int, stride: int, *, sync: bool
    ) -> None:
        super().__init__()
        self.conv = conv1x1(channels, out_channels, stride=stride)
        self.norm = BatchNorm(out_channels, sync=sync)

    def forward(self, given: Tensor | Streams, mask: Tensor | None) -> Tensor:
        return self.norm(convolved(self.conv, given), mask)


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
        self.shortcut: _Shortcut | None = None
        if stride != 1 or channels != out_channels:
            self.shortcut = _Shortcut(channels, out_channels, stride, sync=sync)

    def forward(self, masks: Masks, given: Tensor | Streams) -> Tensor:
        """Compute [batch, expansion * width, freq / stride, time / stride]."""
        if self.shortcut is not None:
            skipped = self.shortcut(given, masks.after)
        else:
            skipped = given
        return (self.residual(given, masks) + skipped).relu_()

    @abc.abstractmethod
    def residual(self, given: Tensor | Streams, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""

    @abc.abstractmethod
    def steps(self, before: int, after: int) -> Sequence[Step]:
        """Split into convolutions, and these into some channels at a time.

        Parameters
        ----------
        before, after : int
            Channels at a time of maps of the input's size, and of the output's.

        Returns
        -------
        sequence of Step
            The last adds the shortcut.
        """

    def _closing(self, conv: nn.Conv2d, norm: BatchNorm, channels: int) -> Step:
        """Split the last convolution, the shortcut and what follows them."""
        layers = split_layers(conv, norm, channels)
        if self.shortcut is None:
            return Step([_Closing(*layer, None) for layer in layers], "channels")
        shortcuts = split_layers(self.shortcut.conv, self.shortcut.norm, channels)
        pieces = [
            _Closing(*layer, with_modules(self.shortcut, conv=b, norm=n))
            for layer, (b, n) in zip(layers, shortcuts, strict=True)
        ]
        return Step(pieces, "input")


class _Closing(nn.Module):
    """Some channels of a block's last convolution, its shortcut, and their ReLU."""

    def __init__(
        self, conv: nn.Conv2d, norm: BatchNorm, shortcut: _Shortcut | None
    ) -> None:
        super().__init__()
        self.conv, self.norm, self.shortcut = conv, norm, shortcut

    def forward(self, masks: Masks, taken: tuple[Tensor, Tensor | Streams]) -> Tensor:
        x, given = taken
        y = self.norm(self.conv(x), masks.after)
        if self.shortcut is not None:
            given = self.shortcut(given, masks.after)
        return (y + given).relu_()


class BasicBlock(_OrdinaryBlock):
    """Two 3x3 convolutions; the first has the stride."""

    def __init__(self, channels: int, width: int, stride: int, *, sync: bool) -> None:
        super().__init__(channels, width, stride, sync=sync)
        self.conv1 = conv3x3(channels, width, stride=stride)
        self.norm1 = BatchNorm(width, relu=True, sync=sync)
        self.conv2 = conv3x3(width, width)
        self.norm2 = BatchNorm(width, sync=sync)

    def residual(self, given: Tensor | Streams, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""
        x = self.norm1(convolved(self.conv1, given), masks.after)
        return self.norm2(self.conv2(x), masks.after)

    def steps(self, before: int, after: int) -> Sequence[Step]:
        """Split into convolutions, and these into some channels at a time."""
        if not can_be_split(self):
            return [Step([self])]
        first = split_layers(self.conv1, self.norm1, after)
        return [
            Step([ConvNorm(*layer) for layer in first]),
            self._closing(self.conv2, self.norm2, after),
        ]


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

    def residual(self, given: Tensor | Streams, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""
        x = self.norm1(convolved(self.conv1, given), masks.before)
        x = self.norm2(self.conv2(x), masks.after)
        return self.norm3(self.conv3(x), masks.after)

    def steps(self, before: int, after: int) -> Sequence[Step]:
        """Split into convolutions, and these into some channels at a time."""
        if not can_be_split(self):
            return [Step([self])]
        first = split_layers(self.conv1, self.norm1, before)
        second = split_layers(self.conv2, self.norm2, after)
        return [
            Step([ConvNorm(*layer, strided=False) for layer in first]),
            Step([ConvNorm(*layer) for layer in second]),
            self._closing(self.conv3, self.norm3, after),
        ]


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

    def residual(self, given: Tensor | Streams, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""
        x = self.norm1(convolved(self.conv1, given), masks.before)
        x = self.norm2(self.conv2(x), masks.after)
        return self.norm3(self.conv3(x), masks.after)

    def steps(self, before: int, after: int) -> Sequence[Step]:
        """Not split: no reversible encoder has this block."""
        return [Step([self])]


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
