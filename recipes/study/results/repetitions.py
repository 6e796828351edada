"""What was found of trainings that were done again, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def once_more(found: Mapping[str, Any]) -> str:
    """Say whether a training that came out otherwise gives at least itself.

    Parameters
    ----------
    found : mapping
        Of a training, as repeated.json has it.

    Returns
    -------
    str
        To go on with after what is other; empty if it was not trained once more there.
    """
    differing = found.get("differing_once_more")
    if differing is None:
        return ""
    came_out = "with other weights" if "weights" in differing else "with other scores"
    return f"; trained there once more, it came out {came_out if differing else 'the same'}"
