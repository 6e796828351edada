"""Checkpoints: resumed bit by bit, or refused where they mean something else."""

import copy

import pytest
import torch
from speechbrain.utils.checkpoints import Checkpointer

from speechbrain_rev.optim import build_optimizer
from tests.unit.optim.steps import NAMES, assert_identical, parameter, step


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


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", NAMES)
def test_the_checkpointer_resumes_bit_for_bit(name, bits, tmp_path):
    def run():
        optimizer = optimizer_of(name, bits)
        weights = torch.nn.ParameterList(optimizer.param_groups[0]["params"])
        saved = {"weights": weights, "optimizer": optimizer}
        return optimizer, weights, Checkpointer(tmp_path, saved)

    optimizer, weights, checkpointer = run()
    optimizer.param_groups[0]["lr"] = 0.05
    for seed in range(3):
        step(optimizer, seed)
    checkpointer.save_checkpoint()
    resumed, others, checkpointer = run()
    assert checkpointer.recover_if_possible() is not None
    for seed in range(3, 6):
        step(optimizer, seed)
        step(resumed, seed)
    assert_identical(resumed.state_dict(), optimizer.state_dict())
    assert_identical([*others], [*weights])


def refused(checkpoint, optimizer):
    """The message; a refusal changes nothing."""
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r".") as error:
        optimizer.load_state_dict(checkpoint)
    assert_identical(optimizer.state_dict(), before)
    return str(error.value)


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        (("sgd", 32), ("sgd", 8)),
        (("sgd", 8), ("sgd", 32)),
        (("adamw", 8), ("sgd", 8)),
        (("adamw", 32), ("adam", 32)),
    ],
)
def test_states_of_another_optimizer_or_precision_are_refused_in_one_line(
    saved, loading
):
    checkpoint = optimizer_of(*saved, steps=1).state_dict()
    said = refused(checkpoint, optimizer_of(*loading, steps=1))
    assert "The checkpoint's optimizer is {} at {} bit".format(*saved) in said
    assert "this one is {} at {} bit".format(*loading) in said
    assert "Resume with the checkpoint's (in a recipe optimizer_name, opti" in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_states_of_the_other_backend_are_refused(name):
    pair = [
        optimizer_of(name, 8, steps=1, backend=backend)
        for backend in ("native", "bitsandbytes")
    ]
    for source, target in (pair, pair[::-1]):
        said = refused(source.state_dict(), target)
        assert f"{name} at 8 bit by bitsandbytes" in said
        assert f"{name} at 8 bit in blocks of 256 values" in said


def test_a_checkpoint_from_elsewhere_is_refused():
    foreign = torch.optim.SGD([parameter(2)], lr=0.1, momentum=0.9)
    said = refused(
        foreign.state_dict(), optimizer_of("sgd", 32, weights=[parameter(2)])
    )
    assert "The checkpoint's optimizer is none of speechbrain_rev.optim" in said


def test_states_that_keep_other_parameters_at_32_bit_are_refused():
    plain, keeping = parameter(64, 64), parameter(64, 64)
    pair = [
        optimizer_of("sgd", 8, weights=[plain], steps=1),
        optimizer_of("sgd", 8, weights=[keeping], steps=1, keep_32bit=keeping),
    ]
    for source, target in (pair, pair[::-1]):
        said = refused(source.state_dict(), target)
        assert "Parameter 0 has shape [64, 64]" in said
        assert "give keep_32bit, as in the run that wrote it" in said


@pytest.mark.parametrize(
    ("name", "bits", "backend"),
    [
        ("sgd", 8, "native"),
        ("adamw", 32, "native"),
        ("lion", 32, "native"),
        ("adamw", 8, "bitsandbytes"),
    ],
)
def test_states_of_another_network_are_refused(name, bits, backend):
    given = {"backend": backend, "steps": 1}
    wide = optimizer_of(name, bits, weights=[parameter(80, 80)], **given).state_dict()
    narrow = optimizer_of(name, bits, weights=[parameter(70, 70)], backend=backend)
    said = refused(wide, narrow)
    assert "Parameter 0 has shape [70, 70]" in said
    assert "shape [80, 80]" in said
    pair = optimizer_of(
        name, bits, weights=[parameter(80, 80), parameter(3)], backend=backend
    )
    assert "size of optimizer's group" in refused(wide, pair)


