"""Files are written whole or not at all, and are as they were written."""

import os
import stat
import tempfile

import pytest

from speechbrain_rev import whole_files
from speechbrain_rev.whole_files import (
    SUMS,
    check_sum,
    check_writable,
    clear_unfinished,
    digest_of,
    folder_whole,
    opened_whole,
    read_rows,
    write_rows,
    write_sums,
    write_whole,
)


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_the_old_one(
    tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    path, out = tmp_path / "plan.json", tmp_path / "out"
    path.write_text("old")
    monkeypatch.setattr(whole_files.os, "replace", full)
    with pytest.raises(OSError, match=r"plan\.json cannot be written \(No sp") as error:
        write_whole(path, b"new")
    assert error.value.errno == 28
    with pytest.raises(OSError, match=r"out cannot be written"), folder_whole(out):
        pass
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_whole_or_not_there(tmp_path):
    def half_made():
        with folder_whole(tmp_path / "out") as part:
            write_whole(part / "weights", "1")
            raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        half_made()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["plan.json", "[a]*?"])
def test_what_killed_processes_left_is_deleted_and_nothing_else(
    tmp_path, monkeypatch, name
):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    others = [tmp_path / other for other in (name, "other", ".plan.json.mine.part")]
    for other in others:
        other.write_text("kept")
    # A killed process deletes nothing.
    monkeypatch.setattr(whole_files.os, "unlink", killed)
    monkeypatch.setattr(whole_files.os, "replace", killed)
    with pytest.raises(Killed):
        write_whole(tmp_path / name, "new")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 4
    clear_unfinished(tmp_path, "a")
    assert len(list(tmp_path.iterdir())) == 4
    clear_unfinished(tmp_path, name)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_links_stay_and_permissions_are_a_new_file_s_or_the_old_one_s(tmp_path):
    mask = os.umask(0)
    os.umask(mask)
    path, link = tmp_path / "file", tmp_path / "link"
    write_whole(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "newer")
    assert (link.is_symlink(), path.read_text()) == (True, "newer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_a_killed_process_left_goes_and_what_others_write_stays(tmp_path):
    path, left = tmp_path / "plan.json", tmp_path / ".plan.json.abcdefgh.part"
    others = [tmp_path / name for name in (".plan.jsonl.abcdefgh.part", ".plan.json.x")]
    for one in (left, *others):
        one.write_text("half")
    with opened_whole(path) as first:
        assert not left.exists()
        # Another process is at it.
        write_whole(path, "second")
        first.write(b"first")
    assert path.read_text() == "first"
    assert set(tmp_path.iterdir()) == {path, *others}


def test_a_part_is_locked_until_it_has_its_name(tmp_path, monkeypatch):
    path, change = tmp_path / "plan.json", os.chmod

    def as_another_writes(part, mode):
        monkeypatch.setattr(os, "chmod", change)
        write_whole(path, "second")
        change(part, mode)

    monkeypatch.setattr(os, "chmod", as_another_writes)
    write_whole(path, "first")
    assert path.read_text() == "first"


def test_a_part_that_is_taken_for_one_left_is_made_anew(tmp_path, monkeypatch):
    made, make = [], tempfile.mkstemp

    def taken(*given):
        file, name = make(*given)
        made.append(name)
        if len(made) == 1:
            os.unlink(name)
        return file, name

    monkeypatch.setattr(tempfile, "mkstemp", taken)
    write_whole(tmp_path / "plan.json", "whole")
    assert (tmp_path / "plan.json").read_text() == "whole"
    assert len(made) == 2


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
    with pytest.raises(OSError, match=r"output_folder: .*cannot be written to .*Give"):
        check_writable("output_folder", tmp_path / name)
    check_writable("output_folder", tmp_path / "new" / "run")
    assert not list((tmp_path / "new" / "run").iterdir())


def test_every_flipped_bit_of_rows_is_refused_with_file_and_line(tmp_path):
    path = tmp_path / "train_log.jsonl"
    rows = [{"epoch": 1, "streams": {"a": 1.5}}, {"epoch": 2, "loss": 7.0}]
    write_rows(path, rows)
    assert read_rows(path) == rows
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"log\.jsonl, line [12], is not as it"):
            read_rows(path)


def test_rows_that_are_missing_or_moved_are_refused(tmp_path):
    path = tmp_path / "train_log.jsonl"
    write_rows(path, [{"epoch": epoch} for epoch in (1, 2, 3)])
    first, second, third = path.read_text().splitlines()
    for lines in (
        ['{"epoch": 1}'],
        [second, third],
        [third, second, first],
        [first, third],
        ['{"epoch": 1}', second, third],
    ):
        path.write_text("\n".join([*lines, ""]))
        with pytest.raises(ValueError, match="is not as it was written"):
            read_rows(path)


def test_a_file_is_compared_with_the_checksum_that_its_folder_has(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("some")
    write_sums(tmp_path, {path.name: digest_of(path, "sha256")})
    check_sum(path)
    path.write_text("same")
    with pytest.raises(ValueError, match=r"train\.csv is not as it was"):
        check_sum(path)
    # As the error advises.
    write_sums(tmp_path, {})
    check_sum(path)
    (tmp_path / SUMS).unlink()
    check_sum(path)


def test_what_is_too_large_for_checksums_is_not_read(tmp_path):
    (tmp_path / SUMS).touch()
    os.truncate(tmp_path / SUMS, 10**12)
    with pytest.raises(
        ValueError, match="has more than 1,000,000 bytes, and is no list"
    ):
        check_sum(tmp_path / SUMS)
