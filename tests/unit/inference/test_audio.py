"""Recordings in files or in memory: one channel, one rate, or an error that names them."""

import io
import logging

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.extraction import list_audio
from tests.run_folders import speech_like, write_audio
from tests.unit.inference.conftest import close

RATE = 16000
ONES = np.ones(RATE, np.float32)


@pytest.mark.parametrize("rate", [8000, 44101])
def test_audio_of_any_sample_rate_reaches_the_encoder_at_its_own(rate):
    class Listener(torch.nn.Module):
        def forward(self, waves, samples):
            self.heard = waves
            return waves.mean(dim=1).reshape(-1, 1, 1)

    listener = Listener()
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    SpeakerEmbedder(listener, device="cpu").embed(tone, rate)
    # 44,101 Hz is taken for the nearest ratio of small numbers.
    assert abs(listener.heard.shape[1] - RATE) <= 1
    assert float(listener.heard.abs().max()) == pytest.approx(1.0, abs=0.05)
    assert np.argmax(np.abs(np.fft.rfft(listener.heard[0].numpy()))) == 440


@pytest.mark.parametrize("kind", ["file", "array", "tensor"])
def test_several_channels_are_refused_until_one_or_the_mean_is_chosen(
    embedder, tmp_path, kind, caplog
):
    sides = np.stack([speech_like(0.5, seed=1), speech_like(0.5, seed=2)])
    given, rate = {"array": sides, "tensor": torch.from_numpy(sides)}.get(kind), RATE
    if kind == "file":
        given, rate = write_audio(tmp_path / "s.wav", sides.T), None
    words = r'2 channels, not 1.*channel="mix".*=0 .*first\.$'
    if kind != "file":
        words = rf"no list\(batch\), has {words}"
    with pytest.raises(ValueError, match=words):
        embedder.embed(given, rate)
    for number, of_type in ((0, int), (1, np.int64), (1, torch.tensor)):
        chosen = embedder.embed(given, rate, channel=of_type(number))
        assert close(chosen, embedder.embed(sides[number], RATE))
    assert "give channel 1" in caplog.text
    with caplog.at_level(logging.WARNING):
        mean = embedder.embed([given, sides[0]], RATE, channel="mix")
    assert close(mean[0], embedder.embed(sides.mean(axis=0), RATE))
    assert close(mean[1], embedder.embed(sides[0], RATE))
    assert "1 of 2 utterances have several channels, which were averaged" in caplog.text
    with pytest.raises(ValueError, match="has no channel 2: it has 2"):
        embedder.embed(given, rate, channel=np.int64(2))


@pytest.mark.parametrize("channel", ["first", -1, True, np.ones(2, int)])
def test_a_choice_of_channels_that_is_none_is_refused(embedder, channel):
    with pytest.raises(ValueError, match=r"channel takes .*but is ") as error:
        embedder.embed(speech_like(), RATE, channel=channel)
    assert f"but is {channel!r}." in str(error.value)


def test_arrays_alone_have_a_sample_rate_which_is_assumed_with_a_warning(
    embedder, tmp_path
):
    path, wave = write_audio(tmp_path / "a.wav", speech_like()), speech_like(seed=1)
    words = f"is taken as of {embedder.sample_rate} Hz, the model's"
    with pytest.warns(UserWarning, match=rf"the waveform {words}") as caught:
        assumed = embedder.embed(wave)
    assert caught[0].filename == __file__
    assert close(assumed, embedder.embed(wave, embedder.sample_rate))
    with pytest.warns(UserWarning, match=rf"utterance 1 of the list {words}") as caught:
        embedder.embed([path, wave, wave])
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=rf"b {words}"):
        embedder.verify(path, wave)
    for given in (path, [path, path]):
        with pytest.raises(
            ValueError, match="sample_rate is 8000, but files say their"
        ):
            embedder.embed(given, 8000)
    rows = embedder.embed([path, wave], RATE)
    assert close(rows[0], embedder.embed(path))
    assert close(rows[1], embedder.embed(wave, RATE))


BAD = np.array([0.1] * 8000 + [np.inf] * 8000)


@pytest.mark.parametrize(
    ("given", "rate", "message"),
    [
        (7, RATE, "7 is no audio"),
        ([], RATE, "at least one"),
        ([speech_like(), [1.0]], RATE, "utterance 1 of the list is of type list"),
        (np.zeros((0, 16000)), RATE, r"shape \[0, 16000\]"),
        (np.array(1.0), RATE, r"the waveform has the shape \[\]"),
        (np.ones((1, 1, 16000)), RATE, r"\[channels, samples\]"),
        (np.ones(4, dtype="datetime64[s]"), RATE, "array of <M8"),
        ([np.ones(9, ">f4")], RATE, "utterance 0 of the list is an array of >f4; give"),
        (np.ones(16000, np.int16), RATE, "divided by 32768"),
        (ONES / 2, RATE, "is silent"),
        (np.tile([3e-5, -3e-5], 8000), RATE, "is silent"),
        (BAD, RATE, r"holds NaN or infinity, first at 0\.500 s"),
        (ONES[:1000], RATE, "has 1000 samples, 0.062 s"),
        (np.ones((16000, 2)), RATE, "16000 channels"),
        (speech_like() * np.float32(1e30), RATE, r"e\+29, but full scale is 1"),
        (ONES, 16, "sample rate of 16; give"),
        (ONES, 16000.5, "rate of 16000.5; give"),
        (ONES, "16000", "rate of '16000'; give"),
        (ONES, True, "rate of True; give"),
        (ONES, float("inf"), "rate of inf; give"),
    ],
)
def test_what_is_no_audio_is_refused_by_its_place(embedder, given, rate, message):
    with pytest.raises(ValueError, match=message):
        embedder.embed(given, rate)


