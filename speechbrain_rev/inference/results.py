"""What recipes/VoxCeleb/score.py found for a run, read as if somebody else had sent it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechbrain_rev.inference.own_files import open_own
from speechbrain_rev.inference.strict_json import short, strict_json
from speechbrain_rev.scoring import MEASURES

RESULTS = "scores/results.json"

_MAX_BYTES = 1_000_000


def read_results(folder: Path) -> dict[str, Any] | None:
    """Read a run's results.

    Parameters
    ----------
    folder : pathlib.Path
        The run's.

    Returns
    -------
    dict or None
        None if it was not scored. Else ``model``, the fingerprint, a text;
        ``subtract_mean``, a truth value; ``results``, mappings of texts ``trials`` and
        ``method`` to begin with, and of numbers by the keys of ``MEASURES``; and maybe
        ``cohort``, of integers ``speakers`` and ``top_n``.

    Raises
    ------
    ValueError
        If the file is anything else, or leads out of the folder.
    """
    if not (folder / RESULTS).exists():
        return None
    with open_own(folder, RESULTS) as file:
        content = file.read(_MAX_BYTES + 1)
    try:
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        report = strict_json(content)
        _check(report)
    except ValueError as error:
        raise ValueError(
            f"{folder / RESULTS} is not what recipes/VoxCeleb/score.py writes ({error}). "
            "Run it again, or remove the file."
        ) from error
    assert isinstance(report, dict)
    return report


def _check(report: object) -> None:
    """Refuse what users of the results would stumble over."""
    if not isinstance(report, dict) or type(report.get("model")) is not str:
        raise ValueError("it does not say of which model it is")
    if type(report.get("subtract_mean")) is not bool:
        raise ValueError(f"subtract_mean is {short(report.get('subtract_mean'))}")
    rows = report.get("results")
    if not isinstance(rows, list):
        raise ValueError(f"results are {short(rows)}")
    for row in rows:
        texts = isinstance(row, dict) and [row.get(n) for n in ("trials", "method")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a result is {short(row)}")
        _check_figures(row)
    if "cohort" in report:
        _check_cohort(report["cohort"])


def _check_figures(row: Mapping[str, Any]) -> None:
    """Refuse measures that are no numbers, and intervals that are no two of them."""
    for measure in MEASURES.values():
        figure, bounds = measure.figure(row), measure.figure(row, "_95")
        if not (figure is None or _is_number(figure)):
            raise ValueError(f"{measure.name} is {short(figure)}")
        pair = isinstance(bounds, list) and len(bounds) == 2
        if bounds is not None and not (pair and all(map(_is_number, bounds))):
            raise ValueError(f"{measure.name}_95 is {short(bounds)}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _check_cohort(cohort: object) -> None:
    names = ("speakers", "top_n")
    counts = [cohort.get(n) for n in names] if isinstance(cohort, dict) else [None]
    if not all(type(count) is int and count >= 1 for count in counts):
        raise ValueError(f"cohort is {short(cohort)}")
