"""Parts of modules: a convolution by its channels, a normalisation by its own.

A sum over hidden channels is a sum of narrower functions of the same kind: with h the
hidden channels of a residual function, F(z) is the sum over groups g of them of
W2[:, g] * relu(BN_g(W1[g] * z)), for batch statistics are taken by channel. A part is
the module itself with slices in the place of its parameters and buffers, so that it
computes, and updates running statistics, by the code of the whole.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from speechbrain_rev.reversible.hooks import has_hooks
from speechbrain_rev.reversible.norm import BatchNorm


def can_be_split(module: nn.Module) -> bool:
    """Whether a module's layers are of the kinds that are split here, and unwatched.

    Parameters
    ----------
    module : nn.Module
        Of convolutions and normalisations, in lists or not.

    Returns
    -------
    bool
        False where a layer was exchanged, parametrised or compiled, has a forward of
        its own or hooks.
    """
    layers = [m for m in module.modules() if type(m) is not nn.ModuleList]
    return all(map(_is_known, layers)) and not any(map(has_hooks, layers))


def _is_known(layer: nn.Module) -> bool:
    if "forward" in vars(layer) or layer._compiled_call_impl is not None:
        return False
    kind = type(layer)
    # The class itself, not one that was made from it and kept its name.
    own = kind.__module__.startswith("speechbrain_rev.lobes.") and (
        vars(sys.modules[kind.__module__]).get(kind.__name__) is kind
    )
    if isinstance(layer, nn.Conv2d):
        depthwise = layer.groups == layer.in_channels == layer.out_channels
        return (
            (own or kind is nn.Conv2d)
            and layer.bias is None
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
            and (layer.groups == 1 or depthwise)
        )
    return own or kind is BatchNorm


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
        The first counts the batches.
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
                "num_batches_tracked": None if i else count,
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
    buffers: Mapping[str, Tensor | None] | None = None,
) -> Any:
    part = copy.copy(module)
    part.__dict__["_parameters"] = {**module._parameters, **parameters}
    part.__dict__["_buffers"] = {**module._buffers, **(buffers or {})}
    return part
