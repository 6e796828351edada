"""Steps with 8-bit states: their arithmetic, layouts, groups, and what is not finite."""

import copy
import math
from collections import defaultdict

import pytest
import torch

from speechbrain_rev.optim import build_optimizer, state_bytes
from tests.unit.optim.steps import (
    DEVICES,
    NAMES,
    assert_identical,
    parameter,
    params_of,
    states_of,
    step,
)


@pytest.mark.parametrize("device", DEVICES)
def test_no_second_moment_is_stored_as_zero(device):
    weight = parameter(70, 70, device=device)
    optimizer = build_optimizer([weight], name="adamw", bits=8, lr=0.1)
    weight.grad = torch.full_like(weight, 1e-5)
    weight.grad[0, 0] = 1.0
    optimizer.step()
    assert optimizer.state[weight]["state2"].min() >= 1


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
    still = still.to(device)
    assert torch.equal(weight[still], before[still])
    # Lion's steps are of one length, and some weights are back.
    assert (weight != before)[~still].float().mean() > 0.5
    assert torch.equal(alone, before)
    assert alone not in optimizer.state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
# The square of the last one is not finite.
@pytest.mark.parametrize("bad", [math.nan, -math.inf, -2e19])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    name, bad, place, device
):
    weights = [parameter(n, 70, device=device) for n in (70, 60, 2)]
    optimizer = build_optimizer(
        weights, name=name, bits=8, lr=0.1, weight_decay=0.1, pack_small=True
    )
    step(optimizer)
    before = copy.deepcopy([optimizer.state_dict(), weights])
    # Gradients of 1.8e19 have finite squares and are not skipped.
    gradients = [torch.full_like(weight, 1.8e19) for weight in weights]
    gradients[place].view(-1)[-1] = bad
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizer.step()
    assert_identical([optimizer.state_dict(), weights], before)
    assert optimizer.skipped_steps == 1
    step(optimizer)
    assert optimizer.skipped_steps == 1
    assert states_of(optimizer)[0]["step"] == 2
    assert all(
        w.isfinite().all() and (w != b).all()
        for w, b in zip(weights, before[1], strict=True)
    )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("pack", [False, True])
def test_parameters_of_several_groups_train_as_each_alone(name, pack):
    shapes, rates = [(70, 70), (9,), (80, 60), (33,)], [0.1, 0.01]
    options = {"name": name, "bits": 8, "weight_decay": 0.1, "pack_small": pack}
    together, apart = ([parameter(*shape) for shape in shapes] for _ in range(2))
    groups = [
        {"params": together[:2], "lr": rates[0]},
        {"params": together[2:], "lr": rates[1], "weight_decay": 0.0},
    ]
    one = build_optimizer(groups, lr=1.0, **options)
    alone = [
        build_optimizer(apart[:2], lr=rates[0], **options),
        build_optimizer(apart[2:], lr=rates[1], **{**options, "weight_decay": 0.0}),
    ]
    for seed in range(3):
        step(one, seed)
        for weight, other in zip(together, apart, strict=True):
            other.grad = weight.grad.clone()
        for optimizer in alone:
            optimizer.step()
    assert_identical(together, apart)
    assert_identical(states_of(one), [s for o in alone for s in states_of(o)])
    resumed = build_optimizer(
        [
            {**group, "params": [parameter(*p.shape) for p in group["params"]]}
            for group in groups
        ],
        lr=1.0,
        **options,
    )
    resumed.load_state_dict(one.state_dict())
    assert_identical(resumed.state_dict(), one.state_dict())


