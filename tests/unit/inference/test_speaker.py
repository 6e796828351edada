import functools
import io
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization

from speechbrain_rev.data import audio_info, read_audio, read_blocks, read_manifest
from speechbrain_rev.inference import (
    EmbeddingArchive,
    EnrolledSpeaker,
    FbankStatistics,
    SpeakerEmbedder,
    WaveformEncoder,
    read_cohort,
    running,
)
from speechbrain_rev.inference.front_ends import SpeechBrainFbank
from speechbrain_rev.inference.wespeaker import convert_from_wespeaker
from speechbrain_rev.lobes import build_encoder, inference_form
from speechbrain_rev.lobes.pretrained import load_strictly
from speechbrain_rev.planner import Plan
from speechbrain_rev.scoring import cosine_trials, eer, read_scores, read_trials
from tests.run_folders import TINY, speech_like, tiny_encoder, write_audio, write_run

# Sums of other grouping; one part in 100,000 of the embedding's length.
TOLERANCE = 1e-5


def close(a, b, tolerance=TOLERANCE):
    return np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, write_run(folder)


@pytest.fixture(scope="module")
def embedder(run):
    return SpeakerEmbedder.from_run(run[0], device="cpu")


def test_an_embedding_is_the_encoder_s_on_training_s_features(run, embedder):
    wave = torch.from_numpy(speech_like())
    features = Fbank(n_mels=80, sample_rate=16000)(wave.unsqueeze(0))
    normalised = InputNormalization(norm_type="sentence", std_norm=False)(
        features, torch.ones(1)
    )
    with torch.no_grad():
        expected = run[1].eval()(normalised)[0, 0].numpy()
    assert close(embedder.embed(wave, 16000), expected)


def test_loudness_does_not_change_an_embedding(embedder):
    wave = speech_like()
    assert close(embedder.embed(wave / 4, 16000), embedder.embed(wave, 16000))


def test_a_list_gives_a_row_for_each_utterance(embedder):
    waves = np.stack([speech_like(seed=s) for s in range(3)])
    batch = embedder.embed(list(waves), 16000)
    assert batch.shape == (3, TINY["embedding_dim"])
    assert batch.dtype == np.float32
    for wave, row in zip(waves, batch, strict=True):
        assert close(row, embedder.embed(wave, 16000))


#: 160 samples are a hop: also one sample more or less than whole hops; mixed strongly.
LENGTHS = [16000, 15999, 12800, 15841, 15840, 48000, 16000, 20001, 19999, 4000]
FAMILIES = ["resnet34", "revnet57", "df_resnet56", "df_revnet89"]


