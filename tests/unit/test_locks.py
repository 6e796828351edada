"""One process does a thing at a time; others are refused, with its name."""

import errno
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from speechbrain_rev.data.packed import INDEX, JOURNAL, SAMPLES
from speechbrain_rev.data.packing import Packing
from speechbrain_rev.inference import embed_into
from speechbrain_rev.locks import LOCK, locked, writing_alone

_HOLDER = """
import os, sys, time
from pathlib import Path
from speechbrain_rev.locks import locked
with locked(Path(sys.argv[1]), "it", "writing"):
    if "fork" not in sys.argv or not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def holder(place, *options):
    """A process that holds a lock, and the process that it forked."""
    command = [sys.executable, "-c", _HOLDER, str(place), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def refuse(lock, message):
    with pytest.raises(ValueError, match=message), lock:
        pass


def test_the_process_that_holds_a_lock_is_named_until_it_dies(tmp_path):
    place = tmp_path / LOCK
    process, _ = holder(place)
    try:
        who = rf"process {process.pid} on {socket.gethostname()}, since \d"
        refuse(locked(place, "it", "packing"), f"is packing it: {who}")
    finally:
        killed(process)
    assert place.exists()
    with locked(place, "it", "packing"):
        assert f'"process": {os.getpid()},' in place.read_text()
    assert not list(tmp_path.iterdir())


def test_a_worker_that_outlives_its_process_holds_no_lock(tmp_path):
    process, child = holder(tmp_path / LOCK, "fork")
    try:
        killed(process)
        with locked(tmp_path / LOCK, "it", "packing"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_where_nothing_can_be_locked_it_is_said_and_done(
    tmp_path, monkeypatch, caplog, number
):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path / LOCK, "the run", "writing into"):
        pass
    assert "the run cannot be locked" in caplog.text
    assert os.strerror(number) in caplog.text


def test_a_disk_that_is_full_does_not_hinder_a_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)
    # Whose it is could not be written.
    message = r"Another process is packing it\. Wait for"
    with locked(tmp_path / LOCK, "it", "packing"):
        refuse(locked(tmp_path / LOCK, "it", "packing"), message)


def test_one_process_embeds_into_an_archive_and_packs_a_folder(tmp_path):
    path, begun = tmp_path / "rows.npz", tmp_path / "begun.packed"
    (tmp_path / "link.npz").symlink_to(path)
    who = rf"process {os.getpid()} on .*since"
    with writing_alone(path):
        embedder = SimpleNamespace(fingerprint="f00d")
        with pytest.raises(ValueError, match=rf"rows\.npz: {who}"):
            embed_into(path, embedder, {"a": "a.wav"})
        # What a link leads to is locked.
        refuse(writing_alone(tmp_path / "link.npz"), "Another process is writing")
    with (
        Packing(begun, source="a", sample_rate=16000),
        pytest.raises(ValueError, match=rf"packing .*: {who}"),
    ):
        Packing(begun, source="a", sample_rate=16000)
    assert not (begun / LOCK).exists()


def test_a_folder_that_another_process_finished_just_now_stays_packed(
    tmp_path, monkeypatch
):
    folder = tmp_path / "a.packed"

    def finished_by_another(place, *args, **kwargs):
        (folder / SAMPLES).write_bytes(b"speech")
        (folder / INDEX).touch()
        return locked(place, *args, **kwargs)

    monkeypatch.setattr("speechbrain_rev.data.packing.locked", finished_by_another)
    with pytest.raises(ValueError, match="is packed already"):
        Packing(folder, source="a", sample_rate=16000)
    assert (folder / SAMPLES).read_bytes() == b"speech"
    assert not (folder / JOURNAL).exists()
