"""A self-test: the first steps of a training run, stored and as configured, bit by bit.

What a mode saves in memory must not change what is learned. The tests show that for tiny
networks and for this machine's kernels. A self-test shows it for one training run: its own
network, batch, precision and device, with the memory and the time that a step takes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from speechbrain_rev.devices import described
from speechbrain_rev.models.card import reserve_of
from speechbrain_rev.models.columns import Column, aligned
from speechbrain_rev.models.first_steps import (
    STEPS,
    FirstSteps,
    FreshTraining,
    Modes,
    StepsTaken,
)
from speechbrain_rev.models.step_records import first_difference, gradient_errors
from speechbrain_rev.models.training_step import TrainingStep
from speechbrain_rev.planner.network import all_stored
from speechbrain_rev.planner.room import has_room
from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.flags import flags_in_words
from speechbrain_rev.sizes import size_text

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

    def text(self) -> str:
        """Write table, notes and verdict."""

        def ratio(run: StepsTaken) -> str:
            return f"{run.measured_bytes / run.counted_bytes:.2f}"

        columns: list[Column[StepsTaken]] = [
            Column("", "blocks", lambda run: run.name),
            Column("", "batch", lambda run: str(run.batch)),
            Column("peak", "counted", lambda run: size_text(run.counted_bytes)),
            Column("peak", self.measured, lambda run: size_text(run.measured_bytes)),
            Column("peak", "ratio", ratio),
            Column("step", "s", lambda run: f"{run.seconds:.3g}"),
        ]
        table = aligned(columns, self.runs) if self.runs else []
        return "\n".join([*table, *self.notes, self.verdict])


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
    return _Comparison(FirstSteps(step, begin), budget_bytes).compared()


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch take deterministic kernels only, and raise where it has none."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Without it torch refuses matrix products on a GPU.
    name, found = "CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ[name] = found or ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        if found is None:
            del os.environ[name]


@dataclass(frozen=True)
class _Comparison:
    """Steps with all blocks stored beside steps as configured."""

    steps: FirstSteps
    budget_bytes: int | None

    @property
    def step(self) -> TrainingStep:
        return self.steps.step

    def compared(self) -> SelfTest:
        modes = self.step.encoder.block_modes()
        name = f"as configured: {_counts(modes)}"
        stored = self.stored()
        batch = self.step.batch if stored is None else stored.batch
        configured = self.steps.measured(name, modes, batch)
        whole = configured
        if configured is not None and batch < self.step.batch:
            whole = self.steps.measured(name, modes, self.step.batch)
        if whole is None or configured is None:
            agrees = False
            verdict = (
                f"Memory ran out as configured, at batch {self.step.batch}: lower "
                "batch_size, or give memory_budget."
            )
        elif stored is None:
            agrees = False
            verdict = (
                "Not compared: with all blocks stored not even one utterance fits. Lower "
                "chunk_samples, or take a device with more memory."
            )
        else:
            agrees, verdict = self.verdict(stored, configured, whole)
        runs = [run for run in (stored, configured, whole) if run is not None]
        measured = "allocated" if self.steps.on_gpu else "live"
        return SelfTest(
            list(dict.fromkeys(runs)), measured, self.notes(batch), verdict, agrees
        )

    def stored(self) -> StepsTaken | None:
        """Run with all blocks stored, at the largest batch that fits, or half of it."""
        modes, batch = all_stored(self.step.encoder), self.step.batch
        while batch:
            if self.may_fit(self.steps.counted_bytes(modes, batch)):
                found = self.steps.measured("all stored", modes, batch)
                if found is not None:
                    return found
            batch //= 2
        return None

    def may_fit(self, counted_bytes: int) -> bool:
        """Whether a step is worth a try: a GPU says itself that it has no memory left."""
        return self.in_budget(counted_bytes) and (
            self.steps.on_gpu or has_room(counted_bytes, self.step.device)
        )

    def in_budget(self, counted_bytes: int) -> bool:
        """Whether a budget, if there is one, has so many bytes beside its reserve."""
        if self.budget_bytes is None:
            return True
        reserved = reserve_of(self.budget_bytes) if self.steps.on_gpu else 0
        return counted_bytes + reserved <= self.budget_bytes

    def verdict(
        self, stored: StepsTaken, configured: StepsTaken, whole: StepsTaken
    ) -> tuple[bool, str]:
        """Say in a line whether all is as it should be, and what to do if not."""
        expected, found = stored.records, configured.records
        taken = [i for i, record in enumerate(expected) if i and record is not None]
        if len(taken) < STEPS:
            return False, (
                "Not compared: gradients are not finite with all blocks stored. Lower lr, "
                "or give --precision=bf16 or fp32."
            )
        reasons = self.inexact()
        difference = None if reasons else first_difference(expected, found)
        if reasons:
            agrees, words = _within(gradient_errors(expected, found), reasons)
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
        if agrees and self.steps.on_gpu and whole.measured_bytes > budget:
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
        if counts[Mode.COMPRESS]:
            reasons.append(f"{counts[Mode.COMPRESS]} blocks compress")
        if encoder.streams == "float" and counts[Mode.RECONSTRUCT]:
            reasons.append("streams: float")
        return reasons

    def remedy(self, stored: StepsTaken) -> str:
        """Try what could make bits equal, and say what does."""
        encoder = self.step.encoder
        modes, all_stores = encoder.block_modes(), all_stored(encoder)
        recomputed = {
            name: Mode.RECOMPUTE if mode is Mode.RECONSTRUCT else mode
            for name, mode in modes.items()
        }

        records = partial(self.steps.records, batch=stored.batch)
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
        """Say how the figures were made."""
        step, device = self.step, self.step.device
        where = f"{described(device)}, torch {torch.__version__}, {step.precision}"
        notes = [f"On {where}{f'; {flags_in_words()}' if self.steps.on_gpu else ''}."]
        if batch < step.batch:
            need = self.steps.counted_bytes(all_stored(step.encoder), step.batch)
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
        if self.steps.on_gpu:
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
