"""What this machine has for a process, as Linux, a container or another system tells."""

import os

import pytest

from speechbrain_rev.memory import machine


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Files of a machine; those that are not written are not there."""
    for name in ("_MEMINFO", "_LIMIT", "_TAKEN", "_TAKEN_BY"):
        monkeypatch.setattr(machine, name, tmp_path / name)

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(text)

    return write


MEMINFO = "MemTotal:       16000 kB\nMemAvailable:    9000 kB\nMemFree: 10 kB\n"


def test_linux_says_what_is_available(told):
    told(_MEMINFO=MEMINFO)
    assert machine.available_ram_bytes() == 9000 * 1024


@pytest.mark.parametrize(
    ("limit", "left"),
    [("max", 9000 * 1024), ("5000000", 3_500_000), ("1000000", 0), ("10" * 6, 9216000)],
)
def test_a_container_may_have_less(told, limit, left):
    told(_MEMINFO=MEMINFO, _LIMIT=f"{limit}\n", _TAKEN="2000000\n")
    told(_TAKEN_BY="active_file 7\ninactive_file 500000\n")
    assert machine.available_ram_bytes() == left


def test_other_systems_say_what_is_free_or_nothing(told, monkeypatch):
    sizes = {"SC_AVPHYS_PAGES": 30, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert machine.available_ram_bytes() == 30 * 4096
    monkeypatch.delattr(os, "sysconf")
    assert machine.available_ram_bytes() is None
