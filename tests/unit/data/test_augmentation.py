import shutil

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.audio import read_audio
from speechbrain_rev.data import SpeakerAugment, add_noise, augmentation, reverberate
from speechbrain_rev.data.packing import pack
from tests.corpus import write_noise, write_rirs

RATE, CHUNK = 16000, 8000
SPEAKERS = 10


def speech(batch=6, samples=8800, seed=0):
    return torch.randn(batch, samples, generator=torch.Generator().manual_seed(seed))


def augmenter(**changed):
    settings = {"out_n_neurons": 3 * SPEAKERS, "chunk_samples": CHUNK, "seed": 5}
    return SpeakerAugment(**{**settings, **changed})


def disturber(noise=None, rir=None, **changed):
    """One that plays at normal speed and disturbs each utterance."""
    folders = {"noise_folder": noise, "rir_folder": rir}
    settings = {"out_n_neurons": SPEAKERS, "speeds": [1.0], "augment_prob": 1.0}
    return augmenter(**{**settings, **folders, **changed})


def apply(augment, wavs):
    return augment(wavs, torch.ones(len(wavs)))[0]


@pytest.fixture
def noise(tmp_path):
    return write_noise(tmp_path / "noise")


@pytest.fixture
def rirs(tmp_path):
    return write_rirs(tmp_path / "rirs")


