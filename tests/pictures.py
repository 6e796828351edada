"""What words and points of a picture are, and what holds of names beside points."""

import itertools

import numpy as np


def texts_of(texts):
    """The words of a legend, axes or tick labels, but for empty ones."""
    return [text.get_text() for text in texts if text.get_text()]


def points_of(line):
    return [tuple(point) for point in line.get_xydata()]


def check_names(axes, marks, places):
    """Names lie within the axes and the figure, apart from names and marks, by their points."""
    texts = [text for text in axes.texts if text.get_text() in places]
    tied = {tuple(text.xy) for text in axes.texts if is_tie(text)}
    assert sorted(texts_of(texts)) == sorted(places)
    point = axes.figure.dpi / 72
    boxes = [text.get_window_extent() for text in texts]
    centres = axes.transData.transform([*marks])
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for text, box in zip(texts, boxes, strict=True):
        for outer in (axes.bbox, axes.figure.bbox):
            assert outer.x0 <= box.x0 <= box.x1 <= outer.x1
            assert outer.y0 <= box.y0 <= box.y1 <= outer.y1
        assert not any(box.contains(*centre) for centre in centres)
        place = places[text.get_text()]
        np.testing.assert_allclose(text.xy, place)
        x, y = axes.transData.transform(place)
        is_beside = abs(box.x0 - x) < 10 * point and box.y0 < y < box.y1
        assert is_beside or tuple(text.xy) in tied


def is_tie(text):
    """Whether it is the line from a point to its name, which has no head."""
    arrow = text.arrow_patch
    return arrow is not None and type(arrow.get_arrowstyle()).__name__ == "Curve"
