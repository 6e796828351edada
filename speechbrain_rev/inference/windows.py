"""Long recordings in windows, of which a few seconds are in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechbrain_rev.inference.audio import (
    FILTER_ZEROS,
    MAXIMUM_SECONDS,
    MINIMUM_SECONDS,
    ROLLOFF,
    Channels,
    check_seconds,
    checked,
    is_silent,
    rate_ratio,
    resample,
    silence,
)
from speechbrain_rev.inference.recordings import Recording
from speechbrain_rev.scoring import speaker_means


@dataclass(frozen=True, eq=False)
class Windows:
    """Embeddings of the windows of one recording.

    Windows begin every hop. The last one is moved back so that it ends with the
    recording and is as long as all others; only of a recording that is shorter than a
    window the one window is all there is. Silent windows have no embedding: where a
    voice was to be heard, there is none.

    Attributes
    ----------
    starts, ends : numpy.ndarray, [windows], float64
        Seconds from the beginning.
    embeddings : numpy.ndarray, [windows, dim], float32
        One row for each.
    silent : numpy.ndarray, [silent windows, 2], float64
        Start and end, in seconds, of the windows that were left out.

    Example
    -------
    >>> places = np.array([0.0, 1.5]), np.array([3.0, 4.5])
    >>> Windows(*places, np.eye(2, dtype=np.float32), np.empty((0, 2))).mean().tolist()
    [0.5, 0.5]
    """

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    embeddings: NDArray[np.float32]
    silent: NDArray[np.float64]

    def mean(self) -> NDArray[np.float32]:
        """Average the embeddings as if all were as long as they are on average.

        Returns
        -------
        numpy.ndarray, [dim], float32
            The mean of their directions, of the scale of embeddings of short recordings:
            a mean that was found on those can be subtracted.
        """
        length = np.linalg.norm(self.embeddings, axis=1).mean()
        return np.asarray(unit_mean(self.embeddings) * length, dtype=np.float32)


def unit_mean(embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
    """Average embeddings [n, dim], each at length one: [dim], float32.

    The mean is not brought to length one itself, which no cosine sees.

    Example
    -------
    >>> unit_mean(np.array([[2.0, 0.0], [0.0, 4.0]], np.float32)).tolist()
    [0.5, 0.5]
    """
    _, means = speaker_means(embeddings, ["one"] * len(embeddings))
    return np.asarray(means[0], dtype=np.float32)


def check_window(seconds: float, hop: float, names: str = "seconds and hop") -> None:
    """Refuse windows that are no length of an utterance, or leave audio out.

    Parameters
    ----------
    seconds : float
        Length of a window.
    hop : float
        From the start of one to that of the next.
    names : str
        How the caller calls them.

    Raises
    ------
    ValueError
        If either is out of range.

    Example
    -------
    >>> check_window(3.0, 1.5)
    """
    for value in (seconds, hop):
        number = isinstance(value, int | float | np.integer | np.floating)
        if not number or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{names} take seconds as numbers, not {value!r}.")
    if not MINIMUM_SECONDS <= seconds <= MAXIMUM_SECONDS:
        raise ValueError(
            f"a window of {seconds} s is no utterance: {names} take {MINIMUM_SECONDS} s to "
            f"{MAXIMUM_SECONDS:.0f} s."
        )
    # A hundredth of a second is a frame of filterbanks.
    if not 0.01 <= hop <= seconds:
        raise ValueError(
            f"hop is {hop} s; it takes 0.01 s to the length of a window, {seconds} s, so "
            "that nothing is left out."
        )


def windows_of(
    recording: Recording,
    target_rate: int,
    channels: Channels,
    *,
    window_samples: int,
    hop_samples: int,
) -> Iterator[tuple[int, Tensor]]:
    """Read a recording in windows.

    Parameters
    ----------
    recording : Recording
        Of any length that is enough for a voice.
    target_rate : int
        Hertz of the windows.
    channels : "mean", int or None
        As of ``check_channels``.
    window_samples, hop_samples : int
        At ``target_rate``.

    Yields
    ------
    start : int
        In samples of ``target_rate``.
    window : torch.Tensor, [window_samples]
        Shorter only where the recording is.

    Raises
    ------
    ValueError
        If it cannot be read, is too short, NaN, infinite or absurdly loud.
    """
    samples, rate, count = recording.header()
    check_seconds(samples, rate, recording.what, most=math.inf)
    blocks = _checked(recording, rate, channels, count)
    resampled = resample_blocks(blocks, rate_ratio(rate, target_rate))
    return cut(resampled, window_samples, hop_samples)


def _checked(
    recording: Recording, rate: int, channels: Channels, count: int
) -> Iterator[Tensor]:
    start = 0
    for block in recording.blocks(channels, count):
        yield checked(block, rate, recording.what, start=start)
        start += len(block)
    check_seconds(start, rate, recording.what, most=math.inf)


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
    period, made = ratio.denominator, ratio.numerator
    reach = FILTER_ZEROS * period / (min(period, made) * ROLLOFF)
    around = math.ceil(reach / period) + 1
    held, before = torch.empty(0), 0
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


def cut(
    blocks: Iterable[Tensor], window: int, hop: int
) -> Iterator[tuple[int, Tensor]]:
    """Cut what comes in blocks [samples] into windows, as ``Windows`` says.

    Example
    -------
    >>> [(s, len(w)) for s, w in cut([torch.ones(5), torch.ones(4)], 4, 2)]
    [(0, 4), (2, 4), (4, 4), (5, 4)]
    """
    held, first, start = torch.empty(0), 0, 0
    for block in blocks:
        held = torch.cat([held, block])
        end = first + len(held)
        while start + window <= end:
            yield start, held[start - first : start - first + window]
            start += hop
        # The last window may have to be moved back by nearly a hop.
        drop = max(0, min(start, end - window) - first)
        held, first = held[drop:], first + drop
    end = first + len(held)
    if not start:
        yield 0, held
    elif end > start - hop + window:
        yield end - window, held[-window:]


class WindowGroups:
    """Windows with a voice in groups that fit a batch; notes what is silent.

    Parameters
    ----------
    windows : iterable of tuple of int and torch.Tensor, [samples]
        As ``windows_of`` gives them.
    size : int
        Windows of a group.
    """

    def __init__(self, windows: Iterable[tuple[int, Tensor]], size: int):
        self.windows, self.size = windows, size
        self.spoken: list[tuple[int, int]] = []
        self.silent: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[list[Tensor]]:
        group: list[Tensor] = []
        for start, window in self.windows:
            place = start, start + len(window)
            if is_silent(window):
                self.silent.append(place)
                continue
            self.spoken.append(place)
            group.append(window)
            if len(group) == self.size:
                yield group
                group = []
        if group:
            yield group

    def result(self, rows: list[NDArray[np.float32]], rate: int, what: str) -> Windows:
        """Put the embeddings of all groups, [windows, dim] each, to their places.

        Raises
        ------
        ValueError
            If every window was silent.
        """
        if not rows:
            raise ValueError(silence(what))
        spoken = np.array(self.spoken, dtype=np.float64) / rate
        silent = np.array(self.silent, dtype=np.float64).reshape(-1, 2) / rate
        return Windows(spoken[:, 0], spoken[:, 1], np.concatenate(rows), silent)
