"""Front-ends and what is behind them give an utterance the same alone and padded."""

import pytest
import torch
from speechbrain.lobes.features import Fbank

from speechbrain_rev.inference import FbankStatistics, SpeakerEmbedder
from speechbrain_rev.inference.front_ends import FRONT_ENDS, SpeechBrainFbank
from speechbrain_rev.inference.graph import GRAPH_FRONT_ENDS, EmbeddingGraph
from tests.run_folders import speech_like, tiny_encoder, write_run

# Alike enough for one batch of SpeakerEmbedder.
LENGTHS = torch.tensor([4159, 5300])


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


@pytest.fixture(scope="module")
def padded(click):
    """The click, and a longer utterance."""
    longer = torch.from_numpy(speech_like(0.5)[:5300])
    return torch.stack([torch.cat([click, torch.zeros(5300 - len(click))]), longer])


def distance(ours, expected):
    """Over the length of what is expected."""
    return float((ours - expected).norm() / expected.norm())


@pytest.mark.parametrize("front_ends", [FRONT_ENDS, GRAPH_FRONT_ENDS])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_click_at_the_end_is_as_loud_alone_and_padded(
    front_ends, name, click, padded
):
    front_end = front_ends[name]()
    together, _ = front_end(padded, LENGTHS)
    alone, _ = front_end(click[None], LENGTHS[:1])
    # Rounding of bins 60 dB below the loudest; the floor would rise by 6 dB and more.
    assert (together[0, : alone.shape[1]] - alone[0]).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["encoder", "statistics"])
def test_a_click_at_the_end_is_embedded_alone_as_in_a_batch(
    kind, tmp_path, click, padded
):
    if kind == "encoder":
        write_run(tmp_path)
        embedder = SpeakerEmbedder.from_run(tmp_path, device="cpu")
    else:
        embedder = SpeakerEmbedder(FbankStatistics(), device="cpu")
    waves = [click.numpy(), padded[1].numpy()]
    rows = torch.from_numpy(embedder.embed(waves, sample_rate=16000))
    alone = torch.from_numpy(embedder.embed(waves[0], sample_rate=16000))
    # As SpeakerEmbedder promises.
    assert distance(rows[0], alone) < 1e-5


@torch.no_grad()
def test_a_click_at_the_end_is_embedded_by_a_graph_alone_as_in_a_batch(click, padded):
    graph = EmbeddingGraph(tiny_encoder(), sample_rate=16000, front_end="speechbrain")
    together = graph.eval()(padded, LENGTHS)
    # As SpeakerEmbedder promises.
    assert distance(together[:1], graph(click[None], LENGTHS[:1])) < 1e-5


def test_nothing_of_unpadded_utterances_is_changed(padded):
    features = Fbank(n_mels=80, sample_rate=16000)(padded)
    ours, lengths = SpeechBrainFbank()(padded)
    assert lengths is None
    assert torch.equal(ours, SpeechBrainFbank()(padded, torch.tensor([5300] * 2))[0])
    assert torch.allclose(ours, features - features.mean(1, keepdim=True), atol=1e-4)
    described = FbankStatistics()(padded).squeeze(1)
    mean_and_deviation = [torch.cat([f.mean(0), f.std(0)]) for f in features]
    assert torch.equal(described, torch.stack(mean_and_deviation))
