"""Checkpoints from 8 to 32 bit and back: values, options, what is refused."""

import copy

import pytest
import torch

from speechbrain_rev.optim import build_optimizer, convert_checkpoint
from tests.unit.optim.steps import (
    NAMES,
    assert_identical,
    by_block,
    decoded,
    parameter,
    step,
)

TORCH_NAMES = {
    "sgd": ["momentum_buffer"],
    "adam": ["exp_avg", "exp_avg_sq"],
    "adamw": ["exp_avg", "exp_avg_sq"],
}


def optimizer_of(name, bits, *, weights=None, steps=0, **options):
    """A matrix, a convolution in channels_last, and one too small for 8-bit states."""
    if weights is None:
        weights = [parameter(70, 70), parameter(64, 16, 3, 3), parameter(4, 4, 3, 3)]
        for weight in weights[1:]:
            weight.data = weight.data.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(weights, name=name, bits=bits, **{"lr": 0.1, **options})
    for seed in range(steps):
        step(optimizer, seed)
    return optimizer


def copied(optimizer):
    return [w.detach().clone() for w in optimizer.param_groups[0]["params"]]


def states(optimizer):
    return [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]


def as_parameters(tensors):
    return [torch.nn.Parameter(tensor.clone()) for tensor in tensors]


@pytest.mark.parametrize("name", NAMES)
def test_from_8_to_32_bit_values_are_exactly_what_the_codes_stand_for(name):
    old, new = optimizer_of(name, 8, steps=4), optimizer_of(name, 32)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    weights = new.param_groups[0]["params"]
    for weight, was, now in zip(weights, states(old), states(new), strict=True):
        for number, key in enumerate(TORCH_NAMES[name], 1):
            small = weight.numel() < 4096
            expected = was[f"state{number}"] if small else decoded(was, number)
            assert torch.equal(now[key], expected)
            assert now[key].dtype == torch.float32
            assert now[key].stride() == weight.stride()
        if name != "sgd":
            assert now["step"] == 4


@pytest.mark.parametrize("name", NAMES)
def test_from_32_to_8_bit_values_are_within_half_a_code_step(name):
    old, new = optimizer_of(name, 32, steps=4), optimizer_of(name, 8)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    for was, now in zip(states(old), states(new), strict=True):
        for number, key in enumerate(TORCH_NAMES[name], 1):
            if was[key].numel() < 4096:
                assert torch.equal(now[f"state{number}"], was[key])
                continue
            largest = by_block(was[key]).abs().amax(dim=1)
            assert torch.equal(now[f"absmax{number}"], largest)
            error = by_block(decoded(now, number) - was[key]).abs() / largest[:, None]
            # Steps are widest in [0.1, 1]; float32 rounds quotients and products.
            assert error.max() <= 0.45 / (64 if number == 1 else 128) + 2 * 2**-24
    if name != "sgd":
        assert all(state["step"] == 4 for state in states(new))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("old_bits", "new_bits"), [(8, 32), (32, 8), (8, 8), (32, 32)])
