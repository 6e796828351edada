"""The checks that every figure of compressed activations stands on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from speechbrain_rev.compression import ActivationCompression, Compressed, Form, decode
from speechbrain_rev.compression.layers import Kind
from speechbrain_rev.lobes import SpeakerEncoder

from .harness import NotEqual
from .speech import Speech

FOLDER = "SPEECHBRAIN_REV_SPEECH"


def real_speech(n_mels: int, frames: int) -> Speech:
    """Read the speech of minivox, which nothing replaces here.

    Raises
    ------
    NotEqual
        If the environment names no folder with it.
    """
    folder = os.environ.get(FOLDER, "")
    if not folder or not Path(folder, "minivox", "train_list.txt").exists():
        raise NotEqual(
            f"{FOLDER} names no folder with minivox/train_list.txt (it is {folder!r}), "
            "and activations of synthetic voices say nothing about those of speech. Set "
            "it to a folder with minivox/ in VoxCeleb's layout."
        )
    return Speech(n_mels, frames)


class Audited(ActivationCompression):
    """Compression that decodes at once what it encodes, and compares.

    Attributes
    ----------
    tensors : int
        How many tensors were compared.
    largest : float
        The largest error, as a part of its tensor's bound.
    """

    tensors = 0
    largest = 0.0

    def note(self, layer: str, x: Tensor, compressed: Compressed) -> None:
        """Keep a record, and refuse an error above the bound or another sign."""
        super().note(layer, x, compressed)
        if compressed.form is Form.RAW:
            return
        self.largest = max(self.largest, checked_error(layer, x, compressed))
        self.tensors += 1


@contextlib.contextmanager
def audited(encoder: SpeakerEncoder) -> Iterator[Audited]:
    """Compare what an encoder compresses here, by the rules it has."""
    own = encoder.compression
    audit = encoder.compression = Audited(
        convolutions=own.rules[Kind.CONVOLUTION],
        normalisations=own.rules[Kind.NORMALISATION],
    )
    try:
        yield audit
    finally:
        encoder.compression = own


def checked_error(layer: str, x: Tensor, compressed: Compressed) -> float:
    """Compare a tensor with what was kept of it.

    Returns
    -------
    float
        The largest error, as a part of the bound.

    Raises
    ------
    NotEqual
        If it is above 1, or a zero or a sign is lost.
    """
    kept = decode(compressed)
    bound = float(compressed.error_bound)
    x = x.detach()
    largest = float((kept.double() - x.double()).abs().max()) / bound
    if not largest <= 1:
        raise NotEqual(f"An input of {layer} is off by {largest:.4f} of its bound.")
    if not torch.equal(kept.sign(), x.sign()):
        raise NotEqual(f"An input of {layer} has other zeros or signs when decoded.")
    return largest