@pytest.mark.parametrize("form", ["as trained", "for inference"])
@pytest.mark.parametrize("front_end", ["speechbrain", "kaldi"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_a_batch_of_unequal_lengths_equals_single_calls(
    arch, front_end, form, tmp_path, monkeypatch
):
    # Large batches, of which one holds the longest and the shortest.
    monkeypatch.setattr(running, "_BATCH_SAMPLES", {"cpu": 10**9})
    monkeypatch.setattr(running, "_ALIKE", 0.0)
    torch.manual_seed(0)
    shape = {"widths": (8, 16, 16, 16), "blocks": (1, 1, 1, 1), "embedding_dim": 16}
    encoder = build_encoder(arch, **shape)
    if form == "for inference":
        # What users of CPUs get.
        encoder = inference_form(encoder.eval())
    model = WaveformEncoder(encoder, front_end=front_end)
    embedder = SpeakerEmbedder(model, device="cpu")
    # Of 8001 samples are 51 of 101 frames, a part that float32 rounds up.
    lengths = [4000, 16000, 15999, 8001]
    waves = [speech_like(seed=i)[:n] for i, n in enumerate(lengths)]
    paths = [write_audio(tmp_path / f"{i}.wav", w) for i, w in enumerate(waves)]
    sizes = count_batches(embedder, monkeypatch)
    # Arrays and files in turns.
    rows = embedder.embed([waves[0], paths[1], waves[2], paths[3]], 16000)
    assert sizes == [len(lengths)]
    for row, wave in zip(rows, waves, strict=True):
        assert close(row, embedder.embed(wave, 16000))


def count_batches(embedder, monkeypatch):
    sizes, together = [], embedder.model.forward

    def counting(waves, samples):
        sizes.append(len(waves))
        return together(waves, samples)

    monkeypatch.setattr(embedder.model, "forward", counting)
    return sizes


def test_no_frame_of_padding_gets_into_the_mean_at_any_length():
    wave = torch.from_numpy(speech_like())
    lengths = torch.arange(4000, 16001, 160)
    padded = torch.stack([wave * (torch.arange(16000) < n) for n in lengths])
    features, _ = SpeechBrainFbank()(padded, lengths)
    for n, row in zip(lengths, features, strict=True):
        alone = SpeechBrainFbank()(wave[:n].unsqueeze(0))[0][0]
        # Log energies are around 10, of which float32 resolves a millionth.
        assert (row[: len(alone)] - alone).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["encoder", "statistics"])
def test_an_embedding_does_not_depend_on_its_companions(
    run, tmp_path, kind, monkeypatch
):
    paths = [
        write_audio(tmp_path / f"{i}.flac", speech_like(3.0, seed=i)[:n])
        for i, n in enumerate(LENGTHS)
    ]
    embedder = (
        SpeakerEmbedder.from_run(run[0], device="cpu")
        if kind == "encoder"
        else SpeakerEmbedder(FbankStatistics(), device="cpu")
    )
    sizes = count_batches(embedder, monkeypatch)
    rows = embedder.embed(paths)
    assert max(sizes) > 1
    assert sum(sizes) == len(paths)
    for path, row in zip(paths, rows, strict=True):
        assert close(row, embedder.embed(path))


def test_many_files_of_one_length_keep_their_order(embedder, tmp_path, capsys):
    paths = [
        write_audio(tmp_path / f"{i}.flac", speech_like(0.5, seed=i)) for i in range(35)
    ]
    rows = embedder.embed(paths)
    assert "embedding: 100%" in capsys.readouterr().err
    for index in (0, 15, 16, 31, 34):
        assert close(rows[index], embedder.embed([paths[index]])[0])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 44101, 48000])
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
def stereo(tmp_path):
    """A file, the same as an array [channels, samples], and both channels."""
    sides = np.stack([speech_like(seed=1), speech_like(seed=2)])
    return write_audio(tmp_path / "s.wav", sides.T), sides


@pytest.mark.parametrize("kind", ["file", "array", "tensor"])
def test_several_channels_are_refused_until_it_is_said_what_to_do(
    embedder, stereo, kind, caplog
):
    path, sides = stereo
    rate = None if kind == "file" else 16000
    audio = {"file": path, "array": sides, "tensor": torch.from_numpy(sides)}[kind]
    with pytest.raises(
        ValueError, match=r'2 channels.*channels="mean".*=0.*list\(batch\)'
    ):
        embedder.embed(audio, rate)
    for number, side in enumerate(sides):
        chosen = embedder.embed(audio, rate, channels=number)
        assert close(chosen, embedder.embed(side, 16000))
    assert "give channel 1" in caplog.text
    with caplog.at_level(logging.WARNING):
        mean = embedder.embed([audio, sides[0]], 16000, channels="mean")
    assert close(mean[0], embedder.embed(sides.mean(axis=0), 16000))
    assert close(mean[1], embedder.embed(sides[0], 16000))
    assert "1 of 2 utterances have several channels, which were averaged" in caplog.text
    with pytest.raises(ValueError, match="has no channel 2: it has 2"):
        embedder.embed(audio, rate, channels=2)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_a_channel_is_a_whole_number_of_any_type(embedder, stereo, kind):
    path, sides = stereo
    expected = embedder.embed(path, channels=1)
    assert np.array_equal(embedder.embed(path, channels=kind(1)), expected)
    assert np.array_equal(
        embedder.windows(path, channels=kind(1)).embeddings[0], expected
    )
    with pytest.raises(ValueError, match="has no channel 2: it has 2"):
        embedder.embed(sides, 16000, channels=kind(2))


