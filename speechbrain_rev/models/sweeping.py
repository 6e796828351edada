"""Which batch size trains an encoder fastest on a card, each with its own best plan.

Section 3.4 of Jiang et al., "An efficient training framework for reversible neural
architectures", for the encoders: for each batch a shallow encoder is profiled, on meta
tensors or by the clock, and a plan of the whole one follows from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from tqdm import tqdm

from speechbrain_rev.architectures import Architecture
from speechbrain_rev.devices import timed_device
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.memory import live_bytes_peak
from speechbrain_rev.memory.machine import available_ram_bytes
from speechbrain_rev.memory.report import make_gradients
from speechbrain_rev.models.advice import remedies
from speechbrain_rev.models.card import (
    CLASSES,
    EMBEDDING_DIM,
    Training,
    check_batch,
)
from speechbrain_rev.models.counting import training_step
from speechbrain_rev.models.profiling import (
    Channels,
    encoder_profile,
    fastest_channels,
    shallow_blocks,
)
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.planner import Infeasible, Profile, Sweep, sweep
from speechbrain_rev.planner.room import unless_memory_runs_out
from speechbrain_rev.planner.timing import ASSUMED, Speed, seconds_of
from speechbrain_rev.reversible import Mode
from speechbrain_rev.sizes import size_text

# Steps of the optimizer that are timed, after one that is not.
_REPEATS = 3

# Of a CPU's free memory for what is counted: operations have workspaces of their own.
_HEADROOM = 1.25


@dataclass(frozen=True)
class SweptEncoder:
    """An encoder and its plans for batches of several sizes.

    Attributes
    ----------
    row : Architecture
        The encoder.
    training : Training
        What was asked; its batch says nothing.
    device : str or None
        Where it was timed; None if times are estimated.
    speed : Speed
        Of the device that they are estimated for, if they are.
    sweep : Sweep
        Its budget is the card without what stays free, and its peaks are all that
        training needs beside that: the encoder's step, weights, gradients, optimizer
        states, classifier and input.
    channels : mapping of int to Channels
        By batch the channels that blocks of its plan work on at a time, at each level.
    refused_bytes : mapping of int to int
        By batch what the steps that are timed need, where the machine has not got that.
    """

    row: Architecture
    training: Training
    device: str | None
    speed: Speed
    sweep: Sweep
    channels: Mapping[int, Channels]
    refused_bytes: Mapping[int, int]


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
    batches: Sequence[int],
    *,
    device: str | None = None,
    speed: Speed = ASSUMED,
    progress: bool = False,
) -> SweptEncoder:
    """Plan an encoder for each batch size and see which trains the most utterances.

    Parameters
    ----------
    row : Architecture
        The encoder.
    training : Training
        Card, length of utterances and bits of optimizer states.
    batches : sequence of int
        Sizes to be tried, from the smallest until no plan makes one fit.
    device : str or None
        Where steps of a shallow encoder and of the optimizer are timed: cpu, cuda or
        cuda:N. None estimates them from counts.
    speed : Speed
        Of the device that they are estimated for; where one times, it says nothing.
    progress : bool
        Whether a bar on stderr tells how far it is.

    Returns
    -------
    SweptEncoder
        Its plans are predicted and were not run. A batch at which memory ran out while
        it was timed has none, nor has one whose steps a CPU has not the memory for.

    Raises
    ------
    ValueError
        If there is no such device, or no batch.
    Infeasible
        If no plan makes the smallest batch fit; the message says what to change.
    MemoryError
        If memory ran out, or would have, at every batch.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> training = Training(4 * 2**30, batch=1, frames=200)
    >>> swept = sweep_encoder(architecture("resnet34"), training, [16, 48])
    >>> [set(plan.modes.values()) for plan in swept.sweep.plans][0]
    {'store'}
    """
    where = None if device is None else timed_device(device)
    chosen: dict[int, Channels] = {}
    refused: dict[int, int] = {}
    with tqdm(
        total=len(batches),
        desc="sweeping",
        unit="batch",
        leave=False,
        disable=not progress,
    ) as bar:

        def profile_for(batch: int) -> Profile:
            bar.set_postfix(batch=batch)
            asked = replace(training, batch=batch)
            try:
                chosen[batch], profile = _with_all_else(row, asked, None, speed)
                # What does not fit is known by its bytes alone: nothing need run.
                if where is not None and profile.fits(training.available_bytes):
                    _check_memory(row, asked, where, refused)
                    chosen[batch], profile = _with_all_else(row, asked, where, speed)
                return profile
            finally:
                bar.update()

        asked = replace(training, batch=min(batches, default=1))
        timed = where is not None and _with_all_else(row, asked, None, speed)[1].fits(
            training.available_bytes
        )
        try:
            found = sweep(
                profile_for,
                batches,
                training.available_bytes,
                other_seconds=_optimizer_seconds(
                    row, training, device if timed else None, speed
                ),
            )
        except Infeasible as error:
            changes = "; ".join(remedies(asked, row, error.needed_bytes))
            raise Infeasible(
                error.needed_bytes,
                error.budget_bytes,
                f"That was batch {asked.batch} of {row.name}, with all else that training "
                f"needs; {size_text(training.reserve_bytes)} of the card stay free. What "
                f"helps: {changes}.",
            ) from None
        except MemoryError:
            if not refused:
                raise
            smallest = min(refused)
            raise MemoryError(
                f"{row.name} could be timed at none of these batches: at batch {smallest} "
                f"that needs {size_text(refused[smallest])}, which this machine has not "
                "got free. Try smaller ones, or leave out --device."
            ) from None
    return SweptEncoder(
        row,
        training,
        device,
        speed,
        found,
        {plan.batch: chosen[plan.batch] for plan in found.plans if plan.modes},
        refused,
    )


def optimizer_seconds(
    row: Architecture,
    training: Training,
    device: str | None,
    *,
    speed: Speed = ASSUMED,
) -> float:
    """Tell what the optimizer takes for a step, whatever the batch.

    Parameters
    ----------
    row : Architecture
        The encoder; its family says which optimizer.
    training : Training
        Bits of the states.
    device : str or None
        Where steps of the family's optimizer are timed. None estimates from the bytes
        of weights, gradients and states that are read and written.
    speed : Speed
        Of the device that is estimated for.

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
        # Weights and gradients are read, weights written, states both.
        sizes = training.needed_bytes(row, row.default_mode, 1)
        moved = 3 * sizes["weights"] + 2 * sizes["optimizer_states"]
        return moved / speed.bytes_per_second
    with torch.device(device):
        encoder = build_encoder(row.name, widths=row.widths, blocks=row.blocks)
        classifier = nn.Linear(EMBEDDING_DIM, CLASSES, bias=False)
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
    """Tell what the optimizer takes, or that there is no memory for it at any batch."""
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


