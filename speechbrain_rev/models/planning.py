"""What each encoder keeps on a card, so that it trains as fast as the memory allows.

No GPU is needed, nor is every encoder run: of each kind a shallow one is profiled on meta
tensors, which tells what any plan of the deeper ones takes. Times follow from counts of
operations.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from speechbrain_rev.architectures import architecture
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.models.advice import remedies
from speechbrain_rev.models.card import PLANNED_CARD, Training
from speechbrain_rev.models.counting import training_step
from speechbrain_rev.models.profiling import (
    Channels,
    encoder_profile,
    fastest_channels,
)
from speechbrain_rev.models.published import TOTAL_BATCH
from speechbrain_rev.models.sweeping import optimizer_seconds
from speechbrain_rev.models.table import Model, select
from speechbrain_rev.planner import Infeasible, Plan, Profile
from speechbrain_rev.planner.timing import ASSUMED, Speed
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.planner.within import plan_within
from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.modes import LOSSLESS
from speechbrain_rev.sizes import GIB, card_text, size_text

#: The encoder whose time, all stored, that of the others is compared with.
BASELINE = "resnet34"


@dataclass(frozen=True)
class PlannedEncoder:
    """One encoder and what its blocks keep on a card.

    Attributes
    ----------
    model : Model
        The encoder, and the training that is asked about.
    profile : Profile
        What each of its blocks costs.
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

    model: Model
    profile: Profile
    channels: Channels
    modes: Mapping[str, str]
    counted_bytes: int | None
    stored_seconds: float
    baseline_seconds: float
    speed: Speed

    @property
    def predicted_bytes(self) -> int:
        """Peak of the encoder's step, as the profile says."""
        return self.profile.peak_bytes(self.modes)

    @property
    def step_bytes(self) -> int:
        """The same, counted if it was."""
        counted = self.counted_bytes
        return self.predicted_bytes if counted is None else counted

    @property
    def needed_bytes(self) -> int:
        """All that training needs of the card beside what is kept free."""
        training = self.model.training
        budget_bytes = training.step_budget_bytes(self.model.row)
        return training.available_bytes - budget_bytes + self.step_bytes

    @property
    def lacking_bytes(self) -> int:
        """By how much it does not fit; 0 if it does."""
        return max(0, self.needed_bytes - self.model.training.available_bytes)

    def as_plan(self) -> Plan:
        """Give what a training takes as its ``plan_file``; the peak must be counted."""
        assert self.counted_bytes is not None
        training = self.model.training
        assert training.card_bytes is not None
        card = f"a card of {training.card_bytes / GIB:.4g} GiB"
        return Plan(
            modes=self.modes,
            channels=list(self.channels),
            budget_bytes=training.step_budget_bytes(self.model.row),
            predicted_bytes=self.predicted_bytes,
            measured_bytes=self.counted_bytes,
            seconds=self.seconds,
            about={
                **self.profile.about,
                "device": card,
                PLANNED_CARD: str(training.card_bytes),
            },
        )

    @property
    def mode_counts(self) -> dict[str, int]:
        """How many blocks have each mode."""
        modes = list(self.modes.values())
        return {mode.value: modes.count(mode.value) for mode in LOSSLESS}

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
    def largest_batch(self) -> int:
        """A batch that fits the card, and the largest at the default chunk.

        In the lightest mode, or planned if that is more. Plans with finer chunks may fit
        a larger one.
        """
        planned = 0 if self.lacking_bytes else self.model.training.batch
        return max(
            planned, *(self.model.largest_batch(m) or 0 for m in self.model.modes)
        )

    @property
    def cards(self) -> int | None:
        """Such cards that suffice for ``TOTAL_BATCH`` in all; None if no batch fits one."""
        return _cards(self.largest_batch)

    @property
    def cards_stored(self) -> int | None:
        """The same if all is stored, which is how the paper trains vanilla encoders."""
        return _cards(self.model.largest_batch(Mode.STORE.value) or 0)


