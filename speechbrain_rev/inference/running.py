"""A model at work: recordings in, embeddings out, in batches or in windows."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from speechbrain_rev.audio.checks import (
    MAXIMUM_SECONDS,
    MINIMUM_SECONDS,
    MIX,
    Channel,
    as_channel,
    is_silent,
    silence,
)
from speechbrain_rev.audio.resampling import rate_ratio, resample_blocks
from speechbrain_rev.bars import progress_bar
from speechbrain_rev.inference.audio import Recording
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
# Lengths that batches may have, from one length to its double; elsewhere any. With 32,
# utterances as in VoxCeleb make 60 times fewer shapes, of 1 % more samples.
_LENGTHS_PER_OCTAVE = {"cuda": 32}


def batch_size(samples: int, device: torch.device) -> int:
    """Give how many utterances of so many samples make a batch.

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


class RepeatedShapes:
    """Makes the batches of a pass without gradients, in shapes that ran before.

    cuDNN chooses algorithms, and the memory they work in, by shape: a last batch of fewer
    rows may take several times the memory of all before it. A batch is therefore filled to
    the rows of an earlier one of its length, with copies of its last utterance. It is never
    filled to a size that did not run in the pass. On a GPU lengths are rounded up, by 1 % on
    average and 3 % at most, so that they repeat. Callers drop the rows of copies.

    Parameters
    ----------
    device : torch.device
        Where the batches run.

    Example
    -------
    >>> shapes = RepeatedShapes(torch.device("cpu"))
    >>> [shapes.batch([torch.ones(9)] * rows)[0].shape for rows in (3, 1, 4)]
    [torch.Size([3, 9]), torch.Size([3, 9]), torch.Size([4, 9])]
    """

    def __init__(self, device: torch.device) -> None:
        self._lengths_per_octave = _LENGTHS_PER_OCTAVE.get(device.type)
        self._rows: dict[int, set[int]] = {}

    def batch(self, utterances: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Put utterances into one tensor, padded with zeros, and copies after them.

        Parameters
        ----------
        utterances : sequence of torch.Tensor, [length, ...]
            Waveforms or features, at least one.

        Returns
        -------
        batch : torch.Tensor, [rows, longest, ...]
            As many rows as utterances, or more.
        own : torch.Tensor, [rows], or None
            How much of each row's length is its own; None if none is padded.
        """
        lengths = [len(one) for one in utterances]
        length = self._rounded(max(lengths))
        ran = self._rows.setdefault(length, set())
        rows = min((n for n in ran if n >= len(lengths)), default=len(lengths))
        ran.add(rows)
        copies = rows - len(lengths)
        batch = pad_sequence(
            [*utterances, *[utterances[-1]] * copies], batch_first=True
        )
        lengths += [lengths[-1]] * copies
        if min(lengths) == length:
            return batch, None
        rest = batch.new_zeros(rows, length - batch.shape[1], *batch.shape[2:])
        own = torch.tensor(lengths, device=batch.device, dtype=torch.int64)
        return torch.cat([batch, rest], dim=1), own

    def _rounded(self, length: int) -> int:
        if self._lengths_per_octave is None:
            return length
        octave = 1 << (length.bit_length() - 1)
        step = max(1, octave // self._lengths_per_octave)
        return -(-length // step) * step


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
            a mean of those can be subtracted.
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


def cut(
    blocks: Iterable[Tensor], window: int, hop: int
) -> Iterator[tuple[int, Tensor]]:
    """Cut what comes in blocks [samples] into windows, as ``Windows`` says.

    Example
    -------
    >>> [(s, len(w)) for s, w in cut([torch.ones(5), torch.ones(4)], 4, 2)]
    [(0, 4), (2, 4), (4, 4), (5, 4)]
    """
    held, first, start = torch.empty(0, dtype=torch.float32), 0, 0
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
        recordings: Sequence[Recording],
        channel: Channel,
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
        channel = as_channel(channel)
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
                waveform, count = recordings[index].waveform(self.sample_rate, channel)
            except (ValueError, OSError) as error:
                refuse(index, error)
                return None
            if count > 1:
                mixed.append(f"{recordings[index].what} ({count})")
            return waveform

        length = math.inf if window is None else float(window)
        long = _longer(recordings, length)
        short = [index for index in range(len(recordings)) if index not in long]
        bar = progress_bar(
            "embedding",
            unit="utt",
            total=len(recordings),
            leave=True,
            off=len(recordings) < _MANY,
        )
        with bar as progress:
            shapes = RepeatedShapes(self.device)
            for group in read_batches(short, read, self.device):
                indices, waveforms = zip(*group, strict=True)
                yield from zip(indices, self.run(waveforms, shapes), strict=True)
                progress.update(len(group))
            for index in sorted(long):
                one = recordings[index]
                try:
                    windows = self.windows(one, channel, length, length)
                    count = one.info().channels
                except _DivergedError:
                    raise
                except (ValueError, OSError) as error:
                    refuse(index, error)
                    continue
                if count > 1:
                    mixed.append(f"{one.what} ({count})")
                if out := len(windows.silent):
                    of_all = out + len(windows.embeddings)
                    silent.append(f"{one.what} ({out} of {of_all})")
                yield index, windows.mean()
                progress.update()
        done = "were averaged" if channel == MIX else f"give channel {channel}"
        _warn(mixed, len(recordings), f"have several channels, which {done}")
        _warn(silent, len(recordings), "have silent windows, which do not count")

    def windows(
        self, one: Recording, channel: Channel, seconds: float, hop: float
    ) -> Windows:
        """Embed a recording as ``SpeakerEmbedder.windows`` does."""
        check_window(seconds, hop)
        channel, size = as_channel(channel), round(seconds * self.sample_rate)
        windows = cut(
            self._resampled(one, channel), size, round(hop * self.sample_rate)
        )
        spoken: list[tuple[int, int]] = []
        silent: list[tuple[int, int]] = []

        def heard() -> Iterator[Tensor]:
            for start, window in windows:
                place = start, start + len(window)
                if is_silent(window):
                    silent.append(place)
                else:
                    spoken.append(place)
                    yield window

        rows, voices = [], heard()
        shapes = RepeatedShapes(self.device)
        while group := list(islice(voices, batch_size(size, self.device))):
            rows.append(self.run(group, shapes))
        if not rows:
            raise ValueError(silence(one.what))
        starts, ends = np.array(spoken, dtype=np.float64).T / self.sample_rate
        left_out = np.array(silent, dtype=np.float64).reshape(-1, 2) / self.sample_rate
        return Windows(starts, ends, np.concatenate(rows), left_out)

    def _resampled(self, one: Recording, channel: Channel) -> Iterator[Tensor]:
        """Read a recording of any length in blocks at the model's rate."""
        info = one.checked_info(channel, most=math.inf)
        ratio = rate_ratio(info.sample_rate, self.sample_rate)
        return resample_blocks(one.blocks(info, channel, most=math.inf), ratio)

    @torch.no_grad()
    def run(
        self, waveforms: Sequence[Tensor], shapes: RepeatedShapes | None = None
    ) -> NDArray[np.float32]:
        """Embed waveforms [samples] at the model's sample rate, as one batch.

        Parameters
        ----------
        waveforms : sequence of torch.Tensor, [samples]
            At least one.
        shapes : RepeatedShapes, optional
            Of the pass that the batch is of; without it, the batch is alone.

        Returns
        -------
        numpy.ndarray, [n, embedding_dim], float32

        Raises
        ------
        ValueError
            If the model gives NaN or infinity.
        """
        padded, samples = (shapes or RepeatedShapes(self.device)).batch(waveforms)
        if samples is not None:
            samples = samples.to(self.device)
        with computing_in(self.precision, self.device):
            embeddings = self.model(padded.to(self.device), samples)
        embeddings = embeddings[: len(waveforms)].squeeze(1).float().cpu()
        if not embeddings.isfinite().all():
            raise _DivergedError(
                "the encoder gave NaN or infinity for audio that is finite. "
                + _REMEDIES[self.precision]
            )
        return np.asarray(embeddings.numpy())


def _longer(recordings: Sequence[Recording], seconds: float) -> set[int]:
    """Find the recordings that are longer than a window."""
    longer = set()
    for index, one in enumerate(recordings):
        # What cannot be read is an error where it is read.
        with contextlib.suppress(ValueError, OSError):
            info = one.info()
            if info.samples > seconds * info.sample_rate:
                longer.add(index)
    return longer


_DIVERGED = "Its training has diverged: use an earlier checkpoint."
_REMEDIES = {
    "fp32": _DIVERGED,
    "bf16": _DIVERGED,
    "fp16": "Numbers beyond 65,504 are none in fp16: give precision bf16 or fp32. If that "
    "does not help, its training has diverged.",
}


def _warn(which: Sequence[str], total: int, what: str) -> None:
    if which:
        logger.warning(
            "%d of %d utterances %s: %s",
            len(which),
            total,
            what,
            ", ".join(which[:5]) + (", ..." if len(which) > 5 else ""),
        )