def test_bad_audio_is_named_by_its_place_or_path(embedder, tmp_path):
    silent, good = np.zeros(RATE, np.float32), speech_like()
    path = write_audio(tmp_path / "bad.wav", silent)
    for call, name in (
        (lambda: embedder.embed([good, silent], RATE), "utterance 1 of the list"),
        (lambda: embedder.verify(good, silent, RATE), "b"),
        (lambda: embedder.embed(path), "bad.wav"),
        (lambda: embedder.windows(path), "bad.wav"),
        (lambda: embedder.enrol([path]), "bad.wav"),
    ):
        with pytest.raises(ValueError, match=f"{name} is silent"):
            call()
    path.write_text("no audio")
    for unread in (path, tmp_path / "missing.wav"):
        with pytest.raises(ValueError, match=unread.name):
            embedder.embed([unread])
    opposite = write_audio(path, np.stack([good, -good], axis=1))
    with pytest.raises(ValueError, match="after averaging its channels"):
        embedder.embed([opposite], channel="mix")


def test_numbers_of_any_size_and_type_within_bounds_are_taken(embedder):
    wave = speech_like() / np.abs(speech_like()).max()
    expected = embedder.embed(wave, RATE)
    # One channel is taken as it is, whatever is chosen.
    for channel in (None, "mix", 0):
        row = embedder.embed(wave[None], RATE, channel=channel)
        assert np.array_equal(row, expected)
    for loudness in (0.25, 2.0**31):
        assert close(embedder.embed(wave * np.float32(loudness), RATE), expected)
    slow = embedder.embed(wave, 8000)
    for rate in (8000.0, np.float32(8000), np.int64(8000)):
        assert np.array_equal(embedder.embed(wave, rate), slow)


def test_utterances_come_in_any_iterable(embedder, tmp_path):
    waves = [speech_like(seed=seed) for seed in (1, 2)]
    paths = [write_audio(tmp_path / f"{i}.wav", wave) for i, wave in enumerate(waves)]
    expected = embedder.embed(paths)
    for some in (iter(paths), np.array([str(path) for path in paths])):
        assert np.array_equal(embedder.embed(some), expected)

    # A generator may fill one buffer again and again.
    def filled(kind):
        buffer = np.empty_like(waves[0])
        for wave in waves:
            buffer[:] = wave
            yield kind(buffer)

    for kind in (np.asarray, torch.from_numpy):
        for row, alone in zip(
            embedder.embed(filled(kind), RATE), expected, strict=True
        ):
            assert close(row, alone)


@pytest.mark.parametrize("kind", [set, frozenset, dict])
def test_what_has_no_order_is_refused_at_every_door(embedder, tmp_path, kind):
    given = kind({str(write_audio(tmp_path / "a.wav", ONES)): 1})
    doors = [embedder.embed, embedder.embed_each, embedder.windows, embedder.enrol]
    for door in [*doors, list_audio, lambda some: embedder.verify(some, ONES, RATE)]:
        with pytest.raises(ValueError, match=f"a {kind.__name__} has no order"):
            door(given)


def test_what_datasets_decode_has_its_own_rate(embedder):
    wave = speech_like(0.5, rate=8000)
    decoded = {"array": wave, "sampling_rate": 8000, "path": "a.wav"}
    expected = embedder.embed(wave, 8000)
    assert close(embedder.embed(decoded), expected)
    assert close(embedder.embed([decoded, decoded])[1], expected)
    assert embedder.verify(decoded, decoded).score == pytest.approx(1.0)


@pytest.mark.parametrize("opened", [io.BytesIO, bytes])
def test_open_files_are_refused_with_a_remedy_that_works(embedder, tmp_path, opened):
    path = write_audio(tmp_path / "a.wav", speech_like())
    content = path.read_bytes()
    words = r"samples, rate = soundfile\.read\(file, alw"
    for given in (opened(content), [opened(content)]):
        with pytest.raises(ValueError, match=words):
            embedder.embed(given)
    with pytest.raises(ValueError, match=r"^a is of type .*soundfile\.read"):
        embedder.verify(opened(content), path)
    samples, rate = soundfile.read(io.BytesIO(content), always_2d=True)
    row = embedder.embed(samples.T, sample_rate=rate)
    np.testing.assert_allclose(row, embedder.embed(path), rtol=1e-5)
