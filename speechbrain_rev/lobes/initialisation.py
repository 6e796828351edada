"""Blocks that begin as the identity."""

from __future__ import annotations

from torch import nn

from speechbrain_rev.lobes.blocks import ORDINARY_BLOCKS, RESIDUALS

_BLOCKS = (*RESIDUALS.values(), *ORDINARY_BLOCKS.values())


def zero_residuals(encoder: nn.Module) -> None:
    """Let each block of an encoder add nothing at first.

    The scale of the normalisation that ends an ordinary block is 0, as in Goyal et al.,
    "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, section 5.1. A
    reversible block has none there: the weight of its functions' last convolution is 0.
    A network of any depth begins as its stem and transitions, and its blocks get their
    part as they learn.

    Parameters
    ----------
    encoder : nn.Module
        Changed in place.

    Examples
    --------
    >>> block = RESIDUALS["basic"](8)
    >>> zero_residuals(block)
    >>> block.conv2.weight.count_nonzero().item()
    0
    """
    for module in encoder.modules():
        if isinstance(module, _BLOCKS):
            nn.init.zeros_(module.get_parameter(f"{module.ends_with}.weight"))
