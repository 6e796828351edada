"""JSON documents that are read back: each value is what it must be, or all is refused."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any


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
    least 0). Plan anew.
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


def whole(name: str, value: object, *, least: int | None = 0) -> int:
    """Take a whole number, of bytes or channels; ``least`` is None where all will do."""
    if type(value) is int and (least is None or value >= least):
        return value
    bound = "" if least is None else f" of at least {least}"
    raise ValueError(f"{name} is {value!r} and takes a whole number{bound}")


def finite(name: str, value: object) -> float:
    """Take a finite number that is not below zero, as a time is."""
    if type(value) in (int, float) and 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ValueError(f"{name} is {value!r} and takes a finite number, at least 0")


def channels(value: object) -> list[int | None] | None:
    """Take channels at a time, at each level, or null."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"channels is {value!r} and takes a list or null")
    return [c if c is None else whole("channels", c, least=1) for c in value]


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """Take what was a dict."""
    if isinstance(value, Mapping):
        return value
    raise ValueError(f"{name} is {value!r} and takes names with values")


def texts(name: str, value: object) -> dict[str, str]:
    """Take a dict of texts."""
    found = dict(mapping(name, value))
    for key, text in found.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} has {text!r} under {key!r} and takes texts")
    return found
