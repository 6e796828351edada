"""Paste the committed figures into the README: python -m tests.benchmarks.readme.

The picture is drawn by ``speechbrain-rev models --plot docs/models.png``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from speechbrain_rev.models import Model, Training, parse_card, select
from speechbrain_rev.models.render import sources
from speechbrain_rev.models.table import MODES

from .harness import Result, markdown

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
README = ROOT / "README.md"

CARD = "11GB"
BATCH = 128


def models() -> str:
    """Show what each encoder needs, by mode, and what fits a card."""
    training = Training(parse_card(CARD), batch=BATCH, frames=200)
    rows = [_model(model) for model in select(training)]
    heads = (
        f"EER is that on Vox1-H, GB the memory per utterance of 2 s, batch the largest on "
        f"an {CARD} card, bold where {BATCH} fit."
    )
    return "\n\n".join([markdown(rows), heads, *sources(training).values()])


def _model(model: Model) -> dict[str, str]:
    row = {
        "encoder": model.row.name,
        "params, M": f"{model.row.parameters / 1e6:.1f}",
        "published EER, %": f"{model.row.vox1_h_eer:.2f}",
    }
    for mode in MODES:
        size = model.bytes_per_utterance(mode, 200)
        row[f"GB {mode}"] = "" if size is None else f"{size / 1e9:.4f}"
    for mode in MODES:
        batch = model.largest_batch(mode)
        # Bold is what the question asks for.
        shown = f"**{batch}**" if batch is not None and batch >= BATCH else batch
        row[f"batch {mode}"] = "" if shown is None else str(shown)
    return row


def speed() -> str:
    """Show ratios, which hold for more than one machine."""
    result = Result(**json.loads((RESULTS / "speed_cpu.json").read_text()))
    rows = [
        {
            "encoder": row["encoder"],
            "mode": row["mode"],
            "s per step": f"{row['s per step']:.2f}",
            "times storing": f"{row['times the baseline']:.2f}",
        }
        for row in result.rows
    ]
    versions = result.environment
    return (
        f"{markdown(rows)}\n\n{result.setting}. {versions['processor']}, "
        f"{versions['threads']} thread(s), torch {versions['torch']}, {versions['date']}."
    )


TABLES: dict[str, Callable[[], str]] = {"models": models, "speed": speed}


def rendered(text: str) -> str:
    """Fill each marked place from the committed figures of its name."""
    for name, table in TABLES.items():
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        filled = f"{table()}\n"
        text = place.sub(lambda m, f=filled: f"{m[1]}{f}{m[2]}", text)
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
