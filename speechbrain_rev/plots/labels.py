"""Place names beside points so that nothing is covered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

# What it costs to cover things, for each point (1/72 inch) of depth or length: the worse
# the reader is led astray, the dearer. A point of distance costs 1.
_COVERED_LABEL = 400.0
_COVERED_MARK = 200.0
_OUTSIDE = 1000.0
_CROSSED_LEADER = 8.0
_CROSSED_LINE = 1.5
_LEADER = 15.0
_ROUNDS = 20

_POINTS_PER_INCH = 72

#: Where something is in the units of the axes.
Place = tuple[float, float]


@dataclass(frozen=True)
class Label:
    """Where a label stands.

    Attributes
    ----------
    centre : numpy.ndarray, [2]
        Of the text.
    leader : numpy.ndarray, [2, 2], or None
        Ends of the line that ties it to its point, if it stands off.
    """

    centre: Floats
    leader: Floats | None


def write_names(
    figure: Figure,
    axes: Axes,
    places: Mapping[str, Place],
    colours: Mapping[str, str],
    *,
    marks: Sequence[Place],
    mark_size: float,
    lines: Sequence[tuple[Place, Place]],
    font_size: float = 8.0,
) -> None:
    """Write names where there is room, which settles the layout of the figure.

    Parameters
    ----------
    figure, axes : matplotlib.figure.Figure, matplotlib.axes.Axes
        With all that has a place in the layout.
    places : mapping of str to (x, y)
        What is named, in units of the axes, like marks and lines.
    colours : mapping of str to str
        Of each name.
    marks : sequence of (x, y)
        What must stay visible.
    mark_size : float
        Of these, in points.
    lines : sequence of pairs of (x, y)
        Ends of lines that had better not be crossed.
    font_size : float
        Of the names, in points.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    per_pixel = _POINTS_PER_INCH / figure.dpi

    def in_points(xy: Sequence[Place]) -> Floats:
        # None are two columns as well.
        where: Floats = axes.transData.transform(np.reshape(xy, (-1, 2))) * per_pixel
        return where

    centres = in_points(list(places.values()))
    texts = [
        axes.annotate(
            name,
            place,
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=font_size,
            color=colours[name],
            zorder=5,
        )
        for name, place in places.items()
    ]
    extents = [text.get_window_extent() for text in texts]
    labels = place_labels(
        centres,
        np.array([(e.width, e.height) for e in extents]) * per_pixel,
        marks=np.column_stack(
            [in_points(marks), np.full(len(marks), mark_size / 2 + 1)]
        ),
        lines=np.array([in_points(line) for line in lines]).reshape(-1, 2, 2),
        within=np.array(axes.bbox.get_points()) * per_pixel,
    )
    for text, label, centre in zip(texts, labels, centres, strict=True):
        text.set_position(tuple(label.centre - centre))
        if label.leader is not None:
            axes.annotate(
                "",
                text.xy,
                tuple(label.leader[1] - centre),
                textcoords="offset points",
                arrowprops={
                    "arrowstyle": "-",
                    "color": text.get_color(),
                    "lw": 0.6,
                    "shrinkA": 0,
                    "shrinkB": mark_size / 2,
                },
            )


def place_labels(
    points: Floats,
    sizes: Floats,
    *,
    marks: Floats,
    lines: Floats,
    within: Floats,
    gap: float = 8.0,
) -> list[Label]:
    """Choose where labels stand, near their points and apart from all else.

    Each label in turn takes the best of some places around its point, given the others;
    that is repeated until none moves. The result depends on nothing but the input.

    Parameters
    ----------
    points : numpy.ndarray, [labels, 2]
        What the labels name, in points (1/72 inch), like all that follows.
    sizes : numpy.ndarray, [labels, 2]
        Width and height of each label.
    marks : numpy.ndarray, [marks, 3]
        Centre and half the width of each mark that must stay visible.
    lines : numpy.ndarray, [lines, 2, 2]
        Ends of lines that had better not be crossed.
    within : numpy.ndarray, [2, 2]
        Lower left and upper right corner of where labels may stand.
    gap : float
        From a point to its label.

    Returns
    -------
    list of Label
        One for each point.

    Example
    -------
    >>> left, right = place_labels(
    ...     np.array([[50.0, 50.0], [55.0, 50.0]]),
    ...     np.array([[30.0, 8.0], [30.0, 8.0]]),
    ...     marks=np.array([[50.0, 50.0, 3.0], [55.0, 50.0, 3.0]]),
    ...     lines=np.zeros((0, 2, 2)),
    ...     within=np.array([[0.0, 0.0], [100.0, 100.0]]),
    ... )
    >>> left.centre - 50, right.centre - 50, left.leader
    (array([-23.,   0.]), array([28.,  0.]), None)
    """
    places = [_Places(p, size, gap) for p, size in zip(points, sizes, strict=True)]
    mark_boxes = np.stack([marks[:, :2] - marks[:, 2:], marks[:, :2] + marks[:, 2:]], 1)
    prices = [place.price_alone(mark_boxes, lines, within) for place in places]
    chosen = [int(np.argmin(price)) for price in prices]
    for _ in range(_ROUNDS):
        before = list(chosen)
        for i, place in enumerate(places):
            others = [j for j in range(len(places)) if j != i]
            if others:
                boxes = np.stack([places[j].boxes[chosen[j]] for j in others])
                leaders = np.stack([places[j].leaders[chosen[j]] for j in others])
                price = prices[i] + place.price_among(boxes, leaders)
                chosen[i] = int(np.argmin(price))
        if chosen == before:
            break
    return [place.label(choice) for place, choice in zip(places, chosen, strict=True)]


