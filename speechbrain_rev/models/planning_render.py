"""Planned encoders as text and as JSON, each figure marked as what it is."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from speechbrain_rev.models.calibration import speed_text
from speechbrain_rev.models.card import (
    CLASSES,
    RESERVE_BYTES,
    RESERVE_SHARE,
    Training,
)
from speechbrain_rev.models.card_at_hand import CardAtHand
from speechbrain_rev.models.columns import CHUNK_NOTE, Column, aligned, chunk_text
from speechbrain_rev.models.counts import counted_with
from speechbrain_rev.models.planning import BASELINE, PlannedEncoder
from speechbrain_rev.models.published import TABLE_SEVEN, TOTAL_BATCH, as_published
from speechbrain_rev.models.render import PAPER
from speechbrain_rev.sizes import GIB, card_text, size_text

_WIDTH = 120


def as_text(
    encoders: Sequence[PlannedEncoder], at_hand: CardAtHand | None = None
) -> str:
    """Print planned encoders as a table, and what its figures are.

    Parameters
    ----------
    encoders : sequence of PlannedEncoder
        The rows; at least one, all of the same training.
    at_hand : CardAtHand or None
        The card, if it was asked and not named.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> from speechbrain_rev.models import Training
    >>> from speechbrain_rev.models.planning import plan_encoders
    >>> training = Training(11 * GIB, batch=128, frames=200)
    >>> text = as_text(plan_encoders(training, names=["resnet34"]))
    >>> text.splitlines()[2].split()[:7]
    ['resnet34', '1.86', '6.6', '7.74', '-', 'counted', '17']
    """
    lines = aligned(_columns(encoders[0].model.training), encoders)
    notes = [textwrap.fill(n, _WIDTH) for n in sources(encoders[0], at_hand).values()]
    return "\n".join([*lines, "", *notes, ""])


def as_json(
    encoders: Sequence[PlannedEncoder], at_hand: CardAtHand | None = None
) -> str:
    """Print planned encoders as JSON: each figure under what it is, units in the names.

    Parameters
    ----------
    encoders : sequence of PlannedEncoder
        As :func:`as_text` takes them.
    at_hand : CardAtHand or None
        The card, if it was asked and not named.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> from speechbrain_rev.models import Training
    >>> from speechbrain_rev.models.planning import plan_encoders
    >>> training = Training(11 * GIB, batch=128, frames=200)
    >>> document = json.loads(as_json(plan_encoders(training, names=["resnet34"])))
    >>> document["encoders"][0]["published"]["cards_of_11_gib_for_256"] is None
    True
    """
    training = encoders[0].model.training
    document = {
        "sources": sources(encoders[0], at_hand),
        "counted_with": counted_with(),
        "speed": json.loads(encoders[0].speed.to_json()),
        "training": {
            "batch": training.batch,
            "frames": training.frames,
            "precision": "float32",
            "card_bytes": training.card_bytes,
            "card_name": None if at_hand is None else at_hand.name,
            "reserve_bytes": training.reserve_bytes,
            "optimizer_state_bits": training.optimizer_bits,
            "classes": CLASSES,
        },
        "encoders": [_plain(encoder) for encoder in encoders],
    }
    return json.dumps(document, indent=1) + "\n"


def sources(
    encoder: PlannedEncoder, at_hand: CardAtHand | None = None
) -> dict[str, str]:
    """Say what each kind of figure is.

    Parameters
    ----------
    encoder : PlannedEncoder
        One of those shown; all are of the same training.
    at_hand : CardAtHand or None
        The card, if it was asked and not named.

    Returns
    -------
    dict of str to str
        Sentences by what they are about.
    """
    training = encoder.model.training
    assert training.card_bytes is not None
    card = card_text(training.card_bytes)
    if at_hand is None:
        told = f"A card of {card} was named; none was tried."
    else:
        told = (
            f"{card} were free of {card_text(at_hand.total_bytes)} on {at_hand.name}, "
            "which was asked for that alone."
        )
    versions = counted_with()
    return {
        "published": f"Published: {_compared(training)} of "
        f'"{PAPER}". They were not reproduced here.',
        "card": f"{told} {training.reserve_bytes / GIB:.2f} GiB stay free: "
        f"{RESERVE_BYTES / GIB:g} GiB and {RESERVE_SHARE:g} of it are assumed for CUDA, "
        "workspaces and fragmentation.",
        "plan": f"Plan: the fastest modes of all blocks with which {training.batch} "
        f"utterances of {training.frames} frames in float32 fit, or the lightest where "
        "none fit; then `lacks` says how much there is too little. GiB: the peak of the "
        "encoder's step, with weights, gradients, states of "
        f"{training.optimizer_bits} bit, a classifier of {CLASSES} and the input, as if "
        "all peaked at once. store, recom., recon.: blocks of each mode. " + CHUNK_NOTE,
        "how": "predicted: the step's peak follows from a shallow encoder of the kind, run "
        "on meta tensors; counted: the encoder itself ran with the plan, on meta tensors. "
        f"Neither was measured on a card (torch {encoder.profile.about['torch']}).",
        "time": "Step time: estimated from counts of operations for "
        f"{speed_text(encoder.speed)}. store and {BASELINE}: times that of the same encoder, and of {BASELINE}, "
        "all stored and all channels at once. utt./s: estimated likewise for "
        f"{training.batch} utterances with this plan, with the optimizer's step, without "
        "classifier and reading.",
        "batch": "max batch: the largest that fits, at least, computed from counts on meta tensors (torch "
        f"{versions['torch']}, {versions['date']}), for the lightest of the modes that all "
        "blocks can share, at the default chunk (that of the plan is chosen for its batch "
        "alone), or for the plan if that is more. Plans whose chunk is chosen for it may "
        f"fit a larger one; --batch tries it. Cards for {TOTAL_BATCH}: such cards for "
        "batches that large to make a total of that, computed, so at most; `store` if all "
        "is stored.",
    }


def _compared(training: Training) -> str:
    """Name what is shown of the paper: batches and cards only beside the same ones."""
    if as_published(training):
        return "EER on Vox1-H, largest batch and cards of 11 GiB (Tables V, VI, VII)"
    return (
        "EER on Vox1-H (Tables V, VI; largest batches there are for 2 s on 11 GiB, not "
        "shown)"
    )


def _columns(training: Training) -> list[Column[PlannedEncoder]]:
    plan, time = f"plan for batch {training.batch}", "estimated time, rate"
    largest, cards = "max batch", f"cards for {TOTAL_BATCH}"
    columns: list[Column[PlannedEncoder]] = [
        Column("", "encoder", lambda e: e.model.row.name),
        Column("publ.", "EER", lambda e: f"{e.model.row.vox1_h_eer:.2f}"),
        Column("param.", "M", lambda e: f"{e.model.row.parameters / 1e6:.1f}"),
        Column(plan, "GiB", lambda e: f"{e.needed_bytes / GIB:.2f}"),
        Column(plan, "lacks", _lacking),
        Column(plan, "how", _how),
        Column(plan, "store", lambda e: str(e.mode_counts["store"])),
        Column(plan, "recom.", lambda e: str(e.mode_counts["recompute"])),
        Column(plan, "recon.", _reconstructed),
        Column(plan, "chunk", lambda e: chunk_text(e.channels)),
        Column(time, "store", lambda e: f"{e.times_stored:.2f}"),
        Column(time, BASELINE, lambda e: f"{e.times_baseline:.2f}"),
        Column(time, "utt./s", _rate),
        Column(largest, ">=", lambda e: str(e.largest_batch)),
        Column(largest, "publ.", lambda e: str(e.model.row.published_max_batch_11gb)),
        Column(cards, "store", lambda e: str(e.cards_stored or "-")),
        Column(cards, "<=", lambda e: str(e.cards or "-")),
        Column(cards, "publ.", lambda e: str(_published_cards(e) or "-")),
    ]
    compared = as_published(training)
    return [
        column
        for column in columns
        if compared or column.head != "publ." or column.group not in (largest, cards)
    ]


def _rate(encoder: PlannedEncoder) -> str:
    rate = encoder.utterances_per_second
    return "-" if rate is None else f"{rate:.1f}"


def _lacking(encoder: PlannedEncoder) -> str:
    lacking = encoder.lacking_bytes
    return size_text(lacking) if lacking else "-"


def _how(encoder: PlannedEncoder) -> str:
    return "predicted" if encoder.counted_bytes is None else "counted"


def _reconstructed(encoder: PlannedEncoder) -> str:
    count = encoder.mode_counts["reconstruct"]
    return str(count) if encoder.model.row.reversible else "-"


def _published_cards(encoder: PlannedEncoder) -> int | None:
    row = TABLE_SEVEN.get(encoder.model.row.name)
    return None if row is None else row.cards


def _plain(encoder: PlannedEncoder) -> dict[str, Any]:
    model = encoder.model
    row = model.row
    return {
        "name": row.name,
        "family": row.family,
        "type": row.type,
        "parameters": row.parameters,
        "published": {
            "vox1_h_eer_percent": row.vox1_h_eer,
            "gb_per_2_s_utterance": row.published_memory_gb,
            "largest_batch_on_11_gib": row.published_max_batch_11gb,
            f"cards_of_11_gib_for_{TOTAL_BATCH}": _published_cards(encoder),
        },
        "plan": {
            "fits": not encoder.lacking_bytes,
            "modes": dict(encoder.modes),
            "channels": list(encoder.channels),
        },
        "predicted": {
            "step_peak_bytes": encoder.predicted_bytes,
            "seconds": encoder.seconds,
            "utterances_per_second": encoder.utterances_per_second,
            "times_stored": encoder.times_stored,
            f"times_{BASELINE}_stored": encoder.times_baseline,
        },
        "counted": {
            "step_peak_bytes": encoder.counted_bytes,
        },
        "computed": {
            "needed_bytes": encoder.needed_bytes,
            "lacking_bytes": encoder.lacking_bytes,
            "largest_batch": encoder.largest_batch,
            "largest_batch_by_mode": {m: model.largest_batch(m) for m in model.modes},
            f"cards_for_{TOTAL_BATCH}": encoder.cards,
            f"cards_for_{TOTAL_BATCH}_stored": encoder.cards_stored,
        },
    }
