"""What all tables of committed figures share."""

from __future__ import annotations

import json
from pathlib import Path

from speechbrain_rev.sizes import GB, GIB, MIB

from .harness import Result, markdown

RESULTS = Path(__file__).parent / "results"


def committed(name: str) -> Result:
    """Read what a benchmark measured on a CPU."""
    return Result(**json.loads((RESULTS / f"{name}_cpu.json").read_text()))


def mib_text(gb: float) -> str:
    """Write in MiB what results have in GB, which are 1e9 bytes there."""
    return f"{gb * GB / MIB:.1f}"


def gib_text(gb: float) -> str:
    """Write in GiB what results have in GB."""
    return f"{gb * GB / GIB:.2f}"


def where(result: Result) -> str:
    """Say on which machine it was measured, and when."""
    versions = result.environment
    return (
        f"{versions['processor']}, {versions['threads']} thread(s), torch "
        f"{versions['torch']}, {versions['date']}."
    )


def told(rows: list[dict[str, str]], result: Result) -> str:
    """Write a table, and below it how and where it was measured."""
    setting = result.setting.replace(" GB:", " GiB:")
    words = f"{setting}. {result.correctness}. {where(result)}"
    return f"{markdown(rows)}\n\n{words[0].upper()}{words[1:]}"
