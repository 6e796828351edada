"""Locks that keep processes from writing one thing at once. Standard library only."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


def lock(file: IO[bytes], what: str, doing: str) -> None:
    """Lock a file until it is closed; where there are no locks, warn and do not.

    Parameters
    ----------
    file : binary file
        Open for writing.
    what : str
        What it stands for, for the error.
    doing : str
        What is done to that: "packing".

    Raises
    ------
    ValueError
        If another process has it.

    Example
    -------
    >>> path = getfixture("tmp_path") / "journal"
    >>> with path.open("wb") as one, path.open("wb") as other:
    ...     lock(one, "a.packed", "packing")
    ...     lock(other, "a.packed", "packing")
    Traceback (most recent call last):
    ValueError: Another process is packing a.packed. Wait for it, or give another name.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"Another process is {doing} {what}. Wait for it, or give another name."
        ) from error
    except (OSError, ImportError) as error:
        logger.warning(
            f"{what} cannot be locked ({error}): see that no other process is {doing} it."
        )


@contextlib.contextmanager
def writing_alone(path: Path) -> Iterator[None]:
    """Keep other processes from writing a file: one with .lock added lies beside it.

    Parameters
    ----------
    path : pathlib.Path
        The file; its folder is made.

    Raises
    ------
    ValueError
        If another process is writing it.

    Example
    -------
    >>> path = getfixture("tmp_path") / "rows.npz"
    >>> with writing_alone(path), writing_alone(path):
    ...     pass
    Traceback (most recent call last):
    ValueError: Another process is writing ...rows.npz. Wait for it, or give another ...
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    place = path.with_name(f"{path.name}.lock")
    with contextlib.ExitStack() as stack:
        if not os.access(path.parent, os.W_OK):
            # Nobody writes there.
            yield
            return
        file = stack.enter_context(place.open("ab"))
        lock(file, str(path), "writing")
        if not place.exists() or not os.path.samestat(
            os.fstat(file.fileno()), place.stat()
        ):
            raise ValueError(
                f"Another process has just written {path}. Give the command once more."
            )
        try:
            yield
        finally:
            # Not every system deletes a file that is open, and a lock may stay.
            with contextlib.suppress(PermissionError):
                place.unlink(missing_ok=True)
