"""The memory of this machine itself: standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# What a container may take, and has, where it has a limit of its own.
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_TAKEN = Path("/sys/fs/cgroup/memory.current")
_TAKEN_BY = Path("/sys/fs/cgroup/memory.stat")


def available_ram_bytes() -> int | None:
    """Tell what the machine has for a process before it starts to swap.

    Returns
    -------
    int or None
        What Linux calls available, or what is free where it is another system, but no
        more than a container's limit leaves. None where nobody tells.

    Examples
    --------
    >>> size = available_ram_bytes()
    >>> size is None or size > 0
    True
    """
    told = [size for size in (_available(), _left_of_limit()) if size is not None]
    return min(told, default=None)


def _available() -> int | None:
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", _MEMINFO.read_text())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _left_of_limit() -> int | None:
    try:
        # The limit is "max" where there is none.
        limit, taken = (int(file.read_text()) for file in (_LIMIT, _TAKEN))
        # Files that were read, which are let go of where memory is asked for.
        files = re.search(r"^inactive_file (\d+)$", _TAKEN_BY.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return max(0, limit - taken + (int(files[1]) if files else 0))
