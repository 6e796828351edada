"""Encoders by their parameters: memory, and beside it the largest batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speechbrain_rev.plots.labels import Place, write_names
from speechbrain_rev.plots.style import (
    FAINT,
    FAMILY_COLOURS,
    FAMILY_NAMES,
    INK,
    encoder_mark,
    finish,
    log_ticks,
    new_figure,
    save,
    source_below,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MILLION = 1e6
_MB = 1e6
_MARK_SIZE = 6.5
_WORDS = ("name", "family", "type")
_BAR: dict[str, Any] = {"lw": 1.6, "alpha": 0.35}
_CROSS: dict[str, Any] = {
    "ls": "",
    "marker": "x",
    "markersize": 5.0,
    "markeredgewidth": 1.1,
}


@dataclass(frozen=True)
class SizedEncoder:
    """One encoder in the picture; memory is bytes for each utterance.

    Attributes
    ----------
    name, family, type : str
        As in ``architectures``.
    parameters : int
        Its place on the horizontal axes.
    lightest_bytes, stored_bytes : float
        The least that one mode for all blocks takes, and what it takes to store all.
    planned_bytes : float or None
        What the plan takes; None if nothing fits.
    largest_batch : int or None
        On the card; None if nothing fits.
    published_bytes, published_batch : float and int, or None
        The same as published, where there are such figures.
    """

    name: str
    family: str
    type: str
    parameters: int
    lightest_bytes: float
    stored_bytes: float
    planned_bytes: float | None
    largest_batch: int | None
    published_bytes: float | None = None
    published_batch: int | None = None


_Height = Callable[[SizedEncoder], "float | None"]


@dataclass(frozen=True)
class _Panel:
    """What one of the axes shows of an encoder, in its units."""

    label: str
    mark: _Height
    cross: _Height
    bar: tuple[_Height, _Height]
    named_at: _Height


_MEMORY = _Panel(
    "memory of the encoder's step, MB per utterance",
    mark=lambda e: e.planned_bytes and e.planned_bytes / _MB,
    cross=lambda e: e.published_bytes and e.published_bytes / _MB,
    bar=(lambda e: e.lightest_bytes / _MB, lambda e: e.stored_bytes / _MB),
    named_at=lambda e: e.stored_bytes / _MB,
)
_BATCH = _Panel(
    "batch that fits, at least",
    mark=lambda e: e.largest_batch,
    cross=lambda e: e.published_batch,
    bar=(lambda e: e.published_batch, lambda e: e.largest_batch),
    named_at=lambda e: e.largest_batch,
)


def by_parameters(
    encoders: Sequence[SizedEncoder],
    path: str | Path,
    *,
    title: str,
    source: str,
    total_batch: int,
) -> None:
    """Draw memory and largest batch on logarithmic axes against parameters.

    Marks are the plan's memory and the largest batch, vanilla encoders hollow, reversible
    ones filled; crosses were published. Bars of memory lead from the lightest mode to all
    stored, bars of the batch from the published one to the one here.

    Parameters
    ----------
    encoders : sequence of SizedEncoder
        At least one.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    total_batch : int
        Gets a line: encoders above it need one card for such a batch.

    Raises
    ------
    ValueError
        If there is no encoder, one is there twice, or a figure is not above zero and
        finite.

    Example
    -------
    >>> import os, tempfile
    >>> words = {"title": "T", "source": "S", "total_batch": 256}
    >>> small = SizedEncoder("revnet57", "revnet", "II", 6102190, 1.1e7, 6.5e7, 6e7, 846)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     by_parameters([small], os.path.join(folder, "plan.png"), **words)
    """
    _check(encoders)
    figure = new_figure(14.0, 7.2)
    memory, batch = figure.subplots(1, 2)
    for axes, panel in ((memory, _MEMORY), (batch, _BATCH)):
        _draw(axes, panel, encoders)
    batch.axhline(total_batch, color=INK, lw=1.0, ls=(0, (6, 3)), zorder=1)
    batch.set_ylim(top=max(batch.get_ylim()[1], 1.2 * total_batch))
    for axes in (memory, batch):
        log_ticks(axes)
        finish(axes, grid="both")
    source_below(figure, source)
    _legend(figure, memory, title)
    _names(figure, memory, _MEMORY, encoders)
    _names(figure, batch, _BATCH, encoders)
    save(figure, path)


def _draw(axes: Axes, panel: _Panel, encoders: Sequence[SizedEncoder]) -> None:
    axes.set_yscale("log")
    axes.set_xlabel("parameters, millions")
    axes.set_ylabel(panel.label)
    for encoder in encoders:
        bar = _bar(panel, encoder)
        if bar is not None:
            colour = FAMILY_COLOURS[encoder.family]
            axes.plot(*zip(*bar, strict=True), color=colour, zorder=2, **_BAR)
    kinds = {(e.family, e.type) for e in encoders}
    order = list(FAMILY_NAMES)
    for family, kind in sorted(kinds, key=lambda k: (order.index(k[0]), k[1])):
        members = [e for e in encoders if (e.family, e.type) == (family, kind)]
        axes.plot(
            *_places(members, panel.mark),
            markersize=_MARK_SIZE,
            label=FAMILY_NAMES[family]
            + ("" if kind == "vanilla" else f", type {kind}"),
            zorder=4,
            **encoder_mark(family, kind),
        )
        colour = FAMILY_COLOURS[family]
        axes.plot(*_places(members, panel.cross), color=colour, zorder=3, **_CROSS)


def _places(
    encoders: Sequence[SizedEncoder], height: _Height
) -> tuple[list[float], list[float]]:
    """Give both coordinates of the encoders that have a figure."""
    found = [(e.parameters / _MILLION, y) for e in encoders if (y := height(e))]
    return [x for x, _ in found], [y for _, y in found]


def _bar(panel: _Panel, encoder: SizedEncoder) -> tuple[Place, Place] | None:
    """Give the ends of an encoder's bar, if it has both."""
    low, high = (end(encoder) for end in panel.bar)
    if low is None or high is None:
        return None
    x = encoder.parameters / _MILLION
    return (x, low), (x, high)


