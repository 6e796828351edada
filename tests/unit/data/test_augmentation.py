import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.data import (
    SpeakerAugment,
    add_noise,
    augmentation,
    read_audio,
    reverberate,
)
from tests.corpus import write_noise, write_rooms

RATE, CHUNK = 16000, 8000
SPEAKERS = 10


def speech(batch=6, samples=8800, seed=0):
    return torch.randn(batch, samples, generator=torch.Generator().manual_seed(seed))


def augmenter(**changed):
    settings = {"out_n_neurons": 3 * SPEAKERS, "chunk_samples": CHUNK, "seed": 5}
    return SpeakerAugment(**{**settings, **changed})


def apply(augment, wavs):
    return augment(wavs, torch.ones(len(wavs)))[0]


@pytest.fixture
def noise(tmp_path):
    return write_noise(tmp_path / "noise")


@pytest.fixture
def rooms(tmp_path):
    return write_rooms(tmp_path / "rooms")


def test_chunks_are_full_and_labels_name_speaker_and_speed(noise):
    augment = augmenter(noise_folder=noise)
    labels = torch.arange(6).unsqueeze(1)
    seen = set()
    for _ in range(12):
        wavs, lens = augment(speech(), torch.ones(6))
        assert wavs.shape == (6, CHUNK)
        assert torch.equal(lens, torch.ones(6))
        replicated = augment.replicate_labels(labels)
        assert torch.equal(replicated % SPEAKERS, labels)
        seen |= set((replicated // SPEAKERS).flatten().tolist())
    assert seen == {0, 1, 2}


def test_the_speed_moves_the_pitch_as_its_label_says():
    augment = augmenter(augment_prob=0.0)
    time = torch.arange(8800) / RATE
    tone = torch.sin(2 * torch.pi * 1000 * time).repeat(30, 1)
    wavs = apply(augment, tone)
    speeds = augment.replicate_labels(torch.zeros(30, 1, dtype=torch.long)) // SPEAKERS
    peaks = torch.fft.rfft(wavs * torch.hann_window(CHUNK)).abs().argmax(dim=1)
    expected = [(1000, 900, 1100)[k] * CHUNK // RATE for k in speeds.flatten()]
    assert peaks.tolist() == expected


def test_normal_speed_keeps_the_label_whatever_the_order_of_speeds():
    augment = augmenter(speeds=(0.9, 1.0, 1.1), augment_prob=0.0)
    assert augment.speeds == (1.0, 0.9, 1.1)


def test_at_normal_speed_without_folders_a_chunk_is_a_piece_of_the_utterance():
    augment = augmenter(out_n_neurons=SPEAKERS, speeds=[1.0])
    wavs = speech(4)
    for wav, chunk in zip(wavs, apply(augment, wavs), strict=True):
        pieces = wav.unfold(0, CHUNK, 1)
        assert (pieces == chunk).all(dim=1).any()


@pytest.mark.parametrize("snr", [-5.0, 0.0, 12.5])
def test_the_measured_ratio_is_the_one_asked_for(snr):
    wav, noise = speech(2, CHUNK)
    added = add_noise(wav, 7 * noise, snr) - wav
    measured = 10 * torch.log10(wav.square().mean() / added.square().mean())
    assert measured.item() == pytest.approx(snr, abs=1e-3)


def ratios(augment, batches=15):
    """Signal-to-noise ratios, dB, of what was disturbed."""
    found = []
    for batch in range(batches):
        wavs = speech(samples=CHUNK, seed=batch)
        for wav, noisy in zip(wavs, apply(augment, wavs), strict=True):
            added = noisy - wav
            if added.any():
                ratio = wav.square().mean() / added.square().mean()
                found.append(10 * torch.log10(ratio).item())
    return np.array(found)


def noisy_augmenter(folder, **changed):
    settings = {"out_n_neurons": SPEAKERS, "speeds": [1.0], "noise_folder": folder}
    return augmenter(**{**settings, **changed})


def test_noise_fills_its_range_of_ratios(noise):
    augment = noisy_augmenter(noise, augment_prob=1.0, snr_low=-3, snr_high=9)
    found = ratios(augment)
    assert len(found) == 90
    assert found.min() >= -3.01
    assert found.max() <= 9.01
    # Uniform: 90 draws leave a tenth of the range empty with probability 8e-5.
    assert found.min() < -1.8
    assert found.max() > 7.8


def test_the_share_of_disturbed_utterances_is_the_probability(noise):
    share = len(ratios(noisy_augmenter(noise, augment_prob=0.6), batches=50)) / 300
    # Five standard deviations of a binomial share.
    assert share == pytest.approx(0.6, abs=5 * (0.6 * 0.4 / 300) ** 0.5)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("music", 5, 15), ("speech", 13, 20), ("babble", 13, 20), ("noise", 0, 15)],
)
def test_folders_named_as_in_musan_have_their_own_ratios(tmp_path, name, low, high):
    write_noise(tmp_path / "musan" / name)
    found = ratios(noisy_augmenter(tmp_path / "musan", augment_prob=1.0))
    assert low - 0.01 <= found.min() < found.max() <= high + 0.01
    assert found.max() - found.min() > 0.8 * (high - low)


def test_noise_shorter_than_a_chunk_is_repeated(tmp_path):
    folder = tmp_path / "short"
    write_noise(folder, clips=1, seconds=0.1)
    augment = noisy_augmenter(folder, augment_prob=1.0)
    wavs = speech(1, CHUNK)
    added = (apply(augment, wavs) - wavs)[0]
    assert torch.allclose(added[:1600], added[1600:3200], atol=1e-5)
    assert added[-1600:].any()


def test_speech_keeps_place_and_level_in_a_room(rooms):
    wav = speech(1, CHUNK)[0]
    for path in sorted(rooms.iterdir()):
        echoed = reverberate(wav, read_audio(path, sample_rate=RATE))
        assert len(echoed) == len(wav)
        lags = torch.fft.irfft(
            torch.fft.rfft(echoed, 2 * CHUNK) * torch.fft.rfft(wav, 2 * CHUNK).conj()
        )
        assert lags.argmax() == 0
        power = wav.square().mean().item()
        assert echoed.square().mean().item() == pytest.approx(power, rel=0.1)


def test_a_room_equals_the_direct_convolution_with_its_normalised_response(rooms):
    wav = speech(1, 500)[0]
    rir = read_audio(rooms / "room_1.wav", sample_rate=RATE)
    direct = np.convolve(wav.double(), rir.double() / rir.double().norm())
    start = int(rir.abs().argmax())
    expected = torch.tensor(direct[start : start + len(wav)]).float()
    assert torch.allclose(reverberate(wav, rir), expected, atol=1e-5)


def test_noise_and_rooms_are_drawn_evenly_where_both_exist(noise, rooms, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        augmentation,
        "add_noise",
        lambda wavs, *_: drawn.extend(["noise"] * len(wavs)) or wavs,
    )
    monkeypatch.setattr(
        augmentation,
        "reverberate",
        lambda wavs, *_: drawn.extend(["room"] * len(wavs)) or wavs,
    )
    augment = noisy_augmenter(noise, rir_folder=rooms, augment_prob=1.0)
    for _ in range(40):
        apply(augment, speech(10, CHUNK))
    assert len(drawn) == 400
    # Five standard deviations of a binomial share.
    assert drawn.count("noise") / 400 == pytest.approx(0.5, abs=5 * 0.5 / 20)


def test_rooms_alone_are_used_alone(rooms):
    wavs = speech(4, CHUNK)
    changed = apply(noisy_augmenter(None, rir_folder=rooms, augment_prob=1.0), wavs)
    assert not torch.isclose(changed, wavs).all(dim=1).any()


def test_the_first_channel_of_a_room_is_used(tmp_path):
    folder = tmp_path / "rooms"
    folder.mkdir()
    impulse = np.zeros((100, 2))
    impulse[0, 0], impulse[50, 1] = 0.5, 0.9
    soundfile.write(folder / "two_microphones.wav", impulse, RATE)
    wavs = speech(3, CHUNK)
    augment = noisy_augmenter(None, rir_folder=folder, augment_prob=1.0)
    assert torch.allclose(apply(augment, wavs), wavs, atol=1e-5)


def test_a_loaded_augmenter_draws_what_the_saved_one_would_have(noise, tmp_path):
    saved, loaded = augmenter(noise_folder=noise), augmenter(noise_folder=noise)
    for _ in range(3):
        apply(saved, speech())
    saved._save(tmp_path / "augment.ckpt")
    loaded._load(tmp_path / "augment.ckpt", end_of_epoch=False)
    torch.manual_seed(99)  # the global state must not matter
    assert torch.equal(apply(saved, speech()), apply(loaded, speech()))
    labels = torch.zeros(6, 1, dtype=torch.long)
    assert torch.equal(saved.replicate_labels(labels), loaded.replicate_labels(labels))


def test_draws_differ_between_steps_ranks_and_seeds(noise, monkeypatch):
    first = augmenter(noise_folder=noise)
    outputs = [apply(first, speech()), apply(first, speech())]
    outputs.append(apply(augmenter(noise_folder=noise, seed=6), speech()))
    monkeypatch.setattr(augmentation, "process_rank", lambda: 1)
    outputs.append(apply(augmenter(noise_folder=noise), speech()))
    for i, a in enumerate(outputs):
        assert all(not torch.equal(a, b) for b in outputs[i + 1 :])


def test_augmentation_leaves_the_global_random_state_and_its_input_alone(noise):
    wavs = speech()
    before, state = wavs.clone(), torch.get_rng_state()
    apply(augmenter(noise_folder=noise, augment_prob=1.0), wavs)
    assert torch.equal(wavs, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_silence_stays_finite(noise, rooms):
    augment = noisy_augmenter(noise, rir_folder=rooms, augment_prob=1.0)
    assert torch.isfinite(apply(augment, torch.zeros(8, CHUNK))).all()


def test_silent_noise_changes_nothing():
    wav = speech(1)[0]
    assert torch.equal(add_noise(wav, torch.zeros_like(wav), 0.0), wav)


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


@pytest.mark.parametrize("folder", ["noise_folder", "rir_folder"])
@pytest.mark.parametrize(
    "use", [SpeakerAugment.in_words, lambda augment: apply(augment, speech())]
)
def test_a_folder_may_come_after_and_is_refused_where_it_is_used(folder, use, tmp_path):
    # SpeechBrain's script downloads noise and rooms when its YAML is loaded already.
    augment = augmenter(augment_prob=1.0, **{folder: tmp_path / "later"})
    with pytest.raises(ValueError, match=r"no folder .*later"):
        use(augment)
    write_noise(tmp_path / "later")
    use(augment)


@pytest.mark.parametrize("folder", ["noise_folder", "rir_folder"])
def test_a_wrong_folder_ends_the_first_batch_whatever_is_drawn_in_it(folder, tmp_path):
    augment = augmenter(augment_prob=0.0, **{folder: tmp_path / "later"})
    with pytest.raises(ValueError, match=r"no folder .*later"):
        apply(augment, speech())


def test_a_wrong_folder_of_rooms_is_told_of_beside_a_right_one_of_noise(
    noise, tmp_path
):
    augment = noisy_augmenter(noise, augment_prob=0.0, rir_folder=tmp_path / "later")
    with pytest.raises(ValueError, match=r"no folder .*later"):
        apply(augment, speech())


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"step": null}'])
def test_what_is_no_step_of_an_augmenter_is_refused_with_what_to_do(text, tmp_path):
    path = tmp_path / "augment.ckpt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"augment\.ckpt does not hold the step of a"):
        augmenter()._load(path, end_of_epoch=False)


def test_too_short_a_batch_is_refused_with_the_seconds_to_read():
    with pytest.raises(ValueError, match=r"Raise sentence_len to at least 0\.55"):
        apply(augmenter(), speech(samples=8799))


def test_labels_of_another_batch_are_refused():
    augment = augmenter()
    apply(augment, speech())
    with pytest.raises(ValueError, match="6 utterances"):
        augment.replicate_labels(torch.zeros(5, 1))


@pytest.mark.parametrize("speaker", [SPEAKERS, -1])
def test_a_speaker_that_would_be_another_one_at_another_speed_is_refused(speaker):
    augment = augmenter()
    apply(augment, speech())
    labels = torch.arange(6).reshape(6, 1) % SPEAKERS
    assert augment.replicate_labels(labels).shape == (6, 1)
    labels[2] = speaker
    with pytest.raises(ValueError, match=f"A label is {speaker}, .*--out_n_neurons"):
        augment.replicate_labels(labels)


def test_the_next_file_takes_the_place_of_one_that_cannot_be_read(noise, caplog):
    soundfile.write(noise / "noise" / "hiss.wav", np.ones(100), 8000)
    soundfile.write(noise / "noise" / "nan.wav", [np.nan] * 100, RATE, subtype="FLOAT")
    (noise / "noise" / "empty.wav").touch()
    augment = noisy_augmenter(noise, augment_prob=1.0, max_unread=3)
    for batch in range(10):
        wavs = speech(samples=CHUNK, seed=batch)
        assert not torch.isclose(apply(augment, wavs), wavs).all(dim=1).any()
    # Of each it is told once, however often it is drawn.
    assert {path.name for path in augment.unread} == {
        "hiss.wav",
        "nan.wav",
        "empty.wav",
    }
    assert caplog.text.count("goes on without a file") == 3
    assert "hiss.wav has 8000" in caplog.text


def test_too_many_files_that_cannot_be_read_end_the_training(noise):
    for name in ("hiss", "buzz"):
        soundfile.write(noise / "noise" / f"{name}.wav", np.ones(100), 8000)
    augment = noisy_augmenter(noise, augment_prob=1.0, max_unread=1)
    with pytest.raises(ValueError, match=r"more than max_unread: 1.*wav has 8000"):
        apply(augment, speech(60))


def test_a_folder_of_which_nothing_can_be_read_is_refused(tmp_path):
    folder = tmp_path / "noise"
    folder.mkdir()
    soundfile.write(folder / "hiss.wav", np.ones(100), 8000)
    augment = noisy_augmenter(folder, augment_prob=1.0)
    with pytest.raises(ValueError, match=r"None of the 1 files .*hiss\.wav"):
        apply(augment, speech())


def test_what_a_batch_is_given_is_what_each_of_its_utterances_would_be(noise, rooms):
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
    assert torch.equal(noisy[3], wavs[3])
    assert torch.equal(echoed[2], wavs[2])


def test_autocast_changes_no_sample(noise, rooms):
    def augmented():
        augment = augmenter(noise_folder=noise, rir_folder=rooms, augment_prob=1.0)
        return apply(augment, speech(24))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = augmented()
    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, augmented())


def test_what_is_on_is_said(noise, rooms):
    both = augmenter(noise_folder=noise, rir_folder=rooms).in_words()
    assert f"Noise: 2 files in {noise}." in both
    assert f"Reverberation: 2 files in {rooms}." in both
    assert both.endswith("with probability 0.6.")
    assert "Noise: none (noise_folder)." in augmenter(rir_folder=rooms).in_words()
