"""Committed counts of training steps: their peaks and their work, at any batch and length.

Standard library only: nothing is computed, so that they are there at once.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from speechbrain_rev.devices import Work
from speechbrain_rev.modes import Mode

#: Lengths that were counted: utterances of 2 s, and of 6 s for large-margin training.
FRAMES = (200, 600)

#: Batches that were counted. Utterances of a batch of one have other strides, which
#: saves copies, so that one is no point of the line through the others.
BATCHES = (1, 2, 4, 16, 64, 128, 1024, 2048)

# The last stage has a frame for so many of an utterance.
_STRIDE = 8
# Where that leaves a rest, transitions of type II pad: a step takes at most so much more.
_PADDED, _PADDED_RECONSTRUCTED = Fraction(1001, 1000), Fraction(108, 100)

_COUNTS = Path(__file__).with_name("counts_meta.json")


@dataclass(frozen=True)
class Peak:
    """The peak of a training step as a function of the batch.

    What is alive at one moment of a step is a constant and so much for each utterance;
    the peak is the largest of these lines, hence convex. Between two batches that were
    counted the chord is therefore never below it; beyond the last the line of the last
    two is taken, which is where gradients of parameters no longer matter.

    Attributes
    ----------
    batches : sequence of int
        Batches that were counted, ascending, the first two being 1 and 2.
    peak_bytes : sequence of int
        Their peaks.

    Examples
    --------
    >>> peak = Peak((1, 2, 4), (90, 100, 300))
    >>> peak(1), peak(3), peak(6), peak.bytes_per_utterance
    (90, 200, 500, 100)
    """

    batches: Sequence[int]
    peak_bytes: Sequence[int]

    def __call__(self, batch: int) -> int:
        """Bytes at a batch of so many utterances, rounded up."""
        if batch == self.batches[0]:
            return self.peak_bytes[0]
        right = min(bisect.bisect_left(self.batches, batch), len(self.batches) - 1)
        few, many = self.batches[right - 1], self.batches[right]
        low, high = self.peak_bytes[right - 1], self.peak_bytes[right]
        return low - (low - high) * (batch - few) // (many - few)

    @property
    def bytes_per_utterance(self) -> int:
        """What one more utterance adds to a large batch."""
        few, many = self.batches[-2:]
        return (self.peak_bytes[-1] - self.peak_bytes[-2]) // (many - few)


@functools.cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_COUNTS.read_text(encoding="utf-8"))
    return document


@functools.cache
def counted_peaks() -> dict[tuple[str, str, int], Peak]:
    """Read the committed counts.

    Returns
    -------
    dict of (encoder, mode, frames) to Peak
        For the encoders that were counted, the modes that each has, and 200 and 600
        frames.

    Examples
    --------
    >>> counted_peaks()["revnet46", "reconstruct", 200].bytes_per_utterance < 30e6
    True
    """
    return {
        (row["encoder"], row["mode"], row["frames"]): Peak(
            tuple(int(batch) for batch in row["peak bytes"]),
            tuple(row["peak bytes"].values()),
        )
        for row in _document()["rows"]
    }


@dataclass(frozen=True)
class StepWork:
    """What a training step does, as a function of the batch.

    Attributes
    ----------
    flops_per_utterance : int
        Of convolutions and matrix products.
    moved_bytes_per_utterance, moved_bytes : int
        Read and written: for an utterance, and for weights and gradients of any batch.
    operations : int
        How many there are, whatever the batch.

    Examples
    --------
    >>> StepWork(1000, 100, 50, 8)(4)
    Work(flops=4000, moved_bytes=450, operations=8, host_bytes=0)
    """

    flops_per_utterance: int
    moved_bytes_per_utterance: int
    moved_bytes: int
    operations: int

    def __call__(self, batch: int) -> Work:
        """Give what a step of so many utterances does."""
        return Work(
            batch * self.flops_per_utterance,
            self.moved_bytes + batch * self.moved_bytes_per_utterance,
            self.operations,
        )


@functools.cache
def counted_work() -> dict[tuple[str, str, int], StepWork]:
    """Read the committed counts of operations.

    Returns
    -------
    dict of (encoder, mode, frames) to StepWork
        Of the same steps as :func:`counted_peaks`. Below 32 utterances a step may do
        slightly less.

    Examples
    --------
    >>> stored, again = (counted_work()["resnet34", m, 200] for m in ("store", "recompute"))
    >>> round(again.flops_per_utterance / stored.flops_per_utterance, 1)
    1.3
    """
    return {
        (row["encoder"], row["mode"], row["frames"]): StepWork(**row["work"])
        for row in _document()["rows"]
    }


def work_at(name: str, mode: str, frames: int) -> StepWork:
    """Give the work of a step of utterances of any length, in proportion to a counted one.

    Examples
    --------
    >>> work_at("resnet34", "store", 400)(1).flops // work_at("resnet34", "store", 200)(1).flops
    2
    """
    length, times = _counted_length(frames)
    work = counted_work()[name, mode, length]
    return dataclasses.replace(
        work,
        flops_per_utterance=math.ceil(times * work.flops_per_utterance),
        moved_bytes_per_utterance=math.ceil(times * work.moved_bytes_per_utterance),
    )


def counted_with() -> dict[str, str]:
    """Give the date and the torch of the committed counts.

    Examples
    --------
    >>> sorted(counted_with())
    ['date', 'torch']
    """
    environment = _document()["environment"]
    return {key: environment[key] for key in ("date", "torch")}


def _counted_length(frames: int) -> tuple[int, Fraction]:
    """Give the counted length below one, or the shortest, and how many times as long it is."""
    whole = _STRIDE * -(-frames // _STRIDE)
    counted = max((each for each in FRAMES if each <= whole), default=min(FRAMES))
    return counted, Fraction(whole, counted)


@functools.cache
def peak_at(name: str, mode: str, frames: int) -> Peak | None:
    """Give the peak of a step of utterances of any length, or bound it from above.

    Parameters
    ----------
    name, mode : str
        The encoder, and what its blocks keep.
    frames : int
        Of each utterance.

    Returns
    -------
    Peak or None
        Of a length between or beyond ``FRAMES`` that of the counted one below, in
        proportion: some of a step's memory grows with its frames, and none faster. Below
        the shortest, that of the shortest. None if the encoder has no such mode, or was
        not counted.

    Examples
    --------
    >>> longer, counted = (peak_at("resnet34", "store", f) for f in (400, 200))
    >>> longer(128) / counted(128)
    2.0
    """
    length, times = _counted_length(frames)
    peak = counted_peaks().get((name, mode, length))
    if peak is None:
        return None
    times = max(times, Fraction(1))
    if frames % _STRIDE:
        reconstructs = mode == Mode.RECONSTRUCT.value
        times *= _PADDED_RECONSTRUCTED if reconstructs else _PADDED
    sizes = tuple(math.ceil(times * size) for size in peak.peak_bytes)
    return Peak(peak.batches, sizes)
