"""Blocks within blocks are planned where that fits, or is faster."""

import pytest
import torch
from torch import nn

from speechbrain_rev.planner import Infeasible, plan, repeated_blocks, step
from speechbrain_rev.planner.search import finer_blocks
from tests.unit.planner.networks import (
    assert_equal_tensors,
    gradients,
    layers,
    plain,
)
from tests.unit.training.brains import wavlm

X = torch.randn(256, 16)


class Stack(nn.Module):
    """A block of layers, each with its input beside it."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts or (layers(16, 64) for _ in range(4)))

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = self.into(x).view(1, 256, 48).chunk(3, dim=-1)
        weights = (query @ key.transpose(1, 2)).softmax(-1)
        return self.out((weights @ value).view(256, 16))


class Layer(nn.Module):
    """As of a Transformer."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(16)
        self.feed_forward, self.final_norm = layers(16, 256), nn.LayerNorm(16)

    def forward(self, x):
        x = self.norm(x + self.attention(x))
        return self.final_norm(x + self.feed_forward(x))


class Wide(Stack):
    """A block with most of its numbers between its two parts."""

    def __init__(self):
        super().__init__(
            nn.Sequential(nn.Linear(16, 512), nn.ReLU()),
            nn.Sequential(nn.Linear(512, 16), nn.ReLU()),
        )

    def forward(self, x):
        return x + self.parts[1](self.parts[0](x))


class Shared(Stack):
    """A block that runs its parts twice."""

    def forward(self, x):
        return super().forward(super().forward(x))


class Named(Stack):
    """A block of which a part returns no tensor."""

    def __init__(self):
        super().__init__(layers(16, 64), Silent(*layers(16, 64)))

    def forward(self, x):
        return self.parts[0](x) + len(self.parts[1](x))


class Silent(nn.Sequential):
    def forward(self, x):
        return type(super().forward(x)).__name__


def in_a_row(block, count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(count)))


def needed(module, **given):
    """What even the lightest plan takes."""
    with pytest.raises(Infeasible) as caught:
        plan(module, X, 1, measure=False, **given)
    return caught.value.needed_bytes


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        (Stack, ["parts.0", "parts.1", "parts.2", "parts.3"]),
        (Layer, ["attention", "feed_forward"]),
    ],
)
@pytest.mark.parametrize("measure", [True, False])
def test_blocks_within_blocks_fit_where_the_outer_ones_do_not(block, parts, measure):
    module = in_a_row(block)
    assert repeated_blocks(module) == ["0", "1", "2"]
    coarse, finer = needed(module, blocks="?"), needed(module)
    assert finer < 0.9 * coarse
    planned = plan(module, X, finer, measure=measure)
    assert planned.measured_bytes <= finer
    assert list(planned.modes) == [f"{i}.{part}" for i in range(3) for part in parts]
    with pytest.raises(Infeasible):
        plan(module, X, finer, blocks="?", measure=measure)
    expected = gradients(module, X)
    planned.apply(module)
    assert_equal_tensors(gradients(module, X), expected)


def test_blocks_within_blocks_are_planned_where_a_step_is_faster():
    module = in_a_row(Stack, 2)
    stored = plan(module, X, "1GB", measure=False).measured_bytes
    budget = int(0.6 * stored)
    coarse = plan(module, X, budget, blocks="?", measure=False)
    finer = plan(module, X, budget, measure=False)
    assert "0.parts.0" in finer.modes
    assert finer.measured_bytes <= budget
    assert finer.seconds < coarse.seconds


@pytest.mark.parametrize("block", [Wide, Shared, Named])
def test_outer_blocks_stay_where_those_within_them_gain_nothing(block):
    module = in_a_row(block)
    least = needed(module, blocks="?")
    assert needed(module) == least
    planned = plan(module, X, least, measure=False)
    assert planned == plan(module, X, least, blocks="?", measure=False)
    assert "recompute" in planned.modes.values()


def test_outer_blocks_stay_where_a_step_is_hardly_faster():
    small = nn.Linear(16, 16), nn.Tanh()
    module = in_a_row(lambda: Stack(plain(6, width=16), nn.Sequential(*small)))
    budget = int(0.8 * plan(module, X, "1GB", measure=False).measured_bytes)
    planned = plan(module, X, budget, measure=False)
    assert list(planned.modes) == ["0", "1", "2"]
    parts = [f"{i}.parts.{j}" for i in range(3) for j in range(2)]
    finer = plan(module, X, budget, blocks=parts, measure=False)
    assert 0.98 * planned.seconds < finer.seconds < planned.seconds


def test_blocks_that_all_store_or_that_the_user_named_are_not_opened(monkeypatch):
    module = in_a_row(Stack)
    least = needed(module, blocks="?")
    monkeypatch.setattr(step, "finer_blocks", None)
    assert list(plan(module, X, "1GB", measure=False).modes) == ["0", "1", "2"]
    planned = plan(module, X, least, blocks="?", measure=False)
    assert list(planned.modes) == ["0", "1", "2"]
    assert "recompute" in planned.modes.values()


def test_layers_of_transformers_have_an_attention_and_a_feed_forward_part():
    _, modules = wavlm()
    module = modules["wav2vec2"]
    names = [name for name in repeated_blocks(module) if "layers" in name]
    assert names[0] == "encoder.layers.0"
    assert finer_blocks(module, names[:1]) == [
        "encoder.layers.0.attention",
        "encoder.layers.0.feed_forward",
    ]
    assert finer_blocks(plain(2), ["0", "1"]) == ["0", "1"]
