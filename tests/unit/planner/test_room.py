"""What is timed fits into what is free."""

import pytest
import torch

from speechbrain_rev import devices
from speechbrain_rev.planner.room import SHARE, batch_that_fits, is_out_of_memory

CARD = torch.device("cuda")


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
    assert batch_that_fits(lambda count: 1000 * count, 64, CARD) == batch


def test_odd_batches_come_to_one(free):
    free(1250)
    asked = []

    def stored_bytes(count):
        asked.append(count)
        return 1000 * count

    assert batch_that_fits(stored_bytes, 7, CARD) == 1
    assert asked == [7, 3, 1]


def test_what_is_no_card_is_not_asked():
    assert batch_that_fits(lambda count: 10**15, 64, torch.device("cpu")) == 64


def test_where_not_even_one_fits_it_is_said(free):
    free(1200)
    with pytest.raises(MemoryError, match=r"one sample .* 1000 bytes, and 1200 bytes"):
        batch_that_fits(lambda count: 1000 * count, 8, CARD)


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
def test_memory_that_ran_out_is_told_from_other_errors(error, is_one):
    assert is_out_of_memory(error) is is_one
