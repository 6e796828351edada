"""What an encoder takes at each of its levels: inputs, masks, channels at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speechbrain_rev.architectures import EncoderGeometry

#: Bytes of one map of a chunk, for an utterance of 200 frames, by default.
AUTO = 1_024_000
_FRAMES = 200


def check_input(
    name: str, geometry: EncoderGeometry, feats: Tensor, lengths: Tensor | None
) -> None:
    """Refuse what is no batch of filterbanks.

    Parameters
    ----------
    name : str
        The encoder's, for messages.
    geometry : EncoderGeometry
        The encoder's mel bands and strides.
    feats : torch.Tensor, [batch, time, n_mels]
        Filterbanks.
    lengths : torch.Tensor, [batch], or None
        Relative lengths. Those on a GPU are not looked at.

    Raises
    ------
    ValueError
        If it is no tensor of floats, shapes are others, or lengths are not relative.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> geometry = architecture("revnet57").geometry(n_mels=80)
    >>> check_input("revnet57", geometry, torch.zeros(2, 5, 80), None)
    Traceback (most recent call last):
    ...
    ValueError: revnet57 needs at least 9 frames, but got [2, 5, 80] as ...
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
    if lengths is not None and lengths.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"lengths are {lengths.dtype}, which cannot tell the frames of longer "
            "utterances apart: bfloat16 is off by one from 257 frames on, float16 from "
            "2,049 on. Compute and pass them in float32."
        )
    if lengths is not None and lengths.shape != feats.shape[:1]:
        raise ValueError(
            f"lengths must be relative, one for each utterance: [{feats.shape[0]}], "
            f"but got {list(lengths.shape)}."
        )
    # A look at lengths on a GPU would wait for it; there they become NaN instead.
    if lengths is not None and lengths.device.type == "cpu":
        wrong = lengths[~plausible(lengths)]
        if len(wrong):
            raise ValueError(
                "lengths must be relative, above 0 and at most 1 for the longest, "
                f"but one is {float(wrong[0])}. Divide numbers of frames by "
                f"feats.shape[1], {feats.shape[1]}."
            )


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
        valid = torch.full((x.shape[0], 1), float(frames), device=x.device)
    else:
        # Not waiting for the copy: the step must not wait for the device either.
        relative = lengths.to(x.device, non_blocking=True).float().unsqueeze(1)
        valid = (relative * frames).round().clamp_min(1)
        valid = valid.where(plausible(relative), torch.nan)
    time = x.shape[3]
    masks: list[Tensor] = [_mask(valid, time)]
    for step in geometry.level_steps:
        valid, time = (valid / step).ceil(), (time - 1) // step + 1
        masks.append(_mask(valid, time))
    # Whatever stands in the padding, NaN too, is as if it were not there.
    return x.where(masks[0] > 0, 0), [*masks]


def _mask(valid: Tensor, time: int) -> Tensor:
    positions = torch.arange(time, device=valid.device)
    return (positions < valid).float()[:, None, None, :]


def channels_by_level(
    chunk: int | str | None, geometry: EncoderGeometry
) -> list[int | None]:
    """Turn a working set into channels at each level of an encoder.

    Channels decide in which order numbers are added up, hence bits. They depend on the
    encoder alone: not on the batch, and not on the length of utterances.

    Parameters
    ----------
    chunk : int, "auto" or None
        Bytes of the float32 map of one chunk, for an utterance of 200 frames; None
        works on all channels at once.
    geometry : EncoderGeometry
        The encoder's.

    Returns
    -------
    list of int, or of None
        Channels at a time, at least 1, at each level.

    Raises
    ------
    ValueError
        If chunk is something else.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> channels_by_level(256_000, architecture("revnet57").geometry(n_mels=80))
    [4, 16, 64, 256]
    """
    if chunk is None:
        return [None] * geometry.levels
    size = AUTO if chunk == "auto" else chunk
    if type(size) is not int or size < 1:
        raise ValueError(
            f"chunk is {chunk!r}; it takes 'auto', a number of bytes, or null to work on "
            "all channels at once."
        )
    sizes = zip(geometry.frequencies, geometry.level_strides, strict=True)
    return [max(1, size // (4 * freq * -(-_FRAMES // step))) for freq, step in sizes]
