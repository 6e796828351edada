"""Profiles are kept as files, each under all that it depends on."""

import dataclasses
import importlib
import json
import os
from pathlib import Path

import pytest
import torch

from speechbrain_rev.catalog import steps
from speechbrain_rev.compression import activations
from speechbrain_rev.lobes import encoder
from speechbrain_rev.planner import Profile, trace
from speechbrain_rev.planner.knapsack import Cost
from speechbrain_rev.planner.profile import BlockProfile
from speechbrain_rev.reversible import chain

#: The module, whose name is a function of the package too.
saved = importlib.import_module("speechbrain_rev.planner.profile")

BLOCK = BlockProfile("b.0", 4, {(None, "store"): Cost(9, 9, 0.5)})
MADE = Profile([BLOCK], 3, {"store": 2}, 0.25, {"seconds": "measured"})
KEY = {"encoder": "tiny", "batch": "4", "device": "cpu"}


@pytest.fixture
def maker():
    def make():
        make.calls += 1
        return MADE

    make.calls = 0
    return make


def test_a_profile_is_made_once_and_equal_when_read(tmp_path, maker):
    first = saved.saved_profile(KEY, maker, tmp_path)
    again = saved.saved_profile(dict(reversed(KEY.items())), maker, tmp_path)
    assert again == first
    assert maker.calls == 1
    assert dataclasses.replace(first, about=MADE.about) == MADE
    assert KEY.items() <= first.about.items()


@pytest.mark.parametrize("changed", [*({k: "another"} for k in KEY), {"more": "1"}])
def test_another_key_is_another_profile(tmp_path, maker, changed):
    saved.saved_profile(KEY, maker, tmp_path)
    saved.saved_profile(KEY | changed, maker, tmp_path)
    assert maker.calls == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_other_code_makes_another_profile(tmp_path, maker, monkeypatch):
    saved.saved_profile(KEY, maker, tmp_path)
    monkeypatch.setattr(saved, "_code_digest", lambda: "another")
    saved.saved_profile(KEY, maker, tmp_path)
    assert maker.calls == 2


def test_other_kernels_make_another_profile(tmp_path, maker, monkeypatch):
    saved.saved_profile(KEY, maker, tmp_path)
    with torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark):
        saved.saved_profile(KEY, maker, tmp_path)
    assert maker.calls == 2
    saved.saved_profile(KEY, maker, tmp_path)
    assert maker.calls == 2
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    saved.saved_profile(KEY, maker, tmp_path)
    assert maker.calls == 3


def test_code_that_counts_and_times_is_among_what_is_digested():
    package = Path(saved.__file__).parents[1]
    for module in (saved, steps, trace, chain, encoder, activations):
        folder = Path(module.__file__).relative_to(package).parts[0]
        assert folder in saved._PACKAGES


def test_another_row_of_modes_makes_another_profile(monkeypatch):
    read, before = Path.read_bytes, saved._code_digest.__wrapped__()

    def with_a_row(path):
        return read(path) + (b"# one more" if path.name == "modes.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", with_a_row)
    assert saved._code_digest.__wrapped__() != before


@pytest.mark.parametrize("text", ["", "{}", '{"blocks": []}', "[1]", "\0"])
def test_a_damaged_file_is_said_and_made_anew(tmp_path, maker, text):
    first = saved.saved_profile(KEY, maker, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    with pytest.warns(UserWarning, match="made anew"):
        assert saved.saved_profile(KEY, maker, tmp_path) == first
    assert saved.saved_profile(KEY, maker, tmp_path) == first
    assert maker.calls == 2


@pytest.mark.parametrize(
    "change",
    [
        {"about": None},
        {"base_bytes": "3"},
        {"after_seconds": -1},
        {"base_bytes": 10**30},
        {"about": {"batch": "-4"}},
        {"about": {"card_bytes": "0"}},
    ],
)
def test_so_is_one_whose_values_are_of_another_kind(tmp_path, maker, change):
    first = saved.saved_profile(KEY, maker, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.warns(UserWarning, match="made anew"):
        assert saved.saved_profile(KEY, maker, tmp_path) == first


def batches_kept(folder):
    return {json.loads(p.read_text())["about"]["batch"] for p in folder.glob("tiny-*")}


def test_only_the_profiles_that_were_used_last_stay(tmp_path, maker, monkeypatch):
    monkeypatch.setattr(saved, "KEPT", 3)
    others = [tmp_path / name for name in ("plan.json", "notes-2024.json", "tmp.part")]
    for other in others:
        other.write_text("mine")
        os.utime(other, (0, 0))
    for age, batch in enumerate("4321"):
        saved.saved_profile(KEY | {"batch": batch}, maker, tmp_path)
        for path in tmp_path.glob("tiny-*"):
            if json.loads(path.read_text())["about"]["batch"] == batch:
                os.utime(path, (age, age))
    assert batches_kept(tmp_path) == {"3", "2", "1"}
    # What is read was used.
    saved.saved_profile(KEY | {"batch": "3"}, maker, tmp_path)
    saved.saved_profile(KEY | {"batch": "5"}, maker, tmp_path)
    assert batches_kept(tmp_path) == {"3", "1", "5"}
    assert all(other.read_text() == "mine" for other in others)


def test_what_an_ended_process_left_is_deleted_first(tmp_path, maker, monkeypatch):
    monkeypatch.setattr(saved, "KEPT", 1)
    left = tmp_path / "tmpab12_xyz.part"
    left.write_text("half")
    os.utime(left, (0, 0))
    saved.saved_profile(KEY, maker, tmp_path)
    assert not left.exists()
    assert batches_kept(tmp_path) == {"4"}


def test_two_processes_may_delete_the_same_profiles(tmp_path, maker, monkeypatch):
    monkeypatch.setattr(saved, "KEPT", 0)
    unlink = Path.unlink

    def twice(path):
        unlink(path)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", twice)
    saved.saved_profile(KEY, maker, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_profile_of_something_else_under_this_name_is_not_taken(tmp_path, maker):
    saved.saved_profile(KEY, maker, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"batch": "4"', '"batch": "5"'))
    saved.saved_profile(KEY, maker, tmp_path)
    assert maker.calls == 2


def test_a_folder_that_cannot_be_written_costs_no_plan(tmp_path, maker):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match=f"Name a folder .* {saved.VARIABLE}"):
        found = saved.saved_profile(KEY, maker, blocked / "profiles")
    assert found.blocks == [BLOCK]


def test_the_folder_is_the_variable_s_or_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(saved.VARIABLE, str(tmp_path))
    assert saved.profile_folder() == tmp_path
    monkeypatch.delenv(saved.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert saved.profile_folder() == tmp_path / "speechbrain_rev" / "profiles"


def test_a_user_without_a_home_folder_gets_a_profile_that_is_not_kept(
    monkeypatch, maker
):
    for name in ("HOME", "XDG_CACHE_HOME", saved.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.warns(UserWarning, match=f"no home folder.*{saved.VARIABLE}"):
        found = saved.saved_profile(KEY, maker)
    assert found.blocks == [BLOCK]
    assert KEY.items() <= found.about.items()
