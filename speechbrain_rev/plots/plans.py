"""Which block keeps what at which batch size, and how fast that trains.

After Figure 4 of Jiang et al., "An efficient training framework for reversible neural
architectures".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechbrain_rev.plots.style import (
    COLOURS,
    FAINT,
    INK,
    MODE_COLOURS,
    caption,
    check_some,
    finish,
    new_figure,
    note,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Blocks that each have a name beside them; of more, chains have.
_NAMED = 16
#: The least share of the height that a name of a chain takes.
_NAME_SHARE = 0.04
_NOTHING = "#FFFFFF"


def plan_map(
    plans: Mapping[int, Mapping[str, str]],
    utterances_per_second: Mapping[int, float],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw the mode of each block against the batch size, and the throughput below.

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
    blocks = list(planned[0])
    height = min(5.6, max(1.8, 0.14 * len(blocks)))
    figure = new_figure(7.2, height + 2.9)
    upper, lower = figure.subplots(
        2, 1, sharex=True, height_ratios=(height, 1.5), squeeze=True
    )
    _draw_modes(upper, plans, blocks)
    _draw_speeds(lower, utterances_per_second)
    caption(figure, upper, title, source, columns=3)
    figure.align_ylabels()
    save(figure, path)


def _draw_modes(
    axes: Axes, plans: Mapping[int, Mapping[str, str]], blocks: Sequence[str]
) -> None:
    from matplotlib.colors import ListedColormap

    batches = sorted(plans)
    numbers = {mode: number for number, mode in enumerate(MODE_COLOURS, 1)}
    cells = [
        [numbers[plans[batch][name]] if plans[batch] else 0 for batch in batches]
        for name in blocks
    ]
    axes.pcolormesh(
        _edges(batches),
        range(len(blocks) + 1),
        cells,
        cmap=ListedColormap([_NOTHING, *MODE_COLOURS.values()]),
        vmin=0,
        vmax=len(numbers),
    )
    used = {mode for modes in plans.values() for mode in modes.values()}
    for mode, colour in MODE_COLOURS.items():
        if mode in used:
            axes.fill_between([], [], color=colour, label=mode)
    axes.set_ylim(len(blocks), 0)
    axes.set_ylabel("block")
    finish(axes, grid="x")
    axes.grid(visible=False)
    _name_blocks(axes, blocks)


def _name_blocks(axes: Axes, blocks: Sequence[str]) -> None:
    """Write names beside blocks, or beside their chains with a line between these."""
    chains = [(name, 1) for name in blocks]
    if len(blocks) > _NAMED:
        chains = _chains(blocks)
    start, ticks = 0, {}
    for name, count in chains:
        if count >= _NAME_SHARE * len(blocks):
            ticks[start + count / 2] = name
            if start and len(blocks) > _NAMED:
                axes.axhline(start, color="white", linewidth=0.8)
        start += count
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)


def _chains(blocks: Sequence[str]) -> list[tuple[str, int]]:
    """Give chains with their numbers of blocks; what is alone keeps its own name."""
    runs = []
    for chain, run in itertools.groupby(blocks, lambda name: name.rpartition(".")[0]):
        names = list(run)
        runs.append((chain if len(names) > 1 else names[0], len(names)))
    return runs


def _draw_speeds(axes: Axes, utterances_per_second: Mapping[int, float]) -> None:
    batches = sorted(utterances_per_second)
    speeds = [utterances_per_second[batch] for batch in batches]
    best = max(batches, key=lambda batch: utterances_per_second[batch])
    marker = "o" if len(batches) <= 40 else None
    axes.plot(batches, speeds, color=INK, marker=marker, markersize=3.5, lw=1.5)
    axes.axvline(best, color=COLOURS[1], linewidth=1.0, linestyle="--")
    # Beside the line, on the side where there is more space.
    left = best - batches[0] > batches[-1] - best
    note(
        axes,
        f"{utterances_per_second[best]:.3g} at batch {best}",
        (best, 0),
        (-5 if left else 5, 5),
        ha="right" if left else "left",
        va="baseline",
        color=COLOURS[1],
    )
    axes.set_ylim(0, 1.08 * max(speeds))
    axes.set_ylabel("utterances per second")
    axes.set_xlabel("batch size")
    axes.locator_params(axis="x", integer=True)
    finish(axes, grid="both")
    axes.spines["left"].set_color(FAINT)


def _edges(batches: Sequence[int]) -> list[float]:
    """Give where the cell of each batch begins and the last one ends."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(batches)]
    if not middles:
        return [batches[0] - 0.5, batches[0] + 0.5]
    first, last = batches[0], batches[-1]
    return [2 * first - middles[0], *middles, 2 * last - middles[-1]]
