"""The kernels of batch normalisation on a CUDA device: the reference's bits and sums."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from speechbrain_rev.kernels import norm as kernels
from speechbrain_rev.reversible import norm as reference
from tests.unit.kernels.process import with_nan
from tests.unit.kernels.same_norm import FLOATS, LAYOUTS, SameNorm, distance, given
from tests.unit.reversible import chains

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def moved(given, device):
    return tree_map_only(torch.Tensor, lambda x: x.to(device), given)


class TestOnCuda(SameNorm):
    scale = 10

    def run(self, function, *arguments):
        return moved(with_nan(function, *moved(arguments, "cuda")), "cpu")


def without_kernels(monkeypatch):
    monkeypatch.setattr(reference, "_has_kernels", lambda x: False)


def step(norm, x, grad):
    """Output and gradients of a step, and what it took at its peak."""
    norm.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = x.detach().requires_grad_()
    y = norm(x)
    y.backward(grad)
    peak = torch.cuda.max_memory_allocated() - before
    return [y.detach(), x.grad, norm.weight.grad, norm.bias.grad], peak


def layer(channels, *, relu=True):
    torch.manual_seed(0)
    norm = reference.BatchNorm(channels, relu=relu)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    return norm.cuda()


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_steps_are_torchs_and_take_no_more_memory(dtype, layout, relu, monkeypatch):
    norm = layer(8, relu=relu)
    x, grad, _ = moved(given((8, 8, 20, 30), dtype, layout), "cuda")
    assert norm._is_fused(x, None)
    step(norm, x, grad)
    (ours, peak), again = step(norm, x, grad), step(norm, x, grad)[0]
    assert all(map(torch.equal, ours, again))
    without_kernels(monkeypatch)
    theirs, plain_peak = step(norm, x, grad)
    # Partial sums are small beside a map.
    assert peak <= plain_peak + x.nbytes // 20
    exact, _ = step(norm.double(), x.double(), grad.double())
    for own, plain, best in zip(ours, theirs, exact, strict=True):
        rounding = torch.finfo(own.dtype).eps * float(best.norm())
        assert distance(own, best) <= max(2 * distance(plain, best), rounding)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_do_not_depend_on_addresses(dtype, layout):
    x, grad, vectors = moved(given((6, 16, 32, 64), dtype, layout), "cuda")

    def bits(*offsets):
        tensors = [
            x.new_empty(x.numel() + offset)[offset:].as_strided(x.shape, x.stride())
            for x, offset in zip((x, grad), offsets, strict=True)
        ]
        tensors = [a.copy_(b) for a, b in zip(tensors, (x, grad), strict=True)]
        y = torch.empty_like(x)
        kernels.normalise(y, tensors[0], *vectors, relu=True)
        given = tensors[1], tensors[0], None, *vectors
        return y, *kernels.normalise_backward(*given, relu=True)

    expected = bits(0, 0)
    for offsets in ((1, 0), (0, 1), (3, 5)):
        assert all(map(torch.equal, bits(*offsets), expected))


@pytest.mark.parametrize("precision", ["FLOAT32", "BF16", "FP16"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_training_gives_the_same_bits_in_all_modes(precision, chunk, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    launched, launch = [], kernels._launch
    monkeypatch.setattr(
        kernels, "_launch", lambda *x, **s: launched.append(1) or launch(*x, **s)
    )
    precision = replace(getattr(chains, precision), device="cuda")
    results = []
    for mode in chains.MODES:
        settings = {"mode": mode, "dtype": torch.float32, "chunk": chunk}
        chain = chains.chain_of("bottleneck", 3, **settings).cuda()
        inputs = [x.detach().cuda() for x in chains.streams(torch.float32)]
        launched.clear()
        outputs, grads, buffers = chains.step(chain, inputs, precision)
        assert launched
        results.append([*outputs, *grads.values(), *buffers.values()])
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))


def test_nothing_waits_for_the_device():
    x, grad, vectors = moved(given((2, 5, 6, 7)), "cuda")
    kernels.usable(x.device, x.dtype)
    y = torch.empty_like(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.normalise(y, x, *vectors, relu=True)
        kernels.normalise_backward(grad, x, None, *vectors, relu=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_elements_than_an_int32_counts():
    needed = 16 * 2**30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"less than {needed} bytes are free")
    x = torch.zeros(2**15 + 1, 2, 2**7, 2**8, dtype=torch.bfloat16, device="cuda")
    x[-1, -1, -1, -1] = 3.0
    y = torch.empty_like(x)
    one, zero = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    kernels.normalise(y, x, one, zero, zero, one, relu=True)
    assert int(y.count_nonzero()) == 1
    assert y[-1, -1, -1, -1] == 3
