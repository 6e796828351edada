"""Files that a command is asked to write."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(option: str, file: str) -> None:
    """Refuse a place where no file can be written, before the work and not after it.

    Parameters
    ----------
    option : str
        That named the file.
    file : str
        Its path.

    Raises
    ------
    ValueError
        If there is no such folder, or it may not be written to.
    """
    path = Path(file)
    reason = ""
    if not path.parent.is_dir():
        reason = f"there is no folder {path.parent}. Make it first"
    elif path.is_dir():
        reason = "it is a folder. Give the name of a file"
    elif not os.access(path.parent, os.W_OK):
        reason = f"you may not write into the folder {path.parent}. Give another one"
    if reason:
        raise ValueError(f"{option} {path} cannot be written: {reason}.")
