"""What audio must be to be read or embedded: channel, rate, length, and sound samples."""

from __future__ import annotations

import contextlib
import operator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from torch import Tensor

from .segments import find_segment

#: The mean of all channels.
MIX = "mix"
#: The channel that is read: its number from 0 on, ``MIX``, or None for the only one.
Channel: TypeAlias = "int | str | None"

#: Less than this says little about a voice.
MINIMUM_SECONDS = 0.25
#: More than this is embedded in windows, not as one: the memory for it grows with its
#: length.
MAXIMUM_SECONDS = 600.0
# Sample rates beyond these are a mistake, not audio.
_LOWEST_RATE, _HIGHEST_RATE = 1_000, 768_000

# The dither of a 16-bit converter stays within 2 steps, 6e-5; this is -80 dB.
_SILENCE = 1e-4
# The power spectrum of 32-bit integers that were not divided by full scale still
# fits float32.
_LOUDEST = 2.0**31


def as_channel(channel: object) -> Channel:
    """Take the choice of a channel, whose number may be of any integer type.

    Parameters
    ----------
    channel : int, "mix" or None
        What was given.

    Returns
    -------
    int, "mix" or None

    Raises
    ------
    ValueError
        If it is something else, or below 0.

    Example
    -------
    >>> as_channel(np.int64(1))
    1
    """
    if channel is None:
        return None
    if isinstance(channel, str) and channel == MIX:
        return channel
    with contextlib.suppress(TypeError):
        number = operator.index(channel)  # type: ignore[arg-type]
        if number >= 0 and not isinstance(channel, bool):
            return number
    raise ValueError(
        f'channel takes a number from 0 on, "{MIX}" or None, but is {channel!r}.'
    )


def check_channel(
    path: str | Path,
    channels: int,
    channel: Channel,
    *,
    rates: tuple[int, int] | None = None,
) -> None:
    """Refuse several channels, or another rate, that nobody asked to treat.

    A segment that names its channel has this one alone, whatever is chosen.

    Parameters
    ----------
    path : str or Path
        The file, or what errors call the audio.
    channels : int
        How many there are.
    channel : int, "mix" or None
        As of ``read_audio``.
    rates : tuple of two int, optional
        Hertz that the audio has, and that it must have; None if it is resampled.

    Raises
    ------
    ValueError
        If the rates differ, if none of several channels is chosen, or if there is no
        channel of the number.

    Example
    -------
    >>> check_channel("a.wav", 2, None, rates=(44100, 16000))
    Traceback (most recent call last):
    ValueError: a.wav has 44100 samples per second and 2 channels, not 16000 and 1. Give ...
    """
    channel, misfits = as_channel(channel), []
    if rates is not None and rates[0] != rates[1]:
        remedy = "resample=True (--resample=true) or another sample_rate"
        misfits.append((f"{rates[0]} samples per second", rates[1], remedy))
    if channels != 1 and channel is None:
        remedy = (
            f'channel="{MIX}" (--channel={MIX}) for their mean or channel=0 (--channel=0) '
            "for the first"
        )
        misfits.append((f"{channels} channels", 1, remedy))
    if misfits:
        has, wanted, remedies = zip(*misfits, strict=True)
        raise ValueError(
            f"{path} has {' and '.join(has)}, not {' and '.join(map(str, wanted))}. Give "
            f"{', and '.join(remedies)}."
        )
    if isinstance(channel, int) and channel >= channels:
        segment = find_segment(path)
        if segment is None or segment.channel is None:
            raise ValueError(
                f"{path} has no channel {channel}: it has {channels}, counted from 0. Give "
                f"one that all files have, or {MIX}."
            )


def take_channel(samples: Tensor, channel: Channel) -> Tensor:
    """Take one channel, or the mean of all.

    Parameters
    ----------
    samples : torch.Tensor, [channels, samples]
        Audio that ``check_channel`` has let pass: of one channel this is taken.
    channel : int, "mix" or None
        As of ``read_audio``.

    Returns
    -------
    torch.Tensor, [samples]

    Example
    -------
    >>> import torch
    >>> take_channel(torch.tensor([[0.0, 0.5], [1.0, 0.5]]), "mix")
    tensor([0.5000, 0.5000])
    """
    if len(samples) > 1 and channel == MIX:
        return samples.mean(dim=0)
    return samples[channel if len(samples) > 1 and isinstance(channel, int) else 0]


