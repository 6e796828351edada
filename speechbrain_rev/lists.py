r"""Lists of utterances in text files: lines of fields, and names that stay in a folder.

Fields of a line are separated by spaces or tabs. Where a name has spaces, tabs alone
separate the fields of its line: ``1<tab>ann lee/a.wav<tab>ann lee/b.wav``.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

_BOM = "\ufeff"


def read_text(path: str | Path, form: str) -> str:
    r"""Read a text file in UTF-8, whatever ends its lines.

    Parameters
    ----------
    path : str or Path
        The file. A byte order mark is left out.
    form : str
        What its lines must be, for the error.

    Returns
    -------
    str
        With ``\n`` at the end of lines.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is in another encoding; file and line are named.

    Examples
    --------
    >>> path = getfixture("tmp_path") / "list.txt"
    >>> _ = path.write_bytes(b"\xef\xbb\xbfid1 a.wav\r\n")
    >>> read_text(path, "'speaker path'")
    'id1 a.wav\n'
    """
    content = Path(path).read_bytes()
    wrong, place = "", 0
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        wrong, place = error.reason, error.start
    else:
        if "\0" in text:
            # ASCII in UTF-16 is valid UTF-8, every second character of which is this.
            wrong, place = "it has NUL characters, as UTF-16 has", content.index(b"\0")
    if wrong:
        line = content.count(b"\n", 0, place) + 1
        raise ValueError(
            f"{path}, line {line}: no UTF-8 text ({wrong}). Save it as UTF-8, with lines "
            f"{form}."
        )
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    # Lists that were joined have one in the middle.
    return "\n".join(line.removeprefix(_BOM) for line in lines)


def read_lines(path: str | Path, form: str) -> list[str]:
    """Read the lines of a list, without blank ones at its end.

    Parameters
    ----------
    path, form
        As of ``read_text``.

    Returns
    -------
    list of str
        None where the list is empty.

    Raises
    ------
    OSError, ValueError
        As ``read_text``.
    """
    text = read_text(path, form).rstrip()
    return text.split("\n") if text else []


def each_line(path: str | Path, form: str) -> Iterator[str]:
    r"""Read the lines of a list one by one, of a .gz file too.

    Parameters
    ----------
    path, form
        As of ``read_text``.

    Yields
    ------
    str
        Without its end. Blank lines at the end of the file are left out.

    Raises
    ------
    OSError, ValueError
        As ``read_text``, or if a .gz file is damaged or cut short.

    Examples
    --------
    >>> path = getfixture("tmp_path") / "list.gz"
    >>> _ = path.write_bytes(gzip.compress(b"a.wav\nb.wav\n\n"))
    >>> list(each_line(path, "'path'"))
    ['a.wav', 'b.wav']
    """
    blank = 0
    with open(path, "rb") as opened:
        file: BinaryIO = opened
        if Path(path).suffix.lower() == ".gz":
            file = cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=opened)))
        try:
            for number, content in enumerate(file, start=1):
                line = _decoded(content, f"{path}, line {number}", form)
                if not line:
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


def _decoded(content: bytes, place: str, form: str) -> str:
    wrong = "it has NUL characters, as UTF-16 has" if b"\0" in content else ""
    try:
        line = content.decode()
    except UnicodeDecodeError as error:
        wrong = error.reason
    if wrong:
        raise ValueError(
            f"{place}: no UTF-8 text ({wrong}). Save it as UTF-8, with lines {form}."
        )
    return line.removeprefix(_BOM).strip("\r\n")


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
    >>> printable(os.fsdecode(b"caf\xe9.wav"))
    'caf\\udce9.wav'
    """
    return text.encode(errors="backslashreplace").decode()


def way_out(folder: str | Path, name: str, *, within: str | Path | None = None) -> str:
    """Say how a name leads out of a folder.

    Parameters
    ----------
    folder : str or Path
        That the name is relative to.
    name : str
        Of a file, as a list has it.
    within : str or Path, optional
        Where files may be; ``folder`` by default, which lies in it.

    Returns
    -------
    str
        Empty where it stays in.

    Examples
    --------
    >>> folder = getfixture("tmp_path")
    >>> way_out(folder, "id1/a.wav"), way_out(folder, "../id1/a.wav")
    ('', 'has ..')
    """
    pure = PurePosixPath(name)
    if pure.is_absolute():
        return "is absolute"
    if ".." in pure.parts:
        return "has .."
    real = os.path.realpath(os.path.join(folder, name))
    inside = os.path.realpath(folder if within is None else within)
    if os.path.commonpath([real, inside]) != inside:
        return f"leads through a link to {real}"
    return ""