@pytest.mark.parametrize("pack", [False, True])
def test_parameters_that_join_later_and_groups_that_are_added_train_and_resume(pack):
    options = {"name": "adamw", "bits": 8, "lr": 0.01, "pack_small": pack}

    def weights():
        return [parameter(70, 70), parameter(9), parameter(64, 70), parameter(33)]

    def with_gradients(optimizer, which, seed):
        step_of = torch.Generator().manual_seed(seed)
        for i, param in enumerate(params_of(optimizer)):
            grad = torch.randn(param.shape, generator=step_of)
            param.grad = grad if i in which else None
        optimizer.step()

    trained = weights()
    optimizer = build_optimizer(trained[:2] + trained[3:], **options)
    with_gradients(optimizer, {0, 1}, 0)
    frozen = trained[3].detach().clone()
    assert trained[3] not in optimizer.state
    # One of the first ones has none, one of the others its first.
    with_gradients(optimizer, {1, 2}, 1)
    assert (trained[3] != frozen).all()
    optimizer.add_param_group({"params": [trained[2]], "lr": 0.1})
    with_gradients(optimizer, {0, 1, 2, 3}, 2)
    steps = [int(optimizer.state[weight]["step"]) for weight in trained]
    assert steps == [2, 3, 1, 2]
    others = weights()
    resumed = build_optimizer(others[:2] + others[3:], **options)
    resumed.add_param_group({"params": [others[2]], "lr": 0.1})
    resumed.load_state_dict(optimizer.state_dict())
    for weight, other in zip(trained, others, strict=True):
        other.data.copy_(weight.data)
    for each in (optimizer, resumed):
        with_gradients(each, {0, 2, 3}, 3)
    assert_identical(resumed.state_dict(), optimizer.state_dict())
    assert_identical(others, trained)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_what_has_no_gradient_keeps_its_bits_in_blocks_that_others_do_not_share(name):
    """Small tensors share blocks: those of 256 that one fills alone are left as they are."""
    weights = [parameter(n, seed=n) for n in (512, 300, 40)]
    optimizer = build_optimizer(weights, name=name, bits=8, lr=0.1, pack_small=True)
    step(optimizer)
    for weight in weights:
        # The least code stands for less than the largest magnitude: stored anew it is less.
        weight.grad[0] = -10.0
    optimizer.step()
    before = copy.deepcopy([states_of(optimizer), weights])
    for weight in weights[:2]:
        weight.grad = None
    weights[2].grad = torch.full_like(weights[2], 30.0)
    optimizer.step()
    states = states_of(optimizer)
    assert_identical(states[0], before[0][0])
    assert_identical(weights[:2], before[1][:2])
    assert torch.equal(states[1]["state1"][:256], before[0][1]["state1"][:256])
    # Of what shares a block with larger ones less is left, but not the scale of its own.
    assert states[1]["absmax1"][1] > before[0][1]["absmax1"][1]
    error = optimizer.read_moments(weights[1])[0][256:].abs()
    assert error.max() > 0


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.double(), r"shape \[70, 70\], is torch.float64 on cpu now"),
        (lambda data: data[:60].clone(), r"shape \[60, 70\], .* shape \[70, 70\], on"),
    ],
)
def test_weights_that_have_changed_since_their_states_were_made_are_refused(
    change, words
):
    weight, other = parameter(70, 70), parameter(9)
    optimizer = build_optimizer([other, weight], name="sgd", bits=8, lr=0.1)
    step(optimizer)
    before = other.detach().clone()
    weight.data = change(weight.data)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=rf"params\[1\], {words}"):
        optimizer.step()
    assert torch.equal(other, before)


def moved_to_the_other_group(optimizer):
    """A large and a small parameter move, and one of each leaves."""
    first, second = optimizer.param_groups
    del first["params"][0], first["params"][1]
    second["params"] += first["params"][:2]
    del first["params"][:2]


def exchanged_groups(optimizer):
    optimizer.param_groups.reverse()


def gone_and_back(optimizer):
    params = optimizer.param_groups[0]["params"]
    gone = [params.pop(0), params.pop()]
    step_of_scales(optimizer, 7)
    params += gone


def copied_state(optimizer):
    weight = params_of(optimizer)[0]
    optimizer.state[weight] = copied(optimizer.state[weight])


def copied_values(optimizer):
    for state in optimizer.state.values():
        state.update(copied(state))


def copied(state):
    return {
        k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()
    }