@pytest.mark.parametrize("channels", ["first", -1, True, 1.0, np.ones(2, int)])
def test_a_choice_of_channels_that_is_none_is_refused(embedder, channels):
    with pytest.raises(ValueError, match=r"channels takes .*but is ") as error:
        embedder.embed(speech_like(), 16000, channels=channels)
    assert f"but is {channels!r}." in str(error.value)


def test_one_channel_is_taken_as_it_is(embedder):
    wave = speech_like()
    expected = embedder.embed(wave, 16000)
    for channels in (None, "mean", 0):
        assert np.array_equal(
            embedder.embed(wave[None], 16000, channels=channels), expected
        )


def test_arrays_without_a_sample_rate_are_of_the_model_s_and_said_to_be(
    embedder, tmp_path
):
    path, wave = write_audio(tmp_path / "a.wav", speech_like()), speech_like(seed=1)
    said = f"is taken as of {embedder.sample_rate} Hz, the model's"
    with pytest.warns(UserWarning, match=rf"the waveform {said}") as caught:
        found = embedder.embed(wave)
    assert caught[0].filename == __file__
    assert close(found, embedder.embed(wave, embedder.sample_rate))
    with pytest.warns(UserWarning, match=rf"utterance 1 of the list {said}") as caught:
        embedder.embed([path, wave, wave])
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=rf"b {said}"):
        embedder.verify(path, wave)


def test_a_sample_rate_is_not_passed_over(embedder, tmp_path):
    path, wave = write_audio(tmp_path / "a.wav", speech_like()), speech_like(seed=1)
    for audio in (path, [path, path]):
        with pytest.raises(
            ValueError, match="sample_rate is 8000, but files say their"
        ):
            embedder.embed(audio, 8000)
    rows = embedder.embed([path, wave], 16000)
    assert close(rows[0], embedder.embed(path))
    assert close(rows[1], embedder.embed(wave, 16000))


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (7, "7 is no audio"),
        ([7], "utterance 0 of the list is of type int"),
        ([0.1, 0.2], "utterance 0 of the list is of type float"),
        ([b"a.wav"], "of type bytes"),
        (np.zeros((0, 16000)), r"shape \[0, 16000\]"),
        (
            [np.ones(16000, np.float32), [1.0]],
            "utterance 1 of the list is of type list",
        ),
        (np.ones(4, dtype="datetime64[s]"), "array of datetime64"),
        (np.float32(1.0), "is no audio"),
        (np.array(1.0), r"the waveform has the shape \[\]"),
        ([np.ones(9, ">f4")], "utterance 0 of the list is an array of >f4, the byte"),
        (np.ma.ones(16000), "the waveform is a masked array"),
    ],
)
def test_what_is_no_audio_is_refused_by_its_place(embedder, audio, message):
    with pytest.raises(ValueError, match=message):
        embedder.embed(audio, 16000)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(16000, np.float32), "is silent"),
        (np.full(16000, np.nan), r"holds NaN or infinity, first at 0\.000 s"),
        (np.ones(1000, np.float32), "has 1000 samples, 0.062 s"),
    ],
)
def test_bad_audio_is_named_by_its_place_or_path(embedder, bad, message, tmp_path):
    good = speech_like()
    with pytest.raises(ValueError, match=f"utterance 1 of the list {message}"):
        embedder.embed([good, bad], 16000)
    with pytest.raises(ValueError, match=f"the waveform {message}"):
        embedder.embed(bad, 16000)
    path = write_audio(tmp_path / "bad.wav", bad)
    for call in (embedder.embed, embedder.windows, lambda p: embedder.enrol([p])):
        with pytest.raises(ValueError, match=f"bad.wav {message}"):
            call(path)
    with pytest.raises(ValueError, match=f"b {message}"):
        embedder.verify(good, bad, 16000)


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (np.zeros(16000, np.float32), 16000, "is silent"),
        (np.full(16000, 0.5, np.float32), 16000, "is silent"),
        (np.tile([3e-5, -3e-5], 8000), 16000, "is silent"),
        (np.array([0.1] * 8000 + [np.nan] * 8000), 16000, r"NaN .* 0\.500 s"),
        (np.array([0.1] * 8000 + [np.inf] * 8000), 16000, r"infinity.* 0\.500 s"),
        (np.ones(1000, np.float32), 16000, "1000 samples, 0.062 s"),
        (np.ones((16000, 2), np.float32), 16000, "16000 channels"),
        (np.ones((16000, 1), np.float32), 16000, "16000 channels"),
        (np.ones((1, 1, 16000), np.float32), 16000, r"\[channels, samples\]"),
        (np.zeros(0, np.float32), 16000, r"\[0\]"),
        (np.ones(16000, np.int16), 16000, "divided by 32768"),
        (np.ones(16000, np.float32), 16, "sample rate of 16 Hz"),
        (np.zeros(16000 * 601, np.float32), 16000, "window=SECONDS"),
        (speech_like() * np.float32(1e30), 16000, r"e\+29, but full scale is 1"),
        (np.array([0.1, 1e300] * 8000), 16000, r"1e\+300, but full scale is 1"),
        (speech_like(), 16000.5, "rate of 16000.5; give"),
        (speech_like(), "16000", "rate of '16000'; give"),
        (speech_like(), True, "rate of True; give"),
        (speech_like(), float("nan"), "rate of nan; give"),
        (speech_like(), float("inf"), "rate of inf; give"),
    ],
)
def test_waveforms_that_say_nothing_are_refused(embedder, samples, rate, message):
    with pytest.raises(ValueError, match=message):
        embedder.embed(samples, rate)


