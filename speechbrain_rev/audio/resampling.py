"""Resampling: of a waveform, of what comes in blocks, and of a range of a file.

torchaudio's resampling is a convolution whose stride is the period of the two rates: what
begins at a multiple of it, with as much around as its filter reaches, is resampled as it is
in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

import torch
from torch import Tensor
from torchaudio.functional import resample as _resample

# The filters have so many zero crossings either side, and begin to fall at this part of the
# lower rate: torchaudio's own numbers.
_FILTER_ZEROS, _ROLLOFF = 6, 0.99

# Every usual pair of rates is a ratio of smaller numbers. An unusual one is replaced by
# the nearest such ratio, less than one in ten thousand away, or else the filters of
# 16,000 phases would take gigabytes.
_LARGEST_RATIO = 1_000


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
        lowpass_filter_width=_FILTER_ZEROS,
        rolloff=_ROLLOFF,
    )
    return resampled


def resample_blocks(blocks: Iterable[Tensor], ratio: Fraction) -> Iterator[Tensor]:
    """Resample what comes in blocks [samples], as if it came whole.

    A block is resampled together with as much of its neighbours as the filters reach,
    at a multiple of the ratio's denominator, where outputs and inputs fall together.

    Example
    -------
    >>> wave, third = torch.randn(9000), Fraction(1, 3)
    >>> blocks = torch.cat(list(resample_blocks(wave.split(1000), third)))
    >>> torch.allclose(blocks, resample(wave, third), atol=1e-6)
    True
    """
    if ratio == 1:
        yield from blocks
        return
    period, made, around = ratio.denominator, ratio.numerator, _around(ratio)
    held, before = torch.empty(0, dtype=torch.float32), 0
    for block in blocks:
        held = torch.cat([held, block])
        ready = len(held) // period - before - around
        if ready > 0:
            piece = resample(held[: (before + ready + around) * period], ratio)
            yield piece[before * made : (before + ready) * made]
            drop = max(0, before + ready - around)
            before += ready - drop
            held = held[drop * period :]
    if len(held) > before * period:
        yield resample(held, ratio)[before * made :]


def resampled_range(
    read: Callable[[int, int | None], Tensor],
    ratio: Fraction,
    start: int,
    samples: int | None,
) -> Tensor:
    """Resample as much of a recording as a range of the resampled whole needs.

    Parameters
    ----------
    read : callable
        Takes the first sample and how many (None: all that follow), and returns them,
        [samples]; fewer where the recording ends before.
    ratio : fractions.Fraction
        What the rate is multiplied by.
    start : int
        First sample of the range, at the new rate.
    samples : int or None
        Its length; None for all that follow.

    Returns
    -------
    torch.Tensor, [samples]
        Fewer where the recording ends before.

    Example
    -------
    >>> wave, third = torch.randn(9000), Fraction(1, 3)
    >>> part = resampled_range(lambda at, n: wave[at : at + n], third, 1000, 500)
    >>> torch.allclose(part, resample(wave, third)[1000:1500], atol=1e-6)
    True
    """
    if ratio == 1:
        return read(start, samples)
    period, made, around = ratio.denominator, ratio.numerator, _around(ratio)
    first = max(0, start // made - around)
    count = None
    if samples is not None:
        last = -(-(start + samples) // made) + around
        count = (last - first) * period
    wave = read(first * period, count)
    if not len(wave):
        return wave
    begin = start - first * made
    whole = resample(wave, ratio)
    return whole[begin:] if samples is None else whole[begin : begin + samples]


def resampled_length(samples: int, ratio: Fraction) -> int:
    """Give the length that ``resample`` makes of one.

    Example
    -------
    >>> resampled_length(8001, Fraction(1, 3))
    2667
    """
    return math.ceil(samples * ratio)


def _around(ratio: Fraction) -> int:
    """Give how many periods the filters reach to either side."""
    period, made = ratio.denominator, ratio.numerator
    reach = _FILTER_ZEROS * period / (min(period, made) * _ROLLOFF)
    return math.ceil(reach / period) + 1
