r"""Lists of utterances in text files: lines of fields.

Fields of a line are separated by spaces or tabs. Where a name has spaces, tabs alone
separate the fields of its line: ``1<tab>ann lee/a.wav<tab>ann lee/b.wav``.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BOM = "\ufeff"
# Bytes that are no UTF-8; ASCII in UTF-16 is, with NUL as every second character.
_NO_TEXT = re.compile("[\0\udc80-\udcff]")


def read_lines(path: str | Path, form: str) -> list[str]:
    r"""Read the lines of a list, as ``each_line`` does.

    Examples
    --------
    >>> path = getfixture("tmp_path") / "list.txt"
    >>> _ = path.write_bytes(b"\xef\xbb\xbfid1 a.wav\r\n")
    >>> read_lines(path, "'speaker path'")
    ['id1 a.wav']
    """
    return list(each_line(path, form))


def each_line(path: str | Path, form: str) -> Iterator[str]:
    r"""Read the lines of a list one by one, whatever ends them, of a .gz file too.

    Parameters
    ----------
    path : str or Path
        The file, in UTF-8. Byte order marks are left out.
    form : str
        What its lines must be, for the error.

    Yields
    ------
    str
        Without its end. Blank lines at the end of the file are left out.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is in another encoding, of which file and line are named, or a .gz file is
        damaged or cut short.

    Examples
    --------
    >>> path = getfixture("tmp_path") / "list.gz"
    >>> _ = path.write_bytes(gzip.compress(b"a.wav\nb.wav\n\n"))
    >>> list(each_line(path, "'path'"))
    ['a.wav', 'b.wav']
    """
    opened: Any = gzip.open if Path(path).suffix.lower() == ".gz" else open
    blank = 0
    try:
        with opened(path, "rt", encoding="utf-8", errors="surrogateescape") as file:
            for number, text in enumerate(file, start=1):
                if _NO_TEXT.search(text):
                    raise ValueError(
                        f"{path}, line {number}: no UTF-8 text. Save it as UTF-8, with "
                        f"lines {form}."
                    )
                # Lists that were joined have a mark in the middle.
                line = text.removeprefix(_BOM).rstrip("\n")
                if not line.strip():
                    blank += 1
                    continue
                yield from [""] * blank
                blank = 0
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged or cut short ({error}). Copy it again, or give the file "
            "that is in it."
        ) from error


def split_line(line: str, count: int) -> list[str]:
    r"""Split a line into its fields.

    Parameters
    ----------
    line : str
        Of a list.
    count : int
        How many fields there should be.

    Returns
    -------
    list of str
        Those that tabs separate, where spaces separate more; there may be another number
        than ``count``.

    Examples
    --------
    >>> split_line("1 a.wav b.wav", 3), split_line("1\ta b.wav\tc.wav", 3)
    (['1', 'a.wav', 'b.wav'], ['1', 'a b.wav', 'c.wav'])
    """
    fields = line.split()
    if len(fields) > count:
        parts = [part.strip() for part in line.strip().split("\t")]
        if len(parts) == count and all(parts):
            return parts
    return fields


def joined_line(*fields: str) -> str:
    r"""Join fields to a line that ``split_line`` gives them back from.

    Parameters
    ----------
    *fields : str
        Of the line.

    Returns
    -------
    str
        With a line break at its end.

    Raises
    ------
    ValueError
        If no line can hold one of them, see ``is_listable``.

    Examples
    --------
    >>> joined_line("1", "a.wav", "b.wav"), joined_line("1", "a b.wav", "c.wav")
    ('1 a.wav b.wav\n', '1\ta b.wav\tc.wav\n')
    """
    for field in fields:
        if not is_listable(field):
            raise ValueError(
                f"{field!r} cannot stand in a list: it is empty, has a tab or a line "
                "break, or begins or ends with a space. Rename it."
            )
    spaced = any(len(field.split()) > 1 for field in fields)
    return ("\t" if spaced else " ").join(fields) + "\n"


def is_listable(name: str) -> bool:
    r"""Return whether a line can hold a name.

    Examples
    --------
    >>> [is_listable(name) for name in ("a.wav", "a b.wav", "a\tb.wav", " a.wav")]
    [True, True, False, False]
    """
    return bool(name) and name == name.strip() and not set(name) & set("\t\n\r\0\ufeff")


def printable(text: str) -> str:
    r"""Escape what is of names that are not in UTF-8, which not every output takes.

    Examples
    --------
    >>> printable(b"caf\xe9.wav".decode(errors="surrogateescape"))
    'caf\\udce9.wav'
    """
    return text.encode(errors="backslashreplace").decode()
