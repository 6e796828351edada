"""Encoders by memory and error rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from speechbrain_rev.plots.labels import write_names
from speechbrain_rev.plots.style import (
    FAINT,
    FAMILY_COLOURS,
    FAMILY_NAMES,
    INK,
    caption,
    encoder_mark,
    finish,
    log_ticks,
    new_figure,
    save,
)
from speechbrain_rev.sizes import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARK_SIZE = 7.0


@dataclass(frozen=True)
class EncoderPoint:
    """One encoder in the picture.

    Attributes
    ----------
    name, family, type : str
        As in ``architectures``.
    eer_percent : float
        Its place on the horizontal axis.
    peak_bytes : float
        Memory in its default mode, its place on the vertical axis.
    counterpart : str or None
        The vanilla encoder from which an arrow leads here, if that is drawn.
    recompute_bytes : float or None
        Memory of a vanilla encoder when its blocks are recomputed.
    """

    name: str
    family: str
    type: str
    eer_percent: float
    peak_bytes: float
    counterpart: str | None = None
    recompute_bytes: float | None = None


def encoder_map(
    points: Sequence[EncoderPoint],
    path: str | Path,
    *,
    title: str,
    eer_label: str,
    memory_label: str,
    source: str,
    cards: Mapping[int, int],
) -> None:
    """Draw memory on a logarithmic axis against error rate, with the cards' limits.

    Vanilla encoders are hollow, reversible ones filled; an arrow leads from each vanilla
    encoder to its counterparts, a cross marks it with its blocks recomputed.

    Parameters
    ----------
    points : sequence of EncoderPoint
        The encoders.
    path : str or pathlib.Path
        The PNG file to write.
    title, eer_label, memory_label, source : str
        What is shown, both axes and where the figures are from. The memory is in GiB.
    cards : mapping of int to int
        Bytes of the cards that get a line, and how many of them are kept free, which is
        shaded.

    Raises
    ------
    ValueError
        If there is no encoder, one is there twice, or a figure is not above zero and
        finite.

    Example
    -------
    >>> import os, tempfile
    >>> points = [
    ...     EncoderPoint("resnet34", "resnet", "vanilla", 1.86, 8e9, None, 3e9),
    ...     EncoderPoint("revnet57", "revnet", "II", 1.83, 3e9, "resnet34"),
    ... ]
    >>> words = {"title": "T", "eer_label": "EER", "memory_label": "GiB", "source": "S", "cards": {}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     encoder_map(points, os.path.join(folder, "encoders.png"), **words)
    """
    _check(points)
    figure = new_figure(10.0, 6.6)
    axes = figure.add_subplot()
    _limits(axes, points, list(cards))
    for size, kept_free in cards.items():
        gib = size / GIB
        axes.axhspan((size - kept_free) / GIB, gib, color=FAINT, alpha=0.12, lw=0)
        axes.axhline(gib, color=INK, lw=1.0, ls=(0, (6, 3)), zorder=1)
        axes.annotate(
            f"{gib:g} GiB card",
            (1.0, gib),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    _arrows(axes, points)
    _marks(axes, points)
    axes.set_xlabel(eer_label)
    axes.set_ylabel(memory_label)
    finish(axes, grid="both")
    caption(figure, axes, title, source, columns=4)
    _names(figure, axes, points, list(cards))
    save(figure, path)


def _check(points: Sequence[EncoderPoint]) -> None:
    if not points:
        raise ValueError("There is no encoder to draw; give at least one.")
    seen = set()
    for point in points:
        figures = [point.eer_percent, point.peak_bytes, point.recompute_bytes]
        if not all(0 < figure < np.inf for figure in figures if figure is not None):
            raise ValueError(
                f"{point.name!r} has an error rate of {point.eer_percent} % and "
                f"{point.peak_bytes} bytes, recomputed {point.recompute_bytes}; each "
                "must be above zero and finite."
            )
        if point.name in seen:
            raise ValueError(f"{point.name!r} is there twice; leave one out.")
        seen.add(point.name)


def _limits(
    axes: Axes, points: Sequence[EncoderPoint], card_bytes: Sequence[int]
) -> None:
    sizes = [size for p in points for size in (p.peak_bytes, p.recompute_bytes) if size]
    sizes += card_bytes
    axes.set_yscale("log")
    axes.set_ylim(min(sizes) / GIB / 1.4, max(sizes) / GIB * 1.4)
    log_ticks(axes)
    rates = [point.eer_percent for point in points]
    margin = 0.1 * (max(rates) - min(rates)) or 0.1 * rates[0]
    axes.set_xlim(min(rates) - margin, max(rates) + margin)


def _arrows(axes: Axes, points: Sequence[EncoderPoint]) -> None:
    shown = {point.name: point for point in points}
    for point in points:
        start = shown.get(point.counterpart or "")
        if start is None:
            continue
        axes.annotate(
            "",
            (point.eer_percent, point.peak_bytes / GIB),
            (start.eer_percent, start.peak_bytes / GIB),
            arrowprops={
                "arrowstyle": "-|>,head_width=0.16,head_length=0.32",
                "color": FAMILY_COLOURS[point.family],
                "alpha": 0.45,
                "lw": 0.9,
                "shrinkA": _MARK_SIZE / 2,
                "shrinkB": _MARK_SIZE / 2 + 0.5,
            },
            zorder=2,
        )


def _marks(axes: Axes, points: Sequence[EncoderPoint]) -> None:
    kinds = dict.fromkeys((point.family, point.type) for point in points)
    for family, kind in kinds:
        members = [p for p in points if (p.family, p.type) == (family, kind)]
        doing = "stored" if kind == "vanilla" else f"type {kind}"
        axes.plot(
            [point.eer_percent for point in members],
            [point.peak_bytes / GIB for point in members],
            markersize=_MARK_SIZE,
            label=f"{FAMILY_NAMES[family]}, {doing}",
            zorder=4,
            **encoder_mark(family, kind),
        )
        rivals = [p for p in members if p.recompute_bytes is not None]
        if rivals:
            axes.plot(
                [point.eer_percent for point in rivals],
                [(point.recompute_bytes or 0) / GIB for point in rivals],
                ls="",
                marker="x",
                markersize=_MARK_SIZE - 1,
                markeredgecolor=FAMILY_COLOURS[family],
                markeredgewidth=1.2,
                label=f"{FAMILY_NAMES[family]}, recomputed",
                zorder=3,
            )


def _names(
    figure: Figure,
    axes: Axes,
    points: Sequence[EncoderPoint],
    card_bytes: Sequence[int],
) -> None:
    places = {p.name: (p.eer_percent, p.peak_bytes / GIB) for p in points}
    crosses = [
        (p.eer_percent, p.recompute_bytes / GIB) for p in points if p.recompute_bytes
    ]
    arrows = [
        (places[p.counterpart], places[p.name])
        for p in points
        if p.counterpart in places
    ]
    left, right = axes.get_xlim()
    cards = [((left, size / GIB), (right, size / GIB)) for size in card_bytes]
    write_names(
        figure,
        axes,
        places,
        {p.name: FAMILY_COLOURS[p.family] for p in points},
        marks=[*places.values(), *crosses],
        mark_size=_MARK_SIZE,
        lines=[*arrows, *cards],
    )
