"""Front-ends of graphs compute what the libraries do."""

import itertools

import pytest
import torch
from speechbrain.lobes.features import Fbank

from speechbrain_rev.inference.front_ends import FRONT_ENDS, SpeechBrainFbank
from speechbrain_rev.inference.graph import GRAPH_FRONT_ENDS
from tests.run_folders import speech_like

SAMPLES = torch.tensor([16000, 4000, 9601])
#: Decibels, or Kaldi's natural logarithms. A spectrum is of 400 products, whose sum is
#: rounded by 2e-6 of the loudest bin's amplitude: of one 60 dB below, 0.02 dB.
QUIET = 0.02
#: Of an utterance's features, whose deviation is some 8 dB: 0.001 dB, that is of a bin 35
#: dB below the loudest.
USUAL = 1e-4


def waveforms(samples=SAMPLES, rate=16000):
    """Utterances padded with zeros."""
    padded = torch.zeros(len(samples), int(samples.max()))
    for i, count in enumerate(samples.tolist()):
        wave = speech_like(count / rate, rate=rate, seed=i)
        padded[i, :count] = torch.from_numpy(wave)
    return padded


@pytest.mark.parametrize("name", FRONT_ENDS)
@pytest.mark.parametrize("rate", [8000, 16000])
def test_features_are_those_of_the_library(name, rate):
    given = waveforms(rate=rate), SAMPLES
    settings = {"n_mels": 40, "sample_rate": rate}
    expected, lengths = FRONT_ENDS[name](**settings)(*given)
    ours, our_lengths = GRAPH_FRONT_ENDS[name](**settings)(*given)
    assert torch.equal(our_lengths, lengths)
    for i, count in enumerate((lengths * expected.shape[1]).round().int().tolist()):
        off = (ours - expected)[i, :count]
        assert off.norm() < USUAL * expected[i, :count].norm()
        assert off.abs().max() < QUIET


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_constant_added_to_the_signal_does_not_take_precision(name):
    given = waveforms()[:1] + 0.3, SAMPLES[:1]
    expected, _ = FRONT_ENDS[name]()(*given)
    ours, _ = GRAPH_FRONT_ENDS[name]()(*given)
    assert (ours - expected).norm() < USUAL * expected.norm()


@pytest.mark.parametrize("front_ends", [FRONT_ENDS, GRAPH_FRONT_ENDS])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_features_are_the_same_alone_and_padded(front_ends, name):
    front_end = front_ends[name]()
    # Of these the quotients of frames are rounded to either side.
    for short, long in itertools.product((40 * 160, 57 * 160), range(60, 140, 7)):
        samples = torch.tensor([short, 160 * long])
        padded = waveforms(samples)
        together, _ = front_end(padded, samples)
        alone, _ = front_end(padded[:1, :short], samples[:1])
        off = (together[0, : alone.shape[1]] - alone[0]).abs().max()
        # A frame more or less in the mean moves it by more.
        assert off < QUIET, (short, long)


def test_the_fbank_is_speechbrain_s():
    wave = waveforms()[:1]
    features = Fbank(n_mels=80, sample_rate=16000)(wave)
    features -= features.mean(1, keepdim=True)
    assert torch.allclose(SpeechBrainFbank()(wave)[0], features, atol=1e-4)
