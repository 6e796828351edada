"""Files that cannot be used: all told of in one table, and refused or dropped."""

import os
import random

import numpy as np
import pytest
import soundfile

from speechbrain_rev.data import read_manifest
from tests.corpus import write_corpus
from tests.recipes.runs import recipe

prepare = recipe("prepare")
RATE = 16000


@pytest.fixture
def corpus(tmp_path):
    """One file of each kind, beside four speakers whose speech is good."""
    folder = write_corpus(tmp_path / "corpus", speakers=4, seconds=0.2)
    bad = folder / "wav" / "id9" / "s"
    bad.mkdir(parents=True)
    noise = 0.1 * np.random.default_rng(0).standard_normal(RATE).astype("float32")
    soundfile.write(bad / "truncated.wav", noise, RATE)
    content = (bad / "truncated.wav").read_bytes()
    (bad / "truncated.wav").write_bytes(content[:-1000])
    (bad / "nothing.wav").touch()
    (bad / "other.m4a").write_bytes(b"\0\0\0\x20ftypM4A ")
    (bad / "notes.txt").write_text("no speech")
    (bad / "text.wav").write_text("RIFF or not")
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
ALL = HEADERS | {"silent", "nan", "damaged"}


def settings(corpus, **changed):
    return prepare.Settings(data_folder=str(corpus), **changed)


def stems(path):
    return {line.split("\t")[0].split("/")[-1].split(".")[0] for line in path.open()}


@pytest.mark.parametrize(("whole", "found"), [(False, HEADERS), (True, ALL)])
def test_all_that_is_wrong_is_told_at_once(corpus, tmp_path, capsys, whole, found):
    with pytest.raises(ValueError, match="bad_files: drop") as error:
        prepare.prepare(settings(corpus, check_audio=whole), tmp_path / "save")
    table = capsys.readouterr().out
    for words in (table, str(error.value)):
        assert f"{len(found)} of 28 files cannot be used" in words
        assert "slow.wav has 8000 samples per second" in words
        assert ("silent" in words) == whole
    assert stems(tmp_path / "save" / "bad_files.txt") == found
    assert not (tmp_path / "save" / "train.csv").exists()


@pytest.mark.parametrize("format", ["NIST", "AIFF", "AU", "W64", "RF64", "CAF"])
def test_other_formats_of_that_name_are_told_of_where_they_are_cut_short(
    tmp_path, format
):
    folder = write_corpus(tmp_path / "corpus", speakers=2, seconds=0.2)
    for name in ("whole", "cut"):
        path = folder / "wav" / "id00000" / "s00" / f"{name}.wav"
        noise = 0.1 * np.random.default_rng(0).standard_normal(4001)
        soundfile.write(path, noise, RATE, format=format, subtype="PCM_16")
    os.truncate(path, path.stat().st_size - 2)
    given = settings(folder, bad_files="drop")
    assert prepare.prepare(given, tmp_path / "save").dropped == 1
    assert stems(tmp_path / "save" / "bad_files.txt") == {"cut"}
    assert "is cut short, 2 of" in (tmp_path / "save" / "bad_files.txt").read_text()
    listed = {u.ID: u.samples for u in read_manifest(tmp_path / "save" / "train.csv")}
    assert listed["id00000/s00/whole"] == 4001


def test_they_are_dropped_where_the_user_says_so(corpus, tmp_path):
    given = settings(corpus, check_audio=True, bad_files="drop")
    prepared = prepare.prepare(given, tmp_path / "save")
    assert prepared.dropped == len(ALL)
    utterances = read_manifest(tmp_path / "save" / "train.csv")
    # Of the two of one name one stays.
    assert [u.ID for u in utterances if u.spk_id == "id9"] == ["id9/s/twice"]
    assert prepared.single == 1
    assert "Speakers with one utterance only: 1" in prepared.in_words()
    assert f"Dropped because they cannot be used: {len(ALL)}" in prepared.in_words()


def test_a_speaker_without_usable_speech_has_no_number(corpus, tmp_path):
    for path in (corpus / "wav" / "id9" / "s").glob("twice.*"):
        path.unlink()
    given = settings(corpus, check_audio=True, bad_files="drop")
    assert prepare.prepare(given, tmp_path / "save").speakers == 4
    assert "id9" not in prepare.speaker_numbers(tmp_path / "save")


def test_speech_of_held_out_speakers_is_looked_at_too(corpus, tmp_path):
    given = settings(corpus, bad_files="drop", valid_speakers=2, check_audio=True)
    prepared = prepare.prepare(given, tmp_path / "save")
    assert prepared.held_out + prepared.utterances == 17
    trials = (tmp_path / "save" / "valid_trials.txt").read_text()
    assert not any(f"/{stem}." in trials for stem in ALL - {"twice"})


def test_what_is_checked_is_heeded_until_there_are_checkpoints(
    corpus, tmp_path, caplog
):
    given = settings(corpus, bad_files="drop")
    assert prepare.prepare(given, tmp_path / "save").dropped == len(HEADERS)
    given = settings(corpus, bad_files="drop", check_audio=True)
    assert prepare.prepare(given, tmp_path / "save").dropped == len(ALL)
    (tmp_path / "save" / "CKPT+1").mkdir()
    given = settings(corpus, bad_files="drop")
    # One that was cut off is none.
    assert prepare.prepare(given, tmp_path / "save").dropped == len(HEADERS)
    (tmp_path / "save" / "CKPT+1" / "CKPT.yaml").touch()
    given = settings(corpus, bad_files="drop", check_audio=True)
    assert prepare.prepare(given, tmp_path / "save").dropped == len(HEADERS)
    assert "goes on with the files that it began with" in caplog.text


def test_a_corpus_without_problems_leaves_no_list(corpus, tmp_path):
    given = settings(corpus, bad_files="drop", check_audio=True)
    prepare.prepare(given, tmp_path / "save")
    (tmp_path / "save" / "prepared.json").unlink()
    for path in (corpus / "wav" / "id9" / "s").iterdir():
        path.unlink()
    assert prepare.prepare(settings(corpus), tmp_path / "save").dropped == 0
    assert not (tmp_path / "save" / "bad_files.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_files_of_random_damage_are_usable_or_told_of(tmp_path, fuzz_seed, suffix):
    """No crash, no hang, and what is usable has the samples that it says."""
    folder = write_corpus(tmp_path / "corpus", speakers=2, seconds=0.2, suffix=suffix)
    source = next(folder.rglob(f"*{suffix}")).read_bytes()
    draws, target = random.Random(fuzz_seed), folder / "wav" / "id9" / "s"
    target.mkdir(parents=True)
    for i in range(500):
        content = bytearray(source)
        for _ in range(draws.randint(1, 8)):
            # Half of the damage is in the header.
            place = draws.randrange(len(content) if draws.random() < 0.5 else 64)
            content[place] = draws.randrange(256)
        cut = draws.randrange(len(content)) if draws.random() < 0.2 else None
        (target / f"{i}{suffix}").write_bytes(content[:cut])
    given = settings(folder, check_audio=True, bad_files="drop")
    prepared = prepare.prepare(given, tmp_path / "save")
    assert prepared.utterances + prepared.dropped == 508
    assert prepared.dropped > 50
    reading = recipe("speech_files").read_audio
    for utterance in read_manifest(tmp_path / "save" / "train.csv"):
        wav = reading(utterance.wav, sample_rate=RATE)
        assert len(wav) == utterance.samples
        assert wav.isfinite().all()
        assert (utterance.spk_id == "id9") == ("/id9/" in utterance.wav)
