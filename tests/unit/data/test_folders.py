"""Folders of audio: their files, their layouts, and links."""

from pathlib import Path
from threading import Barrier, Event, Timer

import pytest

from speechbrain_rev.data import LAYOUTS, audio_files
from speechbrain_rev.data.folders import find_layout, read_folder
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.data.rows import THREADS, read_ahead


def write(folder, *names, content=b""):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def root(tmp_path):
    names = [f"{speaker}/s{n}/{n}.wav" for speaker in ("id1", "id2") for n in range(2)]
    return write(tmp_path / "data/wav", *names)


def rows_below(folder, **settings):
    """Rows of a folder, and the causes of what is left out by name."""
    left_out = []
    layout = find_layout(folder)
    rows = list(read_folder(folder, left_out, layout=layout, **settings))
    root = folder / layout.place
    return rows, {
        Path(one.path).relative_to(root).as_posix(): one.cause for one in left_out
    }


def test_audio_files_are_found_at_any_depth_and_through_links(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        audio_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no audio below .*\.mp3, \.m4a"):
        audio_files(tmp_path)
    write(tmp_path, "b/c/2.FLAC", "a.wav", "b/1.wav", "b/readme.txt")
    (tmp_path / "d").symlink_to(tmp_path / "b")
    (tmp_path / "d/self").symlink_to(tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in audio_files(tmp_path)]
    assert names == ["a.wav", "b/1.wav", "b/c/2.FLAC", "d/1.wav", "d/c/2.FLAC"]


def test_links_that_lead_to_each_other_end(tmp_path):
    write(tmp_path, "a/1.wav", "b/s/2.wav")
    (tmp_path / "a/to_b").symlink_to(tmp_path / "b")
    (tmp_path / "b/s/to_a").symlink_to(tmp_path / "a")
    names = [path.relative_to(tmp_path).as_posix() for path in audio_files(tmp_path)]
    assert names == ["a/1.wav", "a/to_b/s/2.wav", "b/s/2.wav", "b/s/to_a/1.wav"]


def test_few_files_are_read_by_a_thread_each():
    together = Barrier(THREADS)

    def read(item):
        together.wait()
        return item

    assert list(read_ahead(read, range(THREADS))) == list(range(THREADS))


def test_who_leaves_early_waits_for_the_files_that_are_being_read_alone():
    begun, go_on, first_task = [], Event(), 32

    def read(item):
        begun.append(item)
        if item >= first_task:
            go_on.wait()

    results = read_ahead(read, range(1000), together=first_task)
    next(results)
    Timer(0.5, go_on.set).start()
    results.close()
    assert len(begun) <= first_task + THREADS


def test_files_are_listed_in_one_order_and_one_by_one(root):
    write(root, "id1/s0/9.m4a", "id1/s0/8.m4a", "id1/s0/8.flac", "id1/s0/notes.txt")
    names = ["id1/s0/0.wav", "id1/s0/8.flac", "id1/s0/9.m4a", "id1/s1/1.wav"]
    names += ["id2/s0/0.wav", "id2/s1/1.wav"]
    assert [row.name for row in rows_below(root.parent)[0]] == names
    write(root, ".trash/s0/1.wav", "id1/s0/._0.wav")
    rows, left_out = rows_below(root.parent)
    assert left_out == {
        "id1/s0/8.m4a": Cause.ORIGINAL,
        ".trash/s0/1.wav": Cause.HIDDEN,
        "id1/s0/._0.wav": Cause.HIDDEN,
    }
    assert [row.name for row in rows] == names
    (root / "id2/gone").symlink_to(root / "a disk that is not there")
    listed = read_folder(root.parent, layout=find_layout(root.parent))
    assert next(listed).name == names[0]
    with pytest.raises(FileNotFoundError, match="gone leads to"):
        list(listed)


@pytest.mark.parametrize(
    ("layout", "name", "speaker", "session"),
    [
        ("VoxCeleb", "id1/s0/0.wav", "id1", "s0"),
        ("VoxCeleb", "id1/book/s0/0.wav", "id1", "book/s0"),
        ("VoxCeleb", "id1/0.wav", "id1", None),
        ("VoxCeleb", "0.wav", None, None),
        ("LibriSpeech", "train-clean-100/19/198/19-198-0.flac", "19", "198"),
        ("LibriSpeech", "train-clean-100/19.flac", None, None),
        ("CN-Celeb", "id0/singing-01-002.flac", "id0", "singing-01"),
        ("CN-Celeb", "id0/x/singing.flac", "id0", None),
        ("VCTK", "p225/p225_001_mic1.flac", "p225", None),
    ],
)
def test_a_layout_names_speaker_and_session(layout, name, speaker, session):
    row = next(row for row in LAYOUTS if row.name == layout)
    assert row.whose()(name) == (speaker, session)


@pytest.mark.parametrize(
    ("pattern", "name", "speaker", "session"),
    [
        (2, "2024/ann/s1/a.wav", "ann", "s1"),
        (2, "2024/ann.wav", None, None),
        (r"/call-([^-]+)-", "2024/call-ann-1.wav", "ann", "2024"),
        (r"([^/]+)_female/", "x/ann_female/s1/a.wav", "ann", "s1"),
        (r"id\d+", "x/id7/a.wav", "id7", None),
        (r"id\d+", "x/3/id7.wav", "id7", "x/3"),
        (r"(?P<session>\d+)-(?P<speaker>[a-z]+)", "x/2024-ann.wav", "ann", "2024"),
        (r"(?P<speaker>[a-z]+)_", "x/s1/ann_1.wav", "ann", "x/s1"),
        (r"nobody", "x/s1/ann_1.wav", None, None),
    ],
)
def test_speaker_from_overrides_the_layout(pattern, name, speaker, session):
    assert LAYOUTS[-1].whose(pattern)(name) == (speaker, session)


def test_links_that_lead_out_are_left_out_unless_allowed(root):
    write(root.parent.parent, "secret.wav", "more/s/1.wav")
    (root / "id1/link.wav").symlink_to(root.parent.parent / "secret.wav")
    (root / "id3").symlink_to(root.parent.parent / "more")
    (root / "id1/s2").symlink_to(root / "id1/s0")
    data = root.parent
    rows, left_out = rows_below(data, outside_files=False)
    assert len(rows) == 5
    assert left_out == dict.fromkeys(("id1/link.wav", "id3/s/1.wav"), Cause.OUTSIDE)
    rows, left_out = rows_below(data)
    assert (len(rows), left_out) == (7, {})
