"""Where the memory of training goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from speechbrain_rev.plots.style import (
    COLOURS,
    finish,
    legend_above,
    new_figure,
    note,
    save,
    source_below,
)
from speechbrain_rev.sizes import GB, GIB, MB, MIB

_UNIT_BYTES = {"GiB": GIB, "GB": GB}
_SMALLER = {"GiB": ("MiB", MIB), "GB": ("MB", MB)}
# One colour for each part in every picture; what is no concern of ours is grey.
_PART_COLOURS = {
    "activations": COLOURS[0],
    "held": COLOURS[0],
    "working": COLOURS[4],
    "optimizer_states": COLOURS[1],
    "weights": COLOURS[2],
    "gradients": COLOURS[5],
    "others": "#B0B0B0",
}


@dataclass(frozen=True)
class PartsBar:
    """One bar.

    Attributes
    ----------
    group : str
        Bars of one group stand together under this head, an encoder's name.
    label : str
        What distinguishes the bar in its group.
    parts : mapping of str to float
        Bytes of "activations", or of those of them that are "held" and of those that
        are "working", of "optimizer_states", "weights", "gradients" and "others", or of
        some of these.
    """

    group: str
    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def memory_parts(
    bars: Sequence[PartsBar],
    path: str | Path,
    *,
    title: str,
    source: str,
    unit: Literal["GiB", "GB"] = "GiB",
) -> None:
    """Draw the parts of each bar in size, and beside it in percent of the bar.

    Parameters
    ----------
    bars : sequence of PartsBar
        In reading order.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    unit : {"GiB", "GB"}
        2**30 or 1e9 bytes.

    Example
    -------
    >>> import os, tempfile
    >>> stored = PartsBar("revnet57", "store", {"activations": 4e9, "weights": 4e7})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "parts.png")
    ...     memory_parts([stored], path, title="Memory", source="Counted.")
    """
    divisor = _UNIT_BYTES[unit]
    places = _places(bars)
    figure = new_figure(9.6, 1.7 + 0.3 * (places[-1] + 1))
    sizes, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for bar, place in zip(bars, places, strict=True):
        for axes, scale in ((sizes, 1 / divisor), (shares, 100 / bar.total)):
            done = 0.0
            for part, colour in _PART_COLOURS.items():
                size = bar.parts.get(part, 0.0) * scale
                axes.barh(place, size, 0.84, left=done, color=colour)
                done += size
        size = bar.total / divisor
        note(sizes, _size(bar.total, unit), (size, place), (4, -3), va="baseline")
    backwards = zip(bars[::-1], places[::-1], strict=True)
    for group, place in {bar.group: place for bar, place in backwards}.items():
        note(sizes, group, (0, place - 0.45), (1, 3), va="baseline", weight="bold")
    sizes.set_yticks(places, [bar.label for bar in bars])
    sizes.set_ylim(places[-1] + 0.6, -1.3)
    sizes.set_xlim(0, 1.2 * max(bar.total for bar in bars) / divisor)
    sizes.set_xlabel(unit)
    shares.set_xlim(0, 100)
    shares.set_xlabel("percent of the bar")
    for axes in (sizes, shares):
        finish(axes, grid="x")
        axes.tick_params(axis="y", length=0)
    used = [part for part in _PART_COLOURS if any(part in bar.parts for bar in bars)]
    for part in used:
        sizes.barh(0, 0, color=_PART_COLOURS[part], label=part.replace("_", " "))
    source_below(figure, source)
    legend_above(figure, sizes, title, columns=len(used))
    save(figure, path)


def _size(size_bytes: float, unit: str) -> str:
    """Write a size in a unit, or in the next smaller one below a tenth of it."""
    size = size_bytes / _UNIT_BYTES[unit]
    if size < 0.1:
        unit, smaller_bytes = _SMALLER[unit]
        size = size_bytes / smaller_bytes
    return f"{size:.3g} {unit}"


def _places(bars: Sequence[PartsBar]) -> list[float]:
    """Heights of bars: one apart, and space for a head above each group."""
    places: list[float] = []
    for number, bar in enumerate(bars):
        new = number > 0 and bar.group != bars[number - 1].group
        places.append(places[-1] + (1.9 if new else 1.0) if places else 0.0)
    return places