def check_samples(
    samples: Tensor, sample_rate: int, what: str, *, start: int = 0
) -> Tensor:
    """Refuse samples that are no audio.

    Parameters
    ----------
    samples : torch.Tensor, [samples]
        A waveform or a part of one.
    sample_rate : int
        Hertz.
    what : str
        How errors call it.
    start : int
        Samples before this part.

    Returns
    -------
    torch.Tensor, [samples]
        In float32.

    Raises
    ------
    ValueError
        If they are NaN, infinite or absurdly loud.
    """
    finite = samples.isfinite()
    if not finite.all():
        first = start + int((~finite).nonzero()[0, -1])
        raise ValueError(
            f"{what} holds NaN or infinity, first at {first / sample_rate:.3f} s. "
            "Repair or leave out this audio."
        )
    peak = float(samples.abs().max())
    if peak > _LOUDEST:
        raise ValueError(
            f"{what} reaches {peak:.3g}, but full scale is 1. Divide it by the full "
            "scale of where it is from (32768 for 16-bit integers)."
        )
    return samples.float()


def is_silent(samples: Tensor) -> bool:
    """Return whether samples stay where they are, but for the dither of a converter.

    Parameters
    ----------
    samples : torch.Tensor, [samples]
        A waveform or a window of one.

    Returns
    -------
    bool

    Example
    -------
    >>> import torch
    >>> is_silent(torch.full((8,), 0.5)), is_silent(torch.randn(8))
    (True, False)
    """
    return bool((samples - samples.mean()).abs().max() < _SILENCE)


def silence(what: str) -> str:
    """Describe silent audio, and what to do, for an error.

    Parameters
    ----------
    what : str
        How errors call it.

    Returns
    -------
    str

    Example
    -------
    >>> silence("a.wav")[:16]
    'a.wav is silent:'
    """
    return (
        f"{what} is silent: it stays below {20 * np.log10(_SILENCE):.0f} dB of full "
        "scale (after averaging its channels, if it has several). Leave it out, or pick "
        "the channel with speech."
    )


def whole_rate(sample_rate: object, what: str) -> int:
    """Give a sample rate as an integer of hertz.

    Raises
    ------
    ValueError
        If it is none of audio.

    Example
    -------
    >>> whole_rate(8000.0, "a tone")
    8000
    """
    if (
        not isinstance(sample_rate, int | float | np.integer | np.floating)
        or isinstance(sample_rate, bool)
        or sample_rate % 1 != 0
        or not _LOWEST_RATE <= sample_rate <= _HIGHEST_RATE
    ):
        raise ValueError(
            f"{what} has a sample rate of {sample_rate!r}; give the samples per second of "
            f"audio as a whole number from {_LOWEST_RATE} to {_HIGHEST_RATE}."
        )
    return int(sample_rate)


def check_seconds(
    samples: int, sample_rate: int, what: str, *, most: float = MAXIMUM_SECONDS
) -> None:
    """Refuse audio that is too short for a voice, or too long to be embedded as one.

    Raises
    ------
    ValueError
        If it has less than ``MINIMUM_SECONDS`` or more than ``most``.
    """
    seconds = samples / sample_rate
    length = f"{what} has {samples} samples, {seconds:.3f} s at {sample_rate} Hz; "
    if seconds < MINIMUM_SECONDS:
        raise ValueError(
            f"{length}an utterance has at least {MINIMUM_SECONDS} s. Leave it out. (The "
            "last axis of an array must be time: transpose what soundfile.read gives.)"
        )
    if seconds > most:
        raise ValueError(
            f"{length}as one utterance at most {most:.0f} s are embedded, since memory "
            f"grows with them. Give window=SECONDS (--window), no more than {most:.0f}, to "
            "average the embeddings of windows."
        )
