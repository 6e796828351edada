"""Networks as a plan may see them: with fewer modes than they have, or with more."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from torch import nn

from speechbrain_rev.planner.network import Network, telling, with_compression
from speechbrain_rev.reversible import Mode


class View:
    """A network with the modes that a plan may give; all but these it leaves alone.

    Parameters
    ----------
    network : Network
        The network.
    """

    def __init__(self, network: Network) -> None:
        #: What is seen.
        self.network = network

    def named_blocks(self) -> Mapping[str, nn.Module]:
        """Give the blocks by name."""
        return self.network.named_blocks()

    def allowed_modes(self) -> Mapping[str, tuple[Mode, ...]]:
        """Name the blocks and say which modes each can have."""
        return self.network.allowed_modes()

    def block_modes(self) -> Mapping[str, Mode]:
        """Name the blocks and say which mode each has."""
        return self.network.block_modes()

    def set_mode(self, mode: Mapping[str, Mode | str]) -> None:
        """Give blocks modes, by their names."""
        self.network.set_mode(mode)

    @property
    def module(self) -> nn.Module:
        """What the blocks are in."""
        network = cast(nn.Module, self.network)
        found: nn.Module = getattr(network, "module", network)
        return found

    @property
    def channels(self) -> Sequence[int | None] | None:
        """Channels at a time, at each level of an encoder; None of another network."""
        return getattr(self.network, "channels", None)

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Make blocks that are no couplings tell of their moments for a while."""
        return telling(self.network)


class Without(View):
    """A network some of whose blocks are not to have a mode.

    Parameters
    ----------
    network : Network
        The network.
    mode : Mode
        The mode.
    names : collection of str
        Of those blocks.

    Examples
    --------
    >>> from speechbrain_rev.planner.network import as_network
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> chain = ReversibleChain(AdditiveCoupling(nn.Tanh(), nn.Tanh()) for _ in range(2))
    >>> network = Without(as_network(chain), Mode.RECONSTRUCT, ["blocks.1"])
    >>> {name: len(modes) for name, modes in network.allowed_modes().items()}
    {'blocks.0': 3, 'blocks.1': 2}
    """

    def __init__(self, network: Network, mode: Mode, names: Collection[str]) -> None:
        super().__init__(network)
        self._mode, self._names = mode, frozenset(names)

    def allowed_modes(self) -> dict[str, tuple[Mode, ...]]:
        """Name the blocks and say which modes each can have."""
        return {
            name: tuple(
                m for m in modes if m is not self._mode or name not in self._names
            )
            for name, modes in self.network.allowed_modes().items()
        }


class Compressible(View):
    """A network some of whose blocks may compress.

    Parameters
    ----------
    network : Network
        The network.
    names : collection of str or None
        Of those blocks; None for all that can.

    Examples
    --------
    >>> from speechbrain_rev.planner.network import as_network
    >>> network = as_network(nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()), "*")
    >>> modes = Compressible(network, ["0"]).allowed_modes()
    >>> [mode.value for mode in modes["0"]], len(modes["1"])
    (['store', 'recompute', 'compress'], 2)
    """

    def __init__(self, network: Network, names: Collection[str] | None = None) -> None:
        super().__init__(network)
        self._names = names

    def allowed_modes(self) -> dict[str, tuple[Mode, ...]]:
        """Name the blocks and say which modes each can have."""
        lossless = self.network.allowed_modes()
        every = with_compression(lossless)
        if self._names is None:
            return every
        return {n: (every if n in self._names else lossless)[n] for n in lossless}
