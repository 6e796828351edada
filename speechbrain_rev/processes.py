"""Processes that torchrun started: their number, what they exchange, and how one ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch

Value = TypeVar("Value")

#: How long one process may wait for another. One that dies is noticed at once.
_PATIENCE = timedelta(days=1)


@contextmanager
def interrupted_while(words: str) -> Iterator[None]:
    """Pass Ctrl-C on with what it ended and how to go on, as commands print it.

    Parameters
    ----------
    words : str
        They follow "interrupted". An inner place that names itself keeps its own.

    Examples
    --------
    >>> try:
    ...     with interrupted_while("in the count. The same command counts anew."):
    ...         raise KeyboardInterrupt
    ... except KeyboardInterrupt as interrupt:
    ...     print("interrupted", interrupt)
    interrupted in the count. The same command counts anew.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            raise
        raise KeyboardInterrupt(words) from interrupt


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


def process_count() -> int:
    """Return how many processes torchrun started, 1 where it started none.

    Returns
    -------
    int

    Example
    -------
    >>> process_count()
    1
    """
    return torch.distributed.get_world_size() if _several() else 1


def gathered(value: Value) -> list[Value]:
    """Collect a value of each process, all of which must come here.

    Parameters
    ----------
    value : object
        Of this process; it can be pickled.

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
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def _local_rank() -> int | None:
    """Return the number of this process on its machine; None if torchrun started none."""
    rank = os.environ.get("LOCAL_RANK")
    return None if rank is None else int(rank)


@contextmanager
def joined() -> Iterator[None]:
    """Join the other processes, if torchrun started any.

    They exchange little, and that with gloo, on GPUs too.

    Example
    -------
    >>> with joined():
    ...     print(process_rank(), process_count())
    0 1
    """
    if _local_rank() is None:
        yield
        return
    torch.distributed.init_process_group("gloo", timeout=_PATIENCE)
    yield
    # One that fails leaves it to torchrun to end the others.
    torch.distributed.destroy_process_group()


def shared_rows(
    compute: Callable[[np.ndarray], tuple[np.ndarray, ...]], rows: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Compute arrays with a row for each of some rows, each process those of its share.

    Parameters
    ----------
    compute : callable
        From [n, ...] to arrays of n rows each.
    rows : numpy.ndarray
        The same on all processes, which must all come here.

    Returns
    -------
    tuple of numpy.ndarray
        The arrays of all rows.

    Example
    -------
    >>> shared_rows(lambda rows: (2 * rows,), np.arange(3))
    (array([0, 2, 4]),)
    """
    share = np.array_split(rows, process_count())[process_rank()]
    shares = gathered(compute(share) if len(share) else None)
    arrays = zip(*(one for one in shares if one is not None), strict=True)
    return tuple(np.concatenate(parts) for parts in arrays)


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

    Example
    -------
    >>> own_device("cpu")
    'cpu'
    """
    local = _local_rank()
    if local is None or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{local}"


def end_process() -> None:
    """End one of several processes without taking the interpreter apart.

    torch 2.11 does not free the reducer of DistributedDataParallel, so threads of a group
    outlive it, and one that frees a tensor while the interpreter ends aborts the process.
    Where torchrun started none it does nothing.
    """
    if _local_rank() is None:
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
