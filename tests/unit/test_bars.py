"""Bars: a terminal's, a log's lines, and processes that show none."""

import contextlib
import io
import sys
from types import SimpleNamespace

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


class Looks:
    """Stands for the event that ends a bar's thread: some waits pass at once."""

    def __init__(self, looks):
        self.seconds, self._looks = [], looks

    def wait(self, seconds):
        self.seconds.append(seconds)
        return len(self.seconds) > self._looks

    def set(self):
        """The work is done; the thread ends after its looks."""


@pytest.fixture
def waited(monkeypatch):
    """Look some times at a bar whose step takes long; list the seconds in between."""

    def wait(looks):
        event = Looks(looks)
        threads = SimpleNamespace(Event=lambda: event, Thread=Alone)
        monkeypatch.setattr(bars, "threading", threads)
        with bars.kept_alive(progress_bar("counting", unit="number", total=2)):
            pass
        return event.seconds

    return wait


class Alone:
    """Stands for a thread: runs before its start returns."""

    def __init__(self, target, daemon):
        self.start = target

    def is_alive(self):
        return False


def test_a_step_that_takes_long_shows_a_line_a_minute_of_a_log(log, waited):
    shown = log()
    assert waited(3) == [bars.LONG_SECONDS, *[bars.LINE_SECONDS] * 3]
    lines = shown.getvalue().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("counting:   0%") for line in lines)


def test_a_step_that_takes_long_keeps_the_bar_of_a_terminal_alive(terminal, waited):
    shown = terminal()
    first, *others = waited(3)
    assert first == bars.LONG_SECONDS > min(others) == max(others)
    # Shown at first and at each look, and cleared at the end.
    assert shown.getvalue().count("counting:") == 4
    assert shown.getvalue().endswith("\r")


def test_short_work_is_shown_by_no_line_of_a_log(log, waited):
    shown = log()
    assert waited(0) == [bars.LONG_SECONDS]
    assert not shown.getvalue()
