"""Where the memory of an encoder's training step goes, without a GPU.

Activations are read from the committed counts, or counted on meta tensors for lengths
that are not among them. All else is counted on the encoder, classifier and optimizer
themselves, built on the meta device in a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from speechbrain_rev.architectures import architecture
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.classifier import AAMSoftmax, CosineClassifier
from speechbrain_rev.memory import MemoryReport, live_bytes_peak
from speechbrain_rev.memory.report import make_gradients, storage_bytes
from speechbrain_rev.models.card import (
    CLASSES,
    EMBEDDING_DIM,
    INPUT_BYTES_PER_FRAME,
    check_batch,
)
from speechbrain_rev.models.counting import (
    activations_bytes,
    how_counted,
    training_step,
)
from speechbrain_rev.models.planning import PlannedEncoder
from speechbrain_rev.models.stages import StageMemory, stage_memory
from speechbrain_rev.models.table import MODES, check_names
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.planner.timing import Speed
from speechbrain_rev.planner.trace import trace_bytes

LARGEST_FRAMES = 100_000  # of an utterance: a thousand seconds

#: What the mode is called where each block has one of its own.
PLAN = "plan"

#: How its activations came about where the encoder itself did not run with it.
PREDICTED = "predicted for the plan"


@dataclass(frozen=True)
class EncoderBreakdown:
    """One training of an encoder, and what a step of it holds.

    Attributes
    ----------
    name : str
        The encoder.
    mode : str
        What its blocks keep: "store", "recompute", "reconstruct", or "plan".
    blocks : mapping of str to int
        How many blocks have each mode. In mode "reconstruct" those that cannot be
        reconstructed, stem and transitions, recompute.
    optimizer_name : str
        That of the encoder's family: "sgd" or "adamw".
    optimizer_bits : int
        Of the optimizer's states: 8 or 32.
    classes : int
        Of the classifier; 0 if there is none.
    how : str
        How activations came about: words to go on after "activations were".
    report : MemoryReport
        The parts. Activations are the peak of the encoder's forward and backward pass.
        Weights, gradients and optimizer states are those of encoder and classifier.
        Others are the batch, as waveforms and as filterbanks, and the peak of the
        classifier's and the loss's own step. The two steps do not peak at once, so that
        the total is an upper bound.
    stages : tuple of StageMemory
        The same by parts of the encoder, if that was asked for.
    speed : Speed or None
        Of the device for which a plan is the fastest, if blocks were planned.
    """

    name: str
    mode: str
    blocks: Mapping[str, int]
    optimizer_name: str
    optimizer_bits: int
    classes: int
    how: str
    report: MemoryReport
    stages: tuple[StageMemory, ...] = ()
    speed: Speed | None = None


def encoder_breakdown(
    name: str,
    *,
    mode: str | None = None,
    batch: int,
    frames: int,
    optimizer_bits: int = 8,
    classes: int = CLASSES,
    stages: bool = False,
) -> EncoderBreakdown:
    """Count what a training step of an encoder holds.

    Parameters
    ----------
    name : str
        One of ``speechbrain_rev.architectures.ARCHITECTURES``.
    mode : str or None
        What its blocks keep: "store", "recompute" or "reconstruct". None for the
        default: reconstruct if it is reversible, else store.
    batch : int
        Utterances.
    frames : int
        Of each; 200 are two seconds.
    optimizer_bits : {8, 32}
        Of the states of the optimizer that the encoder's family is trained with.
    classes : int
        Of the recipe's classifier, by default for VoxCeleb2 at three speeds; 0 to leave
        it out.
    stages : bool
        Whether to watch the step, and tell what each stage takes: for some seconds.

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
    mode = mode or architecture(name).default_mode
    check_names("mode", [mode], MODES)
    encoder, step = training_step(name, mode=mode, batch=batch, frames=frames)

    def counted() -> tuple[int, str]:
        size = activations_bytes(name, mode, batch, frames)
        return size, how_counted(batch, frames)

    return _breakdown(
        _Step(encoder, step, mode, batch, frames),
        counted,
        optimizer_bits=optimizer_bits,
        classes=classes,
        stages=stages,
    )


