"""A self-test on a CUDA device: equal bits, and a peak that the allocator reports."""

import dataclasses

import pytest
import torch

from speechbrain_rev.training.step_comparison import self_test
from tests.unit.training.test_step_comparison import BATCH, Trained, stores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)


def on_cuda(change=lambda *_: None, **settings):
    step = dataclasses.replace(Trained(**settings).step(), device=CUDA)
    return self_test(step, lambda: Trained(change, device=CUDA, **settings).fresh())


@pytest.mark.parametrize("mode", ["reconstruct", "recompute"])
def test_steps_have_the_bits_of_stored_ones_and_an_allocated_peak(mode):
    report = on_cuda(mode=mode)
    assert report.agrees, report.text()
    assert report.measured == "allocated"
    assert all(run.measured_bytes > 0 for run in report.runs)
    assert "cuDNN" in report.text()


def test_memory_that_runs_out_on_the_device_halves_the_batch():
    def full(training, number, batch):
        del number
        if stores(training) and batch == BATCH:
            torch.empty(2**50, device=CUDA)

    report = on_cuda(full)
    assert [run.batch for run in report.runs] == [BATCH // 2, BATCH // 2, BATCH]
    assert report.agrees, report.text()
