"""Devices by their names: which there are, what they are, and what is free on them.

Torch is imported where it is asked, so that what needs none may import this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def named_device(name: str, *, cpu: bool, advice: str) -> torch.device:
    """Take a device by the name that ``--device`` was given.

    Parameters
    ----------
    name : str
        cuda, cuda:N for the card of number N, or cpu.
    cpu : bool
        Whether cpu is allowed.
    advice : str
        What to give instead, for the error message.

    Returns
    -------
    torch.device
        The device.

    Raises
    ------
    ValueError
        If it is called otherwise, or there is no such card.

    Examples
    --------
    >>> named_device("gpu", cpu=False, advice="Name a card's memory.")
    Traceback (most recent call last):
    ...
    ValueError: --device takes cuda, or cuda:N for the card of number N, not gpu. Name a
    card's memory.
    """
    import torch

    allowed = r"(cpu|cuda(:\d{1,3})?)" if cpu else r"cuda(:\d{1,3})?"
    if re.fullmatch(allowed, name, re.ASCII) is None:
        raise ValueError(
            f"--device takes {'cpu, ' if cpu else ''}cuda, or cuda:N for the card of "
            f"number N, not {name}. {advice}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and int(name.partition(":")[2] or 0) >= count:
        raise ValueError(
            f"--device={name} is not there: torch sees {count} card(s) with CUDA. "
            f"{advice}"
        )
    return torch.device(name)


def timed_device(name: str) -> torch.device:
    """Take a device by its name, or refuse one that nothing can be timed on.

    Parameters
    ----------
    name : str
        cpu, cuda, or cuda:N for the card of number N.

    Returns
    -------
    torch.device
        The device.

    Raises
    ------
    ValueError
        If it is called otherwise, or there is no such card.

    Examples
    --------
    >>> timed_device("cpu")
    device(type='cpu')
    """
    advice = "Give cpu, or the number of a card that is there."
    return named_device(name, cpu=True, advice=advice)


def device_name(device: torch.device) -> str:
    """Name a card, or the CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def described(device: torch.device) -> str:
    """Name a card, or the CPU with the threads that compute."""
    import torch

    if device.type == "cuda":
        return device_name(device)
    return f"{device.type}, {torch.get_num_threads()} thread(s)"


def random_devices(device: torch.device) -> list[torch.device]:
    """List the devices whose random state ``fork_rng`` must keep beside the CPU's."""
    return [device] if device.type == "cuda" else []


def free_bytes(device: torch.device) -> int | None:
    """Tell what this process can still take of a card; None for what is no card.

    What torch holds and nothing uses is among it.
    """
    import torch

    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def free_and_held_bytes(device: torch.device) -> int | None:
    """Tell what this process can have of a card in all; None for what is no card.

    Modules that are on the card already are among it.
    """
    import torch

    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


@dataclass(frozen=True)
class CardAtHand:
    """A GPU of this machine that was asked for its memory.

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
    """Ask a GPU for its memory.

    Parameters
    ----------
    device : str
        cuda, or cuda:N for the GPU of number N.

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
    free, total = torch.cuda.mem_get_info(number)
    return CardAtHand(torch.cuda.get_device_name(number), total, free)
