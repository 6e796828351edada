"""Curves that benchmarks draw: losses, angles between gradients, time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from speechbrain_rev.plots.style import COLOURS, log_ticks, picture

#: What distinguishes curves of few points: 42 of them.
_MARKED = {"color": COLOURS * 6, "marker": tuple("osD^vP") * 7}


def loss_curves(
    curves: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str,
    source: str,
    quantity: str = "loss",
    mean_of: int = 1,
) -> None:
    """Draw the loss of each training run, or another quantity, over its steps.

    Parameters
    ----------
    curves : mapping of str to sequence of float
        For each run's name its loss after each step, above 0.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.
    quantity : str
        What is drawn.
    mean_of : int
        How many steps, up to its own, a point is the mean of.
    """
    with picture(path, 7.2, 4.0, title=title, source=source, columns=2) as figure:
        axes = figure.add_subplot(ylabel=quantity)
        for name, losses in curves.items():
            steps = range(mean_of, len(losses) + 1)
            means = [sum(losses[i - mean_of : i]) / mean_of for i in steps]
            axes.plot(steps, means, label=name)
        mean = "" if mean_of == 1 else f"; each point is the mean of {mean_of} up to it"
        axes.set_xlabel(f"training step{mean}")


def gradient_angles(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw angles over training steps; the axis is logarithmic down to an exact zero.

    Parameters
    ----------
    curves : mapping of str to sequence of (int, float)
        For each curve's name, steps and angles in degrees between the gradients of one
        batch with reconstructed and with stored activations.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what network, speech and machine it is from.
    """
    angles = [angle for points in curves.values() for _, angle in points]
    # Below the smallest angle the axis is linear, so that zero has a place on it.
    smallest = min([angle for angle in angles if angle > 0], default=1.0)
    least = 10.0 ** math.floor(math.log10(smallest))
    with picture(path, 7.2, 4.4, title=title, source=source, columns=2) as figure:
        axes = figure.add_subplot(xlabel="training step")
        axes.set_yscale("symlog", linthresh=least, linscale=0.6)
        axes.set_ylabel("angle between gradients, degrees")
        axes.set_prop_cycle(**_MARKED)
        for number, (name, points) in enumerate(curves.items()):
            # Where curves lie on each other, as at zero, all can be seen.
            marks = {"markersize": 8.0 - 2.0 * (number % 3), "markerfacecolor": "none"}
            axes.plot(*zip(*points, strict=True), label=name, **marks)
        axes.set_ylim(-0.25 * least, max(10 * least, 2 * max(angles)))


def time_by_batch(
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw seconds for each utterance against the batch size, a panel for each encoder.

    Parameters
    ----------
    panels : mapping of str to mapping of str to mapping of int to float
        For each panel's name its curves by name; of each, seconds by batch size. A way
        has the same colour in all panels.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    """
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    height = 1.6 + 2.8 * len(panels)
    with picture(path, 7.2, height, title=title, source=source, columns=3) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
            axes.set_prop_cycle(**_MARKED)
            for name in names:
                # An empty curve has a place in the legend.
                curve = curves.get(name, {})
                axes.plot(sorted(curve), [curve[b] for b in sorted(curve)], label=name)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("seconds per utterance")
            axes.set_title(panel)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("batch size")


def time_against_memory(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, str]]]],
    path: str | Path,
    *,
    title: str,
    source: str,
) -> None:
    """Draw curves of times and memory, a panel for each encoder.

    Parameters
    ----------
    panels : mapping of str to mapping of str to sequence of (float, float, str)
        For each panel's name its curves by name; of each, MiB per utterance, times the
        baseline's duration, and what is written beside the point, which may be empty.
    path : str or pathlib.Path
        The PNG file to write.
    title, source : str
        What is shown, and what it is from.
    """
    height = 1.4 + 2.8 * len(panels)
    with picture(path, 7.2, height, title=title, source=source, columns=3) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (panel, curves) in zip(grid, panels.items(), strict=True):
            axes.set_prop_cycle(**_MARKED)
            for name, points in curves.items():
                memory, times, _ = zip(*points, strict=True)
                axes.plot(memory, times, label=name)
                for x, y, word in points:
                    axes.annotate(f"  {word}", (x, y), va="center", fontsize=7.5)
            axes.set_ylim(bottom=0)
            axes.set_ylabel(f"times storing, {panel}")
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
        axes.set_xlabel("MiB per utterance")
