"""The kernels of the exact streams on a CUDA device: the references' bits."""

import pytest
import torch

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.reversible import fixed_point as reference
from speechbrain_rev.reversible.streams import FORMATS
from tests.unit.kernels.same_as_reference import (
    FLOATS,
    STEPS,
    SameAsReference,
    assert_same,
    notes,
    steps,
)
from tests.unit.reversible import chains

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class TestOnCuda(SameAsReference):
    device = "cuda"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_are_used(dtype, monkeypatch):
    launched = []
    launch = kernels._launch
    monkeypatch.setattr(
        kernels, "_launch", lambda *x, **s: launched.append(1) or launch(*x, **s)
    )
    assert kernels.usable(torch.device("cuda", 0), dtype)
    launched.clear()
    exact, f = FORMATS["exact"], torch.randn(9, device="cuda").to(dtype)
    value = exact.encode(f, None)
    exact.subtract(exact.add(value, [f], None, out=value), f, out=value)
    exact.subtract(exact.add(value, [f], None), f)
    assert len(launched) == 5


@pytest.mark.parametrize("precision", ["FLOAT32", "BF16", "FP16"])
@pytest.mark.parametrize("mode", chains.MODES)
def test_training_gives_the_same_bits_as_without_kernels(mode, precision, monkeypatch):
    precision = chains.replace(getattr(chains, precision), device="cuda")
    results = []
    for usable in (True, False):
        if not usable:
            monkeypatch.setattr(kernels, "usable", lambda *_: False)
        chain = chains.chain_of("basic", 3, mode=mode, dtype=torch.float32).cuda()
        inputs = [x.detach().cuda() for x in chains.streams(torch.float32)]
        outputs, grads, _ = chains.step(chain, inputs, precision)
        results.append([*outputs, *grads.values()])
        chain.check_streams()
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_nothing_waits_for_the_device():
    exact, largest = FORMATS["exact"], torch.zeros(2, device="cuda")
    f = torch.randn(4, 6, device="cuda")
    kernels.usable(f.device, f.dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        value = exact.encode(f, largest)
        exact.subtract(exact.add(value, [f], largest, out=value), f, out=value)
        exact.decode(value, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_in_place_no_memory_is_taken_beside():
    exact, largest = FORMATS["exact"], torch.zeros(2, device="cuda")
    f = torch.randn(2**22, device="cuda", dtype=torch.bfloat16)
    value = exact.encode(f, largest)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    exact.subtract(exact.add(value, [f], largest, out=value), f, out=value)
    assert torch.cuda.max_memory_allocated() == before


def test_more_elements_than_an_int32_counts():
    size = 2**31 + 5
    needed = 24 * 2**30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"less than {needed} bytes are free")
    f = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    f[-1], f[0] = -3.0, 2.0
    largest = torch.zeros(2, device="cuda")
    value = kernels.encode(f, STEPS, largest)
    assert value[[0, -1]].tolist() == [2 * STEPS, -3 * STEPS]
    assert int(value.count_nonzero()) == 2
    assert largest.tolist() == [3.0, 3.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_need_not_be_on_the_current_device():
    value, f, largest = (x.to("cuda:1") for x in (steps(9), torch.randn(9), notes()))
    expected = reference.add(value, [f], STEPS, None, None)
    assert_same(kernels.add(value, [f], STEPS, largest, None), expected)
    assert torch.cuda.current_device() == 0