class TestSpeed:
    def test_chunks_are_full_and_labels_name_speaker_and_speed(self, noise):
        augment = augmenter(noise_folder=noise)
        labels, seen = torch.arange(6).unsqueeze(1), set()
        for _ in range(12):
            wavs, lens = augment(speech(), torch.ones(6))
            assert wavs.shape == (6, CHUNK)
            assert torch.equal(lens, torch.ones(6))
            replicated = augment.replicate_labels(labels)
            assert torch.equal(replicated % SPEAKERS, labels)
            seen |= set((replicated // SPEAKERS).flatten().tolist())
        assert seen == {0, 1, 2}

    def test_it_moves_the_pitch_as_its_label_says(self):
        augment = augmenter(augment_prob=0.0)
        time = torch.arange(8800) / RATE
        wavs = apply(augment, torch.sin(2 * torch.pi * 1000 * time).repeat(30, 1))
        zeros = torch.zeros(30, 1, dtype=torch.long)
        speeds = augment.replicate_labels(zeros).flatten() // SPEAKERS
        peaks = torch.fft.rfft(wavs * torch.hann_window(CHUNK)).abs().argmax(dim=1)
        expected = [(1000, 900, 1100)[k] * CHUNK // RATE for k in speeds]
        assert peaks.tolist() == expected

    def test_normal_speed_keeps_the_label_and_the_samples(self):
        assert augmenter(speeds=(0.9, 1.0, 1.1)).speeds == (1.0, 0.9, 1.1)
        wavs = speech(4)
        for wav, chunk in zip(wavs, apply(disturber(), wavs), strict=True):
            assert (wav.unfold(0, CHUNK, 1) == chunk).all(dim=1).any()

    @pytest.mark.parametrize("speaker", [SPEAKERS, -1])
    def test_labels_that_cannot_be_those_of_the_batch_are_refused(self, speaker):
        augment = augmenter()
        apply(augment, speech())
        with pytest.raises(ValueError, match="6 utterances"):
            augment.replicate_labels(torch.zeros(5, 1))
        labels = torch.arange(6).reshape(6, 1) % SPEAKERS
        assert augment.replicate_labels(labels).shape == (6, 1)
        # At another speed it would be another speaker.
        labels[2] = speaker
        with pytest.raises(
            ValueError, match=f"A label is {speaker}, .*--out_n_neurons"
        ):
            augment.replicate_labels(labels)


def ratios(augment, batches=15):
    """Signal-to-noise ratios, dB, of the utterances that were disturbed."""
    decibels = []
    for batch in range(batches):
        wavs = speech(samples=augment.chunk_samples, seed=batch)
        for wav, noisy in zip(wavs, apply(augment, wavs), strict=True):
            added = noisy - wav
            if added.any():
                ratio = wav.square().mean() / added.square().mean()
                decibels.append(10 * torch.log10(ratio).item())
    return np.array(decibels)


class TestNoise:
    @pytest.mark.parametrize(
        ("folder", "low", "high"),
        [("music", 5, 15), ("speech", 13, 20), ("babble", 13, 20), ("noise", -3, 9)],
    )
    def test_it_fills_the_range_of_its_folder(self, tmp_path, folder, low, high):
        write_noise(tmp_path / "musan" / folder)
        decibels = ratios(disturber(tmp_path / "musan", snr_low=-3, snr_high=9))
        assert len(decibels) == 90
        assert low - 0.01 <= decibels.min() < decibels.max() <= high + 0.01
        # Uniform: 90 draws leave a tenth of the range empty with probability 8e-5.
        assert decibels.min() < low + (high - low) / 10
        assert decibels.max() > high - (high - low) / 10

    def test_the_share_of_disturbed_utterances_is_the_probability(self, noise):
        augment = disturber(noise, augment_prob=0.6, chunk_samples=100)
        share = len(ratios(augment, batches=50)) / 300
        # Five standard deviations of a binomial share.
        assert share == pytest.approx(0.6, abs=5 * (0.6 * 0.4 / 300) ** 0.5)

    def test_it_is_repeated_where_it_is_shorter_than_a_chunk(self, tmp_path):
        write_noise(tmp_path / "short", clips=1, seconds=0.1)
        wavs = speech(1, CHUNK)
        added = (apply(disturber(tmp_path / "short"), wavs) - wavs)[0]
        assert torch.allclose(added[:1600], added[1600:3200], atol=1e-5)
        assert added[-1600:].any()


class TestReverberation:
    def test_it_is_the_direct_convolution_with_the_normalised_response(self, rirs):
        wav = speech(1, 500)[0]
        rir = read_audio(rirs / "room_1.wav", sample_rate=RATE)
        direct = np.convolve(wav.double(), rir.double() / rir.double().norm())
        start = int(rir.abs().argmax())
        expected = torch.tensor(direct[start : start + len(wav)]).float()
        assert torch.allclose(reverberate(wav, rir), expected, atol=1e-5)

    def test_the_first_channel_of_a_response_is_used(self, tmp_path):
        (tmp_path / "rirs").mkdir()
        impulse = np.zeros((100, 2))
        impulse[0, 0], impulse[50, 1] = 0.5, 0.9
        soundfile.write(tmp_path / "rirs/two_microphones.wav", impulse, RATE)
        wavs = speech(3, CHUNK)
        changed = apply(disturber(rir=tmp_path / "rirs"), wavs)
        assert torch.allclose(changed, wavs, atol=1e-5)


def test_noise_and_reverberation_are_drawn_evenly_where_both_exist(
    noise, rirs, monkeypatch
):
    drawn = {"add_noise": 0, "reverberate": 0}
    for name in drawn:

        def count(wavs, *_, name=name):
            drawn[name] += len(wavs)
            return wavs

        monkeypatch.setattr(augmentation, name, count)
    augment = disturber(noise, rirs, chunk_samples=100)
    for _ in range(40):
        apply(augment, speech(10, 100))
    assert sum(drawn.values()) == 400
    # Five standard deviations of a binomial share.
    assert drawn["add_noise"] / 400 == pytest.approx(0.5, abs=5 * 0.5 / 20)


def test_a_batch_is_disturbed_as_each_of_its_utterances_would_be():
    wavs, levels = speech(5), torch.tensor([-5.0, 0.0, 5.0, 10.0, 15.0])
    added = speech(5, seed=1)
    added[3] = 0
    responses = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    responses[2] = 0
    noisy = add_noise(wavs, added, levels.unsqueeze(1))
    echoed = reverberate(wavs, responses)
    for row in range(5):
        alone = add_noise(wavs[row], added[row], float(levels[row]))
        assert torch.allclose(noisy[row], alone, atol=1e-6)
        alone = reverberate(wavs[row], responses[row])
        assert torch.allclose(echoed[row], alone, atol=1e-5)
    # Silent noise and silent responses change nothing.
    assert torch.equal(noisy[3], wavs[3])
    assert torch.equal(echoed[2], wavs[2])


class TestDraws:
    def test_a_loaded_augmenter_draws_what_the_saved_one_would_have(
        self, noise, tmp_path
    ):
        saved, loaded = (augmenter(noise_folder=noise) for _ in range(2))
        for _ in range(3):
            apply(saved, speech())
        saved._save(tmp_path / "augment.ckpt")
        loaded._load(tmp_path / "augment.ckpt", end_of_epoch=False)
        torch.manual_seed(99)  # the global state must not matter
        assert torch.equal(apply(saved, speech()), apply(loaded, speech()))
        labels = torch.zeros(6, 1, dtype=torch.long)
        ours, theirs = (one.replicate_labels(labels) for one in (saved, loaded))
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("text", ["", "[1]", "{}", '{"step": null}'])
    def test_what_is_no_step_of_an_augmenter_is_refused(self, text, tmp_path):
        (tmp_path / "augment.ckpt").write_text(text)
        with pytest.raises(
            ValueError, match=r"augment\.ckpt does not hold the step of"
        ):
            augmenter()._load(tmp_path / "augment.ckpt", end_of_epoch=False)

    def test_they_differ_between_steps_ranks_and_seeds(self, noise, monkeypatch):
        first, wavs = augmenter(noise_folder=noise), speech()
        before, state = wavs.clone(), torch.get_rng_state()
        outputs = [apply(first, wavs), apply(first, wavs)]
        outputs.append(apply(augmenter(noise_folder=noise, seed=6), wavs))
        monkeypatch.setattr(augmentation, "process_rank", lambda: 1)
        outputs.append(apply(augmenter(noise_folder=noise), wavs))
        for i, a in enumerate(outputs):
            assert all(not torch.equal(a, b) for b in outputs[i + 1 :])
        # The input and the global state are left as they were.
        assert torch.equal(wavs, before)
        assert torch.equal(torch.get_rng_state(), state)

    def test_autocast_changes_no_sample(self, noise, rirs):
        outputs = []
        for enabled in (False, True):
            augment = augmenter(noise_folder=noise, rir_folder=rirs, augment_prob=1.0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                outputs.append(apply(augment, speech(24)))
        assert outputs[1].dtype == torch.float32
        assert torch.equal(*outputs)


def test_silence_stays_finite(noise, rirs):
    assert apply(disturber(noise, rirs), torch.zeros(8, CHUNK)).isfinite().all()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"out_n_neurons": 31}, "multiple of the number of speeds"),
        ({"speeds": [0.9, 1.1, 1.2]}, "1.0 among them"),
        ({"speeds": [1.0, 1.0, 1.1]}, "different"),
        ({"augment_prob": 1.5}, "augment_prob"),
        ({"snr_low": 20.0}, "snr_low"),
    ],
)
def test_settings_without_meaning_are_refused_by_name(changed, named):
    with pytest.raises(ValueError, match=named):
        augmenter(**changed)


