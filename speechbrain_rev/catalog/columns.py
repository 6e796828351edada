"""Tables that fit a terminal, and the same rows as JSON.

Where a terminal is too narrow, the least important columns are hidden and named in the
last line. No cell is wrapped or cut.
"""

from __future__ import annotations

import itertools
import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from rich.table import Table as Grid

#: Lines of notes are no longer than this on any terminal.
NOTE_WIDTH = 100

# No table is as wide, so that rich has nothing to wrap.
_UNLIMITED = 10_000

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table, which is a key of each row's JSON object.

    Attributes
    ----------
    group : str
        Title above the heads of neighbours that have the same one.
    head : str or None
        Above the cells; None for a value that JSON alone has.
    value : str or callable
        An attribute of a row, named with dots, or what gives a row's value. JSON takes the
        value as it is; None where nobody knows it.
    key : str or None
        Where the value stands in JSON, objects before a dot. A mapping is merged into what
        stands there, into the row itself if the key is empty. None for a table without JSON.
    text : str or callable
        How the table shows a value: a format, or what makes a text of it. None is "-".
    importance : float
        On a narrow terminal columns of the lowest importance are hidden first, those of
        the same importance together. Infinite, the default: never hidden.
    is_words : bool
        Whether cells begin on the left; figures end on the right.

    Examples
    --------
    >>> size = Column("memory", "MiB", len, "memory.bytes", lambda n: f"{n / 2**20:.1f}")
    >>> size.cell(bytes(3 * 2**19))
    '1.5'
    """

    group: str
    head: str | None
    value: str | Callable[[Row], Any]
    key: str | None = None
    text: str | Callable[[Any], str] = ""
    importance: float = math.inf
    is_words: bool = False

    def of(self, row: Row) -> Any:
        """Give a row's value."""
        value = self.value
        return attrgetter(value)(row) if isinstance(value, str) else value(row)

    def cell(self, row: Row) -> str:
        """Write a row's cell."""
        value = self.of(row)
        if value is None:
            return "-"
        return (
            format(value, self.text) if isinstance(self.text, str) else self.text(value)
        )


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Columns and rows.

    Attributes
    ----------
    columns : sequence of Column
        From left to right, the keys of JSON in this order.
    rows : sequence
        From top to bottom.
    title : str
        A line above the table; none if empty.

    Examples
    --------
    >>> names = Column("", "encoder", str, is_words=True)
    >>> lengths = Column("of it", "letters", len, "letters", importance=1)
    >>> table = Table([names, lengths], ["revnet57", "resnet152"])
    >>> table.lines(80)[0]
    ['            of it', 'encoder    letters', 'revnet57         8', 'resnet152        9']
    >>> lines, hidden = table.lines(12)
    >>> lines[0], [column.head for column in hidden]
    ('encoder', ['letters'])
    >>> table.plain()
    [{'letters': 8}, {'letters': 9}]
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    title: str = ""

    def lines(self, width: int | None = None) -> tuple[list[str], list[Column[Row]]]:
        """Draw the table.

        Parameters
        ----------
        width : int or None
            Of the terminal; None for all columns. The columns that are never hidden may
            be wider.

        Returns
        -------
        tuple of list of str and list of Column
            The lines, and the columns that are hidden.
        """
        from rich.console import Console

        console = Console(
            width=_UNLIMITED, color_system=None, markup=False, emoji=False
        )
        # All cells of a column as one text: rich takes its time for each cell.
        shown = [c for c in self.columns if c.head is not None]
        cells = [(c, "\n".join(map(c.cell, self.rows))) for c in shown]
        hideable = {c.importance for c in shown if c.importance < math.inf}
        for least in (-math.inf, *sorted(hideable)):
            grid = _grid((c, text) for c, text in cells if c.importance > least)
            if width is None or console.measure(grid).maximum <= width:
                break
        with console.capture() as capture:
            console.print(grid)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        hidden = [column for column in shown if column.importance <= least]
        return ([self.title] if self.title else []) + lines, hidden

    def plain(self) -> list[dict[str, Any]]:
        """Give the rows as JSON objects, in bytes, seconds and other base units."""
        return [_plain(self.columns, row) for row in self.rows]


