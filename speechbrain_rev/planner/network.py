"""What can be planned: named blocks, each with the modes that it can have.

What a module declares is tried before it is planned, for nothing else would show it: a
block is reconstructed if its inverse gives back its input, and recomputed if it runs twice.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from speechbrain_rev.compression import ActivationCompression, Rule
from speechbrain_rev.compression.activations import (
    compress_blocks,
    compression_in,
    refuse_what_is_compressed,
    stop_compressing_blocks,
)
from speechbrain_rev.modes import (
    LOSSLESS,
    WITHOUT_INVERSE,
    Mode,
    as_mode,
    fallback,
    is_lossless,
)
from speechbrain_rev.reversible import Recompute, ReversibleChain
from speechbrain_rev.reversible.hooks import Moment, notify, notify_end
from speechbrain_rev.reversible.monitor import Verify
from speechbrain_rev.reversible.wrapping import chosen_blocks, give_mode, mode_of
from speechbrain_rev.torch_private import tree_leaves, tree_map


class Network(Protocol):
    """What a planner asks of a network."""

    def named_blocks(self) -> Mapping[str, nn.Module]:
        """Give the blocks by name, in any order.

        Blocks of one chain have names with the same beginning, up to the last dot.
        """

    def allowed_modes(self) -> Mapping[str, tuple[Mode, ...]]:
        """Name the blocks and the lossless modes that each can have."""

    def block_modes(self) -> Mapping[str, Mode]:
        """Name the blocks and the mode that each has."""

    def set_mode(self, mode: Mapping[str, Mode | str], /) -> None:
        """Give blocks modes, by their names."""


class NamedBlocks:
    """Blocks of a module that is no encoder of ours, as a network to be planned.

    Parameters
    ----------
    module : nn.Module
        Any module, with reversible chains or without.
    *blocks : str
        Names of submodules, or patterns of them, as for ``recompute_blocks``. Blocks of
        chains need no names. All must run once in a step, one after the other.
    verify : {"first", "raise", "warn"} or None
        Of the blocks that were named, as for ``recompute_blocks``.

    Raises
    ------
    ValueError
        If there are no blocks, or a name matches nothing.

    Examples
    --------
    >>> network = NamedBlocks(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "*")
    >>> network.set_mode({"1": "recompute"})
    >>> {name: mode.value for name, mode in network.block_modes().items()}
    {'0': 'store', '1': 'recompute'}
    """

    def __init__(
        self, module: nn.Module, *blocks: str, verify: Verify | None = "first"
    ) -> None:
        self.module, self.verify = module, verify
        chains = {
            name: chain
            for name, chain in module.named_modules()
            if isinstance(chain, ReversibleChain)
        }
        #: The chain of each coupling, and its place there.
        self._chained = {
            f"{name}.blocks.{i}".lstrip("."): (chain, i)
            for name, chain in chains.items()
            for i in range(len(chain.blocks))
        }
        chosen = chosen_blocks(module, blocks) if blocks or not chains else {}
        # A module that is a chain itself has the name "", which all names begin with.
        inside = tuple(f"{name}.".lstrip(".") for name in chains)
        self._named = [name for name in chosen if not f"{name}.".startswith(inside)]
        self._blocks = {
            name: module.get_submodule(name) for name in (*self._named, *self._chained)
        }
        #: Blocks that may join what runs before them, if a step shows that they follow it.
        self.may_join = frozenset(
            name
            for name in self._named
            if not isinstance(self._blocks[name], Recompute)
        )
        alone = next(iter(chains.values())).compression if len(chains) == 1 else None
        given = getattr(module, "compression", None)
        if isinstance(given, Rule):
            raise ValueError(
                f"The module's attribute compression is {given}, a rule: give it to an "
                "ActivationCompression, as its convolutions or normalisations."
            )
        if not isinstance(given, ActivationCompression):
            given = compression_in(module)
        #: How blocks in mode "compress" do it.
        self.compression: ActivationCompression = (
            given or alone or ActivationCompression()
        )

    def named_blocks(self) -> dict[str, nn.Module]:
        """Give the blocks by name."""
        return dict(self._blocks)

    def allowed_modes(self) -> dict[str, tuple[Mode, ...]]:
        """Name the blocks and the lossless modes that each can have."""
        modes: dict[str, tuple[Mode, ...]] = dict.fromkeys(self._chained, LOSSLESS)
        for name in self._named:
            always = isinstance(self._blocks[name], Recompute)
            modes[name] = (Mode.RECOMPUTE,) if always else WITHOUT_INVERSE
        return modes

    def block_modes(self) -> dict[str, Mode]:
        """Name the blocks and the mode that each has."""
        modes = {name: mode_of(self._blocks[name]) for name in self._named}
        return modes | {name: c.modes[i] for name, (c, i) in self._chained.items()}

    def set_mode(self, mode: Mapping[str, Mode | str]) -> None:
        """Give blocks modes, by their names.

        Raises
        ------
        ValueError
            If there is no such block, or it cannot have the mode: then all blocks have
            the modes that they had.
        """
        modes = {name: as_mode(m) for name, m in mode.items()}
        allowed = with_lossy(self.allowed_modes())
        allowed |= {name: (*allowed[name], Mode.JOIN) for name in self.may_join}
        for name, m in modes.items():
            if m not in allowed.get(name, ()):
                raise ValueError(
                    f"{name!r} cannot be given mode {m.value!r}. Blocks and their modes "
                    "are "
                    + "; ".join(
                        f"{n}: {', '.join(x.value for x in all_)}"
                        for n, all_ in allowed.items()
                    )
                )
        kept = self.block_modes()
        try:
            self._give(modes)
        except Exception:
            self._give({name: kept[name] for name in modes})
            raise

    def _give(self, modes: Mapping[str, Mode]) -> None:
        lossless = is_lossless(modes.values())
        if not lossless:
            refuse_what_is_compressed(self.module)
        # Other blocks may compress by a plan that named them.
        own = {id(block) for block in self._blocks.values()}
        for name, block in self.module.named_modules():
            if name and id(block) not in own and not mode_of(block).spec.lossless:
                give_mode(self.module, Mode.STORE, name)
        for name, m in modes.items():
            if name in self._chained:
                chain, i = self._chained[name]
                chain.set_mode([*chain.modes[:i], m, *chain.modes[i + 1 :]])
            else:
                give_mode(self.module, m, name, verify=self.verify)
        if isinstance(self.module, ReversibleChain):
            return  # It compresses by itself.
        if is_lossless(self.block_modes().values()):
            stop_compressing_blocks(self.module)
            return
        compress_blocks(self.module, self.compression)
        if not hasattr(self.module, "compression"):
            # For its records, and for an optimizer to be followed.
            self.module.compression = self.compression  # type: ignore[assignment]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Let blocks that are no couplings report their moments for a while."""
        with contextlib.ExitStack() as hooks:
            for name in self._named:
                block = self._blocks[name]
                if isinstance(block, torch.jit.ScriptModule):
                    raise ValueError(
                        f"{name!r} is scripted and takes no hooks, so that it cannot be "
                        "planned. Name other blocks."
                    )
                for handle in (
                    block.register_forward_pre_hook(_begins),
                    block.register_forward_hook(_ends),
                ):
                    hooks.callback(handle.remove)
            yield