def _check_memory(
    row: Architecture,
    training: Training,
    device: torch.device,
    refused: dict[int, int],
) -> None:
    """Refuse steps that the machine has not the memory for, which would end more than us.

    A card says by itself that it has too little; a machine starts to swap, or to end
    processes. Of the steps that are timed the one that stores all takes the most.
    """
    free_bytes = available_ram_bytes() if device.type == "cpu" else None
    if free_bytes is None:
        return
    _, step = training_step(
        row.name,
        mode=Mode.STORE.value,
        widths=row.widths,
        blocks=shallow_blocks(row),
        batch=training.batch,
        frames=training.frames,
    )
    needed_bytes = math.ceil(_HEADROOM * live_bytes_peak(step))
    if needed_bytes > free_bytes:
        refused[training.batch] = needed_bytes
        raise MemoryError


def _with_all_else(
    row: Architecture, training: Training, device: torch.device | None, speed: Speed
) -> tuple[Channels, Profile]:
    """Profile an encoder, and take all else that training needs as alive before it.

    Its chunk, which is told too, is that of the fastest plan.
    """
    all_else = training.available_bytes - training.step_budget_bytes(row)

    def profile_for(channels: Channels) -> Profile:
        profile = encoder_profile(
            row,
            training.batch,
            training.frames,
            channels=channels,
            speed=speed,
            device=device,
        )
        return replace(profile, base_bytes=profile.base_bytes + all_else)

    with torch.device("meta"):
        encoder = build_encoder(row.name, widths=row.widths, blocks=row.blocks)
    return fastest_channels(profile_for, encoder, training.available_bytes)
