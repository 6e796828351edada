"""Plans of encoders for a GPU: of one batch, and of a sweep over batches.

Section 3.4 of Jiang et al., "An efficient training framework for reversible neural
architectures", for the encoders of the table.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from speechbrain_rev.architectures import (
    Architecture,
    architecture,
)
from speechbrain_rev.bars import kept_alive, lock_of_threads, progress_bar
from speechbrain_rev.catalog.steps import (
    CHUNKS,
    SMALL_CHUNKS,
    encoder_step,
    head_modules,
)
from speechbrain_rev.catalog.table import (
    BASELINE,
    TOTAL_BATCH,
    ListedEncoder,
    Training,
    check_batch,
    mode_counts,
    modes_by_stage,
    select,
    speed_for,
    training_days,
)
from speechbrain_rev.devices import (
    Speed,
    timed_device,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.geometry import channels_at_the_peak
from speechbrain_rev.modes import Mode
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.planner import Infeasible, Plan, Profile, Sweep, sweep
from speechbrain_rev.planner.choice import choose
from speechbrain_rev.planner.memory import make_gradients, unless_memory_runs_out
from speechbrain_rev.planner.plan import plan_within, shares
from speechbrain_rev.planner.profiling import Profiler, profiler_of
from speechbrain_rev.planner.refusals import refusal
from speechbrain_rev.planner.step import Channels
from speechbrain_rev.planner.timing import seconds_of
from speechbrain_rev.processes import ended_by_signal
from speechbrain_rev.sizes import card_text

#: What a plan that was made for a GPU by its size has beside its device.
PLANNED_CARD = "card_bytes"

# Steps of the optimizer that are timed, after one that is not.
_REPEATS = 3


@dataclass(frozen=True)
class PlannedEncoder:
    """One encoder and what its blocks keep on a GPU.

    Attributes
    ----------
    model : ListedEncoder
        The encoder, and the training that is asked about.
    profile : Profile
        What each of its blocks costs. Where it can store everything the profile knows no
        other mode.
    channels : tuple of int or None
        Channels that blocks work on at a time, at each level.
    modes : mapping of str to str
        A mode for each block: the fastest that fit, or else the lightest.
    counted_bytes : int or None
        Peak of the encoder's step with these modes, if that was counted on itself.
    stored_seconds : float
        Predicted time of its step, all stored and all channels at once.
    baseline_seconds : float
        The same of ``BASELINE``.
    speed : Speed
        Of the device that times were predicted for.
    """

    model: ListedEncoder
    profile: Profile
    channels: Channels
    modes: Mapping[str, str]
    counted_bytes: int | None
    stored_seconds: float
    baseline_seconds: float
    speed: Speed

    @property
    def predicted_bytes(self) -> int:
        """Peak of the encoder's step, as the profile predicts it."""
        return self.profile.peak_bytes(self.modes)

    @property
    def step_bytes(self) -> int:
        """The same, counted if it was."""
        counted = self.counted_bytes
        return self.predicted_bytes if counted is None else counted

    @property
    def needed_bytes(self) -> int:
        """All that training needs of the GPU beside what is kept free."""
        training = self.model.training
        fixed = training.fixed_bytes(self.model.row, training.batch)
        return sum(fixed.values()) + self.step_bytes

    @property
    def lacking_bytes(self) -> int:
        """By how much that is more than the GPU has beside its reserve; 0 if it fits."""
        return max(0, self.needed_bytes - self.model.training.available_bytes)

    def as_plan(self) -> Plan:
        """Give what a run takes as its ``plan_file``; the peak must be counted."""
        assert self.counted_bytes is not None
        training, row = self.model.training, self.model.row
        assert training.card_bytes is not None
        left = training.step_budget_bytes(row)
        fixed = sum(training.fixed_bytes(row, training.batch).values())
        return Plan(
            modes=self.modes,
            channels=list(self.channels),
            budget_bytes=left,
            predicted_bytes=self.predicted_bytes,
            measured_bytes=self.counted_bytes,
            seconds=self.seconds,
            about={
                **self.profile.about,
                "device": f"a GPU of {card_text(training.card_bytes)}",
                PLANNED_CARD: str(training.card_bytes),
                **shares(training.card_bytes, fixed, left),
            },
        )

    @property
    def mode_counts(self) -> dict[str, int]:
        """How many blocks have each mode."""
        return mode_counts(self.modes.values())

    @property
    def stages(self) -> list[str]:
        """What blocks do, as "stage 3: blocks 0-2 reconstruct, 3-4 store", stage by stage."""
        return modes_by_stage(self.modes)

    @property
    def chunk_bytes(self) -> int | None:
        """Bytes of such channels where a step holds most; None for all channels at once."""
        row, own = self.model.row, list(self.channels)
        if not any(own):
            return None
        sizes = [size for size in (*CHUNKS, *SMALL_CHUNKS) if size is not None]
        made = {size: channels_at_the_peak(size, row, row.geometry()) for size in sizes}
        return next((size for size in sizes if made[size] == own), None)

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.profile.seconds(self.modes)

    @property
    def times_stored(self) -> float:
        """The time as a multiple of that of the same encoder, all stored."""
        return self.seconds / self.stored_seconds

    @property
    def times_baseline(self) -> float:
        """The time as a multiple of that of ``BASELINE``, all stored."""
        return self.seconds / self.baseline_seconds

    @property
    def utterances_per_second(self) -> float | None:
        """Predicted for a step and the optimizer's, as a sweep does; None if none fits."""
        if self.lacking_bytes:
            return None
        training = self.model.training
        more = optimizer_seconds(self.model.row, training, None, speed=self.speed)
        return training.batch / (self.seconds + more)

    @property
    def days(self) -> float | None:
        """How long ``training_days`` takes so; None if no plan fits."""
        rate = self.utterances_per_second
        return None if rate is None else training_days(rate)

    @property
    def largest_batch(self) -> int | None:
        """A batch that fits the GPU, and the largest at the default chunk.

        In the lightest mode, or planned if that is more. Plans with finer chunks may fit
        a larger one. None if none is known, for the encoder was not counted.
        """
        known = [self.model.largest_batch(mode) for mode in self.model.modes]
        if not self.lacking_bytes:
            known.append(self.model.training.batch)
        return max((batch for batch in known if batch is not None), default=None)

    @property
    def cards(self) -> int | None:
        """Such GPUs that suffice for ``TOTAL_BATCH`` in all; None if no batch fits one."""
        return _cards(self.largest_batch)

    @property
    def cards_stored(self) -> int | None:
        """The same if all is stored, which is how the paper trains vanilla encoders."""
        return _cards(self.model.largest_batch(Mode.STORE.value))


