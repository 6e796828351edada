"""A model at work: recordings in, embeddings out, in batches or in windows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from speechbrain.utils.distributed import if_main_process
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from speechbrain_rev.inference.audio import (
    FILTER_ZEROS,
    MAXIMUM_SECONDS,
    MINIMUM_SECONDS,
    ROLLOFF,
    Channels,
    Recording,
    check_channels,
    check_choice,
    check_seconds,
    checked,
    is_silent,
    rate_ratio,
    resample,
    silence,
)
from speechbrain_rev.inference.front_ends import Precision, computing_in
from speechbrain_rev.scoring import speaker_means

# Samples of a batch with its padding. A CPU gains next to nothing from batches, and takes
# up to 2.6 times as long where a tensor in the encoder is over 32 MB, which the C library
# takes from the system anew each time: a DF encoder has such after 5 s.
_BATCH_SAMPLES = {"cuda": 1_600_000, "cpu": 80_000}
_BATCH = 16
# The shortest of a batch has this part of the longest, or more.
_ALIKE = 0.75
# The longer the read-ahead, the more alike are neighbours in length: 80 MB, twice.
_WAITING_SAMPLES = 20_000_000


def batch_size(samples: int, device: torch.device) -> int:
    """Tell how many utterances of so many samples make a batch.

    Example
    -------
    >>> batch_size(16000, torch.device("cpu"))
    5
    """
    return max(1, min(_BATCH, _BATCH_SAMPLES[device.type] // samples))


def read_batches(
    indices: Iterable[int],
    read: Callable[[int], Tensor | None],
    device: torch.device,
) -> Iterator[list[tuple[int, Tensor]]]:
    """Read utterances, in a thread of its own, and group those of similar length.

    Parameters
    ----------
    indices : iterable of int
        Which utterances.
    read : callable
        Gives the waveform [samples] of an index, or None to leave it out.
    device : torch.device
        Where the batches go; it decides how large they are.

    Yields
    ------
    list of tuple of int and torch.Tensor, [samples]
        Indices and waveforms, the longest first.

    Raises
    ------
    ValueError, OSError
        What ``read`` raises, once all before it have been given.

    Example
    -------
    >>> waves = [torch.zeros(8000), torch.zeros(9000)]
    >>> [batch] = read_batches(range(2), waves.__getitem__, torch.device("cpu"))
    >>> [(index, len(waveform)) for index, waveform in batch]
    [(1, 9000), (0, 8000)]
    """
    most = _BATCH_SAMPLES[device.type]
    waiting = _waiting(indices, read)
    with ThreadPoolExecutor(1, "reading") as thread:
        ahead = thread.submit(next, waiting, None)
        while (some := ahead.result()) is not None:
            ahead = thread.submit(next, waiting, None)
            yield from _grouped(some, most)


def _waiting(
    indices: Iterable[int], read: Callable[[int], Tensor | None]
) -> Iterator[list[tuple[int, Tensor]]]:
    """Read utterances until there is enough to be sorted by length."""
    waiting: list[tuple[int, Tensor]] = []
    samples_waiting = 0
    for index in indices:
        try:
            samples = read(index)
        except (ValueError, OSError):
            yield waiting
            raise
        if samples is None:
            continue
        waiting.append((index, samples))
        samples_waiting += len(samples)
        if samples_waiting > _WAITING_SAMPLES:
            yield waiting
            waiting, samples_waiting = [], 0
    yield waiting


def _grouped(
    waveforms: Sequence[tuple[int, Tensor]], most_samples: int
) -> Iterator[list[tuple[int, Tensor]]]:
    group: list[tuple[int, Tensor]] = []
    for index, samples in sorted(waveforms, key=lambda w: len(w[1]), reverse=True):
        longest = len(group[0][1]) if group else len(samples)
        if (
            len(group) == _BATCH
            or (len(group) + 1) * longest > most_samples
            or len(samples) < _ALIKE * longest
        ):
            if group:
                yield group
            group = []
        group.append((index, samples))
    if group:
        yield group


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


logger = logging.getLogger(__name__)

#: Takes the position of an utterance that cannot be embedded, and why.
OnBad = Callable[[int, Exception], None]

_MANY = 20


class _DivergedError(ValueError):
    """The encoder's fault, and not that of the audio."""


