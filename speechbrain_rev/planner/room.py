"""Room for steps that are timed: a batch that fits, and what to do if none is left.

Steps are timed in every mode, all blocks storing among them, which is just what may not
fit where a plan is asked for. Time is in proportion to the batch, so fewer samples serve.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from speechbrain_rev import devices
from speechbrain_rev.memory.machine import available_ram_bytes
from speechbrain_rev.sizes import size_text

_T = TypeVar("_T")

#: Share of what is free that live tensors may take; workspaces and gaps take of the rest.
SHARE = 0.8

#: What torch says without an error of its own: of a CPU, and of CUDA and its libraries.
_NO_MEMORY = (
    "not enough memory",
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def batch_that_fits(
    stored_bytes: Callable[[int], int], batch: int, device: torch.device
) -> int:
    """Halve a batch until a step of it, all stored, fits into what is free on a card.

    Parameters
    ----------
    stored_bytes : callable
        Counts the peak of a step of some samples that stores everything.
    batch : int
        Samples that are wanted.
    device : torch.device
        Where they will run. What is no card is not asked.

    Returns
    -------
    int
        Samples, at least 1.

    Raises
    ------
    MemoryError
        If not even one sample fits.

    Examples
    --------
    >>> batch_that_fits(lambda batch: 10**9 * batch, 64, torch.device("cpu"))
    64
    """
    free = devices.free_bytes(device)
    if free is None:
        return batch
    while (peak := stored_bytes(batch)) > SHARE * free:
        if batch == 1:
            raise MemoryError(
                f"A step of one sample on {device} takes {size_text(peak)}, and "
                f"{size_text(free)} are free, of which {SHARE:.0%} may be used. End "
                "what else uses the card, or take shorter samples."
            )
        batch //= 2
    return batch


def has_room(peak_bytes: int, device: torch.device) -> bool:
    """Whether a step fits into what is free, as far as that is known.

    Parameters
    ----------
    peak_bytes : int
        Of live tensors that it makes.
    device : torch.device
        A card, or the CPU, on which too much ends the process.

    Returns
    -------
    bool
        False only if it is known not to fit.

    Examples
    --------
    >>> has_room(0, torch.device("cpu"))
    True
    """
    card = devices.free_bytes(device)
    free = available_ram_bytes() if card is None else card
    return free is None or peak_bytes <= SHARE * free


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out, of a card or of the machine.

    Examples
    --------
    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("Expected 4 channels"))
    False
    """
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in _NO_MEMORY)
    )


def unless_memory_runs_out(make: Callable[[], _T]) -> _T | None:
    """Do something, or free what there is to be freed if memory runs out.

    Parameters
    ----------
    make : callable
        What is done.

    Returns
    -------
    object or None
        What it returned; None if memory ran out.

    Examples
    --------
    >>> unless_memory_runs_out(lambda: torch.empty(2**60)) is None
    True
    """
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # The error is gone by now, and with it the frames that held tensors.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None
