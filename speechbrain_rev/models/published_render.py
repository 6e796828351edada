"""Tables V, VI and VII of the paper beside what is counted here, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from speechbrain_rev.models.card import CLASSES, reserve_of
from speechbrain_rev.models.columns import Column, Row, aligned
from speechbrain_rev.models.counts import counted_with
from speechbrain_rev.models.published import (
    CARD_BYTES,
    FRAMES,
    TOTAL_BATCH,
    ReproducedCards,
    ReproducedTraining,
    published_trainings,
    reproduced_cards,
    reproduced_trainings,
)
from speechbrain_rev.models.render import PAPER
from speechbrain_rev.sizes import GIB, card_text

_WIDTH = 120


def trainings_as_text() -> str:
    """Print Tables V and VI beside what is counted here.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> trainings_as_text().splitlines()[2].split()[:6]
    ['resnet34', '-', '6.6', '6.63', '0.06', '0.0649']
    """
    return _text(TRAINING_COLUMNS, reproduced_trainings(), training_sources())


def trainings_as_json() -> str:
    """Print Tables V and VI and what is counted here as JSON, units in the names.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> document = json.loads(trainings_as_json())
    >>> document["tables_five_and_six"][0]["published"]["max_batch"]
    154
    """
    rows = []
    for each in reproduced_trainings():
        plain = dataclasses.asdict(each)
        rows.append({"published": plain.pop("published"), "computed": plain})
    return _json("tables_five_and_six", rows, training_sources())


def cards_as_text() -> str:
    """Print Table VII beside what is counted here.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> cards_as_text().splitlines()[2].split()
    ['resnet101', '9', '9', '3', '30', '95', '2', '1.48']
    """
    return _text(CARDS_COLUMNS, reproduced_cards(), cards_sources())


def cards_as_json() -> str:
    """Print Table VII and what is counted here as JSON, units in the names.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> json.loads(cards_as_json())["table_seven"][0]["computed"]["cards"]
    9
    """
    rows = [
        {
            "name": each.name,
            "published": each.published._asdict(),
            "computed": {
                "cards": each.cards,
                "cards_recomputed": each.cards_recomputed,
                "max_batch": each.max_batch,
                "max_batch_recomputed": each.max_batch_recomputed,
            },
        }
        for each in reproduced_cards()
    ]
    return _json("table_seven", rows, cards_sources())


def training_sources() -> dict[str, str]:
    """Say what the figures of Tables V and VI are, and why they differ.

    Returns
    -------
    dict of str to str
        Sentences by what they are about.
    """
    return {
        "published": f'publ.: Tables V and VI of "{PAPER}", measured there on a 2080 Ti of '
        "11 GB with utterances of 2 s. Error rates, in percent, are the published ones "
        "alone; none was reproduced here.",
        "computed": f"here: utterances of {FRAMES} frames in float32, vanilla encoders "
        "stored, reversible ones reconstructed, states of 32 bit but where 8 is said. GB "
        "(1e9 bytes) per utterance: all that a training step takes of the card (the "
        "encoder's own, weights, gradients, optimizer states, a classifier of "
        f"{CLASSES} and its step, the input) at the published largest batch, divided by "
        "it. Ratio: that of the vanilla counterpart over it. Largest batch: the one that "
        f"{_reserve()}; compared: how many times the counterpart's, for 8 bit how many "
        "more than with 32.",
        "difference": "Why they differ: the paper measured memory of a GPU in an "
        "implementation of its own and does not say how it was divided by the batch (its "
        f"GB times its largest batches are {_published_range()} GB); here "
        f"live tensors are counted on meta tensors (torch {counted_with()['torch']}), so "
        "that no workspace and no fragmentation is in GB per utterance, and no card was "
        f"tried. Reversible encoders take {_shares()} of the published memory here. That "
        "they work in chunks is a part of the cause, not all of it: why the published "
        "figures are higher is not known. What stays free of a card was set by the batches "
        "published for vanilla encoders, so that those are no evidence. 8 bit saves the "
        "same bytes at any batch: little for each utterance, a few utterances in all.",
    }


def cards_sources() -> dict[str, str]:
    """Say what the figures of Table VII are, and why they differ.

    Returns
    -------
    dict of str to str
        Sentences by what they are about.
    """
    return {
        "published": f'publ.: Table VII of "{PAPER}": 2080 Ti cards of 11 GB for a total '
        f"batch of {TOTAL_BATCH}, days of training and error rate on Vox1-H in percent. "
        "Days and error rates were not reproduced here.",
        "computed": f"here: {TOTAL_BATCH} over the largest batch that {_reserve()}, rounded "
        f"up; {FRAMES} frames, float32, states of 32 bit; vanilla encoders stored, "
        "reversible ones reconstructed. recomp.: the same with each block checkpointed, "
        "which the paper does not show.",
        "difference": "Why they differ: batches here follow from counts of live tensors "
        f"(torch {counted_with()['torch']}), no card was tried. Reversible encoders take "
        f"{_shares()} of the published memory here (Tables V and VI) and fit larger "
        "batches; that they work in chunks is a part of the cause. What stays free of a "
        "card was set by the batches published for vanilla encoders, so that those are no "
        "evidence.",
    }


def _published_range() -> str:
    """Give the least and the most that the published figures say a card holds."""
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


def _text(
    columns: Sequence[Column[Row]], rows: Sequence[Row], sources: dict[str, str]
) -> str:
    notes = [textwrap.fill(note, _WIDTH) for note in sources.values()]
    return "\n".join([*aligned(columns, rows), "", *notes, ""])


def _json(name: str, rows: Sequence[Any], sources: dict[str, str]) -> str:
    document = {
        "paper": PAPER,
        "sources": sources,
        "counted_with": counted_with(),
        name: rows,
    }
    return json.dumps(document, indent=1) + "\n"


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


_GB, _BATCH, _COMPARED = "GB per utterance", "largest batch", "compared"
_EER = "published EER"

TRAINING_COLUMNS: list[Column[ReproducedTraining]] = [
    Column("", "encoder", _encoder),
    Column("", "type", lambda r: r.row.type if r.row.reversible else "-"),
    Column("param., M", "publ.", lambda r: f"{r.row.published_params_m:.1f}"),
    Column("param., M", "here", lambda r: f"{r.row.parameters / 1e6:.2f}"),
    Column(_GB, "publ.", lambda r: f"{r.published.memory_gb:g}"),
    Column(_GB, "here", lambda r: f"{r.memory_gb:.4f}"),
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

_CARDS = f"cards for {TOTAL_BATCH}"

CARDS_COLUMNS: list[Column[ReproducedCards]] = [
    Column("", "encoder", lambda r: r.name),
    Column(_CARDS, "publ.", lambda r: str(r.published.cards)),
    Column(_CARDS, "here", lambda r: str(r.cards)),
    Column(_CARDS, "recomp.", lambda r: str(r.cards_recomputed)),
    Column(_BATCH, "here", lambda r: str(r.max_batch)),
    Column(_BATCH, "recomp.", lambda r: str(r.max_batch_recomputed)),
    Column("published", "days", lambda r: str(r.published.days)),
    Column("published", "EER", lambda r: f"{r.published.vox1_h_eer:.2f}"),
]
