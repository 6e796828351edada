"""Encoders by memory and error rate, and by parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechbrain_rev.plots.style import (
    COLOURS,
    FAINT,
    INK,
    caption,
    check_some,
    finish,
    legend_above,
    log_ticks,
    new_figure,
    note,
    save,
    source_below,
    write_names,
)
from speechbrain_rev.sizes import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A family and its reversible counterpart share a colour, types have shapes of their own.
FAMILY_COLOURS = {
    "resnet": COLOURS[0],
    "revnet": COLOURS[0],
    "df_resnet": COLOURS[1],
    "df_revnet": COLOURS[1],
}
FAMILY_NAMES = {
    "resnet": "ResNet",
    "revnet": "RevNet",
    "df_resnet": "DF-ResNet",
    "df_revnet": "DF-RevNet",
}
_TYPE_SHAPES = {"vanilla": "o", "I": "^", "II": "s"}
_MILLION = 1e6
_MARK_SIZE = 7.0
_BAR: dict[str, Any] = {"lw": 1.6, "alpha": 0.35}
_CROSS: dict[str, Any] = {
    "ls": "",
    "marker": "x",
    "markersize": 6.0,
    "markeredgewidth": 1.2,
}


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
    """Draw memory on a logarithmic axis against error rate, with the limits of GPUs.

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
        Bytes of the GPUs that get a line, and how many of them are kept free, which is
        shaded.

    Raises
    ------
    ValueError
        If there is no encoder.

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
    check_some(points, "encoder")
    figure = new_figure(10.0, 6.6)
    axes = figure.add_subplot()
    _limits(axes, points, list(cards))
    for size, kept_free in cards.items():
        gib = size / GIB
        axes.axhspan((size - kept_free) / GIB, gib, color=FAINT, alpha=0.12, lw=0)
        axes.axhline(gib, color=INK, lw=1.0, ls=(0, (6, 3)), zorder=1)
        place = ("axes fraction", "data")
        note(axes, f"{gib:g} GiB GPU", (1.0, gib), (5, 0), xycoords=place)
    _arrows(axes, points)
    _marks(axes, points)
    axes.set_xlabel(eer_label)
    axes.set_ylabel(memory_label)
    finish(axes, grid="both")
    caption(figure, axes, title, source, columns=4)
    write_names(
        figure,
        axes,
        {p.name: (p.eer_percent, p.peak_bytes / GIB) for p in points},
        {p.name: FAMILY_COLOURS[p.family] for p in points},
        marks=[(p.eer_percent, m / GIB) for p in points if (m := p.recompute_bytes)],
        mark_size=_MARK_SIZE,
        # The arrows come from above.
        upwards=False,
    )
    save(figure, path)


