"""The paper's memory tables as printed, and what is counted here in their settings.

Tables V and VI (memory, ratio and largest batch of each encoder), VII (GPUs for a batch of
256) and I (where the memory of two steps goes).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from speechbrain_rev.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture,
)
from speechbrain_rev.catalog.breakdown import EncoderBreakdown, encoder_breakdown
from speechbrain_rev.catalog.table import CARD_BYTES, Training
from speechbrain_rev.heads import Head
from speechbrain_rev.sizes import GB

#: Frames of the paper's utterances, and its example of a batch that several GPUs share.
PUBLISHED_FRAMES, TOTAL_BATCH = 200, 256

# fmt: off
#: What Tables V and VI say of reversible encoders beside ``architectures``.
_REVERSIBLE: dict[str, tuple[float, float, float, int, float, float, float]] = {
    # 32 bit: ratio; 8 bit: GB per utterance, ratio, batch, EER on Vox1-O, E, H.
    "revnet46":     (1.50, 0.039,  1.54, 236, 0.87, 1.04, 1.88),
    "revnet57":     (2.00, 0.029,  2.07, 301, 0.92, 1.03, 1.87),
    "revnet126":    (8.25, 0.039,  8.46, 215, 0.62, 0.83, 1.49),
    "revnet137":    (11.00, 0.029, 11.37, 299, 0.62, 0.83, 1.51),
    "revnet140":    (2.20, 0.147,  2.24,  63, 0.62, 0.82, 1.47),
    "revnet155":    (2.75, 0.118,  2.80,  75, 0.62, 0.83, 1.49),
    "revnet178":    (11.75, 0.039, 12.05, 213, 0.57, 0.77, 1.43),
    "revnet197":    (15.67, 0.029, 16.21, 297, 0.55, 0.76, 1.44),
    "revnet230":    (2.35, 0.195,  2.41,  49, 0.52, 0.73, 1.36),
    "revnet245":    (3.92, 0.118,  3.98,  74, 0.53, 0.75, 1.38),
    "df_revnet66":  (4.44, 0.079,  4.49, 138, 0.89, 1.10, 2.01),
    "df_revnet89":  (4.61, 0.076,  4.67, 142, 0.90, 1.07, 1.98),
    "df_revnet126": (6.30, 0.082,  6.38, 134, 0.73, 0.89, 1.64),
    "df_revnet149": (6.79, 0.076,  6.88, 138, 0.75, 0.87, 1.65),
    "df_revnet258": (11.44, 0.074, 11.59, 138, 0.61, 0.82, 1.53),
    "df_revnet281": (11.75, 0.072, 11.92, 141, 0.61, 0.83, 1.52),
    "df_revnet354": (13.78, 0.074, 13.97, 147, 0.60, 0.77, 1.47),
    "df_revnet377": (14.16, 0.072, 14.36, 150, 0.59, 0.79, 1.45),
}
# fmt: on


@dataclass(frozen=True)
class PublishedTraining:
    """A row of Table V or VI as printed.

    Attributes
    ----------
    name : str
        The encoder.
    optimizer_bits : {8, 32}
        Of the optimizer's states.
    memory_gb : float
        For each utterance of 2 seconds.
    ratio : float or None
        Of the counterpart's memory to it; None for vanilla encoders.
    max_batch : int
        Largest batch on an 11 GB GPU.
    vox1_o_eer, vox1_e_eer, vox1_h_eer : float
        In percent.
    """

    name: str
    optimizer_bits: int
    memory_gb: float
    ratio: float | None
    max_batch: int
    vox1_o_eer: float
    vox1_e_eer: float
    vox1_h_eer: float


class PublishedCards(NamedTuple):
    """A row of Table VII as printed.

    Attributes
    ----------
    cards : int
        11 GB GPUs for a batch of ``TOTAL_BATCH``.
    days : int
        Of training.
    vox1_h_eer : float
        In percent.
    """

    cards: int
    days: int
    vox1_h_eer: float


TABLE_SEVEN = {
    "resnet101": PublishedCards(9, 2, 1.48),
    "revnet137": PublishedCards(1, 3, 1.49),
    "resnet152": PublishedCards(12, 3, 1.39),
    "revnet197": PublishedCards(1, 5, 1.42),
    "df_resnet179": PublishedCards(19, 3, 1.51),
    "df_revnet281": PublishedCards(2, 5, 1.53),
    "df_resnet233": PublishedCards(22, 4, 1.44),
    "df_revnet377": PublishedCards(2, 6, 1.46),
}


@dataclass(frozen=True)
class ReproducedTraining:
    """A row of Table V or VI, and what is counted here for it.

    Attributes
    ----------
    published : PublishedTraining
        The row.
    memory_gb : float
        All that a training step takes of a GPU at the published largest batch, for each
        of its utterances, in GB (1e9 bytes).
    ratio : float or None
        Of the counterpart's memory to it, both with states as in the table: the
        counterpart's have 32 bit.
    max_batch : int
        Largest batch on an 11 GB GPU.
    compared_max_batch : (int, int) or None
        Published and ours of what that batch is compared with: the vanilla counterpart,
        or the encoder itself at 32 bit. None for vanilla encoders.
    """

    published: PublishedTraining
    memory_gb: float
    ratio: float | None
    max_batch: int
    compared_max_batch: tuple[int, int] | None

    @property
    def row(self) -> Architecture:
        """The encoder."""
        return architecture(self.published.name)


@dataclass(frozen=True)
class ReproducedCards:
    """A row of Table VII, and what is counted here for it, with 32-bit states.

    Attributes
    ----------
    name : str
        The encoder.
    published : PublishedCards
        The row.
    max_batch, max_batch_recomputed : int
        Largest batch on an 11 GB GPU in the encoder's default mode (stored for
        vanilla encoders, as published), and where blocks are checkpointed instead.
    """

    name: str
    published: PublishedCards
    max_batch: int
    max_batch_recomputed: int

    @property
    def cards(self) -> int:
        """Such GPUs for a batch of ``TOTAL_BATCH``."""
        return math.ceil(TOTAL_BATCH / self.max_batch)

    @property
    def cards_recomputed(self) -> int:
        """The same where blocks are checkpointed."""
        return math.ceil(TOTAL_BATCH / self.max_batch_recomputed)


def published_trainings() -> list[PublishedTraining]:
    """Give the rows of Tables V and VI.

    Returns
    -------
    list of PublishedTraining
        Each vanilla encoder before its counterparts, 32 bit before 8.

    Examples
    --------
    >>> rows = published_trainings()
    >>> len(rows), [(row.name, row.optimizer_bits) for row in rows[:3]]
    (43, [('resnet34', 32), ('revnet46', 32), ('revnet46', 8)])
    """
    rows = []
    for row in ARCHITECTURES.values():
        memory_gb, batch = row.published_memory_gb, row.published_max_batch_11gb
        o, e, h = row.vox1_o_eer, row.vox1_e_eer, row.vox1_h_eer
        if memory_gb is None or batch is None or o is None or e is None or h is None:
            continue
        ratio, *at_8_bit = _REVERSIBLE.get(row.name, (None,))
        rows.append(PublishedTraining(row.name, 32, memory_gb, ratio, batch, o, e, h))
        if at_8_bit:
            rows.append(PublishedTraining(row.name, 8, *at_8_bit))
    vanilla = [row.name for row in ARCHITECTURES.values() if not row.reversible]
    return sorted(
        rows,
        key=lambda row: vanilla.index(architecture(row.name).counterpart or row.name),
    )


def reproduced_trainings() -> list[ReproducedTraining]:
    """Count what the rows of Tables V and VI say.

    Returns
    -------
    list of ReproducedTraining
        In the order of :func:`published_trainings`.

    Examples
    --------
    >>> resnet34, revnet46, at_8_bit = reproduced_trainings()[:3]
    >>> round(revnet46.ratio, 1), at_8_bit.max_batch - revnet46.max_batch
    (3.8, 2)
    """
    rows: dict[tuple[str, int], ReproducedTraining] = {}
    for row in published_trainings():
        size, bits = _memory_gb(row), row.optimizer_bits
        ratio, compared = None, None
        counterpart = architecture(row.name).counterpart
        if counterpart is not None:
            ratio = rows[counterpart, 32].memory_gb / size
            other = rows[counterpart if bits == 32 else row.name, 32]
            compared = other.published.max_batch, other.max_batch
        batch = _max_batch(row.name, bits)
        rows[row.name, bits] = ReproducedTraining(row, size, ratio, batch, compared)
    return list(rows.values())


def reproduced_cards() -> list[ReproducedCards]:
    """Count what the rows of Table VII say.

    Returns
    -------
    list of ReproducedCards
        In the order of the table.

    Examples
    --------
    >>> resnet101, revnet137 = reproduced_cards()[:2]
    >>> resnet101.cards, revnet137.cards
    (9, 1)
    """
    return [
        ReproducedCards(
            name, published, _max_batch(name, 32), _max_batch(name, 32, "recompute")
        )
        for name, published in TABLE_SEVEN.items()
    ]


def _training(optimizer_bits: int) -> Training:
    return Training(CARD_BYTES, TOTAL_BATCH, PUBLISHED_FRAMES, optimizer_bits)


def _memory_gb(published: PublishedTraining) -> float:
    row, batch = architecture(published.name), published.max_batch
    training = _training(published.optimizer_bits)
    needed = training.needed_bytes(row, row.default_mode, batch)
    assert needed is not None
    return sum(needed.values()) / batch / GB


def _max_batch(name: str, optimizer_bits: int, mode: str | None = None) -> int:
    row = architecture(name)
    largest = _training(optimizer_bits).largest_batch(row, mode or row.default_mode)
    assert largest is not None
    return largest


#: Parts that Table I and a breakdown name and understand alike.
SHARED_PARTS = ("activations", "optimizer_states", "weights")


@dataclass(frozen=True)
class PublishedBreakdown:
    """One column of Table I.

    Attributes
    ----------
    name : str
        The encoder.
    batch : int
        Utterances, whose length is not stated.
    activations_gb, optimizer_states_gb, weights_gb, others_gb : float
        As printed; gradients are not.
    """

    name: str
    batch: int
    activations_gb: float
    optimizer_states_gb: float
    weights_gb: float
    others_gb: float

    @property
    def parts_gb(self) -> dict[str, float]:
        """The published parts, in the order of the table."""
        fields = [field.name for field in dataclasses.fields(self)]
        return {
            name.removesuffix("_gb"): getattr(self, name)
            for name in fields
            if name.endswith("_gb")
        }


TABLE_ONE = (
    PublishedBreakdown("resnet34", 64, 5.14, 0.032, 0.027, 0.455),
    PublishedBreakdown("df_resnet56", 16, 5.244, 0.041, 0.018, 0.389),
)


def reproduced_breakdowns() -> list[tuple[PublishedBreakdown, EncoderBreakdown]]:
    """Count the steps of Table I.

    Returns
    -------
    list of (PublishedBreakdown, EncoderBreakdown)
        The published column and ours: stored, 32 bit, without a classifier.

    Examples
    --------
    >>> published, ours = reproduced_breakdowns()[0]
    >>> published.weights_gb, round(ours.report.weights_bytes / GB, 3)
    (0.027, 0.027)
    """
    setting = {"mode": "store", "frames": PUBLISHED_FRAMES, "optimizer_bits": 32}
    without = Head(classes=0)
    return [
        (
            column,
            encoder_breakdown(column.name, batch=column.batch, head=without, **setting),
        )
        for column in TABLE_ONE
    ]
