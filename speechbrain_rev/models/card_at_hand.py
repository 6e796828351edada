"""The memory of the graphics card of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from speechbrain_rev.devices import named_device


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

    advice = "Without a GPU name a card's memory, for instance --card=11GB."
    number = named_device(device, cpu=False, advice=advice).index or 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(number)
    return CardAtHand(torch.cuda.get_device_name(number), total_bytes, free_bytes)
