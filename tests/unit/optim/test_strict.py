"""Steps of the 8-bit optimizers: their arithmetic, layouts, and what is not finite."""

import copy
import math

import pytest
import torch

from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.optim.checkpoint import STATES_OF_TORCH
from tests.unit.optim.steps import (
    DEVICES,
    NAMES,
    assert_identical,
    decoded,
    excess_error,
    parameter,
    step,
)

# A quotient of two float32 numbers is off by so much of the largest of its block.
ROUNDING = 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_tensors_kept_at_32_bit_follow_torchs_trajectory(name, device):
    options = {
        "lr": 0.01,
        "momentum": 0.8,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.0 if name == "adam" else 0.1,
    }
    ours, theirs = (
        [parameter(70, 70, device=device), parameter(30, seed=1, device=device)]
        for _ in range(2)
    )
    eight = build_optimizer(ours, name=name, bits=8, keep_32bit=ours[0], **options)
    plain = build_optimizer(theirs, name=name, bits=32, **options)
    for seed in range(10):
        step(eight, seed)
        step(plain, seed)
    # Both compute in float32 and round a value of up to 4 in some ten places a step.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def library_too(optimizer, route, monkeypatch):
    """Let the library step where it is to: on a CPU it has kernels as well."""
    if route == "library":
        monkeypatch.setattr(type(optimizer), "_by_reference", lambda *_: False)


