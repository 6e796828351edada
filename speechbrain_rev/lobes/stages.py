"""What comes before the blocks, the stages, and the one way through all of them."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.architectures import EncoderGeometry, Stride
from speechbrain_rev.lobes.layers import (
    CallEach,
    Channels,
    ConvNorm,
    Masks,
    Unit,
    conv3x3,
    convolved,
    first_layer,
    later_layer,
)
from speechbrain_rev.lobes.pooling import Pooling
from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.convolution import Reading
from speechbrain_rev.reversible.hooks import has_hooks
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.streams import Streams, join, read_both


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
    """3x3 convolution with a stride and batch normalisation, no ReLU.

    Parameters
    ----------
    channels, out_channels : int
        Channels before and after.
    stride : int or (int, int)
        In frequency and time.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    def __init__(
        self, channels: int, out_channels: int, stride: Stride, *, sync: bool
    ) -> None:
        super().__init__()
        self.conv = conv3x3(channels, out_channels, stride=stride)
        self.norm = BatchNorm(out_channels, sync=sync)

    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Divide frequency and time by the stride, rounding up."""
        return self.norm(convolved(self.conv, given), masks.after)

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Divide frequency and time, some channels at a time."""
        layer = ConvNorm(self.conv, self.norm)
        pieces = first_layer(layer, given, masks.after, channels.after)
        return pieces.called(call, last=True)

    def readers(self) -> list[nn.Conv2d]:
        """List the convolution."""
        return [self.conv]


class SpaceToDepthTransition(Unit):
    """3x3 convolution, batch normalisation and ReLU, then space to depth (equation 9).

    With stride 2, [channel, freq, time] becomes [4 channel, freq / 2, time / 2] in the
    order of ``torch.pixel_unshuffle``. That normalisation and ReLU follow the convolution is
    our reading: the paper names the convolution only.

    Parameters
    ----------
    channels, out_channels : int
        Channels before and after; the convolution makes the latter divided by the
        square of the stride.
    stride : int
        In frequency and time.
    sync : bool
        Whether batch statistics are shared between processes.
    """

    def __init__(
        self, channels: int, out_channels: int, stride: int, *, sync: bool
    ) -> None:
        super().__init__()
        self.step = stride
        narrow = out_channels // stride**2
        self.conv = conv3x3(channels, narrow)
        self.norm = BatchNorm(narrow, relu=True, sync=sync)

    def forward(self, masks: Masks, given: Tensor | Reading) -> Tensor:
        """Divide frequency and time by the stride, of which both are multiples."""
        x = self.norm(convolved(self.conv, given), masks.before)
        return F.pixel_unshuffle(x, self.step)

    def in_pieces(
        self, call: CallEach, channels: Channels, masks: Masks, given: Tensor | Reading
    ) -> Tensor:
        """Divide frequency and time, some channels at a time."""
        layer = ConvNorm(self.conv, self.norm)
        pieces = first_layer(layer, given, masks.before, channels.before)
        # A channel's values become several channels next to each other.
        unshuffled: list[nn.Module] = [
            _Unshuffled(layer, self.step) for layer in pieces.modules
        ]
        wide = self.step**2 * pieces.channels
        wide_pieces = pieces._replace(modules=unshuffled, channels=wide)
        return wide_pieces.called(call, last=True)

    def readers(self) -> list[nn.Conv2d]:
        """List the convolution."""
        return [self.conv]


class _Unshuffled(nn.Module):
    def __init__(self, layer: nn.Module, step: int) -> None:
        super().__init__()
        self.layer, self.step = layer, step

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return F.pixel_unshuffle(self.layer(x, mask), self.step)


#: Level at which a unit reads, and that of its output.
Levels = tuple[int, int]


class Runner(abc.ABC):
    """How a forward pass runs the parts of an encoder, in the order of ``walk``.

    Parameters
    ----------
    masks : sequence of torch.Tensor, [batch, 1, 1, time], or of None
        Of the frames that count, one for each level.
    """

    def __init__(self, masks: Sequence[Tensor | None]) -> None:
        self.masks = masks

    def around(self, levels: Levels) -> Masks:
        """Give the masks at a unit's input and output."""
        return Masks(self.masks[levels[0]], self.masks[levels[1]])

    @abc.abstractmethod
    def unit(
        self, name: str, unit: nn.Module, levels: Levels, given: Tensor | Streams
    ) -> Tensor:
        """Run a stem, an entry or an ordinary block."""

    @abc.abstractmethod
    def chain(
        self, chain: ReversibleChain, held: list[Tensor | Streams], level: int
    ) -> Tensor | Streams:
        """Run couplings on the input in ``held``, which is emptied."""

    @abc.abstractmethod
    def pooled(self, pooling: Pooling, parts: Sequence[Tensor]) -> Tensor:
        """Pool maps of some channels each over the frames of the last level."""


