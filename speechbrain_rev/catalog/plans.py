"""Plans of encoders for a GPU: of one batch, and of a sweep over batches.

Section 3.4 of Jiang et al., "An efficient training framework for reversible neural
architectures", for the encoders of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from speechbrain_rev.architectures import Architecture
from speechbrain_rev.bars import kept_alive, progress_bar
from speechbrain_rev.catalog.steps import (
    CHUNKS,
    SMALL_CHUNKS,
    encoder_step,
    head_modules,
)
from speechbrain_rev.catalog.table import (
    ListedEncoder,
    Training,
    modes_by_stage,
    select,
    speed_for,
    training_days,
)
from speechbrain_rev.devices import Speed, timed_device
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.geometry import channels_at_the_peak
from speechbrain_rev.modes import Mode
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.planner import Infeasible, Plan, Profile, Sweep, sweep
from speechbrain_rev.planner.choice import choose
from speechbrain_rev.planner.memory import make_gradients
from speechbrain_rev.planner.plan import plan_within, shares
from speechbrain_rev.planner.profiling import Profiler, profiler_of
from speechbrain_rev.planner.refusals import refusal
from speechbrain_rev.planner.step import Channels
from speechbrain_rev.planner.timing import seconds_of
from speechbrain_rev.sizes import card_text

#: Key of the GPU's memory in ``about`` of a plan that was made for a GPU by its size.
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
    modes : mapping of str to str
        A mode for each block: the fastest that fit, or else the lightest.
    stages : list of str
        The same as "stage 3: blocks 0-2 reconstruct, 3-4 store", stage by stage.
    channels : tuple of int or None
        Channels that blocks work on at a time, at each level.
    chunk_bytes : int or None
        Bytes of such channels where a step holds most; None for all channels at once.
    predicted_bytes : int
        Peak of the encoder's step with these modes, as the profile predicts it.
    counted_bytes : int or None
        The same, if it was counted on the encoder itself.
    needed_bytes : int
        All that training needs of the GPU beside what is kept free.
    lacking_bytes : int
        By how much that is more than the GPU has beside its reserve; 0 if it fits.
    seconds, stored_seconds : float
        Predicted time of the encoder's step so, and all stored with all channels at once.
    utterances_per_second : float or None
        Predicted for a step and the optimizer's, as a sweep does; None if no plan fits.
    days : float or None
        How long :func:`training_days` takes so.
    largest_batch : int or None
        A batch that fits the GPU, and the largest at the default chunk: in the lightest
        mode, or planned if that is more. Plans with finer chunks may fit a larger one.
        None if none is known, for the encoder was not counted.
    about : mapping of str to str
        What was profiled, where and how.
    """

    model: ListedEncoder
    modes: Mapping[str, str]
    stages: list[str]
    channels: Channels
    chunk_bytes: int | None
    predicted_bytes: int
    counted_bytes: int | None
    needed_bytes: int
    lacking_bytes: int
    seconds: float
    stored_seconds: float
    utterances_per_second: float | None
    days: float | None
    largest_batch: int | None
    about: Mapping[str, str]

    @classmethod
    def of(
        cls,
        model: ListedEncoder,
        profile: Profile,
        channels: Channels,
        modes: Mapping[str, str],
        counted_bytes: int | None,
        stored_seconds: float,
    ) -> PlannedEncoder:
        """Work out what modes of an encoder's blocks need and take."""
        training, row = model.training, model.row
        predicted_bytes, seconds = profile.peak_bytes(modes), profile.seconds(modes)
        step_bytes = predicted_bytes if counted_bytes is None else counted_bytes
        lacking_bytes = max(0, step_bytes - training.step_budget_bytes(row))
        batches = [step.largest_batch for step in model.modes.values()]
        rate = None
        if not lacking_bytes:
            optimizer = optimizer_seconds(row, training, None, speed=model.speed)
            rate = training.batch / (seconds + optimizer)
            batches.append(training.batch)
        fixed_bytes = sum(training.fixed_bytes(row, training.batch).values())
        return cls(
            model=model,
            modes=modes,
            stages=modes_by_stage(modes),
            channels=channels,
            chunk_bytes=_chunk_bytes(row, channels),
            predicted_bytes=predicted_bytes,
            counted_bytes=counted_bytes,
            needed_bytes=step_bytes + fixed_bytes,
            lacking_bytes=lacking_bytes,
            seconds=seconds,
            stored_seconds=stored_seconds,
            utterances_per_second=rate,
            days=None if rate is None else training_days(rate),
            largest_batch=max((b for b in batches if b is not None), default=None),
            about=profile.about,
        )

    @property
    def step_bytes(self) -> int:
        """Peak of the encoder's step, counted if it was."""
        counted = self.counted_bytes
        return self.predicted_bytes if counted is None else counted

    def as_plan(self) -> Plan:
        """Give what a run takes as its ``plan_file``; the peak must be counted."""
        assert self.counted_bytes is not None
        training, row = self.model.training, self.model.row
        assert training.card_bytes is not None
        budget_bytes = training.step_budget_bytes(row)
        fixed = sum(training.fixed_bytes(row, training.batch).values())
        return Plan(
            modes=self.modes,
            channels=list(self.channels),
            budget_bytes=budget_bytes,
            predicted_bytes=self.predicted_bytes,
            measured_bytes=self.counted_bytes,
            seconds=self.seconds,
            about={
                **self.about,
                "device": f"a GPU of {card_text(training.card_bytes)}",
                PLANNED_CARD: str(training.card_bytes),
                **shares(training.card_bytes, fixed, budget_bytes),
            },
        )


