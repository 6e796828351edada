"""bitsandbytes' CUDA kernels against the reference quantiser, which computes on a CPU."""

import math

import pytest
import torch

from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.optim.reference import dequantise, dynamic_tree, quantise
from speechbrain_rev.optim.strict import nan_or_zero
from tests.unit.optim.steps import assert_identical, decoded, excess_error

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

OPTIONS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    "adam": {"lr": 1e-3},
    "adamw": {"lr": 1e-3, "weight_decay": 0.05},
}
BETA1, BETA2 = 0.9, 0.999
# A sum of two products and a quotient in float32, over the largest of the block. Small
# negative values get the code below that of zero, 5.5e-7 off.
FIRST_MOMENT = 1e-6
# The kernels subtract from 1 a beta2 that is rounded to float32, which is off by 2^-25 at
# most, from the difference 0.001; sums, products and the quotient are as above.
SECOND_MOMENT = 2**-25 / (1 - BETA2) + 1e-6
# The bias corrections come from __powf, that is 2^(t * log2(beta)) with a log2 off by
# 2^-22: relative to 1 - beta2^t at most 1.7e-4, half of it after the root, to which come
# the beta2 of above and the kernels' approximate quotients.
UPDATE = 2e-4


def parameters(device):
    """Short last blocks, a channels_last weight, and one too small for 8 bit."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(70, 70), (64, 16, 3, 3), (4096,), (9,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[1] = tensors[1].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(tensor.to(device)) for tensor in tensors]


def gradients(seed):
    """Magnitudes over six decades, some zeros among them, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for param in parameters("cpu"):
        scale = 10 ** -(6 * torch.rand(param.shape, generator=generator))
        grad = scale * torch.randn(param.shape, generator=generator)
        grad.view(-1)[256:512] = 0
        grad.view(-1)[::17] = 0
        grads.append(torch.empty_like(param).copy_(grad))
    return grads


def step(optimizer, seed):
    (group,) = optimizer.param_groups
    for param, grad in zip(group["params"], gradients(seed), strict=True):
        param.grad = grad.to(param.device)
    optimizer.step()


