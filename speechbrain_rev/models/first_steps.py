"""The first steps of a training run, taken anew in any modes, with their memory and time."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.memory import live_bytes_peak
from speechbrain_rev.memory.report import storage_bytes
from speechbrain_rev.memory.shapes import without_contents
from speechbrain_rev.models.step_records import Record, gradients_of, state_of
from speechbrain_rev.models.training_plan import staying_bytes
from speechbrain_rev.models.training_step import TrainingStep
from speechbrain_rev.optim import state_bytes
from speechbrain_rev.planner.network import compare_next
from speechbrain_rev.planner.probe import without_optimizer
from speechbrain_rev.planner.room import unless_memory_runs_out
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.reversible import Mode

#: Steps that are taken.
STEPS = 3

# Steps that a loss scaler may skip while it looks for its scale.
_SKIPPED = 16

Modes = Mapping[str, Mode]


@dataclass(frozen=True)
class FreshTraining:
    """A training run that has taken no step.

    Attributes
    ----------
    encoder : SpeakerEncoder
        Whose blocks get modes.
    modules : nn.Module
        All that is trained, the encoder included.
    optimizer : torch.optim.Optimizer
        Of their parameters.
    take : callable
        ``take(number, batch, seen)`` takes a step of the optimizer, with the first
        ``batch`` utterances of the batch of that number, from 0. It calls ``seen`` once,
        when gradients are complete and neither clipped nor applied.
    """

    encoder: SpeakerEncoder
    modules: nn.Module
    optimizer: torch.optim.Optimizer
    take: Callable[[int, int, Callable[[], None]], None]


@dataclass(frozen=True, eq=False)
class StepsTaken:
    """The steps of one choice of modes.

    Attributes
    ----------
    name : str
        In the table.
    batch : int
        Utterances of a step.
    records : sequence of Record
        Before the first step, then after each one.
    seconds : float
        Median of the steps.
    counted_bytes : int
        Peak, counted as plans count it: weights, gradients, optimizer state, the batch and
        what a step makes.
    measured_bytes : int
        Peak, allocated on a GPU, of live tensors elsewhere.
    """

    name: str
    batch: int
    records: Sequence[Record]
    seconds: float
    counted_bytes: int
    measured_bytes: int


def without_weights(step: TrainingStep) -> TrainingStep:
    """Keep of a step's modules the shapes, modes and channels alone.

    Parameters
    ----------
    step : TrainingStep
        Its modes are chosen, and its optimizer is not yet built.

    Returns
    -------
    TrainingStep
        It takes no memory.
    """
    meta = torch.device("meta")
    return dataclasses.replace(
        step,
        encoder=without_contents(step.encoder, meta),
        classifier=without_contents(step.classifier, meta),
    )


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of a training run, in whichever modes.

    Attributes
    ----------
    step : TrainingStep
        As configured, made by ``without_weights``.
    begin : callable
        Makes the training run anew, each time with the same weights, random state and
        batches.
    """

    step: TrainingStep
    begin: Callable[[], FreshTraining]

    @property
    def on_gpu(self) -> bool:
        """Whether the device reports what was allocated, and what does not fit."""
        return self.step.device.type == "cuda"

    def counted_bytes(
        self, modes: Modes, batch: int, bits: Mapping[str, float] | None = None
    ) -> int:
        """Count the peak of the training run as plans count it, on no device.

        Parameters
        ----------
        modes : mapping of str to Mode
            Of all blocks.
        batch : int
            Utterances.
        bits : mapping of str to float, optional
            By layer, what a compressed value takes.

        Returns
        -------
        int
            Bytes of weights, gradients, optimizer state, the batch and the step.
        """
        step = dataclasses.replace(self.step, batch=batch)
        with step.shapes() as device, without_optimizer():
            encoder = without_contents(step.encoder, device)
            encoder.set_mode(modes)
            encoder.compression.assumed_bits = dict(bits or {})
            run = step.run_without_contents(encoder, device)
            peak = trace_bytes(encoder, run).peak_bytes
        return staying_bytes(step) + peak

    def measured(self, name: str, modes: Modes, batch: int) -> StepsTaken | None:
        """Take the steps and measure them.

        Parameters
        ----------
        name : str
            In the table.
        modes : mapping of str to Mode
            Of all blocks.
        batch : int
            Utterances.

        Returns
        -------
        StepsTaken or None
            None if memory runs out.
        """
        return unless_memory_runs_out(lambda: self._measured(name, modes, batch))

    def _measured(self, name: str, modes: Modes, batch: int) -> StepsTaken:
        training = self._fresh(modes)
        device = self.step.device
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        records, seconds = self._taken(training, batch)
        if self.on_gpu:
            measured_bytes = torch.cuda.max_memory_allocated(device)
        else:
            measured_bytes = _live_bytes(training, batch, len(seconds))
        compressed = training.encoder.compression.records
        bits = {layer: record.bits for layer, record in compressed.items()}
        return StepsTaken(
            name,
            batch,
            records,
            statistics.median(seconds),
            self.counted_bytes(modes, batch, bits),
            measured_bytes,
        )

    def records(self, modes: Modes, batch: int) -> list[Record]:
        """Take the steps and measure nothing.

        Parameters
        ----------
        modes : mapping of str to Mode
            Of all blocks.
        batch : int
            Utterances.

        Returns
        -------
        list of Record
            Before the first step, then after each one.
        """
        return self._taken(self._fresh(modes), batch)[0]

    def _fresh(self, modes: Modes) -> FreshTraining:
        """Begin anew in some modes, once what is left of runs before is freed."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        training = self.begin()
        training.encoder.set_channels(self.step.encoder.channels)
        training.encoder.set_mode(modes)
        return training

    def _taken(
        self, training: FreshTraining, batch: int
    ) -> tuple[list[Record], list[float]]:
        """Take the steps; give their records and seconds, without what a record takes."""
        records: list[Record] = [state_of(training.modules, training.optimizer)]
        seconds: list[float] = []
        most = STEPS + (_SKIPPED if self.step.precision == "fp16" else 0)
        while sum(record is not None for record in records) <= STEPS:
            if len(seconds) == most:
                break
            gradients: dict[str, Tensor] = {}
            recording = 0.0

            def seen(gradients: dict[str, Tensor] = gradients) -> None:
                nonlocal recording
                begun = self._now()
                gradients.update(gradients_of(training.modules))
                recording = self._now() - begun

            begun = self._now()
            training.take(len(seconds), batch, seen)
            seconds.append(self._now() - begun - recording)
            assert gradients, "a step has shown no gradient"
            finite = all(bool(x.isfinite().all()) for x in gradients.values())
            records.append(
                gradients | state_of(training.modules, training.optimizer)
                if finite
                else None
            )
        return records, seconds

    def _now(self) -> float:
        """Read the clock once the device has done its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.step.device)
        return time.perf_counter()


def _live_bytes(training: FreshTraining, batch: int, number: int) -> int:
    """Count what is alive in one more step, in which chains compare their streams."""
    modules = training.modules
    held = storage_bytes([*modules.parameters(), *modules.buffers()])
    compare_next(training.encoder)
    made = live_bytes_peak(lambda: training.take(number, batch, lambda: None))
    return held + state_bytes(training.optimizer) + made