def _cards(largest_batch: int | None) -> int | None:
    return math.ceil(TOTAL_BATCH / largest_batch) if largest_batch else None


def plan_encoders(
    training: Training,
    *,
    names: Sequence[str] = (),
    speed: Speed | None = None,
    workers: int = 1,
) -> list[PlannedEncoder]:
    """Plan encoders for a GPU.

    Parameters
    ----------
    training : Training
        The GPU, batch and length that are asked about.
    names : sequence of str
        Which encoders: the peaks of their plans are counted on them. None named means
        all, whose peaks are predicted.
    speed : Speed or None
        Of the GPU, which times are estimated from; None for that of the listed GPU whose
        memory is nearest.
    workers : int
        Processes that share the work; more than one from a script that may be imported
        again only, as ``multiprocessing`` says.

    Returns
    -------
    list of PlannedEncoder
        By rising published error rate on Vox1-H.

    Raises
    ------
    ValueError
        If there is no such encoder.
    MemoryError
        If one of several processes was ended from outside.

    Examples
    --------
    >>> training = Training(11 * 2**30, batch=256, frames=200)
    >>> (planned,) = plan_encoders(training, names=["resnet34"])
    >>> planned.lacking_bytes, planned.times_stored > 1, planned.cards
    (0, True, 1)
    """
    models = select(training, names=names, sort="vox1-h")
    plan_model = functools.partial(
        _planned, speed=speed_for(training, speed), counted=bool(names)
    )
    each = functools.partial(_each, plan_model)
    groups = _by_kind(models)
    planned: dict[str, PlannedEncoder] = {}
    # A single one has a bar of its own.
    bar = progress_bar(
        "planning", unit="encoder", total=len(models), off=len(models) == 1
    )

    def take(group: Sequence[PlannedEncoder]) -> None:
        planned.update({encoder.model.row.name: encoder for encoder in group})
        bar.update(len(group))

    with kept_alive(bar):
        if workers > 1:
            _share(each, groups, workers, take)
        else:
            for group in groups:
                take(each(group))
    return [planned[model.row.name] for model in models]


def _each(
    plan_model: Callable[[ListedEncoder], PlannedEncoder],
    models: Sequence[ListedEncoder],
) -> list[PlannedEncoder]:
    return [plan_model(model) for model in models]


