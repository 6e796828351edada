"""Profiles that are kept as files: made once, read, forgotten."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from speechbrain_rev.planner import Profile
from speechbrain_rev.planner import saved_profiles as saved
from speechbrain_rev.planner.knapsack import Cost
from speechbrain_rev.planner.profile import BlockProfile

BLOCK = BlockProfile("b.0", 4, {(None, "store"): Cost(9, 9, 0.5)})
MADE = Profile([BLOCK], 3, {"store": 2}, 0.25, {"seconds": "measured"})
KEY = {"encoder": "tiny", "batch": "4", "device": "cpu"}


@pytest.fixture
def kept(tmp_path):
    """Read or make the profile of a key; it counts how often one was made."""

    def kept(more=(), folder=tmp_path):
        def make():
            kept.made += 1
            return MADE

        return saved.saved_profile(KEY | dict(more), make, folder)

    kept.made = 0
    return kept


def test_a_profile_is_made_once_for_a_key_and_equal_when_read(kept, tmp_path):
    first = kept()
    assert kept(reversed(KEY.items())) == first
    assert kept.made == 1
    assert replace(first, about=MADE.about) == MADE
    assert KEY.items() <= first.about.items()
    for number, more in enumerate([*({k: "another"} for k in KEY), {"more": "1"}], 2):
        kept(more)
        assert kept.made == len(list(tmp_path.iterdir())) == number


def test_other_kernels_and_other_code_make_another_profile(kept, monkeypatch):
    kept()
    with torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark):
        kept()
    assert kept.made == 2
    read, before = Path.read_bytes, saved._code_digest.__wrapped__()
    package, digested = Path(saved.__file__).parents[1], set()

    def with_a_row(path):
        digested.add(path.relative_to(package).parts[0])
        return read(path) + (b"# one more" if path.name == "modes.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", with_a_row)
    digest = saved._code_digest.__wrapped__()
    assert digest != before
    # What counts and times is in these.
    assert {"planner", "catalog", "reversible", "lobes", "compression"} <= digested
    monkeypatch.setattr(saved, "_code_digest", lambda: digest)
    kept()
    assert kept.made == 3


@pytest.mark.parametrize(
    "text", ["", "[1]", "\0", json.dumps(asdict(replace(MADE, blocks=[], about=None)))]
)
def test_a_damaged_file_is_reported_and_made_anew(kept, tmp_path, text):
    first = kept()
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    path.write_text(text)
    with pytest.warns(UserWarning, match="made anew"):
        assert kept() == first
    assert kept() == first
    assert kept.made == 2
    # A profile of something else under this name is not taken.
    path.write_text(good.replace('"batch": "4"', '"batch": "5"'))
    assert kept() == first
    assert kept.made == 3


def test_only_the_profiles_that_were_used_last_stay(kept, tmp_path, monkeypatch):
    def batches():
        paths = {p: json.loads(p.read_text()) for p in tmp_path.glob("tiny-*")}
        return {profile["about"]["batch"]: path for path, profile in paths.items()}

    monkeypatch.setattr(saved, "KEPT", 3)
    others = [tmp_path / name for name in ("plan.json", "notes-2024.json", "tmp.part")]
    # What a killed process left is ours.
    left = tmp_path / ".tiny-0123456789abcdef.json.0123abcd.part"
    for other in (*others, left):
        other.write_text("mine")
        os.utime(other, (0, 0))
    for age, batch in enumerate("4321", start=1):
        kept({"batch": batch})
        os.utime(batches()[batch], (age, age))
    assert batches().keys() == {"3", "2", "1"}
    # What is read was used.
    kept({"batch": "3"})
    kept({"batch": "5"})
    assert batches().keys() == {"3", "1", "5"}
    assert all(other.read_text() == "mine" for other in others)
    assert not left.exists()


def test_two_processes_may_delete_the_same_profiles(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "KEPT", 0)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path: [unlink(path), unlink(path)])
    kept()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_no_plan(kept, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match=f"Name a folder .* {saved.VARIABLE}"):
        assert kept(folder=blocked / "profiles").blocks == [BLOCK]


def test_the_folder_is_the_variable_s_or_in_the_cache_or_none(
    kept, monkeypatch, tmp_path
):
    monkeypatch.setenv(saved.VARIABLE, str(tmp_path))
    assert saved.profile_folder() == tmp_path
    monkeypatch.delenv(saved.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert saved.profile_folder() == tmp_path / "speechbrain_rev" / "profiles"
    # A user without a home folder gets a profile that is not kept.
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.warns(UserWarning, match=f"no home folder.*{saved.VARIABLE}"):
        profile = kept(folder=None)
    assert profile.blocks == [BLOCK]
    assert KEY.items() <= profile.about.items()
