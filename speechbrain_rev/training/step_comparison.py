"""A self-test: the first steps of a training run, stored and as configured, bit by bit."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from speechbrain_rev.catalog.columns import Column, Table, page
from speechbrain_rev.devices import described
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.modes import Mode
from speechbrain_rev.optim import state_bytes
from speechbrain_rev.planner.compression_probe import without_optimizer
from speechbrain_rev.planner.memory import (
    fits_device,
    live_bytes_peak,
    storage_bytes,
    unless_memory_runs_out,
)
from speechbrain_rev.planner.network import all_stored, compare_next
from speechbrain_rev.planner.step import without_contents
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.reversible.flags import flags_in_words
from speechbrain_rev.sizes import reserve_of, size_text
from speechbrain_rev.training.recipe_step import TrainingStep

#: Tensors after a step, on the CPU, by what they are; None after a step that was skipped.
Record = dict[str, Tensor] | None

_GRADIENT = "gradient"


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor whose bits differ between two runs.

    Attributes
    ----------
    step : int
        From 1; 0 is before the first step.
    name : str
        The tensor.
    how_far : str
        In words.
    tensors, all_tensors : int
        How many tensors of the step differ, and how many there are.
    """

    step: int
    name: str
    how_far: str
    tensors: int
    all_tensors: int

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step else "before the first step"
        return (
            f"{when}, {self.name}: {self.how_far}; {self.tensors} of "
            f"{self.all_tensors} tensors of the step differ"
        )


