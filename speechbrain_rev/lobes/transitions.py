"""What comes before the blocks: the stem, and the transitions between stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.lobes.layers import ConvNorm, Masks, conv3x3, convolved
from speechbrain_rev.lobes.units import (
    CallEach,
    Channels,
    Unit,
    first_layer,
    later_layer,
)
from speechbrain_rev.reversible.convolution import Reading
from speechbrain_rev.reversible.norm import BatchNorm


class Stem(Unit):
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

    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Map [batch, 1, freq, time] to [batch, width, freq, time]."""
        x = cast(Tensor, given)
        for layer in self._layers():
            x = layer(x, masks.after)
        return x

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Run the convolutions one after the other, each on some channels at a time."""
        first, *others = self._layers()
        pieces = first_layer(first, cast(Tensor, given), masks.after, channels.after)
        for layer in others:
            x = pieces.called(call)
            pieces = later_layer(layer, x, masks.after, channels.after)
            del x
        return pieces.called(call, last=True)

    def is_one_layer(self) -> bool:
        """Whether there is one convolution."""
        return len(self.convs) == 1

    def _layers(self) -> Iterator[ConvNorm]:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            yield ConvNorm(cast(nn.Conv2d, conv), cast(BatchNorm, norm))


class StridedTransition(Unit):
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

    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Halve frequency and time, rounding up."""
        return self.norm(convolved(self.conv, given), masks.after)

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Halve frequency and time, some channels at a time."""
        layer = ConvNorm(self.conv, self.norm)
        pieces = first_layer(layer, given, masks.after, channels.after)
        return pieces.called(call, last=True)

    def readers(self) -> list[nn.Conv2d]:
        """List the convolution."""
        return [self.conv]


class SpaceToDepthTransition(Unit):
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

    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Halve frequency and time, both even."""
        x = self.norm(convolved(self.conv, given), masks.before)
        return F.pixel_unshuffle(x, 2)

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Halve frequency and time, some channels at a time."""
        layer = ConvNorm(self.conv, self.norm)
        pieces = first_layer(layer, given, masks.before, channels.before)
        # A channel's values become four channels next to each other.
        unshuffled: list[nn.Module] = [*map(_Unshuffled, pieces.modules)]
        wide = 4 * pieces.channels
        wide_pieces = pieces._replace(modules=unshuffled, channels=wide)
        return wide_pieces.called(call, last=True)

    def readers(self) -> list[nn.Conv2d]:
        """List the convolution."""
        return [self.conv]


class _Unshuffled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return F.pixel_unshuffle(self.layer(x, mask), 2)