class RunningModel:
    """Embed recordings with a model, on its device and in its precision.

    Parameters
    ----------
    model : nn.Module
        As of ``SpeakerEmbedder``; in eval mode and on the device.
    sample_rate : int
        Hertz of what it takes.
    device : torch.device
        Where it is.
    precision : {"fp32", "bf16", "fp16"}
        What it computes in under autocast.

    Example
    -------
    >>> from speechbrain_rev.inference import FbankStatistics
    >>> running = RunningModel(
    ...     FbankStatistics(),
    ...     sample_rate=16000,
    ...     device=torch.device("cpu"),
    ...     precision="fp32",
    ... )
    >>> running.run([torch.randn(16000), torch.randn(8000)]).shape
    (2, 160)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sample_rate: int,
        device: torch.device,
        precision: Precision,
    ):
        self.model, self.sample_rate = model, sample_rate
        self.device, self.precision = device, precision

    def each(
        self,
        found: Sequence[Recording],
        channels: Channels,
        window: float | None,
        on_bad: OnBad | None = None,
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Embed recordings as ``SpeakerEmbedder.embed_each`` does.

        Yields
        ------
        index : int
            Position of a recording.
        embedding : numpy.ndarray, [embedding_dim], float32
        """
        channels = check_choice(channels)
        if window is not None:
            check_window(window, window, "window")
        mixed: list[str] = []
        silent: list[str] = []

        def refuse(index: int, error: Exception) -> None:
            if on_bad is None:
                raise error
            on_bad(index, error)
            progress.update()

        def read(index: int) -> Tensor | None:
            try:
                waveform, count = found[index].waveform(self.sample_rate, channels)
            except (ValueError, OSError) as error:
                refuse(index, error)
                return None
            if count > 1:
                mixed.append(f"{found[index].what} ({count})")
            return waveform

        long = set() if window is None else self._longer(found, window)
        short = [index for index in range(len(found)) if index not in long]
        with tqdm(
            total=len(found),
            desc="embedding",
            unit="utt",
            disable=len(found) < _MANY or not if_main_process(),
        ) as progress:
            for group in read_batches(short, read, self.device):
                indices, waveforms = zip(*group, strict=True)
                yield from zip(indices, self.run(waveforms), strict=True)
                progress.update(len(group))
            for index in sorted(long):
                one = found[index]
                try:
                    cut, count = self._cut(one, channels, window), one.header()[2]
                except _DivergedError:
                    raise
                except (ValueError, OSError) as error:
                    refuse(index, error)
                    continue
                if count > 1:
                    mixed.append(f"{one.what} ({count})")
                if out := len(cut.silent):
                    of_all = out + len(cut.embeddings)
                    silent.append(f"{one.what} ({out} of {of_all})")
                yield index, cut.mean()
                progress.update()
        done = "were averaged" if channels == "mean" else f"give channel {channels}"
        _tell(mixed, len(found), f"have several channels, which {done}")
        _tell(silent, len(found), "have silent windows, which do not count")

    def _longer(self, found: Sequence[Recording], window: float) -> set[int]:
        """Find the recordings that are longer than a window."""
        longer = set()
        for index, one in enumerate(found):
            try:
                samples, rate, _ = one.header()
            except (ValueError, OSError):
                # It is told of where it is read.
                continue
            if samples > window * rate:
                longer.add(index)
        return longer

    def _cut(self, one: Recording, channels: Channels, window: float | None) -> Windows:
        # Without a window no recording is longer than one.
        assert window is not None
        return self.windows(one, channels, float(window), float(window))

    def windows(
        self, one: Recording, channels: Channels, seconds: float, hop: float
    ) -> Windows:
        """Embed a recording as ``SpeakerEmbedder.windows`` does."""
        check_window(seconds, hop)
        channels = check_choice(channels)
        _, _, count = one.header()
        check_channels(count, channels, one.what)
        samples = round(seconds * self.sample_rate)
        cut = windows_of(
            one,
            self.sample_rate,
            channels,
            window_samples=samples,
            hop_samples=round(hop * self.sample_rate),
        )
        groups = WindowGroups(cut, batch_size(samples, self.device))
        rows = [self.run(group) for group in groups]
        return groups.result(rows, self.sample_rate, one.what)

    @torch.no_grad()
    def run(self, waveforms: Sequence[Tensor]) -> NDArray[np.float32]:
        """Embed waveforms [samples] at the model's sample rate, as one batch.

        Returns
        -------
        numpy.ndarray, [n, embedding_dim], float32

        Raises
        ------
        ValueError
            If the model gives NaN or infinity.
        """
        padded = pad_sequence(list(waveforms), batch_first=True).to(self.device)
        counts = [len(w) for w in waveforms]
        samples = None
        if min(counts) < max(counts):
            samples = torch.tensor(counts, device=self.device)
        with computing_in(self.precision, self.device):
            embeddings = self.model(padded, samples).squeeze(1).float().cpu()
        if not embeddings.isfinite().all():
            raise _DivergedError(
                "the encoder gave NaN or infinity for audio that is finite. "
                + _REMEDIES[self.precision]
            )
        return np.asarray(embeddings.numpy())


_DIVERGED = "Its weights are from a training that has diverged: use an earlier one."
_REMEDIES = {
    "fp32": _DIVERGED,
    "bf16": _DIVERGED,
    "fp16": "Numbers beyond 65,504 are none in fp16: give precision bf16 or fp32. If that "
    "does not help, its weights are from a training that has diverged.",
}


def _tell(which: Sequence[str], total: int, what: str) -> None:
    if which:
        logger.warning(
            "%d of %d utterances %s: %s",
            len(which),
            total,
            what,
            ", ".join(which[:5]) + (", ..." if len(which) > 5 else ""),
        )
