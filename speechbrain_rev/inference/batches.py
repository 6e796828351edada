"""Utterances in batches of similar length, read while the model is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

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
