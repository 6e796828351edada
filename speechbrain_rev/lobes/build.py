"""From a row of the table to an encoder's modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from speechbrain_rev.architectures import Architecture, architecture
from speechbrain_rev.compression import ActivationCompression
from speechbrain_rev.lobes.blocks import ORDINARY_BLOCKS, RESIDUALS
from speechbrain_rev.lobes.chunks import channels_by_level
from speechbrain_rev.lobes.encoder import SpeakerEncoder
from speechbrain_rev.lobes.initialisation import zero_residuals
from speechbrain_rev.lobes.pooling import CORRECTIONS
from speechbrain_rev.lobes.stage import Stage
from speechbrain_rev.lobes.transitions import (
    SpaceToDepthTransition,
    Stem,
    StridedTransition,
)
from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.coupling import AdditiveCoupling
from speechbrain_rev.reversible.modes import AppliedPlan, Mode
from speechbrain_rev.reversible.monitor import Verify
from speechbrain_rev.reversible.norm import BatchNorm


def build_encoder(
    name: str,
    *,
    n_mels: int = 80,
    embedding_dim: int = 256,
    mode: Mode | str | Mapping[str, Mode | str] | AppliedPlan | None = None,
    streams: str = "exact",
    verify: Verify | None = "warn",
    verify_every: int = 100,
    chunk: int | str | None = "auto",
    sync_batchnorm: bool = False,
    pooling_variance: str = "population",
    zero_init_residual: bool = False,
    compression: ActivationCompression | None = None,
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
    mode : Mode or str, or mapping of block name to these, or Plan, or None
        What blocks keep for the backward pass. None reconstructs what is reversible
        and stores in vanilla encoders. A plan gives its channels at a time too.
    streams : {"exact", "float"}
        Number format of reversible streams. Exact ones are fixed-point numbers below
        16,384, from which every memory mode makes the same gradients to the bit. Float
        ones are reconstructed up to an error that grows with depth.
    verify : {"warn", "raise"} or None
        What happens if exact streams are not reconstructed to the bit, because
        something does not compute the same twice; None looks at nothing.
    verify_every : int
        Forward passes in training from one look to the next.
    chunk : int, "auto" or None
        Working set of reversible encoders: bytes of the float32 map that residual
        functions work on at a time, for an utterance of 200 frames; stem and transitions
        take half of it. Normalisations take some channels, bottlenecks' convolutions some
        utterances of the batch. None works on all at once, in more memory. It decides the
        order of sums: gradients are equal to the bit in all modes at one chunk.
    sync_batchnorm : bool
        Whether batch statistics are shared between processes.
    pooling_variance : {"population", "unbiased"}
        Which variance statistics pooling takes; WeSpeaker has the unbiased one.
    zero_init_residual : bool
        Whether blocks begin as the identity, see
        :func:`~speechbrain_rev.lobes.initialisation.zero_residuals`. They do so in the
        recipe.
    compression : ActivationCompression or None
        How blocks in mode "compress" do it; None for its defaults.
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
    >>> import torch
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
    if not row.reversible and chunk not in ("auto", None):
        raise ValueError(
            f"{name} has no reversible blocks and works on all channels at once: chunk "
            f"is {chunk!r}, but takes 'auto' or None here."
        )
    channels = channels_by_level(chunk if row.reversible else None, n_mels)
    stem_convolutions = 2 if row.family == "df_revnet" and row.type == "I" else 1
    width = row.widths[0] * (_expansion(row) if row.type == "II" else 1)
    settings = {"streams": streams, "verify": verify, "verify_every": verify_every}
    stem = Stem(width, stem_convolutions, sync=sync_batchnorm)
    stages = []
    for i in range(len(row.widths)):
        chain = settings | {"chunk": channels[i]}
        stages.append(_stage(row, i, width, chain, sync_batchnorm))
        width = row.widths[i] * _expansion(row)
    pooled_freq = -(-n_mels // 8)
    fc = nn.Linear(2 * width * pooled_freq, embedding_dim)
    encoder = SpeakerEncoder(
        row,
        stem,
        stages,
        fc,
        n_mels=n_mels,
        channels=channels,
        correction=CORRECTIONS[pooling_variance],
    )
    if zero_init_residual:
        zero_residuals(encoder)
    if compression is not None:
        if not isinstance(compression, ActivationCompression):
            raise ValueError(
                f"compression is {compression!r}; give an ActivationCompression, whose "
                "rules choose the bounds, or None for its defaults."
            )
        encoder.compression = compression
    if mode is not None:
        encoder.set_mode(mode)
    return encoder


def settings_of(encoder: SpeakerEncoder) -> dict[str, Any]:
    """Give the settings that make an encoder like another one, whatever its depth.

    Parameters
    ----------
    encoder : SpeakerEncoder
        As ``build_encoder`` makes them.

    Returns
    -------
    dict of str to object
        Keywords of ``build_encoder`` beside blocks: all that changes what a training
        step holds or how long it takes. Mode and chunk can change later, and are told by
        ``block_modes`` and ``channels``; compression matters in its own mode alone.

    Raises
    ------
    ValueError
        If the last layer was replaced by one without ``out_features``.

    Examples
    --------
    >>> encoder = build_encoder("resnet34", blocks=(1, 1, 1, 1), pooling_variance="unbiased")
    >>> settings = settings_of(encoder)
    >>> settings["pooling_variance"], settings["widths"]
    ('unbiased', (32, 64, 128, 256))
    """
    if not hasattr(encoder.fc, "out_features"):
        raise ValueError(
            f"fc of {encoder.architecture.name} is a {type(encoder.fc).__name__}, which "
            "build_encoder does not make. Plan the network as it is, by "
            "speechbrain_rev.planner.plan(module, example_batch)."
        )
    variances = {correction: name for name, correction in CORRECTIONS.items()}
    settings = {
        "widths": encoder.architecture.widths,
        "n_mels": encoder.n_mels,
        "embedding_dim": encoder.fc.out_features,
        "pooling_variance": variances[encoder.correction],
        "sync_batchnorm": any(
            norm.sync for norm in encoder.modules() if isinstance(norm, BatchNorm)
        ),
    }
    for chain in encoder.modules():
        if isinstance(chain, ReversibleChain):
            settings["streams"] = chain.format_name
            settings["verify"] = chain.monitor.verify
            settings["verify_every"] = chain.monitor.every
    return settings


def _stage(
    row: Architecture,
    index: int,
    channels: int,
    settings: Mapping[str, Any],
    sync: bool,
) -> Stage:
    """Build one stage of a row; ``channels`` are those of the stage before."""
    width, n_blocks = row.widths[index], row.blocks[index]
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
        return Stage(entry, ReversibleChain(couplings, **settings), downsamples)
    first = (channels, stride) if entry is None else (wide, 1)
    shapes = [first] + [(wide, 1)] * (n_blocks - 1)
    blocks = nn.ModuleList(ordinary(c, width, s, sync=sync) for c, s in shapes)
    return Stage(entry, blocks, downsamples)


def _expansion(row: Architecture) -> int:
    # The paper prints unexpanded widths; its final layer of 24000 inputs proves that
    # a bottleneck's are expanded four times.
    return 4 if row.block == "bottleneck" else 1


def _check_sizes(
    row: Architecture, n_mels: int, embedding_dim: int, pooling_variance: str
) -> None:
    for name, size in {
        "widths": row.widths,
        "blocks": row.blocks,
        "n_mels": (n_mels,),
        "embedding_dim": (embedding_dim,),
    }.items():
        if not all(isinstance(number, int) for number in size):
            raise ValueError(f"{name} takes whole numbers, but is {size}.")
    if len(row.widths) != 4 or len(row.blocks) != 4 or min(row.widths) < 1:
        raise ValueError(
            "widths and blocks take one number for each of the 4 stages, widths of at "
            f"least 1; given were widths={row.widths}, blocks={row.blocks}."
        )
    least = 0 if row.reversible else 1
    if min(row.blocks) < least or not any(row.blocks):
        raise ValueError(
            f"{row.name} has at least {least} block(s) in a stage and 1 in all, but "
            f"blocks is {row.blocks}."
        )
    step = row.width_step
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