def with_lossy(
    allowed: Mapping[str, tuple[Mode, ...]],
) -> dict[str, tuple[Mode, ...]]:
    """Add the modes that are not lossless for all blocks that can store."""
    lossy = [mode for mode in Mode if not mode.spec.lossless]
    return {
        name: (*modes, *lossy) if Mode.STORE in modes else modes
        for name, modes in allowed.items()
    }


def all_stored(network: Network) -> dict[str, Mode]:
    """Give the modes in which all blocks store that can."""
    allowed = network.allowed_modes()
    return {name: fallback(Mode.STORE, modes) for name, modes in allowed.items()}


@contextlib.contextmanager
def keeping_modes(network: Network) -> Iterator[None]:
    """Give the blocks of a network, at the end, the modes that they had."""
    kept = dict(network.block_modes())
    try:
        yield
    finally:
        network.set_mode(kept)


def compare_next(network: Network) -> bool:
    """Let chains compare their streams in the next step, which then holds most.

    Returns
    -------
    bool
        Whether there are chains, for which the next step is then as a first one.
    """
    module: nn.Module = getattr(network, "module", cast(nn.Module, network))
    chains = [m for m in module.modules() if isinstance(m, ReversibleChain)]
    for chain in chains:
        chain.monitor.restart()
    return bool(chains)


def device_of(network: Network) -> torch.device | None:
    """Give the device that a network's blocks are on; None where there are several."""
    blocks = network.named_blocks().values()
    devices = {p.device for block in blocks for p in block.parameters()}
    return devices.pop() if len(devices) == 1 else None


def _begins(block: nn.Module, _: Any) -> None:
    notify(block, Moment.FORWARD_BEGINS)


def _ends(block: nn.Module, _: Any, outputs: Any) -> None:
    tensors = tensors_of(outputs)
    wanted = [y for y in tensors if y.requires_grad]
    if not tensors:
        raise ValueError(
            f"{type(block).__name__} returns no tensor and cannot be planned: name other "
            "blocks."
        )
    notify_end(block, *wanted)


def as_network(
    module: nn.Module, blocks: str | Sequence[str] = (), verify: Verify | None = "first"
) -> Network:
    """Take a module for a network of blocks.

    Parameters
    ----------
    module : nn.Module
        An encoder of ours, which has blocks by itself, or any other module.
    blocks : str or sequence of str
        Names or patterns, for other modules; a str is one of them.
    verify : {"first", "raise", "warn"} or None
        Of blocks of other modules, as for ``recompute_blocks``.

    Returns
    -------
    Network
        The module itself, or its blocks.

    Raises
    ------
    ValueError
        If the module has blocks by itself and others were named, or has none, or
        ``blocks`` are no names.
    """
    if blocks is None:
        raise ValueError(
            "blocks is None: give names of submodules or patterns of them, as "
            "'blocks.*', or leave it out for an encoder of ours and for chains."
        )
    if isinstance(blocks, str):
        blocks = [blocks]
    if not all(hasattr(module, name) for name in _ASKED):
        return NamedBlocks(module, *blocks, verify=verify)
    if blocks:
        raise ValueError(
            f"{type(module).__name__} names its blocks by itself; leave out blocks="
            f"{list(blocks)}."
        )
    return cast(Network, module)


