"""By which code each training was done, and where, as it was written down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results.files import ORIGIN

NOT_KNOWN = "not written down"


def read_origin(folder: Path) -> list[dict[str, Any]]:
    """Read by which code and where a training was done; empty if nobody wrote that down.

    Parameters
    ----------
    folder : pathlib.Path
        The run's.

    Returns
    -------
    list of dict
        More than one if it was interrupted, and went on by other code or elsewhere.
    """
    path = folder / ORIGIN
    entries: list[dict[str, Any]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    )
    return entries


def machines_of(origin: Sequence[Mapping[str, Any]]) -> str:
    """Name the processors, what they computed with, and versions of torch."""
    names = [_machine_of(one) if one else NOT_KNOWN for one in origin]
    return ", then ".join(dict.fromkeys(names)) or NOT_KNOWN


def _machine_of(entry: Mapping[str, Any]) -> str:
    device = entry.get("device", "cpu")
    name = f"{entry['processor']} by {entry['instructions']}"
    if not device.startswith("cpu"):
        name = f"{device} and {entry['processor']}"
    return f"{name}, torch {entry['torch']}"
