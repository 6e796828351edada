"""Files that cannot be used: all of them in one table, and refused or dropped."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torchaudio.functional import resample

from speechbrain_rev.audio import read_audio
from speechbrain_rev.data import SpeakerAugment, read_manifest
from speechbrain_rev.data.dataset import train_loader
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.manifest import Cause
from speechbrain_rev.data.overview import look_at
from speechbrain_rev.data.packing import pack
from tests.corpus import write_corpus
from tests.unit.data.conftest import left_out

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
    soundfile.write(bad / "empty.wav", noise[:0], RATE)
    soundfile.write(bad / "slow.wav", noise, 8000)
    soundfile.write(bad / "stereo.wav", np.stack([noise, noise], 1), RATE)
    soundfile.write(bad / "silent.wav", 0 * noise, RATE)
    nan = noise.copy()
    nan[100] = np.nan
    soundfile.write(bad / "nan.wav", nan, RATE, subtype="FLOAT")
    soundfile.write(bad / "twice.wav", noise, RATE)
    soundfile.write(bad / "twice.flac", noise, RATE)
    soundfile.write(bad / "lossy.wav", noise, RATE, format="MP3")
    damaged = bytearray((bad / "twice.flac").read_bytes())
    damaged[-3000:-1000] = b"\0" * 2000
    (bad / "damaged.flac").write_bytes(damaged)
    return folder


HEADERS = {"other", "truncated", "nothing", "text", "empty", "slow", "stereo", "twice"}
HEADERS |= {"lossy"}
ALL = HEADERS | {"silent", "nan", "damaged"}


def stems(save):
    return {Path(path).name.split(".")[0] for path in left_out(save)}


@pytest.mark.parametrize(("whole", "bad"), [(False, HEADERS), (True, ALL)])
def test_all_problems_are_reported_at_once(
    prepared, bad_corpus, tmp_path, capsys, whole, bad
):
    with pytest.raises(ValueError, match="bad_files: drop") as error:
        prepared(bad_corpus, check_audio=whole)
    prepared(bad_corpus, "dropped", check_audio=whole, bad_files="drop")
    for words in (capsys.readouterr().out, str(error.value)):
        assert f"{len(bad)} of 29 files cannot be used" in words
        assert "slow.wav has 8000 samples per second" in words
        assert "lossy.wav is OGG or MP3 by its content" in words
        assert ("silent" in words) == whole
    assert stems(tmp_path / "save") == bad
    assert not (tmp_path / "save/train.csv").exists()


def test_they_are_dropped_where_the_user_asks_for_it(prepared, bad_corpus, tmp_path):
    given = {"check_audio": True, "bad_files": "drop"}
    summary = prepared(bad_corpus, **given)
    utterances = read_manifest(tmp_path / "save/train.csv")
    # Of the two of one name one stays.
    assert [u.ID for u in utterances if u.spk_id == "id9"] == ["id9/s/twice"]
    assert sum(summary.left_out.values()) == len(ALL)
    assert (summary.single, summary.speakers) == (1, 5)
    assert "Speakers with one utterance only: 1" in summary.in_words()
    assert "1 NaN or infinity" in summary.in_words()
    held_out = prepared(bad_corpus, "other", **given, valid_speakers=2)
    assert held_out.held_out + held_out.utterances == 17
    trials = (tmp_path / "other/valid_trials.txt").read_text()
    assert not any(f"/{stem}." in trials for stem in ALL - {"twice"})
    for path in (bad_corpus / "wav/id9/s").glob("twice.*"):
        path.unlink()
    assert prepared(bad_corpus, "third", **given).speakers == 4
    assert "id9" not in read_labels(tmp_path / "third/label_encoder.txt")


@pytest.mark.skipif(os.name != "posix", reason="names are Unicode elsewhere")
def test_names_that_are_not_utf_8_are_printed_in_signs_of_ascii(
    prepared, corpus, tmp_path, capsys
):
    data = shutil.copytree(corpus, tmp_path / "data")
    folder = os.fsencode(data) + b"/wav/id00000/a\xe9"
    os.mkdir(folder)
    with open(folder + b"/call.amr", "wb"):
        pass
    # What capsys takes must be UTF-8, as in most terminals.
    assert prepared(data, bad_files="drop").left_out == {Cause.SUFFIX.words: 1}
    assert capsys.readouterr().out.count(r"a\udce9/call.amr") == 3
    assert look_at(DataSettings(str(data))).text().encode()


def test_a_corpus_without_problems_leaves_nothing_out(prepared, bad_corpus, tmp_path):
    prepared(bad_corpus, bad_files="drop")
    for path in (bad_corpus / "wav/id9/s").iterdir():
        path.unlink()
    assert prepared(bad_corpus).left_out == left_out(tmp_path / "save") == {}


def in_another_form(corpus, folder, form):
    """The corpus, each file written by a function of its path and its samples."""
    for path in sorted(corpus.rglob("*.wav")):
        made = folder / path.relative_to(corpus)
        made.parent.mkdir(parents=True, exist_ok=True)
        form(made, soundfile.read(path)[0])
    return folder


def rows(save):
    return [
        (one.ID, one.spk_id, one.samples) for one in read_manifest(save / "train.csv")
    ]


@pytest.mark.parametrize(
    ("suffix", "subtype"),
    [
        *[(".wav", depth) for depth in ("PCM_24", "PCM_32", "FLOAT", "DOUBLE")],
        *[(".flac", depth) for depth in ("PCM_16", "PCM_24")],
        *[(suffix, "PCM_16") for suffix in (".aiff", ".au", ".caf", ".w64", ".rf64")],
        (".sph", "PCM_16"),
        (".ogg", "VORBIS"),
        (".opus", "OPUS"),
        (".mp3", "MPEG_LAYER_III"),
    ],
)
def test_a_corpus_has_the_same_speakers_and_samples_in_each_format(
    prepared, corpus, tmp_path, suffix, subtype
):
    forms = {".sph": "NIST", ".opus": "OGG", ".rf64": "RF64"}

    def form(path, wav):
        path = path.with_suffix(suffix)
        kind = forms.get(suffix, suffix[1:].upper())
        soundfile.write(path, wav, RATE, format=kind, subtype=subtype)

    data = in_another_form(corpus, tmp_path / "data", form)
    if suffix in (".ogg", ".opus", ".mp3"):
        # Of lossy audio it is its own decoded WAV that has the same samples.
        wanted = tmp_path / "decoded"
        for path in data.rglob(f"*{suffix}"):
            made = (wanted / path.relative_to(data)).with_suffix(".wav")
            made.parent.mkdir(parents=True, exist_ok=True)
            with soundfile.SoundFile(path) as audio:
                soundfile.write(
                    made, audio.read(dtype="float32"), RATE, subtype="FLOAT"
                )
    else:
        wanted = corpus
    assert prepared(data, "one").utterances == 24
    prepared(wanted, "other")
    assert rows(tmp_path / "one") == rows(tmp_path / "other")
    pairs = zip(
        *(read_manifest(tmp_path / name / "train.csv") for name in ("one", "other")),
        strict=True,
    )
    for one, other in pairs:
        given = {"sample_rate": RATE, "start": 500, "samples": 700}
        assert torch.equal(read_audio(one.wav, **given), read_audio(other.wav, **given))


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_resampled_and_mixed_is_counted(prepared, corpus, tmp_path, whole):
    def form(path, wav):
        if "id00000" in path.parts:
            wide = resample(torch.tensor(wav).float(), RATE, 44100).numpy()
            stereo = np.stack([wide, 0 * wide], 1)
            soundfile.write(path, stereo, 44100, subtype="FLOAT")
        elif "id00001" in path.parts:
            soundfile.write(path, np.stack([0 * wav, wav], 1), RATE)
        else:
            soundfile.write(path, wav, RATE)

    data = in_another_form(corpus, tmp_path / "data", form)
    given = {"check_audio": whole}
    with pytest.raises(
        ValueError,
        match=r"4 several channels .*4 other rate, several channels .*44100 samples per second and 2 "
        r"channels, not 16000 and 1; .*--resample=true, and --channel=NUMBER",
    ):
        prepared(data, **given)
    with pytest.raises(
        ValueError, match=r"8 several channels .*--channel=NUMBER or .*mix"
    ):
        prepared(data, **given, resample=True)
    with pytest.raises(ValueError, match=r"16 no such channel .*--channel=mix"):
        prepared(data, **given, resample=True, channel=1)
    summary = prepared(data, **given, resample=True, channel="mix")
    words = "shorter than a segment, repeated"
    assert summary.treated == {"resampled": 4, "channels mixed": 8, words: 24}
    assert (
        "Of those used: 8 channels mixed, 4 resampled, 24 short" in summary.in_words()
    )
    prepared(corpus, "plain")
    # 44100 Hz have a sample more or less where a length is no whole number of them.
    for one, other in zip(
        *(rows(tmp_path / n) for n in ("save", "plain")), strict=True
    ):
        assert one[:2] == other[:2]
        assert abs(one[2] - other[2]) <= (one[1] == "id00000")
    # With the same settings again nothing is done, with others it is another run.
    assert prepared(data, **given, resample=True, channel="mix") == summary
    packed = tmp_path / "data.packed"
    assert pack(data, packed, sample_rate=RATE, resample=True, channel="mix") == 24
    for one in read_manifest(tmp_path / "save/train.csv"):
        wav = read_audio(one.wav, sample_rate=RATE, resample=True, channel="mix")
        assert len(wav) == one.samples
        again = read_audio(packed / Path(one.wav).relative_to(data), sample_rate=RATE)
        assert (wav - again).abs().max() <= 2**-15


def test_training_reads_the_ranges_of_what_was_listed(prepared, corpus, tmp_path):
    def form(path, wav):
        stereo = np.stack([wav, -wav], 1)
        soundfile.write(path, stereo, 48000, subtype="FLOAT")

    data = in_another_form(corpus, tmp_path / "data", form)
    given = {"resample": True, "channel": 1}
    prepared(data, **given)
    hparams = {
        "save_folder": tmp_path / "save", "sentence_len": 0.02, "sample_rate": RATE,
        "seed": 1, "batch_size": 24, "steps_per_epoch": None, "num_workers": 0,
        "short": "repeat", **given,
    }  # fmt: skip
    (batch,) = train_loader(hparams)
    assert not batch.unread
    wholes = [
        resample(
            -torch.from_numpy(soundfile.read(path, dtype="float32")[0][:, 0]),
            48000,
            RATE,
        )
        for path in data.rglob("*.wav")
    ]
    for wav in batch.wavs:
        off = min(
            float((whole.unfold(0, len(wav), 1) - wav).abs().amax(1).min())
            for whole in wholes
        )
        assert off <= 1e-6


def test_noise_of_another_rate_and_of_several_channels_is_read(tmp_path):
    noise = 0.1 * np.random.default_rng(0).standard_normal((48000, 2))
    soundfile.write(tmp_path / "a.flac", noise, 48000)
    given = {"out_n_neurons": 3, "chunk_samples": 4000, "augment_prob": 1.0}
    given |= {"noise_folder": tmp_path, "max_unread": 0}
    wavs, lens = torch.randn(4, 4400), torch.ones(4)
    with pytest.raises(ValueError, match="Give resample=True"):
        SpeakerAugment(**given)(wavs, lens)
    with pytest.raises(ValueError, match='Give channel="mix"'):
        SpeakerAugment(**given, resample=True)(wavs, lens)
    augment = SpeakerAugment(**given, resample=True, channel="mix")
    assert augment(wavs, lens)[0].isfinite().all()
    assert not augment.unread


def test_a_cut_mp3_is_named_when_it_is_listed(prepared, corpus, tmp_path, caplog):
    def form(path, wav):
        path = path.with_suffix(".mp3")
        soundfile.write(path, np.tile(wav, 40), RATE)
        os.truncate(path, path.stat().st_size * 2 // 3)

    data = in_another_form(corpus, tmp_path / "data", form)
    prepared(data)
    cut = {line for line in caplog.messages if "seems to be cut short" in line}
    assert len({line.split(" seems")[0] for line in cut}) == 24
    assert all(re.search(r"[Cc]opy (or convert )?it again", line) for line in cut)
