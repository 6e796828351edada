"""Encoders as torch alone has them, without a layer of this package.

Layers of this package's own would break a compiled graph at each normalisation, and
peers are given what torch has. Weights are those of the modules that are rebuilt, so that
both can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.blocks import _OrdinaryBlock
from speechbrain_rev.lobes.pooling import VARIANCE_FLOOR
from speechbrain_rev.lobes.stages import SpaceToDepthTransition, Stem
from speechbrain_rev.reversible.norm import BatchNorm


def plain(*modules: nn.Module) -> nn.Sequential:
    """Rebuild modules in torch's own layers, one after another, around their weights.

    Parameters
    ----------
    *modules : nn.Module
        Convolutions, and normalisations without mask, in the order in which they run.
    """
    layers: list[nn.Module] = []
    for layer in nn.ModuleList(modules).modules():
        if isinstance(layer, BatchNorm):
            norm = nn.BatchNorm2d(layer.channels, layer.eps, layer.momentum)
            norm.weight, norm.bias = layer.weight, layer.bias
            layers += [norm, nn.ReLU(inplace=True)] if layer.relu else [norm]
        elif isinstance(layer, nn.Conv2d):
            sizes = layer.in_channels, layer.out_channels, layer.kernel_size
            conv = nn.Conv2d(
                *sizes, layer.stride, layer.padding, groups=layer.groups, bias=False
            )
            conv.weight = layer.weight
            layers.append(conv)
    return nn.Sequential(*layers)


class PlainBlock(nn.Module):
    """Convolutions with normalisation, ReLU between them, and a shortcut around them.

    Parameters
    ----------
    block : nn.Module
        An ordinary residual block of this package.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        parts = [f"{kind}{i}" for i in range(1, 4) for kind in ("conv", "norm")]
        self.residual = plain(*(getattr(block, p) for p in parts if hasattr(block, p)))
        self.shortcut: nn.Module = nn.Identity()
        if block.shortcut is not None:
            self.shortcut = plain(block.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [batch, channel, freq, time]."""
        return (self.residual(x) + self.shortcut(x)).relu_()


def plain_unit(unit: nn.Module) -> nn.Module:
    """Rebuild a stem, a transition or an ordinary block.

    Parameters
    ----------
    unit : nn.Module
        What runs before the blocks of a stage, or one of them.
    """
    if isinstance(unit, _OrdinaryBlock):
        return PlainBlock(unit)
    if isinstance(unit, Stem):
        layers = zip(unit.convs, unit.norms, strict=True)
        return plain(*(part for layer in layers for part in layer))
    if isinstance(unit, SpaceToDepthTransition):
        return plain(unit).append(nn.PixelUnshuffle(unit.step))
    return plain(unit)


class PlainEncoder(nn.Module):
    """A vanilla encoder without anything of this package in its layers.

    Parameters
    ----------
    encoder : SpeakerEncoder
        A vanilla encoder, which gives its weights.
    checkpointed : int
        How many blocks from the first on, of which the stem and the transitions are
        some, are in torch's checkpoint. The first ones hold the most.

    Attributes
    ----------
    parts : tuple of nn.Module
        What has the parameters, in the order in which the encoder has them.
    """

    variance_floor = VARIANCE_FLOOR

    def __init__(self, encoder: SpeakerEncoder, *, checkpointed: int = 0) -> None:
        super().__init__()
        self.n_mels, self.checkpointed = encoder.n_mels, checkpointed
        self.parts: tuple[nn.Module, ...] = (encoder,)
        blocks = [plain_unit(encoder.stem)]
        for stage in encoder.stages:
            if stage.entry is not None:
                blocks.append(plain_unit(stage.entry))
            blocks += map(plain_unit, stage.blocks)
        self.blocks = nn.ModuleList(blocks)
        self.fc = encoder.fc

    def forward(self, feats: Tensor) -> Tensor:
        """Embed: [batch, time, n_mels] to [batch, 1, embedding_dim]."""
        x = feats.transpose(1, 2).unsqueeze(1)
        for i, block in enumerate(self.blocks):
            if i < self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        rows = x.flatten(1, 2)
        variance = rows.var(dim=2, correction=0)
        pooled = torch.cat(
            [rows.mean(dim=2), (variance + self.variance_floor).sqrt()], dim=1
        )
        return self.fc(pooled).unsqueeze(1)
