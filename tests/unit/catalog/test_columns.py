"""Tables at every width of a terminal: nothing is wrapped or cut, and what is hidden is named."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import ModelsReport, Training, select
from speechbrain_rev.catalog.breakdown import before_and_after
from speechbrain_rev.catalog.columns import NOTE_WIDTH, Column, Table, page
from speechbrain_rev.catalog.plans import plan_encoders, sweep_encoder
from speechbrain_rev.catalog.render import BreakdownReport, PlansReport, SweepReport
from speechbrain_rev.cli import main
from speechbrain_rev.sizes import GIB

WIDTHS = [60, 80, 100, 200]
TRAINING = Training(11 * GIB, batch=64, frames=200)
#: Each report, and the columns of its first table that are never hidden.
REPORTS = {
    "models": ["encoder", "store", "recomp.", "reconstr."],
    "models of a GPU": ["encoder", "fits", "store", "recomp.", "reconstr."],
    "plans": ["encoder", "GiB", "store", "recomp.", "reconstr."],
    "sweep": ["batch", "number"],
    "breakdowns": ["encoder", "", "mode", "GiB", ""],
}


@pytest.fixture(scope="module")
def reports():
    names = ("resnet34", "revnet57")
    cases = [before_and_after(n, batch=64, frames=200, stages=True) for n in names]
    sweep = sweep_encoder(architecture("resnet34"), TRAINING, [64, 192])
    found = [
        ModelsReport(select(Training(None, batch=64, frames=200))),
        ModelsReport(select(TRAINING)),
        PlansReport(plan_encoders(TRAINING, names=names)),
        SweepReport(sweep),
        BreakdownReport(cases, 11 * GIB),
    ]
    return dict(zip(REPORTS, found, strict=True))


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(name, width, reports):
    lines = reports[name].text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    notes = lines[lines.index("") :]
    words = [line for line in notes if line[:1].isupper() and ": " in line]
    assert words
    assert max(map(len, words)) <= NOTE_WIDTH


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [*WIDTHS, None])
def test_every_cell_of_the_columns_shown_is_whole(name, width, reports):
    for table in reports[name]._tables():
        lines, hidden = table.lines(width)
        shown = [column for column in table.columns if column not in hidden]
        rows = lines[-len(table.rows) :]
        for row, line in zip(table.rows, rows, strict=True):
            cells = [column.cell(row) for column in shown]
            assert line.split() == " ".join(cells).split()
        assert lines[-len(rows) - 1].split() == " ".join(c.head for c in shown).split()
        assert "…" not in "".join(lines)


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [20, *WIDTHS])
def test_less_important_columns_are_hidden_first_and_the_last_line_names_them(
    name, width, reports
):
    report = reports[name]
    text = report.text(width)
    hidden_of_all = []
    for number, table in enumerate(report._tables()):
        _, hidden = table.lines(width)
        shown = [column for column in table.columns if column not in hidden]
        most = max((column.importance for column in hidden), default=0)
        assert all(column.importance > most for column in shown)
        if number == 0:
            assert set(REPORTS[name]) <= {column.head for column in shown}
        hidden_of_all += hidden
    *_, last = text.removesuffix("\n").split("\n\n")
    words = " ".join(last.split())
    if not hidden_of_all:
        assert "Hidden" not in text
        return
    assert words.startswith(f"Hidden at {width} columns: ")
    assert words.endswith("A wider terminal or --json shows them.")
    for column in hidden_of_all:
        assert column.head in words
        assert column.group.strip() in words


@pytest.mark.parametrize("name", REPORTS)
def test_at_200_columns_and_in_a_pipe_nothing_is_hidden(name, reports):
    report = reports[name]
    assert not any(
        table.lines(width)[1] for width in (200, None) for table in report._tables()
    )
    tables = [table.lines(200)[0] for table in report._tables()]
    assert tables == [table.lines()[0] for table in report._tables()]


def test_columns_that_do_not_fit_at_all_are_not_cut():
    names = Column("", "encoder", str, is_words=True)
    lengths = Column("", "letters", lambda name: str(len(name)), importance=1)
    text = page([Table([names, lengths], ["df_revnet377"])], width=5)
    assert text.splitlines()[:2] == ["encoder", "df_revnet377"]


def test_what_looks_like_markup_is_written_as_it_is():
    words = "[bold]x[/bold] :smile:"
    lines, _ = Table([Column("", "[red]", str)], [words]).lines(80)
    assert [line.strip() for line in lines] == ["[red]", words]


def command(*arguments, **options):
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    environment |= options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "speechbrain_rev", "models", *arguments],
        env=environment,
        check=True,
        **options,
    )


def test_a_pipe_gets_all_columns_and_no_escape_codes():
    # Not even where somebody asks for colours.
    env = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    text = command(capture_output=True, text=True, env=env).stdout
    models = select(Training(None, batch=128, frames=200))
    assert text == ModelsReport(models).text()
    assert "\x1b" not in text
    assert "Hidden" not in text


def test_columns_of_the_environment_are_honoured_in_a_pipe():
    text = command(capture_output=True, text=True, env={"COLUMNS": "70"}).stdout
    assert max(map(len, text.splitlines())) <= 70
    assert "Hidden at 70 columns: " in text


def test_a_terminal_s_own_width_counts():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
    with os.fdopen(ours, "rb", buffering=0) as read:
        command("resnet34", "revnet57", stdout=theirs)
        os.close(theirs)
        text = read.read(1 << 16).decode().replace("\r\n", "\n")
    models = select(
        Training(None, batch=128, frames=200), names=["resnet34", "revnet57"]
    )
    assert text == ModelsReport(models).text(77)
    assert re.search(r"^Hidden at 77 columns: ", text, re.MULTILINE)
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["models", "--card=11GB"],
        ["memory", "resnet34"],
        ["plan", "resnet34", "--card=11GB"],
        ["sweep", "resnet34", "--card=11GB", "--batches=64:64"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_json_does_not_depend_on_the_width(arguments, monkeypatch, capsys):
    printed = set()
    for width in ("20", "200"):
        monkeypatch.setenv("COLUMNS", width)
        assert main([*arguments, "--json"]) == 0
        printed.add(capsys.readouterr().out)
    (text,) = printed
    assert json.loads(text)["sources"]
