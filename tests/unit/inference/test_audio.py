"""Recordings in files or in memory: one channel, one rate, or an error that names them."""

import io
import logging

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.inference import SpeakerEmbedder
from tests.run_folders import speech_like, write_audio


def close(a, b):
    # Sums of other grouping; one part in 100,000 of the embedding's length.
    return np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("rate", [8000, 44101, 48000])
def test_audio_of_any_sample_rate_reaches_the_encoder_at_its_own(rate):
    class Listener(torch.nn.Module):
        def forward(self, waves, samples):
            self.heard = waves
            return waves.mean(dim=1).reshape(-1, 1, 1)

    listener = Listener()
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    SpeakerEmbedder(listener, device="cpu").embed(tone, rate)
    # 44,101 Hz is taken for the nearest ratio of small numbers.
    assert abs(listener.heard.shape[1] - 16000) <= 1
    assert float(listener.heard.abs().max()) == pytest.approx(1.0, abs=0.05)
    assert np.argmax(np.abs(np.fft.rfft(listener.heard[0].numpy()))) == 440


@pytest.fixture
def sides():
    return np.stack([speech_like(seed=1), speech_like(seed=2)])


@pytest.mark.parametrize("kind", ["file", "array", "tensor"])
def test_several_channels_are_refused_until_one_or_the_mean_is_chosen(
    embedder, sides, tmp_path, kind, caplog
):
    rate = None if kind == "file" else 16000
    given = {"array": sides, "tensor": torch.from_numpy(sides)}.get(kind)
    if given is None:
        given = write_audio(tmp_path / "s.wav", sides.T)
    with pytest.raises(
        ValueError, match=r'2 channels.*channels="mean".*=0.*list\(batch\)'
    ):
        embedder.embed(given, rate)
    for number, side in enumerate(sides):
        for of_type in (int, np.int64, np.uint8, torch.tensor):
            chosen = embedder.embed(given, rate, channels=of_type(number))
            assert close(chosen, embedder.embed(side, 16000))
    assert "give channel 1" in caplog.text
    with caplog.at_level(logging.WARNING):
        mean = embedder.embed([given, sides[0]], 16000, channels="mean")
    assert close(mean[0], embedder.embed(sides.mean(axis=0), 16000))
    assert close(mean[1], embedder.embed(sides[0], 16000))
    assert "1 of 2 utterances have several channels, which were averaged" in caplog.text
    with pytest.raises(ValueError, match="has no channel 2: it has 2"):
        embedder.embed(given, rate, channels=np.int64(2))


@pytest.mark.parametrize("channels", ["first", -1, True, np.ones(2, int)])
def test_a_choice_of_channels_that_is_none_is_refused(embedder, channels):
    with pytest.raises(ValueError, match=r"channels takes .*but is ") as error:
        embedder.embed(speech_like(), 16000, channels=channels)
    assert f"but is {channels!r}." in str(error.value)


def test_arrays_without_a_sample_rate_are_of_the_model_s_with_a_warning(
    embedder, tmp_path
):
    path, wave = write_audio(tmp_path / "a.wav", speech_like()), speech_like(seed=1)
    words = f"is taken as of {embedder.sample_rate} Hz, the model's"
    with pytest.warns(UserWarning, match=rf"the waveform {words}") as caught:
        found = embedder.embed(wave)
    assert caught[0].filename == __file__
    assert close(found, embedder.embed(wave, embedder.sample_rate))
    with pytest.warns(UserWarning, match=rf"utterance 1 of the list {words}") as caught:
        embedder.embed([path, wave, wave])
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=rf"b {words}"):
        embedder.verify(path, wave)


def test_a_sample_rate_of_files_alone_is_refused(embedder, tmp_path):
    path, wave = write_audio(tmp_path / "a.wav", speech_like()), speech_like(seed=1)
    for given in (path, [path, path]):
        with pytest.raises(
            ValueError, match="sample_rate is 8000, but files say their"
        ):
            embedder.embed(given, 8000)
    rows = embedder.embed([path, wave], 16000)
    assert close(rows[0], embedder.embed(path))
    assert close(rows[1], embedder.embed(wave, 16000))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "7 is no audio"),
        ([], "at least one"),
        ([7], "utterance 0 of the list is of type int"),
        (np.zeros((0, 16000)), r"shape \[0, 16000\]"),
        ([speech_like(), [1.0]], "utterance 1 of the list is of type list"),
        (np.ones(4, dtype="datetime64[s]"), "array of datetime64"),
        (np.array(1.0), r"the waveform has the shape \[\]"),
        ([np.ones(9, ">f4")], "utterance 0 of the list is an array of >f4, the byte"),
        (np.ma.ones(16000), "the waveform is a masked array"),
    ],
)
def test_what_is_no_audio_is_refused_by_its_place(embedder, given, message):
    with pytest.raises(ValueError, match=message):
        embedder.embed(given, 16000)


