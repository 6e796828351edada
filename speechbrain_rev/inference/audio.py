"""From any audio to what an encoder was trained on: one channel, one sample rate."""

from __future__ import annotations

from fractions import Fraction
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torchaudio.functional import resample

from speechbrain_rev.speech import audio_info, read_audio

#: Less than this says little about a voice.
MINIMUM_SECONDS = 0.25
#: More than this is cut up by the caller, not embedded as one utterance: the memory
#: for it grows with its length.
MAXIMUM_SECONDS = 600.0
#: Sample rates beyond these are a mistake, not audio.
LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000

# -80 dB of full scale: only the dither of a converter stays below.
_SILENCE = 1e-4
# The power spectrum of integers of 32 bits that were not divided by full scale still
# fits float32.
_LOUDEST = 2.0**31
# Every usual pair of rates is a ratio of smaller numbers. An unusual one is replaced by
# the nearest such ratio, less than one in ten thousand away, or else the filters of
# 16,000 phases would take gigabytes.
_LARGEST_RATIO = 1_000


def read_waveform(
    path: str | PathLike[str], target_rate: int
) -> tuple[torch.Tensor, int]:
    """Read an audio file of any sample rate and number of channels.

    Parameters
    ----------
    path : str or path-like
        A file that libsndfile reads: WAV, FLAC, OGG, MP3, ...
    target_rate : int
        Hertz that the encoder takes.

    Returns
    -------
    waveform : torch.Tensor, [samples]
        At ``target_rate``, its channels averaged.
    channels : int
        How many channels were averaged.

    Raises
    ------
    ValueError
        If there is no such file, it is no audio, or it cannot be embedded; see
        ``prepare_waveform``.
    """
    info = audio_info(Path(path))
    _check_seconds(info.samples, info.sample_rate, str(path))
    samples = read_audio(Path(path), sample_rate=info.sample_rate, mix_channels=True)
    waveform = prepare_waveform(samples, info.sample_rate, target_rate, str(path))
    return waveform, info.channels


def prepare_waveform(
    samples: torch.Tensor, sample_rate: int, target_rate: int, what: str
) -> torch.Tensor:
    """Check a mono waveform and bring it to the encoder's sample rate.

    Parameters
    ----------
    samples : torch.Tensor, [..., samples]
        Floats; each row one utterance.
    sample_rate, target_rate : int
        Hertz, of the samples and of the result.
    what : str
        How errors call it: a path, or "waveform".

    Returns
    -------
    torch.Tensor, [..., resampled samples]
        In float32.

    Raises
    ------
    ValueError
        If the samples are no floats, too few or too many, NaN, infinite, silent or
        absurdly loud, or the sample rate is not one of audio.

    Example
    -------
    >>> tone = torch.sin(torch.arange(8000.0))
    >>> prepare_waveform(tone, 8000, 16000, "tone").shape
    torch.Size([16000])
    """
    if not samples.is_floating_point():
        raise ValueError(
            f"{what} holds {str(samples.dtype).removeprefix('torch.')} values; give "
            "floats from -1 to 1 (16-bit integers divided by 32768)."
        )
    sample_rate = _whole_rate(sample_rate, what)
    _check_seconds(samples.shape[-1], sample_rate, what)
    finite = samples.isfinite()
    if not finite.all():
        first = int((~finite).nonzero()[0, -1])
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
    samples = samples.to(torch.float32)
    deviation = samples - samples.mean(dim=-1, keepdim=True)
    if (deviation.abs().amax(dim=-1) < _SILENCE).any():
        raise ValueError(
            f"{what} is silent: it stays below {20 * np.log10(_SILENCE):.0f} dB of "
            "full scale (after averaging its channels, if it has several). Leave it "
            "out, or pick the channel with speech."
        )
    ratio = Fraction(target_rate, sample_rate).limit_denominator(_LARGEST_RATIO)
    if ratio == 1:
        return samples
    resampled: torch.Tensor = resample(samples, ratio.denominator, ratio.numerator)
    return resampled


def _whole_rate(sample_rate: object, what: str) -> int:
    if (
        not isinstance(sample_rate, int | float | np.integer | np.floating)
        or isinstance(sample_rate, bool)
        or sample_rate % 1 != 0
    ):
        raise ValueError(
            f"{what} has a sample rate of {sample_rate!r}; give the samples per second "
            "as a whole number, such as 16000."
        )
    return int(sample_rate)


def _check_seconds(samples: int, sample_rate: int, what: str) -> None:
    if not LOWEST_RATE <= sample_rate <= HIGHEST_RATE:
        raise ValueError(
            f"{what} has a sample rate of {sample_rate} Hz; it must be the samples per "
            f"second of audio, from {LOWEST_RATE} to {HIGHEST_RATE}."
        )
    seconds = samples / sample_rate
    if not MINIMUM_SECONDS <= seconds <= MAXIMUM_SECONDS:
        raise ValueError(
            f"{what} has {samples} samples, {seconds:.3f} s at {sample_rate} Hz; an "
            f"utterance has {MINIMUM_SECONDS} s to {MAXIMUM_SECONDS:.0f} s. Leave it "
            "out, or cut it up and average the embeddings. The last axis must be time."
        )
