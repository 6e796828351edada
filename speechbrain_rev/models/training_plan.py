"""A plan for a training of the recipe: what a memory budget leaves for activations.

The budget is for all that the training process holds of a card. What stays from step to
step is counted on encoder, classifier and optimizer themselves; the rest is what a step
may make, within which ``planner`` chooses modes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from speechbrain_rev import devices
from speechbrain_rev.devices import described, random_devices
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.memory.report import breakdown
from speechbrain_rev.memory.shapes import without_contents
from speechbrain_rev.models.card import INPUT_BYTES_PER_FRAME, card_for, reserve_of
from speechbrain_rev.models.compressed_plan import TrainingProbe
from speechbrain_rev.models.profiling import (
    Channels,
    EncoderStep,
    fastest_channels,
    hardware,
    seconds_in_proportion,
    shallow,
    shallow_blocks,
)
from speechbrain_rev.models.training_step import TrainingStep
from speechbrain_rev.planner import Infeasible, Plan, Profile
from speechbrain_rev.planner.counting import profile_bytes
from speechbrain_rev.planner.saved import saved_profile
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.planner.verify import reproduced, warn_refused
from speechbrain_rev.planner.within import plan_within
from speechbrain_rev.sizes import parse_size, size_text

#: Utterances of the steps whose time is taken, at most, elsewhere and on a card, which
#: few do not keep busy.
_TIMED, _TIMED_ON_CUDA = 4, 32

# Utterances in which blocks are undone; what is wrong is wrong for any.
_VERIFIED = 2

# Where bytes are counted: meta tensors know no autocast.
_NO_CONTENTS = {True: "meta tensors", False: "fake tensors"}

# Batches that are counted on the way to the largest one that fits.
_COUNTED = 4


#: Channels at a time and the profile for them.
Chosen = tuple[Channels, Profile]


@dataclasses.dataclass(frozen=True)
class _Budget:
    """What a training process may hold, and what of it is not for a step."""

    whole_bytes: int
    staying_bytes: int
    reserved_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.whole_bytes - self.staying_bytes - self.reserved_bytes


def budget_bytes_of(budget: str, device: torch.device) -> int:
    """Read a memory budget.

    Parameters
    ----------
    budget : str
        As 11GB (1e9 bytes), 10.5GiB (2**30 bytes), 800MB or 800MiB. What is sold as a
        card of 11GB has 11GiB. Or auto: what nobody else has taken of the card.
    device : torch.device
        Where the training runs.

    Returns
    -------
    int
        Bytes that the process may hold, what it holds already among them.

    Raises
    ------
    ValueError
        If it is no size above zero with a unit, or auto where there is no card.

    Examples
    --------
    >>> cpu = torch.device("cpu")
    >>> budget_bytes_of("11GB", cpu), budget_bytes_of("10 GiB", cpu)
    (11000000000, 10737418240)
    """
    if budget == "auto":
        size = devices.free_and_held_bytes(device)
        if size is None:
            raise ValueError(
                "memory_budget: auto asks a card for its free memory, and this training "
                f"runs on {device.type}. Give a size, as 11GB."
            )
        return size
    size = parse_size(budget)
    if size is None:
        raise ValueError(
            "memory_budget takes a size as 11GB (1e9 bytes each), 11GiB (2**30, what a "
            f"card that is sold as 11GB has) or 800MB, or auto, not {budget}."
        )
    return size


def plan_training(
    step: TrainingStep, budget_bytes: int, max_gradient_error: float | None = None
) -> Plan:
    """Choose what the encoder's blocks keep.

    Parameters
    ----------
    step : TrainingStep
        A step of the training.
    budget_bytes : int
        What the process may hold of the card's memory. On a card a part of it is
        reserved for what cannot be counted, as ``speechbrain-rev models`` does.
    max_gradient_error : float or None
        As for ``planner.plan``; None for a lossless plan.

    Returns
    -------
    Plan
        Its ``budget_bytes`` are what was left for a step; ``about`` tells what was not
        (``staying_bytes``, ``reserved_bytes``).

    Raises
    ------
    Infeasible
        If no plan fits; the message says by how much, and what to change.
    """
    on_card = step.device.type == "cuda"
    budget = _Budget(
        budget_bytes, staying_bytes(step), reserve_of(budget_bytes) if on_card else 0
    )
    refused = _refused(step)

    def chosen(profile_for: Callable[[Channels], Profile]) -> Chosen:
        if step.searches_chunk and not step.begun:
            return fastest_channels(profile_for, step.encoder, budget.left_bytes)
        channels = tuple(step.encoder.channels)
        return channels, profile_for(channels)

    if max_gradient_error is not None and budget.left_bytes > 0:
        most = _TIMED_ON_CUDA if on_card else _TIMED
        probe = TrainingProbe.of(step, max_gradient_error, most)

        def tried(channels: Channels) -> Profile:
            return probe.profile(channels).without_reconstruction(refused)

        return _plan_within(step, budget, *chosen(tried), probe)
    counted, timed = (
        functools.partial(_profile, step, of_shallow, refused=refused)
        for of_shallow in (_counted, _timed)
    )
    channels, profile = chosen(counted)
    if not profile.fits(budget.left_bytes):
        # Which refuses before a time is taken, unless its run takes less than predicted.
        _plan_within(step, budget, channels, profile)
    return _plan_within(step, budget, *chosen(timed))


def _plan_within(
    step: TrainingStep,
    budget: _Budget,
    channels: Channels,
    profile: Profile,
    probe: TrainingProbe | None = None,
) -> Plan:
    """Plan for what the budget leaves, or say how much is lacking and what helps."""
    left = budget.left_bytes

    def solve(profile: Profile, left: int) -> Plan:
        with step.shapes() as device:
            encoder = without_contents(step.encoder, device)
            encoder.set_channels(channels)
            network = encoder if probe is None else probe.compressible(encoder)
            run = step.run_without_contents(encoder, device)
            try:
                return plan_within(profile, network, run, left)
            except Infeasible as error:
                room = left > 0
                # It has the lightest modes that are known.
                batch = _fitting_batch(step, encoder, device, left) if room else None
                limited = probe is not None and profile.is_held_up_by_limit()
                remedy = _remedy(step, batch=batch, room=room, limited=limited)
                raise error.with_remedy(remedy) from None

    try:
        if probe is None:
            plan = solve(profile, left)
        else:
            probe.encoder.set_channels(channels)
            plan = probe.held(profile, solve, left)
    except Infeasible as error:
        used_bytes, remedy = error.needed_bytes + budget.staying_bytes, error.remedy
    else:
        return plan.with_about(
            staying_bytes=str(budget.staying_bytes),
            reserved_bytes=str(budget.reserved_bytes),
        )
    if left <= 0:
        staying = size_text(budget.staying_bytes)
        remedy = (
            f"What stays from step to step takes {staying} alone: weights, gradients, "
            f"optimizer states, speech. {remedy}"
        )
    on_card = step.device.type == "cuda"
    needed_bytes = card_for(used_bytes) if on_card else used_bytes
    refused = Infeasible(needed_bytes, budget.whole_bytes)
    raise refused.with_remedy(f"It lacks {size_text(refused.lacking_bytes)}. {remedy}")


def _fitting_batch(
    step: TrainingStep, encoder: SpeakerEncoder, device: torch.device, left: int
) -> int | None:
    """Find the largest batch that fits with the modes of an encoder without contents.

    Memory grows linearly, but for rounding: what it is between two batches is guessed,
    and then counted. Of what stays, the speech of a smaller batch is less too.
    """

    def lacking(batch: int) -> int:
        smaller = dataclasses.replace(step, batch=batch)
        run = smaller.run_without_contents(encoder, device)
        less = _speech_bytes(step) - _speech_bytes(smaller)
        return trace_bytes(encoder, run).peak_bytes - less - left

    low, high = 1, step.batch
    if high == low or (spare := -lacking(low)) < 0:
        return None
    over = max(1, lacking(high))
    for _ in range(_COUNTED):
        batch = low + (high - low) * spare // (spare + over)
        if batch == low:
            break
        found = lacking(batch)
        if found <= 0:
            low, spare = batch, -found
        else:
            high, over = batch, found
    return low


def _remedy(step: TrainingStep, *, batch: int | None, room: bool, limited: bool) -> str:
    """Name the changes that can help.

    Parameters
    ----------
    step : TrainingStep
        What does not fit.
    batch : int or None
        The largest that does; None if not even one utterance does, or it is one.
    room : bool
        Whether the budget has any for activations: else only what stays matters.
    limited : bool
        Whether a limit of the error keeps blocks from what is lighter.
    """
    found = []
    if batch is not None:
        found.append(
            f"lower batch_size (now {step.batch} for each process, {batch} would fit)"
        )
    if room:
        found.append(f"lower chunk_samples (now {step.frames} frames)")
    found.append("choose another arch")
    if step.optimizer_bits == 32:
        found.append("set optimizer_bits: 8")
    fixed = not (step.searches_chunk or step.begun)
    if room and fixed and step.encoder.reversible_blocks():
        found.append("set a smaller chunk, or chunk: auto, which is searched")
    if limited:
        found.append("raise max_gradient_error")
    found.append("raise memory_budget")
    *most, last = found
    words = f"{', '.join(most)}, or {last}."
    return words[0].upper() + words[1:]


def _refused(step: TrainingStep) -> list[str]:
    """Name the blocks that training must not reconstruct, and warn of them."""
    chained = step.encoder.reversible_blocks()
    if not chained:
        return []
    feats = step.noise(min(_VERIFIED, step.batch))
    with step.autocast(step.device.type):
        found = reproduced(step.encoder, feats)
    return warn_refused(found, stacklevel=3)


def _profile(
    step: TrainingStep,
    of_shallow: Callable[[TrainingStep, Channels], Profile],
    channels: Channels,
    *,
    refused: list[str],
) -> Profile:
    """Stretch the profile of a shallow encoder of the kind to the encoder."""
    profile = of_shallow(step, channels)
    names = list(step.encoder.named_blocks())
    how = {name: profile.about[name] for name in ("seconds", "bytes")}
    profile = profile.stretched(names, {**step.about(), **how})
    return profile.without_reconstruction(refused)


def _key(step: TrainingStep, channels: Channels) -> dict[str, str]:
    return {
        **step.about_profile(),
        "channels": str(list(channels)),
        "blocks of stages": str(shallow_blocks(step.encoder.architecture)),
    }


def _counted(step: TrainingStep, channels: Channels) -> Profile:
    """Count the bytes of a shallow encoder, whose times are all zero, or read them."""

    def make() -> Profile:
        with torch.device("meta"):
            small = shallow(step.encoder)
        small.set_channels(channels)
        about = {"bytes": f"counted on {_NO_CONTENTS[step.precision == 'fp32']}"}
        with step.shapes() as device:
            encoder = without_contents(small, device)
            run = step.run_without_contents(encoder, device)
            return profile_bytes(encoder, run, defaultdict(float), about)

    return saved_profile(_key(step, channels) | {"seconds": "not taken"}, make)


def _timed(step: TrainingStep, channels: Channels) -> Profile:
    """Take the times of a shallow encoder too, or read what was found on this device."""

    def make() -> Profile:
        counted = _counted(step, channels)
        with torch.random.fork_rng(random_devices(step.device)), step.device:
            small = shallow(step.encoder, alone=True)
        small.set_channels(channels)

        def step_of_some(count: int, device: torch.device | str) -> EncoderStep:
            device = torch.device(device)
            # Shapes are those of float32, which are no smaller than under autocast.
            own = without_contents(small, device) if device.type == "meta" else small
            return own, step.run_of(own, count, device)

        most = _TIMED_ON_CUDA if step.device.type == "cuda" else _TIMED
        seconds, timed = seconds_in_proportion(
            step_of_some, step.batch, step.device, most=most
        )
        about = {
            "seconds": f"measured on {described(step.device)}, at batch {timed}",
            "bytes": counted.about["bytes"],
        }
        return dataclasses.replace(counted.with_seconds(seconds), about=about)

    return saved_profile(_key(step, channels) | hardware(step.device), make)


def staying_bytes(step: TrainingStep) -> int:
    """Count what there is from one step to the next, which modes do not change.

    Parameters
    ----------
    step : TrainingStep
        A step of the training.

    Returns
    -------
    int
        Bytes of weights, gradients, optimizer states and classifier, and a batch's speech.
    """
    trained = nn.ModuleList([step.encoder, step.classifier])
    held = copy.deepcopy(trained).to("meta")
    report = breakdown(
        held,
        lambda: None,
        inputs=[torch.empty(0, device="meta")],
        optimizer=step.make_optimizer(held.parameters()),
    )
    return report.total_bytes + _speech_bytes(step)


def _speech_bytes(step: TrainingStep) -> int:
    return step.batch * step.frames * INPUT_BYTES_PER_FRAME