def planned_breakdown(
    planned: PlannedEncoder, *, stages: bool = False
) -> EncoderBreakdown:
    """Count what a training step of an encoder holds whose blocks were planned.

    Parameters
    ----------
    planned : PlannedEncoder
        An encoder on a card, and what its blocks keep there.
    stages : bool
        As :func:`encoder_breakdown` takes it.

    Returns
    -------
    EncoderBreakdown
        The parts, in float32.

    Examples
    --------
    >>> from speechbrain_rev.models import Training
    >>> from speechbrain_rev.models.planning import plan_encoders
    >>> training = Training(4 * 2**30, batch=64, frames=200)
    >>> case = planned_breakdown(*plan_encoders(training, names=["resnet34"]))
    >>> case.mode, sum(case.blocks.values()), case.how
    ('plan', 17, 'counted with the plan')
    """
    training = planned.model.training
    encoder, step = training_step(
        planned.model.row.name, batch=training.batch, frames=training.frames
    )
    encoder.set_channels(planned.channels)
    encoder.set_mode(planned.modes)

    def counted() -> tuple[int, str]:
        if planned.counted_bytes is None:
            return planned.predicted_bytes, PREDICTED
        return planned.counted_bytes, "counted with the plan"

    found = _breakdown(
        _Step(encoder, step, PLAN, training.batch, training.frames),
        counted,
        optimizer_bits=training.optimizer_bits,
        classes=CLASSES,
        stages=stages,
    )
    return replace(found, speed=planned.speed)


def before_and_after(
    name: str,
    *,
    mode: str | None = None,
    batch: int,
    frames: int,
    optimizer_bits: int = 8,
    stages: bool = False,
) -> list[EncoderBreakdown]:
    """Count a step as it is without this package, and as it is with it.

    Parameters
    ----------
    name, mode, batch, frames, optimizer_bits, stages
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
        name,
        mode=mode,
        batch=batch,
        frames=frames,
        optimizer_bits=optimizer_bits,
        stages=stages,
    )
    if (after.mode, optimizer_bits) == ("store", 32):
        return [after]
    return [_before(name, batch, frames, stages), after]


def before_and_planned(
    planned: PlannedEncoder, *, stages: bool = False
) -> list[EncoderBreakdown]:
    """Count a step as it is without this package, and as it is planned for a card.

    Parameters
    ----------
    planned : PlannedEncoder
        An encoder on a card, and what its blocks keep there.
    stages : bool
        As :func:`encoder_breakdown` takes it.

    Returns
    -------
    list of EncoderBreakdown
        Stored activations and states of 32 bit; then as planned.

    Examples
    --------
    >>> from speechbrain_rev.models import Training
    >>> from speechbrain_rev.models.planning import plan_encoders
    >>> training = Training(4 * 2**30, batch=64, frames=200)
    >>> planned = plan_encoders(training, names=["resnet34"])
    >>> [case.mode for case in before_and_planned(*planned)]
    ['store', 'plan']
    """
    training = planned.model.training
    name = planned.model.row.name
    before = _before(name, training.batch, training.frames, stages)
    return [before, planned_breakdown(planned, stages=stages)]


@dataclass(frozen=True)
class _Step:
    """A training step on meta tensors, and what is said of it."""

    encoder: SpeakerEncoder
    run: Callable[[], None]
    mode: str
    batch: int
    frames: int


def _before(name: str, batch: int, frames: int, stages: bool) -> EncoderBreakdown:
    return encoder_breakdown(
        name,
        mode="store",
        batch=batch,
        frames=frames,
        optimizer_bits=32,
        stages=stages,
    )


def _breakdown(
    step: _Step,
    counted: Callable[[], tuple[int, str]],
    *,
    optimizer_bits: int,
    classes: int,
    stages: bool,
) -> EncoderBreakdown:
    """Break a step down whose activations are counted unless stages are watched."""
    encoder, row = step.encoder, step.encoder.architecture
    with torch.device("meta"):
        classifier = CosineClassifier(EMBEDDING_DIM, classes) if classes else None
    model = nn.ModuleList([encoder, *([classifier] if classifier else [])])
    optimizer = build_optimizer(
        model.parameters(), name=row.optimizer_name, bits=optimizer_bits, lr=0.0
    )
    gradients = make_gradients(model)
    optimizer.step()
    if stages:
        trace = trace_bytes(encoder, step.run)
        activations, how = trace.peak_bytes, "counted just now"
        found = tuple(stage_memory(encoder, trace, optimizer, classifier))
    else:
        found = ()
        activations, how = counted()
    modes = [mode.value for mode in encoder.block_modes().values()]
    report = MemoryReport(
        activations_bytes=activations,
        optimizer_states_bytes=state_bytes(optimizer),
        weights_bytes=storage_bytes([*model.parameters(), *model.buffers()]),
        gradients_bytes=storage_bytes(gradients),
        others_bytes=step.batch * step.frames * INPUT_BYTES_PER_FRAME
        + _classifier_step_bytes(classes, step.batch),
        device="meta",
        input_shape=(step.batch, step.frames, encoder.n_mels),
        precision="float32",
    )
    return EncoderBreakdown(
        row.name,
        step.mode,
        {mode: modes.count(mode) for mode in MODES},
        row.optimizer_name,
        optimizer_bits,
        classes,
        how,
        report,
        found,
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
