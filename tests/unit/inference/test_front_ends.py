"""Front-ends compute what the libraries do, of an utterance alone or padded."""

import itertools

import pytest
import torch
from speechbrain.lobes.features import Fbank

from speechbrain_rev.inference import (
    FbankStatistics,
    SpeakerEmbedder,
    WaveformEncoder,
)
from speechbrain_rev.inference.front_ends import (
    FRONT_ENDS,
    KaldiFbank,
    SpeechBrainFbank,
)
from speechbrain_rev.inference.graph import GRAPH_FRONT_ENDS, EmbeddingGraph
from tests.run_folders import speech_like, tiny_encoder

SAMPLES = torch.tensor([16000, 4000, 9601])
#: Decibels, or Kaldi's natural logarithms. A spectrum is of 400 products, whose sum is
#: rounded by 2e-6 of the loudest bin's amplitude: of one 60 dB below, 0.02 dB.
QUIET = 0.02
#: Of an utterance's features, whose deviation is some 8 dB: 0.001 dB, that is of a bin 35
#: dB below the loudest.
USUAL = 1e-4
BOTH = pytest.mark.parametrize("front_ends", [FRONT_ENDS, GRAPH_FRONT_ENDS])
EACH = pytest.mark.parametrize("name", FRONT_ENDS)


def padded(samples=SAMPLES, rate=16000):
    """Utterances padded with zeros."""
    waves = torch.zeros(len(samples), int(samples.max()))
    for i, count in enumerate(samples.tolist()):
        wave = speech_like(count / rate, rate=rate, seed=i)
        waves[i, :count] = torch.from_numpy(wave)
    return waves


@pytest.fixture(scope="module")
def click():
    """Noise, digital silence, and a click in the last sample.

    Alone a window's edge holds the click; of padding, the middle of one.
    """
    torch.manual_seed(0)
    wave = torch.zeros(4159)
    wave[:2000] = 0.01 * torch.randn(2000)
    wave[-1] = 1.0
    return wave


@BOTH
@EACH
def test_features_are_the_same_alone_and_padded(front_ends, name, click):
    front_end = front_ends[name]()
    # Of these the quotients of frames are rounded to either side.
    for short, long in itertools.product((40 * 160, 57 * 160), range(60, 140, 14)):
        samples = torch.tensor([short, 160 * long])
        waves = padded(samples)
        together, _ = front_end(waves, samples)
        alone, _ = front_end(waves[:1, :short], samples[:1])
        off = (together[0, : alone.shape[1]] - alone[0]).abs().max()
        # A frame more or less in the mean moves it by more.
        assert off < QUIET, (short, long)
    samples = torch.tensor([len(click), 5300])
    waves = padded(samples)
    waves[0, : len(click)] = click
    together, _ = front_end(waves, samples)
    alone, _ = front_end(click[None], samples[:1])
    # The floor would rise by 6 dB and more.
    assert (together[0, : alone.shape[1]] - alone[0]).abs().max() < QUIET


@torch.no_grad()
@pytest.mark.parametrize("kind", ["encoder", "statistics", "graph"])
def test_a_click_at_the_end_is_embedded_alone_as_in_a_batch(kind, click):
    # Alike enough for one batch of SpeakerEmbedder.
    longer = torch.from_numpy(speech_like(0.5)[:5300])
    if kind == "graph":
        encoder = tiny_encoder()
        graph = EmbeddingGraph(encoder, encoder.description.front_end).eval()
        samples = torch.tensor([len(click), 5300])
        waves = torch.nn.utils.rnn.pad_sequence([click, longer], batch_first=True)
        row, alone = graph(waves, samples)[0], graph(click[None], samples[:1])[0]
    else:
        model = WaveformEncoder(tiny_encoder())
        model = FbankStatistics() if kind == "statistics" else model
        embedder = SpeakerEmbedder(model, device="cpu")
        row, alone = (
            torch.from_numpy(embedder.embed(waves, sample_rate=16000)[0])
            for waves in ([click, longer], [click])
        )
    # As SpeakerEmbedder promises.
    assert (row - alone).norm() < 1e-5 * alone.norm()


@EACH
@pytest.mark.parametrize("rate", [8000, 16000])
def test_features_of_graphs_are_those_of_the_library(name, rate):
    given = padded(rate=rate), SAMPLES
    settings = {"n_mels": 40, "sample_rate": rate}
    expected, lengths = FRONT_ENDS[name](**settings)(*given)
    ours, our_lengths = GRAPH_FRONT_ENDS[name](**settings)(*given)
    assert torch.equal(our_lengths, lengths)
    for i, count in enumerate((lengths * expected.shape[1]).round().int().tolist()):
        off = (ours - expected)[i, :count]
        assert off.norm() < USUAL * expected[i, :count].norm()
        assert off.abs().max() < QUIET
    # A constant added to the signal does not take precision.
    given = given[0][:1] + 0.3, SAMPLES[:1]
    expected, _ = FRONT_ENDS[name](**settings)(*given)
    ours, _ = GRAPH_FRONT_ENDS[name](**settings)(*given)
    assert (ours - expected).norm() < USUAL * expected.norm()


def test_features_of_unpadded_utterances_are_speechbrain_s():
    waves = padded(torch.tensor([5300, 5300]))
    features = Fbank(n_mels=80, sample_rate=16000)(waves)
    ours, lengths = SpeechBrainFbank()(waves)
    assert lengths is None
    assert torch.equal(ours, SpeechBrainFbank()(waves, torch.tensor([5300] * 2))[0])
    assert torch.allclose(ours, features - features.mean(1, keepdim=True), atol=1e-4)
    mean, deviation = features.mean(1), features.std(1)
    described = FbankStatistics()(waves).squeeze(1)
    assert torch.allclose(described, torch.cat([mean, deviation], dim=1))
    assert torch.equal(FbankStatistics(mean=False)(waves)[:, 0], described[:, 80:])


@EACH
def test_features_are_float32_under_autocast(name):
    wave = torch.from_numpy(speech_like()).unsqueeze(0)
    compute = FRONT_ENDS[name]()
    expected, _ = compute(wave)
    with torch.autocast("cpu", torch.bfloat16):
        features, _ = compute(wave)
    assert torch.equal(features, expected)


def test_kaldi_s_frames_lie_within_the_utterance_and_have_no_mean():
    counts = torch.tensor([1000, 400, 719])
    waves = padded(counts)
    features, lengths = KaldiFbank()(waves, counts)
    frames = [1 + (int(n) - 400) // 160 for n in counts]
    assert features.shape == (3, max(frames), 80)
    assert (lengths * max(frames)).round().tolist() == frames == [4, 1, 2]
    for row, count in zip(features, frames, strict=True):
        assert row[:count].sum(0).abs().max() < 1e-4
    wide, shares = KaldiFbank()(torch.nn.functional.pad(waves, (0, 200)), counts)
    for row, narrow, count in zip(wide, features, frames, strict=True):
        assert torch.equal(row[:count], narrow[:count])
    assert wide.shape[1] == 1 + (1200 - 400) // 160
    assert (shares * wide.shape[1]).round().tolist() == frames
    with pytest.raises(ValueError, match=r"399 samples, but a window .* has 400"):
        KaldiFbank()(waves, torch.tensor([1000, 399, 1000]))