def test_bad_audio_is_named_by_its_place_or_path(embedder, tmp_path):
    silent, good = np.zeros(16000, np.float32), speech_like()
    path = write_audio(tmp_path / "bad.wav", silent)
    for call, name in (
        (lambda: embedder.embed([good, silent], 16000), "utterance 1 of the list"),
        (lambda: embedder.embed(silent, 16000), "the waveform"),
        (lambda: embedder.verify(good, silent, 16000), "b"),
        (lambda: embedder.embed(path), "bad.wav"),
        (lambda: embedder.windows(path), "bad.wav"),
        (lambda: embedder.enrol([path]), "bad.wav"),
    ):
        with pytest.raises(ValueError, match=f"{name} is silent"):
            call()


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (np.full(16000, 0.5, np.float32), 16000, "is silent"),
        (np.tile([3e-5, -3e-5], 8000), 16000, "is silent"),
        (np.array([0.1] * 8000 + [np.inf] * 8000), 16000, r"infinity.* 0\.500 s"),
        (np.full(16000, np.nan), 16000, r"holds NaN or infinity, first at 0\.000 s"),
        (np.ones(1000, np.float32), 16000, "has 1000 samples, 0.062 s"),
        (np.ones((16000, 2), np.float32), 16000, "16000 channels"),
        (np.ones((1, 1, 16000), np.float32), 16000, r"\[channels, samples\]"),
        (np.ones(16000, np.int16), 16000, "divided by 32768"),
        (np.ones(16000, np.float32), 16, "sample rate of 16 Hz"),
        (speech_like() * np.float32(1e30), 16000, r"e\+29, but full scale is 1"),
        (speech_like(), 16000.5, "rate of 16000.5; give"),
        (speech_like(), "16000", "rate of '16000'; give"),
        (speech_like(), True, "rate of True; give"),
        (speech_like(), float("inf"), "rate of inf; give"),
    ],
)
def test_waveforms_without_speech_are_refused(embedder, samples, rate, message):
    with pytest.raises(ValueError, match=message):
        embedder.embed(samples, rate)


def test_numbers_of_any_size_and_type_within_bounds_are_taken(embedder):
    wave = speech_like() / np.abs(speech_like()).max()
    expected = embedder.embed(wave, 16000)
    # One channel is taken as it is, whatever is chosen.
    for channels in (None, "mean", 0):
        found = embedder.embed(wave[None], 16000, channels=channels)
        assert np.array_equal(found, expected)
    for loudness in (0.25, 2.0**31):
        found = embedder.embed(wave * np.float32(loudness), 16000)
        assert close(found, expected)
    slow = embedder.embed(wave, 8000)
    for rate in (8000.0, np.float32(8000), np.int64(8000)):
        assert np.array_equal(embedder.embed(wave, rate), slow)


def test_a_file_that_cannot_be_read_is_named(embedder, tmp_path):
    text = tmp_path / "notes.wav"
    text.write_text("no audio")
    for path in (text, tmp_path / "missing.wav"):
        with pytest.raises(ValueError, match=path.name):
            embedder.embed([path])
    opposite = np.stack([speech_like(), -speech_like()], axis=1)
    cancelled = write_audio(tmp_path / "cancelled.wav", opposite)
    with pytest.raises(ValueError, match="after averaging its channels"):
        embedder.embed([cancelled], channels="mean")


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_a_generator_may_fill_one_buffer_again_and_again(embedder, kind):
    waves = [speech_like(seed=seed) for seed in range(3)]
    buffer = np.empty_like(waves[0])

    def filled():
        for wave in waves:
            buffer[:] = wave
            yield kind(buffer)

    rows = embedder.embed(filled(), 16000)
    for row, wave in zip(rows, waves, strict=True):
        assert close(row, embedder.embed(wave, 16000))


def test_paths_come_in_any_iterable(embedder, tmp_path):
    paths = [write_audio(tmp_path / f"{i}.wav", speech_like(seed=i)) for i in (1, 2)]
    expected = embedder.embed(paths)
    for some in (iter(paths), np.array([str(path) for path in paths])):
        assert np.array_equal(embedder.embed(some), expected)


@pytest.mark.parametrize("opened", [io.BytesIO, bytes, bytearray])
def test_open_files_are_refused_with_a_remedy_that_works(embedder, tmp_path, opened):
    path = write_audio(tmp_path / "a.wav", speech_like())
    content = path.read_bytes()
    for given in (opened(content), [opened(content)]):
        with pytest.raises(
            ValueError, match=r"samples, rate = soundfile\.read\(file, alw"
        ):
            embedder.embed(given)
    with pytest.raises(ValueError, match=r"^a is of type .*soundfile\.read"):
        embedder.verify(opened(content), path)
    samples, rate = soundfile.read(io.BytesIO(content), always_2d=True)
    found = embedder.embed(samples.T, sample_rate=rate)
    np.testing.assert_allclose(found, embedder.embed(path), rtol=1e-5)
