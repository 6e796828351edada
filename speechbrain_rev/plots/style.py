"""What all pictures share: colours, an empty figure, axes, the PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart; yellow is left out as
# it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")
MODE_COLOURS = {"store": "#8C8C8C", "recompute": "#56B4E9", "reconstruct": "#0072B2"}
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
        Of the legend.
    """
    figure.suptitle(title, fontsize=11.5, color=INK, x=0.01, ha="left")
    figure.supxlabel(source, fontsize=8, color=FAINT, x=0.01, ha="left")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        borderaxespad=0.3,
    )


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG.

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
    figure.savefig(path, format="png", dpi=150, facecolor="white")
