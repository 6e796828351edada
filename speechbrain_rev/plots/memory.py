"""Memory of training: of encoders, of the parts of a step, of plans by batch size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speechbrain_rev.plots.style import (
    COLOURS,
    FAINT,
    INK,
    MODE_COLOURS,
    check_some,
    log_ticks,
    picture,
)
from speechbrain_rev.sizes import GIB, size_text

# A family and its reversible counterpart share a colour, types have shapes of their own.
FAMILIES = {
    "resnet": ("ResNet", COLOURS[0]),
    "revnet": ("RevNet", COLOURS[0]),
    "df_resnet": ("DF-ResNet", COLOURS[1]),
    "df_revnet": ("DF-RevNet", COLOURS[1]),
}
_TYPE_SHAPES = {"vanilla": "o", "I": "^", "II": "s"}
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
        The vanilla encoder from which a line leads here, if that is drawn.
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

    @property
    def place(self) -> tuple[float, float]:
        """Error rate and memory in GiB."""
        return self.eer_percent, self.peak_bytes / GIB


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

    Vanilla encoders are hollow, reversible ones filled; a line leads from each vanilla
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
    ...     EncoderPoint("revnet46", "revnet", "I", 1.85, 3e9, "resnet34"),
    ... ]
    >>> words = {"title": "T", "eer_label": "EER", "memory_label": "GiB", "source": "S", "cards": {}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     encoder_map(points, os.path.join(folder, "encoders.png"), **words)
    """
    check_some(points, "encoder")
    by_name = {point.name: point for point in points}
    mark: Any = {"ls": "", "markersize": 7, "markeredgewidth": 1.6, "zorder": 3}
    with picture(path, 10.0, 6.6, title=title, source=source, columns=4) as figure:
        axes = figure.add_subplot(xlabel=eer_label, ylabel=memory_label, yscale="log")
        log_ticks(axes.yaxis)
        axes.margins(y=0.08)
        for size, kept_free in cards.items():
            gib = size / GIB
            axes.axhspan((size - kept_free) / GIB, gib, color=FAINT, alpha=0.12, lw=0)
            axes.axhline(gib, color=INK, lw=1.0, ls="--")
            place = ("axes fraction", "data")
            axes.annotate(f" {gib:g} GiB GPU", (1.0, gib), xycoords=place, va="center")
        for point in points:
            family, colour = FAMILIES[point.family]
            vanilla = point.type == "vanilla"
            axes.plot(
                *point.place,
                label=f"{family}, {'stored' if vanilla else f'type {point.type}'}",
                marker=_TYPE_SHAPES[point.type],
                markerfacecolor="white" if vanilla else colour,
                color=colour,
                **mark,
            )
            if point.recompute_bytes is not None:
                recomputed = point.recompute_bytes / GIB
                label = f"{family}, recomputed"
                axes.plot(
                    point.eer_percent,
                    recomputed,
                    label=label,
                    marker="x",
                    color=colour,
                    **mark,
                )
            start = by_name.get(point.counterpart or "")
            if start is not None:
                ends = zip(start.place, point.place, strict=True)
                axes.plot(*ends, color=colour, alpha=0.45, ls="-", lw=0.9)
            # Reversible encoders lie close together: their names hang below them.
            axes.annotate(
                point.name,
                point.place,
                (0, 7 if vanilla else -7),
                textcoords="offset points",
                ha="center",
                va="bottom" if vanilla else "top",
                rotation=0 if vanilla else 90,
                color=colour,
                fontsize=7.5,
            )
        # Space for these names.
        axes.set_ylim(bottom=min(point.place[1] for point in points) / 2.5)


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
    bars: Sequence[PartsBar], path: str | Path, *, title: str, source: str
) -> None:
    """Draw the parts of each bar in GiB, and beside it in percent of the bar.

    Parameters
    ----------
    bars : sequence of PartsBar
        In reading order.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.

    Example
    -------
    >>> import os, tempfile
    >>> stored = PartsBar("revnet46", "store", {"activations": 4e9, "weights": 4e7})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "parts.png")
    ...     memory_parts([stored], path, title="Memory", source="Counted.")
    """
    groups: dict[str, list[PartsBar]] = {}
    for bar in bars:
        groups.setdefault(bar.group, []).append(bar)
    parts = [part for part in _PART_COLOURS if any(part in bar.parts for bar in bars)]
    height = 1.1 + 0.3 * len(bars) + 0.4 * len(groups)
    with picture(path, 9.6, height, title=title, source=source, columns=7) as figure:
        grid = figure.subplots(
            len(groups),
            2,
            squeeze=False,
            sharex="col",
            sharey="row",
            width_ratios=(3, 2),
            height_ratios=[len(members) for members in groups.values()],
        )
        for (group, members), (sizes, shares) in zip(groups.items(), grid, strict=True):
            rows = range(len(members))
            # Bytes, [part, bar].
            table = np.array([[bar.parts.get(p, 0) for bar in members] for p in parts])
            totals = table.sum(0)
            for axes, widths in ((sizes, table / GIB), (shares, 100 * table / totals)):
                lefts = widths.cumsum(0) - widths
                for part, width, left in zip(parts, widths, lefts, strict=True):
                    label, colour = part.replace("_", " "), _PART_COLOURS[part]
                    axes.barh(rows, width, 0.84, left, label=label, color=colour)
                axes.grid(visible=False, axis="y")
                axes.tick_params(axis="y", length=0)
            words = [size_text(int(total)) for total in totals]
            sizes.bar_label(sizes.containers[-1], words, padding=4)
            sizes.set_title(group, weight="bold")
            sizes.set_yticks(rows, [bar.label for bar in members])
            sizes.invert_yaxis()
        sizes.set_xlim(0, 1.2 * max(bar.total for bar in bars) / GIB)
        sizes.set_xlabel("GiB")
        shares.set_xlim(0, 100)
        shares.set_xlabel("percent of the bar")


