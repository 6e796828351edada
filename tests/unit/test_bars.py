"""Bars: a terminal's, a log's lines, and processes that show none."""

import contextlib
import io
import sys
import time

import pytest
from tqdm import tqdm

from speechbrain_rev import bars
from speechbrain_rev.bars import progress_bar


@pytest.fixture
def counted(monkeypatch):
    """Count to four, some seconds apart."""

    def count(seconds, **settings):
        now = [0.0]
        monkeypatch.setattr("tqdm.std.time", lambda: now[0])
        for _ in progress_bar("counting", range(4), unit="number", **settings):
            now[0] += seconds

    return count


def test_a_terminal_shows_each_step_and_may_keep_the_last(terminal, counted):
    shown = terminal()
    counted(1.0, leave=True)
    assert "counting:  25%" in shown.getvalue()
    assert shown.getvalue().endswith("\n")


def test_short_work_shows_no_bar_that_waits(terminal, counted):
    shown = terminal()
    counted(1.0, delay=bars.LONG_SECONDS)
    assert "counting" not in shown.getvalue()


@pytest.mark.parametrize(("seconds", "lines"), [(10.0, 0), (40.0, 2)])
@pytest.mark.parametrize("others", [0, 1])
def test_a_log_gets_a_line_a_minute_of_long_work_alone(
    log, counted, seconds, lines, others
):
    shown = log()
    with contextlib.ExitStack() as stack:
        for _ in range(others):
            stack.enter_context(tqdm(file=io.StringIO()))
        counted(seconds, leave=True)
    text = shown.getvalue()
    assert len(text.splitlines()) == text.count("counting:") == lines
    assert "\r" not in text


def test_a_notebook_shows_each_step(log, counted, monkeypatch):
    shown = log()
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    counted(1.0)
    assert "counting:  25%" in shown.getvalue()


@pytest.mark.parametrize("several", ["torchrun", "multiprocessing"])
def test_one_process_shows_it(terminal, counted, monkeypatch, several):
    shown = terminal()
    if several == "torchrun":
        monkeypatch.setenv("RANK", "1")
    else:
        monkeypatch.setattr(bars, "parent_process", object)
    counted(1.0)
    assert not shown.getvalue()


def waited(monkeypatch, lines, seconds=0.02):
    """Wait for lines of a bar whose only step takes long."""
    monkeypatch.setattr(bars, "LONG_SECONDS", seconds)
    monkeypatch.setattr(bars, "LINE_SECONDS", seconds)
    monkeypatch.setattr(bars, "_ALIVE_SECONDS", seconds)
    with bars.kept_alive(progress_bar("counting", unit="number", total=2)) as bar:
        deadline = time.monotonic() + 30
        while sys.stderr.getvalue().count("counting:") < lines:
            assert time.monotonic() < deadline
            time.sleep(seconds)
        bar.update()


def test_a_step_that_takes_long_shows_lines_of_a_log(log, monkeypatch):
    shown = log()
    waited(monkeypatch, 3)
    assert all(
        line.startswith("counting:   0%") for line in shown.getvalue().split("\n")[:3]
    )


def test_a_step_that_takes_long_keeps_the_bar_of_a_terminal_alive(
    terminal, monkeypatch
):
    shown = terminal()
    waited(monkeypatch, 3)
    # The bar is cleared at the end.
    assert shown.getvalue().endswith("\r")


def test_short_work_is_shown_by_no_line_of_a_log(log, monkeypatch):
    shown = log()
    waited(monkeypatch, 0, seconds=60.0)
    assert not shown.getvalue()
