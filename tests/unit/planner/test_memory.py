"""What a step holds, what a machine has left, and what fits into it."""

import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speechbrain_rev import devices
from speechbrain_rev.planner import memory
from speechbrain_rev.planner.memory import (
    SHARE,
    LiveBytes,
    batch_that_fits,
    fits_device,
    is_out_of_memory,
    live_bytes_peak,
)

BYTES = 4
GPU = torch.device("cuda")


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


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files of a machine; those that are not written are not there."""
    for name in ("_MEMINFO", "_LIMIT", "_TAKEN", "_TAKEN_BY"):
        monkeypatch.setattr(memory, name, tmp_path / name)

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(text)

    return write


MEMINFO = "MemTotal:       16000 kB\nMemAvailable:    9000 kB\nMemFree: 10 kB\n"


def test_linux_says_what_is_available(files):
    files(_MEMINFO=MEMINFO)
    assert memory.available_ram_bytes() == 9000 * 1024


@pytest.mark.parametrize(
    ("limit", "left"),
    [("max", 9000 * 1024), ("5000000", 3_500_000), ("1000000", 0), ("10" * 6, 9216000)],
)
def test_a_container_may_have_less(files, limit, left):
    files(_MEMINFO=MEMINFO, _LIMIT=f"{limit}\n", _TAKEN="2000000\n")
    files(_TAKEN_BY="active_file 7\ninactive_file 500000\n")
    assert memory.available_ram_bytes() == left


def test_other_systems_say_what_is_free_or_nothing(files, monkeypatch):
    sizes = {"SC_AVPHYS_PAGES": 30, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert memory.available_ram_bytes() == 30 * 4096
    monkeypatch.delattr(os, "sysconf")
    assert memory.available_ram_bytes() is None


@pytest.fixture
def free(monkeypatch):
    def give(size_bytes):
        monkeypatch.setattr(devices, "free_bytes", lambda device: size_bytes)

    return give


@pytest.mark.parametrize(
    ("free_bytes", "batch"),
    [(10**6, 64), (64_000 / SHARE, 64), (64_000, 32), (1250, 1)],
)
def test_a_batch_is_halved_until_storing_everything_fits(free, free_bytes, batch):
    free(free_bytes)
    assert batch_that_fits(lambda count: 1000 * count, 64, GPU) == batch


def test_odd_batches_come_to_one(free):
    free(1250)
    asked = []

    def stored_bytes(count):
        asked.append(count)
        return 1000 * count

    assert batch_that_fits(stored_bytes, 7, GPU) == 1
    assert asked == [7, 3, 1]


def test_on_a_cpu_the_machine_s_memory_counts_and_on_meta_none(monkeypatch):
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: 64_000)
    count = lambda count: 1000 * count  # noqa: E731
    assert batch_that_fits(count, 64, torch.device("cpu")) == 32
    assert batch_that_fits(count, 64, torch.device("meta")) == 64


def test_where_not_even_one_sample_fits_it_is_an_error(free):
    free(1200)
    with pytest.raises(
        MemoryError, match=r"one sample on cuda .* 1000 bytes, and 1200 bytes .*the GPU"
    ):
        batch_that_fits(lambda count: 1000 * count, 8, GPU)


def test_a_step_fits_unless_it_is_known_not_to(free, monkeypatch):
    free(1000)
    assert fits_device(int(SHARE * 1000), GPU)
    assert not fits_device(int(SHARE * 1000) + 1, GPU)
    free(None)
    assert fits_device(10**15, GPU)
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: None)
    assert fits_device(10**15, torch.device("cpu"))


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("Expected 4 channels"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_memory_that_ran_out_is_not_taken_for_another_error(error, is_one):
    assert is_out_of_memory(error) is is_one
