"""Long recordings are embedded in windows, of which a few are in memory at a time."""

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.inference import FbankStatistics, SpeakerEmbedder, audio
from speechbrain_rev.inference.audio import resample
from speechbrain_rev.inference.running import cut, resample_blocks, unit_mean
from tests.run_folders import speech_like, write_audio

RATE = 16000


class Heard(torch.nn.Module):
    """Embeds an utterance as its first and last sample, and how long it is."""

    def forward(self, waves, samples):
        length = torch.full((len(waves), 1), float(waves.shape[1]))
        if samples is not None:
            length = samples[:, None].float()
        last = waves.gather(1, length.long() - 1)
        return torch.cat([waves[:, :1], last, length], dim=1).unsqueeze(1)


@pytest.fixture
def embedder():
    return SpeakerEmbedder(Heard(), device="cpu", fingerprint="heard")


@pytest.mark.parametrize("block", [7, 160, 999, 4000])
@pytest.mark.parametrize(
    ("rate", "target"), [(48000, 16000), (8000, 16000), (44100, 16000), (16000, 44100)]
)
def test_resampling_block_by_block_equals_resampling_as_a_whole(rate, target, block):
    wave = torch.from_numpy(speech_like(0.05 if block == 7 else 0.3, rate=rate))
    ratio = Fraction(target, rate).limit_denominator(1000)
    whole = resample(wave, ratio)
    blocks = list(resample_blocks(wave.split(block), ratio))
    found = torch.cat(blocks)
    assert found.shape == whole.shape
    # The same sums of the same numbers: 8 units in the last place of full scale.
    assert (found - whole).abs().max() <= 8 * torch.finfo(torch.float32).eps
    assert block == 4000 or len(blocks) > 1


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("total", [*range(1, 30), 64])
@pytest.mark.parametrize(("window", "hop"), [(8, 4), (8, 8), (8, 3), (5, 1)])
def test_windows_cover_a_recording_and_are_equally_long(total, window, hop, block):
    wave = torch.arange(float(total))
    found = list(cut(wave.split(block), window, hop))
    for start, piece in found:
        assert torch.equal(piece, wave[start : start + len(piece)])
        assert len(piece) == min(window, total)
    starts = [start for start, _ in found]
    assert starts[:-1] == [hop * i for i in range(len(starts) - 1)]
    assert starts[-1] + min(window, total) == total
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("kind", ["file", "array", "resampled file"])
def test_each_window_is_embedded_as_if_it_were_cut_out(kind, tmp_path):
    embedder = SpeakerEmbedder(FbankStatistics(), device="cpu")
    rate = 44100 if kind == "resampled file" else RATE
    wave = speech_like(5.2, rate=rate)
    path = write_audio(tmp_path / "long.wav", wave, rate)
    if kind == "array":
        found = embedder.windows(wave, rate, seconds=2.0, hop=1.5)
    else:
        found = embedder.windows(path, seconds=2.0, hop=1.5)
    assert found.starts.tolist() == pytest.approx([0.0, 1.5, 3.0, 3.2])
    assert found.ends.tolist() == pytest.approx([2.0, 3.5, 5.0, 5.2])
    assert found.silent.shape == (0, 2)
    whole = resample(torch.from_numpy(wave), Fraction(RATE, rate)).numpy()
    for start, row in zip(found.starts, found.embeddings, strict=True):
        first = round(start * RATE)
        alone = embedder.embed(whole[first : first + 2 * RATE], RATE)
        assert np.linalg.norm(row - alone) <= 1e-5 * np.linalg.norm(alone)
    length = np.linalg.norm(found.embeddings, axis=1).mean()
    assert np.allclose(found.mean(), unit_mean(found.embeddings) * length, rtol=1e-6)


def test_a_recording_shorter_than_a_window_is_one_window(embedder):
    found = embedder.windows(speech_like(1.0), RATE)
    assert (found.starts.tolist(), found.ends.tolist()) == ([0.0], [1.0])
    assert found.embeddings[0, 2] == RATE


def test_silent_windows_are_told_of_and_not_embedded(embedder):
    wave = speech_like(6.0)
    wave[2 * RATE : 4 * RATE] = 1e-5
    found = embedder.windows(wave, RATE, seconds=1.0, hop=1.0)
    assert found.starts.tolist() == [0.0, 1.0, 4.0, 5.0]
    assert found.silent.tolist() == [[2.0, 3.0], [3.0, 4.0]]
    assert len(found.embeddings) == 4
    with pytest.raises(ValueError, match="the waveform is silent"):
        embedder.windows(np.zeros(6 * RATE, np.float32), RATE)


def test_what_is_bad_in_a_long_recording_is_told_with_its_time(embedder, tmp_path):
    wave = speech_like(70.0)
    # Beyond the first block.
    wave[66 * RATE] = np.nan
    path = write_audio(tmp_path / "nan.wav", wave)
    for call in (
        lambda: embedder.windows(path),
        lambda: embedder.embed(path, window=10.0),
        lambda: embedder.windows(wave, RATE),
    ):
        with pytest.raises(ValueError, match=r"NaN or infinity, first at 66\.000 s"):
            call()
    with pytest.raises(ValueError, match=r"at least 0\.25 s"):
        embedder.windows(np.ones(100, np.float32), RATE)


@pytest.mark.parametrize(
    ("seconds", "hop", "message"),
    [
        (0.1, 0.1, "window of 0.1 s is no utterance"),
        (601, 1, "0.25 s to 600 s"),
        (3.0, 3.5, "hop is 3.5 s"),
        (3.0, 0.0, "hop is 0.0 s"),
        (float("nan"), 1.0, "not nan"),
        ("3", 1.0, "not '3'"),
        (True, 1.0, "not True"),
    ],
)
def test_windows_that_are_none_are_refused(embedder, seconds, hop, message):
    with pytest.raises(ValueError, match=message):
        embedder.windows(speech_like(), RATE, seconds=seconds, hop=hop)


def test_windows_take_one_recording(embedder):
    with pytest.raises(ValueError, match="one recording, and no list"):
        embedder.windows([speech_like()], RATE)
    with pytest.raises(ValueError, match="2 channels"):
        embedder.windows(np.stack([speech_like()] * 2), RATE)


def test_rows_of_windows_and_of_whole_recordings_are_of_one_scale():
    embedder = SpeakerEmbedder(FbankStatistics(), device="cpu")
    second = speech_like(1.0)
    # Four windows that are the same second: their mean is that second's embedding.
    row = embedder.embed(np.tile(second, 4), RATE, window=1.0)
    alone = embedder.embed(second, RATE)
    assert np.linalg.norm(alone) > 2
    # The same sums; float32 has 2**-24, of a mean of four.
    assert np.linalg.norm(row - alone) <= 1e-6 * np.linalg.norm(alone)


@pytest.mark.parametrize("kind", ["file", "array"])
def test_utterances_longer_than_a_window_are_the_mean_of_their_windows(
    embedder, tmp_path, kind
):
    wave, short = speech_like(5.2), speech_like(1.0, seed=1)
    audio, rate = [wave, short, wave[: 2 * RATE]], RATE
    if kind == "file":
        audio = [write_audio(tmp_path / f"{i}.wav", w) for i, w in enumerate(audio)]
        rate = None
    rows = embedder.embed(audio, rate, window=2.0)
    parts = [wave[start : start + 2 * RATE] for start in (0, 32000, 51200)]
    cut_out = embedder.embed(parts, RATE)
    length = np.linalg.norm(cut_out, axis=1).mean()
    assert np.allclose(rows[0], unit_mean(cut_out) * length, rtol=1e-6)
    assert np.array_equal(rows[1], embedder.embed(short, RATE))
    assert np.array_equal(rows[2], embedder.embed(wave[: 2 * RATE], RATE))
    assert np.array_equal(
        rows[0], embedder.windows(wave, RATE, seconds=2, hop=2).mean()
    )
    with pytest.raises(ValueError, match=r"window of 0\.1 s"):
        embedder.embed(audio, rate, window=0.1)