class _Places:
    """The places that a label could take: beside its point first, then farther away."""

    def __init__(self, point: Floats, size: Floats, gap: float) -> None:
        width, height = size
        offsets: list[tuple[float, float]] = []
        for far in (1.0, 1.6, 2.4, 3.4, 4.6, 6.0):
            x, y = width / 2 + gap * far, height / 2 + gap * far
            offsets += [(x, 0), (-x, 0), (0, y), (0, -y)]
            for sx, sy in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                slid = max(width / 2 - gap, 0)
                offsets += [(sx * slid, sy * y), (sx * x, sy * 0.6 * y)]
                offsets += [(sx * x, sy * 1.2 * y), (sx * 0.75 * x, sy * y)]
        self.centres = point + np.array(offsets)
        half = size / 2
        # Two names side by side must not read as one.
        wide = half + np.array([3.0, 1.0])
        self.boxes = np.stack([self.centres - wide, self.centres + wide], 1)
        ends = np.clip(point, self.centres - half, self.centres + half)
        self.distance = np.clip(np.hypot(*(ends - point).T) - gap, 0, None)
        self.is_tied = self.distance > gap / 2
        starts = np.where(self.is_tied[:, None], point, ends)
        self.leaders = np.stack([starts, ends], 1)

    def price_alone(self, mark_boxes: Floats, lines: Floats, within: Floats) -> Floats:
        outside = np.clip(within[0] - self.boxes[:, 0], 0, None).sum(axis=1)
        outside += np.clip(self.boxes[:, 1] - within[1], 0, None).sum(axis=1)
        price: Floats = (
            _OUTSIDE * outside
            + _COVERED_MARK * _overlap(self.boxes, mark_boxes)
            + _CROSSED_LINE * _inside(self.boxes, lines).sum(axis=1)
            + _CROSSED_LEADER * _inside(mark_boxes, self.leaders).sum(axis=0)
            + _LEADER * self.is_tied
            + self.distance
        )
        return price

    def price_among(self, boxes: Floats, leaders: Floats) -> Floats:
        price: Floats = (
            _COVERED_LABEL * _overlap(self.boxes, boxes)
            + _CROSSED_LEADER * _inside(self.boxes, leaders).sum(axis=1)
            + _CROSSED_LEADER * _inside(boxes, self.leaders).sum(axis=0)
        )
        return price

    def label(self, choice: int) -> Label:
        tied = bool(self.is_tied[choice])
        return Label(self.centres[choice], self.leaders[choice] if tied else None)


def _overlap(boxes: Floats, others: Floats) -> Floats:
    """How deep each box lies in others, summed, [boxes]."""
    low = np.maximum(boxes[:, None, 0], others[None, :, 0])
    high = np.minimum(boxes[:, None, 1], others[None, :, 1])
    depth: Floats = np.clip(high - low, 0, None).min(axis=2).sum(axis=1)
    return depth


def _inside(boxes: Floats, lines: Floats) -> Floats:
    """Length of each line within each box, [boxes, lines]: Liang and Barsky's clipping."""
    start, way = lines[:, 0], lines[:, 1] - lines[:, 0]
    # Along an axis that the line does not move on, it is inside all along or never.
    moved = np.where(way == 0, 1e-9, way)
    crossings = (boxes[:, None] - start[None, :, None]) / moved[None, :, None]
    enter = crossings.min(axis=2).max(axis=2)
    leave = crossings.max(axis=2).min(axis=2)
    part = np.clip(np.clip(leave, 0, 1) - np.clip(enter, 0, 1), 0, None)
    length: Floats = part * np.hypot(*way.T)
    return length