def test_plain_sgd_without_momentum_resumes_at_32_bit():
    source, target = (optimizer_of("sgd", 32, momentum=0.0, steps=1) for _ in range(2))
    target.load_state_dict(source.state_dict())
    assert_identical(target.state_dict(), source.state_dict())


#: Blocks, and whether small tensors share them.
FORMS = [(256, False), (2048, False), (256, True), (2048, True)]


@pytest.mark.parametrize(("block", "pack"), FORMS)
@pytest.mark.parametrize(("new_block", "new_pack"), FORMS)
def test_states_of_another_form_are_refused(block, pack, new_block, new_pack):
    old = optimizer_of("adamw", 8, steps=2, block=block, pack_small=pack)
    new = optimizer_of("adamw", 8, block=new_block, pack_small=new_pack)
    saved = old.state_dict()
    if (block, pack) == (new_block, new_pack):
        new.load_state_dict(saved)
        assert_identical(new.state_dict(), saved)
        return
    said = refused(saved, new)
    assert f"blocks of {new_block} values with small tensors " in said
    assert "The checkpoint's optimizer is adamw at 8 bit in blocks of " in said


def test_what_a_scheduler_left_in_the_groups_is_resumed_and_copied():
    optimizer, other = (optimizer_of("sgd", 8, steps=1) for _ in range(2))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=9)
    other.load_state_dict(optimizer.state_dict())
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["max_lr"] == 0.5
    for each in (other, copy.deepcopy(optimizer)):
        assert_identical(each.state_dict()["param_groups"], [group])


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
@pytest.mark.parametrize(
    "change",
    [
        lambda params, state: state.pop(params[0]),
        lambda params, state: params.append(params.pop(0)),
    ],
)
@pytest.mark.parametrize("sizes", [(100, 300), (250, 100)])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("way", ["load", "copy"])
def test_small_tensors_keep_their_states_where_their_neighbours_changed(
    name, change, sizes, steps, way
):
    weights = [parameter(size) for size in sizes]
    optimizer = optimizer_of(name, 8, weights=weights, pack_small=True)
    for weight, scale in zip(weights, (10.0, 1.0), strict=True):
        weight.grad = torch.full_like(weight, scale)
    optimizer.step()
    change(optimizer.param_groups[0]["params"], optimizer.state)
    weights[0].grad = None
    for _ in range(steps):
        optimizer.step()
    before = optimizer.read_moments(weights[1])
    if way == "copy":
        params, optimizer = copy.deepcopy(
            (optimizer.param_groups[0]["params"], optimizer)
        )
        weights[1] = next(p for p in params if len(p) == sizes[1])
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    for moment, was in zip(optimizer.read_moments(weights[1]), before, strict=True):
        # Of a hundredth of the largest value codes are off by some hundredths.
        torch.testing.assert_close(moment, was, rtol=0.1, atol=0)


@pytest.mark.parametrize(("name", "bits"), [("adamw", 8), ("lion", 32), ("sgd", 32)])
def test_parameters_that_left_hinder_neither_checkpoints_nor_copies(name, bits):
    weights = [parameter(70, 70), parameter(9)]
    optimizer = optimizer_of(name, bits, weights=weights, steps=1)
    optimizer.param_groups[0]["params"].pop()
    (remaining,) = copy.deepcopy(optimizer).param_groups[0]["params"]
    assert remaining.shape == (70, 70)
    optimizer.state.pop(weights[1])
    step(optimizer, 1)
    assert list(optimizer.state_dict()["state"]) == [0]


@pytest.mark.parametrize("bits", [8, 32])
def test_hooks_of_loading_change_states_as_in_torch_and_own_entries_stay(bits):
    optimizer = optimizer_of("adamw", bits, weights=[parameter(9)], steps=1)
    (weight,) = optimizer.param_groups[0]["params"]
    optimizer.state[weight]["mean"] = 1.5
    saved = optimizer.state_dict()
    key = "state1" if bits == 8 else "exp_avg"

    def doubled(_, state_dict):
        (state,) = state_dict["state"].values()
        return state_dict | {"state": {0: state | {key: 2 * state[key]}}}

    seen = []
    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(
        lambda own: seen.append(own.state[weight][key].clone())
    )
    expected = 2 * saved["state"][0][key].clone()
    optimizer.load_state_dict(saved)
    assert torch.equal(seen[0], expected)
    assert optimizer.state[weight]["mean"] == 1.5
    assert copy.deepcopy([weight, optimizer])[1].state_dict()["state"][0]["mean"] == 1.5