def _limits(
    axes: Axes, points: Sequence[EncoderPoint], card_bytes: Sequence[int]
) -> None:
    sizes = [size for p in points for size in (p.peak_bytes, p.recompute_bytes) if size]
    sizes += card_bytes
    axes.set_yscale("log")
    # Names stand below the least ones, and to the right of the last ones.
    axes.set_ylim(min(sizes) / GIB / 2.5, max(sizes) / GIB * 1.4)
    log_ticks(axes)
    rates = [point.eer_percent for point in points]
    margin = 0.1 * (max(rates) - min(rates)) or 0.1 * rates[0]
    axes.set_xlim(min(rates) - margin / 2, max(rates) + 1.2 * margin)


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
            label=f"{FAMILY_NAMES[family]}, {doing}",
            **_mark(family, kind),
        )
        rivals = [(p.eer_percent, m / GIB) for p in members if (m := p.recompute_bytes)]
        if rivals:
            axes.plot(
                *zip(*rivals, strict=True),
                color=FAMILY_COLOURS[family],
                label=f"{FAMILY_NAMES[family]}, recomputed",
                zorder=3,
                **_CROSS,
            )


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
        On the GPU; None if nothing fits.
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
    "memory of the encoder's step, MiB per utterance",
    mark=lambda e: e.planned_bytes and e.planned_bytes / MIB,
    cross=lambda e: e.published_bytes and e.published_bytes / MIB,
    bar=(lambda e: e.lightest_bytes / MIB, lambda e: e.stored_bytes / MIB),
    named_at=lambda e: e.stored_bytes / MIB,
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
        Gets a line: encoders above it need one GPU for such a batch.

    Raises
    ------
    ValueError
        If there is no encoder.

    Example
    -------
    >>> import os, tempfile
    >>> words = {"title": "T", "source": "S", "total_batch": 256}
    >>> small = SizedEncoder("revnet57", "revnet", "II", 6102190, 1.1e7, 6.5e7, 6e7, 846)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     by_parameters([small], os.path.join(folder, "plan.png"), **words)
    """
    check_some(encoders, "encoder")
    figure = new_figure(14.0, 7.2)
    memory, batch = figure.subplots(1, 2)
    for axes, panel in ((memory, _MEMORY), (batch, _BATCH)):
        _draw(axes, panel, encoders)
    batch.axhline(total_batch, color=INK, lw=1.0, ls=(0, (6, 3)), zorder=1)
    batch.set_ylim(top=max(batch.get_ylim()[1], 1.2 * total_batch))
    for axes in (memory, batch):
        # Names stand to the right of the last ones, and above the highest ones.
        left, right = axes.get_xlim()
        axes.set_xlim(right=right + 0.08 * (right - left))
        axes.set_ylim(top=1.4 * axes.get_ylim()[1])
        log_ticks(axes)
        finish(axes, grid="both")
    source_below(figure, source)
    memory.plot([], [], color=FAINT, label="published", **_CROSS)
    words = "memory: lightest mode to all stored; batch: published to here"
    memory.plot([], [], color=FAINT, label=words, **_BAR)
    legend_above(figure, memory, title, columns=4)
    _name_sized(figure, memory, _MEMORY, encoders)
    _name_sized(figure, batch, _BATCH, encoders)
    save(figure, path)


def _draw(axes: Axes, panel: _Panel, encoders: Sequence[SizedEncoder]) -> None:
    axes.set_yscale("log")
    axes.set_xlabel("parameters, millions")
    axes.set_ylabel(panel.label)
    for encoder in encoders:
        low, high = (end(encoder) for end in panel.bar)
        if low is not None and high is not None:
            x, colour = encoder.parameters / _MILLION, FAMILY_COLOURS[encoder.family]
            axes.plot([x, x], [low, high], color=colour, zorder=2, **_BAR)
    kinds = {(e.family, e.type) for e in encoders}
    order = list(FAMILY_NAMES)
    for family, kind in sorted(kinds, key=lambda k: (order.index(k[0]), k[1])):
        members = [e for e in encoders if (e.family, e.type) == (family, kind)]
        axes.plot(
            *_places(members, panel.mark),
            label=FAMILY_NAMES[family]
            + ("" if kind == "vanilla" else f", type {kind}"),
            **_mark(family, kind),
        )
        colour = FAMILY_COLOURS[family]
        axes.plot(*_places(members, panel.cross), color=colour, zorder=3, **_CROSS)


def _places(
    encoders: Sequence[SizedEncoder], height: _Height
) -> tuple[list[float], list[float]]:
    """Give both coordinates of the encoders that have a figure."""
    places = [(e.parameters / _MILLION, y) for e in encoders if (y := height(e))]
    return [x for x, _ in places], [y for _, y in places]


def _name_sized(
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
        font_size=7.5,
    )


def _mark(family: str, kind: str) -> dict[str, Any]:
    """Hollow for vanilla encoders, filled for reversible ones."""
    colour = FAMILY_COLOURS[family]
    return {
        "ls": "",
        "marker": _TYPE_SHAPES[kind],
        "markersize": _MARK_SIZE,
        "markeredgecolor": colour,
        "markerfacecolor": "white" if kind == "vanilla" else colour,
        "markeredgewidth": 1.6,
        "zorder": 4,
    }