def _share(
    each: Callable[[Sequence[ListedEncoder]], list[PlannedEncoder]],
    groups: Sequence[Sequence[ListedEncoder]],
    workers: int,
    take: Callable[[Sequence[PlannedEncoder]], None],
) -> None:
    """Plan groups in several processes, which end with this one; take each that is done."""
    others = multiprocessing.active_children()
    # Processes that were forked with torch's threads would hang.
    context = multiprocessing.get_context("spawn")
    with (
        ended_by_signal(),
        ProcessPoolExecutor(workers, context, initializer=lock_of_threads) as pool,
    ):
        try:
            with _ctrl_c_held():
                given = [pool.submit(each, group) for group in groups]
            for done in as_completed(given):
                take(done.result())
        except BrokenProcessPool as error:
            raise MemoryError(
                f"One of {workers} processes that plan was ended, most likely since memory "
                "ran out. Name the encoders, which takes one process."
            ) from error
        except BaseException:
            # Else what they have begun would be waited for.
            for process in set(multiprocessing.active_children()) - set(others):
                process.terminate()
            raise


@contextlib.contextmanager
def _ctrl_c_held() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach; for this one it comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _by_kind(models: Sequence[ListedEncoder]) -> list[list[ListedEncoder]]:
    """Group encoders that share a profile, so that one process makes it."""
    groups: dict[object, list[ListedEncoder]] = {}
    for model in models:
        groups.setdefault(model.row.kind, []).append(model)
    return list(groups.values())


def _planned(model: ListedEncoder, *, speed: Speed, counted: bool) -> PlannedEncoder:
    row, training = model.row, model.training
    step = encoder_step(row, training, speed=speed)
    left = training.step_budget_bytes(row)
    whole = step.channels[0][0]
    with step.training():
        profiler = profiler_of(step)
        # Nothing is faster than to store all with all channels at once. Where that fits
        # there is nothing to choose, and one traced step shows it.
        stored = profiler.stored(whole)
        modes: Mapping[str, str] = stored.uniform(Mode.STORE)
        stored_seconds = stored.seconds(modes)
        profile, channels, counted_bytes = stored, whole, None
        fits = stored.peak_bytes(modes) <= left
        if fits and counted:
            modes, counted_bytes = _counted(profiler, profile, channels, left)
            fits = counted_bytes <= left
        if not fits:
            chosen = choose(profiler, left)
            assert chosen.channels is not None
            profile, channels, modes = chosen.profile, chosen.channels, chosen.modes
            if counted:
                modes, counted_bytes = _counted(profiler, profile, channels, left)
    baseline = _baseline(training.batch, training.frames)
    return PlannedEncoder(
        model,
        profile,
        channels,
        modes,
        counted_bytes,
        stored_seconds,
        baseline.with_speed(speed).seconds(baseline.uniform(Mode.STORE)),
        speed,
    )


@functools.cache
def _baseline(batch: int, frames: int) -> Profile:
    """Profile a step of ``BASELINE``, all stored."""
    step = encoder_step(architecture(BASELINE), Training(None, batch, frames))
    with step.training():
        return Profiler(step).stored()


def _counted(
    profiler: Profiler,
    profile: Profile,
    channels: Channels,
    left_bytes: int,
) -> tuple[Mapping[str, str], int]:
    """Count the whole encoder with its plan, or with the lightest one if none fits."""
    with profiler.bare(channels) as trial:
        try:
            plan = plan_within(profile, trial, left_bytes)
        except Infeasible as error:
            return profile.lightest(), error.needed_bytes
    return plan.modes, plan.measured_bytes


def check_fits(planned: PlannedEncoder) -> None:
    """Refuse an encoder that does not fit.

    Parameters
    ----------
    planned : PlannedEncoder
        The encoder on a GPU.

    Raises
    ------
    Infeasible
        If it does not fit; the message names by how much, and what to change.

    Examples
    --------
    >>> training = Training(2**31, batch=256, frames=200)
    >>> check_fits(*plan_encoders(training, names=["resnet34"]))
    Traceback (most recent call last):
    ...
    speechbrain_rev.planner.knapsack.Infeasible: Even the lightest plan peaks at ...
    """
    if not planned.lacking_bytes:
        return
    training = planned.model.training
    assert training.card_bytes is not None
    step = encoder_step(planned.model.row, training, speed=planned.speed)
    with step.training():
        raise refusal(Profiler(step), training.card_bytes, planned.step_bytes)


@dataclass(frozen=True)
class SweptEncoder:
    """An encoder and its plans for batches of several sizes.

    Attributes
    ----------
    row : Architecture
        The encoder.
    training : Training
        What was asked; its batch is ignored.
    device : str or None
        Where it was timed; None if times are estimated.
    speed : Speed
        Of the device that they are estimated for, if they are.
    sweep : Sweep
        Its peaks are all that training needs beside the GPU's reserve: the encoder's
        step, weights, gradients, optimizer states, classifier and input.
    """

    row: Architecture
    training: Training
    device: str | None
    speed: Speed
    sweep: Sweep


