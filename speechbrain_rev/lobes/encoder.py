"""Speaker encoders: filterbanks in, one embedding per utterance out.

All 25 encoders are one class, built from a row of ``architectures``: a stem, four
stages, each entered through a transition, statistics pooling and a linear layer. In
the reversible families the stages are chains of couplings, and the streams travel from
the stem to the pooling without becoming one tensor in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.lobes.blocks import (
    ORDINARY_BLOCKS,
    RESIDUALS,
    Masks,
    SpaceToDepthTransition,
    Stem,
    StridedTransition,
)
from speechbrain_rev.lobes.pooling import CORRECTIONS, statistics_pooling
from speechbrain_rev.reversible.chain import ReversibleChain, trains
from speechbrain_rev.reversible.coupling import AdditiveCoupling
from speechbrain_rev.reversible.modes import Mode, as_mode
from speechbrain_rev.reversible.segment import recompute
from speechbrain_rev.reversible.streams import leave, read

#: The pooled time axis has an eighth of the frames, and a deviation needs two.
MIN_FRAMES = 9


class Stage(nn.Module):
    """A transition into a stage, if there is one, and the stage's blocks.

    Parameters
    ----------
    entry : nn.Module or None
        Called with masks and the previous stage's output.
    blocks : ReversibleChain or iterable of nn.Module
        Couplings, or ordinary blocks.
    downsamples : bool
        Whether this stage has half the frequencies and frames of the one before.
    """

    def __init__(
        self,
        entry: nn.Module | None,
        blocks: ReversibleChain | Iterable[nn.Module],
        downsamples: bool,
    ) -> None:
        super().__init__()
        self.entry = entry
        self.chain = blocks if isinstance(blocks, ReversibleChain) else None
        self.blocks = None if self.chain is not None else nn.ModuleList(blocks)
        self.downsamples = downsamples


class SpeakerEncoder(nn.Module):
    """Map filterbanks to one embedding per utterance.

    Build it with ``build_encoder``.

    Parameters
    ----------
    row : Architecture
        The encoder's row of the table.
    n_mels : int
        Mel bands of the input.
    embedding_dim : int
        Size of the embedding.
    streams : str
        Number format of reversible streams.
    sync_batchnorm : bool
        Whether batch statistics are shared between processes.
    pooling_variance : {"population", "unbiased"}
        Which variance statistics pooling takes.
    """

    def __init__(
        self,
        row: Architecture,
        *,
        n_mels: int,
        embedding_dim: int,
        streams: str,
        sync_batchnorm: bool,
        pooling_variance: str,
    ) -> None:
        super().__init__()
        self.architecture, self.n_mels = row, n_mels
        self.correction = CORRECTIONS[pooling_variance]
        sync = sync_batchnorm
        width = row.widths[0] * (_expansion(row) if row.type == "II" else 1)
        two = row.family == "df_revnet" and row.type == "I"
        self.stem = Stem(width, 2 if two else 1, sync=sync)
        stages = []
        for i, (width_i, n_blocks) in enumerate(
            zip(row.widths, row.blocks, strict=True)
        ):
            stage = _stage(row, i, width, width_i, n_blocks, streams, sync)
            stages.append(stage)
            width = width_i * _expansion(row)
        self.stages = nn.ModuleList(stages)
        pooled_freq = -(-n_mels // 8)
        self.fc = nn.Linear(2 * width * pooled_freq, embedding_dim)
        self._modes: dict[str, Mode] = {}
        self.set_mode(Mode.RECONSTRUCT if row.reversible else Mode.STORE)

    def block_modes(self) -> dict[str, Mode]:
        """Name the blocks and say what each keeps for the backward pass.

        Returns
        -------
        dict of str to Mode
            In the order of execution.
        """
        return dict(self._modes)

    def reversible_blocks(self) -> set[str]:
        """Name the blocks whose inputs follow from their outputs."""
        return {
            f"stages.{i}.chain.{j}"
            for i, stage in enumerate(self.stages)
            if stage.chain is not None
            for j in range(len(stage.chain.blocks))
        }

    def set_mode(self, mode: Mode | str | Mapping[str, Mode | str]) -> None:
        """Choose what blocks keep for the backward pass, at any time.

        Parameters
        ----------
        mode : Mode or str, or mapping of block name to these
            For all blocks, or for some by the names of ``block_modes``. "reconstruct"
            for all recomputes what cannot be reconstructed: stem and transitions.

        Raises
        ------
        ValueError
            If there is no such mode or block, or a block cannot be reconstructed.
        """
        names, reversible = self._block_names(), self.reversible_blocks()
        if isinstance(mode, Mapping):
            modes = {name: as_mode(m) for name, m in mode.items()}
            unknown = sorted(modes.keys() - set(names))
            if unknown:
                raise ValueError(
                    f"{self.architecture.name} has no block {unknown[0]!r}; its blocks "
                    f"are {', '.join(names)}."
                )
            for name in sorted(modes.keys() - reversible):
                if modes[name] is Mode.RECONSTRUCT:
                    raise ValueError(
                        f"Block {name!r} of {self.architecture.name} is not "
                        "reversible. Give it mode 'recompute' or 'store'."
                    )
        else:
            modes = self._modes_for_all(as_mode(mode), names, reversible)
        self._modes = {name: modes.get(name, self._modes.get(name)) for name in names}
        for i, stage in enumerate(self.stages):
            if stage.chain is not None:
                prefix = f"stages.{i}.chain."
                stage.chain.set_mode(
                    [m for n, m in self._modes.items() if n.startswith(prefix)]
                )

    def _modes_for_all(
        self, mode: Mode, names: Sequence[str], reversible: set[str]
    ) -> dict[str, Mode]:
        if mode is not Mode.RECONSTRUCT:
            return dict.fromkeys(names, mode)
        if not reversible:
            raise ValueError(
                f"{self.architecture.name} has no reversible blocks. Use mode "
                "'recompute', or one of its reversible counterparts: "
                f"{', '.join(_counterparts(self.architecture.name))}."
            )
        return {
            name: Mode.RECONSTRUCT if name in reversible else Mode.RECOMPUTE
            for name in names
        }

    def _block_names(self) -> list[str]:
        names = ["stem"]
        for i, stage in enumerate(self.stages):
            if stage.entry is not None:
                names.append(f"stages.{i}.entry")
            kind, blocks = (
                ("blocks", stage.blocks)
                if stage.chain is None
                else ("chain", stage.chain.blocks)
            )
            names += [f"stages.{i}.{kind}.{j}" for j in range(len(blocks))]
        return names

    def forward(self, feats: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Embed utterances.

        Parameters
        ----------
        feats : torch.Tensor, [batch, time, n_mels]
            Filterbanks.
        lengths : torch.Tensor, [batch], or None
            Relative lengths, 1.0 for an utterance of all frames. None if no utterance
            is padded.

        Returns
        -------
        torch.Tensor, [batch, 1, embedding_dim]
            Embeddings.

        Raises
        ------
        ValueError
            If the input has not the shape that the encoder was built for.
        """
        self._check(feats, lengths)
        x = feats.transpose(1, 2).unsqueeze(1)
        frames = feats.shape[1]
        padding = -frames % 8 if self.architecture.type == "II" else 0
        x = F.pad(x, (0, padding))
        masks = _masks(x, frames, lengths, padding)
        if masks[0] is not None:
            x = x * masks[0].to(x.dtype)
        embeddings = self.fc(self._pooled(x, masks))
        return embeddings.unsqueeze(1)

    def _pooled(self, x: Tensor, masks: list[Tensor | None]) -> Tensor:
        level = 0
        parts = [self._run("stem", self.stem, Masks(masks[0], masks[0]), x)]
        for i, stage in enumerate(self.stages):
            mask_before, level = masks[level], level + stage.downsamples
            around = Masks(mask_before, masks[level])
            streams = None
            if stage.entry is not None:
                parts = [self._run(f"stages.{i}.entry", stage.entry, around, *parts)]
                around = Masks(masks[level], masks[level])
            if stage.chain is None:
                for j, block in enumerate(stage.blocks):
                    name = f"stages.{i}.blocks.{j}"
                    parts = [self._run(name, block, around, *parts)]
                    around = Masks(masks[level], masks[level])
            elif not trains(stage.chain):
                parts = list(stage.chain(*_halves(parts), masks[level]))
            else:
                streams = stage.chain.enter(*_halves(parts))
                del parts
                streams = stage.chain.advance(streams, masks[level])
                last = i + 1 == len(self.stages)
                parts = (
                    list(leave(streams))
                    if last
                    else [read(s, streams.format) for s in streams[:2]]
                )
        pooled = [
            statistics_pooling(part, masks[level], correction=self.correction)
            for part in parts
        ]
        return torch.cat([p for kind in zip(*pooled, strict=True) for p in kind], 1)

    def _run(self, name: str, unit: nn.Module, masks: Masks, *parts: Tensor) -> Tensor:
        again = self._modes[name] is Mode.RECOMPUTE and trains(unit)
        return recompute(unit, masks, *parts) if again else unit(masks, *parts)

    def _check(self, feats: Tensor, lengths: Tensor | None) -> None:
        expected = f"[batch, time, {self.n_mels}]"
        if feats.dim() != 3 or feats.shape[2] != self.n_mels:
            raise ValueError(
                f"{self.architecture.name} takes filterbanks {expected}, but got "
                f"{list(feats.shape)}. Pass Fbank(n_mels={self.n_mels}) features, or "
                "build the encoder with the n_mels that you have."
            )
        if feats.shape[1] < MIN_FRAMES:
            raise ValueError(
                f"{self.architecture.name} needs at least {MIN_FRAMES} frames, but got "
                f"{list(feats.shape)} as {expected}. Pass longer utterances."
            )
        if lengths is not None and lengths.shape != feats.shape[:1]:
            raise ValueError(
                f"lengths must be relative, one for each utterance: [{feats.shape[0]}], "
                f"but got {list(lengths.shape)}."
            )