def names_blocks(module: nn.Module) -> bool:
    """Whether a module has blocks by itself: an encoder of ours, or reversible chains."""
    return all(hasattr(module, name) for name in _ASKED) or any(
        isinstance(part, ReversibleChain) for part in module.modules()
    )


def give(
    network: Network,
    modes: Mapping[str, Mode | str],
    channels: Sequence[int | None] | None,
) -> None:
    """Give a network modes, and channels at a time; or leave it as it was.

    Parameters
    ----------
    network : Network
        The network.
    modes : mapping of str to Mode or str
        By the names of blocks.
    channels : sequence of int or None, or None
        At each level of an encoder; None to leave them.

    Raises
    ------
    ValueError
        If it cannot have one of them.
    """
    with contextlib.ExitStack() as restored:
        if channels is not None:
            encoder = cast(Any, network)
            if not hasattr(network, "set_channels"):
                raise ValueError(
                    f"The plan is for an encoder that works on {list(channels)} channels "
                    "at a time, which this network has not. Plan anew for this network."
                )
            kept = list(encoder.channels)
            encoder.set_channels(channels)
            restored.callback(encoder.set_channels, kept)
        network.set_mode(modes)
        restored.pop_all()


def warn_caller(message: str) -> None:
    """Warn whoever called this package, from however deep within it."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_PACKAGE = f"{__name__.partition('.')[0]}."
_ASKED = ("named_blocks", "allowed_modes", "block_modes", "set_mode")


class Restricted:
    """A network with the modes that a plan may give its blocks; all else is as it is.

    Parameters
    ----------
    network : Network
        The network.
    allowed : mapping of str to tuple of Mode
        Modes of each block.
    """

    def __init__(
        self, network: Network, allowed: Mapping[str, tuple[Mode, ...]]
    ) -> None:
        #: The network itself.
        self.network = network
        self._allowed = dict(allowed)

    def allowed_modes(self) -> Mapping[str, tuple[Mode, ...]]:
        """Name the blocks and the modes that each may have."""
        return self._allowed

    def __getattr__(self, name: str) -> Any:
        """Give all else of the network itself."""
        return getattr(self.network, name)

    def named_blocks(self) -> Mapping[str, nn.Module]:
        """Give the blocks by name."""
        return self.network.named_blocks()

    def block_modes(self) -> Mapping[str, Mode]:
        """Name the blocks and the mode that each has."""
        return self.network.block_modes()

    def set_mode(self, mode: Mapping[str, Mode | str]) -> None:
        """Give blocks modes, by their names."""
        self.network.set_mode(mode)


def without(network: Network, mode: Mode, names: Collection[str]) -> Restricted:
    """Withhold a mode from some blocks.

    Examples
    --------
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> chain = ReversibleChain(AdditiveCoupling(nn.Tanh(), nn.Tanh()) for _ in range(2))
    >>> network = without(as_network(chain), Mode.RECONSTRUCT, ["blocks.1"])
    >>> {name: len(modes) for name, modes in network.allowed_modes().items()}
    {'blocks.0': 4, 'blocks.1': 3}
    """
    allowed = network.allowed_modes()
    fewer = {n: tuple(m for m in allowed[n] if m is not mode) for n in names}
    return Restricted(network, {**allowed, **fewer})


def compressible(network: Network, names: Collection[str]) -> Restricted:
    """Let some blocks compress.

    Examples
    --------
    >>> network = as_network(nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()), "*")
    >>> modes = compressible(network, ["0"]).allowed_modes()
    >>> [mode.value for mode in modes["0"]], len(modes["1"])
    (['store', 'selective', 'recompute', 'compress'], 3)
    """
    allowed = network.allowed_modes()
    more = {n: with_lossy(allowed)[n] for n in names}
    return Restricted(network, {**allowed, **more})


def tensors_of(tree: Any) -> list[Tensor]:
    """List the tensors in nested tuples, lists and dicts."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def own_batch(batch: Any, device: torch.device | str | None = None) -> Any:
    """Detach a batch, so that no gradient reaches what it was made of.

    Parameters
    ----------
    batch : tensor, or tuple, list or dict of such
        The batch.
    device : torch.device or str or None
        Where its tensors shall be; None leaves them where they are.

    Returns
    -------
    tensor, or tuple, list or dict of such
        The same numbers, which need gradients where the batch's do.
    """

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # A tensor that was made in inference mode cannot be trained on.
        numbers = x.clone() if x.is_inference() else x.detach()
        return numbers.to(device or x.device).requires_grad_(x.requires_grad)

    return tree_map(own, batch)


def call(module: nn.Module, batch: Any) -> Any:
    """Call a module: a tuple or list are its arguments, a dict its keywords."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)
