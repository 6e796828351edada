"""What training on VoxCeleb2 takes of a graphics card, computed from the counts."""

from __future__ import annotations

import bisect
import math
import re
from dataclasses import dataclass

from speechbrain_rev.architectures import Architecture
from speechbrain_rev.models.counts import FRAMES, counted_peaks
from speechbrain_rev.sizes import GIB, card_text

LARGEST_BATCH = 10**6

#: What a plan that was made for a card by its size has beside its device.
PLANNED_CARD = "card_bytes"

#: Training speakers of VoxCeleb2 dev, each at three speeds, and the embedding's size.
CLASSES = 5994 * 3
EMBEDDING_DIM = 256

#: 80 filterbanks, the 160 samples of a shift, and the samples before augmentation, which
#: are a tenth more for the speed of 1.1, in float32.
INPUT_BYTES_PER_FRAME = 4 * (80 + 160 + 176)

# Bytes per parameter of one or two states, by their bits. Those of 8 bit have a float32
# for each block of 256, and small tensors, of which the DF encoders have many, 32 bit.
_STATE_BYTES = {8: {"sgd": 1.03, "adamw": 2.25}, 32: {"sgd": 4.0, "adamw": 8.01}}
_FLOAT = 4

# What a count does not see: CUDA's context, workspaces of cuDNN, fragmentation. With
# these two the largest batches published for the seven vanilla encoders on a card of
# 11 GiB are met within 10 % with states of 8 bit, within 17 % with 32, which they had.
RESERVE_BYTES = 1 * GIB
RESERVE_SHARE = 0.08


def parse_card(text: str) -> int:
    """Read the memory of a card.

    Parameters
    ----------
    text : str
        As 11GB, 24GB or 10.5GiB. A card's name means GiB (2**30 bytes) by GB, unlike
        ``memory_budget`` of a training.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        If it is no size above zero with one of the two units.

    Examples
    --------
    >>> parse_card("11GB") == parse_card("11 GiB") == 11 * 2**30
    True
    """
    match = re.fullmatch(
        r"(\d{1,6}(?:\.\d{1,6})?) ?gi?b", text.strip(), re.ASCII | re.I
    )
    size = math.floor(float(match[1]) * GIB) if match else 0
    if size <= 0:
        raise ValueError(
            f"--card takes a card's memory as 11GB, 24GB or 10.5GiB, not {text}. By GB "
            f"a card's name means GiB, and so do we: 11GB are {card_text(11 * GIB)}."
        )
    return size


def reserve_of(card_bytes: int) -> int:
    """Bytes left free on a card for what is not counted.

    Parameters
    ----------
    card_bytes : int
        Memory of the card.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> round(reserve_of(11 * GIB) / GIB, 2)
    1.88
    """
    return RESERVE_BYTES + math.ceil(RESERVE_SHARE * card_bytes)


def card_for(used_bytes: int) -> int:
    """Bytes of the smallest card on which so many are left beside the reserve.

    Parameters
    ----------
    used_bytes : int
        What is counted.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> card = card_for(8 * GIB)
    >>> card - reserve_of(card) >= 8 * GIB > card - 1 - reserve_of(card - 1)
    True
    """
    card_bytes = math.floor((used_bytes + RESERVE_BYTES) / (1 - RESERVE_SHARE)) - 1
    while card_bytes - reserve_of(card_bytes) < used_bytes:
        card_bytes += 1
    return card_bytes


def check_batch(batch: int) -> None:
    """Refuse a batch that no training has.

    Parameters
    ----------
    batch : int
        Utterances of a step.

    Raises
    ------
    ValueError
        If it is not from 1 to a million.

    Examples
    --------
    >>> check_batch(128)
    """
    if not 1 <= batch <= LARGEST_BATCH:
        raise ValueError(
            f"A batch has from 1 to {LARGEST_BATCH} utterances, not {batch}."
        )