def build_encoder(
    name: str,
    *,
    n_mels: int = 80,
    embedding_dim: int = 256,
    mode: Mode | str | Mapping[str, Mode | str] | None = None,
    streams: str = "float",
    sync_batchnorm: bool = False,
    pooling_variance: str = "population",
    widths: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
) -> SpeakerEncoder:
    """Build an encoder by its name.

    Parameters
    ----------
    name : str
        One of ``speechbrain_rev.architectures.ARCHITECTURES``.
    n_mels : int
        Mel bands of the input; a multiple of 8 for encoders of type II.
    embedding_dim : int
        Size of the embedding.
    mode : Mode or str, or mapping of block name to these, or None
        What blocks keep for the backward pass. None reconstructs what is reversible
        and stores in vanilla encoders.
    streams : {"float"}
        Number format of reversible streams.
    sync_batchnorm : bool
        Whether batch statistics are shared between processes.
    pooling_variance : {"population", "unbiased"}
        Which variance statistics pooling takes; WeSpeaker has the unbiased one.
    widths, blocks : sequence of int, or None
        Channels and blocks of each stage, to make an encoder of another size.

    Returns
    -------
    SpeakerEncoder
        The encoder, initialised from torch's random state.

    Raises
    ------
    ValueError
        If there is no such encoder, or a size does not fit its family.

    Examples
    --------
    >>> encoder = build_encoder("revnet57", widths=(8, 16, 16, 16), blocks=(1, 1, 1, 1))
    >>> encoder(torch.randn(2, 30, 80)).shape
    torch.Size([2, 1, 256])
    """
    row = architecture(name)
    row = dataclasses.replace(
        row,
        widths=row.widths if widths is None else tuple(widths),
        blocks=row.blocks if blocks is None else tuple(blocks),
    )
    _check_sizes(row, n_mels, embedding_dim, pooling_variance)
    encoder = SpeakerEncoder(
        row,
        n_mels=n_mels,
        embedding_dim=embedding_dim,
        streams=streams,
        sync_batchnorm=sync_batchnorm,
        pooling_variance=pooling_variance,
    )
    if mode is not None:
        encoder.set_mode(mode)
    return encoder


