"""Audio files in batches of similar length, read while the model is at work."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike

import torch
from torch import Tensor

from speechbrain_rev.inference.audio import read_waveform

logger = logging.getLogger(__name__)

# Samples of a batch with its padding. A CPU gains next to nothing from batches, and takes
# up to 2.6 times as long where a tensor in the encoder is over 32 MB, which the C library
# takes from the system anew each time: a DF encoder has such after 5 s.
_BATCH_SAMPLES = {"cuda": 1_600_000, "cpu": 80_000}
_BATCH = 16
# The shortest of a batch has this part of the longest, or more.
_ALIKE = 0.75
# The longer the read-ahead, the more alike are neighbours in length: 80 MB, twice.
_WAITING_SAMPLES = 20_000_000


def read_batches(
    paths: Sequence[str | PathLike[str]], sample_rate: int, device: torch.device
) -> Iterator[list[tuple[int, Tensor]]]:
    """Read files, in a thread of its own, and group those of similar length.

    Parameters
    ----------
    paths : sequence of str or path-like
        Audio files of any sample rate.
    sample_rate : int
        Hertz of what is given.
    device : torch.device
        Where the batches go; it decides how large they are.

    Yields
    ------
    list of tuple of int and torch.Tensor, [samples]
        Positions in ``paths`` and waveforms, the longest first.

    Raises
    ------
    ValueError
        If a file cannot be read, once all before it have been given; see
        ``read_waveform``.

    Example
    -------
    >>> import soundfile
    >>> paths = [getfixture("tmp_path") / f"{n}.wav" for n in (8000, 9000)]
    >>> for samples, path in zip((8000, 9000), paths):
    ...     soundfile.write(path, torch.randn(samples).numpy() / 10, 16000)
    >>> [batch] = read_batches(paths, 16000, torch.device("cpu"))
    >>> [(index, len(waveform)) for index, waveform in batch]
    [(1, 9000), (0, 8000)]
    """
    most = _BATCH_SAMPLES[device.type]
    windows = _windows(paths, sample_rate)
    with ThreadPoolExecutor(1, "reading") as thread:
        ahead = thread.submit(next, windows, None)
        while (window := ahead.result()) is not None:
            ahead = thread.submit(next, windows, None)
            yield from _grouped(window, most)


def _windows(
    paths: Sequence[str | PathLike[str]], sample_rate: int
) -> Iterator[list[tuple[int, Tensor]]]:
    """Read files until there is enough to be sorted by length."""
    waiting: list[tuple[int, Tensor]] = []
    samples_waiting = 0
    mixed: list[str] = []
    for index, path in enumerate(paths):
        try:
            samples, channels = read_waveform(path, sample_rate)
        except (ValueError, OSError):
            yield waiting
            raise
        if channels > 1:
            mixed.append(f"{path} ({channels})")
        waiting.append((index, samples))
        samples_waiting += len(samples)
        if samples_waiting > _WAITING_SAMPLES:
            yield waiting
            waiting, samples_waiting = [], 0
    if mixed:
        logger.warning(
            "%d of %d files have several channels, which were averaged: %s",
            len(mixed),
            len(paths),
            ", ".join(mixed[:5]) + (", ..." if len(mixed) > 5 else ""),
        )
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
