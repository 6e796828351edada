"""What all pictures share: colours, an empty figure, axes, the PNG file."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from speechbrain_rev.modes import Mode
from speechbrain_rev.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart; yellow is left out as
# it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vP"
DASHES = ("-", "--", ":", "-.")
MODE_COLOURS = {mode.value: mode.spec.colour for mode in Mode}
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
FAINT = "#888888"
INK = "#333333"


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Make an empty figure of a size.

    Parameters
    ----------
    width_inches, height_inches : float
        The size.

    Returns
    -------
    matplotlib.figure.Figure
        Axes in it make room for their labels.

    Raises
    ------
    ImportError
        If matplotlib cannot be imported.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"Pictures need matplotlib, which cannot be imported here ({error}). "
            f"Install it again: pip install --force-reinstall matplotlib."
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def encoder_mark(family: str, kind: str) -> dict[str, Any]:
    """Give the mark of encoders: hollow for vanilla ones, filled for reversible ones.

    Parameters
    ----------
    family, kind : str
        Family and type, as in ``architectures``.

    Returns
    -------
    dict
        Options of matplotlib's ``plot``.
    """
    colour = FAMILY_COLOURS[family]
    return {
        "ls": "",
        "marker": _TYPE_SHAPES[kind],
        "markeredgecolor": colour,
        "markerfacecolor": "white" if kind == "vanilla" else colour,
        "markeredgewidth": 1.6,
    }


def log_ticks(axes: Axes) -> None:
    """Put ticks at 1, 2, 5, 10 and so on, at powers of 10 where there would be too many.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        With a logarithmic vertical axis.
    """
    low, high = axes.get_ylim()
    digits = (1, 2, 5) if high < 1e4 * low else (1,)
    ticks = [d * 10.0**e for e in range(-6, 7) for d in digits]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


def finish(axes: Axes, *, grid: Literal["both", "x"]) -> None:
    """Give axes the package's look.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        What was drawn.
    grid : {"both", "x"}
        The axes whose ticks have a line.
    """
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(which="both", color=FAINT, labelcolor=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def caption(
    figure: Figure, axes: Axes, title: str, source: str, *, columns: int
) -> None:
    """Put the title above, the legend between it and the axes, the source below.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    axes : matplotlib.axes.Axes
        What was drawn, with labels.
    title, source : str
        The words.
    columns : int
        Of the legend, at most; fewer where they would not fit the figure.
    """
    figure.suptitle(title, fontsize=11.5, color=INK, x=0.01, ha="left")
    source_below(figure, source)
    for number in range(columns, 0, -1):
        legend = axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=number,
            frameon=False,
            fontsize=9,
            labelcolor=INK,
            borderaxespad=0.3,
        )
        # What is left of the axes takes less than a sixth.
        if legend.get_window_extent().width <= figure.bbox.width * 5 / 6:
            return


def source_below(figure: Figure, source: str) -> None:
    """Put the source below everything, in lines that fit the figure.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    source : str
        The words; their lines stay lines.
    """
    # A character takes 0.6 of the height of 8 points, on the average.
    width = int(figure.get_figwidth() * 72 / (8 * 0.6))
    lines = [textwrap.fill(line, width) for line in source.splitlines()]
    figure.supxlabel("\n".join(lines), fontsize=8, color=FAINT, x=0.01, ha="left")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure, whole or not at all, in the format of the file's ending.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    path : str or pathlib.Path
        The file to write.

    Raises
    ------
    FileNotFoundError
        If its folder does not exist.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {folder}. Make it first."
        )
    picture = io.BytesIO()
    ending = Path(path).suffix[1:].lower() or "png"
    figure.savefig(picture, format=ending, dpi=150, facecolor="white")
    write_whole(path, picture.getvalue())
