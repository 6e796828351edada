"""Files that cannot be used: all of them in one table, and refused or dropped."""

import os

import numpy as np
import pytest
import soundfile

from speechbrain_rev.data import read_manifest
from speechbrain_rev.data.labels import read_labels
from tests.corpus import write_corpus

RATE = 16000


@pytest.fixture
def bad_corpus(tmp_path):
    """One file of each kind, beside four speakers whose speech is good."""
    folder = write_corpus(tmp_path / "bad", speakers=4, seconds=0.2)
    bad = folder / "wav/id9/s"
    bad.mkdir(parents=True)
    noise = 0.1 * np.random.default_rng(0).standard_normal(RATE).astype("float32")
    soundfile.write(bad / "truncated.wav", noise, RATE)
    os.truncate(bad / "truncated.wav", 31000)
    (bad / "nothing.wav").touch()
    (bad / "other.m4a").write_bytes(b"\0\0\0\x20ftypM4A ")
    (bad / "notes.txt").write_text("no speech")
    (bad / "text.wav").write_text("RIFF or not")
    os.mkfifo(bad / "pipe.wav")
    soundfile.write(bad / "empty.wav", noise[:0], RATE)
    soundfile.write(bad / "slow.wav", noise, 8000)
    soundfile.write(bad / "stereo.wav", np.stack([noise, noise], 1), RATE)
    soundfile.write(bad / "silent.wav", 0 * noise, RATE)
    nan = noise.copy()
    nan[100] = np.nan
    soundfile.write(bad / "nan.wav", nan, RATE, subtype="FLOAT")
    soundfile.write(bad / "twice.wav", noise, RATE)
    soundfile.write(bad / "twice.flac", noise, RATE)
    damaged = bytearray((bad / "twice.flac").read_bytes())
    damaged[-3000:-1000] = b"\0" * 2000
    (bad / "damaged.flac").write_bytes(damaged)
    return folder


HEADERS = {"other", "truncated", "nothing", "text", "empty", "slow", "stereo", "twice"}
HEADERS |= {"pipe"}
ALL = HEADERS | {"silent", "nan", "damaged"}
pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no pipes")


def stems(path):
    return {line.split("\t")[0].split("/")[-1].split(".")[0] for line in path.open()}


@pytest.mark.parametrize(("whole", "bad"), [(False, HEADERS), (True, ALL)])
def test_all_problems_are_reported_at_once(
    prepared, bad_corpus, tmp_path, capsys, whole, bad
):
    with pytest.raises(ValueError, match="bad_files: drop") as error:
        prepared(bad_corpus, check_audio=whole)
    table = capsys.readouterr().out
    for words in (table, str(error.value)):
        assert f"{len(bad)} of 29 files cannot be used" in words
        assert "slow.wav has 8000 samples per second" in words
        assert ("silent" in words) == whole
    assert stems(tmp_path / "save/bad_files.txt") == bad
    assert "pipe.wav is a named pipe" in (tmp_path / "save/bad_files.txt").read_text()
    assert not (tmp_path / "save/train.csv").exists()


def test_they_are_dropped_where_the_user_asks_for_it(prepared, bad_corpus, tmp_path):
    given = {"check_audio": True, "bad_files": "drop"}
    summary = prepared(bad_corpus, **given)
    utterances = read_manifest(tmp_path / "save/train.csv")
    # Of the two of one name one stays.
    assert [u.ID for u in utterances if u.spk_id == "id9"] == ["id9/s/twice"]
    assert (summary.dropped, summary.single, summary.speakers) == (len(ALL), 1, 5)
    assert "Speakers with one utterance only: 1" in summary.in_words()
    assert f"Dropped because they cannot be used: {len(ALL)}" in summary.in_words()
    held_out = prepared(bad_corpus, "other", **given, valid_speakers=2)
    assert held_out.held_out + held_out.utterances == 17
    trials = (tmp_path / "other/valid_trials.txt").read_text()
    assert not any(f"/{stem}." in trials for stem in ALL - {"twice"})
    for path in (bad_corpus / "wav/id9/s").glob("twice.*"):
        path.unlink()
    assert prepared(bad_corpus, "third", **given).speakers == 4
    assert "id9" not in read_labels(tmp_path / "third/label_encoder.txt")


def test_a_corpus_without_problems_leaves_no_list(prepared, bad_corpus, tmp_path):
    prepared(bad_corpus, bad_files="drop")
    for path in (bad_corpus / "wav/id9/s").iterdir():
        path.unlink()
    assert prepared(bad_corpus).dropped == 0
    assert not (tmp_path / "save/bad_files.txt").exists()
