"""What to change where a training does not fit its card."""

from __future__ import annotations

import dataclasses
import math

from speechbrain_rev.architectures import ARCHITECTURES, Architecture
from speechbrain_rev.models.card import Training, card_for
from speechbrain_rev.models.counts import FRAMES
from speechbrain_rev.models.table import Model
from speechbrain_rev.sizes import GIB, size_text


def remedies(training: Training, row: Architecture, needed_bytes: int) -> list[str]:
    """Name the changes that help, each with how far to go.

    Options that are named are those of all commands that take a card.

    Parameters
    ----------
    training : Training
        What does not fit.
    row : Architecture
        The encoder.
    needed_bytes : int
        What its lightest plan needs beside what stays free.

    Returns
    -------
    list of str
        Batch, length, encoder, bits and card, as far as they help.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> training = Training(11 * GIB, batch=40, frames=600)
    >>> for remedy in remedies(training, architecture("resnet152"), 17 * GIB):
    ...     print(remedy)
    a batch of 22 (perhaps more: chunks were not searched)
    --frames=200
    another encoder, for instance revnet230
    a card of 19.6 GiB
    """
    found = [_batch(training, row), _frames(training, row)]
    found += [_encoder(training, row), _bits(training, row)]
    card_gib = card_for(needed_bytes) / GIB
    found.append(f"a card of {math.ceil(card_gib * 10) / 10:g} GiB")
    return [remedy for remedy in found if remedy is not None]


def _batch(training: Training, row: Architecture) -> str | None:
    batch = _largest_batch(training, row)
    return (
        f"a batch of {batch} (perhaps more: chunks were not searched)"
        if batch
        else None
    )


def _frames(training: Training, row: Architecture) -> str | None:
    """Find the longest of the lengths that are counted at which the batch fits."""
    for frames in sorted(FRAMES, reverse=True):
        shorter = dataclasses.replace(training, frames=frames)
        fits = _largest_batch(shorter, row) >= training.batch
        if frames < training.frames and fits:
            return f"--frames={frames}"
    return None


def _encoder(training: Training, row: Architecture) -> str | None:
    """Find the most accurate encoder that fits, if possible a counterpart."""
    fitting = [
        other
        for other in ARCHITECTURES.values()
        if _largest_batch(training, other) >= training.batch
    ]
    fitting.sort(key=lambda other: (other.counterpart != row.name, other.vox1_h_eer))
    return f"another encoder, for instance {fitting[0].name}" if fitting else None


def _bits(training: Training, row: Architecture) -> str | None:
    if training.optimizer_bits == 8:
        return None
    lighter = dataclasses.replace(training, optimizer_bits=8)
    states_bytes = [
        t.needed_bytes(row, row.default_mode, t.batch)["optimizer_states"]
        for t in (training, lighter)
    ]
    saved = states_bytes[0] - states_bytes[1]
    return f"--optimizer_bits=8, which saves {size_text(saved)}"


def _largest_batch(training: Training, row: Architecture) -> int:
    model = Model(row, training)
    return max(model.largest_batch(mode) or 0 for mode in model.modes)
