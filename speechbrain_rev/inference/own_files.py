"""Files of a folder that somebody else made: found in it and nowhere else, opened once."""

from __future__ import annotations

import os
import pickle
import re
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_RUN = (
    "the output_folder of a training run (recipes/VoxCeleb/train.py, or SpeechBrain's own "
    "script), which holds hyperparams.yaml and weights"
)
#: What readers raise of a file that is none of their own, or damaged.
REFUSED = (
    pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError,
    LookupError, AttributeError, AssertionError, ArithmeticError, MemoryError,
    struct.error,
)  # fmt: skip

_SNAPSHOT = re.compile(r"models--[\w.-]+/snapshots/[0-9a-f]{40}", re.ASCII)
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def own_file(folder: Path, name: str | Path, *, given: str = _RUN) -> Path:
    """Find a regular file that really lies in the folder, links followed.

    The files of a snapshot in the cache of huggingface_hub are links to where the cache
    keeps content by its hash. Those links alone lead out of the folder.

    Parameters
    ----------
    folder : pathlib.Path
        The folder.
    name : str or pathlib.Path
        The file, relative to it.
    given : str
        What has to be given, for the error message.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    FileNotFoundError
        If the folder or file is missing.
    ValueError
        If it leads out of the folder or is no regular file.
    """
    if folder.exists() and not folder.is_dir():
        raise FileNotFoundError(f"{folder} is a file, and no folder. Give {given}.")
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. Give {given}.")
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no {name}. Give {given}.")
    if not _is_within(folder.resolve(), path.resolve()):
        raise ValueError(
            f"{path} is a link out of its folder, to {path.resolve()}. It is not "
            "followed: copy the file there if you trust it."
        )
    if not path.is_file():
        raise ValueError(f"{path} is no regular file.")
    return path


def _is_within(folder: Path, file: Path) -> bool:
    """Tell whether a file is in a folder or, if that is a snapshot, in its cache."""
    if file.is_relative_to(folder):
        return True
    snapshot = "/".join(folder.parts[-3:])
    if not _SNAPSHOT.fullmatch(snapshot) or not _HASH.fullmatch(file.name):
        return False
    repository = folder.parents[1]
    # What several repositories have lies in the cache's own folder since 2.0.
    shared = repository.parent / "blobs" / file.name[:2]
    return file.parent in (repository / "blobs", shared)


def open_own(folder: Path, name: str | Path, *, given: str = _RUN) -> BinaryIO:
    """Open a file that ``own_file`` finds, and make sure that it is that one.

    Parameters
    ----------
    folder, name, given
        As of ``own_file``.

    Returns
    -------
    binary file
        To read; its size is that of ``os.fstat``.

    Raises
    ------
    FileNotFoundError, ValueError
        As of ``own_file``; ValueError too if another was put in its place meanwhile.
    """
    found = own_file(folder, name, given=given)
    real = found.resolve()
    file = real.open("rb")
    opened = os.fstat(file.fileno())
    if not stat.S_ISREG(opened.st_mode) or not os.path.samestat(opened, real.lstat()):
        file.close()
        raise ValueError(f"{found} was replaced while it was opened. Try again.")
    return file


def quoted(text: str) -> str:
    r"""Give a name that somebody else chose for one line of an error message.

    Example
    -------
    >>> quoted("a\nb"), len(quoted("a" * 1000))
    ("'a\\nb'", 105)
    """
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def some_names(names: Iterable[str]) -> str:
    """Give the first four names of a file for an error message, and how many follow.

    Example
    -------
    >>> some_names(["fc.weight", "fc.bias"]), some_names(f"w{i}" for i in range(90))
    ('fc.weight, fc.bias', 'w0, w1, w2, w3 and 86 more names')
    """
    all_names = [*names]
    shown = ", ".join(
        name if name.isprintable() and len(name) <= 100 else quoted(name)
        for name in all_names[:4]
    )
    more = len(all_names) - 4
    return (shown or "nothing") + (f" and {more:,} more names" if more > 0 else "")
