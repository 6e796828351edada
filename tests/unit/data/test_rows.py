"""A name of a list is looked up among the rows of its corpus, however it is written."""

import unicodedata
from pathlib import Path

import pytest

from speechbrain_rev.data import open_sources
from speechbrain_rev.data.rows import find_rows, speaker_of_name

from .test_folders import write


@pytest.fixture
def root(tmp_path):
    names = ("id1/s0/0.wav", "id1/s0/5.flac", "id1/s0/6.FLAC", "Jos\u00e9/s/1.m4a")
    names += ("alone.wav",)
    return write(tmp_path / "data/wav", *names)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("id1/s0/0.wav", "id1/s0/0.wav"),
        ("id1/s0/5.wav", "id1/s0/5.flac"),
        ("id1/s0/6.m4a", "id1/s0/6.FLAC"),
        ("id1/s0/5", "id1/s0/5.flac"),
        ("alone.flac", "alone.wav"),
        ("id1/s0/7.wav", None),
        ("id1/s0/5.txt", None),
        ("./id1//s0/0.wav", "id1/s0/0.wav"),
        ("id2/../id1/s0/./0.wav", "id1/s0/0.wav"),
        (unicodedata.normalize("NFD", "Jos\u00e9/s/1.wav"), "Jos\u00e9/s/1.m4a"),
        (unicodedata.normalize("NFC", "Jos\u00e9/s/1.wav"), "Jos\u00e9/s/1.m4a"),
    ],
)
def test_ending_unicode_form_and_detours_of_a_name_may_differ(root, name, file):
    found = find_rows(open_sources(root.parent), [name])
    if file is None:
        assert found.missing == {name: str(root / name)}
        assert found.lacking([name]).startswith("1 of 1 file is missing, such as")
    else:
        assert Path(found.rows[name].wav) == root / file
        assert not found.missing


def test_a_file_of_the_very_name_comes_before_others(root):
    write(root, "id1/s0/0.flac", "id1/s0/5.wav")
    found = find_rows(open_sources(root.parent), [f"id1/s0/{n}.wav" for n in (0, 5)])
    assert [row.ending for row in found.rows.values()] == [".wav", ".wav"]


def test_names_that_lead_out_are_refused_unless_allowed(root):
    write(root.parent.parent, "secret.wav")
    (root / "id1/link.wav").symlink_to(root.parent.parent / "secret.wav")
    names = ["../../secret.wav", str(root.parent.parent / "secret.wav"), "id1/link.wav"]
    found = find_rows(open_sources(root.parent), [*names, "id1/s0/0.wav"])
    assert not found.missing
    assert [found.outside[name].split(" to ")[0] for name in names] == [
        "has ..",
        "is absolute",
        "leads through a link",
    ]
    found.refuse_outside("list.txt", ["id1/s0/0.wav"])
    with pytest.raises(
        ValueError, match=r"list\.txt: 3 names outside the folder, such"
    ):
        found.refuse_outside("list.txt", names)
    with pytest.raises(
        ValueError, match=r"list\.txt: 1 name outside the folder.*'id1/link"
    ):
        found.refuse_outside("list.txt", names[2:])
    allowed = find_rows(open_sources(root.parent, outside_files=True), names)
    assert not allowed.outside
    real = root.parent.parent / "secret.wav"
    assert {Path(row.wav).resolve() for row in allowed.rows.values()} == {real}


def test_a_name_is_looked_up_in_each_of_several_corpora(tmp_path):
    for folder, name in (("a", "id1/s0/0.wav"), ("b", "id2/s0/5.flac")):
        write(tmp_path / folder / "wav", name, "id9/s/1.wav")
    sources = open_sources([tmp_path / "a", tmp_path / "b"])
    names = ["id2/s0/5.wav", "b/id2/s0/5.wav", "id3/s/1.wav", "a/id3/s/1.wav"]
    found = find_rows(sources, names)
    assert [row.id for row in found.rows.values()] == ["b/id2/s0/5"] * 2 + [
        "id3/s/1",
        "a/id3/s/1",
    ]
    assert found.missing == {
        "id3/s/1.wav": "'id3/s/1.wav', which none of a, b has",
        "a/id3/s/1.wav": str(tmp_path / "a/wav/id3/s/1.wav"),
    }
    with pytest.raises(ValueError, match=r"is in the corpora a, b. Write a/id9/"):
        find_rows(sources, ["id9/s/1.wav"])
    assert (
        find_rows(sources, ["b/id9/s/1.wav"]).rows["b/id9/s/1.wav"].speaker == "b/id9"
    )


def test_the_speaker_of_a_name_needs_no_file(root):
    sources = open_sources(root.parent)
    names = ["id7/s/1.wav", "./id7/s/1.wav", "id1/../id7//s/1.wav", "1.wav"]
    found = find_rows(sources, names)
    assert [found.rows[n].speaker for n in names] == [*["id7"] * 3, None]
    assert list(found.missing) == names
    assert speaker_of_name("id2/../id7/s/1.wav") == "id7"
    assert speaker_of_name("1.wav") is None
