"""Write the tables and the picture of docs/PUBLISHED.md: python -m tests.docs.published.

Each of the paper's memory tables stands beside what ``tests.docs.reproduced`` counts in
its setting. The README's tables and those of other pages are written by
``tests.benchmarks.readme``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from speechbrain_rev.catalog.counts import counted_with
from speechbrain_rev.catalog.table import CARD_BYTES
from speechbrain_rev.plots import PartsBar, memory_parts
from speechbrain_rev.sizes import GB, GIB, MIB, card_text, reserve_of, reserve_text
from tests.benchmarks.harness import markdown
from tests.benchmarks.readme import filled
from tests.docs.reproduced import (
    SHARED_PARTS,
    TOTAL_BATCH,
    ReproducedCards,
    ReproducedTraining,
    reproduced_breakdowns,
    reproduced_cards,
    reproduced_trainings,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
Row = TypeVar("Row")
PAGE, PICTURE = DOCS / "PUBLISHED.md", DOCS / "published.png"


def table_one() -> str:
    """Show Table I beside what is counted here, and what both name alike."""
    rows: dict[str, dict[str, str]] = {}
    for column, ours in reproduced_breakdowns():
        sides = {
            "published, GB": column.parts_gb,
            "counted, GiB": {part: n / GIB for part, n in ours.report.parts.items()},
        }
        for side, parts in sides.items():
            head = f"{column.name}, batch {column.batch}: {side}"
            for part in ours.report.parts:
                row = rows.setdefault(part, {"part": part.replace("_", " ")})
                row[head] = f"{parts[part]:.3f}" if part in parts else "not named"
            shares = rows.setdefault("shares", {"part": "share of activations"})
            shared = sum(parts[part] for part in SHARED_PARTS)
            shares[head] = f"{parts['activations'] / shared:.1%}"
    note = (
        "Share of activations: of activations, optimizer states and weights together, "
        "which both sides understand alike."
    )
    return "\n\n".join([markdown(list(rows.values())), note])


def tables_five_and_six() -> str:
    """Show Tables V and VI beside what is counted here."""
    return _beside(TRAINING_COLUMNS, reproduced_trainings(), training_note())


def table_seven() -> str:
    """Show Table VII beside what is counted here."""
    return _beside(CARDS_COLUMNS, reproduced_cards(), _reserve())


TABLES: dict[str, Callable[[], str]] = {
    "table_one": table_one,
    "tables_five_and_six": tables_five_and_six,
    "table_seven": table_seven,
}


def rendered() -> str:
    """Give the page with its tables written anew."""
    return filled(PAGE.read_text(), TABLES)


def draw(path: Path) -> None:
    """Draw Table I beside what is counted here, as the paper's Figure 1 does."""
    bars = []
    for column, ours in reproduced_breakdowns():
        group = f"{column.name}, batch {column.batch}"
        published = {part: size * GB for part, size in column.parts_gb.items()}
        bars.append(PartsBar(group, "published", published))
        bars.append(PartsBar(group, "counted", ours.report.parts))
    memory_parts(
        bars,
        path,
        title="Memory of a training step: Table I of the paper, and counted here",
        source="Published in GB: a 2080 Ti, gradients not named, others are the framework's. "
        "Counted: meta tensors, float32, 200 frames, others are the batch.",
    )


def training_note() -> str:
    """Give the ranges of what was published and counted."""
    rows = reproduced_trainings()
    published = [row.published.memory_gb * row.published.max_batch for row in rows]
    shares = [r.memory_gb / r.published.memory_gb for r in rows if r.row.reversible]
    return (
        "The published GB times the published largest batches are "
        f"{min(published):.1f} to {max(published):.1f} GB. Reversible encoders take "
        f"{min(shares):.2f} to {max(shares):.2f} of the published memory here. {_reserve()}"
    )


def _reserve() -> str:
    reserve = reserve_text(reserve_of(CARD_BYTES))
    return (
        f"The largest batch here fits {card_text(CARD_BYTES)}, {reserve}. Counted with "
        f"torch {counted_with()['torch']}."
    )


def _beside(
    columns: Mapping[str, Callable[[Row], str]], rows: Sequence[Row], note: str
) -> str:
    """Write columns of text as markdown."""
    cells = [{head: text(row) for head, text in columns.items()} for row in rows]
    return "\n\n".join([markdown(cells), note])


def _encoder(each: ReproducedTraining) -> str:
    if each.published.optimizer_bits == 32:
        return each.row.name
    return f"+ {each.row.optimizer_name} 8 bit"


def _compared(each: ReproducedTraining, which: int) -> str:
    """Compare a batch with the counterpart's, or that of 8 bit with that of 32."""
    if each.compared_max_batch is None:
        return "-"
    batch = (each.published.max_batch, each.max_batch)[which]
    other = each.compared_max_batch[which]
    at_8_bit = each.published.optimizer_bits == 8
    return f"{batch - other:+d}" if at_8_bit else f"{batch / other:.2f}x"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


TRAINING_COLUMNS: dict[str, Callable[[ReproducedTraining], str]] = {
    "encoder": _encoder,
    "type": lambda r: r.row.type if r.row.reversible else "-",
    "param., M: publ.": lambda r: f"{r.row.published_params_m:.1f}",
    "param., M: here": lambda r: f"{r.row.parameters / 1e6:.2f}",
    "memory per utterance: publ., GB": lambda r: f"{r.published.memory_gb:g}",
    "memory per utterance: here, MiB": lambda r: f"{r.memory_gb * GB / MIB:.1f}",
    "ratio: publ.": lambda r: _ratio(r.published.ratio),
    "ratio: here": lambda r: _ratio(r.ratio),
    "largest batch: publ.": lambda r: str(r.published.max_batch),
    "largest batch: here": lambda r: str(r.max_batch),
    "compared: publ.": lambda r: _compared(r, 0),
    "compared: here": lambda r: _compared(r, 1),
    "published EER: O": lambda r: f"{r.published.vox1_o_eer:.2f}",
    "published EER: E": lambda r: f"{r.published.vox1_e_eer:.2f}",
    "published EER: H": lambda r: f"{r.published.vox1_h_eer:.2f}",
}

_CARDS = f"GPUs for {TOTAL_BATCH}"

CARDS_COLUMNS: dict[str, Callable[[ReproducedCards], str]] = {
    "encoder": lambda r: r.name,
    f"{_CARDS}: publ.": lambda r: str(r.published.cards),
    f"{_CARDS}: here": lambda r: str(r.cards),
    f"{_CARDS}: recompute": lambda r: str(r.cards_recomputed),
    "largest batch: here": lambda r: str(r.max_batch),
    "largest batch: recompute": lambda r: str(r.max_batch_recomputed),
    "published: days": lambda r: str(r.published.days),
    "published: EER": lambda r: f"{r.published.vox1_h_eer:.2f}",
}


if __name__ == "__main__":
    PAGE.write_text(rendered())
    draw(PICTURE)