def gradients_of(modules: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients that there are, for a record.

    Parameters
    ----------
    modules : nn.Module
        What is trained.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.
    """
    named = modules.named_parameters()
    return _copies(_GRADIENT, ((n, p.grad) for n, p in named if p.grad is not None))


def state_of(modules: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copy buffers, weights and optimizer state, for a record.

    Parameters
    ----------
    modules : nn.Module
        What is trained.
    optimizer : torch.optim.Optimizer
        Of its parameters.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.
    """
    state = optimizer.state
    parameters = dict(modules.named_parameters())
    return {
        **_copies("buffer", modules.named_buffers()),
        **_copies("weight", parameters.items()),
        **_copies(
            "optimizer state",
            (
                (f"{key} of {name}", value)
                for name, parameter in parameters.items()
                for key, value in state.get(parameter, {}).items()
                if isinstance(value, Tensor)
            ),
        ),
    }


def first_difference(
    expected: Sequence[Record], records: Sequence[Record]
) -> FirstDifference | None:
    """Compare bits, step by step and tensor by tensor.

    Parameters
    ----------
    expected, records : sequence of Record
        Of two runs.

    Returns
    -------
    FirstDifference or None
        None if there is none.

    Examples
    --------
    >>> zeros = {"gradient of w": torch.zeros(3)}
    >>> str(first_difference([{}, zeros], [{}, {"gradient of w": torch.tensor([0, 0.5, 0])}]))
    'step 1, gradient of w: 1 of 3 values, by up to 0.5; 1 of 1 tensors of the step differ'
    """
    for number in range(max(len(expected), len(records))):
        a, b = (
            runs[number] if number < len(runs) else None for runs in (expected, records)
        )
        if a is None and b is None:
            continue
        if a is None or b is None:
            which = "as configured" if b is None else "all stored"
            far = f"not finite {which}, where the step is skipped"
            return FirstDifference(number, _GRADIENT, far, 1, 1)
        names = list(dict.fromkeys([*a, *b]))
        unequal = [name for name in names if not _same_bits(a.get(name), b.get(name))]
        if unequal:
            name = unequal[0]
            far = _how_far(a.get(name), b.get(name))
            return FirstDifference(number, name, far, len(unequal), len(names))
    return None


def gradient_errors(
    expected: Sequence[Record], records: Sequence[Record]
) -> list[tuple[float, str]]:
    """Measure the error of each step's gradient.

    Parameters
    ----------
    expected, records : sequence of Record
        Of two runs.

    Returns
    -------
    list of tuple of float and str
        For each step that both took, the norm of the error of all gradients by the norm of
        what was expected, and the tensor that has most of it.

    Examples
    --------
    >>> one, other = ({"gradient of w": torch.tensor([x, 4.0])} for x in (3.0, 3.5))
    >>> gradient_errors([{}, one], [{}, other])
    [(0.1, 'gradient of w')]
    """
    errors = []
    for a, b in zip(expected[1:], records[1:], strict=False):
        if a is None or b is None:
            continue
        names = [name for name in a if name.startswith(_GRADIENT) and name in b]
        squares = {n: _square(b[n].double() - a[n].double()) for n in names}
        whole = sum(_square(a[n].double()) for n in names)
        error = (sum(squares.values()) / whole) ** 0.5 if whole else float("nan")
        errors.append((error, max(squares, key=lambda name: squares[name])))
    return errors


def _copies(kind: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    joint = "" if kind.endswith("state") else "of "
    return {f"{kind} {joint}{n}": x.detach().to("cpu", copy=True) for n, x in named}


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def _how_far(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None:
        return f"only {'as configured' if a is None else 'with all blocks stored'}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return (
            f"{list(a.shape)} {a.dtype} stored, {list(b.shape)} {b.dtype} as configured"
        )
    a, b = a.double(), b.double()
    far = (a - b).abs()
    unequal = int((far != 0).sum())
    if not unequal:
        return "equal but for the signs of zeros"
    return f"{unequal} of {a.numel()} values, by up to {float(far.max()):.2g}"


def _square(x: Tensor) -> float:
    return float(x.square().sum())


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


def _live_bytes(training: FreshTraining, batch: int, number: int) -> int:
    """Count what is alive in one more step, in which chains compare their streams."""
    modules = training.modules
    held = storage_bytes([*modules.parameters(), *modules.buffers()])
    compare_next(training.encoder)
    made = live_bytes_peak(lambda: training.take(number, batch, lambda: None))
    return held + state_bytes(training.optimizer) + made


# A gradient whose error is as large as itself is as good as none.
_UNRELATED = 1.0


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test.

    Attributes
    ----------
    runs : sequence of StepsTaken
        Rows of the table.
    measured : {"allocated", "live"}
        What ``measured_bytes`` of the runs are.
    notes : sequence of str
        How the figures were made.
    verdict : str
        One line.
    agrees : bool
        Whether the steps as configured are what they should be.
    """

    runs: Sequence[StepsTaken]
    measured: str
    notes: Sequence[str]
    verdict: str
    agrees: bool

    def text(self, width: int | None = None) -> str:
        """Write table, notes and verdict.

        Parameters
        ----------
        width : int or None
            Of the terminal, for the notes.

        Returns
        -------
        str
            Lines. The verdict is the last one, however long.
        """
        peak = "peak"
        columns: list[Column[StepsTaken]] = [
            Column("", "blocks", lambda run: run.name, is_words=True),
            Column("", "batch", lambda run: run.batch),
            Column(peak, "counted", lambda run: size_text(run.counted_bytes)),
            Column(peak, self.measured, lambda run: size_text(run.measured_bytes)),
            Column(
                peak, "ratio", lambda r: r.measured_bytes / r.counted_bytes, text=".2f"
            ),
            Column("step", "s", lambda run: run.seconds, text=".3g"),
        ]
        tables = [Table(columns, self.runs)] if self.runs else []
        return f"{page(tables, notes=self.notes, width=width)}\n{self.verdict}"


def self_test(
    step: TrainingStep,
    begin: Callable[[], FreshTraining],
    *,
    budget_bytes: int | None = None,
) -> SelfTest:
    """Take three steps with all blocks stored and three as configured, and compare.

    Parameters
    ----------
    step : TrainingStep
        As configured, made by ``without_weights``.
    begin : callable
        Makes the training run anew, each time with the same weights, random state and
        batches.
    budget_bytes : int or None
        What the training run may hold. If stored steps need more, or more than the device
        has, bits are compared at half the batch, or half of that, and so on.

    Returns
    -------
    SelfTest
        It agrees if all bits of gradients, buffers, weights and optimizer state are equal
        after each step. Modes that are not exact by design need not have equal bits. A
        peak allocated above the budget does not agree.
    """
    return _Comparison(step, begin, budget_bytes).compared()


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch take deterministic kernels only, and raise where it has none."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Without it torch refuses matrix products on a GPU.
    name = "CUBLAS_WORKSPACE_CONFIG"
    workspace = os.environ.get(name)
    os.environ[name] = workspace or ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        if workspace is None:
            del os.environ[name]


@dataclass(frozen=True)
class _Comparison:
    """Steps with all blocks stored beside steps as configured."""

    step: TrainingStep
    begin: Callable[[], FreshTraining]
    budget_bytes: int | None

    @property
    def on_gpu(self) -> bool:
        """Whether the device reports what was allocated, and what does not fit."""
        return self.step.device.type == "cuda"

    def counted_bytes(
        self, modes: Modes, batch: int, bits: Mapping[str, float] | None = None
    ) -> int:
        """Count the peak as plans do; ``bits`` is what a compressed value of a layer takes."""
        step = self.step.step().at(batch)
        with step.without_contents() as device, without_optimizer():
            trial = step.bare(device)
            trial.network.set_mode(modes)
            assert isinstance(trial.module, SpeakerEncoder)
            trial.module.compression.assumed_bits = dict(bits or {})
            peak = trace_bytes(trial.network, trial.run).peak_bytes
        return step.fixed_bytes(batch) + peak

    def measured(self, name: str, modes: Modes, batch: int) -> StepsTaken | None:
        """Take the steps and measure them; None if memory runs out."""
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
        """Take the steps and measure nothing."""
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

    def compared(self) -> SelfTest:
        modes, name = self.step.encoder.block_modes(), "as configured"
        stored = self.stored()
        batch = self.step.batch if stored is None else stored.batch
        whole = configured = self.measured(name, modes, batch)
        if configured is not None and batch < self.step.batch:
            whole = self.measured(name, modes, self.step.batch)
        agrees = False
        if whole is None or configured is None:
            verdict = (
                f"Memory ran out as configured, at batch {self.step.batch}: lower "
                "batch_size, or give memory_budget."
            )
        elif stored is None:
            verdict = (
                "Not compared: with all blocks stored not even one utterance fits. Lower "
                "chunk_samples, or take a device with more memory."
            )
        else:
            agrees, verdict = self.verdict(stored, configured, whole)
        runs = [run for run in (stored, configured, whole) if run is not None]
        measured = "allocated" if self.on_gpu else "live"
        return SelfTest(
            list(dict.fromkeys(runs)), measured, self.notes(batch), verdict, agrees
        )

    def stored(self) -> StepsTaken | None:
        """Run with all blocks stored, at the largest batch that fits, or half of it."""
        modes, batch = all_stored(self.step.encoder), self.step.batch
        while batch:
            if self.may_fit(self.counted_bytes(modes, batch)):
                stored = self.measured("all stored", modes, batch)
                if stored is not None:
                    return stored
            batch //= 2
        return None

    def may_fit(self, counted_bytes: int) -> bool:
        """Whether a step is worth a try: a GPU reports itself that it has no memory left."""
        return self.in_budget(counted_bytes) and (
            self.on_gpu or fits_device(counted_bytes, self.step.device)
        )

    def in_budget(self, counted_bytes: int) -> bool:
        """Whether a budget, if there is one, has so many bytes beside its reserve."""
        if self.budget_bytes is None:
            return True
        reserved = reserve_of(self.budget_bytes) if self.on_gpu else 0
        return counted_bytes + reserved <= self.budget_bytes

    def verdict(
        self, stored: StepsTaken, configured: StepsTaken, whole: StepsTaken
    ) -> tuple[bool, str]:
        """Judge in a line whether all is as it should be, and name what to do if not."""
        expected, records = stored.records, configured.records
        taken = [i for i, record in enumerate(expected) if i and record is not None]
        if len(taken) < STEPS:
            return False, (
                "Not compared: gradients are not finite with all blocks stored. Lower lr, "
                "or give --precision=bf16 or fp32."
            )
        reasons = self.inexact()
        difference = None if reasons else first_difference(expected, records)
        if reasons:
            agrees, words = _within(gradient_errors(expected, records), reasons)
        elif difference is not None:
            return False, f"Differs: {difference}. {self.remedy(stored)}"
        else:
            agrees, words = (
                True,
                (
                    f"Exact: {STEPS} steps as configured have the bits of stored ones, in "
                    f"{len(expected[taken[-1]] or {})} tensors each: gradients, buffers, "
                    "weights and optimizer state."
                ),
            )
        budget = self.budget_bytes or math.inf
        if agrees and self.on_gpu and whole.measured_bytes > budget:
            return False, (
                f"Above the budget: {size_text(whole.measured_bytes)} were allocated of a "
                f"memory_budget of {size_text(int(budget))}. Lower memory_budget by the "
                f"difference, which a plan then leaves free. {words}"
            )
        return agrees, words

    def inexact(self) -> list[str]:
        """Name the settings by which modes are not exact."""
        encoder = self.step.encoder
        counts = Counter(encoder.block_modes().values())
        reasons = []
        for mode, count in counts.items():
            if not mode.spec.lossless:
                reasons.append(f"{count} blocks {mode.value}")
        if encoder.streams == "float" and any(m.spec.needs_inverse for m in counts):
            reasons.append("streams: float")
        if self.on_gpu and set(counts) != {Mode.STORE}:
            if encoder.cudnn_benchmark:
                reasons.append("cudnn_benchmark: true")
            if not encoder.cudnn_deterministic:
                reasons.append("cudnn_deterministic: false")
        return reasons

    def remedy(self, stored: StepsTaken) -> str:
        """Try what could make bits equal, and name what does."""
        encoder = self.step.encoder
        modes, all_stores = encoder.block_modes(), all_stored(encoder)
        recomputed = {
            name: Mode.RECOMPUTE if mode.spec.needs_inverse else mode
            for name, mode in modes.items()
        }

        records = partial(self.records, batch=stored.batch)
        repeats = first_difference(stored.records, records(all_stores)) is None
        try:
            with deterministic_kernels():
                if first_difference(records(all_stores), records(modes)) is None:
                    return _DETERMINISTIC
        except RuntimeError as error:
            # torch raises where an operation has no such kernel.
            if "deterministic" not in str(error):
                raise
        if not repeats:
            return _NOT_REPEATED
        if modes != recomputed and not first_difference(
            stored.records, records(recomputed)
        ):
            return "Give --mode=recompute, which is exact here."
        return _NOT_TWICE

    def notes(self, batch: int) -> list[str]:
        """Describe how the figures were made."""
        step, device = self.step, self.step.device
        where = f"{described(device)}, torch {torch.__version__}, {step.precision}"
        notes = [
            f"On {where}{f'; {flags_in_words()}' if self.on_gpu else ''}.",
            f"As configured: {_counts(step.encoder.block_modes())}.",
        ]
        if batch < step.batch:
            need = self.counted_bytes(all_stored(step.encoder), step.batch)
            limit = "the device has"
            if not self.in_budget(need):
                limit = f"memory_budget gives ({size_text(self.budget_bytes or 0)})"
            notes.append(
                f"All stored, a batch of {step.batch} takes {size_text(need)}, more than "
                f"{limit}: bits are compared at batch {batch}, and the last row is the "
                "batch as configured."
            )
        notes.append(
            "counted: weights, gradients, optimizer state, the batch and what a step "
            "makes, as plans count them."
        )
        if self.on_gpu:
            notes.append("allocated: torch.cuda.max_memory_allocated of the steps.")
        else:
            notes.append(
                f"{device.type} reports no allocated peak. live: tensors alive at once in "
                "one more step, as each was made, features and augmentation included."
            )
        if set(step.encoder.block_modes().values()) == {Mode.STORE}:
            notes.append(
                "All blocks store as configured: the two runs compute the same."
            )
        notes.append(
            f"s: median of {STEPS} steps, the first of which may be slow; without reading."
        )
        return notes


_DETERMINISTIC = (
    "Deterministic kernels make them equal: set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the "
    "environment and, in a complete file of settings, __set_seed: "
    "!apply:speechbrain.utils.seed_everything [!ref <seed>, true, true]."
)
_NOT_REPEATED = (
    "Two runs with all blocks stored differ too: on this device an operation does not "
    "repeat its result, whatever the modes. Another version of torch or CUDA may."
)
_NOT_TWICE = (
    "Something in the blocks does not compute the same twice. Give --mode=store, which "
    "computes everything once."
)


def _within(
    errors: Sequence[tuple[float, str]], reasons: Sequence[str]
) -> tuple[bool, str]:
    """Judge modes that are not exact by the error of their gradients."""
    words = f"Not exact by design ({', '.join(reasons)})"
    if len(errors) < STEPS:
        lost = "a gradient is not finite"
    elif not errors[0][0] < _UNRELATED:
        lost = "the error of the gradient is as large as the gradient"
    else:
        (first, name), *later = errors
        then = " and ".join(f"{error:.2g}" for error, _ in later)
        return True, (
            f"{words}: relative error of the gradient {first:.2g} in step 1, most of it in "
            f"the {name}; {then} in later steps, whose weights differ too."
        )
    return False, (
        f"{words}, but {lost}. Give --mode=reconstruct or recompute, with --streams=exact."
    )


def _counts(modes: Modes) -> str:
    counts = Counter(mode.value for mode in modes.values())
    return ", ".join(f"{count} {mode}" for mode, count in counts.items())
