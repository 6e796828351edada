"""Figures that are computed once of what they are made of, and again if that changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from results.files import MADE_OF

from speechbrain_rev.whole_files import write_whole


def computed_once(
    path: Path, made_of: Mapping[str, Any], compute: Callable[[], Any]
) -> Any:
    """Read figures, or compute them where there are none or they are of something else.

    Parameters
    ----------
    path : pathlib.Path
        Their file, in the study's folder.
    made_of : mapping
        What they depend on, as plain values: digests of weights and of files.
    compute : callable
        Gives them as plain values.

    Returns
    -------
    object
        The figures, as JSON holds them.
    """
    record, known = path.with_name(MADE_OF), _known(path)
    wanted = json.loads(json.dumps(made_of))
    if not path.is_file() or known.get(path.name) != wanted:
        # Should what follows be interrupted, nothing vouches for the file.
        known.pop(path.name, None)
        write_whole(record, json.dumps(known, indent=1) + "\n")
        # Nor is it shown while there are none of what there is now.
        path.unlink(missing_ok=True)
        write_whole(path, json.dumps(compute(), indent=1) + "\n")
        write_whole(record, json.dumps({**known, path.name: wanted}, indent=1) + "\n")
    return json.loads(path.read_text())


def is_made_of(path: Path, parts: Mapping[str, Any]) -> bool:
    """Whether what figures were computed of holds all of these."""
    return parts.items() <= _known(path).get(path.name, {}).items()


def _known(path: Path) -> dict[str, Any]:
    """Read what the figures of a study were computed of."""
    record = path.with_name(MADE_OF)
    known: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {}
    return known
