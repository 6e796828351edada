"""Filterbanks of training are the library's, with dither in training alone."""

import pytest
import torch
from torchaudio.compliance import kaldi

from speechbrain_rev.filterbanks import FILTERBANKS
from speechbrain_rev.inference.front_ends import FRONT_ENDS
from speechbrain_rev.lobes.features import build_features
from tests.run_folders import speech_like

RATES = pytest.mark.parametrize("rate", [8000, 16000])


def batch(rate=16000, rows=19):
    """More utterances than are computed at once."""
    waves = [torch.from_numpy(speech_like(0.3, rate, seed % 3)) for seed in range(rows)]
    return torch.stack(waves)


def kaldi_features(rate=16000):
    return build_features("kaldi", sample_rate=rate, n_mels=40)


@RATES
def test_kaldi_s_are_those_of_the_library_utterance_by_utterance(rate):
    waves = batch(rate)
    expected = [
        kaldi.fbank(
            wave[None] * 2**15,
            num_mel_bins=40,
            sample_frequency=rate,
            window_type="hamming",
        )
        for wave in waves
    ]
    features = kaldi_features(rate).eval()(waves)
    # Sums of 257 products, in another order: twice their rounding is below 1e-5.
    torch.testing.assert_close(features, torch.stack(expected), rtol=1e-6, atol=1e-5)


@RATES
@pytest.mark.parametrize("kind", FILTERBANKS)
def test_what_is_trained_on_without_its_mean_is_what_is_embedded(kind, rate):
    waves = batch(rate)
    features = build_features(kind, sample_rate=rate, n_mels=40).eval()(waves)
    expected, _ = FRONT_ENDS[kind](sample_rate=rate, n_mels=40)(waves)
    torch.testing.assert_close(
        features - features.mean(1, keepdim=True),
        expected,
        # SpeechBrain's are decibels, whose floor is of the whole batch in training.
        atol=1e-5 if kind == "kaldi" else 1e-4,
        rtol=0,
    )
    assert features.shape[1] == FILTERBANKS[kind].frames(waves.shape[1], rate)


def test_training_dithers_each_utterance_by_the_global_generator():
    waves = batch(rows=1).expand(19, -1)
    features = kaldi_features()
    torch.manual_seed(0)
    dithered = features(waves)
    torch.manual_seed(0)
    assert torch.equal(features(waves), dithered)
    assert not torch.equal(features(waves), dithered)
    # Neither within what is computed at once nor across is it the same noise.
    assert len({row.numpy().tobytes() for row in dithered}) == len(waves)
    state = torch.get_rng_state()
    features.eval()(waves)
    assert torch.equal(torch.get_rng_state(), state)


def test_dither_is_a_step_of_16_bits():
    silence = torch.zeros(19, 16000)
    features = kaldi_features()(silence)
    expected = kaldi.fbank(
        silence[:1],
        num_mel_bins=40,
        window_type="hamming",
        dither=1.0,
    )
    # Noise of twice the deviation would be louder by log(4).
    assert (features.mean() - expected.mean()).abs() < 0.1
    assert features.mean() > 0
    assert kaldi_features().eval()(silence).max() < -15
