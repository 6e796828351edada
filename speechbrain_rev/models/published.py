"""Tables V, VI and VII of the paper, and the same trainings counted here.

Table I has a module of its own, ``table_one``. What Tables V and VI say of 32 bit stands
in ``architectures``; here are their ratios, their rows of 8 bit, and Table VII.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.models.card import Training, parse_card
from speechbrain_rev.sizes import GB

#: A 2080 Ti.
CARD_BYTES = parse_card("11GB")
FRAMES = 200

#: The paper's example of a batch that several cards share.
TOTAL_BATCH = 256


def as_published(training: Training) -> bool:
    """Tell whether largest batches of Tables V and VI are for such utterances and card.

    Parameters
    ----------
    training : Training
        The card and the length that are asked about.

    Returns
    -------
    bool
        If not, published batches and cards compare with nothing.

    Examples
    --------
    >>> [as_published(Training(CARD_BYTES, 128, frames)) for frames in (200, 600)]
    [True, False]
    """
    return (training.card_bytes, training.frames) == (CARD_BYTES, FRAMES)


class _Reversible(NamedTuple):
    """What Tables V and VI say of a reversible encoder beside ``architectures``."""

    ratio: float
    memory_gb_8bit: float
    ratio_8bit: float
    max_batch_8bit: int
    vox1_o_eer_8bit: float
    vox1_e_eer_8bit: float
    vox1_h_eer_8bit: float


# fmt: off
_REVERSIBLE = {
    # 32 bit: ratio; 8 bit: GB per utterance, ratio, batch, EER on Vox1-O, E, H.
    "revnet46":     _Reversible( 1.50, 0.039,  1.54, 236, 0.87, 1.04, 1.88),
    "revnet57":     _Reversible( 2.00, 0.029,  2.07, 301, 0.92, 1.03, 1.87),
    "revnet126":    _Reversible( 8.25, 0.039,  8.46, 215, 0.62, 0.83, 1.49),
    "revnet137":    _Reversible(11.00, 0.029, 11.37, 299, 0.62, 0.83, 1.51),
    "revnet140":    _Reversible( 2.20, 0.147,  2.24,  63, 0.62, 0.82, 1.47),
    "revnet155":    _Reversible( 2.75, 0.118,  2.80,  75, 0.62, 0.83, 1.49),
    "revnet178":    _Reversible(11.75, 0.039, 12.05, 213, 0.57, 0.77, 1.43),
    "revnet197":    _Reversible(15.67, 0.029, 16.21, 297, 0.55, 0.76, 1.44),
    "revnet230":    _Reversible( 2.35, 0.195,  2.41,  49, 0.52, 0.73, 1.36),
    "revnet245":    _Reversible( 3.92, 0.118,  3.98,  74, 0.53, 0.75, 1.38),
    "df_revnet66":  _Reversible( 4.44, 0.079,  4.49, 138, 0.89, 1.10, 2.01),
    "df_revnet89":  _Reversible( 4.61, 0.076,  4.67, 142, 0.90, 1.07, 1.98),
    "df_revnet126": _Reversible( 6.30, 0.082,  6.38, 134, 0.73, 0.89, 1.64),
    "df_revnet149": _Reversible( 6.79, 0.076,  6.88, 138, 0.75, 0.87, 1.65),
    "df_revnet258": _Reversible(11.44, 0.074, 11.59, 138, 0.61, 0.82, 1.53),
    "df_revnet281": _Reversible(11.75, 0.072, 11.92, 141, 0.61, 0.83, 1.52),
    "df_revnet354": _Reversible(13.78, 0.074, 13.97, 147, 0.60, 0.77, 1.47),
    "df_revnet377": _Reversible(14.16, 0.072, 14.36, 150, 0.59, 0.79, 1.45),
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
        Largest batch on a card of 11 GiB.
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


@dataclass(frozen=True)
class ReproducedTraining:
    """A row of Table V or VI, and what is counted here for it.

    Attributes
    ----------
    published : PublishedTraining
        The row.
    memory_gb : float
        All that a training step takes of a card at the published largest batch, for each
        of its utterances, in GB (1e9 bytes).
    ratio : float or None
        Of the counterpart's memory to it, both with states as in the table: the
        counterpart's have 32 bit.
    max_batch : int
        Largest batch on a card of 11 GiB.
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


class PublishedCards(NamedTuple):
    """A row of Table VII as printed.

    Attributes
    ----------
    cards : int
        Cards of 11 GiB for a batch of ``TOTAL_BATCH``.
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
class ReproducedCards:
    """A row of Table VII, and what is counted here for it, with states of 32 bit.

    Attributes
    ----------
    name : str
        The encoder.
    published : PublishedCards
        The row.
    max_batch, max_batch_recomputed : int
        Largest batch on a card of 11 GiB in the encoder's default mode (stored for
        vanilla encoders, as published), and where blocks are checkpointed instead.
    """

    name: str
    published: PublishedCards
    max_batch: int
    max_batch_recomputed: int

    @property
    def cards(self) -> int:
        """Such cards for a batch of ``TOTAL_BATCH``."""
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
        own = _REVERSIBLE.get(row.name)
        rows.append(
            PublishedTraining(
                row.name,
                32,
                row.published_memory_gb,
                None if own is None else own.ratio,
                row.published_max_batch_11gb,
                row.vox1_o_eer,
                row.vox1_e_eer,
                row.vox1_h_eer,
            )
        )
        if own is not None:
            rows.append(PublishedTraining(row.name, 8, *own[1:]))
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
    found: dict[tuple[str, int], ReproducedTraining] = {}
    for row in published_trainings():
        size = _memory_gb(row)
        ratio, compared = None, None
        counterpart = architecture(row.name).counterpart
        if counterpart is not None:
            ratio = found[counterpart, 32].memory_gb / size
            with_that = counterpart if row.optimizer_bits == 32 else row.name
            other = found[with_that, 32]
            compared = other.published.max_batch, other.max_batch
        batch = _max_batch(row.name, row.optimizer_bits)
        found[row.name, row.optimizer_bits] = ReproducedTraining(
            row, size, ratio, batch, compared
        )
    return list(found.values())


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


def _memory_gb(published: PublishedTraining) -> float:
    row = architecture(published.name)
    training = _training(published.optimizer_bits)
    needed = training.needed_bytes(row, row.default_mode, published.max_batch)
    return sum(needed.values()) / published.max_batch / GB


def _max_batch(name: str, optimizer_bits: int, mode: str | None = None) -> int:
    row = architecture(name)
    training = _training(optimizer_bits)
    return training.largest_batch(row, mode or row.default_mode)


def _training(optimizer_bits: int) -> Training:
    return Training(CARD_BYTES, TOTAL_BATCH, FRAMES, optimizer_bits)
