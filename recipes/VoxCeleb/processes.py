"""Work that processes share which torchrun started, on one machine or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
from speechbrain.utils.distributed import get_local_rank

from speechbrain_rev import scoring

#: How long one may wait for another. One that dies is noticed at once.
_PATIENCE = timedelta(days=1)


class Place(NamedTuple):
    """Which process this is, and of how many.

    Attributes
    ----------
    rank : int
        Counted from 0, which is the main process.
    processes : int
        How many there are.
    """

    rank: int
    processes: int

    @property
    def is_main(self) -> bool:
        """Whether this process says and writes what all have found."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes have come here."""
        if self.processes > 1:
            torch.distributed.barrier()


#: Where there are no others.
ALONE = Place(0, 1)


@contextmanager
def joined() -> Iterator[Place]:
    """Join the other processes, if torchrun started any.

    They exchange little, and that with gloo, on GPUs too.

    Yields
    ------
    Place
        Of this process.
    """
    if get_local_rank() is None:
        yield ALONE
        return
    torch.distributed.init_process_group("gloo", timeout=_PATIENCE)
    yield Place(torch.distributed.get_rank(), torch.distributed.get_world_size())
    # One that fails leaves it to torchrun to end the others.
    torch.distributed.destroy_process_group()


def own_device(device: str | None) -> str | None:
    """Give each process of a machine a GPU of its own, unless one is named.

    Parameters
    ----------
    device : str or None
        As given by the user: cpu, cuda, cuda:N, or None.

    Returns
    -------
    str or None
        cuda:N with the number of the process where GPUs are to be used; else as given.
    """
    local = get_local_rank()
    if local is None or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{local}"


def cohort_statistics(
    place: Place, embeddings: np.ndarray, cohort: np.ndarray, *, top_n: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Compute AS-Norm's statistics, each process those of a part of the embeddings.

    Parameters
    ----------
    place : Place
        Of this process.
    embeddings, cohort, top_n
        As of ``scoring.cohort_statistics``; the same on all processes.

    Returns
    -------
    tuple of numpy.ndarray, or None
        Mean and deviation of all embeddings on the main process, None on others.
    """
    if place.processes == 1:
        return scoring.cohort_statistics(embeddings, cohort, top_n=top_n)
    part = np.array_split(embeddings, place.processes)[place.rank]
    own = (np.empty(0), np.empty(0))
    if len(part):
        own = scoring.cohort_statistics(part, cohort, top_n=top_n)
    found = [None] * place.processes if place.is_main else None
    torch.distributed.gather_object(own, found)
    if found is None:
        return None
    mean, std = (np.concatenate(side) for side in zip(*found, strict=True))
    return mean, std
