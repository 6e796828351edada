"""The memory of the graphics card of this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class CardAtHand:
    """A card that was asked.

    Attributes
    ----------
    name : str
        Its model.
    total_bytes, free_bytes : int
        Its memory, and what nobody had taken when it was asked.
    """

    name: str
    total_bytes: int
    free_bytes: int


def card_at_hand(device: str) -> CardAtHand:
    """Ask a card for its memory.

    Parameters
    ----------
    device : str
        cuda, or cuda:N for the card of number N.

    Returns
    -------
    CardAtHand
        What this process takes to ask, a few hundred MiB, is not among the free bytes.

    Raises
    ------
    ValueError
        If it is no such device, or there is none.

    Examples
    --------
    >>> card_at_hand("cpu")
    Traceback (most recent call last):
    ...
    ValueError: --device takes cuda, or cuda:N for the card of number N, not cpu. Without
    a GPU name a card's memory, for instance --card=11GB.
    """
    import torch

    if re.fullmatch(r"cuda(:\d{1,3})?", device, re.ASCII) is None:
        raise ValueError(
            f"--device takes cuda, or cuda:N for the card of number N, not {device}. "
            "Without a GPU name a card's memory, for instance --card=11GB."
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(device.partition(":")[2] or 0)
    if number >= count:
        raise ValueError(
            f"--device={device} is not there: torch sees {count} card(s) with CUDA. Name "
            "a card's memory, for instance --card=11GB."
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(number)
    return CardAtHand(torch.cuda.get_device_name(number), total_bytes, free_bytes)
