"""What the paper prints beside what ``architectures`` has: its setting, and Table VII."""

from __future__ import annotations

from typing import NamedTuple

from speechbrain_rev.catalog.table import Training
from speechbrain_rev.sizes import GIB

PAPER = (
    "Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker "
    "Verification"
)

#: A 2080 Ti.
CARD_BYTES = 11 * GIB
PUBLISHED_FRAMES = 200

#: The paper's example of a batch that several GPUs share.
TOTAL_BATCH = 256


def as_published(training: Training) -> bool:
    """Tell whether largest batches of Tables V and VI are for such utterances and GPU.

    Parameters
    ----------
    training : Training
        The GPU and the length that are asked about.

    Returns
    -------
    bool
        If not, published batches and numbers of GPUs compare with nothing.

    Examples
    --------
    >>> [as_published(Training(CARD_BYTES, 128, frames)) for frames in (200, 600)]
    [True, False]
    """
    return (training.card_bytes, training.frames) == (CARD_BYTES, PUBLISHED_FRAMES)


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
