"""Blocks of the encoders: residual functions, and ordinary residual blocks."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor, nn

from speechbrain_rev.architectures import Stride
from speechbrain_rev.lobes.layers import (
    CallEach,
    Channels,
    ConvNorm,
    Masks,
    Pieces,
    Unit,
    can_be_split,
    conv1x1,
    conv3x3,
    convolved,
    convolved_and_masked,
    convs_by_inputs,
    convs_by_outputs,
    first_layer,
    later_layer,
    norm_parts,
    split_layers,
    with_modules,
)
from speechbrain_rev.reversible.convolution import (
    Reading,
    convolve_stream,
    parts_for,
    split_for_reuse,
)
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.segment import BoundaryConvolutions


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

    #: The layer that a block which begins as the identity has at zero.
    ends_with = "conv2"
    #: Under autocast nothing reads the input but a convolution, which casts it.
    casts_its_input = True

    def __init__(self, channels: int, *, sync: bool = False) -> None:
        super().__init__()
        self.conv1 = conv3x3(channels, channels)
        self.norm = BatchNorm(channels, relu=True, sync=sync)
        self.conv2 = conv3x3(channels, channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the residual, [batch, channel, freq, time]."""
        x = self.norm(self.conv1(x), mask)
        return convolved_and_masked(self.conv2, x, mask)

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

    #: The layer that a block which begins as the identity has at zero.
    ends_with = "conv3"

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
        # What is zero before a 1x1 convolution is zero after it.
        return self.conv3(convolved_and_masked(self.conv2, x, mask))

    def pieces(self, channels: int) -> Sequence[nn.Module]:
        """Run the convolutions in parts of the batch."""
        width = self.conv3.out_channels
        if channels >= width or not can_be_split(self):
            return [self]
        last = [self.conv2, self.conv3]
        return [
            BoundaryConvolutions(
                self.conv1, self.norm, last, parts_for(width, channels)
            )
        ]


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

    #: The layer that a block which begins as the identity has at zero.
    ends_with = "conv3"
    #: Under autocast nothing reads the input but a convolution, which casts it.
    casts_its_input = True
    #: Whether it takes the stream's tangent as third argument and returns it as well.
    adds_to_stream = False

    def __init__(self, channels: int, *, sync: bool = False) -> None:
        super().__init__()
        wide = 4 * channels
        self.conv1 = conv1x1(channels, wide)
        self.norm = BatchNorm(wide, relu=True, sync=sync)
        self.conv2 = conv3x3(wide, wide, groups=wide)
        self.conv3 = conv1x1(wide, channels)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, tangent: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the residual, [batch, channel, freq, time]."""
        if tangent is None:
            x = self.conv1(x)
        else:
            x, tangent = convolve_stream(self.conv1, x, tangent)
        x = self.norm(x, mask)
        # What is zero before a 1x1 convolution is zero after it.
        x = self.conv3(convolved_and_masked(self.conv2, x, mask))
        return x if tangent is None else (x, tangent)

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
        pieces = [
            with_modules(self, conv1=a, norm=n, conv2=b, conv3=c)
            for a, n, b, c in layers
        ]
        for piece in pieces:
            piece.adds_to_stream = True
        return pieces


class _Shortcut(ConvNorm):
    """1x1 convolution and batch normalisation where a block changes the shape."""

    def __init__(
        self, channels: int, out_channels: int, stride: Stride, *, sync: bool
    ) -> None:
        conv = conv1x1(channels, out_channels, stride=stride)
        super().__init__(conv, BatchNorm(out_channels, sync=sync))


class _OrdinaryBlock(Unit):
    """What ordinary, post-activation residual blocks have in common.

    Parameters
    ----------
    channels : int
        Channels of the input.
    width : int
        The block's width, before any expansion.
    stride : int or (int, int)
        What frequency and time are divided by.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    expansion = 1
    #: The layer that a block which begins as the identity has at zero.
    ends_with: str
    conv1: nn.Conv2d

    def __init__(
        self, channels: int, width: int, stride: Stride, *, sync: bool
    ) -> None:
        super().__init__()
        out_channels = self.expansion * width
        self.shortcut: _Shortcut | None = None
        if stride != 1 or channels != out_channels:
            self.shortcut = _Shortcut(channels, out_channels, stride, sync=sync)

    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Compute [batch, expansion * width, freq / stride, time / stride]."""
        x = self.residual(given, masks)
        if self.shortcut is None:
            assert isinstance(given, Tensor)
            return (x + given).relu_()
        if isinstance(given, Tensor):
            return (x + self.shortcut(given, masks.after)).relu_()
        skipped = given.convolved(self.shortcut.conv, place=1)
        return (x + self.shortcut.norm(skipped, masks.after)).relu_()

    @abc.abstractmethod
    def residual(self, given: Tensor | Reading, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""

    def readers(self) -> list[nn.Conv2d]:
        """List the first convolution and the shortcut's, which else is the input."""
        return [] if self.shortcut is None else [self.conv1, self.shortcut.conv]

    def _closed(
        self, last: Pieces, given: Tensor | Reading, mask: Tensor | None, channels: int
    ) -> Pieces:
        """Give the pieces of the last layer their part of the shortcut."""
        skipped: Sequence[Tensor]
        if self.shortcut is None:
            assert isinstance(given, Tensor)
            shortcuts: Sequence[nn.Module | None] = [None] * len(last.modules)
            skipped = given.split(channels, dim=1)
        elif isinstance(given, Tensor):
            split = split_layers(self.shortcut.conv, self.shortcut.norm, channels)
            shortcuts = [ConvNorm(*shortcut) for shortcut in split]
            skipped = [given] * len(last.modules)
        else:
            shortcuts = norm_parts(self.shortcut.norm, channels)
            skipped = split_for_reuse(given.convolved(self.shortcut.conv, 1), channels)
        own = (1,) if isinstance(given, Reading) else ()
        return last._replace(
            reuse=last.reuse + own,
            modules=[*map(_Closing, last.modules, shortcuts)],
            inputs=[
                (x, part, mask)
                for (x, _), part in zip(last.inputs, skipped, strict=True)
            ],
        )


