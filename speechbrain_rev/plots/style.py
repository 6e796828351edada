"""What all pictures share: colours, figures, checks, axes, words, names, the file."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from speechbrain_rev.files import write_whole
from speechbrain_rev.modes import Mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

#: Where something is in the units of the axes.
Place = tuple[float, float]

# Okabe and Ito's colours, which the colour-blind distinguish; yellow is left out as
# it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vP"
DASHES = ("-", "--", ":", "-.")
MODE_COLOURS = {mode.value: mode.spec.colour for mode in Mode}
FAINT = "#888888"
INK = "#333333"
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": INK}


def look(
    number: int, *, dashes: int = len(COLOURS), marked: bool = False
) -> dict[str, Any]:
    """Choose what distinguishes the curve of a number.

    Parameters
    ----------
    number : int
        From 0.
    dashes : int
        After how many curves lines have other dashes; 0 for solid lines.
    marked : bool
        Whether points have marks.

    Returns
    -------
    dict of str to object
        Options of ``axes.plot``.

    Example
    -------
    >>> look(8, marked=True)
    {'color': '#D55E00', 'ls': '--', 'marker': 'D'}
    """
    chosen: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)]}
    if dashes:
        chosen["ls"] = DASHES[number // dashes % len(DASHES)]
    if marked:
        chosen["marker"] = MARKERS[number % len(MARKERS)]
    return chosen


def note(
    axes: Axes, words: str, at: Place, offset_points: Place = (0, 0), **options: Any
) -> None:
    """Write words some points away from a place.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        What was drawn.
    words : str
        The words.
    at : (x, y)
        The place, in units of the axes.
    offset_points : (x, y)
        How far away the words begin.
    **options
        Of ``axes.annotate``.
    """
    options = {"va": "center", "fontsize": 9, "color": INK, **options}
    axes.annotate(words, at, offset_points, textcoords="offset points", **options)


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Make an empty figure of a size.

    Parameters
    ----------
    width_inches, height_inches : float
        The size.

    Returns
    -------
    matplotlib.figure.Figure
        Axes in it leave space for their labels.

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
    # Text is a little wider or narrower at another resolution than that it is drawn at.
    size = (width_inches, height_inches)
    return Figure(figsize=size, dpi=150, layout="constrained")


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


def stacked_axes(figure: Figure, number: int) -> list[Axes]:
    """Make axes one below the other, over one horizontal axis.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        An empty figure.
    number : int
        How many.

    Returns
    -------
    list of matplotlib.axes.Axes
        From the top down.
    """
    grid = figure.subplots(number, 1, squeeze=False, sharex=True)
    return list(grid[:, 0])


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
    title_and_source(figure, title, source)
    for number in range(columns, 0, -1):
        legend = axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=number,
            borderaxespad=0.3,
            **_LEGEND,
        )
        # What is left of the axes takes less than a sixth.
        if legend.get_window_extent().width <= figure.bbox.width * 5 / 6:
            return


def title_and_source(figure: Figure, title: str, source: str) -> None:
    """Put the title above everything and the source below, where no legend is between.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    title, source : str
        The words.
    """
    figure.suptitle(title, fontsize=11.5, color=INK, x=0.01, ha="left")
    source_below(figure, source)


def legend_above(figure: Figure, axes: Axes, title: str, *, columns: int) -> None:
    """Put a legend that is headed by the title above everything.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    axes : matplotlib.axes.Axes
        What was drawn, with labels.
    title : str
        The words.
    columns : int
        Of the legend.
    """
    legend = figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper left",
        ncols=columns,
        title=title,
        title_fontsize=11.5,
        alignment="left",
        **_LEGEND,
    )
    legend.get_title().set_color(INK)


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


def write_names(
    figure: Figure,
    axes: Axes,
    places: Mapping[str, Place],
    colours: Mapping[str, str],
    *,
    marks: Collection[Place],
    mark_size: float,
    upwards: bool = True,
    font_size: float = 8.0,
) -> None:
    """Write names to the right of points, which settles the layout of the figure.

    From the rightmost point on, a name that would cover a mark or another name moves up
    until it covers neither, and a thin line ties it to its point. Names of close points
    stand one above the other, like flags on poles.

    Parameters
    ----------
    figure, axes : matplotlib.figure.Figure, matplotlib.axes.Axes
        With all that has a place in the layout.
    places : mapping of str to (x, y)
        What is named, in units of the axes, like marks.
    colours : mapping of str to str
        Of each name.
    marks : collection of (x, y)
        What must stay visible beside what is named.
    mark_size : float
        Of these, in points.
    upwards : bool
        Whether names move up, or down; those that would leave the axes move the other way.
        Leave space for them: where both ways are full, names cover each other.
    font_size : float
        Of the names, in points.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    point = figure.dpi / 72
    half, gap = (mark_size / 2 + 1) * point, (mark_size / 2 + 3) * point
    # Two names side by side must not read as one.
    apart = 1.5 * point
    where = {name: axes.transData.transform(xy) for name, xy in places.items()}
    centres = [*where.values(), *map(axes.transData.transform, marks)]
    taken = [Bbox([centre - half, centre + half]) for centre in centres]
    inside, step = axes.bbox.padded(-point), point if upwards else -point
    for name in sorted(where, key=lambda n: (-where[n][0], step * where[n][1])):
        text = axes.annotate(
            name,
            places[name],
            (0, 0),
            textcoords="offset points",
            va="center",
            fontsize=font_size,
            color=colours[name],
            zorder=5,
            bbox={"facecolor": "white", "alpha": 0.6, "lw": 0, "pad": 0.4},
        )
        x, y = where[name]
        box = text.get_window_extent().padded(apart, 0)
        beside = box.translated(
            min(gap, inside.x1 - box.x1),
            max(inside.y0 - box.y0, 0) + min(inside.y1 - box.y1, 0),
        )
        for move in (step, -step):
            box = beside
            while box.count_overlaps(taken) and _is_between(box, axes.bbox):
                box = box.translated(0, move)
            if _is_between(box, axes.bbox):
                break
        right, up = box.x0 + apart - x, (box.y0 + box.y1) / 2 - y
        text.set_position((right / point, up / point))
        taken.append(box)
        if abs(up) > font_size / 2 * point:
            axes.annotate(
                "",
                places[name],
                (min(right / point - 1, gap / point), up / point),
                textcoords="offset points",
                arrowprops={
                    "arrowstyle": "-",
                    "color": colours[name],
                    "lw": 0.6,
                    "shrinkA": 0,
                    "shrinkB": mark_size / 2,
                },
            )
            taken.append(Bbox([(x, y), (x + gap, y + up)]))


def _is_between(box: Bbox, outer: Bbox) -> bool:
    """Whether a box is neither below nor above another one."""
    return bool(outer.y0 <= box.y0 and box.y1 <= outer.y1)


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
    figure.savefig(picture, format=ending, facecolor="white")
    write_whole(path, picture.getvalue())
