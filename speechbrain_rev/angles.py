"""The angle between two gradients, however small it is."""

from __future__ import annotations

import math

from torch import Tensor


def angle_degrees(a: Tensor, b: Tensor) -> float:
    """Measure the angle between two vectors, accurate where it is small, too.

    The arc cosine of the cosine knows nothing below 1e-6 degrees, for there the cosine
    is 1 in float64. Twice the arc tangent of |a - b| / |a + b|, of vectors of length 1,
    loses nothing (Kahan, "How Futile are Mindless Assessments of Roundoff in
    Floating-Point Computation?", 2006, section 12).

    Parameters
    ----------
    a, b : torch.Tensor, [...] of equal shape
        The vectors; taken as float64 in the order of the shape.

    Returns
    -------
    float
        Degrees from 0 to 180; exactly 0 for equal vectors.

    Raises
    ------
    ValueError
        If shapes differ, or one of the vectors is zero or not finite.

    Example
    -------
    >>> import torch
    >>> round(angle_degrees(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 3.0])), 12)
    45.0
    """
    if a.shape != b.shape:
        raise ValueError(
            f"Vectors of shapes {list(a.shape)} and {list(b.shape)} have no angle "
            "between them; give two of equal shape."
        )
    units = []
    for x in (a, b):
        x = x.detach().double()
        length = float(x.norm())
        if not 0 < length < math.inf:
            raise ValueError(
                f"A vector of length {length} has no direction; give finite ones that "
                "are not zero."
            )
        units.append(x / length)
    a, b = units
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))
