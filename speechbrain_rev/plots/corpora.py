"""How long the utterances of a corpus are, and how many each speaker has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechbrain_rev.plots.style import (
    COLOURS,
    finish,
    new_figure,
    save,
    title_and_source,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = 30


def corpus_histograms(
    seconds: Sequence[float],
    utterances: Sequence[int],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw histograms of the lengths of utterances, and of how many each speaker has.

    Parameters
    ----------
    seconds : sequence of float
        The length of each utterance.
    utterances : sequence of int
        How many each speaker has.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.

    Example
    -------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "corpus.png")
    ...     corpus_histograms([2.5, 4.0, 8.1], [1, 2], path, title="T", source="S")
    """
    figure = new_figure(7.2, 3.2)
    left, right = figure.subplots(1, 2)
    _draw(left, seconds, "seconds of an utterance", "utterances", COLOURS[0])
    _draw(right, utterances, "utterances of a speaker", "speakers", COLOURS[1])
    right.locator_params(axis="x", integer=True)
    title_and_source(figure, title, source)
    save(figure, path)


def _draw(
    axes: Axes, values: Sequence[float], what: str, counted: str, colour: str
) -> None:
    axes.hist(values, bins=_bins(values), color=colour)
    axes.set_xlabel(what)
    axes.set_ylabel(counted)
    # Of few values there are no halves.
    axes.locator_params(axis="y", integer=True)
    axes.set_xlim(left=0)
    finish(axes, grid="both")


def _bins(values: Sequence[float]) -> list[float]:
    """Give edges: around whole numbers as far as there are few, else of equal width."""
    low, high = min(values), max(values)
    whole = all(float(value).is_integer() for value in values)
    if whole:
        step = -(-int(high - low + 1) // _BARS)
        count = int(high - low) // step + 1
        return [low - 0.5 + step * number for number in range(count + 1)]
    width = max(high - low, 1e-3) / _BARS
    return [low + width * number for number in range(_BARS)] + [max(high, low + 1e-3)]
