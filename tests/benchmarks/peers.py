"""Ways of training a chain of couplings without storing its activations, side by side.

A way makes a network of residual functions, which maps one tensor of both streams to
its outputs: one tensor, or one for each stream. Ours are given the package's residual
functions, the others the same functions in torch's own layers with the same weights.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.architectures import architecture
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.lobes.geometry import channels_by_level
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain

from .plain import PlainEncoder, plain, plain_unit

#: F and G of each block.
Functions = Sequence[tuple[nn.Module, nn.Module]]
#: Hidden channels at a time at the first level of an encoder, by default.
_ROW = architecture("revnet57")
CHUNK = channels_by_level("auto", _ROW, _ROW.geometry())[0]
INSTALL = "pip install -e .[peers]"


class NotInstalled(ImportError):
    """A peer cannot be imported here."""


@dataclass(frozen=True, eq=False)
class Way:
    """A way of training a chain.

    ``settings`` are those of a ``ReversibleChain``, None for a way that is not ours;
    ``peer`` is the package that a way needs, as it is called on PyPI; ``checkpoints``
    whether torch recomputes an encoder's stem and transitions beside it.
    """

    name: str
    build: Callable[[Functions], nn.Module]
    settings: dict[str, Any] | None = None
    peer: str | None = None
    checkpoints: bool = True

    @property
    def ours(self) -> bool:
        """Whether the way is this package's."""
        return self.settings is not None

    @property
    def exact(self) -> bool:
        """Whether streams are rounded, so that all modes have the same bits."""
        return self.ours and self.settings["streams"] == "exact"


