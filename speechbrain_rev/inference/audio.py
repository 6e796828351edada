"""From any audio to what an encoder was trained on: one channel, one sample rate."""

from __future__ import annotations

import contextlib
import operator
from fractions import Fraction
from typing import Literal, SupportsIndex, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torchaudio.functional import resample as _resample

#: What to do with several channels: average them, take the one of this number, or
#: refuse them.
Channels: TypeAlias = "Literal['mean'] | int | None"

#: Less than this says little about a voice.
MINIMUM_SECONDS = 0.25
#: More than this is embedded in windows, not as one: the memory for it grows with its
#: length.
MAXIMUM_SECONDS = 600.0
#: Sample rates beyond these are a mistake, not audio.
LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000
#: Of the filters of ``resample``: zero crossings either side, and where they begin to
#: fall as a part of the lower rate. torchaudio's own.
FILTER_ZEROS, ROLLOFF = 6, 0.99

# -80 dB of full scale: only the dither of a converter stays below.
_SILENCE = 1e-4
# The power spectrum of integers of 32 bits that were not divided by full scale still
# fits float32.
_LOUDEST = 2.0**31
# Every usual pair of rates is a ratio of smaller numbers. An unusual one is replaced by
# the nearest such ratio, less than one in ten thousand away, or else the filters of
# 16,000 phases would take gigabytes.
_LARGEST_RATIO = 1_000


def prepare_waveform(
    samples: Tensor, sample_rate: int, target_rate: int, what: str
) -> Tensor:
    """Check a mono waveform and bring it to the encoder's sample rate.

    Parameters
    ----------
    samples : torch.Tensor, [samples]
        One utterance, of a floating-point type.
    sample_rate, target_rate : int
        Hertz, of the samples and of the result.
    what : str
        How errors call it: a path, or "the waveform".

    Returns
    -------
    torch.Tensor, [resampled samples]
        In float32.

    Raises
    ------
    ValueError
        If the samples are too few or too many, NaN, infinite, silent or absurdly loud,
        or the sample rate is not one of audio.

    Example
    -------
    >>> tone = torch.sin(torch.arange(8000.0))
    >>> prepare_waveform(tone, 8000, 16000, "tone").shape
    torch.Size([16000])
    """
    sample_rate = whole_rate(sample_rate, what)
    check_seconds(samples.shape[-1], sample_rate, what)
    samples = checked(samples, sample_rate, what)
    if is_silent(samples):
        raise ValueError(silence(what))
    return resample(samples, rate_ratio(sample_rate, target_rate))


def rate_ratio(sample_rate: int, target_rate: int) -> Fraction:
    """Give what a sample rate is multiplied by, as a ratio of small numbers.

    Example
    -------
    >>> rate_ratio(48000, 16000)
    Fraction(1, 3)
    """
    return Fraction(target_rate, sample_rate).limit_denominator(_LARGEST_RATIO)


def resample(samples: Tensor, ratio: Fraction) -> Tensor:
    """Resample a waveform.

    Parameters
    ----------
    samples : torch.Tensor, [samples]
        Of a floating-point type.
    ratio : fractions.Fraction
        What its rate is multiplied by.

    Returns
    -------
    torch.Tensor, [samples times the ratio, rounded up]

    Example
    -------
    >>> resample(torch.ones(9), Fraction(1, 3)).shape
    torch.Size([3])
    """
    if ratio == 1:
        return samples
    resampled: Tensor = _resample(
        samples,
        ratio.denominator,
        ratio.numerator,
        lowpass_filter_width=FILTER_ZEROS,
        rolloff=ROLLOFF,
    )
    return resampled


