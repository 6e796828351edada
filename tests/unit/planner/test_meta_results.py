"""Operations on meta tensors give, when they are recalled, what they gave when they ran."""

import pytest
import torch
from torch import nn

from speechbrain_rev.planner import memory
from speechbrain_rev.planner.memory import LiveBytes


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


CASES = {
    "new": lambda: [meta(2, 3) + meta(3), meta(2, 3) @ meta(3, 4)],
    "number": lambda: [
        meta(3, dtype=torch.int32) + 1,
        meta(3, dtype=torch.int32) + 1.0,
    ],
    "strides": lambda: [meta(4, 3, 2).transpose(0, 2) * 2, meta(2, 3, 4) * 2],
    "view": lambda: [meta(4, 6).view(3, 8), meta(4, 6).t(), meta(4)[1:]],
    "in place": lambda: [meta(5).add_(1), meta(4, 1).squeeze_(1).unsqueeze_(0)],
    "resized": lambda: [meta(0).resize_(7), meta(3).resize_(3)],
    "several": lambda: [*meta(2, 6).split(2, 1), *torch.var_mean(meta(2, 6), 1)],
    "maybe itself": lambda: [meta(3).contiguous(), meta(3).to(torch.float32)],
    "convolution": lambda: [torch.conv2d(meta(2, 3, 8, 8), meta(5, 3, 3, 3))],
}


def looks(tensors):
    return [
        (x.shape, x.stride(), x.dtype, x.storage_offset(), x.untyped_storage().nbytes())
        for x in tensors
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_recalled_looks_like_what_was_computed(case, monkeypatch):
    plain = looks(case())
    monkeypatch.setattr(memory, "_RESULTS", {})
    meters = []
    for _ in range(3):
        with LiveBytes() as meter:
            found = case()
            assert looks(found) == plain
        meters.append((meter.live, meter.peak))
        del found
    assert len(set(meters)) == 1


def test_tensors_that_share_memory_share_it_when_they_are_recalled():
    for _ in range(2):
        with LiveBytes():
            x = meta(4)
            assert x.add_(1) is x
            assert x.view(2, 2).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (x + 1).untyped_storage()._cdata != x.untyped_storage()._cdata


def test_a_training_step_is_counted_alike_and_runs_few_kernels_again(monkeypatch):
    monkeypatch.setattr(memory, "_RESULTS", {})
    with torch.device("meta"):
        layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU())
        x = torch.randn(2, 3, 8, 8)
    ran, key = [], memory._shapes
    monkeypatch.setattr(memory, "_shapes", lambda *a: ran.append(a[0]) or key(*a))
    peaks, counts = [], []
    for _ in range(2):
        layers.zero_grad()
        with LiveBytes() as meter:
            layers(x).square().sum().backward()
        peaks.append(meter.peak)
        counts.append(len(ran))
    assert peaks[0] == peaks[1]
    assert counts[0] == counts[1] > 5
    assert all(p.grad.shape == p.shape for p in layers.parameters())


def test_arguments_of_real_tensors_are_computed_each_time():
    x = torch.ones(3)
    for number in (1, 2):
        with LiveBytes():
            y = x * number
        assert y.tolist() == [number] * 3
        x.fill_(1)
