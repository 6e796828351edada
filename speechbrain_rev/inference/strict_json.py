"""JSON that somebody else may have written: finite numbers, every key once."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any


def strict_json(content: bytes) -> Any:
    """Read JSON of finite numbers, whose keys stand there once.

    Raises
    ------
    ValueError
        If it is anything else.

    Example
    -------
    >>> strict_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: a stands there twice
    """
    try:
        return json.loads(
            content.decode(),
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_bounded,
            object_pairs_hook=_once,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{short(twice).strip(chr(39))} stands there twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _bounded(text: str) -> int:
    # The time that longer ones take grows with the square of their length.
    if len(text) > 30:
        raise ValueError(f"{text[:20]}... has too many digits")
    return int(text)


def short(value: object) -> str:
    """Show a value in an error, of which no more than its beginning.

    Example
    -------
    >>> short([1] * 1000)
    '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,...'
    """
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
