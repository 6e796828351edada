"""The processes of one training, and what each of them tells the others."""

from __future__ import annotations

from typing import TypeVar

import torch

Told = TypeVar("Told")


def process_rank() -> int:
    """Return the number of this process, 0 where there are no others.

    Returns
    -------
    int

    Example
    -------
    >>> process_rank()
    0
    """
    return torch.distributed.get_rank() if _several() else 0


def gathered(told: Told) -> list[Told]:
    """Collect what each process tells, all of which must come here.

    Parameters
    ----------
    told : object
        Whatever can be pickled, of this process.

    Returns
    -------
    list
        Of all processes, in their order.

    Example
    -------
    >>> gathered("alone")
    ['alone']
    """
    if not _several():
        return [told]
    found = [told] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, told)
    return found


def _several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
