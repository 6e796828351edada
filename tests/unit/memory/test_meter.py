import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.memory import LiveBytes, live_bytes_peak

BYTES = 4


def test_views_and_in_place_changes_count_once():
    def step():
        x = torch.zeros(10, 10)
        x.add_(1)
        return x.t()[2:], x.view(100)

    assert live_bytes_peak(step) == 100 * BYTES


def test_tensors_that_existed_before_do_not_count():
    x = torch.zeros(1000)
    assert live_bytes_peak(lambda: x.mul_(2).view(10, 100)) == 0


def test_freed_storages_are_counted_off():
    with LiveBytes() as meter:
        kept = torch.zeros(100)
        for _ in range(5):
            torch.zeros(1000)
        assert meter.live == 100 * BYTES
        assert meter.peak == 1100 * BYTES
        del kept
        assert meter.live == 0


def test_a_linear_layer_holds_what_its_formula_says():
    layer = nn.Linear(32, 64, bias=False)
    x = torch.zeros(8, 32)

    def step():
        layer(x).sum().backward()

    # The output and its gradient's expansion of one number, then the weight's gradient.
    output, loss, weight = 8 * 64 * BYTES, BYTES, 32 * 64 * BYTES
    assert weight <= live_bytes_peak(step) <= output + 3 * loss + 2 * weight


def test_backward_is_seen_and_checkpointing_shows():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(8)]
    for layer in layers:
        layer.requires_grad_(False)
    x = torch.randn(256, 64, requires_grad=True)

    def stored():
        y = x
        for layer in layers:
            y = layer(y)
        y.sum().backward()

    def recomputed():
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()

    # Two saved outputs of each layer, against one input of each and one layer's two.
    assert live_bytes_peak(recomputed) < 0.65 * live_bytes_peak(stored)
