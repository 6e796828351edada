"""Write the tables and the picture of docs/PUBLISHED.md: python -m tests.docs.published.

Each of the paper's memory tables stands beside what ``tests.docs.reproduced`` counts in
its setting. The README's tables and those of other pages are written by
``tests.benchmarks.readme``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from speechbrain_rev.architectures import HEAD
from speechbrain_rev.catalog.columns import Column, Row
from speechbrain_rev.catalog.table import (
    CARD_BYTES,
    PAPER,
    PUBLISHED_FRAMES,
    TOTAL_BATCH,
    counted_with,
)
from speechbrain_rev.plots import PartsBar, memory_parts
from speechbrain_rev.sizes import GB, GIB, MIB, card_text, reserve_of
from tests.benchmarks.harness import markdown
from tests.benchmarks.readme import filled
from tests.docs.reproduced import (
    SHARED_PARTS,
    ReproducedCards,
    ReproducedTraining,
    published_trainings,
    reproduced_breakdowns,
    reproduced_cards,
    reproduced_trainings,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "PUBLISHED.md", DOCS / "published.png"


def table_one() -> str:
    """Show Table I beside what is counted here, and what both name alike."""
    rows: dict[str, dict[str, str]] = {}
    for column, ours in reproduced_breakdowns():
        head = f"{column.name}, batch {column.batch}"
        counted = {part: size / GIB for part, size in ours.report.parts.items()}
        for part, size in counted.items():
            row = rows.setdefault(part, {"part": part.replace("_", " ")})
            published = column.parts_gb.get(part)
            row[f"{head}: published, GB"] = (
                "not named" if published is None else f"{published:.3f}"
            )
            row[f"{head}: counted, GiB"] = f"{size:.3f}"
        shares = rows.setdefault("shares", {"part": "share of activations"})
        for whose, parts in (
            ("published, GB", column.parts_gb),
            ("counted, GiB", counted),
        ):
            shared = sum(parts[part] for part in SHARED_PARTS)
            shares[f"{head}: {whose}"] = f"{parts['activations'] / shared:.1%}"
    note = (
        "Share of activations: of activations, optimizer states and weights together, "
        "which both sides understand alike."
    )
    return "\n\n".join([markdown(list(rows.values())), note])


def tables_five_and_six() -> str:
    """Show Tables V and VI beside what is counted here."""
    return _beside(TRAINING_COLUMNS, reproduced_trainings(), training_notes())


def table_seven() -> str:
    """Show Table VII beside what is counted here."""
    return _beside(CARDS_COLUMNS, reproduced_cards(), cards_notes())


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
        unit="GB",
        source="Published: a 2080 Ti, gradients not named, others are the framework's. "
        "Counted: meta tensors, float32, 200 frames, others are the batch.",
    )


def training_notes() -> list[str]:
    """Say what the figures of Tables V and VI are, and why they differ."""
    return [
        f'publ.: Tables V and VI of "{PAPER}", measured there on a 2080 Ti of 11 GB with '
        "utterances of 2 s. Error rates, in percent, are the published ones alone; none "
        "was reproduced here.",
        f"here: utterances of {PUBLISHED_FRAMES} frames in float32, vanilla encoders stored, "
        "reversible ones reconstructed, 32-bit states, or 8-bit where named. MiB "
        "per utterance: all that a training step takes of the GPU (the encoder's own, "
        f"weights, gradients, optimizer states, a classifier of {HEAD.classes} and its "
        "step, the input) at the published largest batch, divided by it. Ratio: that of "
        f"the vanilla counterpart over it. Largest batch: the one that {_reserve()}; "
        "compared: how many times the counterpart's, for 8 bit how many more than with 32.",
        "Why they differ: the paper measured memory of a GPU in an implementation of its "
        "own and does not say how it was divided by the batch (its GB times its largest "
        f"batches are {_published_range()} GB); here live tensors are counted on meta "
        f"tensors (torch {counted_with()['torch']}), so that no workspace and no "
        "fragmentation is in MiB per utterance, and no GPU was tried. Reversible encoders "
        f"take {_shares()} of the published memory here. That they work in chunks is a part "
        "of the cause, not all of it: why the published figures are higher is not known. "
        "What stays free of a GPU was set by the batches published for vanilla encoders, "
        "so that those are no evidence. 8 bit saves the same bytes at any batch: little "
        "for each utterance, a few utterances in all.",
    ]


def cards_notes() -> list[str]:
    """Say what the figures of Table VII are, and why they differ."""
    return [
        f'publ.: Table VII of "{PAPER}": 2080 Ti GPUs of 11 GB for a total batch of '
        f"{TOTAL_BATCH}, days of training and error rate on Vox1-H in percent. Days and "
        "error rates were not reproduced here.",
        f"here: {TOTAL_BATCH} over the largest batch that {_reserve()}, rounded up; "
        f"{PUBLISHED_FRAMES} frames, float32, 32-bit states; vanilla encoders stored, reversible ones "
        "reconstructed. recompute: the same with each block checkpointed, which the paper "
        "does not show.",
        "Why they differ: batches here follow from counts of live tensors (torch "
        f"{counted_with()['torch']}), no GPU was tried. Reversible encoders take "
        f"{_shares()} of the published memory here (Tables V and VI) and fit larger "
        "batches; that they work in chunks is a part of the cause. What stays free of a "
        "GPU was set by the batches published for vanilla encoders, so that those are no "
        "evidence.",
    ]


def _published_range() -> str:
    """Give the least and the most that the published figures say a GPU holds."""
    sizes = [row.memory_gb * row.max_batch for row in published_trainings()]
    return f"{min(sizes):.1f} to {max(sizes):.1f}"


def _shares() -> str:
    """Give the least and the largest part of the published memory that is counted."""
    shares = [
        each.memory_gb / each.published.memory_gb
        for each in reproduced_trainings()
        if each.row.reversible
    ]
    return f"{min(shares):.2f} to {max(shares):.2f}"


def _reserve() -> str:
    reserve_gib = reserve_of(CARD_BYTES) / GIB
    return f"leaves {reserve_gib:.1f} GiB of {card_text(CARD_BYTES)} free"


def _beside(
    columns: Sequence[Column[Row]], rows: Sequence[Row], notes: Iterable[str]
) -> str:
    """Write columns of text as markdown."""
    heads = [f"{column.group}: {column.head}".lstrip(": ") for column in columns]
    cells = [
        dict(zip(heads, (column.cell(row) for column in columns), strict=True))
        for row in rows
    ]
    return "\n\n".join([markdown(cells), *notes])


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


_MEMORY, _BATCH, _COMPARED = "memory per utterance", "largest batch", "compared"
_EER = "published EER"

TRAINING_COLUMNS: list[Column[ReproducedTraining]] = [
    Column("", "encoder", _encoder),
    Column("", "type", lambda r: r.row.type if r.row.reversible else "-"),
    Column("param., M", "publ.", lambda r: f"{r.row.published_params_m:.1f}"),
    Column("param., M", "here", lambda r: f"{r.row.parameters / 1e6:.2f}"),
    Column(_MEMORY, "publ., GB", lambda r: f"{r.published.memory_gb:g}"),
    Column(_MEMORY, "here, MiB", lambda r: f"{r.memory_gb * GB / MIB:.1f}"),
    Column("ratio", "publ.", lambda r: _ratio(r.published.ratio)),
    Column("ratio", "here", lambda r: _ratio(r.ratio)),
    Column(_BATCH, "publ.", lambda r: str(r.published.max_batch)),
    Column(_BATCH, "here", lambda r: str(r.max_batch)),
    Column(_COMPARED, "publ.", lambda r: _compared(r, 0)),
    Column(_COMPARED, "here", lambda r: _compared(r, 1)),
    Column(_EER, "O", lambda r: f"{r.published.vox1_o_eer:.2f}"),
    Column(_EER, "E", lambda r: f"{r.published.vox1_e_eer:.2f}"),
    Column(_EER, "H", lambda r: f"{r.published.vox1_h_eer:.2f}"),
]

_CARDS = f"GPUs for {TOTAL_BATCH}"

CARDS_COLUMNS: list[Column[ReproducedCards]] = [
    Column("", "encoder", lambda r: r.name),
    Column(_CARDS, "publ.", lambda r: str(r.published.cards)),
    Column(_CARDS, "here", lambda r: str(r.cards)),
    Column(_CARDS, "recompute", lambda r: str(r.cards_recomputed)),
    Column(_BATCH, "here", lambda r: str(r.max_batch)),
    Column(_BATCH, "recompute", lambda r: str(r.max_batch_recomputed)),
    Column("published", "days", lambda r: str(r.published.days)),
    Column("published", "EER", lambda r: f"{r.published.vox1_h_eer:.2f}"),
]


if __name__ == "__main__":
    PAGE.write_text(rendered())
    draw(PICTURE)
