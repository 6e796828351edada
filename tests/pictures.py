"""What words and points of a picture are."""


def texts_of(texts):
    """The words of a legend, axes or tick labels, but for empty ones."""
    return [text.get_text() for text in texts if text.get_text()]


def points_of(line):
    return [tuple(point) for point in line.get_xydata()]
