"""Sizes of memory: read, written, and what of a GPU's is kept free. Standard library only.

A GPU that is sold as 11GB has 11 GiB (2**30 bytes each). So ``11GB`` is 11 GiB wherever a
size is given; plain bytes have the unit ``B``. Sizes are written in GiB, but for published
figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from numbers import Integral

MIB = 2**20
GIB = 2**30
#: Of published figures and of plots.
MB = 10**6
GB = 10**9

#: What sizes can be given as, for messages.
EXAMPLES = "11GB or 11GiB (2**30 bytes each), 800MB (2**20) or 11000000000B"

_UNITS = {"gb": GIB, "gib": GIB, "mb": MIB, "mib": MIB, "b": 1}

# What a count does not see: CUDA's context, workspaces of cuDNN, fragmentation. With
# these two the largest batches published for the seven vanilla encoders on an 11 GB GPU
# are met within 10 % with 8-bit states, within 17 % with 32-bit states, which they had.
RESERVE_BYTES = 1 * GIB
RESERVE_SHARE = 0.08


def parse_size(text: str) -> int | None:
    """Read a size with its unit.

    Parameters
    ----------
    text : str
        As 11GB or 10.5GiB (both 2**30 bytes), 800MB or 800MiB (2**20), 11000000000B.

    Returns
    -------
    int or None
        Bytes; None if it is no size above zero with a unit.

    Examples
    --------
    >>> parse_size("11GB") == parse_size("11 GiB") == 11 * 2**30, parse_size("500B")
    (True, 500)
    >>> parse_size("11")
    """
    match = re.fullmatch(
        r"(\d{1,18}|\d{1,6}\.\d{1,6}) ?([gm]i?b|b)", text.strip(), re.ASCII | re.I
    )
    size = math.floor(Fraction(match[1]) * _UNITS[match[2].lower()]) if match else 0
    return size if 0 < size < 2**60 else None


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
    (8388608, 8000000)
    """
    if isinstance(size, str):
        parsed = parse_size(size)
        if parsed is not None:
            return parsed
    elif not isinstance(size, bool) and (
        isinstance(size, Integral) or (isinstance(size, float) and math.isfinite(size))
    ):
        return int(size)
    raise ValueError(
        f"{name} is {size!r}, which is no size: give bytes as a number, or a text with "
        f"a unit, as {EXAMPLES}."
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


def enough_text(size_bytes: int) -> str:
    """Write a size that is enough: rounded up, and as ``parse_size`` reads it.

    Parameters
    ----------
    size_bytes : int
        What is needed, at least 1.

    Returns
    -------
    str
        In GiB (2**30 bytes), below 1 GiB in MiB (2**20 bytes), below 0.1 MiB in bytes.

    Examples
    --------
    >>> enough_text(3 * GIB + 1), enough_text(25 * MIB), enough_text(2000)
    ('3.001 GiB', '25.0 MiB', '2000 B')
    """
    if size_bytes >= GIB:
        return f"{-(-size_bytes * 1000 // GIB) / 1000:.3f} GiB"
    if size_bytes >= 0.1 * MIB:
        return f"{-(-size_bytes * 10 // MIB) / 10:.1f} MiB"
    return f"{size_bytes} B"


def card_text(card_bytes: int) -> str:
    """Write the memory of a GPU, or a budget, without needless digits.

    Parameters
    ----------
    card_bytes : int
        The memory.

    Returns
    -------
    str
        In GiB (2**30 bytes), below 1 GiB in MiB (2**20 bytes).

    Examples
    --------
    >>> card_text(11 * GIB), card_text(11_000_000_000), card_text(100 * MIB)
    ('11 GiB', '10.24 GiB', '100 MiB')
    """
    size, unit = (GIB, "GiB") if card_bytes >= GIB else (MIB, "MiB")
    return f"{card_bytes / size:.4g} {unit}"


def reserve_of(card_bytes: int) -> int:
    """Bytes kept free on a GPU for CUDA, workspaces and fragmentation.

    Parameters
    ----------
    card_bytes : int
        Memory of the GPU.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> round(reserve_of(11 * GIB) / GIB, 2)
    1.88
    """
    return RESERVE_BYTES + math.ceil(RESERVE_SHARE * card_bytes)


def reserve_text(reserved_bytes: int) -> str:
    """Name the reserve of a GPU, in the same words in every answer and log.

    Parameters
    ----------
    reserved_bytes : int
        Its size.

    Returns
    -------
    str
        The size and what it is for.

    Examples
    --------
    >>> reserve_text(reserve_of(11 * GIB))
    '1.88 GiB reserved for CUDA and fragmentation'
    """
    return f"{card_text(reserved_bytes)} reserved for CUDA and fragmentation"


def card_for(used_bytes: int) -> int:
    """Bytes of the smallest GPU on which so many are left beside the reserve.

    Parameters
    ----------
    used_bytes : int
        What is counted.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> card = card_for(8 * GIB)
    >>> card - reserve_of(card) >= 8 * GIB > card - 1 - reserve_of(card - 1)
    True
    """
    card_bytes = math.floor((used_bytes + RESERVE_BYTES) / (1 - RESERVE_SHARE)) - 1
    while card_bytes - reserve_of(card_bytes) < used_bytes:
        card_bytes += 1
    return card_bytes


# Every so many guesses one is in the middle, by ratio: on a line alone they would creep
# where sizes are on none. None is so many times as large as what is known to fit.
_ON_LINE, _LEAP = 4, 1000


def largest_within(size_of: Callable[[int], int], limit: int, most: int) -> int:
    """Find the largest number whose size is within a limit; sizes rise with the number.

    Where sizes lie near a line, as those of batches do, few are asked for.

    Parameters
    ----------
    size_of : callable
        Gives the size of a number from 1 on.
    limit : int
        What the size may be.
    most : int
        The largest number that is asked for.

    Returns
    -------
    int
        The number, 0 if not even one is within the limit.

    Examples
    --------
    >>> largest_within(lambda count: 100 + 7 * count, 800, 1000)
    100
    >>> [largest_within(lambda count: 10 * count, limit, 5) for limit in (9, 10, 1000)]
    [0, 1, 5]
    """
    low_size = size_of(1)
    if low_size > limit:
        return 0
    low, high, guess, asked = 1, most + 1, 2, 0
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1, _LEAP * low)
        size = size_of(guess)
        slope = max((size - low_size) / (guess - low), 1.0)
        if size <= limit:
            low, low_size = guess, size
        else:
            high = guess
        asked += 1
        if asked % _ON_LINE:
            guess = low + math.floor((limit - low_size) / slope)
        else:
            guess = math.isqrt(low * high)
    return low