def _stage(
    row: Architecture,
    index: int,
    channels: int,
    width: int,
    n_blocks: int,
    streams: str,
    sync: bool,
) -> Stage:
    """Build one stage of a row; ``channels`` are those of the stage before."""
    downsamples = index > 0
    stride = 2 if downsamples else 1
    wide = width * _expansion(row)
    ordinary = ORDINARY_BLOCKS[row.block]
    entry: nn.Module | None = None
    if row.family == "revnet" and row.type == "I":
        entry = ordinary(channels, width, stride, sync=sync)
    elif row.type == "II" and downsamples:
        entry = SpaceToDepthTransition(channels, wide, sync=sync)
    elif row.family in ("df_resnet", "df_revnet") and downsamples:
        entry = StridedTransition(channels, wide, sync=sync)
    if row.reversible:
        residual = RESIDUALS[row.block]
        couplings = [
            AdditiveCoupling(
                residual(wide // 2, sync=sync), residual(wide // 2, sync=sync)
            )
            for _ in range(n_blocks)
        ]
        return Stage(entry, ReversibleChain(couplings, streams=streams), downsamples)
    first = (channels, stride) if entry is None else (wide, 1)
    shapes = [first] + [(wide, 1)] * (n_blocks - 1)
    blocks = [ordinary(c, width, s, sync=sync) for c, s in shapes]
    return Stage(entry, blocks, downsamples)


def _expansion(row: Architecture) -> int:
    # The paper prints unexpanded widths; its final layer of 24000 inputs proves that
    # a bottleneck's are expanded four times.
    return 4 if row.block == "bottleneck" else 1


def _counterparts(name: str) -> list[str]:
    return [row.name for row in ARCHITECTURES.values() if row.counterpart == name]


def _check_sizes(
    row: Architecture, n_mels: int, embedding_dim: int, pooling_variance: str
) -> None:
    if len(row.widths) != 4 or len(row.blocks) != 4 or min(row.widths) < 1:
        raise ValueError(
            "widths and blocks take one number for each of the 4 stages, widths of at "
            f"least 1; given were widths={row.widths}, blocks={row.blocks}."
        )
    if min(row.blocks) < (0 if row.reversible else 1):
        raise ValueError(f"A stage needs a block; given was blocks={row.blocks}.")
    step = {"II": 4, "I": 2, "vanilla": 1}[row.type]
    uneven = [w for w in row.widths if w % step]
    if uneven:
        raise ValueError(
            f"{row.name} halves and rearranges its channels: widths must be multiples "
            f"of {step}, but {uneven[0]} is not."
        )
    if n_mels < 8 or (row.type == "II" and n_mels % 8):
        raise ValueError(
            f"{row.name} halves the frequency axis three times: n_mels must be at "
            f"least 8{', and a multiple of 8' if row.type == 'II' else ''}, "
            f"but is {n_mels}."
        )
    if embedding_dim < 1:
        raise ValueError(f"embedding_dim must be at least 1, but is {embedding_dim}.")
    if pooling_variance not in CORRECTIONS:
        raise ValueError(
            f"pooling_variance must be one of {', '.join(CORRECTIONS)}, but is "
            f"{pooling_variance!r}."
        )


def _halves(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    (x,) = parts
    x1, x2 = x.chunk(2, dim=1)
    return x1, x2


def _masks(
    x: Tensor, frames: int, lengths: Tensor | None, padding: int
) -> list[Tensor | None]:
    """Masks [batch, 1, 1, time] of the frames that count, at each of the 4 levels."""
    if lengths is None and not padding:
        return [None] * 4
    if lengths is None:
        valid = torch.full((x.shape[0], 1), float(frames), device=x.device)
    else:
        valid = (lengths.to(x.device).float() * frames).round().unsqueeze(1)
    masks: list[Tensor | None] = []
    time = x.shape[3]
    for _ in range(4):
        positions = torch.arange(time, device=x.device)
        masks.append((positions < valid).float()[:, None, None, :])
        valid, time = (valid / 2).ceil(), -(-time // 2)
    return masks
