"""What tests of bars and profiles share."""

import io
import itertools
import sys
import time

import pytest

from speechbrain_rev.planner.saved_profiles import VARIABLE


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Give what makes stderr a terminal: a test calls it, for pytest replaces stderr.

    A second passes whenever a bar looks at the clock, so that it shows each step.
    """
    looks = itertools.count()
    monkeypatch.setattr("tqdm.std.time", lambda: time.time() + next(looks))
    return lambda: _stderr(monkeypatch, _Terminal())


@pytest.fixture
def log(monkeypatch):
    """Give what makes stderr a file."""
    return lambda: _stderr(monkeypatch, io.StringIO())


def _stderr(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture
def own_profiles(tmp_path, monkeypatch):
    """A folder of profiles of the test's own."""
    folder = tmp_path / "profiles"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder
