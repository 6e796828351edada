"""Batches of similar length, read ahead; long recordings, embedded in windows."""

import subprocess
import sys
import threading
from fractions import Fraction

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio.resampling import resample
from speechbrain_rev.inference import FbankStatistics, SpeakerEmbedder, audio, running
from speechbrain_rev.inference.running import (
    RepeatedShapes,
    cut,
    unit_mean,
)
from tests.run_folders import speech_like, write_audio
from tests.unit.inference.conftest import close

RATE = 16000
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def reading(lengths):
    return lambda i: torch.zeros(lengths[i])


@pytest.mark.parametrize(
    ("device", "lengths", "expected"),
    [
        (CUDA, [7, 10**6, 900_000, 80, 100], [[10**6], [900_000], [100, 80], [7]]),
        (CUDA, [40] * 18, [[40] * 16, [40] * 2]),
        (CUDA, [40_000] * 3 + [200_000], [[200_000], [40_000] * 3]),
        # A few seconds.
        (CPU, [40_000] * 3 + [200_000], [[200_000], [40_000] * 2, [40_000]]),
        (CPU, [16_000] * 12, [[16_000] * n for n in (5, 5, 2)]),
    ],
)
def test_batches_are_alike_in_length_and_bounded(device, lengths, expected):
    groups = list(running.read_batches(range(len(lengths)), reading(lengths), device))
    assert [[len(w) for _, w in group] for group in groups] == expected
    assert sorted(i for group in groups for i, _ in group) == list(range(len(lengths)))
    assert all(len(w) == lengths[i] for group in groups for i, w in group)


def test_the_next_files_are_read_while_the_first_are_embedded_and_no_more(monkeypatch):
    monkeypatch.setattr(running, "_WAITING_SAMPLES", 50)
    before, second = threading.active_count(), threading.Event()
    read, seen, readers = reading([100, 200, 300, 400]), [], []

    def noting(i):
        seen.append(i)
        readers.append(threading.current_thread())
        if i == 1:
            second.set()
        return read(i)

    given = running.read_batches(range(4), noting, CPU)
    assert [i for i, _ in next(given)] == [0]
    # Nobody has asked for more.
    second.wait()
    assert seen == [0, 1]
    assert [i for i, _ in next(given)] == [1]
    given.close()
    assert threading.active_count() == before
    assert threading.main_thread() not in readers


def test_a_file_that_cannot_be_read_is_an_error_after_those_before_it(monkeypatch):
    monkeypatch.setattr(running, "_WAITING_SAMPLES", 50)

    def failing(i):
        if i == 2:
            raise ValueError("2 cannot be read")
        return torch.zeros(100)

    given = running.read_batches(range(4), failing, CPU)
    assert [next(given)[0][0] for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="2 cannot be read"):
        next(given)


class Heard(torch.nn.Module):
    """Embeds an utterance as its first and last sample, and how long it is."""

    def forward(self, waves, samples):
        length = torch.full((len(waves), 1), float(waves.shape[1]))
        if samples is not None:
            length = samples[:, None].float()
        last = waves.gather(1, length.long() - 1)
        return torch.cat([waves[:, :1], last, length], dim=1).unsqueeze(1)


@pytest.fixture
def hearing():
    return SpeakerEmbedder(Heard(), device="cpu", fingerprint="heard")


@pytest.fixture
def encoded(embedder):
    """Shapes that reach the encoder."""
    shapes = []

    def note(encoder, given):
        shapes.append(tuple(given[0].shape[:2]))

    handle = embedder.model.encoder.register_forward_pre_hook(note)
    yield shapes
    handle.remove()


@pytest.fixture(params=[False, True], ids=["any length", "some lengths"])
def lengths_per_octave(request, monkeypatch):
    """A CPU that takes any length, or rounds lengths up as a GPU does."""
    few = {"cpu": 32} if request.param else {}
    monkeypatch.setattr(running, "_LENGTHS_PER_OCTAVE", few)
    return request.param


@pytest.mark.parametrize(
    ("count", "rows"),
    [(9, [4, 4, 4]), (8, [4, 4]), (3, [3]), (1, [1])],
)
def test_an_odd_last_batch_has_a_shape_that_ran_and_the_same_embeddings(
    embedder, encoded, hearing, lengths_per_octave, count, rows, monkeypatch
):
    monkeypatch.setattr(running, "_BATCH", 4)
    frames = 57 if lengths_per_octave else 56
    waves = [speech_like(0.55, seed=i) for i in range(count)]
    embeddings = embedder.embed(waves, RATE)
    assert encoded == [(n, frames) for n in rows]
    assert len(embeddings) == count
    alone = [embedder.embed(wave, RATE) for wave in waves]
    # In a batch convolutions may group their sums otherwise: some units in the last place.
    assert all(
        close(row, one, 1e-6) for row, one in zip(embeddings, alone, strict=True)
    )
    heard = hearing.embed(waves, RATE)
    assert np.array_equal(heard, [hearing.embed(wave, RATE) for wave in waves])


def test_features_of_a_filled_batch_have_the_bits_of_its_rows_alone():
    model = SpeakerEmbedder(FbankStatistics(), device="cpu")._running
    waves = [torch.from_numpy(speech_like(0.5, seed=i)) for i in range(7)]
    shapes = RepeatedShapes(CPU)
    model.run(waves[:4], shapes)
    filled = model.run(waves[4:], shapes)
    assert np.array_equal(filled, model.run(waves[4:]))
    assert len(filled) == 3


def test_the_last_windows_of_a_recording_are_of_a_shape_that_ran(
    embedder, encoded, lengths_per_octave
):
    # 80,000 samples of 24,000 are three windows.
    windows = embedder.windows(speech_like(6.0), RATE, seconds=1.5, hop=1.5)
    assert [rows for rows, _ in encoded] == [3, 3]
    assert len(set(encoded)) == 1
    assert len(windows.embeddings) == len(windows.starts) == 4


def test_lengths_on_a_gpu_repeat_and_cost_a_few_percent(monkeypatch):
    # A hundredth of the lengths of VoxCeleb, and of what a batch has.
    monkeypatch.setitem(running._BATCH_SAMPLES, "cuda", 16_000)
    monkeypatch.setattr(running, "_WAITING_SAMPLES", 200_000)
    seconds = 3.96 + np.random.default_rng(0).lognormal(0.9, 0.95, 3000)
    lengths = (160 * seconds.clip(max=145)).astype(int).tolist()
    shapes, ran, before, without = RepeatedShapes(CUDA), [], 0, set()
    for group in running.read_batches(range(3000), reading(lengths), CUDA):
        waves = [wave for _, wave in group]
        batch, own = shapes.batch(waves)
        ran.append(batch.shape)
        before += len(waves) * len(waves[0])
        without.add((len(waves), len(waves[0])))
        counted = [batch.shape[1]] * len(batch) if own is None else own.tolist()
        assert counted[: len(waves)] == list(map(len, waves))
    assert len(set(ran)) < len(without) / 2
    assert before < sum(shape.numel() for shape in ran) < 1.04 * before


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize(("window", "hop"), [(8, 4), (8, 8), (8, 3), (5, 1)])
def test_windows_cover_a_recording_and_are_equally_long(window, hop, block):
    for total in (*range(1, 30), 64):
        wave = torch.arange(float(total))
        windows = list(cut(wave.split(block), window, hop))
        for start, piece in windows:
            assert torch.equal(piece, wave[start : start + len(piece)])
            assert len(piece) == min(window, total)
        starts = [start for start, _ in windows]
        assert starts[:-1] == [hop * i for i in range(len(starts) - 1)]
        assert starts[-1] + min(window, total) == total
        assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("rate", [RATE, 44100])
@pytest.mark.parametrize("kind", ["file", "array"])
def test_each_window_is_embedded_as_if_it_were_cut_out(embedder, kind, rate, tmp_path):
    wave = speech_like(5.2, rate=rate)
    given, given_rate = wave, rate
    if kind == "file":
        given, given_rate = write_audio(tmp_path / "long.wav", wave, rate), None
    windows = embedder.windows(given, given_rate, seconds=2.0, hop=1.5)
    assert windows.starts.tolist() == pytest.approx([0.0, 1.5, 3.0, 3.2])
    assert windows.ends.tolist() == pytest.approx([2.0, 3.5, 5.0, 5.2])
    assert windows.silent.shape == (0, 2)
    whole = resample(torch.from_numpy(wave), Fraction(RATE, rate)).numpy()
    for start, row in zip(windows.starts, windows.embeddings, strict=True):
        first = round(start * RATE)
        alone = embedder.embed(whole[first : first + 2 * RATE], RATE)
        # In a batch convolutions may group their sums otherwise: some units in the last
        # place, 6e-8. Resampled in blocks, a sample is off by as many.
        assert close(row, alone, 1e-6 if rate == RATE else 1e-5)


def test_silent_windows_are_listed_and_not_embedded(hearing):
    wave = speech_like(6.0)
    wave[2 * RATE : 4 * RATE] = 1e-5
    windows = hearing.windows(wave, RATE, seconds=1.0, hop=1.0)
    assert windows.starts.tolist() == [0.0, 1.0, 4.0, 5.0]
    assert windows.silent.tolist() == [[2.0, 3.0], [3.0, 4.0]]
    assert len(windows.embeddings) == 4
    with pytest.raises(ValueError, match="the waveform is silent"):
        hearing.windows(np.zeros(6 * RATE, np.float32), RATE)


