"""Tables at every width of a terminal: nothing is wrapped or cut, and what is hidden is named."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from speechbrain_rev.catalog import ModelsReport, Training, select
from speechbrain_rev.catalog.columns import Column, Table, page


def test_columns_that_do_not_fit_at_all_are_not_cut():
    names = Column("", "encoder", str, is_words=True)
    lengths = Column("", "letters", len, importance=1)
    text = page([Table([names, lengths], ["df_revnet377"])], width=5)
    assert text.splitlines()[:2] == ["encoder", "df_revnet377"]


def test_what_looks_like_markup_is_written_as_it_is():
    words = "[bold]x[/bold] :smile:"
    lines, _ = Table([Column("", "[red]", str)], [words]).lines(80)
    assert [line.strip() for line in lines] == ["[red]", words]


def test_values_stand_where_their_keys_say_and_mappings_are_merged():
    columns = [
        Column("", "n", lambda n: n, "of.number"),
        Column("", None, lambda n: {"half": n / 2}, "of"),
        Column("", "none", lambda n: None, "none", ".2f"),
        Column("", "no key", str),
        Column("", "both", lambda n: {"a": n, "b": -n}, "", lambda v: f"{v['a']}"),
    ]
    table = Table(columns, [3])
    plain = {"of": {"number": 3, "half": 1.5}, "none": None, "a": 3, "b": -3}
    assert table.plain() == [plain]
    assert table.lines()[0][-1].split() == ["3", "-", "3", "3"]


NAMES = ["resnet34", "revnet57"]
COMMAND = [sys.executable, "-m", "speechbrain_rev", "models", *NAMES]


def environment():
    return {k: v for k, v in os.environ.items() if k != "COLUMNS"}


def shown(width):
    models = select(Training(None, batch=128, frames=200), names=NAMES)
    return ModelsReport(models).text(width)


@pytest.mark.parametrize(
    ("changed", "width"),
    # A pipe has all columns and no colours, not even where somebody asks for them.
    [({"FORCE_COLOR": "1", "TERM": "xterm-256color"}, None), ({"COLUMNS": "70"}, 70)],
)
def test_a_pipe_gets_all_columns_or_as_many_as_the_environment_says(changed, width):
    text = subprocess.check_output(COMMAND, text=True, env=environment() | changed)
    assert text == shown(width)
    assert ("Hidden at 70 columns: " in shown(width)) == (width == 70)


def test_a_terminal_s_own_width_counts():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
    with os.fdopen(ours, "rb", buffering=0) as read:
        subprocess.run(COMMAND, stdout=theirs, env=environment(), check=True)
        os.close(theirs)
        text = read.read(1 << 16).decode().replace("\r\n", "\n")
    assert text == shown(77)