def _legend(figure: Figure, axes: Axes, title: str) -> None:
    axes.plot([], [], color=FAINT, label="published", **_CROSS)
    words = "memory: lightest mode to all stored; batch: published to here"
    axes.plot([], [], color=FAINT, label=words, **_BAR)
    legend = figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper left",
        ncols=4,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        title=title,
        title_fontsize=11.5,
        alignment="left",
    )
    legend.get_title().set_color(INK)


def _names(
    figure: Figure, axes: Axes, panel: _Panel, encoders: Sequence[SizedEncoder]
) -> None:
    places = {
        e.name: (e.parameters / _MILLION, y)
        for e in encoders
        if (y := panel.named_at(e))
    }
    if not places:
        return
    shown = [_places(encoders, height) for height in (panel.mark, panel.cross)]
    write_names(
        figure,
        axes,
        places,
        {e.name: FAMILY_COLOURS[e.family] for e in encoders},
        marks=[place for xy in shown for place in zip(*xy, strict=True)],
        mark_size=_MARK_SIZE,
        lines=[bar for e in encoders if (bar := _bar(panel, e)) is not None],
        font_size=7.5,
    )


def _check(encoders: Sequence[SizedEncoder]) -> None:
    if not encoders:
        raise ValueError("There is no encoder to draw; give at least one.")
    seen = set()
    for encoder in encoders:
        for name, figure in asdict(encoder).items():
            if name in _WORDS:
                continue
            if figure is not None and not 0 < figure < np.inf:
                raise ValueError(
                    f"{name} of {encoder.name!r} is {figure}; it must be above zero and "
                    "finite."
                )
        if encoder.name in seen:
            raise ValueError(f"{encoder.name!r} is there twice; leave one out.")
        seen.add(encoder.name)
