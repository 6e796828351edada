"""What each encoder keeps on a card, so that it trains as fast as the memory allows.

No GPU is needed, nor is every encoder run: of each kind a shallow one is profiled on meta
tensors, which tells what any plan of the deeper ones takes. Times follow from counts of
operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.models.advice import remedies
from speechbrain_rev.models.card import GIB, Training
from speechbrain_rev.models.counting import training_step
from speechbrain_rev.models.table import Model, select
from speechbrain_rev.planner import Infeasible, Plan, Profile
from speechbrain_rev.planner.knapsack import lightest, solve
from speechbrain_rev.planner.plan import described, plan_within
from speechbrain_rev.planner.profile import profile_bytes
from speechbrain_rev.planner.timing import estimated_seconds, measured_seconds
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.reversible import Mode

#: The encoder whose time, all stored, that of the others is compared with.
BASELINE = "resnet34"

#: The paper's example of a batch that several cards share.
TOTAL_BATCH = 256

#: Cards of 11 GiB for it, as published in Table VII.
PUBLISHED_CARDS = {
    "resnet101": 9,
    "resnet152": 12,
    "df_resnet179": 19,
    "df_resnet233": 22,
    "revnet137": 1,
    "revnet197": 1,
    "df_revnet281": 2,
    "df_revnet377": 2,
}

# Blocks of a stage that are run: the first one, and one that all further ones are like.
_SHALLOW = 2
# Steps of each mode that are timed, after one that is not.
_REPEATS = 3


@dataclass(frozen=True)
class PlannedEncoder:
    """One encoder and what its blocks keep on a card.

    Attributes
    ----------
    model : Model
        The encoder, and the training that is asked about.
    profile : Profile
        What each of its blocks costs.
    modes : mapping of str to str
        A mode for each block: the fastest that fit, or else the lightest.
    counted_bytes : int or None
        Peak of the encoder's step with these modes, if that was counted on itself.
    baseline_seconds : float
        Predicted time of a step of ``BASELINE``, all stored.
    """

    model: Model
    profile: Profile
    modes: Mapping[str, str]
    counted_bytes: int | None
    baseline_seconds: float

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
            budget_bytes=training.step_budget_bytes(self.model.row),
            predicted_bytes=self.predicted_bytes,
            measured_bytes=self.counted_bytes,
            seconds=self.seconds,
            about={**self.profile.about, "device": card},
        )

    @property
    def mode_counts(self) -> dict[str, int]:
        """How many blocks have each mode."""
        modes = list(self.modes.values())
        return {mode.value: modes.count(mode.value) for mode in Mode}

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.profile.seconds(self.modes)

    @property
    def times_stored(self) -> float:
        """The time as a multiple of that of the same encoder, all stored."""
        return self.seconds / self.profile.seconds(self.profile.uniform(Mode.STORE))

    @property
    def times_baseline(self) -> float:
        """The time as a multiple of that of ``BASELINE``, all stored."""
        return self.seconds / self.baseline_seconds

    @property
    def largest_batch(self) -> int:
        """Largest batch on the card: in the lightest mode, or planned if that is more."""
        planned = 0 if self.lacking_bytes else self.model.training.batch
        return max(
            planned, *(self.model.largest_batch(m) or 0 for m in self.model.modes)
        )

    @property
    def cards(self) -> int | None:
        """Such cards for a total batch of ``TOTAL_BATCH``; None if no batch fits one."""
        return _cards(self.largest_batch)

    @property
    def cards_stored(self) -> int | None:
        """The same if all is stored, which is how the paper trains vanilla encoders."""
        return _cards(self.model.largest_batch(Mode.STORE.value) or 0)


def plan_encoders(
    training: Training, *, names: Sequence[str] = (), progress: bool = False
) -> list[PlannedEncoder]:
    """Plan encoders for a card.

    Parameters
    ----------
    training : Training
        The card, batch and length that are asked about.
    names : sequence of str
        Which encoders: the peaks of their plans are counted on them. None named means
        all, whose peaks are predicted.
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

    Examples
    --------
    >>> training = Training(11 * 2**30, batch=256, frames=200)
    >>> (planned,) = plan_encoders(training, names=["resnet34"])
    >>> planned.lacking_bytes, planned.times_stored > 1, planned.cards
    (0, True, 1)
    """
    models = select(training, names=names, sort="vox1-h")
    baseline = encoder_profile(architecture(BASELINE), training.batch, training.frames)
    baseline_seconds = baseline.seconds(baseline.uniform(Mode.STORE))
    bar = tqdm(
        models, desc="planning", unit="encoder", leave=False, disable=not progress
    )
    return [_planned(model, baseline_seconds, counted=bool(names)) for model in bar]


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
        f"{row.name} lacks {planned.lacking_bytes / GIB:.3f} GiB for {training.batch} "
        f"utterances of {training.frames} frames: of {training.card_bytes / GIB:.4g} GiB "
        f"{training.reserve_bytes / GIB:.2f} stay free. What helps: {changes}.",
    )


def encoder_profile(
    row: Architecture, batch: int, frames: int, *, device: str | None = None
) -> Profile:
    """Tell what each block of an encoder costs, from a shallow one of its kind.

    Parameters
    ----------
    row : Architecture
        The encoder, of any widths and blocks.
    batch, frames : int
        Utterances of a step, and the length of each.
    device : str or None
        Where the shallow one is timed; None estimates times without running it.

    Returns
    -------
    Profile
        Its bytes are predicted, to less than a thousandth of a plan's peak; its times
        are estimated, or those of blocks that are like its own.

    Examples
    --------
    >>> profile = encoder_profile(architecture("resnet152"), batch=16, frames=200)
    >>> len(profile.blocks), profile.about["profiled"]
    (51, 'stages of at most 2 blocks')
    """
    like = next(
        other.name
        for other in ARCHITECTURES.values()
        if (other.family, other.type, other.block) == (row.family, row.type, row.block)
    )
    blocks = tuple(min(count, _SHALLOW) for count in row.blocks)
    shallow = _shallow_profile(like, row.widths, blocks, batch, frames, device)
    with torch.device("meta"):
        encoder = build_encoder(row.name, widths=row.widths, blocks=row.blocks)
    about = {
        "encoder": row.name,
        "blocks": str(len(encoder.named_blocks())),
        "batch": str(batch),
        "frames": str(frames),
        "precision": "fp32",
        "channels": str(encoder.channels),
        "profiled": f"stages of at most {_SHALLOW} blocks",
        "bytes": "counted on meta tensors",
        "seconds": shallow.about["seconds"],
        "torch": torch.__version__,
    }
    return replace(shallow.stretched(list(encoder.named_blocks())), about=about)


def _cards(largest_batch: int) -> int | None:
    return math.ceil(TOTAL_BATCH / largest_batch) if largest_batch else None


@functools.cache
def _shallow_profile(
    name: str,
    widths: tuple[int, ...],
    blocks: tuple[int, ...],
    batch: int,
    frames: int,
    device: str | None,
) -> Profile:
    build = functools.partial(
        training_step, name, widths=widths, blocks=blocks, batch=batch, frames=frames
    )
    network, step = build()
    if device is None:
        seconds = estimated_seconds(network, step)
        how = "estimated from counts of operations"
    else:
        where = torch.device(device)
        timed, run = build(device=device)
        seconds = measured_seconds(timed, run, where, repeats=_REPEATS)
        how = f"measured on {described(where)}"
    return profile_bytes(network, step, seconds, {"seconds": how})


def _planned(model: Model, baseline_seconds: float, *, counted: bool) -> PlannedEncoder:
    profile = encoder_profile(model.row, model.training.batch, model.training.frames)
    counted_bytes = None
    if counted:
        modes, counted_bytes = _counted(model, profile)
    else:
        modes = _predicted(model, profile)
    return PlannedEncoder(model, profile, modes, counted_bytes, baseline_seconds)


def _predicted(model: Model, profile: Profile) -> Mapping[str, str]:
    """Choose the fastest modes that fit, or the lightest, as the profile says."""
    problem = profile.problem()
    try:
        found = solve(problem, model.training.step_budget_bytes(model.row))
    except Infeasible:
        found = lightest(problem)
    # The last mode is that of what follows the blocks.
    names = [block.name for block in profile.blocks]
    return dict(zip(names, found[:-1], strict=True))


def _counted(model: Model, profile: Profile) -> tuple[Mapping[str, str], int]:
    """Choose modes that fit when the encoder itself runs with them, or the lightest."""
    row, training = model.row, model.training
    network, step = training_step(
        row.name, batch=training.batch, frames=training.frames
    )
    try:
        plan = plan_within(profile, network, step, training.step_budget_bytes(row))
    except Infeasible:
        modes = _predicted(model, profile)
        network.set_mode(modes)
        return modes, trace_bytes(network, step).peak_bytes
    return plan.modes, plan.measured_bytes