class _Closing(nn.Module):
    """Some channels of a block's last layer, its shortcut, and their ReLU."""

    def __init__(self, last: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.last, self.shortcut = last, shortcut

    def forward(self, x: Tensor, given: Tensor, mask: Tensor | None) -> Tensor:
        y = self.last(x, mask)
        if self.shortcut is not None:
            given = self.shortcut(given, mask)
        return (y + given).relu_()


class BasicBlock(_OrdinaryBlock):
    """Two 3x3 convolutions; the first has the stride."""

    ends_with = "norm2"

    def __init__(
        self, channels: int, width: int, stride: Stride, *, sync: bool
    ) -> None:
        super().__init__(channels, width, stride, sync=sync)
        self.conv1 = conv3x3(channels, width, stride=stride)
        self.norm1 = BatchNorm(width, relu=True, sync=sync)
        self.conv2 = conv3x3(width, width)
        self.norm2 = BatchNorm(width, sync=sync)

    def residual(self, given: Tensor | Reading, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""
        x = self.norm1(convolved(self.conv1, given), masks.after)
        return self.norm2(self.conv2(x), masks.after)

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Run one convolution after the other, each on some channels at a time."""
        first, last = ConvNorm(self.conv1, self.norm1), ConvNorm(self.conv2, self.norm2)
        x = first_layer(first, given, masks.after, channels.after).called(call)
        pieces = later_layer(last, x, masks.after, channels.after)
        closed = self._closed(pieces, given, masks.after, channels.after)
        return closed.called(call, last=True)


class _ThreeConvolutions(_OrdinaryBlock):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 has the stride."""

    ends_with = "norm3"
    #: Width of the 3x3 convolution over that of the block, and whether it is depthwise.
    widening, depthwise = 1, False

    def __init__(
        self, channels: int, width: int, stride: Stride, *, sync: bool
    ) -> None:
        super().__init__(channels, width, stride, sync=sync)
        wide, out_channels = self.widening * width, self.expansion * width
        groups = wide if self.depthwise else 1
        self.conv1 = conv1x1(channels, wide)
        self.norm1 = BatchNorm(wide, relu=True, sync=sync)
        self.conv2 = conv3x3(wide, wide, stride=stride, groups=groups)
        self.norm2 = BatchNorm(wide, relu=True, sync=sync)
        self.conv3 = conv1x1(wide, out_channels)
        self.norm3 = BatchNorm(out_channels, sync=sync)

    def residual(self, given: Tensor | Reading, masks: Masks) -> Tensor:
        """Compute what is added to the shortcut."""
        x = self.norm1(convolved(self.conv1, given), masks.before)
        x = self.norm2(self.conv2(x), masks.after)
        return self.norm3(self.conv3(x), masks.after)


class BottleneckBlock(_ThreeConvolutions):
    """1x1, 3x3 and 1x1 convolutions, expanding four times; the 3x3 has the stride."""

    expansion = 4

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Run one convolution after the other, each on some channels at a time."""
        first, middle = (
            ConvNorm(self.conv1, self.norm1),
            ConvNorm(self.conv2, self.norm2),
        )
        x = first_layer(first, given, masks.before, channels.before).called(call)
        x = later_layer(middle, x, masks.after, channels.after).called(call)
        # Four times as wide as its input: better to convolve in pieces than as a whole.
        layers = split_layers(self.conv3, self.norm3, channels.after)
        modules: list[nn.Module] = [ConvNorm(*layer) for layer in layers]
        inputs = [(x, masks.after)] * len(modules)
        pieces = Pieces(modules, inputs, self.norm3.channels)
        closed = self._closed(pieces, given, masks.after, channels.after)
        return closed.called(call, last=True)


class DFBottleneckBlock(_ThreeConvolutions):
    """1x1 to four times the width, depthwise 3x3, 1x1 back."""

    widening, depthwise = 4, True


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
