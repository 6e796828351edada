"""Vanilla encoders as torch alone has them: what a user can compile today.

Layers of this package's own would break a compiled graph at each normalisation, and
torch's compiler could then choose nothing. Weights are those of the encoder it is made
of, so that both can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.pooling import VARIANCE_FLOOR
from speechbrain_rev.reversible.norm import BatchNorm


class PlainBlock(nn.Module):
    """Convolutions with normalisation, ReLU between them, and a shortcut around them.

    Parameters
    ----------
    block : nn.Module
        An ordinary residual block of this package, whose convolutions are taken.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(1, 4):
            if hasattr(block, f"conv{i}"):
                norm = getattr(block, f"norm{i}")
                layers += [_conv(getattr(block, f"conv{i}")), _norm(norm)]
                layers += [nn.ReLU(inplace=True)] * norm.relu
        self.residual = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if block.shortcut is not None:
            self.shortcut = _layer(block.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [batch, channel, freq, time]."""
        return (self.residual(x) + self.shortcut(x)).relu_()


class PlainEncoder(nn.Module):
    """A vanilla encoder without anything of this package in its layers.

    Parameters
    ----------
    encoder : SpeakerEncoder
        A vanilla encoder, which gives its weights.
    checkpointed : int
        How many blocks from the first on, of which the stem and the transitions are
        some, are in torch's checkpoint. The first ones hold the most.
    """

    variance_floor = VARIANCE_FLOOR

    def __init__(self, encoder: SpeakerEncoder, *, checkpointed: int = 0) -> None:
        super().__init__()
        self.n_mels, self.checkpointed = encoder.n_mels, checkpointed
        blocks = [_layer(encoder.stem)]
        for stage in encoder.stages:
            if stage.entry is not None:
                blocks.append(_layer(stage.entry))
            blocks += [PlainBlock(block) for block in stage.blocks]
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


def _layer(layer: nn.Module) -> nn.Module:
    """Take convolution, normalisation and ReLU, if there is one."""
    found: list[nn.Module] = []
    for module in layer.modules():
        if isinstance(module, nn.Conv2d):
            found.append(_conv(module))
        elif isinstance(module, BatchNorm):
            found.append(_norm(module))
            if module.relu:
                found.append(nn.ReLU(inplace=True))
    return nn.Sequential(*found)


def _conv(conv: nn.Conv2d) -> nn.Conv2d:
    plain = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        groups=conv.groups,
        bias=False,
    )
    plain.weight = conv.weight
    return plain


def _norm(norm: BatchNorm) -> nn.BatchNorm2d:
    plain = nn.BatchNorm2d(norm.channels, eps=norm.eps, momentum=norm.momentum)
    plain.weight, plain.bias = norm.weight, norm.bias
    return plain
