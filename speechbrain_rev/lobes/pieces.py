"""Parts of modules: a convolution by its channels, a normalisation by its own.

A sum over hidden channels is a sum of narrower functions of the same kind: with h the
hidden channels of a residual function, F(z) is the sum over groups g of them of
W2[:, g] * relu(BN_g(W1[g] * z)), for batch statistics are taken by channel. A part is
the module itself with slices in the place of its parameters and buffers, so that it
computes, and updates running statistics, by the code of the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.segment import has_hooks


def can_be_split(module: nn.Module) -> bool:
    """Whether a module's layers are of the kinds that are split here, and unwatched.

    Parameters
    ----------
    module : nn.Module
        Of convolutions and normalisations, in lists or not.

    Returns
    -------
    bool
        False where a layer was exchanged, parametrised, or has hooks.
    """
    layers = [m for m in module.modules() if type(m) is not nn.ModuleList]
    known = all(
        type(m) in (nn.Conv2d, BatchNorm)
        or type(m).__module__.startswith("speechbrain_rev.lobes.")
        for m in layers
    )
    return known and not any(map(has_hooks, layers))


def convs_by_outputs(conv: nn.Conv2d, channels: int) -> list[nn.Conv2d]:
    """Split a convolution into ones of some output channels each.

    Parameters
    ----------
    conv : nn.Conv2d
        Without bias; depthwise, or of one group.
    channels : int
        Output channels of a part; the last may have fewer.

    Returns
    -------
    list of nn.Conv2d
        A depthwise one takes its own channels of the input, others take all.
    """
    parts = []
    for weight in conv.weight.split(channels):
        part = _with(conv, {"weight": weight})
        part.out_channels = len(weight)
        if conv.groups > 1:
            part.groups = part.in_channels = len(weight)
        parts.append(part)
    return parts


def convs_by_inputs(conv: nn.Conv2d, channels: int) -> list[nn.Conv2d]:
    """Split a convolution into ones of some input channels each, which add up to it.

    Parameters
    ----------
    conv : nn.Conv2d
        Without bias and of one group.
    channels : int
        Input channels of a part; the last may have fewer.

    Returns
    -------
    list of nn.Conv2d
        Each with all output channels.
    """
    parts = []
    for weight in conv.weight.split(channels, dim=1):
        part = _with(conv, {"weight": weight})
        part.in_channels = weight.shape[1]
        parts.append(part)
    return parts


def norm_parts(norm: BatchNorm, channels: int) -> list[BatchNorm]:
    """Split a normalisation by its channels.

    Parameters
    ----------
    norm : BatchNorm
        The normalisation, whose running statistics its parts update.
    channels : int
        Channels of a part; the last may have fewer.

    Returns
    -------
    list of BatchNorm
        The first counts the batches, the others a number of their own.
    """
    parts = []
    weights, biases = norm.weight.split(channels), norm.bias.split(channels)
    means = norm.running_mean.split(channels)
    variances = norm.running_var.split(channels)
    count = norm.num_batches_tracked
    for i, weight in enumerate(weights):
        part = _with(
            norm,
            {"weight": weight, "bias": biases[i]},
            {
                "running_mean": means[i],
                "running_var": variances[i],
                "num_batches_tracked": torch.zeros_like(count) if i else count,
            },
        )
        part.channels = len(weight)
        parts.append(part)
    return parts


def with_modules(module: nn.Module, **modules: nn.Module) -> Any:
    """Make a copy of a module that has other modules in some places."""
    part = _with(module, {})
    part.__dict__["_modules"] = module._modules | modules
    return part


def _with(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] | None = None,
) -> Any:
    part = copy.copy(module)
    part.__dict__["_parameters"] = {**module._parameters, **parameters}
    part.__dict__["_buffers"] = {**module._buffers, **(buffers or {})}
    return part