def test_the_loudest_audio_that_passes_is_embedded_as_it_is_at_full_scale(embedder):
    wave = speech_like() / np.abs(speech_like()).max()
    loud = embedder.embed(wave * np.float32(2.0**31), 16000)
    assert close(loud, embedder.embed(wave, 16000))


@pytest.mark.parametrize("rate", [8000.0, np.float32(8000), np.int64(8000)])
def test_a_whole_sample_rate_of_any_type_is_taken(embedder, rate):
    wave = speech_like(rate=8000)
    assert np.array_equal(embedder.embed(wave, rate), embedder.embed(wave, 8000))


def test_an_unreadable_file_is_named(embedder, tmp_path):
    text = tmp_path / "notes.wav"
    text.write_text("no audio")
    for path in (text, tmp_path / "missing.wav"):
        with pytest.raises(ValueError, match=path.name):
            embedder.embed([path])
    silent = write_audio(tmp_path / "silent.wav", np.zeros(16000, np.float32))
    with pytest.raises(ValueError, match=r"silent\.wav is silent"):
        embedder.embed([silent])
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


@pytest.mark.parametrize("device", ["meta", "mps", "gpu", torch.device("meta"), 7.5])
def test_a_device_that_embedding_does_not_run_on_is_refused(run, device):
    with pytest.raises(ValueError, match=f"takes cpu, cuda, or cuda:N .* not {device}"):
        SpeakerEmbedder.from_run(run[0], device=device)


def test_a_gpu_that_is_not_there_is_refused(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees 0 CUDA devices"):
        SpeakerEmbedder.from_run(run[0], device="cuda")
    assert SpeakerEmbedder.from_run(run[0]).device.type == "cpu"


@pytest.mark.parametrize(
    "opened", [io.BytesIO, bytes, bytearray], ids=["a file", "bytes", "a bytearray"]
)
def test_open_files_are_refused_with_what_to_do_which_works(embedder, tmp_path, opened):
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


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (audio_info, "audio"),
        (functools.partial(read_audio, sample_rate=16000), "audio"),
        (lambda file: list(read_blocks(file)), "audio"),
        (read_manifest, "a manifest"),
        (read_trials, "a trial list"),
        (read_scores, "a score file"),
        (EmbeddingArchive.load, "an archive of embeddings"),
        (EnrolledSpeaker.load, "an enrolled speaker"),
        (SpeakerEmbedder.from_run, "a run"),
        (SpeakerEmbedder.from_hparams, "an exported model"),
        (read_cohort, "the cohort of a model"),
        (Plan.load, "a plan"),
        (lambda file: convert_from_wespeaker(file, "nowhere"), "a WeSpeaker model"),
    ],
)
def test_an_open_file_where_a_path_is_needed_is_told_so(read, what):
    with pytest.raises(
        ValueError,
        match=f"^{what} is read by the path of its file, and BytesIO is none",
    ):
        read(io.BytesIO(b"content"))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_that_a_wrapper_saved_are_loaded(run, embedder, tmp_path, prefix):
    shutil.copytree(run[0], tmp_path / "run")
    path = tmp_path / "run" / "embedding_model.ckpt"
    weights = torch.load(path, weights_only=True)
    torch.save({f"{prefix}{name}": t for name, t in weights.items()}, path)
    wave = speech_like()
    found = SpeakerEmbedder.from_run(tmp_path / "run", device="cpu")
    assert np.array_equal(found.embed(wave, 16000), embedder.embed(wave, 16000))