def test_too_short_a_batch_is_refused_with_the_seconds_to_read():
    with pytest.raises(ValueError, match=r"Raise sentence_len to at least 0\.55"):
        apply(augmenter(), speech(samples=8799))


class TestFolders:
    @pytest.mark.parametrize("folder", ["noise_folder", "rir_folder"])
    @pytest.mark.parametrize("probability", [0.0, 1.0])
    def test_one_may_come_after_and_is_refused_where_it_is_used(
        self, folder, probability, tmp_path
    ):
        # SpeechBrain's script downloads both when its YAML is loaded already.
        folders = {"noise_folder": write_noise(tmp_path / "noise")}
        folders[folder] = tmp_path / "later"
        augment = augmenter(augment_prob=probability, **folders)
        uses = (augment.in_words, lambda: apply(augment, speech()))
        for use in uses:
            with pytest.raises(
                ValueError, match=rf"{folder} is .*later, which does not"
            ):
                use()
        write_noise(tmp_path / "later")
        for use in uses:
            use()

    def test_one_may_lie_in_a_packed_folder(self, noise, tmp_path):
        packed = tmp_path / "noise.packed"
        pack(noise, packed, sample_rate=RATE)
        augment = disturber(packed / "noise")
        assert {path.parent for path in augment.noise_files} == {packed / "noise"}
        wavs = speech(samples=CHUNK)
        assert not torch.equal(apply(augment, wavs), wavs)
        with pytest.raises(
            ValueError, match=r"rir_folder: .*rirs\.packed is no packed"
        ):
            apply(disturber(rir=tmp_path / "rirs.packed"), wavs)

    def test_the_next_file_takes_the_place_of_one_that_cannot_be_read(
        self, noise, caplog
    ):
        bad = {"hiss.wav", "nan.wav", "empty.wav"}
        soundfile.write(noise / "noise/hiss.wav", np.ones(100), 8000)
        soundfile.write(noise / "noise/nan.wav", [np.nan] * 9, RATE, subtype="FLOAT")
        (noise / "noise/empty.wav").touch()
        augment = disturber(noise, max_unread=3)
        for batch in range(10):
            wavs = speech(samples=CHUNK, seed=batch)
            assert not torch.isclose(apply(augment, wavs), wavs).all(dim=1).any()
        # Each is logged once, however often it is drawn.
        assert {path.name for path in augment.unread} == bad
        assert caplog.text.count("goes on without a file") == 3
        assert "hiss.wav has 8000" in caplog.text
        with pytest.raises(ValueError, match="more than max_unread: 1"):
            apply(disturber(noise, max_unread=1), speech(60))

    def test_one_of_which_nothing_can_be_read_is_refused(self, tmp_path):
        soundfile.write(tmp_path / "hiss.wav", np.ones(100), 8000)
        with pytest.raises(ValueError, match=r"None of 1 file such .*hiss\.wav"):
            apply(disturber(tmp_path), speech())

    def test_what_is_on_is_reported(self, noise, rirs):
        both = augmenter(noise_folder=noise, rir_folder=rirs).in_words()
        assert f"Noise: 2 files in {noise}." in both
        assert f"Reverberation: 2 files in {rirs}." in both
        assert both.endswith("with probability 0.6.")
        assert "Noise: none (noise_folder)." in augmenter(rir_folder=rirs).in_words()
        assert "Hidden" not in both

    def test_hidden_files_and_originals_are_left_out_and_counted(self, noise, rirs):
        (noise / "noise/._clip_0.wav").write_bytes(b"\0\5\x16\7 of macOS")
        (noise / "noise/clip_0.m4a").write_bytes(b"what clip_0.wav is from")
        shutil.copytree(rirs, noise / ".trash/rirs")
        augment = augmenter(noise_folder=noise, rir_folder=rirs)
        words = augment.in_words()
        assert f"Noise: 2 files in {noise}." in words
        assert f"Reverberation: 2 files in {rirs}." in words
        assert "Hidden, or converted to WAV or FLAC: 4." in words