def _plain(columns: Iterable[Column[Row]], row: Row) -> dict[str, Any]:
    """Put values of a row where their keys say."""
    plain: dict[str, Any] = {}
    for column in columns:
        if column.key is None:
            continue
        value, (*path, name) = column.of(row), column.key.split(".")
        if isinstance(value, Mapping):
            path, values = [*path, *([name] if name else [])], value
        else:
            values = {name: value}
        place = plain
        for step in path:
            place = place.setdefault(step, {})
        place.update(values)
    return plain


def _grid(cells: Iterable[tuple[Column[Any], str]]) -> Grid:
    """Put each group's own grid below the group's title."""
    from rich.align import Align
    from rich.table import Table as Grid

    whole = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    parts = []
    for title, members in itertools.groupby(cells, lambda pair: pair[0].group):
        columns, texts = zip(*members, strict=True)
        part = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for column in columns:
            part.add_column(
                column.head or "",
                justify="left" if column.is_words else "right",
                no_wrap=True,
            )
        part.add_row(*texts)
        whole.add_column(title, justify="center", no_wrap=True)
        whole.show_header |= bool(title)
        parts.append(Align.right(part))
    whole.add_row(*parts)
    return whole


def page(
    tables: Iterable[Table[Any]],
    *,
    remarks: Iterable[str] = (),
    notes: Iterable[str] = (),
    width: int | None = None,
) -> str:
    """Write tables, what they show, and what their figures are.

    Parameters
    ----------
    tables : iterable of Table
        Each below the one before.
    remarks, notes : iterable of str
        Two paragraphs, a new line for each text.
    width : int or None
        Of the terminal; None for a file or a pipe, which gets all columns.

    Returns
    -------
    str
        Lines, the last one ended too. It names what is hidden.

    Examples
    --------
    >>> square = Column("", "square", lambda n: n * n, importance=0)
    >>> table = Table([Column("", "number", str), square], [7])
    >>> print(page([table], notes=["A number and its square."], width=12), end="")
    number
         7
    <BLANKLINE>
    A number and
      its
      square.
    <BLANKLINE>
    Hidden at 12
      columns:
      square. A
      wider
      terminal
      or --json
      shows
      them.
    """
    drawn = [table.lines(width) for table in tables]
    names = _names(column for _, hidden in drawn for column in hidden)
    last = f"Hidden at {width} columns: {names}. A wider terminal or --json shows them."
    paragraphs = [
        *("\n".join(lines) for lines, _ in drawn),
        *(_filled(texts, width) for texts in (remarks, notes, [last] if names else [])),
    ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _filled(texts: Iterable[str], width: int | None) -> str:
    return "\n".join(
        textwrap.fill(
            text,
            min(width or NOTE_WIDTH, NOTE_WIDTH),
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for text in texts
    )


def _names(columns: Iterable[Column[Any]]) -> str:
    """Name columns by group and heads."""
    groups: dict[str, list[str]] = {}
    for column in columns:
        heads = groups.setdefault(column.group, [])
        if column.head and column.head not in heads:
            heads.append(column.head)
    return ", ".join(
        f"{group} ({', '.join(heads)})"
        if group and heads
        else group or ", ".join(heads)
        for group, heads in groups.items()
    )


def terminal_width() -> int | None:
    """Find how wide a text on stdout may be.

    Returns
    -------
    int or None
        COLUMNS of the environment, else the columns of the terminal; None if stdout is a
        pipe or a file.

    Examples
    --------
    >>> import os
    >>> os.environ["COLUMNS"] = "80"
    >>> terminal_width()
    80
    >>> del os.environ["COLUMNS"]
    """
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None
