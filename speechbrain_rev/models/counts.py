"""The committed counts: bytes at the peak of a training step, by encoder and mode.

They were counted on meta tensors by ``models.counting`` and written by
``python -m tests.benchmarks --device meta --results speechbrain_rev/models``. Reading
them takes no torch.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("counts_meta.json")

#: Lengths that were counted: utterances of 2 s, and of 6 s for large-margin training.
FRAMES = (200, 600)
SECONDS = {200: 2, 600: 6}

#: Batches that were counted. Utterances of a batch of one have other strides, which
#: saves copies, so that one is no point of the line through the others.
BATCHES = (1, 2, 4, 16, 64, 128, 256)


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
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


@functools.cache
def counted_peaks() -> dict[tuple[str, str, int], Peak]:
    """Read the committed counts.

    Returns
    -------
    dict of (encoder, mode, frames) to Peak
        For all encoders, the modes that each has, and 200 and 600 frames.

    Examples
    --------
    >>> counted_peaks()["revnet57", "reconstruct", 200].bytes_per_utterance < 30e6
    True
    """
    return {
        (row["encoder"], row["mode"], row["frames"]): Peak(
            tuple(int(batch) for batch in row["peak bytes"]),
            tuple(row["peak bytes"].values()),
        )
        for row in _document()["rows"]
    }


def counted_with() -> dict[str, str]:
    """Say when and with which torch the counts were made.

    Examples
    --------
    >>> sorted(counted_with())
    ['date', 'torch']
    """
    environment = _document()["environment"]
    return {key: environment[key] for key in ("date", "torch")}