def plan_map(
    plans: Mapping[int, Mapping[str, str]],
    utterances_per_second: Mapping[int, float],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw the mode of each block against the batch size, and the throughput below.

    After Figure 4 of Jiang et al., "An efficient training framework for reversible neural
    architectures".

    Parameters
    ----------
    plans : mapping of int to mapping of str to str
        For each batch size the modes by block, in the order of execution: "store",
        "recompute" or "reconstruct". Empty where there is no plan, which stays white.
    utterances_per_second : mapping of int to float
        For each batch size that has a plan.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.

    Raises
    ------
    ValueError
        If there is no plan.

    Example
    -------
    >>> import os, tempfile
    >>> plans = {16: {"b.0": "store"}, 32: {"b.0": "reconstruct"}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "plans.png")
    ...     plan_map(plans, {16: 90.0, 32: 80.0}, path, title="T", source="S")
    """
    planned = [modes for modes in plans.values() if modes]
    check_some(planned, "plan")
    batches, blocks = sorted(plans), list(planned[0])
    used = {mode for modes in planned for mode in modes.values()}
    best = max(utterances_per_second, key=lambda b: utterances_per_second[b])
    # The name of a block takes a seventh of an inch.
    height = 0.14 * len(blocks)
    with picture(
        path, 7.2, height + 3.0, title=title, source=source, columns=5
    ) as figure:
        from matplotlib.colors import to_rgb

        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(height, 1.5))
        cells = [
            [
                to_rgb(MODE_COLOURS.get(plans[b].get(block, ""), "white"))
                for b in batches
            ]
            for block in blocks
        ]
        upper.pcolormesh(_edges(batches), range(len(blocks) + 1), cells)
        for mode, colour in MODE_COLOURS.items():
            if mode in used:
                upper.fill_between([], [], color=colour, label=mode)
        upper.set_yticks([i + 0.5 for i in range(len(blocks))], blocks, fontsize=7.5)
        upper.set_ylim(len(blocks), 0)
        upper.tick_params(axis="y", length=0)
        upper.grid(visible=False)
        lower.plot(
            *zip(*sorted(utterances_per_second.items()), strict=True), "o-", color=INK
        )
        label = f"fastest: batch {best}"
        lower.axvline(best, color=COLOURS[1], lw=1.0, ls="--", label=label)
        lower.set_ylim(0, 1.1 * utterances_per_second[best])
        lower.set_xlabel("batch size")
        lower.set_ylabel("utterances per second")
        lower.locator_params(axis="x", integer=True)


def _edges(batches: Sequence[int]) -> list[float]:
    """Give where the cell of each batch begins and the last one ends."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(batches)]
    if not middles:
        return [batches[0] - 0.5, batches[0] + 0.5]
    first, last = batches[0], batches[-1]
    return [2 * first - middles[0], *middles, 2 * last - middles[-1]]
