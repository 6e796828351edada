"""Files are written whole or not at all."""

import os
import stat

import pytest

from speechbrain_rev import whole_files
from speechbrain_rev.plots.style import new_figure, save
from speechbrain_rev.scoring import Trials, write_scores
from speechbrain_rev.whole_files import check_writable, write_whole


@pytest.fixture
def full(monkeypatch):
    """A disk that takes no more."""

    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, "replace", replace)


def test_what_was_there_stays_where_writing_fails(tmp_path, full):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_permissions_are_those_of_any_new_file_or_of_the_old_one(tmp_path):
    mask = os.umask(0)
    os.umask(mask)
    path = tmp_path / "file"
    write_whole(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    write_whole(path, "newer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_bytes_are_written_as_they_are(tmp_path):
    write_whole(tmp_path / "picture", b"\x89PNG\r\n")
    assert (tmp_path / "picture").read_bytes() == b"\x89PNG\r\n"


def test_pictures_and_scores_are_written_so(tmp_path, full):
    def picture(path):
        save(new_figure(1, 1), path)

    def scores(path):
        write_scores(path, Trials([1, 0], ["a", "a"], ["b", "c"]), [0.5, 0.25])

    for write in (picture, scores):
        path = tmp_path / write.__name__
        path.write_text("old")
        with pytest.raises(OSError, match="No space"):
            write(path)
        assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_pipe_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"output_folder: .*cannot be written to .*Give an"
    ):
        check_writable("output_folder", tmp_path / name)
    check_writable("output_folder", tmp_path / "new" / "run")
    assert not list((tmp_path / "new" / "run").iterdir())
