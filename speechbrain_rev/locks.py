"""Locks that keep processes from writing one thing at once."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

#: Of a folder that one process owns, in it.
LOCK = ".lock"


@contextlib.contextmanager
def locked(
    place: Path, what: str, doing: str, *, instead: str = "name"
) -> Iterator[None]:
    """Keep other processes from what is done in the block, by a lock on a file.

    The lock ends with its process, however that ends; the file is deleted with the
    block, and one that a killed process left hinders nobody.

    Parameters
    ----------
    place : pathlib.Path
        The file that is locked, in a folder that exists.
    what : str
        What it stands for, for the error.
    doing : str
        What is done to that: "packing".
    instead : str
        What the user may give another of: "name", "output_folder".

    Raises
    ------
    ValueError
        If another process has it; host, process and begin are named.

    Example
    -------
    >>> place = getfixture("tmp_path") / ".lock"
    >>> with locked(place, "a.packed", "packing"):
    ...     with locked(place, "a.packed", "packing"):
    ...         pass
    Traceback (most recent call last):
    ValueError: Another process is packing a.packed: process ... on ..., since ...
    >>> place.exists()
    False
    """
    lock = FileLock(
        place,
        blocking=False,
        thread_local=False,
        # A lock that a file stands for would outlive its process.
        fallback_to_soft=False,
        preserve_lock_file=True,
        on_acquired=_sign,
    )
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"Another process is {doing} {what}{_owner(place)}. Wait for it, or give "
            f"another {instead}."
        ) from error
    except (OSError, NotImplementedError) as error:
        logger.warning(
            f"{what} cannot be locked ({error}): see that no other process is {doing} it."
        )
    try:
        yield
    finally:
        if lock.is_locked:
            # While it is held: whoever opens it later makes another. Not every system
            # deletes a file that is open.
            with contextlib.suppress(OSError):
                place.unlink()
            lock.release()


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
    ValueError: Another process is writing ...rows.npz: process ... on ..., since ...
    """
    path = path.resolve()  # where what is written through a link lies
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        # Nobody writes there.
        yield
        return
    with locked(path.with_name(f"{path.name}.lock"), str(path), "writing"):
        yield


def _sign(file: int) -> None:
    """Write into a locked file whose it is; what a killed process wrote goes."""
    now = datetime.datetime.now().astimezone()
    owner = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": now.isoformat(sep=" ", timespec="seconds"),
    }
    # Where the disk is full the lock holds all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, json.dumps(owner).encode())


def _owner(place: Path) -> str:
    """Say whose a locked file is, if that can be read."""
    try:
        owner = json.loads(place.read_text(encoding="utf-8"))
        return (
            f": process {owner['process']} on {owner['host']}, since {owner['since']}"
        )
    except (OSError, ValueError, LookupError, TypeError):
        return ""