def parse_batches(text: str) -> range:
    """Read the batches of a sweep.

    Parameters
    ----------
    text : str
        FIRST:LAST or FIRST:LAST:STEP, as 16:256:16; the step is 1 if it is left out.

    Returns
    -------
    range
        From the first on, in steps, to none above the last.

    Raises
    ------
    ValueError
        If it is written otherwise, the last is below the first, or a batch is not from
        1 to a million.

    Examples
    --------
    >>> list(parse_batches("16:64:16")), len(parse_batches("16:64"))
    ([16, 32, 48, 64], 49)
    """
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})(?::(\d{1,9}))?", text, re.ASCII)
    first, last, step = (int(n or 1) for n in match.groups()) if match else (1, 0, 1)
    if last < first or not step:
        raise ValueError(
            "--batches takes the first, the last and the step between, as 16:256:16 or "
            f"1:32, not {text}."
        )
    for batch in (first, last):
        check_batch(batch)
    return range(first, last + 1, step)


def sweep_encoder(
    row: Architecture,
    training: Training,
    batches: Iterable[int],
    *,
    device: str | None = None,
    speed: Speed | None = None,
) -> SweptEncoder:
    """Plan an encoder for each batch size and see which trains the most utterances.

    Parameters
    ----------
    row : Architecture
        The encoder.
    training : Training
        GPU, length of utterances and bits of optimizer states.
    batches : iterable of int
        Sizes to be tried, from the smallest until no plan makes one fit.
    device : str or None
        Where steps of a shallow encoder and of the optimizer are timed: cpu, cuda or
        cuda:N. Of a batch that does not fit there fewer utterances are timed, and their
        times scaled. None estimates times from counts.
    speed : Speed or None
        Of the device that they are estimated for, as in :func:`plan_encoders`; where one
        times, it is ignored.

    Returns
    -------
    SweptEncoder
        Its plans were not run.

    Raises
    ------
    ValueError
        If there is no such device, or no batch.
    Infeasible
        If no plan makes the smallest batch fit; the message names what to change.
    MemoryError
        If memory ran out at every batch, or for the optimizer.

    Examples
    --------
    >>> training = Training(4 * 2**30, batch=1, frames=200)
    >>> swept = sweep_encoder(architecture("resnet34"), training, [16, 48])
    >>> [set(plan.modes.values()) for plan in swept.sweep.plans][0]
    {'store'}
    """
    assert training.card_bytes is not None
    speed = speed_for(training, speed)
    where = None if device is None else timed_device(device)
    sizes = sorted(set(batches))
    step = encoder_step(row, training, speed=speed, device=where)
    bar: tqdm[Any]
    with progress_bar("sweeping", unit="batch", total=len(sizes)) as bar:
        plans = sweep(
            step,
            sizes,
            training.card_bytes,
            other_seconds=lambda: _optimizer_seconds(row, training, device, speed),
            before_batch=lambda batch: bar.update(sizes.index(batch) - bar.n),
        )
    return SweptEncoder(row, training, device, speed, plans)


def optimizer_seconds(
    row: Architecture,
    training: Training,
    device: str | None,
    *,
    speed: Speed | None = None,
) -> float:
    """Give what the optimizer takes for a step, whatever the batch.

    Parameters
    ----------
    row : Architecture
        The encoder; its family has the optimizer.
    training : Training
        Bits of the states.
    device : str or None
        Where steps of the family's optimizer are timed. None estimates from the bytes
        of weights, gradients and states that are read and written.
    speed : Speed or None
        Of the device that is estimated for, as in :func:`plan_encoders`.

    Returns
    -------
    float
        Seconds for the weights of encoder and classifier.

    Examples
    --------
    >>> training = Training(None, batch=1, frames=200)
    >>> round(1e3 * optimizer_seconds(architecture("resnet34"), training, None), 2)
    0.4
    """
    if device is None:
        moved = training.optimizer_moved_bytes(row)
        return moved / speed_for(training, speed).bytes_per_second
    with torch.device(device):
        encoder = build_encoder(row.name, widths=row.widths, blocks=row.blocks)
        classifier, _ = head_modules(training.head)
    trained = nn.ModuleList([encoder, classifier])
    make_gradients(trained)
    optimizer = build_optimizer(
        trained.parameters(),
        name=row.optimizer_name,
        bits=training.optimizer_bits,
        lr=0.1,
    )
    return seconds_of(optimizer.step, torch.device(device), repeats=_REPEATS)


def _optimizer_seconds(
    row: Architecture, training: Training, device: str | None, speed: Speed
) -> float:
    """Give what the optimizer takes, or refuse where there is no memory for it at any batch."""
    seconds = unless_memory_runs_out(
        lambda: optimizer_seconds(row, training, device, speed=speed)
    )
    if seconds is None:
        raise MemoryError(
            f"Memory ran out on {device} while the step of {row.optimizer_name} was timed "
            f"on the weights of {row.name}, which every batch has. End what else uses it, "
            "or leave out --device, which estimates times."
        )
    return seconds
