"""Where the memory of an encoder's training step goes, without a GPU.

Activations are read from the committed counts, or counted on meta tensors for lengths
that are not among them. All else is counted on the encoder, classifier and optimizer
themselves, built on the meta device in a moment.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass

import torch
from torch import nn

from speechbrain_rev.architectures import architecture
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.memory import MemoryReport, live_bytes_peak
from speechbrain_rev.memory.report import make_gradients, storage_bytes
from speechbrain_rev.models.card import (
    CLASSES,
    EMBEDDING_DIM,
    INPUT_BYTES_PER_FRAME,
    check_batch,
)
from speechbrain_rev.models.counting import training_step_peak
from speechbrain_rev.models.counts import BATCHES, FRAMES, counted_peaks
from speechbrain_rev.optim import build_optimizer, state_bytes

LARGEST_FRAMES = 100_000  # of an utterance: a thousand seconds


@dataclass(frozen=True)
class EncoderBreakdown:
    """One training of an encoder, and what a step of it holds.

    Attributes
    ----------
    name : str
        The encoder.
    mode : str
        What its blocks keep: "store", "recompute" or "reconstruct".
    optimizer_name : str
        That of the encoder's family: "sgd" or "adamw".
    optimizer_bits : int
        Of the optimizer's states: 8 or 32.
    classes : int
        Of the classifier; 0 if there is none.
    report : MemoryReport
        The parts. Activations are the peak of the encoder's forward and backward pass.
        Weights, gradients and optimizer states are those of encoder and classifier.
        Others are the batch, as waveforms and as filterbanks, and the peak of the
        classifier's and the loss's own step. The two steps do not peak at once, so that
        the total is an upper bound.
    """

    name: str
    mode: str
    optimizer_name: str
    optimizer_bits: int
    classes: int
    report: MemoryReport


def encoder_breakdown(
    name: str,
    *,
    mode: str | None = None,
    batch: int,
    frames: int,
    optimizer_bits: int = 8,
    classes: int = CLASSES,
) -> EncoderBreakdown:
    """Count what a training step of an encoder holds.

    Parameters
    ----------
    name : str
        One of ``speechbrain_rev.architectures.ARCHITECTURES``.
    mode : str or None
        What its blocks keep; None for the default: reconstruct if it is reversible,
        else store.
    batch : int
        Utterances.
    frames : int
        Of each; 200 are two seconds.
    optimizer_bits : {8, 32}
        Of the states of the optimizer that the encoder's family is trained with.
    classes : int
        Of the recipe's classifier, by default for VoxCeleb2 at three speeds; 0 to leave
        it out.

    Returns
    -------
    EncoderBreakdown
        The parts, in float32.

    Raises
    ------
    ValueError
        If there is no such encoder or it has no such mode, or a number is out of range.

    Examples
    --------
    >>> stored = encoder_breakdown("revnet57", mode="store", batch=128, frames=200)
    >>> reconstructed = encoder_breakdown("revnet57", batch=128, frames=200)
    >>> reconstructed.mode, stored.report.share("activations") > 0.97
    ('reconstruct', True)
    >>> reconstructed.report.total_bytes < 0.25 * stored.report.total_bytes
    True
    """
    check_batch(batch)
    if not 1 <= frames <= LARGEST_FRAMES:
        raise ValueError(
            f"An utterance has from 1 to {LARGEST_FRAMES} frames of 10 ms, not {frames}."
        )
    row = architecture(name)
    with torch.device("meta"):
        encoder = build_encoder(name, mode=mode)
        model = nn.ModuleList([encoder])
        if classes:
            model.append(CosineClassifier(EMBEDDING_DIM, classes))
    mode = mode or row.default_mode
    optimizer = build_optimizer(
        model.parameters(), name=row.optimizer_name, bits=optimizer_bits, lr=0.0
    )
    gradients = make_gradients(model)
    optimizer.step()
    report = MemoryReport(
        activations_bytes=activations_bytes(name, mode, batch, frames),
        optimizer_states_bytes=state_bytes(optimizer),
        weights_bytes=storage_bytes([*model.parameters(), *model.buffers()]),
        gradients_bytes=storage_bytes(gradients),
        others_bytes=batch * frames * INPUT_BYTES_PER_FRAME
        + _classifier_step_bytes(classes, batch),
        device="meta",
        input_shape=(batch, frames, encoder.n_mels),
        precision="float32",
    )
    return EncoderBreakdown(
        name, mode, row.optimizer_name, optimizer_bits, classes, report
    )


def before_and_after(
    name: str,
    *,
    mode: str | None = None,
    batch: int,
    frames: int,
    optimizer_bits: int = 8,
) -> list[EncoderBreakdown]:
    """Count a step as it is without this package, and as it is with it.

    Parameters
    ----------
    name, mode, batch, frames, optimizer_bits
        As :func:`encoder_breakdown` takes them, for the step with this package.

    Returns
    -------
    list of EncoderBreakdown
        Stored activations and states of 32 bit; then as asked. One alone if that is
        the same.

    Raises
    ------
    ValueError
        As :func:`encoder_breakdown` does.

    Examples
    --------
    >>> pair = before_and_after("resnet34", batch=64, frames=200)
    >>> [(case.mode, case.optimizer_bits) for case in pair]
    [('store', 32), ('store', 8)]
    """
    after = encoder_breakdown(
        name, mode=mode, batch=batch, frames=frames, optimizer_bits=optimizer_bits
    )
    before = encoder_breakdown(
        name, mode="store", batch=batch, frames=frames, optimizer_bits=32
    )
    return [before] if before == after else [before, after]


@functools.cache
def activations_bytes(name: str, mode: str, batch: int, frames: int) -> int:
    """Bytes at the peak of an encoder's step, from the counts where they reach.

    Parameters
    ----------
    name, mode : str
        The encoder and what its blocks keep.
    batch, frames : int
        Utterances, and the length of each.

    Returns
    -------
    int
        Bytes; :func:`how_counted` says how they came about.

    Examples
    --------
    >>> activations_bytes("resnet34", "store", 64, 200)
    4036560136
    """
    if frames in FRAMES:
        return counted_peaks()[name, mode, frames](batch)
    return training_step_peak(name, mode=mode, batch=batch, frames=frames)


def how_counted(batch: int, frames: int) -> str:
    """Say how the activations of such a batch are counted.

    Parameters
    ----------
    batch, frames : int
        Utterances, and the length of each.

    Returns
    -------
    str
        Words to go on after "activations were".

    Examples
    --------
    >>> how_counted(64, 200), how_counted(64, 300)
    ('counted', 'counted just now')
    >>> how_counted(100, 200)
    'bounded from above by the line through their counts at batches of 64 and 128'
    """
    if frames not in FRAMES:
        return "counted just now"
    if batch in BATCHES:
        return "counted"
    right = min(bisect.bisect(BATCHES, batch), len(BATCHES) - 1)
    few, many = BATCHES[right - 1 : right + 1]
    return (
        f"bounded from above by the line through their counts at batches of {few} and "
        f"{many}"
    )


def _classifier_step_bytes(classes: int, batch: int) -> int:
    """Peak of what cosines, loss and their backward pass make."""
    if not classes:
        return 0
    with torch.device("meta"):
        classifier, loss = CosineClassifier(EMBEDDING_DIM, classes), AAMSoftmax()
        embeddings = torch.empty(batch, 1, EMBEDDING_DIM, requires_grad=True)
        targets = torch.zeros(batch, 1, dtype=torch.long)
    for tensor in (embeddings, classifier.weight):
        tensor.grad = torch.zeros_like(tensor)
    return live_bytes_peak(lambda: loss(classifier(embeddings), targets).backward())