CHANGES = [
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: optimizer.state.pop(params_of(optimizer)[0]),
    lambda optimizer: optimizer.state.pop(params_of(optimizer)[2]),
    lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    lambda optimizer: optimizer.state[params_of(optimizer)[0]].clear(),
    copied_state,
    copied_values,
    moved_to_the_other_group,
    exchanged_groups,
    gone_and_back,
]
#: Two large ones and small ones that share blocks, in each of two groups.
SIZES = [(90, 70), (70, 70), (90,), (40,), (200,)], [(80, 64), (90,), (300,), (0, 4)]


def step_of_scales(optimizer, seed):
    """Step on gradients a tenth as large for each further parameter."""
    generator = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        scale = 10.0 ** -(param.shape[0] % 4)
        param.grad = scale * torch.randn(param.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["alone", "packed", "kept"])
def test_states_belong_to_parameters_and_these_to_groups_as_in_torch(
    name, change, form
):
    trajectories, counts = [], []
    for bits in (8, 32):
        groups = [
            [parameter(*shape, seed=seed) for seed, shape in enumerate(sizes)]
            for sizes in SIZES
        ]
        weights = [weight for group in groups for weight in group]
        own = {"packed": {"pack_small": True}, "kept": {"keep_32bit": weights}}
        optimizer = build_optimizer(
            [{"params": groups[0]}, {"params": groups[1], "lr": 1e-4}],
            name=name, bits=bits, lr=1e-2, **own.get(form, {}) if bits == 8 else {},
        )  # fmt: skip
        step_of_scales(optimizer, 0)
        change(optimizer)
        before = [w.detach().clone() for w in weights]
        for seed in (1, 2):
            step_of_scales(optimizer, seed)
        # SGD of torch counts no steps.
        states = [optimizer.state[w] for w in weights[:-1] if w in optimizer.state]
        counts.append([int(state.get("step", 0)) for state in states])
        trajectories.append(
            [w.detach() - b for w, b in zip(weights, before, strict=True)]
        )
    assert name == "sgd" or counts[0] == counts[1]
    for ours, theirs in zip(*trajectories, strict=True):
        # 8 bits: moments are off by some hundredths; a state used twice doubles a step.
        # Lion's steps turn where a sign does.
        rounded = 0.3 if name == "lion" else 0.15
        limit = (1e-5 if form == "kept" else rounded) * theirs.norm()
        # Weights are rounded in float32.
        assert (ours - theirs).norm() <= limit + 1e-6


def test_entries_of_the_caller_s_own_stay_and_parameters_that_leave_hold_no_buffers():
    weights = [parameter(100, 1000, seed=seed) for seed in range(4)]
    optimizer = build_optimizer(weights, name="adamw", bits=8, lr=0.1)
    step(optimizer)
    once = state_bytes(optimizer)
    optimizer.state[weights[1]]["mean"] = 1.5
    optimizer.param_groups[0]["params"].remove(weights[0])
    step(optimizer, 1)
    assert state_bytes(optimizer) <= 1.01 * once
    assert optimizer.state[weights[1]]["mean"] == 1.5
    assert optimizer.state[weights[1]]["step"] == 2
    assert optimizer.state[weights[0]]["step"] == 1


def test_steps_that_were_skipped_are_counted_on_where_states_are_exchanged():
    weight = parameter(70, 70)
    optimizer = build_optimizer([weight], name="adamw", bits=8, lr=0.1)
    step(optimizer)
    weight.grad = torch.full_like(weight, math.nan)
    optimizer.step()
    optimizer.state.clear()
    step(optimizer)
    assert optimizer.skipped_steps == 1
    assert optimizer.state[weight]["step"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.skipped_steps == 0


def test_what_a_loss_scaler_hands_over_decides_without_being_read():
    """Its verdict holds even where no gradient shows it, as after a clip of one to zero."""
    weight = parameter(70, 70)
    optimizer = build_optimizer([weight], name="adamw", bits=8, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad, skipped in ((False, 0), (True, 1)):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((weight * (math.inf if bad else 1.0)).sum()).backward()
        scaler.unscale_(optimizer)
        if bad:
            weight.grad.zero_()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.skipped_steps == skipped
        assert torch.equal(weight, before) == bad
    # Gradients that were not unscaled are, as the scaler would have done.
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(weight.grad, torch.ones_like(weight))


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
