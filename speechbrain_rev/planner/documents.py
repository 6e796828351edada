"""JSON documents that are read back: each value is what it must be, or all is refused."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# More bytes, or channels, than anything has.
_LARGEST = 2**60
_MOST_CHANNELS = 10**6
_SHOWN = 60
# What is told in digits of what was planned or profiled, and is at least one.
_COUNTS = {
    "batch", "blocks", "card_bytes", "embedding_dim", "frames", "memory_budget_bytes",
    "n_mels", "timed batch",
}  # fmt: skip


@contextlib.contextmanager
def reading(kind: str, remedy: str) -> Iterator[None]:
    """Refuse a document in one way, whatever is wrong with it.

    Parameters
    ----------
    kind : str
        What it should be.
    remedy : str
        What to do if it is not.

    Raises
    ------
    ValueError
        If what is read meanwhile is damaged.

    Examples
    --------
    >>> with reading("plan", "Plan anew."):
    ...     whole("budget_bytes", "much")
    Traceback (most recent call last):
    ...
    ValueError: This is no plan (budget_bytes is 'much' and takes a whole number of at
    least 0, at most 2 to the power of 60). Plan anew.
    """
    try:
        yield
    except (
        TypeError,
        AttributeError,
        LookupError,
        ValueError,
        RecursionError,
    ) as error:
        reason = f"{error.args[0]!r} is missing" if type(error) is KeyError else error
        raise ValueError(f"This is no {kind} ({reason}). {remedy}") from error


def parsed(text: str) -> Mapping[str, Any]:
    """Parse JSON of names with values, none of them there twice."""
    return mapping("it", json.loads(text, object_pairs_hook=_once))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{_shown(name)} is there twice")
        found[name] = value
    return found


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def whole(name: str, value: object, *, least: int | None = 0) -> int:
    """Take a whole number, of bytes or channels; ``least`` is None where all will do."""
    lowest = -_LARGEST if least is None else least
    if type(value) is int and lowest <= value <= _LARGEST:
        return value
    bound = "" if least is None else f" of at least {least}"
    raise ValueError(
        f"{name} is {_shown(value)} and takes a whole number{bound}, at most 2 to the "
        "power of 60"
    )


def finite(name: str, value: object, *, most: float = sys.float_info.max) -> float:
    """Take a finite number that is not below zero, as a time is."""
    if type(value) in (int, float) and 0 <= value <= most:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    bound = "" if most == sys.float_info.max else f" and at most {most:g}"
    raise ValueError(
        f"{name} is {_shown(value)} and takes a finite number, at least 0{bound}"
    )


def channels(value: object) -> list[int | None] | None:
    """Take channels at a time, at each level, or null."""
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError(f"channels is {_shown(value)} and takes a list or null")
    found = [c if c is None else whole("channels", c, least=1) for c in value]
    if any(c is not None and c > _MOST_CHANNELS for c in found):
        raise ValueError(
            f"channels is {_shown(value)} and takes at most {_MOST_CHANNELS:,} each"
        )
    return found


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """Take what was a dict."""
    if isinstance(value, Mapping):
        return value
    raise ValueError(f"{name} is {_shown(value)} and takes names with values")


def texts(name: str, value: object) -> dict[str, str]:
    """Take a dict of texts."""
    found = dict(mapping(name, value))
    for key, text in found.items():
        if not isinstance(text, str):
            raise ValueError(
                f"{name} has {_shown(text)} under {_shown(key)} and takes texts"
            )
    return found


def facts(value: object) -> dict[str, str]:
    """Take texts about what was planned or profiled, of which some are counts."""
    found = texts("about", value)
    for name, text in found.items():
        least = int(name in _COUNTS)
        if not least and not name.endswith("_bytes"):
            continue
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
            raise ValueError(
                f"{name} is {_shown(text)} and takes digits, at most 18"
                f"{', for a number of at least 1' * least}"
            )
    return found


def block_name(value: object) -> str:
    """Take the name of a block."""
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"a block's name is {_shown(value)} and takes a text, not empty")
