"""Profiles of encoders from shallow ones of their kind, and the chunk that is fastest.

Of a stage the first block is profiled and one that all further ones are like: what they
tell holds for any depth.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
from collections.abc import Callable, Sequence

import torch

from speechbrain_rev.architectures import ARCHITECTURES, Architecture
from speechbrain_rev.devices import described, random_devices
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.lobes.chunks import AUTO, channels_by_level
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.memory import live_bytes_peak
from speechbrain_rev.models.counting import training_step
from speechbrain_rev.planner import Infeasible, Profile
from speechbrain_rev.planner.counting import profile_bytes
from speechbrain_rev.planner.room import batch_that_fits
from speechbrain_rev.planner.saved import saved_profile
from speechbrain_rev.planner.timing import (
    ASSUMED,
    Speed,
    estimated_seconds,
    measured_seconds,
)
from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.compiled import backend_of, compile_pieces

#: Channels at a time, at each level; None is all.
Channels = tuple[int | None, ...]

#: An encoder and its training step.
EncoderStep = tuple[SpeakerEncoder, Callable[[], object]]

#: Bytes of a chunk that are tried where none is fixed: the larger, the faster.
CHUNKS = (None, 2 * AUTO, AUTO)

#: And where nothing fits with those: time grows faster than memory falls.
SMALL_CHUNKS = (AUTO // 2, AUTO // 4)

# Blocks of a stage that are run.
_SHALLOW = 2

# Steps of each mode that are timed, after one that is not.
_REPEATS = 3

# No layer has more channels than so many times the width of its stage.
_WIDEST = 4


def shallow(encoder: SpeakerEncoder, *, alone: bool = False) -> SpeakerEncoder:
    """Build an encoder with few blocks in a stage, which is otherwise alike.

    Parameters
    ----------
    encoder : SpeakerEncoder
        As ``build_encoder`` makes them, of any size.
    alone : bool
        Whether this process runs it while others wait, and so shares no batch statistics
        with them.

    Returns
    -------
    SpeakerEncoder
        Newly initialised, on torch's default device.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     small = shallow(build_encoder("df_revnet377", streams="float"))
    >>> small.architecture.blocks, small.architecture.widths, small.streams
    ((2, 2, 2, 2), (48, 96, 192, 384), 'float')
    """
    row = encoder.architecture
    blocks = shallow_blocks(row)
    settings = settings_of(encoder) | ({"sync_batchnorm": False} if alone else {})
    small = build_encoder(row.name, blocks=blocks, **settings)
    small.set_channels(encoder.channels)
    backend = backend_of(encoder)
    return small if backend is None else compile_pieces(small, backend)


def shallow_blocks(row: Architecture) -> tuple[int, ...]:
    """Tell how many blocks of each stage are profiled."""
    return tuple(min(count, _SHALLOW) for count in row.blocks)


def channels_to_try(
    encoder: SpeakerEncoder, chunks: Sequence[int | None] = CHUNKS
) -> list[Channels]:
    """List channels at a time that make a difference, in the order of the chunks.

    Parameters
    ----------
    encoder : SpeakerEncoder
        An encoder; one that is not reversible works on all channels at once.
    chunks : sequence of int or None
        Bytes, as ``build_encoder`` takes them.

    Returns
    -------
    list of tuple
        Channels at each level, None where a chunk is as wide as the layers.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     channels_to_try(build_encoder("resnet34"))
    ...     channels_to_try(build_encoder("revnet57"))[:2]
    [(None, None, None, None)]
    [(None, None, None, None), (32, 128, 512, None)]
    """
    widths = encoder.architecture.widths
    found: list[Channels] = []
    for chunk in chunks if encoder.reversible_blocks() else (None,):
        sizes = channels_by_level(chunk, encoder.n_mels)
        channels = tuple(
            None if size is None or size >= _WIDEST * width else size
            for size, width in zip(sizes, widths, strict=True)
        )
        if channels not in found:
            found.append(channels)
    return found


def fastest_channels(
    profile_for: Callable[[Channels], Profile],
    encoder: SpeakerEncoder,
    budget_bytes: int,
) -> tuple[Channels, Profile]:
    """Choose channels at a time so that the plan within a budget is the fastest.

    Smaller chunks take less memory and more time. Those of ``CHUNKS`` are tried from the
    largest on, until one is no faster than the one before, or all blocks can store; if
    none fits, those of ``SMALL_CHUNKS`` until one does.

    Parameters
    ----------
    profile_for : callable
        Makes the encoder's profile for some channels.
    encoder : SpeakerEncoder
        The encoder.
    budget_bytes : int
        What a step may allocate.

    Returns
    -------
    tuple
        The channels; if no plan fits, those that need the least.
    Profile
        Theirs.
    """
    best: tuple[float, Channels, Profile] | None = None
    lightest: tuple[int, Channels, Profile] | None = None
    usual = channels_to_try(encoder)
    small = [c for c in channels_to_try(encoder, SMALL_CHUNKS) if c not in usual]
    for channels in usual + small:
        if best is not None and channels in small:
            break
        profile = profile_for(channels)
        try:
            modes = profile.fastest(budget_bytes)
        except Infeasible as error:
            if lightest is None or error.needed_bytes < lightest[0]:
                lightest = error.needed_bytes, channels, profile
            continue
        seconds = profile.seconds(modes)
        if best is not None and seconds >= best[0]:
            break
        best = seconds, channels, profile
        if set(modes.values()) == {Mode.STORE.value}:
            break
    chosen = best or lightest
    assert chosen is not None
    return chosen[1:]


def encoder_profile(
    row: Architecture,
    batch: int,
    frames: int,
    *,
    channels: Channels | None = None,
    speed: Speed = ASSUMED,
    device: torch.device | None = None,
) -> Profile:
    """Tell what each block of an encoder costs, from a shallow one of its kind.

    Parameters
    ----------
    row : Architecture
        The encoder, of any widths and blocks.
    batch, frames : int
        Utterances of a step, and the length of each.
    channels : tuple of int or None
        Channels at a time, at each level; None for the default chunk.
    speed : Speed
        Of the device that is asked about, to estimate times from.
    device : torch.device or None
        Where the times of the shallow one are measured instead.

    Returns
    -------
    Profile
        Its bytes are predicted, to less than a thousandth of a plan's peak, and its
        times estimated, or those of blocks that are like its own. It is kept in a file
        and read from there the next time.

    Examples
    --------
    >>> profile = encoder_profile(ARCHITECTURES["resnet152"], batch=16, frames=200)
    >>> len(profile.blocks), profile.about["profiled"]
    (51, 'stages of at most 2 blocks')
    """
    with torch.device("meta"):
        encoder = build_encoder(row.name, widths=row.widths, blocks=row.blocks)
    channels = tuple(encoder.channels) if channels is None else channels
    # One of each kind: encoders that differ in depth alone share it.
    like = next(
        other.name
        for other in ARCHITECTURES.values()
        if (other.family, other.type, other.block) == (row.family, row.type, row.block)
    )
    blocks = shallow_blocks(row)
    profile = _shallow_profile(
        like, row.widths, blocks, batch, frames, channels, device or speed.to_json()
    )
    names = list(encoder.named_blocks())
    about = {**profile.about, "encoder": row.name, "blocks": str(len(names))}
    return profile.stretched(names, about)


@functools.cache
def _shallow_profile(
    name: str,
    widths: tuple[int, ...],
    blocks: tuple[int, ...],
    batch: int,
    frames: int,
    channels: Channels,
    timed_by: torch.device | str,
) -> Profile:
    """Profile it; ``timed_by`` is a device, or the speed of one as JSON."""
    key = {
        "encoder": name,
        "widths": str(widths),
        "profiled": f"stages of at most {_SHALLOW} blocks",
        "blocks of stages": str(blocks),
        "batch": str(batch),
        "frames": str(frames),
        "precision": "fp32",
        "channels": str(list(channels)),
        "bytes": "counted on meta tensors",
    }
    if isinstance(timed_by, torch.device):
        key |= hardware(timed_by) | {"seconds": f"measured on {described(timed_by)}"}
    else:
        speed = Speed.from_json(timed_by)
        key |= {
            "seconds": f"estimated from counts of operations; {speed.about['device']}",
            "speed": json.dumps(json.loads(timed_by)),
        }

    def make() -> Profile:
        if isinstance(timed_by, torch.device):
            counted = _shallow_profile(
                name, widths, blocks, batch, frames, channels, ASSUMED.to_json()
            )
            seconds, timed = seconds_in_proportion(step_of_some, batch, timed_by)
            about = {"timed batch": str(timed)} if timed < batch else {}
            return dataclasses.replace(counted.with_seconds(seconds), about=about)
        encoder, step = step_of_some(batch, "meta")
        seconds = estimated_seconds(encoder, step, Speed.from_json(timed_by))
        return profile_bytes(encoder, step, seconds, {})

    def step_of_some(count: int, device: torch.device | str) -> EncoderStep:
        encoder, step = training_step(
            name,
            widths=widths,
            blocks=blocks,
            batch=count,
            frames=frames,
            device=device,
        )
        encoder.set_channels(channels)
        return encoder, step

    return saved_profile(key, make)


def seconds_in_proportion(
    step_of_some: Callable[[int, torch.device | str], EncoderStep],
    batch: int,
    device: torch.device,
    *,
    most: int | None = None,
) -> tuple[dict[tuple[str, str], float], int]:
    """Take the times of as many utterances as fit, and scale them to the batch.

    Parameters
    ----------
    step_of_some : callable
        Makes an encoder and its step of so many utterances on a device, or on meta.
    batch : int
        Utterances that are asked about.
    device : torch.device
        Where steps are timed, in every mode.
    most : int or None
        Utterances that suffice; None for all.

    Returns
    -------
    dict of (str, str) to float
        Seconds by block and mode, under ("", "") of the rest.
    int
        Utterances that were timed.

    Raises
    ------
    MemoryError
        If not even one fits.
    """

    def stored_bytes(count: int) -> int:
        encoder, step = step_of_some(count, "meta")
        encoder.set_mode(Mode.STORE)
        return live_bytes_peak(step)

    wanted = batch if most is None else min(most, batch)
    count = batch_that_fits(stored_bytes, wanted, device)
    with torch.random.fork_rng(random_devices(device)):
        encoder, step = step_of_some(count, device)
        taken = measured_seconds(encoder, step, device, repeats=_REPEATS)
    return {key: seconds * batch / count for key, seconds in taken.items()}, count


def hardware(device: torch.device) -> dict[str, str]:
    """Say what measured times hold for."""
    return {"device": described(device), "machine": platform.node()}
