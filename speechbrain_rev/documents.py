"""JSON documents that others may have changed: each value is checked, and refused in one way.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

Document = TypeVar("Document")
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Instance = TypeVar("Instance", bound=DataclassInstance)

# More bytes, or channels, than anything has.
_LARGEST = 2**60
_MOST_BYTES = 10_000_000
_SHOWN = 60


@contextlib.contextmanager
def reading(kind: str, remedy: str) -> Iterator[None]:
    """Refuse a JSON document in one way, whatever is wrong with it.

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
    ...     whole_number("budget_bytes", "much")
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
        reason: object = error
        if type(error) is KeyError:
            reason = f"{error.args[0]!r} is missing"
        elif isinstance(error, UnicodeDecodeError):
            reason = "it is no text in UTF-8"
        raise ValueError(f"This is no {kind} ({reason}). {remedy}") from error


def load_document(
    path: str | Path, read: Callable[[str], Document], kind: str, remedy: str
) -> Document:
    """Read a document from a file, which errors name.

    Parameters
    ----------
    path : str or Path
        The file.
    read : callable
        Takes its text, and raises ``ValueError`` where that is no document.
    kind, remedy : str
        As :func:`reading` takes them.

    Returns
    -------
    object
        What ``read`` returns.

    Raises
    ------
    ValueError
        If the file is larger than 10 MB, no text, or no document.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    try:
        with reading(kind, remedy):
            if len(content) > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
            text = content.decode()
        return read(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parsed(text: str) -> Mapping[str, Any]:
    """Parse JSON of names with values, none of them there twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{_shown(max(names, key=names.count))} is there twice")
        return values

    return names_with_values("it", json.loads(text, object_pairs_hook=once))


def made_of(kind: type[Instance], values: Mapping[str, Any]) -> Instance:
    """Make a dataclass of the values of its fields.

    Parameters
    ----------
    kind : type
        The dataclass.
    values : mapping of str to object
        By name.

    Returns
    -------
    object
        Of that type.

    Raises
    ------
    KeyError
        If a field is missing.
    ValueError
        If there is another name, or the dataclass refuses a value.

    Examples
    --------
    >>> from speechbrain_rev.devices import Work
    >>> made_of(Work, {"flops": 3, "moved_bytes": 2, "operations": 1, "host_bytes": 0})
    Work(flops=3, moved_bytes=2, operations=1, host_bytes=0)
    """
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(f"{_shown(name)} is none of its names: {', '.join(known)}")
    for name in known:
        if name not in values:
            raise KeyError(name)
    return kind(**values)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def refused(name: str, value: object, taken: str) -> ValueError:
    """Make the error of a value that is not what a name takes."""
    return ValueError(f"{name} is {_shown(value)} and takes {taken}")


def whole_number(name: str, value: object, *, least: int | None = 0) -> int:
    """Take a whole number, of bytes or channels; ``least`` is None where all will do."""
    lowest = -_LARGEST if least is None else least
    if type(value) is int and lowest <= value <= _LARGEST:
        return value
    bound = "" if least is None else f" of at least {least}"
    raise refused(name, value, f"a whole number{bound}, at most 2 to the power of 60")


def finite(name: str, value: object, *, most: float = sys.float_info.max) -> float:
    """Take a finite number that is not below zero, as a time is."""
    if type(value) in (int, float) and 0 <= value <= most:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    bound = "" if most == sys.float_info.max else f" and at most {most:g}"
    raise refused(name, value, f"a finite number, at least 0{bound}")


def names_with_values(name: str, value: object) -> Mapping[str, Any]:
    """Take what was a dict."""
    if not isinstance(value, Mapping):
        raise refused(name, value, "names with values")
    return value


def texts(name: str, value: object) -> dict[str, str]:
    """Take a dict of texts."""
    values = dict(names_with_values(name, value))
    for key, each in values.items():
        if not isinstance(each, str):
            raise ValueError(
                f"{name} has {_shown(each)} under {_shown(key)} and takes texts"
            )
    return values