def check_channels(count: int, channels: Channels, what: str) -> None:
    """Refuse several channels unless it is said what to do with them.

    Parameters
    ----------
    count : int
        Channels that there are.
    channels : "mean", int or None
        Average them, take the one of this number, counted from 0, or refuse several.
    what : str
        How errors call the audio.

    Raises
    ------
    ValueError
        If it is not said, or there is no channel of that number.

    Example
    -------
    >>> check_channels(1, None, "a.wav")
    >>> check_channels(2, None, "a.wav")
    Traceback (most recent call last):
    ValueError: a.wav has 2 channels, ...
    """
    channels = check_choice(channels)
    if count > 1 and channels is None:
        raise ValueError(
            f"{what} has {count} channels, and which of them counts is not guessed. Give "
            'channels="mean" (--channels=mean) to average them, or channels=0 '
            "(--channels=0) to take the first. (An array of two dimensions is one "
            "utterance, [channels, samples]; for one utterance in each row give "
            "list(batch).)"
        )
    if isinstance(channels, int) and channels >= count:
        raise ValueError(
            f"{what} has no channel {channels}: it has {count}, counted from 0."
        )


def check_choice(channels: object) -> Channels:
    """Refuse what chooses no channel.

    Parameters
    ----------
    channels : "mean", integer of any type, or None
        What was given.

    Returns
    -------
    "mean", int or None
        The same.

    Raises
    ------
    ValueError
        If it is neither "mean", nor a number that is not negative, nor None.

    Example
    -------
    >>> check_choice(np.int64(1))
    1
    """
    if channels is None:
        return None
    if isinstance(channels, str) and channels == "mean":
        return "mean"
    if isinstance(channels, SupportsIndex) and not isinstance(channels, bool):
        # Arrays have the method, and no index.
        with contextlib.suppress(TypeError):
            number = operator.index(channels)
            if number >= 0:
                return number
    raise ValueError(
        f'channels takes "mean", the number of a channel counted from 0, or None, but is '
        f"{channels!r}."
    )


def one_channel(samples: Tensor, channels: Channels) -> Tensor:
    """Take one channel, or the mean, of channels that were checked.

    Parameters
    ----------
    samples : torch.Tensor, [channels, samples]
        All of them.
    channels : "mean", int or None
        As of ``check_channels``.

    Returns
    -------
    torch.Tensor, [samples]

    Example
    -------
    >>> one_channel(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), "mean").tolist()
    [0.5, 1.0]
    """
    if len(samples) == 1:
        return samples[0]
    if channels == "mean":
        return samples.mean(dim=0)
    assert channels is not None
    return samples[channels]


def checked(samples: Tensor, sample_rate: int, what: str, *, start: int = 0) -> Tensor:
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
    return samples.to(torch.float32)


def is_silent(samples: Tensor) -> bool:
    """Tell whether samples stay where they are, but for the dither of a converter.

    Parameters
    ----------
    samples : torch.Tensor, [samples]
        A waveform or a window of one.

    Returns
    -------
    bool

    Example
    -------
    >>> is_silent(torch.full((8,), 0.5)), is_silent(torch.randn(8))
    (True, False)
    """
    return bool((samples - samples.mean()).abs().max() < _SILENCE)


def silence(what: str) -> str:
    """Say that audio is silent, and what to do.

    Parameters
    ----------
    what : str
        How errors call it.

    Returns
    -------
    str
        For an error.

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
    ):
        raise ValueError(
            f"{what} has a sample rate of {sample_rate!r}; give the samples per second "
            "as a whole number, such as 16000."
        )
    if not LOWEST_RATE <= sample_rate <= HIGHEST_RATE:
        raise ValueError(
            f"{what} has a sample rate of {sample_rate} Hz; it must be the samples per "
            f"second of audio, from {LOWEST_RATE} to {HIGHEST_RATE}."
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
    given = f"{what} has {samples} samples, {seconds:.3f} s at {sample_rate} Hz; "
    if seconds < MINIMUM_SECONDS:
        raise ValueError(
            f"{given}an utterance has at least {MINIMUM_SECONDS} s. Leave it out. (The "
            "last axis of an array must be time: transpose what soundfile.read gives.)"
        )
    if seconds > most:
        raise ValueError(
            f"{given}as one utterance at most {most:.0f} s are embedded, since memory "
            f"grows with them. Give window=SECONDS (--window), no more than {most:.0f}, to "
            "average the embeddings of windows."
        )