def _chunk_bytes(row: Architecture, channels: Channels) -> int | None:
    """Give the bytes of a chunk that makes these channels; None for all at once."""
    if not any(channels):
        return None
    sizes = [size for size in (*CHUNKS, *SMALL_CHUNKS) if size is not None]
    channels_of = {
        size: channels_at_the_peak(size, row, row.geometry()) for size in sizes
    }
    return next((size for size in sizes if channels_of[size] == list(channels)), None)


def plan_encoders(
    training: Training, *, names: Sequence[str] = (), speed: Speed | None = None
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

    Returns
    -------
    list of PlannedEncoder
        By rising published error rate on Vox1-H.

    Raises
    ------
    ValueError
        If there is no such encoder.

    Examples
    --------
    >>> training = Training(11 * 2**30, batch=256, frames=200)
    >>> (planned,) = plan_encoders(training, names=["resnet34"])
    >>> planned.lacking_bytes, planned.seconds > planned.stored_seconds
    (0, True)
    """
    models = select(training, names=names, sort="vox1-h", speed=speed)
    # A single one has a bar of its own.
    bar = progress_bar(
        "planning", unit="encoder", total=len(models), off=len(models) == 1
    )
    planned = []
    with kept_alive(bar):
        for model in models:
            planned.append(_planned(model, counted=bool(names)))
            bar.update(1)
    return planned


def _planned(model: ListedEncoder, *, counted: bool) -> PlannedEncoder:
    step = encoder_step(model.row, model.training, speed=model.speed)
    budget_bytes = model.training.step_budget_bytes(model.row)
    whole = step.channels[0][0]
    with step.training():
        profiler = profiler_of(step)
        # Nothing is faster than to store all with all channels at once. Where that fits
        # there is nothing to choose, and one traced step shows it.
        stored = profiler.stored(whole)
        modes: Mapping[str, str] = stored.uniform(Mode.STORE)
        stored_seconds = stored.seconds(modes)
        profile, channels, counted_bytes = stored, whole, None
        fits = stored.peak_bytes(modes) <= budget_bytes
        if fits and counted:
            modes, counted_bytes = _counted(profiler, profile, channels, budget_bytes)
            fits = counted_bytes <= budget_bytes
        if not fits:
            chosen = choose(profiler, budget_bytes)
            assert chosen.channels is not None
            profile, channels, modes = chosen.profile, chosen.channels, chosen.modes
            if counted:
                modes, counted_bytes = _counted(
                    profiler, profile, channels, budget_bytes
                )
    return PlannedEncoder.of(
        model, profile, channels, modes, counted_bytes, stored_seconds
    )


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
    step = encoder_step(planned.model.row, training, speed=planned.model.speed)
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
    best_batch : int
        The batch of the most utterances a second.
    """

    row: Architecture
    training: Training
    device: str | None
    speed: Speed
    sweep: Sweep
    best_batch: int


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
        If memory ran out at every batch.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
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
            other_seconds=lambda: optimizer_seconds(row, training, device, speed=speed),
            before_batch=lambda batch: bar.update(sizes.index(batch) - bar.n),
        )
    return SweptEncoder(row, training, device, speed, plans, plans.best.batch)


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
    >>> from speechbrain_rev.architectures import architecture
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
