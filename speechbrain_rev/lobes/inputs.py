"""What encoders take: filterbanks and relative lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from speechbrain_rev.lobes.masking import plausible

#: The pooled time axis has an eighth of the frames, and a deviation needs two.
MIN_FRAMES = 9


def check_input(name: str, n_mels: int, feats: Tensor, lengths: Tensor | None) -> None:
    """Refuse what is no batch of filterbanks.

    Parameters
    ----------
    name : str
        The encoder's, for messages.
    n_mels : int
        Mel bands that it was built for.
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
    >>> check_input("revnet57", 80, torch.zeros(2, 5, 80), None)
    Traceback (most recent call last):
    ...
    ValueError: revnet57 needs at least 9 frames, but got [2, 5, 80] as ...
    """
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
    if feats.shape[1] < MIN_FRAMES:
        raise ValueError(
            f"{name} needs at least {MIN_FRAMES} frames, but got "
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
