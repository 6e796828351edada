"""Sizes of memory in words: standard library only."""

from __future__ import annotations

import math
import re
from numbers import Integral

MB = 10**6
GB = 10**9
MIB = 2**20
GIB = 2**30

_UNITS = {"gb": GB, "gib": GIB, "mb": MB, "mib": MIB}


def parse_size(text: str) -> int | None:
    """Read a size with its unit.

    Parameters
    ----------
    text : str
        As 11GB (1e9 bytes each), 10.5GiB (2**30), 800MB or 800MiB.

    Returns
    -------
    int or None
        Bytes; None if it is no size above zero with a unit.

    Examples
    --------
    >>> parse_size("11GB"), parse_size("10 GiB"), parse_size("11")
    (11000000000, 10737418240, None)
    """
    match = re.fullmatch(
        r"(\d{1,6}(?:\.\d{1,6})?) ?([gm]i?b)", text.strip(), re.ASCII | re.I
    )
    size = math.floor(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    return size or None


def whole_bytes(name: str, size: object) -> int:
    """Take a size that a caller gave, in bytes or with its unit.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    size : float or str
        Bytes, or what ``parse_size`` reads.

    Returns
    -------
    int
        Whole bytes, rounded down.

    Raises
    ------
    ValueError
        If it is neither.

    Examples
    --------
    >>> whole_bytes("budget_bytes", "8MB"), whole_bytes("budget_bytes", 8e6)
    (8000000, 8000000)
    """
    if isinstance(size, str):
        found = parse_size(size)
        if found is not None:
            return found
    elif not isinstance(size, bool) and (
        isinstance(size, Integral) or (isinstance(size, float) and math.isfinite(size))
    ):
        return int(size)
    raise ValueError(
        f"{name} is {size!r}, which is no size: give bytes as a number, or a text with "
        "a unit, as '8MB' (1e6 bytes each) or '11GiB' (2**30)."
    )


def size_text(size_bytes: int) -> str:
    """Write a size in the unit in which it is no zero.

    Parameters
    ----------
    size_bytes : int
        The size.

    Returns
    -------
    str
        In GiB (2**30 bytes), below 1 GiB in MiB (2**20 bytes), below 0.1 MiB in bytes.

    Examples
    --------
    >>> size_text(3 * GIB), size_text(25 * MIB), size_text(2000), size_text(-25 * MIB)
    ('3.000 GiB', '25.0 MiB', '2000 bytes', '-25.0 MiB')
    """
    if abs(size_bytes) >= GIB:
        return f"{size_bytes / GIB:.3f} GiB"
    if abs(size_bytes) >= 0.1 * MIB:
        return f"{size_bytes / MIB:.1f} MiB"
    return f"{size_bytes} bytes"


def card_text(card_bytes: int) -> str:
    """Write the memory of a card, or a budget, in both units that are in use.

    A card that is sold as 11GB has 11 GiB, and ``--card=11GB`` means that; a training's
    ``memory_budget: 11GB`` is 11 GB of 1e9 bytes. Whoever meets both is told both.

    Parameters
    ----------
    card_bytes : int
        The memory.

    Returns
    -------
    str
        In GiB (2**30 bytes) and in GB (1e9 bytes); below one of them in MiB or MB.

    Examples
    --------
    >>> card_text(11 * GIB), card_text(11 * GB), card_text(100 * MB)
    ('11 GiB (11.81 GB)', '10.24 GiB (11 GB)', '95.37 MiB (100 MB)')
    """
    binary, decimal = (GIB, "GiB"), (GB, "GB")
    if card_bytes < GIB:
        binary = MIB, "MiB"
    if card_bytes < GB:
        decimal = MB, "MB"
    in_both = (f"{card_bytes / size:.4g} {unit}" for size, unit in (binary, decimal))
    return "{} ({})".format(*in_both)