def on_cpu(state):
    return {
        key: value.cpu().clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_of_the_codes_have_the_same_bits(signed):
    from bitsandbytes.functional import create_dynamic_map

    assert torch.equal(dynamic_tree(signed=signed), create_dynamic_map(signed=signed))
    number = 1 if signed else 2
    optimizer = build_optimizer(parameters(DEVICE), name="adamw", bits=8, lr=1e-3)
    step(optimizer, 0)
    for param in optimizer.param_groups[0]["params"][:3]:
        values = optimizer.state[param][f"qmap{number}"]
        assert values.device.type == DEVICE
        assert torch.equal(values.cpu(), dynamic_tree(signed=signed))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block_size", [256, 2048])
def test_the_reference_has_the_same_bits_on_both_devices(signed, block_size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**20 + 777, generator=generator)
    x = x * 10 ** -(8 * torch.rand(x.shape, generator=generator))
    x = x if signed else x.abs()
    x[5000], x[9000] = math.nan, math.inf
    options = {"block_size": block_size, "signed": signed}
    codes, absmax = quantise(x, **options)
    device_codes, device_absmax = quantise(x.to(DEVICE), **options)
    torch.testing.assert_close(
        device_absmax.cpu(), absmax, rtol=0, atol=0, equal_nan=True
    )
    finite = dequantise(codes, absmax, **options).isfinite()
    assert torch.equal(device_codes.cpu()[finite], codes[finite])
    read = dequantise(device_codes, device_absmax, **options).cpu()
    expected = dequantise(codes, absmax, **options)
    torch.testing.assert_close(read, expected, rtol=0, atol=0, equal_nan=True)


def moments_after(name, state, weight, grad):
    """The moments after a step from a state, in float64."""
    grad = grad.double()
    old = [decoded(state, n).double() for n in (1, 2) if f"state{n}" in state]
    if name == "sgd":
        return [0.9 * old[0] + grad + 1e-4 * weight.double()]
    first = BETA1 * old[0] + (1 - BETA1) * grad
    return [first, BETA2 * old[1] + (1 - BETA2) * grad.square()]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_step_of_the_library_is_the_references(name):
    library = build_optimizer(parameters(DEVICE), name=name, bits=8, **OPTIONS[name])
    reference = build_optimizer(parameters("cpu"), name=name, bits=8, **OPTIONS[name])
    pairs = list(
        zip(
            library.param_groups[0]["params"],
            reference.param_groups[0]["params"],
            strict=True,
        )
    )
    step(library, 0)
    for seed in range(1, 8):
        # Both start each step from what the library left.
        reference.load_state_dict(library.state_dict())
        for ours, theirs in zip(pairs, gradients(seed), strict=True):
            ours[1].data.copy_(ours[0].data)
            assert theirs.stride() == ours[0].stride()
        before = [theirs.detach().clone() for _, theirs in pairs]
        states = [on_cpu(library.state[param]) for param, _ in pairs]
        step(library, seed)
        step(reference, seed)
        for (param, twin), old, start, grad in zip(
            pairs, states, before, gradients(seed), strict=True
        ):
            decay = OPTIONS[name].get("weight_decay", 0) if name != "sgd" else 0
            decayed = start * (1 - OPTIONS[name]["lr"] * decay)
            update = (twin.detach() - decayed).abs()
            apart = (param.detach().cpu() - twin.detach()).abs()
            # Where moments cancel, the error is that of what was added.
            rounding = 1e-5 * OPTIONS[name]["lr"] + 2**-22 * start.abs()
            assert (apart <= UPDATE * update + rounding).all()
            if param.numel() < 4096:
                continue
            moments = moments_after(name, old, start, grad)
            state, expected = on_cpu(library.state[param]), reference.state[twin]
            for number, moment in enumerate(moments, 1):
                tolerance = FIRST_MOMENT if number == 1 else SECOND_MOMENT
                # The library's code is the nearest, or as good as midway to it.
                excess = excess_error(state, number, moment, rtol=tolerance)
                assert excess <= 2 * tolerance
                codes, nearest = state[f"state{number}"], expected[f"state{number}"]
                used = (expected[f"absmax{number}"] > 0).repeat_interleave(256)
                used = used[: codes.numel()].view_as(codes)
                apart = (codes.int() - nearest.int()).abs()[used]
                assert apart.max() <= 1
                assert (apart > 0).float().mean() < 0.01
                zero = decoded(state, number)[~used]
                assert (zero == 0).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_checkpoints_go_from_cpu_to_cuda_and_back(name):
    reference = build_optimizer(parameters("cpu"), name=name, bits=8, **OPTIONS[name])
    library = build_optimizer(parameters(DEVICE), name=name, bits=8, **OPTIONS[name])
    for seed in range(3):
        step(reference, seed)
    saved = reference.state_dict()
    library.load_state_dict(saved)
    back = build_optimizer(parameters("cpu"), name=name, bits=8, **OPTIONS[name])
    back.load_state_dict(library.state_dict())
    assert_identical(back.state_dict(), saved)
    for param in library.param_groups[0]["params"]:
        for value in library.state[param].values():
            assert not isinstance(value, torch.Tensor) or value.device.type == DEVICE
    step(library, 3)
    back.load_state_dict(library.state_dict())
    step(back, 4)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_without_waiting_for_the_device(name, bad):
    optimizer = build_optimizer(parameters(DEVICE), name=name, bits=8, **OPTIONS[name])
    step(optimizer, 0)
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad.view(-1)[4899] = bad
    state = optimizer.state[weight]
    state["absmax1"][2] = math.nan
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        summands = nan_or_zero(weight.grad, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = {
        name: stain.isnan().nonzero().flatten().tolist()
        for name, stain in summands.items()
    }
    expected = {"absmax1": [2, 19], "absmax2": [19]}
    assert found == {key: expected[key] for key in expected if key in state}
    assert all((stain.nan_to_num() == 0).all() for stain in summands.values())
