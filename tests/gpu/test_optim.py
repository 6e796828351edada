"""Steps with 8-bit states on a GPU: no waiting, few launches, the bits of a CPU's."""

import copy
import math

import pytest
import torch

from speechbrain_rev.optim import build_optimizer
from tests.unit.optim.steps import assert_identical, params_of

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

OPTIONS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True},
    "adam": {"lr": 1e-3, "weight_decay": 1e-4},
    "adamw": {"lr": 1e-3, "weight_decay": 0.05},
}
FORMS = [{}, {"block": 2048, "pack_small": True}]
SHAPES = [(70, 70), (64, 16, 3, 3), (4096,), (9,), (300, 1000)]


def optimizer_of(name, device, **form):
    """Short last blocks, a channels_last weight, a large one, and one too small."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=draw) for shape in SHAPES]
    tensors[1] = tensors[1].to(memory_format=torch.channels_last)
    weights = [torch.nn.Parameter(tensor.to(device)) for tensor in tensors]
    return build_optimizer(weights, name=name, bits=8, **OPTIONS[name], **form)


def set_gradients(optimizer, seed):
    """Magnitudes over six decades, some zeros among them, and a block of zeros."""
    draw = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        scale = 10 ** -(6 * torch.rand(param.shape, generator=draw))
        grad = scale * torch.randn(param.shape, generator=draw)
        grad.view(-1)[256:512] = 0
        grad.view(-1)[::17] = 0
        param.grad = torch.empty_like(param).copy_(grad)


def on_cpu(optimizer):
    return [
        {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for state in optimizer.state_dict()["state"].values()
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_gpu_steps_as_a_cpu_does_and_checkpoints_go_both_ways(name, form):
    there, here = (optimizer_of(name, device, **form) for device in (DEVICE, "cpu"))
    for seed in range(4):
        for optimizer in (there, here):
            set_gradients(optimizer, seed)
            optimizer.step()
        # Corrections of Adam's bias are powers of doubles, which both compute.
        assert_identical(
            [p.detach().cpu() for p in params_of(there)],
            [p.detach() for p in params_of(here)],
        )
        assert_identical(on_cpu(there), on_cpu(here))
        here.load_state_dict(there.state_dict())
        there.load_state_dict(here.state_dict())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_step_waits_for_nothing_whatever_the_gradient(name, form, bad):
    optimizer = optimizer_of(name, DEVICE, **form)
    for seed in range(2):
        set_gradients(optimizer, seed)
        optimizer.step()
    before = copy.deepcopy([on_cpu(optimizer), params_of(optimizer)])
    if bad is not None:
        params_of(optimizer)[4].grad.view(-1)[-1] = bad
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same = str([on_cpu(optimizer), params_of(optimizer)]) == str(before)
    assert same == (bad is not None)
    assert optimizer.skipped_steps == (bad is not None)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_scaler_decides_without_waiting(name):
    optimizer = optimizer_of(name, DEVICE)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    for factor in (1.0, math.inf, 1.0):
        before = copy.deepcopy(params_of(optimizer))
        optimizer.zero_grad()
        loss = sum((weight * factor).sum() for weight in params_of(optimizer))
        scaler.scale(loss).backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()
        pairs = zip(params_of(optimizer), before, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == math.isinf(factor)
