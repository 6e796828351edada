"""Some blocks of any network compressed, in one pass over the whole network.

The pass is around the network, not around each block: what two blocks save of one tensor
(the ReLU at the end of one, the convolution that begins the next) is then one copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from speechbrain_rev.compression.activations import (
    ActivationCompression,
    Compressing,
    registering,
)


def compress_blocks(
    network: nn.Module, blocks: Iterable[nn.Module], compression: ActivationCompression
) -> None:
    """Compress what some blocks of a network save, until ``store_whole`` undoes it.

    Parameters
    ----------
    network : nn.Module
        Any network; its class, parameters and state dict stay as they are.
    blocks : iterable of nn.Module
        Submodules of it. Others that compress go on.
    compression : ActivationCompression
        How to compress, and what is told of the layers.

    Raises
    ------
    ValueError
        If all of the network is compressed already.

    Examples
    --------
    >>> import torch
    >>> layer = lambda: nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU())
    >>> network, compression = nn.Sequential(layer(), layer()), ActivationCompression()
    >>> compress_blocks(network, [network[1]], compression)
    >>> network(torch.randn(4, 8, 50)).sum().backward()
    >>> list(compression.records), [compresses(block) for block in network]
    (['1.0'], [False, True])
    """
    refuse_what_is_compressed(network)
    for block in blocks:
        if not compresses(block):
            block.forward = _Registering(block)
    if compression_in(network) is not compression:
        _undo(network, Compressing)
        own = Compressing(network, compression, everywhere=False)
        network.forward = own


def store_whole(network: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Let blocks save whole activations again, and the network if none compresses.

    Parameters
    ----------
    network : nn.Module
        As ``compress_blocks`` took it, or one that nobody changed.
    blocks : iterable of nn.Module
        Submodules of it.
    """
    for block in blocks:
        _undo(block, _Registering)
    if not any(compresses(module) for module in network.modules()):
        _undo(network, Compressing)


def compresses(block: nn.Module) -> bool:
    """Whether a block was chosen by ``compress_blocks``."""
    return isinstance(vars(block).get("forward"), _Registering)


def compression_in(network: nn.Module) -> ActivationCompression | None:
    """Give what compresses a network's chosen blocks, if there are any."""
    own = vars(network).get("forward")
    return own.compression if isinstance(own, Compressing) else None


def refuse_what_is_compressed(network: nn.Module) -> None:
    """Refuse a network all of which is compressed: no block is left to be chosen.

    Raises
    ------
    ValueError
        If ``compress_activations`` was called with it.
    """
    own = vars(network).get("forward")
    if isinstance(own, Compressing) and own.everywhere:
        raise ValueError(
            f"{type(network).__name__} has all its activations compressed, by "
            "compress_activations, in whatever mode its blocks are: none can be given mode "
            "'compress' beside others, nor can it be planned. Leave that call out."
        )


class _Registering:
    """Runs a block whose layers' inputs are compressed by the pass around it."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.own = vars(block).get("forward")

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        with registering():
            if self.own is not None:
                return self.own(*inputs, **keywords)
            return type(self.block).forward(self.block, *inputs, **keywords)


def _undo(module: nn.Module, kind: type[Compressing] | type[_Registering]) -> None:
    """Take away what runs instead of ``forward``, if it is ours."""
    found = vars(module).get("forward")
    if isinstance(found, kind) and getattr(found, "everywhere", False) is False:
        del module.forward
        if found.own is not None:
            module.forward = found.own