class Stage(nn.Module):
    """A transition into a stage, if there is one, and the stage's blocks.

    Parameters
    ----------
    entry : nn.Module or None
        Called with masks and the previous stage's output.
    blocks : ReversibleChain or nn.ModuleList
        Couplings, or ordinary blocks.
    """

    entry: nn.Module | None
    chain: ReversibleChain | None
    blocks: nn.ModuleList | None

    def __init__(
        self, entry: nn.Module | None, blocks: ReversibleChain | nn.ModuleList
    ) -> None:
        super().__init__()
        self.entry = entry
        self.chain = self.blocks = None
        if isinstance(blocks, ReversibleChain):
            self.chain = blocks
        else:
            self.blocks = blocks

    def forward(
        self, given: Tensor, name: str, levels: Levels, runner: Runner
    ) -> Tensor:
        """Run the stage as a module: what goes in and comes out are tensors.

        Parameters
        ----------
        given : torch.Tensor, [batch, channel, freq, time]
            Output of the stem or of the stage before.
        name : str
            The stage's, for the runner.
        levels : tuple of int
            Before and after the stage's downsampling.
        runner : Runner
            Runs entry and blocks.

        Returns
        -------
        torch.Tensor, [batch, channel, freq, time]
            The last block's output.
        """
        y = self.run([given], name, levels, runner)
        return join(y) if isinstance(y, Streams) else y

    def run(
        self, held: list[Tensor | Streams], name: str, levels: Levels, runner: Runner
    ) -> Tensor | Streams:
        """Run the stage; streams that leave it are read where they are needed.

        ``held`` has the input and is emptied, so that no name keeps it alive.
        """
        now = held.pop()
        after = levels[1], levels[1]
        if self.entry is not None:
            now = runner.unit(f"{name}.entry", self.entry, levels, now)
            levels = after
        if self.chain is not None:
            held.append(now)
            del now  # the chain alone has it, and drops it
            return runner.chain(self.chain, held, levels[1])
        assert self.blocks is not None
        for j, block in enumerate(self.blocks):
            now = runner.unit(f"{name}.blocks.{j}", block, levels, now)
            levels = after
        return now

    def block_names(self) -> list[str]:
        """Name the entry and the blocks in the order of execution."""
        entry = [] if self.entry is None else ["entry"]
        if self.chain is not None:
            return entry + [f"chain.{j}" for j in range(len(self.chain.blocks))]
        assert self.blocks is not None
        return entry + [f"blocks.{j}" for j in range(len(self.blocks))]


class Staged(Protocol):
    """What has a stem and stages: an encoder, or its form for inference."""

    @property
    def stem(self) -> nn.Module:
        """Makes the first stage's input."""

    @property
    def stages(self) -> nn.ModuleList:
        """Of ``Stage``."""

    @property
    def pooling(self) -> Pooling:
        """Makes one vector of the last stage's output."""

    @property
    def geometry(self) -> EncoderGeometry:
        """Levels of the stages."""


def walk(encoder: Staged, x: Tensor, runner: Runner) -> Tensor:
    """Run an encoder's stem and stages, and pool: in training as in inference.

    Parameters
    ----------
    encoder : SpeakerEncoder or InferenceEncoder
        Whose modules are run.
    x : torch.Tensor, [batch, 1, n_mels, time]
        The stem's input.
    runner : Runner
        Runs each of them.

    Returns
    -------
    torch.Tensor, [batch, statistics]
        Pooled statistics.
    """
    held: list[Tensor | Streams] = [runner.unit("stem", encoder.stem, (0, 0), x)]
    places = zip(encoder.stages, encoder.geometry.stage_levels, strict=True)
    for i, (module, levels) in enumerate(places):
        stage, name = cast(Stage, module), f"stages.{i}"
        if has_hooks(stage):
            # They see tensors, as in any network.
            now = held.pop()
            now = join(now) if isinstance(now, Streams) else now
            held = [stage(now, name, levels, runner)]
            del now
        else:
            held = [stage.run(held, name, levels, runner)]
    now = held.pop()
    parts = read_both(now) if isinstance(now, Streams) else (now,)
    return runner.pooled(encoder.pooling, parts)
