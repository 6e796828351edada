"""Aligned text: columns of cells, neighbours under a common title."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")

#: Heads of columns of words, which begin a line on the left; figures end it on the right.
WORDS = ("encoder", "type", "how", "stage", "blocks")

#: What is in a column of chunks.
CHUNK_NOTE = (
    "chunk: the channels of the first level that blocks work on at a time, - is all of "
    "them; it is chosen with the modes."
)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of text.

    Attributes
    ----------
    group : str
        Title above the heads of neighbours that have the same one.
    head : str
        Above the cells.
    cell : callable
        Writes a row's cell.
    """

    group: str
    head: str
    cell: Callable[[Row], str]

    def text(self, rows: Sequence[Row]) -> list[str]:
        """Give the head and the cells."""
        return [self.head, *(self.cell(row) for row in rows)]


def aligned(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[str]:
    """Write the lines of a table.

    Parameters
    ----------
    columns : sequence of Column
        From left to right.
    rows : sequence
        From top to bottom.

    Returns
    -------
    list of str
        Groups' titles, heads, then a line for each row.

    Examples
    --------
    >>> names = Column("", "encoder", str)
    >>> lengths = Column("of it", "letters", lambda name: str(len(name)))
    >>> aligned([names, lengths], ["revnet57"])
    ['            of it', 'encoder   letters', 'revnet57        8']
    """
    blocks: list[list[str]] = []
    titles = list(dict.fromkeys(column.group for column in columns))
    for title in titles:
        cells = [column.text(rows) for column in columns if column.group == title]
        padded = [
            [text.ljust(width) if words else text.rjust(width) for text in column]
            for column in cells
            for width in [max(map(len, column))]
            for words in [column[0] in WORDS]
        ]
        lines = [" ".join(row) for row in zip(*padded, strict=True)]
        width = max(len(title), len(lines[0]))
        blocks.append([text.rjust(width) for text in [title, *lines]])
    return ["  ".join(row).rstrip() for row in zip(*blocks, strict=True)]


def chunk_text(channels: Sequence[int | None]) -> str:
    """Write the cell of a chunk.

    Parameters
    ----------
    channels : sequence of int or None
        Channels at a time, at each level.

    Returns
    -------
    str
        Those of the first level, - if it is all of them.

    Examples
    --------
    >>> chunk_text([32, 128, 512, None]), chunk_text([None] * 4)
    ('32', '-')
    """
    return str(channels[0] or "-")
