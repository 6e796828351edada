"""Pooling in float32, poolings of one's own, and last layers of any kind."""

import copy

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from torch import nn

from speechbrain_rev.heads import HEADS, POOLINGS, PoolingRow
from speechbrain_rev.inference.export import model_yaml
from speechbrain_rev.inference.graph import EmbeddingGraph, exported
from speechbrain_rev.lobes import build_encoder, inference_form
from speechbrain_rev.lobes.description import EncoderDescription, FrontEnd
from speechbrain_rev.lobes.pooling import Pooling, StatisticsPooling, build_pooling
from tests.unit.lobes.encoders import (
    LENGTHS,
    NARROW,
    assert_padding_is_left_out,
    assert_same_bits,
    feats,
    narrow,
    tiny,
    trained,
    with_statistics,
)
from tests.unit.reversible.chains import FLOAT32, each_half

SCALE = 2.0**10  # of fp16's loss


@each_half
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    ("name", "variance"),
    [(name, variance) for name, row in POOLINGS.items() for variance in row.variances],
)
def test_pooling_and_its_gradient_are_float32s(name, precision, variance, masks):
    # Sums, squares and scaled gradients are above fp16's largest number.
    maps = (torch.randn(2, 3, 4, 500) * 200 + 1000).to(precision.half)
    frames = torch.tensor([[500], [300]])
    mask = (torch.arange(500) < frames).float()[:, None, None, :] if masks else None
    if masks:
        maps *= mask
    pooling, results = build_pooling(name, 12, variance=variance), []
    for x, autocasts in ((maps.clone(), precision), (maps.float(), FLOAT32)):
        x.requires_grad_()
        with autocasts.autocast():
            pooled = pooling(mask, x)
            loss = SCALE * pooled.square().sum()
        pooling.zero_grad()
        loss.backward()
        own = [p.grad for p in pooling.parameters()]
        results.append((pooled, x.grad, *own))
    for half, expected in zip(*results, strict=True):
        assert expected.dtype == torch.float32
        assert torch.equal(half, expected.to(half.dtype))


@pytest.mark.parametrize("variance", ["population", "unbiased"])
def test_statistics_are_mean_and_deviation(variance):
    maps = torch.randn(2, 3, 4, 500) * 200 + 1000
    rows, correction = maps.flatten(1, 2), int(variance == "unbiased")
    std = (rows.var(2, correction=correction) + 1e-7).sqrt()
    pooled = StatisticsPooling(12, variance=variance)(None, maps)
    torch.testing.assert_close(pooled, torch.cat([rows.mean(2), std], 1))


@pytest.mark.parametrize("frames", [[50, 50], [50, 20]])
def test_attentive_statistics_are_weighted_by_a_softmax_over_time(frames):
    torch.manual_seed(0)
    maps = torch.randn(2, 3, 4, 50, dtype=torch.float64)
    keep = torch.arange(50) < torch.tensor(frames)[:, None]
    pooling = build_pooling("attentive", 12, variance="population").double()
    mask = keep.double()[:, None, None] if frames[1] < 50 else None
    pooled = pooling(mask, *(maps * keep[:, None, None]).split([1, 2], dim=1))
    for utterance, x in enumerate(maps.flatten(1, 2)):
        x = x[:, : frames[utterance]]
        hidden = (pooling.hidden.weight[:, :, 0] @ x).T + pooling.hidden.bias
        scores = hidden.tanh() @ pooling.attention.weight[:, :, 0].T
        weight = (scores + pooling.attention.bias).T.exp()
        weight /= weight.sum(1, keepdim=True)
        mean = (weight * x).sum(1)
        deviation = ((weight * x**2).sum(1) - mean**2 + 1e-7).sqrt()
        torch.testing.assert_close(pooled[utterance], torch.cat([mean, deviation]))


def test_a_variance_that_a_pooling_lacks_is_refused():
    with pytest.raises(ValueError, match="one of population with pooling attentive"):
        build_pooling("attentive", 12, variance="unbiased")


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("encoder", ["resnet34", "revnet57"])
def test_every_mode_trains_to_the_same_bits(name, encoder):
    steps = {
        mode: trained(
            tiny(encoder, pooling=name, mode=mode, **NARROW), narrow(3), LENGTHS
        )
        for mode in ("store", "recompute", "reconstruct")
        if mode != "reconstruct" or encoder == "revnet57"
    }
    for step in steps.values():
        assert_same_bits(step, steps["store"])


@pytest.mark.parametrize("masks", [False, True])
def test_maps_in_channels_last_are_pooled_alike_and_their_gradient_lies_so(masks):
    maps = torch.randn(2, 3, 4, 50, dtype=torch.float64)
    last = maps.contiguous(memory_format=torch.channels_last)
    mask = (torch.arange(50) < 30).double().view(1, 1, 1, 50) if masks else None
    results = []
    for x in (maps, last):
        pooled = StatisticsPooling(12, variance="population")(mask, x.requires_grad_())
        weights = torch.linspace(-1, 1, 24, dtype=torch.float64)
        (slope,) = torch.autograd.grad((pooled * weights).sum(), x)
        assert slope.stride() == x.stride()
        results.append((pooled, slope))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def assert_exported_alike(encoder):
    graph = EmbeddingGraph(encoder, FrontEnd("speechbrain", 16000, encoder.n_mels))
    waves = torch.randn(2, 9000), torch.tensor([9000, 6000])
    torch.testing.assert_close(exported(graph).module()(*waves), graph(*waves))


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLINGS)
def test_padding_changes_no_embedding_and_the_graph_gives_the_same(name):
    encoder = with_statistics(tiny("revnet57", pooling=name, **NARROW))
    assert_padding_is_left_out(encoder, narrow(2), 26)
    assert_exported_alike(encoder)


