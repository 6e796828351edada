"""Paste the committed results into the README: python -m tests.benchmarks.readme."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from .harness import Result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
README = ROOT / "README.md"

#: What the README shows of the 25 encoders: small and large, and each way to save.
SHOWN = {
    "resnet34", "revnet46", "revnet57", "resnet152", "revnet197", "revnet245",
    "df_resnet56", "df_revnet89", "df_revnet281", "df_resnet233", "df_revnet377",
}  # fmt: skip


def memory(rows: list[dict]) -> list[dict]:
    """Choose encoders, and say percent."""
    return [
        {
            "encoder": row["encoder"],
            "mode": row["mode"],
            "GB per 2 s utterance": f"{row['GB per utterance']:.4f}",
            "against": row["baseline"],
            "share": f"{100 * row['share of the baseline']:.1f} %",
        }
        for row in rows
        if row["encoder"] in SHOWN
    ]


def speed(rows: list[dict]) -> list[dict]:
    """Show ratios, which hold for more than one machine."""
    return [
        {
            "encoder": row["encoder"],
            "mode": row["mode"],
            "s per step": f"{row['s per step']:.2f}",
            "times storing": f"{row['times the baseline']:.2f}",
        }
        for row in rows
    ]


TABLES: dict[str, Callable[[list[dict]], list[dict]]] = {
    "memory": memory,
    "speed": speed,
}


def rendered(text: str) -> str:
    """Fill each marked place from the committed result of its name."""
    for name, choose in TABLES.items():
        result = Result(**json.loads((RESULTS / f"{name}_cpu.json").read_text()))
        result.rows = choose(result.rows)
        versions = result.environment
        source = (
            f"{result.setting}. {versions['processor']}, {versions['threads']} thread(s), "
            f"torch {versions['torch']}, {versions['date']}."
        )
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        filled = f"{result.table()}\n\n{source}\n"
        text = place.sub(lambda m, f=filled: f"{m[1]}{f}{m[2]}", text)
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