@pytest.mark.parametrize("kind", ["file", "array"])
def test_averaged_channels_and_silent_windows_of_long_recordings_are_told_of(
    embedder, tmp_path, caplog, kind
):
    two = np.stack([speech_like(4.0)] * 2)
    quiet = speech_like(4.0)
    quiet[RATE : 2 * RATE] = 0
    audio, rate = [two, quiet, speech_like(4.0)], RATE
    if kind == "file":
        audio = [write_audio(tmp_path / f"{i}.wav", w.T) for i, w in enumerate(audio)]
        rate = None
    embedder.embed(audio, rate, window=1.0, channels="mean")
    names = [f"utterance {i} of the list" for i in range(3)]
    if kind == "file":
        names = list(map(str, audio))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"1 of 3 utterances have several channels, which were averaged: {names[0]} (2)",
        "1 of 3 utterances have silent windows, which do not count: "
        f"{names[1]} (1 of 4)",
    ]


def test_only_with_windows_is_audio_of_more_than_ten_minutes_embedded(embedder):
    wave = np.tile(speech_like(1.0), 601)
    with pytest.raises(ValueError, match=r"601\.000 s .*at most 600 s.*window=SECONDS"):
        embedder.embed(wave, RATE)
    found = embedder.embed(wave, RATE, window=600)
    assert np.isfinite(found).all()
    assert embedder.windows(wave, RATE, seconds=10, hop=10).ends[-1] == 601.0


#: Prints by how much memory grew when a file was embedded in windows.
MEASURED = """
import resource, sys
import torch
from speechbrain_rev.inference import SpeakerEmbedder

class Largest(torch.nn.Module):
    def forward(self, waves, samples):
        return waves.amax(dim=1).reshape(-1, 1, 1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

embedder = SpeakerEmbedder(Largest(), device="cpu")
embedder.windows(sys.argv[1])
before = peak()
for _ in range(2):
    found = embedder.windows(sys.argv[2], seconds=10, hop=10)
print(peak() - before, found.ends[-1])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_length_of_a_file(tmp_path):
    rate, minutes = 22050, 20
    paths = [tmp_path / "short.wav", tmp_path / "long.wav"]
    wave = speech_like(60.0, rate=rate)
    for path, count in zip(paths, (2, minutes), strict=True):
        with soundfile.SoundFile(path, "w", rate, 1, "PCM_16") as file:
            for _ in range(count):
                file.write(wave)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, paths)],
        check=True,
        capture_output=True,
        text=True,
    )
    grown, end = map(float, done.stdout.split())
    assert end == 60.0 * minutes
    # In float32 the file is 106 MB, and 77 MB more at 16 kHz.
    whole_bytes = minutes * 60 * rate * 4
    assert grown < whole_bytes / 3


@pytest.mark.parametrize("kind", ["file", "array"])
def test_blocks_of_many_channels_have_fewer_samples(
    embedder, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(audio, "_BLOCK_NUMBERS", 6000)
    wave = np.stack([speech_like(1.0)] * 3)
    given = write_audio(tmp_path / "three.wav", wave.T) if kind == "file" else wave
    one = audio.Recording.of(given, None if kind == "file" else RATE, "it")
    assert {len(block) for block in one.blocks("mean", 3)} == {2000}


def test_a_file_is_read_a_block_at_a_time(embedder, tmp_path, monkeypatch):
    path = write_audio(tmp_path / "long.wav", speech_like(10.0))
    whole = embedder.windows(path)
    lengths, read = [], audio.read_blocks

    def small(path, **_):
        for block in read(path, block_samples=4000):
            lengths.append(block.shape[1])
            yield block

    monkeypatch.setattr(audio, "read_blocks", small)
    groups = embedder._running
    run, seen = groups.run, []
    monkeypatch.setattr(groups, "run", lambda g: seen.append(sum(lengths)) or run(g))
    found = embedder.windows(path)
    assert (sum(lengths), max(lengths)) == (10 * RATE, 4000)
    # A window is embedded when it has been read, and not when all has.
    assert seen[0] == 3 * RATE
    assert np.array_equal(found.embeddings, whole.embeddings)