@dataclass(frozen=True)
class Training:
    """A training whose memory is asked for.

    Attributes
    ----------
    card_bytes : int or None
        Memory of the card, if one was named.
    batch : int
        Utterances of a step.
    frames : int
        Of each utterance: 200 or 600.
    optimizer_bits : {8, 32}
        Of the optimizer's states.

    Raises
    ------
    ValueError
        If the batch is not from 1 to a million, the length was not counted, or states
        do not have such bits.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> training = Training(card_bytes=parse_card("11GB"), batch=128, frames=200)
    >>> revnet57, resnet152 = architecture("revnet57"), architecture("resnet152")
    >>> training.largest_batch(revnet57, "reconstruct") > 128
    True
    >>> training.largest_batch(resnet152, "store") > 128
    False
    """

    card_bytes: int | None
    batch: int
    frames: int
    optimizer_bits: int = 8

    def __post_init__(self) -> None:
        """Refuse what was not counted."""
        check_batch(self.batch)
        if self.frames not in FRAMES:
            raise ValueError(
                f"Memory was counted for utterances of {' and '.join(map(str, FRAMES))} "
                f"frames, not of {self.frames}. Give one of these: what fits a longer "
                "utterance fits a shorter one. `speechbrain-rev memory` without "
                "--mode=plan counts any length."
            )
        if self.optimizer_bits not in _STATE_BYTES:
            raise ValueError(
                f"States of an optimizer have 8 or 32 bit, not {self.optimizer_bits}."
            )

    @property
    def reserve_bytes(self) -> int:
        """What is left free on the card for what is not counted."""
        assert self.card_bytes is not None
        return reserve_of(self.card_bytes)

    @property
    def available_bytes(self) -> int:
        """What the card has beside that, less than nothing on the smallest."""
        assert self.card_bytes is not None
        return self.card_bytes - self.reserve_bytes

    def step_budget_bytes(self, row: Architecture) -> int:
        """Bytes that all else leaves for the encoder's own step at the batch asked about.

        Parameters
        ----------
        row : Architecture
            The encoder.

        Returns
        -------
        int
            Less than nothing where all else does not fit by itself.
        """
        needed = self.needed_bytes(row, row.default_mode, self.batch)
        return self.available_bytes - sum(needed.values()) + needed["encoder_step"]

    def needed_bytes(self, row: Architecture, mode: str, batch: int) -> dict[str, int]:
        """Bytes that a training step needs, by what needs them; their sum is the need.

        Parameters
        ----------
        row : Architecture
            The encoder.
        mode : str
            What its blocks keep.
        batch : int
            Utterances of a step.

        Returns
        -------
        dict of str to int
            The parts do not all peak at once, so that the sum is an upper bound.
        """
        classifier = CLASSES * EMBEDDING_DIM
        parameters = row.parameters + classifier
        state_bytes = _STATE_BYTES[self.optimizer_bits][row.optimizer_name]
        step = counted_peaks()[row.name, mode, self.frames]
        return {
            "encoder_step": step(batch),
            "weights": _FLOAT * parameters,
            "gradients": _FLOAT * parameters,
            "optimizer_states": math.ceil(state_bytes * parameters),
            "classifier_step": _classifier_step_bytes(batch),
            "input": batch * self.frames * INPUT_BYTES_PER_FRAME,
        }

    def largest_batch(self, row: Architecture, mode: str) -> int:
        """Find the largest batch whose need leaves the reserve free; 0 if none does.

        Parameters
        ----------
        row : Architecture
            The encoder.
        mode : str
            What its blocks keep.

        Returns
        -------
        int
            Utterances.
        """
        free = self.available_bytes
        # Each utterance needs more than its input.
        bound = max(0, free) // (self.frames * INPUT_BYTES_PER_FRAME)
        batches = range(1, min(bound, LARGEST_BATCH) + 1)
        return bisect.bisect_right(
            batches, free, key=lambda b: sum(self.needed_bytes(row, mode, b).values())
        )


def _classifier_step_bytes(batch: int) -> int:
    """Bytes that cosines, loss and their backward pass make.

    At a small batch they are five copies of the weight (normalised, and on the way
    back), at a large one four of the cosines and one of the weight.
    """
    weight = _FLOAT * CLASSES * EMBEDDING_DIM
    cosines = _FLOAT * CLASSES * batch
    return math.ceil(max(5.01 * weight, 1.01 * weight + 4.02 * cosines))