def test_what_was_converted_has_the_form_of_the_optimizers_own(
    name, old_bits, new_bits
):
    old = optimizer_of(name, old_bits, steps=2)
    own = optimizer_of(name, new_bits, steps=2).state_dict()
    before = copy.deepcopy(old.state_dict())
    converted = convert_checkpoint(old.state_dict(), optimizer_of(name, new_bits))

    def form(value):
        if isinstance(value, dict):
            return {key: form(item) for key, item in value.items()}
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape, value.stride()
        return type(value)

    assert form(converted["state"]) == form(own["state"])
    assert converted["param_groups"] == own["param_groups"]
    assert_identical(old.state_dict(), before)
    if old_bits == new_bits:
        assert_identical(converted["state"], before["state"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("old_bits", "new_bits"), [(8, 32), (32, 8)])
def test_training_goes_on_with_the_moments_of_the_checkpoint(name, old_bits, new_bits):
    old = optimizer_of(name, old_bits, steps=6)
    before = copied(old)
    new = optimizer_of(name, new_bits, weights=as_parameters(before))
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    fresh = optimizer_of(name, new_bits, weights=as_parameters(before))
    for seed in range(6, 9):
        for optimizer in (old, new, fresh):
            step(optimizer, seed)
    for start, *ends in zip(before, *map(copied, (old, new, fresh)), strict=True):
        went_on, resumed, anew = (end - start for end in ends)
        # The distance at which 8 bit tracks 32 bit.
        assert (resumed - went_on).norm() <= 0.03 * went_on.norm()
        assert (anew - went_on).norm() > 0.1 * went_on.norm()


@pytest.mark.parametrize("name", NAMES)
def test_the_next_step_after_8_bit_is_the_same_at_32_bit(name):
    old = optimizer_of(name, 8, steps=4)
    new = optimizer_of(name, 32, weights=as_parameters(copied(old)))
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    step(old, 4)
    step(new, 4)
    # The small tensor's step is the library's at 8 bit and torch's at 32.
    torch.testing.assert_close(copied(new), copied(old), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_checkpoint_with_another_keep_32bit_keeps_the_bits_of_the_rest(name, keeps):
    weights = [parameter(70, 70), parameter(80, 80)]
    kept = [weights[0]]
    old = optimizer_of(
        name, 8, weights=weights, steps=3, keep_32bit=[] if keeps else kept
    )
    others = as_parameters(weights)
    new = optimizer_of(name, 8, weights=others, keep_32bit=others[:1] if keeps else [])
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    assert_identical(new.state[others[1]], old.state[weights[1]])
    was, now = old.state[weights[0]], new.state[others[0]]
    if keeps:
        assert torch.equal(now["state1"], decoded(was, 1))
    else:
        error = by_block(decoded(now, 1) - was["state1"]).abs()
        assert (error / now["absmax1"][:, None]).max() <= 0.45 / 64 + 2 * 2**-24
    step(new, 3)


@pytest.mark.parametrize(("old_bits", "new_bits"), [(8, 32), (32, 8)])
def test_the_options_are_those_of_the_checkpoint(old_bits, new_bits):
    options = {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.01}
    old = optimizer_of("sgd", old_bits, steps=1, **options)
    # Schedulers of torch leave where they started from in the group.
    torch.optim.lr_scheduler.ExponentialLR(old, 0.9)
    new = optimizer_of("sgd", new_bits)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    (group,) = new.param_groups
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (0.3, 0.3, 0.01)
    if new_bits == 8:
        assert group["betas"] == (0.7, 0.0)
    else:
        assert group["momentum"] == 0.7
    options = {"lr": 0.3, "betas": (0.7, 0.8), "eps": 1e-6, "weight_decay": 0.01}
    old = optimizer_of("adamw", old_bits, steps=1, **options)
    new = optimizer_of("adamw", new_bits)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    assert {key: new.param_groups[0][key] for key in options} == options


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"nesterov": True}),
        ("sgd", {"dampening": 0.1}),
        ("adam", {"amsgrad": True}),
    ],
)
def test_what_only_32_bit_honours_is_off_after_8_bit_as_it_was_there(name, options):
    old, new = optimizer_of(name, 8, steps=2), optimizer_of(name, 32, **options)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    assert not any(new.param_groups[0][key] for key in options)
    step(new)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"nesterov": True}, "sgd at 8 bit cannot do nesterov"),
        ("sgd", {"dampening": 0.5}, "sgd at 8 bit cannot do dampening"),
        ("sgd", {"momentum": 0.0}, "sgd at 8 bit cannot do momentum=0"),
        ("adam", {"amsgrad": True}, "adam at 8 bit cannot do amsgrad"),
        ("adam", {"weight_decay": 0.1}, "L2 weight_decay"),
    ],
)
def test_options_that_8_bit_does_not_honour_are_refused(name, options, message):
    old, new = optimizer_of(name, 32, steps=1, **options), optimizer_of(name, 8)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(old.state_dict(), new)


@pytest.mark.parametrize("bits", [8, 32])
def test_checkpoints_of_something_else_are_refused(bits):
    new = optimizer_of("adamw", bits)
    for name, old_bits in (("adam", 8), ("sgd", 8), ("adam", 32), ("sgd", 32)):
        with pytest.raises(
            ValueError, match=f"of {name} at .*only the bits can be conv"
        ):
            convert_checkpoint(optimizer_of(name, old_bits, steps=1).state_dict(), new)
    foreign = torch.optim.AdamW(new.param_groups[0]["params"])
    with pytest.raises(
        ValueError, match="not written by an optimizer of speechbrain_rev"
    ):
        convert_checkpoint(foreign.state_dict(), new)
    with pytest.raises(ValueError, match="of class AdamW, not of speechbrain_rev"):
        convert_checkpoint(new.state_dict(), foreign)
    other_bits = 40 - bits
    wide = optimizer_of("adamw", other_bits, weights=[parameter(80, 80)], steps=1)
    with pytest.raises(ValueError, match="one group of 3 parameters"):
        convert_checkpoint(wide.state_dict(), new)
    new = optimizer_of("adamw", bits, weights=[parameter(70, 70)])
    with pytest.raises(ValueError, match=r"shape \[70, 70\], .* shape \[80, 80\]"):
        convert_checkpoint(wide.state_dict(), new)


@pytest.mark.parametrize(("old_bits", "new_bits"), [(8, 32), (32, 8)])
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_from_before_the_first_step_is_converted(name, old_bits, new_bits):
    old, new = optimizer_of(name, old_bits, lr=0.3), optimizer_of(name, new_bits)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    assert not new.state
    assert new.param_groups[0]["lr"] == 0.3
    step(new)


@pytest.mark.parametrize(("old_bits", "new_bits"), [(8, 32), (32, 8)])
def test_a_moment_that_is_not_finite_stays_visible(old_bits, new_bits):
    weights = [parameter(70, 70)]
    old = optimizer_of("adamw", old_bits, weights=weights)
    weights[0].grad = torch.ones(70, 70).index_fill(0, torch.tensor(0), torch.inf)
    old.step()
    new = optimizer_of("adamw", new_bits, weights=as_parameters([torch.ones(70, 70)]))
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    step(new)
    (weight,) = copied(new)
    assert weight[0].isnan().all()
    assert weight[4:].isfinite().all()


def test_a_file_is_converted_as_the_documentation_says(tmp_path):
    old, new = optimizer_of("adamw", 8, steps=2), optimizer_of("adamw", 32)
    torch.save(old.state_dict(), tmp_path / "optimizer.ckpt")
    saved = torch.load(tmp_path / "optimizer.ckpt", weights_only=True)
    torch.save(convert_checkpoint(saved, new), tmp_path / "optimizer.ckpt")
    new.load_state_dict(torch.load(tmp_path / "optimizer.ckpt", weights_only=True))
    assert all(state["step"] == 2 for state in states(new))