@pytest.mark.parametrize("route", ["reference", "library"])
@pytest.mark.parametrize("device", DEVICES)
def test_no_second_moment_is_stored_as_zero(device, route, monkeypatch):
    weight = parameter(70, 70, device=device)
    optimizer = build_optimizer([weight], name="adamw", bits=8, lr=0.1)
    library_too(optimizer, route, monkeypatch)
    weight.grad = torch.full_like(weight, 1e-5)
    weight.grad[0, 0] = 1.0
    optimizer.step()
    state = optimizer.state[weight]
    assert state["state2"].min() >= 1
    # Nor is one that was stored by others.
    state["state2"].zero_()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[weight]["state2"].min() == 1


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_second_moment_too_small_for_its_block_makes_no_step_longer(name):
    """Read back as zero it would leave eps alone below the first moment."""
    weights = [parameter(64, 64) for _ in range(2)]
    pair = [
        build_optimizer([weight], name=name, bits=bits, lr=0.1)
        for weight, bits in zip(weights, (8, 32), strict=True)
    ]
    small = torch.full((64, 64), 1e-4)
    # Squares of the others are 1e-8 of the largest one's in its block.
    small[0, 0] = 1.0
    for gradient in (small, small, 0 * small):
        before = [weight.detach().clone() for weight in weights]
        for weight, optimizer in zip(weights, pair, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
        ours, theirs = (
            (weight.detach() - old).abs()
            for weight, old in zip(weights, before, strict=True)
        )
        # First moments are off by up to an eighth where they are 1e-4 of the largest.
        assert (ours <= 1.125 * theirs).all()
        # Second ones are 3.25e-7 of the largest instead of 1e-8; the root is 5.7 times.
        assert (ours[0, 1:4] > theirs[0, 1:4] / (5.7 * 1.125 * 1.01)).all()


def test_the_librarys_table_for_the_process_has_no_say():
    import bitsandbytes

    weight = parameter(64, 64)
    table = bitsandbytes.optim.GlobalOptimManager.get_instance()
    table.override_config(weight, key_value_dict={"optim_bits": 32, "lr": 100.0})
    try:
        optimizer = build_optimizer([weight], name="sgd", bits=8, lr=0.0)
        before = weight.detach().clone()
        step(optimizer)
    finally:
        del table.pid2config[id(weight)]
    assert optimizer.state[weight]["state1"].dtype == torch.uint8
    assert torch.equal(weight, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [True, False])
def test_channels_last_weights_stay_in_place_and_have_the_bits_of_contiguous_ones(
    name, keep, device
):
    plain = parameter(64, 16, 3, 3, device=device)
    moved = torch.nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    strides, place = moved.stride(), moved.data_ptr()
    optimizers = [
        build_optimizer([p], name=name, bits=8, lr=0.1, keep_32bit=[p] if keep else [])
        for p in (plain, moved)
    ]
    for seed in range(3):
        for optimizer in optimizers:
            step(optimizer, seed)
    assert moved.stride() == strides
    assert moved.grad.stride() == strides
    assert moved.data_ptr() == place
    assert torch.equal(moved, plain)
    # States have one order, so that a checkpoint serves either memory format.
    assert optimizers[1].state[moved]["state1"].is_contiguous()
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    for optimizer in optimizers:
        step(optimizer, seed=9)
    assert torch.equal(moved, plain)


def weights_after(optimizer, grads):
    (weight,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_a_step_is_torchs_own_from_the_moments_that_were_stored(name):
    options = {"name": name, "lr": 0.1, "weight_decay": 0.0 if name == "adam" else 0.1}
    grads = torch.randn(5, 70, 70, generator=torch.Generator().manual_seed(0))
    eight = build_optimizer([parameter(70, 70)], bits=8, **options)
    before = weights_after(eight, grads[:4]).clone()
    state = copy.deepcopy(next(iter(eight.state.values())))
    plain = build_optimizer([torch.nn.Parameter(before)], bits=32, **options)
    (weight,) = plain.param_groups[0]["params"]
    if name == "sgd":
        plain.state[weight] = {"momentum_buffer": decoded(state, 1)}
    else:
        plain.state[weight] = {
            "step": torch.tensor(4.0),
            "exp_avg": decoded(state, 1),
            "exp_avg_sq": decoded(state, 2),
        }
    assert torch.equal(weights_after(eight, grads[4:]), weights_after(plain, grads[4:]))
    (ours,), (theirs,) = eight.state.values(), plain.state.values()
    for number, key in enumerate(STATES_OF_TORCH[name], 1):
        assert excess_error(ours, number, theirs[key]) <= ROUNDING


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_weights_without_a_gradient_do_not_drift(name, device):
    weight, alone = (parameter(70, 70, device=device) for _ in range(2))
    before = weight.detach().clone()
    optimizer = build_optimizer([weight, alone], name=name, bits=8, lr=0.1)
    # A whole block, and every third value of the others.
    still = torch.zeros(70, 70, dtype=torch.bool)
    still.view(-1)[256:512] = True
    still.view(-1)[::3] = True
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        grad = torch.randn(70, 70, generator=generator).masked_fill(still, 0.0)
        weight.grad = grad.to(device)
        optimizer.step()
    assert torch.equal(weight == before, still.to(device))
    assert torch.equal(alone, before)
    assert alone not in optimizer.state


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_layout_of_states_is_the_librarys(name):
    import bitsandbytes

    library_class = {"sgd": bitsandbytes.optim.SGD, "adamw": bitsandbytes.optim.AdamW}
    weights = [parameter(70, 70), parameter(70, 70)]
    ours = build_optimizer(weights[:1], name=name, bits=8, lr=0.1)
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    theirs = library_class[name](weights[1:], lr=0.1, optim_bits=8, **momentum)
    step(ours)
    step(theirs)
    state, expected = ours.state[weights[0]], theirs.state[weights[1]]
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert state[key] == value
            continue
        assert (state[key].dtype, state[key].shape) == (value.dtype, value.shape)
        if key.startswith("qmap"):
            assert torch.equal(state[key], value)


@pytest.mark.parametrize("route", ["reference", "library"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(("bad", "position"), [(math.nan, 300), (-math.inf, 4899)])
def test_a_gradient_that_is_not_finite_makes_its_block_nan_for_good(
    name, bad, position, device, route, monkeypatch
):
    def outcome(bad, steps):
        weight = parameter(70, 70, device=device)
        optimizer = build_optimizer([weight], name=name, bits=8, lr=0.1)
        library_too(optimizer, route, monkeypatch)
        grads = torch.randn(steps, 70, 70, generator=torch.Generator().manual_seed(0))
        if bad is not None:
            grads[0].view(-1)[position] = bad
        weights_after(optimizer, grads.to(device))
        return weight.detach(), optimizer.state[weight]

    block = (torch.arange(4900) // 256 == position // 256).view(70, 70).to(device)
    for steps in (1, 3):
        clean_weight, clean = outcome(None, steps)
        weight, state = outcome(bad, steps)
        for number in (1, 2) if name == "adamw" else (1,):
            moment, clean_moment = decoded(state, number), decoded(clean, number)
            assert moment[block].isnan().all()
            assert torch.equal(moment[~block], clean_moment[~block])
        assert torch.equal(weight[~block], clean_weight[~block])
    assert weight[block].isnan().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_the_loss_scaler_skips_leaves_everything_untouched(name, device):
    weights = [parameter(70, 70, device=device), parameter(9, device=device)]
    optimizer = build_optimizer(weights, name=name, bits=8, lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)

    def scaled_step(factor):
        optimizer.zero_grad()
        loss = sum((weight * factor).sum() for weight in weights)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    scaled_step(1.0)
    before = copy.deepcopy([optimizer.state_dict(), weights])
    scaled_step(math.inf)
    assert scaler.get_scale() == 2.0
    assert_identical([optimizer.state_dict(), weights], before)
    scaled_step(1.0)
    for weight, then in zip(weights, before[1], strict=True):
        assert weight.isfinite().all()
        assert (weight != then).all()


@pytest.mark.parametrize("by_closure", [False, True])
def test_a_sparse_gradient_is_refused_before_anything_is_changed(by_closure):
    dense, sparse = parameter(64, 64), parameter(64, 64)
    optimizer = build_optimizer([dense, sparse], name="adamw", bits=8, lr=0.1)
    step(optimizer)
    optimizer.zero_grad()
    before = copy.deepcopy([optimizer.state_dict(), dense, sparse])

    def set_gradients():
        dense.grad = torch.ones(64, 64)
        sparse.grad = torch.eye(64).to_sparse()

    if not by_closure:
        set_gradients()
    with pytest.raises(ValueError, match=r"params\[1\].*sparse.*with sparse=False"):
        optimizer.step(set_gradients if by_closure else None)
    assert_identical([optimizer.state_dict(), dense, sparse], before)


def test_a_closure_is_called_once_with_gradients_and_its_loss_returned():
    weight = parameter(64, 64)
    optimizer = build_optimizer([weight], name="sgd", bits=8, lr=0.1)
    losses = []

    def closure():
        losses.append(weight.sum())
        losses[-1].backward()
        return losses[-1]

    before = weight.detach().clone()
    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert torch.equal(weight, before - 0.1)