def test_what_is_bad_in_a_long_recording_is_named_with_its_time(
    hearing, tmp_path, monkeypatch
):
    # Beyond the first block.
    monkeypatch.setattr(audio, "_BLOCK_NUMBERS", RATE)
    wave = speech_like(7.0)
    wave[6 * RATE] = np.nan
    path = write_audio(tmp_path / "nan.wav", wave)
    for call in (
        lambda: hearing.windows(path),
        lambda: hearing.embed(path, window=1.0),
        lambda: hearing.windows(wave, RATE),
    ):
        with pytest.raises(ValueError, match=r"NaN or infinity, first at 6\.000 s"):
            call()


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            speech_like(),
            {"seconds": 0.1, "hop": 0.1},
            "window of 0.1 s is no utterance",
        ),
        (speech_like(), {"seconds": 601}, "0.25 s to 600 s"),
        (speech_like(), {"hop": 3.5}, "hop is 3.5 s"),
        (speech_like(), {"seconds": "3"}, "not '3'"),
        (np.ones(100, np.float32), {}, r"at least 0\.25 s"),
        ([speech_like()], {}, "one recording, and no list"),
        (np.stack([speech_like()] * 2), {}, "2 channels"),
    ],
)
def test_windows_of_no_length_or_recording_are_refused(
    hearing, given, options, message
):
    with pytest.raises(ValueError, match=message):
        hearing.windows(given, RATE, **options)


@pytest.fixture(params=["file", "array"])
def given(request, tmp_path):
    """A function of recordings; as files or arrays: they, their rate, and their names."""

    def give(waves):
        if request.param == "array":
            return (
                waves,
                RATE,
                [f"utterance {i} of the list" for i in range(len(waves))],
            )
        paths = [write_audio(tmp_path / f"{i}.wav", w.T) for i, w in enumerate(waves)]
        return paths, None, list(map(str, paths))

    return give


def test_utterances_longer_than_a_window_are_the_mean_of_their_windows(hearing, given):
    wave, short = speech_like(5.2), speech_like(1.0, seed=1)
    audio, rate, _ = given([wave, short, wave[: 2 * RATE]])
    rows = hearing.embed(audio, rate, window=2.0)
    parts = [wave[start : start + 2 * RATE] for start in (0, 32000, 51200)]
    cut_out = hearing.embed(parts, RATE)
    length = np.linalg.norm(cut_out, axis=1).mean()
    assert np.allclose(rows[0], unit_mean(cut_out) * length, rtol=1e-6)
    assert np.array_equal(rows[1], hearing.embed(short, RATE))
    assert np.array_equal(rows[2], hearing.embed(wave[: 2 * RATE], RATE))
    windows = hearing.windows(wave, RATE, seconds=2, hop=2)
    assert np.array_equal(rows[0], windows.mean())
    one = hearing.windows(short, RATE, seconds=2, hop=2)
    assert (one.starts.tolist(), one.ends.tolist()) == ([0.0], [1.0])


def test_averaged_channels_and_silent_windows_of_long_recordings_are_logged(
    hearing, given, caplog
):
    two, quiet = np.stack([speech_like(4.0)] * 2), speech_like(4.0)
    quiet[RATE : 2 * RATE] = 0
    audio, rate, names = given([two, quiet, speech_like(4.0)])
    hearing.embed(audio, rate, window=1.0, channel="mix")
    assert [record.getMessage() for record in caplog.records] == [
        f"1 of 3 utterances have several channels, which were averaged: {names[0]} (2)",
        "1 of 3 utterances have silent windows, which do not count: "
        f"{names[1]} (1 of 4)",
    ]


def test_only_with_windows_is_audio_of_more_than_ten_minutes_embedded(hearing):
    wave = np.tile(speech_like(1.0), 601)
    with pytest.raises(ValueError, match=r"601\.000 s .*at most 600 s.*window=SECONDS"):
        hearing.embed(wave, RATE)
    assert np.isfinite(hearing.embed(wave, RATE, window=600)).all()
    assert hearing.windows(wave, RATE, seconds=10, hop=10).ends[-1] == 601.0


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
    windows = embedder.windows(sys.argv[2], seconds=10, hop=10)
print(peak() - before, windows.ends[-1])
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
    code = [sys.executable, "-c", MEASURED, *map(str, paths)]
    done = subprocess.run(code, check=True, capture_output=True, text=True)
    grown, end = map(float, done.stdout.split())
    assert end == 60.0 * minutes
    # In float32 the file is 106 MB, and 77 MB more at 16 kHz.
    whole_bytes = minutes * 60 * rate * 4
    assert grown < whole_bytes / 3


def test_a_file_is_read_a_block_at_a_time(hearing, tmp_path, monkeypatch):
    path = write_audio(tmp_path / "long.wav", speech_like(10.0))
    whole = hearing.windows(path)
    lengths, blocks = [], audio.read_blocks

    def small(path, **_):
        for block in blocks(path, block_samples=4000):
            lengths.append(block.shape[1])
            yield block

    monkeypatch.setattr(audio, "read_blocks", small)
    groups = hearing._running
    run, seen = groups.run, []
    monkeypatch.setattr(
        groups, "run", lambda *given: seen.append(sum(lengths)) or run(*given)
    )
    read = hearing.windows(path)
    assert (sum(lengths), max(lengths)) == (10 * RATE, 4000)
    # A window is embedded when it has been read, and not when all has.
    assert seen[0] == 3 * RATE
    assert np.array_equal(read.embeddings, whole.embeddings)
