"""What panels of curves have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def check_panels(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], x: str, y: str
) -> None:
    """Refuse panels that cannot be drawn.

    Parameters
    ----------
    panels : mapping of str to mapping of str to sequence of (float, float)
        For each panel's name its curves by name, and the points of each.
    x, y : str
        What the numbers of a point count.

    Raises
    ------
    ValueError
        If there is no panel, a panel has no curve or a curve no points, or a number is
        not above 0.

    Example
    -------
    >>> check_panels({"revnet57": {"stored": [(2, 0.0)]}}, "utterances", "seconds")
    Traceback (most recent call last):
    ...
    ValueError: 'stored' of 'revnet57' has a point of 2 utterances and 0.0 seconds; both
    must be above 0.
    """
    if not panels:
        raise ValueError("There is no panel to draw; give at least one.")
    for panel, curves in panels.items():
        if not curves:
            raise ValueError(f"{panel!r} has no curve; leave it out.")
        for name, points in curves.items():
            if not points:
                raise ValueError(f"{name!r} of {panel!r} has no points; leave it out.")
            for a, b in points:
                if not (a > 0 and b > 0):
                    raise ValueError(
                        f"{name!r} of {panel!r} has a point of {a} {x} and {b} {y}; "
                        "both must be above 0."
                    )
