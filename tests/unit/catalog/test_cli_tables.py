"""Tables of commands: few columns, whole cells at any width, and where figures are from."""

import dataclasses
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from speechbrain_rev import cli
from speechbrain_rev.cli.encoders import _parts_table, _stages_table
from speechbrain_rev.cli.options import table_of
from speechbrain_rev.cli.plans import _batch_row, _plan_notes, _plan_row, _sweep_notes
from speechbrain_rev.devices import GpuAtHand
from speechbrain_rev.sizes import GIB

COMMANDS = {
    "models resnet34 revnet245": ["resnet34", "1.86", "6.63", "60.1"],
    "models resnet34 revnet245 --card=11GB": ["resnet34", "1.86", "store", "10.6"],
    "memory resnet34 --batch=4 --stages": ["activations", "242.8", "MiB"],
    "plan resnet34 --card=4GB --batch=64": ["resnet34", "1.86", "2.68", "-", "1.05"],
    "sweep resnet34 --card=4GB --batches=16:48:32": [
        "16",
        "86.4",
        "1.13",
        "store",
        "17",
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_whole_rows_of_at_most_eight_columns(command, capsys):
    assert cli.main(command.split()) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines]
    wanted = COMMANDS[command]
    assert wanted in [row[: len(wanted)] for row in rows]


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_cuts_no_cell(width):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    command = [sys.executable, "-m", "speechbrain_rev", "models", "df_revnet377"]
    known = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    with os.fdopen(ours, "rb", buffering=0) as read:
        subprocess.run(
            command, stdout=theirs, env=known | {"TERM": "xterm"}, check=True
        )
        os.close(theirs)
        # Heads are bold.
        text = re.sub(r"\x1b\[\d*m", "", read.read(1 << 16).decode())
    assert "…" not in text
    assert ("df_revnet377" in text) == (width == 80)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def text_of(table):
    return [[*column.cells] for column in table.columns]


def test_parts_stand_before_and_after_and_what_is_saved(pairs):
    parts, before, after, saved, of_total = text_of(_parts_table(pairs[1]))
    assert [parts[0], parts[-1]] == ["activations", "total"]
    assert (before[0], after[0], saved[0]) == ("3.825 GiB", "660.3 MiB", "83.1%")
    assert of_total[-1] == saved[-1]


def test_every_stage_has_a_row_in_mib(staged):
    before, _ = staged
    table = _stages_table(before)
    names, held, *_ = text_of(table)
    assert names == [stage.name for stage in before.stages]
    assert held == [f"{stage.held_bytes / 2**20:.1f}" for stage in before.stages]
    assert table.title == "resnet34, store, sgd 32 bit, MiB:"


def test_an_encoder_that_lacks_memory_shows_by_how_much(tight):
    lacking = dataclasses.replace(tight[0], lacking_bytes=GIB, days=None)
    row = _plan_row(lacking)
    assert (row["\nmissing"], row["\ndays"]) == ("1.000 GiB", "-")
    assert (_plan_row(tight[0])["\nmissing"]) == "-"


def test_what_each_block_does_is_listed_for_one_encoder_alone(tight):
    one, both = list(_plan_notes(tight[:1], None)), list(_plan_notes(tight, None))
    assert one[: len(tight[0].stages)] == tight[0].stages
    assert "channels at a time in stage 1: all (chunk None)" in one
    assert not set(tight[0].stages) & set(both)


def test_a_gpu_that_was_asked_is_named(tight):
    notes = list(_plan_notes(tight, GpuAtHand("NVIDIA X", 8 * GIB, 5 * GIB)))
    assert notes[0].startswith("Free of 8 GiB on NVIDIA X: 5 GiB, 1.4 GiB reserved")


def test_rows_of_a_sweep_that_was_timed_name_what_could_not_be(swept):
    """Memory ran out at one batch, and fewer utterances than another has were timed."""
    ran_out, best, other = swept.sweep.plans
    plans = [dataclasses.replace(ran_out, modes={}), best]
    plans.append(dataclasses.replace(other, timed_batch=48))
    remarks = "memory ran out while it was timed", "best", "timed at batch 48"
    assert [_batch_row(plan, swept)[""] for plan in plans] == [*remarks]


def test_a_sweep_ends_with_its_best_batch_and_how_times_came_about(swept):
    words = " ".join(_sweep_notes(swept))
    assert "best batch 48: " in words
    assert "batch 1000 does not fit with any plan" in words
    assert "Times: estimated from counts of operations for an assumed" in words
    timed = dataclasses.replace(swept.sweep, about={"seconds": "measured on cpu, x"})
    measured = dataclasses.replace(swept, device="cpu", sweep=timed)
    assert "Times: measured on cpu, x, of a shallow" in " ".join(_sweep_notes(measured))


def test_what_looks_like_markup_is_written_as_it_is(capsys):
    from speechbrain_rev.cli.options import print_results

    class Parsed:
        json = False

    table = table_of([{"[red]": "[bold]x[/bold] :smile:"}])
    print_results(Parsed, None, lambda: [table], ["[i]"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["[red]", "[bold]x[/bold] :smile:", "", "[i]"]