def test_weights_of_a_wrapper_are_loaded_strictly(tmp_path):
    linear, wrapper = torch.nn.Linear(2, 2), torch.nn.Module()
    wrapper.module = torch.nn.Linear(2, 2)
    for module in (wrapper, wrapper.module):
        file = io.BytesIO()
        torch.save(wrapper.state_dict(), file)
        file.seek(0)
        before = [p.clone() for p in wrapper.parameters()]
        load_strictly(module, file)
        assert all(map(torch.equal, wrapper.parameters(), before))
    torch.save({"module.weight": torch.ones(2, 2)}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"1 missing \(the first is bias\)"):
        load_strictly(linear, tmp_path / "a.ckpt")


def test_an_empty_list_is_refused(embedder):
    with pytest.raises(ValueError, match="at least one"):
        embedder.embed([])


def test_an_encoder_that_gives_nan_is_reported(run):
    embedder = SpeakerEmbedder.from_run(run[0], device="cpu")
    with torch.no_grad():
        embedder.model.encoder.fc.bias.fill_(1e38).mul_(10)
    with pytest.raises(ValueError, match="diverged"):
        embedder.embed(speech_like(), 16000)


def test_embedding_leaves_the_random_state_alone(embedder):
    before = torch.get_rng_state()
    embedder.embed(speech_like(), 16000)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_fingerprint_tells_weights_apart(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / str(seed), seed=seed)
    one, other, again = (
        SpeakerEmbedder.from_run(tmp_path / name, device="cpu").fingerprint
        for name in ("0", "1", "0")
    )
    assert one == again != other


def test_the_baseline_is_mean_and_deviation_of_the_features():
    wave = torch.from_numpy(speech_like()).unsqueeze(0)
    features = Fbank(n_mels=80, sample_rate=16000)(wave)[0]
    described = FbankStatistics()(wave)[0, 0]
    assert torch.allclose(described[:80], features.mean(0))
    assert torch.allclose(described[80:], features.std(0))
    without_mean = FbankStatistics(mean=False)(wave)[0, 0]
    assert torch.equal(without_mean, described[80:])


@pytest.mark.slow
def test_the_baseline_tells_real_speakers_apart_as_well_as_it_is_known_to():
    if "SPEECHBRAIN_REV_SPEECH" not in os.environ:
        pytest.skip("SPEECHBRAIN_REV_SPEECH names no folder with minivox")
    minivox = Path(os.environ["SPEECHBRAIN_REV_SPEECH"]) / "minivox"
    embedder = SpeakerEmbedder(FbankStatistics(), device="cpu")
    trials = read_trials(minivox / "veri_test.txt")
    paths = [minivox / "wav" / name for name in trials.utterances]
    rows = trials.rows(trials.utterances)
    scores = cosine_trials(embedder.embed(paths), *rows)
    # 16.3 % with another filterbank.
    assert 0.13 < eer(scores, trials.labels) < 0.18


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_cpu_s_embedding(run):
    wave = speech_like()
    on_cpu = SpeakerEmbedder.from_run(run[0], device="cpu").embed(wave, 16000)
    on_gpu = SpeakerEmbedder.from_run(run[0])
    assert on_gpu.device.type == "cuda"
    # cuDNN may compute convolutions in TF32: 10 bits of mantissa.
    assert close(on_gpu.embed(wave, 16000), on_cpu, 1e-2)


def test_what_is_no_state_dict_is_refused_by_an_encoder_in_one_line(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="holds no encoder of this package") as error:
        load_strictly(tiny_encoder(), tmp_path / "a.ckpt")
    assert "\n" not in str(error.value)