class Ours(nn.Module):
    """A chain of ours, as it trains but for the check of every hundredth step."""

    def __init__(self, functions: Functions, **settings: Any) -> None:
        super().__init__()
        blocks = (AdditiveCoupling(f, g) for f, g in functions)
        self.chain = ReversibleChain(blocks, verify=None, **settings)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run both streams."""
        return self.chain(*x.chunk(2, dim=1))


class Plain(nn.Module):
    """The couplings in plain autograd, written out: what all ways must equal."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in functions)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run both streams."""
        streams: tuple[Tensor, ...] = x.chunk(2, dim=1)
        for f, g in self.blocks:
            streams = self.couple(f, g, *streams)
        return streams

    @staticmethod
    def couple(
        f: nn.Module, g: nn.Module, x1: Tensor, x2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Couple two streams."""
        y1 = x1 + f(x2)
        return y1, x2 + g(y1)


class Checkpointed(Plain):
    """The couplings in plain autograd, of which torch keeps the inputs only."""

    couple = staticmethod(
        functools.partial(checkpoint, Plain.couple, use_reentrant=False)
    )


class Joined(nn.Module):
    """A network of a peer, from one tensor of both streams to one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run both streams."""
        return (self.network(x),)


def memcnn_chain(functions: Functions) -> nn.Module:
    """Couplings of MemCNN, each with its random state kept."""
    memcnn = imported("memcnn", "memcnn")
    blocks = (
        memcnn.InvertibleModuleWrapper(
            memcnn.AdditiveCoupling(f, g), preserve_rng_state=True
        )
        for f, g in functions
    )
    return Joined(nn.Sequential(*blocks))


def revtorch_chain(functions: Functions) -> nn.Module:
    """Build a sequence of RevTorch whose blocks draw the same numbers again."""
    revtorch = imported("revtorch.revtorch", "RevTorch")
    blocks = (
        revtorch.ReversibleBlock(f, g, fix_random_seed=True) for f, g in functions
    )
    return Joined(revtorch.ReversibleSequence(nn.ModuleList(blocks)))


def revlib_chain(functions: Functions) -> nn.Module:
    """Build a sequence of revlib, which couples one function at a time."""
    revlib = imported("revlib", "revlib")
    return Joined(revlib.ReversibleSequential(*(f for pair in functions for f in pair)))


def imported(module: str, peer: str) -> ModuleType:
    """Import a peer.

    Raises
    ------
    NotInstalled
        If it cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalled(
            f"{peer} cannot be imported ({error}). Run {INSTALL}"
        ) from error


def versions() -> str:
    """List the versions of the peers, and which are not installed."""
    return ", ".join(f"{way.peer} {version_of(way.peer)}" for way in PEERS)


def version_of(peer: str) -> str:
    """Give the version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(peer)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def our_way(name: str, **settings: Any) -> Way:
    """Make a way of a chain's settings."""
    return Way(name, functools.partial(Ours, **settings), settings)


PLAIN_TORCH = Way("plain torch layers", Plain, checkpoints=False)
STORE = our_way("ours, store, float", mode="store", streams="float")
_CHUNKED = {"streams": "exact", "chunk": CHUNK}
PEERS = (
    Way("MemCNN", memcnn_chain, peer="memcnn"),
    Way("RevTorch", revtorch_chain, peer="RevTorch"),
    Way("revlib", revlib_chain, peer="revlib"),
)
WAYS = (
    PLAIN_TORCH,
    Way("torch checkpoint", Checkpointed),
    *PEERS,
    STORE,
    our_way("ours, store, chunks", mode="store", **_CHUNKED),
    our_way("ours, recompute", mode="recompute", streams="exact"),
    our_way("ours, recompute, chunks", mode="recompute", **_CHUNKED),
    our_way("ours, float", mode="reconstruct", streams="float"),
    our_way("ours, exact", mode="reconstruct", streams="exact"),
    our_way("ours, float, chunks", mode="reconstruct", streams="float", chunk=CHUNK),
    our_way("ours, exact, chunks", mode="reconstruct", **_CHUNKED),
)


class RebuiltEncoder(nn.Module):
    """An encoder in torch's own layers, whose chains a way builds.

    Parameters
    ----------
    encoder : SpeakerEncoder
        A reversible encoder, which gives its weights.
    build : callable
        From residual functions to a chain.
    checkpoints : bool
        Whether torch recomputes stem and transitions, as ours does.
    widens : bool
        Whether chains are given float32 under autocast, too.

    Attributes
    ----------
    parts : tuple of nn.Module
        What has parameters, in the order in which the encoder has them.
    """

    def __init__(
        self,
        encoder: SpeakerEncoder,
        build: Callable[[Functions], nn.Module],
        *,
        checkpoints: bool = True,
        widens: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoints, self.widens = checkpoints, widens
        self.n_mels = encoder.n_mels
        self.pooling, self.fc = encoder.pooling, encoder.fc
        self.entries, self.chains = nn.ModuleList(), nn.ModuleList()
        self.parts: tuple[nn.Module, ...] = ()
        for i, stage in enumerate(encoder.stages):
            units = [encoder.stem] if i == 0 else []
            units += [] if stage.entry is None else [stage.entry]
            entry = nn.Sequential(*map(plain_unit, units))
            functions = [(plain(b.f), plain(b.g)) for b in stage.chain.blocks]
            self.entries.append(entry)
            self.chains.append(build(functions))
            self.parts += (entry, *(f for pair in functions for f in pair))
        self.parts += (self.fc,)

    def forward(self, feats: Tensor) -> Tensor:
        """Map [batch, time, n_mels] to [batch, 1, embedding_dim].

        Time is a multiple of 8 for encoders of type II.
        """
        streams: tuple[Tensor, ...] = (feats.transpose(1, 2).unsqueeze(1),)
        for entry, chain in zip(self.entries, self.chains, strict=True):
            # The chain alone has its input, as in ours.
            held = [self._entered(entry, *streams)]
            del streams
            if self.widens:
                x = held.pop()
                held.append(x.to(torch.promote_types(x.dtype, torch.float32)))
                del x
            streams = chain(held.pop())
        return self.fc(self.pooling(None, *streams)).unsqueeze(1)

    def _entered(self, entry: nn.Module, *streams: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(_joined, entry, *streams, use_reentrant=False)
        return _joined(entry, *streams)


def _joined(entry: nn.Module, *streams: Tensor) -> Tensor:
    return entry(streams[0] if len(streams) == 1 else torch.cat(streams, dim=1))


def in_plain_layers(encoder: SpeakerEncoder) -> nn.Module:
    """Rebuild an encoder in torch's own layers, all of whose activations are stored."""
    if encoder.architecture.reversible:
        return RebuiltEncoder(encoder, Plain, checkpoints=False)
    return PlainEncoder(encoder)


def rebuilt(way: Way, name: str, **row: Any) -> nn.Module:
    """Build an encoder whose chains train in a way; chunks are the default's."""
    if way.settings is None:
        # Peers do not take the halves that a stem makes under autocast.
        widens = bool(way.peer)
        encoder = build_encoder(name, **row)
        return RebuiltEncoder(
            encoder, way.build, checkpoints=way.checkpoints, widens=widens
        )
    chunk = "auto" if way.settings.get("chunk") else None
    return build_encoder(name, verify=None, **{**way.settings, "chunk": chunk}, **row)
