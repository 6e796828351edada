"""Encoders whose last layer is quantized, wrapped, replaced or removed."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.inference.graph import EmbeddingGraph, exported
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.lobes.inference_form import inference_form

TINY = {
    "n_mels": 24,
    "embedding_dim": 16,
    "widths": (8, 8, 16, 16),
    "blocks": (1, 1, 1, 1),
}


class LowRank(nn.Module):
    """A frozen layer and what adapts it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Pair(nn.Module):
    def forward(self, x):
        return x, x


CHANGES = {
    "adapter": LowRank,
    "with a normalisation": lambda fc: nn.Sequential(fc, nn.BatchNorm1d(16)),
    "removed": lambda fc: nn.Identity(),
    "two layers": lambda fc: nn.Sequential(fc, nn.ReLU(), nn.Linear(16, 4)),
}


def encoder_with(name, change, **settings):
    torch.manual_seed(0)
    encoder = build_encoder(name, **{**TINY, **settings})
    encoder.fc = CHANGES[change](encoder.fc)
    return encoder


def quantized(name):
    encoder = build_encoder(name, **TINY).eval()
    return torch.ao.quantization.quantize_dynamic(encoder, {nn.Linear})


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["resnet34", "revnet57"])
def test_an_exchanged_layer_runs_trains_and_is_exported(name, change):
    encoder = encoder_with(name, change)
    x = torch.randn(3, 44, 24)
    encoder(x).square().sum().backward()
    assert encoder.stem.convs[0].weight.grad.abs().sum() > 0
    expected = encoder.eval()(x)
    assert expected.shape[:2] == (3, 1)
    assert torch.equal(copy.deepcopy(encoder)(x), expected)
    torch.testing.assert_close(inference_form(encoder)(x), expected)
    graph = EmbeddingGraph(encoder, sample_rate=16000, front_end="speechbrain")
    waveforms, samples = torch.randn(2, 9000), torch.tensor([9000, 6000])
    found = exported(graph).module()(waveforms, samples)
    torch.testing.assert_close(found, graph(waveforms, samples))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_statistics_have_the_dtype_of_the_layer(change, dtype):
    encoder = encoder_with("revnet57", change).eval().to(dtype)
    assert encoder(torch.randn(2, 44, 24, dtype=dtype)).dtype == dtype


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("name", ["resnet34", "revnet57"])
class TestQuantized:
    def test_it_runs_in_evaluation(self, name):
        torch.manual_seed(0)
        plain = build_encoder(name, **TINY).eval()
        torch.manual_seed(0)
        encoder, x = quantized(name), torch.randn(2, 44, 24)
        y = encoder(x)
        assert not y.requires_grad  # torch would make a gradient of what is in memory
        torch.testing.assert_close(y, plain(x).detach(), rtol=0.05, atol=0.05)
        torch.testing.assert_close(inference_form(encoder)(x), y)

    def test_it_refuses_to_train(self, name):
        encoder = quantized(name).train()
        with pytest.raises(
            RuntimeError, match=r"quantized and has no gradient\. Call eval"
        ):
            encoder(torch.randn(2, 44, 24))

    def test_it_refuses_to_be_exported(self, name):
        with pytest.raises(ValueError, match="quantize the ONNX file"):
            EmbeddingGraph(quantized(name), sample_rate=16000, front_end="speechbrain")


@pytest.mark.parametrize("fc", [nn.Flatten(0), Pair(), nn.Unflatten(1, (2, -1))])
def test_a_layer_that_gives_no_vectors_is_refused(fc):
    encoder = build_encoder("revnet57", **TINY)
    encoder.fc = fc
    with pytest.raises(
        ValueError, match=f"fc .{type(fc).__name__}., turned statistics"
    ):
        encoder(torch.randn(2, 44, 24))


def test_settings_are_of_encoders_that_build_encoder_makes():
    with pytest.raises(
        ValueError, match=r"fc of resnet34 is a Identity.*planner\.plan"
    ):
        settings_of(encoder_with("resnet34", "removed"))