def plan_encoders(
    training: Training,
    *,
    names: Sequence[str] = (),
    speed: Speed = ASSUMED,
    workers: int = 1,
    progress: bool = False,
) -> list[PlannedEncoder]:
    """Plan encoders for a card.

    Parameters
    ----------
    training : Training
        The card, batch and length that are asked about.
    names : sequence of str
        Which encoders: the peaks of their plans are counted on them. None named means
        all, whose peaks are predicted.
    speed : Speed
        Of the card, which times are estimated from.
    workers : int
        Processes that share the work; more than one from a script that may be imported
        again only, as ``multiprocessing`` says.
    progress : bool
        Whether a bar on stderr tells how far it is.

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
    plan_model = functools.partial(_planned, speed=speed, counted=bool(names))
    with contextlib.ExitStack() as stack:
        apply: Callable[..., Iterable[list[PlannedEncoder]]] = map
        if workers > 1:
            # Processes that were forked with torch's threads would hang.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, context)
            apply = stack.enter_context(pool).map
        bar: tqdm[Any] = stack.enter_context(
            tqdm(
                total=len(models),
                desc="planning",
                unit="encoder",
                leave=False,
                disable=not progress,
            )
        )
        if workers == 1:
            plan_model = functools.partial(plan_model, tell=bar.set_postfix_str)
        planned: dict[str, PlannedEncoder] = {}
        try:
            for group in apply(functools.partial(_each, plan_model), _by_kind(models)):
                planned |= {encoder.model.row.name: encoder for encoder in group}
                bar.update(len(group))
        except BrokenProcessPool as error:
            raise MemoryError(
                f"One of {workers} processes that plan was ended, most likely since memory "
                "ran out. Name the encoders, which takes one process."
            ) from error
    return [planned[model.row.name] for model in models]


def _each(
    plan_model: Callable[[Model], PlannedEncoder], models: Sequence[Model]
) -> list[PlannedEncoder]:
    return [plan_model(model) for model in models]


def _by_kind(models: Sequence[Model]) -> list[list[Model]]:
    """Group encoders that share a profile, so that one process makes it."""
    groups: dict[object, list[Model]] = {}
    for model in models:
        row = model.row
        kind = row.family, row.type, row.block, row.widths
        groups.setdefault(kind, []).append(model)
    return list(groups.values())


def check_fits(planned: PlannedEncoder) -> None:
    """Refuse an encoder that does not fit.

    Parameters
    ----------
    planned : PlannedEncoder
        The encoder on a card.

    Raises
    ------
    Infeasible
        If it does not fit; the message says by how much, and what to change.

    Examples
    --------
    >>> training = Training(2**31, batch=256, frames=200)
    >>> check_fits(*plan_encoders(training, names=["resnet34"]))
    Traceback (most recent call last):
    ...
    speechbrain_rev.planner.problem.Infeasible: Even the lightest plan peaks at ...
    """
    if not planned.lacking_bytes:
        return
    training, row = planned.model.training, planned.model.row
    assert training.card_bytes is not None
    changes = "; ".join(remedies(training, row, planned.needed_bytes))
    raise Infeasible(
        planned.needed_bytes,
        training.available_bytes,
        f"{row.name} lacks {size_text(planned.lacking_bytes)} for {training.batch} "
        f"utterances of {training.frames} frames: of {card_text(training.card_bytes)} "
        f"{training.reserve_bytes / GIB:.2f} GiB stay free. What helps: {changes}.",
    )


def _cards(largest_batch: int) -> int | None:
    return math.ceil(TOTAL_BATCH / largest_batch) if largest_batch else None


def _untold(_: str) -> None:
    """Other processes have no bar."""


def _planned(
    model: Model,
    *,
    speed: Speed,
    counted: bool,
    tell: Callable[[str], None] = _untold,
) -> PlannedEncoder:
    row, training = model.row, model.training
    baseline = encoder_profile(
        architecture(BASELINE), training.batch, training.frames, speed=speed
    )

    def profile_for(channels: Channels) -> Profile:
        chunk = "all" if channels[0] is None else str(channels[0])
        tell(f"{row.name}, {chunk} channels at a time")
        return encoder_profile(
            row, training.batch, training.frames, channels=channels, speed=speed
        )

    network, step = training_step(
        row.name, batch=training.batch, frames=training.frames
    )
    channels, profile = fastest_channels(
        profile_for, network, training.step_budget_bytes(row)
    )
    network.set_channels(channels)
    modes = _predicted(model, profile)
    counted_bytes = None
    if counted:
        runs = itertools.count(1)

        def told_step() -> None:
            tell(f"{row.name}, plan {next(runs)} is counted")
            step()

        modes, counted_bytes = _counted(model, profile, modes, network, told_step)
    whole = profile_for((None,) * len(channels))
    return PlannedEncoder(
        model,
        profile,
        channels,
        modes,
        counted_bytes,
        stored_seconds=whole.seconds(whole.uniform(Mode.STORE)),
        baseline_seconds=baseline.seconds(baseline.uniform(Mode.STORE)),
        speed=speed,
    )


def _predicted(model: Model, profile: Profile) -> Mapping[str, str]:
    """Choose the fastest modes that fit, or the lightest, as the profile says."""
    try:
        return profile.fastest(model.training.step_budget_bytes(model.row))
    except Infeasible:
        return profile.lightest()


def _counted(
    model: Model,
    profile: Profile,
    modes: Mapping[str, str],
    network: SpeakerEncoder,
    step: Callable[[], None],
) -> tuple[Mapping[str, str], int]:
    """Choose modes that fit when the encoder itself runs with them, or keep those."""
    budget_bytes = model.training.step_budget_bytes(model.row)
    try:
        plan = plan_within(profile, network, step, budget_bytes)
    except Infeasible:
        network.set_mode(modes)
        return modes, trace_bytes(network, step).peak_bytes
    return plan.modes, plan.measured_bytes
