"""The frame of all pictures: style, title, legend, source and file."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechbrain_rev.files import write_whole
from speechbrain_rev.modes import Mode

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind distinguish; yellow is left out as
# it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MODE_COLOURS = {mode.value: mode.spec.colour for mode in Mode}
FAINT = "#888888"
INK = "#333333"

_DASHES = ("-", "--", ":", "-.")
_STYLE: Any = {
    # 28 curves differ, by dashes even where they lie on each other.
    "axes.prop_cycle": f"cycler(color={COLOURS * 4}, linestyle={_DASHES * 7})",
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.dpi": 150,
    "font.size": 9,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.title_fontsize": 11.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}


@contextmanager
def picture(
    path: str | Path,
    width_inches: float,
    height_inches: float,
    *,
    title: str = "",
    source: str = "",
    columns: int = 1,
) -> Iterator[Figure]:
    """Give an empty figure, and write it when the block ends without an error.

    Parameters
    ----------
    path : str or pathlib.Path
        The file to write, whole or not at all, in the format of its ending.
    width_inches, height_inches : float
        The size.
    title, source : str
        What stands above the figure, and in small letters below it.
    columns : int
        Of the legend below the title, which has each label of the axes once.

    Yields
    ------
    matplotlib.figure.Figure
        Axes made in the block have the package's style and leave space for their labels.

    Raises
    ------
    ImportError
        If matplotlib cannot be imported.

    Example
    -------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with picture(os.path.join(folder, "a.png"), 4, 3, title="Loss") as figure:
    ...         lines = figure.add_subplot(xlabel="step").plot([3, 2, 1], label="ours")
    ...     os.listdir(folder)
    ['a.png']
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"Pictures need matplotlib, which cannot be imported here ({error}). "
            f"Install it again: pip install --force-reinstall matplotlib."
        ) from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure((width_inches, height_inches), layout="constrained")
        yield figure
        labelled = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            labelled.values(),
            labelled.keys(),
            loc="outside upper left",
            ncols=columns,
            title=title,
            alignment="left",
        )
        # An inch has 15 letters of 8 points, on the average.
        lines = textwrap.fill(source, int(15 * width_inches))
        figure.supxlabel(lines, fontsize=8, color=FAINT, x=0.01, ha="left")
        content = io.BytesIO()
        figure.savefig(content, format=Path(path).suffix[1:].lower() or "png")
        write_whole(path, content.getvalue())


def log_ticks(axis: Axis) -> None:
    """Put ticks at 1, 2, 5, 10 and so on.

    Parameters
    ----------
    axis : matplotlib.axis.Axis
        A logarithmic one.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def check_some(rows: Sized, what: str) -> None:
    """Refuse to draw nothing.

    Parameters
    ----------
    rows : sized
        What is to be drawn.
    what : str
        What one of them is called.

    Raises
    ------
    ValueError
        If there is none.

    Example
    -------
    >>> check_some([], "plan")
    Traceback (most recent call last):
    ValueError: There is no plan to draw; give at least one.
    """
    if not rows:
        raise ValueError(f"There is no {what} to draw; give at least one.")
