"""What an encoder takes at each of its levels: inputs, masks, channels at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speechbrain_rev.architectures import Architecture, EncoderGeometry
from speechbrain_rev.reversible.convolution import parts_for

#: Bytes of one map of a chunk, for an utterance of 200 frames, by default.
AUTO = 1_024_000
_FRAMES = 200


def check_input(
    name: str, geometry: EncoderGeometry, feats: Tensor, lengths: Any
) -> Tensor | None:
    """Refuse what is no batch of filterbanks.

    Parameters
    ----------
    name : str
        The encoder's, for messages.
    geometry : EncoderGeometry
        The encoder's mel bands and strides.
    feats : torch.Tensor, [batch, time, n_mels]
        Filterbanks.
    lengths : array-like, [batch], or None
        Relative lengths. Those on a GPU are not looked at.

    Returns
    -------
    torch.Tensor, [batch], or None
        The lengths.

    Raises
    ------
    ValueError
        If it is no tensor of floats, shapes are others, or lengths are not relative.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> geometry = architecture("revnet46").geometry(n_mels=80)
    >>> check_input("revnet46", geometry, torch.zeros(2, 5, 80), None)
    Traceback (most recent call last):
    ...
    ValueError: revnet46 needs at least 9 frames, but got [2, 5, 80] as ...
    """
    n_mels, min_frames = geometry.n_mels, geometry.min_frames
    expected = f"[batch, time, {n_mels}]"
    if not isinstance(feats, Tensor) or not feats.is_floating_point():
        kind = feats.dtype if hasattr(feats, "dtype") else type(feats).__name__
        raise ValueError(
            f"{name} takes filterbanks as a tensor of floats, but got {kind}. Pass "
            "torch.as_tensor(feats).float(), if that is what they mean."
        )
    if feats.dim() != 3 or feats.shape[2] != n_mels:
        raise ValueError(
            f"{name} takes filterbanks {expected}, but got "
            f"{list(feats.shape)}. Pass Fbank(n_mels={n_mels}) features, or "
            "build the encoder with the n_mels that you have."
        )
    if not len(feats):
        raise ValueError(
            f"{name} takes at least one utterance, but got "
            f"{list(feats.shape)} as {expected}."
        )
    if feats.shape[1] < min_frames:
        raise ValueError(
            f"{name} needs at least {min_frames} frames, but got "
            f"{list(feats.shape)} as {expected}. Pass longer utterances."
        )
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.float32)
    if lengths.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"lengths are {lengths.dtype}, which cannot distinguish the frames of "
            "longer utterances: bfloat16 is off by one from 257 frames on, float16 from "
            "2,049 on. Compute and pass them in float32."
        )
    if lengths.shape != feats.shape[:1]:
        raise ValueError(
            f"lengths must be relative, one for each utterance: [{feats.shape[0]}], "
            f"but got {list(lengths.shape)}."
        )
    # A look at lengths on a GPU would wait for it; there they become NaN instead.
    if lengths.device.type == "cpu":
        wrong = lengths[~plausible(lengths)]
        if len(wrong):
            raise ValueError(
                "lengths must be relative, above 0 and at most 1 for the longest, "
                f"but one is {float(wrong[0])}. Divide numbers of frames by "
                f"feats.shape[1], {feats.shape[1]}."
            )
    return lengths


def plausible(lengths: Tensor) -> Tensor:
    """Whether relative lengths are above 0 and at most 1."""
    # A quotient may be rounded up to slightly above 1.
    return (lengths > 0) & (lengths.float() < 1 + 1e-4)


def maps_and_masks(
    feats: Tensor, lengths: Tensor | None, geometry: EncoderGeometry
) -> tuple[Tensor, list[Tensor | None]]:
    """Make the stem's input of filterbanks, and masks of the frames that count.

    Parameters
    ----------
    feats : torch.Tensor, [batch, time, n_mels]
        Filterbanks.
    lengths : torch.Tensor, [batch], or None
        Relative lengths.
    geometry : EncoderGeometry
        The encoder's.

    Returns
    -------
    maps : torch.Tensor, [batch, 1, n_mels, padded time]
        Zero where masked.
    masks : list of torch.Tensor, [batch, 1, 1, time], or of None
        One for each level; all None if all frames count.

    Examples
    --------
    >>> geometry = EncoderGeometry(n_mels=8, strides=(1, 2), rearranges=True)
    >>> x, masks = maps_and_masks(torch.ones(1, 5, 8), None, geometry)
    >>> x.shape, masks[1].flatten().tolist()
    (torch.Size([1, 1, 8, 6]), [1.0, 1.0, 1.0])
    """
    frames = feats.shape[1]
    padding = geometry.padding(frames)
    x = F.pad(feats.transpose(1, 2).unsqueeze(1), (0, padding))
    if lengths is None and not padding:
        return x, [None] * geometry.levels
    if lengths is None:
        valid = torch.full(
            (x.shape[0], 1), float(frames), device=x.device, dtype=torch.float32
        )
    else:
        # Not waiting for the copy: the step must not wait for the device either.
        relative = lengths.to(x.device, non_blocking=True).float().unsqueeze(1)
        valid = (relative * frames).round().clamp_min(1)
        valid = valid.where(plausible(relative), torch.nan)
    time = x.shape[3]
    masks: list[Tensor] = [_mask(valid, time)]
    for _, step in geometry.level_steps:
        valid, time = (valid / step).ceil(), (time - 1) // step + 1
        masks.append(_mask(valid, time))
    # Whatever stands in the padding, NaN too, is as if it were not there.
    return x.where(masks[0] > 0, 0), [*masks]


def _mask(valid: Tensor, time: int) -> Tensor:
    positions = torch.arange(time, device=valid.device, dtype=torch.int64)
    return (positions < valid).float()[:, None, None, :]


def channels_by_level(
    chunk: int | str | None, row: Architecture, geometry: EncoderGeometry
) -> list[int | None]:
    """Turn a working set into channels at each level of an encoder.

    Channels decide in which order numbers are added up, hence bits. They depend on the
    encoder alone: not on the batch, and not on the length of utterances.

    Parameters
    ----------
    chunk : int, "auto" or None
        Bytes of the float32 map of one chunk, for an utterance of 200 frames, at every
        level; "auto" as :func:`channels_at_the_peak`; None works on all channels at once.
    row : Architecture
        The encoder's.
    geometry : EncoderGeometry
        The encoder's.

    Returns
    -------
    list of int, or of None
        Channels at a time, at least 1, at each level: of blocks, and with "auto" of stem
        and transitions after these (see :func:`unit_channels`).

    Raises
    ------
    ValueError
        If chunk is something else.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> row = architecture("revnet46")
    >>> channels_by_level(256_000, row, row.geometry(n_mels=80))
    [4, 16, 64, 256]
    """
    if chunk is None:
        return [None] * geometry.levels
    if chunk == "auto":
        return channels_at_the_peak(AUTO, row, geometry)
    if type(chunk) is not int or chunk < 1:
        raise ValueError(
            f"chunk is {chunk!r}; it takes 'auto', a number of bytes, or null to work on "
            "all channels at once."
        )
    return [max(1, chunk // size) for size in _map_bytes(geometry)]


def _map_bytes(geometry: EncoderGeometry) -> list[int]:
    """Give the bytes of one channel at each level, in float32 and of 200 frames."""
    sizes = zip(geometry.frequencies, geometry.level_strides, strict=True)
    return [4 * freq * -(-_FRAMES // step) for freq, step in sizes]


#: Maps of a half of the width that are alive where a block of a kind runs backwards, beside
#: four maps of what it works on. Counted, see the test of peaks; others have the most.
_STREAMS = defaultdict(lambda: 6, basic=5, bottleneck=5)
_WORKED_ON = 4


def channels_at_the_peak(
    size: int, row: Architecture, geometry: EncoderGeometry
) -> list[int | None]:
    """Work on few channels only where a training step holds most.

    Later levels have smaller maps, and beside them only what earlier ones left: as many
    channels are taken there as fit below the peak of the level that holds most. Pieces of
    a level are of one size.

    Parameters
    ----------
    size : int
        Bytes of the float32 map of one chunk, for an utterance of 200 frames, where a
        step holds most.
    row : Architecture
        The encoder's.
    geometry : EncoderGeometry
        The encoder's.

    Returns
    -------
    list of int, or of None
        For blocks at each level, then for stem and transitions.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> row = architecture("df_revnet377")
    >>> channels_at_the_peak(1_024_000, row, row.geometry(n_mels=80))
    [16, 64, None, None, 16, 64, 256, 1024]
    """
    maps = _map_bytes(geometry)
    held, stages = 0, []
    for width, (_, level) in zip(row.widths, geometry.stage_levels, strict=True):
        half = width * row.expansion // 2
        hidden = 4 * half if row.block == "df_bottleneck" else half
        beside = held + _STREAMS[row.block] * half * maps[level]
        stages.append((level, hidden, beside))
        held += 2 * half * maps[level]
    least = [max(1, size // one) for one in maps]
    peak = max(
        beside + _WORKED_ON * _even(hidden, least[level], row) * maps[level]
        for level, hidden, beside in stages
    )
    blocks: list[int | None] = [None] * len(maps)
    for level, hidden, beside in stages:
        fit = max(least[level], (peak - beside) // (_WORKED_ON * maps[level]))
        if fit < hidden:
            even = _even(hidden, fit, row)
            blocks[level] = min(even, blocks[level] or even)
    # Beside what ordinary blocks and wide transitions work on there are whole maps of
    # gradients.
    many = row.block == "bottleneck" or (row.family == "revnet" and row.type == "I")
    units = [max(1, size // (2 if many else 1) // one) for one in maps]
    return [*blocks, *units]


def _even(hidden: int, channels: int, row: Architecture) -> int:
    """Give the channels of each of the fewest pieces of one size."""
    pieces = -(-hidden // channels)
    if row.block == "bottleneck":
        pieces = parts_for(hidden, channels)
    return -(-hidden // pieces)


def unit_channels(
    channels: Sequence[int | None], geometry: EncoderGeometry
) -> list[int | None]:
    """Give the channels at a time of what stands between blocks, at each level.

    Parameters
    ----------
    channels : sequence of int or None
        Those of an encoder: of blocks at each level, then of stem and transitions, for
        which half of the former are taken if they are left out: beside what is worked on
        there are whole maps of gradients.
    geometry : EncoderGeometry
        The encoder's.

    Returns
    -------
    list of int, or of None

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> unit_channels([12, 32, None, None], architecture("revnet46").geometry(n_mels=80))
    [6, 16, None, None]
    """
    if len(channels) > geometry.levels:
        return list(channels[geometry.levels :])
    return [None if size is None else max(1, size // 2) for size in channels]
