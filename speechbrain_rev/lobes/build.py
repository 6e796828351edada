"""From a row of the table to an encoder's modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from speechbrain_rev.architectures import Architecture, architecture
from speechbrain_rev.lobes.blocks import ORDINARY_BLOCKS, RESIDUALS
from speechbrain_rev.lobes.chunks import channels_by_level
from speechbrain_rev.lobes.pooling import CORRECTIONS
from speechbrain_rev.lobes.stage import Stage
from speechbrain_rev.lobes.transitions import (
    SpaceToDepthTransition,
    Stem,
    StridedTransition,
)
from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.coupling import AdditiveCoupling
from speechbrain_rev.reversible.monitor import Verify


@dataclass(frozen=True)
class EncoderParts:
    """What an encoder is made of.

    Attributes
    ----------
    row : Architecture
        The encoder's row of the table, with the sizes that were asked for.
    channels : list of int or None
        Channels that stem and transitions work on at a time, at each level.
    stem : nn.Module
        What makes the first stage's input.
    stages : list of Stage
        The stages.
    fc : nn.Linear
        From pooled statistics to the embedding.
    correction : int
        0 to pool the population's variance, 1 for the unbiased estimate.
    """

    row: Architecture
    channels: list[int | None]
    stem: nn.Module
    stages: list[Stage]
    fc: nn.Linear
    correction: int


def parts_of(
    name: str,
    *,
    n_mels: int,
    embedding_dim: int,
    streams: str,
    verify: Verify | None,
    verify_every: int,
    chunk: int | str | None,
    sync_batchnorm: bool,
    pooling_variance: str,
    widths: Sequence[int] | None,
    blocks: Sequence[int] | None,
) -> EncoderParts:
    """Make the modules of an encoder, from torch's random state.

    Parameters
    ----------
    name, n_mels, embedding_dim, streams, verify, verify_every, chunk, sync_batchnorm, \
    pooling_variance, widths, blocks
        As ``SpeakerEncoder`` takes them.

    Returns
    -------
    EncoderParts
        What is registered in an encoder, and what it remembers.

    Raises
    ------
    ValueError
        If there is no such encoder, or a size does not fit its family.
    """
    row = architecture(name)
    row = dataclasses.replace(
        row,
        widths=row.widths if widths is None else _of_stages("widths", widths),
        blocks=row.blocks if blocks is None else _of_stages("blocks", blocks),
    )
    check_switch("sync_batchnorm", sync_batchnorm)
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
    correction = CORRECTIONS[pooling_variance]
    return EncoderParts(row, list(channels), stem, stages, fc, correction)


def check_switch(name: str, value: object) -> None:
    """Refuse what is no truth value: the text ``"false"`` would count as true."""
    if not isinstance(value, bool):
        raise ValueError(
            f"{name} is {value!r}, but takes True or False; in a YAML true or false, "
            "without quotes."
        )


def _of_stages(name: str, numbers: object) -> tuple[int, ...]:
    """Take one number for each stage; ``_check_sizes`` looks at the numbers."""
    if isinstance(numbers, Sequence) and not isinstance(numbers, str):
        return tuple(numbers)
    raise ValueError(
        f"{name} is {numbers!r}, but takes a list of 4 whole numbers, one for each "
        "stage, such as [8, 8, 16, 16], or null for the published ones."
    )


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
