"""From a row of the table to an encoder's modules, and how these begin."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from speechbrain_rev.architectures import Architecture, EncoderGeometry, architecture
from speechbrain_rev.heads import POOLINGS
from speechbrain_rev.lobes.blocks import ORDINARY_BLOCKS, RESIDUALS
from speechbrain_rev.lobes.geometry import channels_by_level
from speechbrain_rev.lobes.pooling import Pooling, build_pooling
from speechbrain_rev.lobes.stages import (
    SpaceToDepthTransition,
    Stage,
    Stem,
    StridedTransition,
)
from speechbrain_rev.reversible.chain import ReversibleChain
from speechbrain_rev.reversible.monitor import Verify
from speechbrain_rev.reversible.segment import AdditiveCoupling

_BLOCKS = (*RESIDUALS.values(), *ORDINARY_BLOCKS.values())


def zero_residuals(encoder: nn.Module) -> None:
    """Let each block of an encoder add nothing at first.

    The scale of an ordinary block's last normalisation is 0, as in Goyal et al.,
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


@dataclass(frozen=True)
class EncoderParts:
    """What an encoder is made of.

    Attributes
    ----------
    row : Architecture
        The encoder's row of the table, with the sizes that were asked for.
    geometry : EncoderGeometry
        Frequencies and frames at each level.
    channels : list of int or None
        Channels at a time, see ``geometry.channels_by_level``.
    stem : nn.Module
        What makes the first stage's input.
    stages : list of Stage
        The stages.
    pooling : Pooling
        From the last stage's maps to statistics.
    fc : nn.Linear
        From pooled statistics to the embedding.
    """

    row: Architecture
    geometry: EncoderGeometry
    channels: list[int | None]
    stem: nn.Module
    stages: list[Stage]
    pooling: Pooling
    fc: nn.Linear


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
    pooling: str,
    pooling_variance: str,
    widths: Sequence[int] | None,
    blocks: Sequence[int] | None,
) -> EncoderParts:
    """Make the modules of an encoder, from torch's random state.

    Parameters
    ----------
    name, n_mels, embedding_dim, streams, verify, verify_every, chunk, sync_batchnorm, \
    pooling, pooling_variance, widths, blocks
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
        widths=row.widths if widths is None else _of_stages(row, "widths", widths),
        blocks=row.blocks if blocks is None else _of_stages(row, "blocks", blocks),
    )
    geometry = row.geometry(n_mels)
    check_switch("sync_batchnorm", sync_batchnorm)
    _check_sizes(row, geometry, embedding_dim)
    if not row.reversible and chunk not in ("auto", None):
        raise ValueError(
            f"{name} has no reversible blocks and works on all channels at once: chunk "
            f"is {chunk!r}, but takes 'auto' or None here."
        )
    channels = channels_by_level(chunk if row.reversible else None, row, geometry)
    stem_convolutions = 2 if row.family == "df_revnet" and row.type == "I" else 1
    width = row.widths[0] * (row.expansion if row.type == "II" else 1)
    settings = {"streams": streams, "verify": verify, "verify_every": verify_every}
    stem = Stem(width, stem_convolutions, sync=sync_batchnorm)
    stages = []
    for i, (_, level) in enumerate(geometry.stage_levels):
        chain = settings | {"chunk": channels[level]}
        stages.append(_stage(row, i, width, chain, sync_batchnorm))
        width = row.widths[i] * row.expansion
    rows = width * geometry.frequencies[-1]
    pooled = build_pooling(pooling, rows, variance=pooling_variance)
    fc = nn.Linear(POOLINGS[pooling].statistics * rows, embedding_dim)
    return EncoderParts(row, geometry, channels, stem, stages, pooled, fc)


def check_switch(name: str, value: object) -> None:
    """Refuse what is no truth value: the text ``"false"`` would count as true."""
    if not isinstance(value, bool):
        raise ValueError(
            f"{name} is {value!r}, but takes True or False; in a YAML true or false, "
            "without quotes."
        )


def check_name(what: str, name: str, table: Collection[str]) -> None:
    """Refuse a name that a table lacks."""
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(table)}, but is {name!r}.")


def _of_stages(row: Architecture, name: str, numbers: object) -> tuple[int, ...]:
    """Take one number for each stage; ``_check_sizes`` looks at the numbers."""
    if isinstance(numbers, Sequence) and not isinstance(numbers, str):
        return tuple(numbers)
    raise ValueError(
        f"{name} is {numbers!r}, but takes a list of {len(row.strides)} whole numbers, "
        f"one for each stage, such as {list(getattr(row, name))}, or null for the "
        "published ones."
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
    stride = row.strides[index]
    is_entered = index > 0 or stride != 1
    wide = width * row.expansion
    ordinary = ORDINARY_BLOCKS[row.block]
    entry: nn.Module | None = None
    if row.family == "revnet" and row.type == "I":
        entry = ordinary(channels, width, stride, sync=sync)
    elif row.type == "II" and is_entered:
        assert isinstance(stride, int)
        entry = SpaceToDepthTransition(channels, wide, stride, sync=sync)
    elif row.family in ("df_resnet", "df_revnet") and is_entered:
        entry = StridedTransition(channels, wide, stride, sync=sync)
    if row.reversible:
        residual = RESIDUALS[row.block]
        couplings = [
            AdditiveCoupling(
                residual(wide // 2, sync=sync), residual(wide // 2, sync=sync)
            )
            for _ in range(n_blocks)
        ]
        return Stage(entry, ReversibleChain(couplings, **settings))
    first = (channels, stride) if entry is None else (wide, 1)
    shapes = [first] + [(wide, 1)] * (n_blocks - 1)
    blocks = nn.ModuleList(ordinary(c, width, s, sync=sync) for c, s in shapes)
    return Stage(entry, blocks)


def _check_sizes(
    row: Architecture,
    geometry: EncoderGeometry,
    embedding_dim: int,
) -> None:
    for name, size in {
        "widths": row.widths,
        "blocks": row.blocks,
        "n_mels": (geometry.n_mels,),
        "embedding_dim": (embedding_dim,),
    }.items():
        if not all(isinstance(number, int) for number in size):
            raise ValueError(f"{name} takes whole numbers, but is {size}.")
    stages = len(row.strides)
    if {len(row.widths), len(row.blocks)} != {stages} or min(row.widths) < 1:
        raise ValueError(
            f"widths and blocks take one number for each of the {stages} stages, widths of "
            f"at least 1; given were widths={row.widths}, blocks={row.blocks}."
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
    if not geometry.fits:
        needed = "a multiple of" if geometry.rearranges else "at least"
        raise ValueError(
            f"{row.name} divides the frequency axis by {geometry.frequency_downsampling}: "
            f"n_mels must be {needed} {geometry.frequency_downsampling}, but is "
            f"{geometry.n_mels}."
        )
    if embedding_dim < 1:
        raise ValueError(f"embedding_dim must be at least 1, but is {embedding_dim}.")
