"""A pooling is a class and a line of a table: encoders, exports and plans follow."""

import pytest
import torch
from torch.nn.functional import pad

from speechbrain_rev.inference.model_folder import (
    encoder_of,
    model_yaml,
    read_model_yaml,
)
from speechbrain_rev.lobes import build_encoder, inference_form
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.lobes.pooling import POOLINGS, Pooling

from .encoders import feats, tiny, with_statistics


class Weighted(Pooling):
    """The mean over time, weighted by a number of each row that is trained."""

    statistics = 1

    def __init__(self, rows, *, variance):
        super().__init__(rows, variance=variance)
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, rows))

    def pool(self, mask, *parts):
        x = torch.cat([part.float().flatten(1, 2) for part in parts], 1)
        keep = torch.ones_like(x[:, :1]) if mask is None else mask.flatten(1, 2)
        return self.weight * (x * keep).sum(2) / keep.sum(2)


@pytest.fixture(autouse=True)
def weighted(monkeypatch):
    monkeypatch.setitem(POOLINGS, "weighted", Weighted)


@pytest.mark.parametrize("name", ["resnet34", "df_revnet66", "revnet57"])
def test_an_encoder_trains_with_it_to_the_same_bits_in_every_mode(name):
    found = {}
    for mode in ("store", "recompute"):
        encoder = tiny(name, pooling="weighted", mode=mode)
        assert encoder.fc.in_features * 2 == tiny(name).fc.in_features
        y = encoder(feats(dtype=torch.float32), torch.tensor([1.0, 0.6]))
        y.square().sum().backward()
        found[mode] = [y, *(p.grad for p in encoder.parameters())]
    assert encoder.pooling.weight.grad.any()
    assert all(map(torch.equal, *found.values()))


@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet34", "revnet57"])
def test_its_encoder_embeds_an_utterance_alone_as_padded_and_as_its_form(name):
    encoder = with_statistics(tiny(name, pooling="weighted"))
    x = feats(dtype=torch.float32)
    x[1] = pad(x[1, :26], (0, 0, 0, 17))
    lengths = torch.tensor([1.0, 26 / 43])
    alone = torch.cat([encoder(x[:1]), encoder(x[1:, :26])])
    for network in (encoder, inference_form(encoder)):
        torch.testing.assert_close(network(x, lengths), alone, atol=1e-4, rtol=1e-4)


def test_its_settings_make_another_encoder_of_the_kind():
    settings = settings_of(tiny("revnet57", pooling="weighted"))
    again = build_encoder("revnet57", blocks=(1, 1, 1, 1), **settings)
    assert isinstance(again.pooling, Weighted)


def test_an_exported_model_names_it_where_it_is_not_the_usual_one():
    settings = {"arch": "revnet57", "widths": [4] * 4, "blocks": [1] * 4, "n_mels": 80}
    settings |= {"embedding_dim": 16, "sample_rate": 16000, "out_n_neurons": 3}
    assert "pooling" not in model_yaml(settings)
    assert model_yaml(settings | {"pooling": "statistics"}) == model_yaml(settings)
    text = model_yaml(settings | {"pooling": "weighted"})
    found = read_model_yaml(text, "hyperparams.yaml")
    assert found == settings | {"pooling": "weighted"}
    assert isinstance(encoder_of(found).pooling, Weighted)


def test_a_pooling_that_was_put_in_by_hand_has_no_settings():
    encoder = tiny("revnet57")
    encoder.pooling = torch.nn.Identity()
    with pytest.raises(ValueError, match="pooling of revnet57 is a Identity"):
        settings_of(encoder)


def test_a_name_that_no_pooling_has_is_refused():
    with pytest.raises(ValueError, match="one of statistics, weighted, but is 'mean'"):
        tiny("revnet57", pooling="mean")
