"""What comes before the blocks: the stem, and the transitions between stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.lobes.layers import (
    ConvNorm,
    Masks,
    Step,
    conv3x3,
    convolved,
    split_layers,
)
from speechbrain_rev.lobes.pieces import can_be_split, with_modules
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.streams import Streams


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
        x = cast(Tensor, given)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x), masks.after)
        return x

    def steps(self, before: int, after: int) -> Sequence[Step]:
        """Split into convolutions, and these into some channels at a time."""
        if not can_be_split(self):
            return [Step([self])]
        layers = zip(self.convs, self.norms, strict=True)
        return [
            Step([ConvNorm(*part) for part in split_layers(*layer, after)])
            for layer in cast(Iterable[tuple[nn.Conv2d, BatchNorm]], layers)
        ]


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
        return self.norm(convolved(self.conv, given), masks.after)

    def steps(self, before: int, after: int) -> Sequence[Step]:
        """Split into transitions to some channels each."""
        return _by_outputs(self, after)


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
        x = self.norm(convolved(self.conv, given), masks.before)
        return F.pixel_unshuffle(x, 2)

    def steps(self, before: int, after: int) -> Sequence[Step]:
        """Split into transitions to some channels each."""
        return _by_outputs(self, before)


def _by_outputs(
    transition: StridedTransition | SpaceToDepthTransition, channels: int
) -> Sequence[Step]:
    if not can_be_split(transition):
        return [Step([transition])]
    layers = split_layers(transition.conv, transition.norm, channels)
    return [Step([with_modules(transition, conv=a, norm=n) for a, n in layers])]