@each_half
def test_the_floor_of_the_variance_holds_in_half_precision(precision):
    # 1e-7 is nothing to fp16, and the root of nothing has no gradient.
    maps = torch.full((2, 3, 4, 50), 7.0, dtype=precision.half, requires_grad=True)
    with precision.autocast():
        std = StatisticsPooling(12, variance="population")(None, maps)[:, 12:]
    assert torch.equal(std, torch.full_like(std, 1e-7).sqrt())
    (SCALE * std.sum()).backward()
    assert maps.grad.isfinite().all()


class Weighted(Pooling):
    """The mean over time, weighted by a number of each row that is trained."""

    def __init__(self, rows, *, variance):
        super().__init__(rows, variance=variance)
        self.weight = nn.Parameter(torch.linspace(0.5, 2, rows))

    def pool(self, mask, *parts):
        x = torch.cat([part.float().flatten(1, 2) for part in parts], 1)
        keep = torch.ones_like(x[:, :1]) if mask is None else mask.flatten(1, 2)
        return self.weight * (x * keep).sum(2) / keep.sum(2)


class TestAnotherPooling:
    """A pooling is a class and a line of a table: encoders, exports and plans follow."""

    @pytest.fixture(autouse=True)
    def weighted(self, monkeypatch):
        row = PoolingRow(
            "weighted", f"{__name__}:Weighted", statistics=1, variances=("population",)
        )
        monkeypatch.setitem(POOLINGS, "weighted", row)

    @pytest.mark.parametrize("name", ["resnet34", "df_revnet66"])
    def test_an_encoder_trains_and_embeds_with_it(self, name):
        steps = []
        for mode in ("store", "recompute"):
            encoder = tiny(name, pooling="weighted", mode=mode)
            steps.append(trained(encoder, feats(3, 43, torch.float32), LENGTHS))
        assert_same_bits(steps[1], steps[0])
        assert encoder.pooling.weight.grad.any()
        assert encoder.fc.in_features * 2 == tiny(name).fc.in_features
        encoder = with_statistics(encoder)
        x = feats(dtype=torch.float32)
        assert_padding_is_left_out(encoder, x, 26, inference_form(encoder))

    def test_an_exported_model_and_its_weights_name_it(self):
        front_end = {"kind": "speechbrain", "sample_rate": 16000}
        encoder = tiny("revnet57", pooling="weighted", front_end=front_end)
        text = model_yaml(encoder.description, 3, HEADS["cosine"])
        made = load_hyperpyyaml(text)["embedding_model"]
        assert made.description == encoder.description
        said = EncoderDescription.of_state_dict(encoder.state_dict())
        for built in (made, build_encoder(**vars(said))):
            assert isinstance(built.pooling, Weighted)


class Adapted(nn.Module):
    """A frozen layer and what adapts it, of low rank."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


CHANGES = {
    "adapter": Adapted,
    "with a normalisation": lambda fc: nn.Sequential(fc, nn.BatchNorm1d(8)),
    "removed": lambda fc: nn.Identity(),
    "two layers": lambda fc: nn.Sequential(fc, nn.ReLU(), nn.Linear(8, 4)),
}


class TestLastLayer:
    """Encoders whose last layer is quantized, wrapped, replaced or removed."""

    @pytest.mark.parametrize(
        ("name", "change"),
        [("resnet34", "adapter"), *(("revnet57", c) for c in CHANGES)],
    )
    def test_an_exchanged_one_runs_trains_and_is_exported(self, name, change):
        encoder = tiny(name, **NARROW)
        encoder.fc = CHANGES[change](encoder.fc)
        x = narrow(3)
        encoder(x).square().sum().backward()
        assert encoder.stem.convs[0].weight.grad.abs().sum() > 0
        expected = encoder.eval()(x)
        assert expected.shape[:2] == (3, 1)
        torch.testing.assert_close(inference_form(encoder)(x), expected)
        for dtype in (torch.float64, torch.bfloat16):
            assert copy.deepcopy(encoder).to(dtype)(x.to(dtype)).dtype == dtype
        if (name, change) == ("revnet57", "adapter"):
            assert_exported_alike(encoder)

    @pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
    def test_a_quantized_one_runs_in_evaluation_only(self):
        plain, x = tiny("revnet57", **NARROW).eval(), narrow()
        encoder = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
        y = encoder(x)
        assert not y.requires_grad  # torch would make a gradient of what is in memory
        torch.testing.assert_close(y, plain(x).detach(), rtol=0.05, atol=0.05)
        torch.testing.assert_close(inference_form(encoder)(x), y)
        with pytest.raises(ValueError, match="quantize the ONNX file"):
            EmbeddingGraph(encoder, FrontEnd("speechbrain", 16000, encoder.n_mels))
        with pytest.raises(RuntimeError, match=r"has no gradient\. Call eval"):
            encoder.train()(x)

    @pytest.mark.parametrize(
        "fc", [nn.Flatten(0), nn.Unflatten(1, (2, -1)), nn.LSTM(320, 8)]
    )
    def test_one_that_gives_no_vectors_is_refused(self, fc):
        encoder = tiny("revnet57")
        encoder.fc = fc
        message = f"fc .{type(fc).__name__}., turned statistics"
        with pytest.raises(ValueError, match=message):
            encoder(feats(dtype=torch.float32))
