"""Checkpoints: resumed bit by bit, refused where they mean something else, or converted."""

import copy

import pytest
import torch
from speechbrain.utils.checkpoints import Checkpointer

from speechbrain_rev.optim import build_optimizer, convert_checkpoint
from speechbrain_rev.optim.checkpoint import STATES_OF_TORCH, WRAPPED
from speechbrain_rev.optim.map import dynamic_tree
from tests.unit.optim.steps import (
    NAMES,
    assert_identical,
    by_block,
    decoded,
    parameter,
    params_of,
    states_of,
    step,
)

#: Half the widest step between codes, in [0.1, 1], over the largest magnitude, whose code
#: stands for at least 127.1 / 128; float32 rounds quotients and products.
HALF_STEP = {1: 0.45 / 64 / (127.1 / 128) + 2 * 2**-24, 2: 0.45 / 128 + 2 * 2**-24}
MALFORMED = "is not what state_dict() of an optimizer returned"
FOREIGN = "not written by an optimizer of speechbrain_rev"
each_way = pytest.mark.parametrize(("old_bits", "new_bits"), [(8, 32), (32, 8)])


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


def refused(take, checkpoint, optimizer):
    """The message; what refuses changes nothing."""
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r".") as error:
        take(checkpoint, optimizer)
    assert_identical(optimizer.state_dict(), before)
    return str(error.value)


def load(checkpoint, optimizer):
    optimizer.load_state_dict(checkpoint)


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        (("sgd", 32), ("sgd", 8)),
        (("sgd", 8), ("sgd", 32)),
        (("adamw", 8), ("sgd", 8)),
        (("adamw", 32), ("adam", 32)),
    ],
)
def test_states_of_another_optimizer_or_precision_are_refused(saved, loading):
    checkpoint = optimizer_of(*saved, steps=1).state_dict()
    target = optimizer_of(*loading, steps=1)
    said = refused(load, checkpoint, target)
    assert "This optimizer is {} at {} bit".format(*loading) in said
    assert "but the checkpoint holds the states of {} at {} bit".format(*saved) in said
    assert "speechbrain_rev.optim.convert_checkpoint" in said
    if saved[0] != loading[0]:
        assert refused(convert_checkpoint, checkpoint, target) == said


def malformed(part, value):
    """A checkpoint of which one part is another value, or missing if that is None."""
    checkpoint = optimizer_of("sgd", 8, weights=[parameter(2)], steps=1).state_dict()
    holder = checkpoint if part in checkpoint else checkpoint["param_groups"][0]
    if value is None:
        del holder[part]
    else:
        holder[part] = value
    return checkpoint


@pytest.mark.parametrize("take", [load, convert_checkpoint])
@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (None, MALFORMED),
        ({}, MALFORMED),
        (torch.nn.Linear(2, 2).state_dict(), MALFORMED),
        (torch.optim.RMSprop([parameter(2)]).state_dict(), FOREIGN),
        (malformed("built_as", "x"), FOREIGN),
        (malformed("params", None), MALFORMED),
        (malformed("state", None), MALFORMED),
        (malformed("state", {0: 1}), MALFORMED),
    ],
)
def test_what_has_not_the_form_of_a_checkpoint_is_refused(take, checkpoint, message):
    target = optimizer_of("sgd", 8, weights=[parameter(2)], steps=1)
    assert message in refused(take, checkpoint, target)


def test_states_that_keep_other_parameters_at_32_bit_are_refused():
    plain, keeping = parameter(64, 64), parameter(64, 64)
    pair = [
        optimizer_of("sgd", 8, weights=[plain], steps=1),
        optimizer_of("sgd", 8, weights=[keeping], steps=1, keep_32bit=keeping),
    ]
    for source, target in (pair, pair[::-1]):
        said = refused(load, source.state_dict(), target)
        assert "parameter 0, " in said
        assert "keep_32bit as in" in said


@pytest.mark.parametrize("take", [load, convert_checkpoint])
@pytest.mark.parametrize(("name", "bits"), [("sgd", 8), ("adamw", 32)])
def test_states_of_another_network_are_refused(take, name, bits):
    wide = optimizer_of(name, bits, weights=[parameter(80, 80)], steps=1).state_dict()
    said = refused(take, wide, optimizer_of(name, bits))
    assert "Groups of this optimizer have [3] parameters" in said
    assert "but those of the checkpoint [1]" in said
    said = refused(take, wide, optimizer_of(name, bits, weights=[parameter(70, 70)]))
    assert "Parameter 0 has shape [70, 70]" in said
    assert "shape [80, 80]" in said


def test_an_optimizer_from_elsewhere_takes_no_converted_checkpoint():
    foreign = torch.optim.AdamW([parameter(2)])
    with pytest.raises(ValueError, match="of class AdamW, not of speechbrain_rev"):
        convert_checkpoint(optimizer_of("adamw", 8).state_dict(), foreign)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@each_way
def test_a_checkpoint_from_before_the_first_step_loads(name, old_bits, new_bits):
    old, new = optimizer_of(name, old_bits, lr=0.3), optimizer_of(name, new_bits)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    assert not new.state
    assert new.param_groups[0]["lr"] == 0.3
    step(new)


def test_plain_sgd_without_momentum_resumes_at_32_bit():
    source, target = (optimizer_of("sgd", 32, momentum=0.0, steps=1) for _ in range(2))
    target.load_state_dict(source.state_dict())
    assert_identical(target.state_dict(), source.state_dict())


def form(value):
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    return type(value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("old_bits", "new_bits"), [(8, 32), (32, 8), (8, 8), (32, 32)])
def test_what_was_converted_has_the_values_and_the_form_of_the_optimizers_own(
    name, old_bits, new_bits
):
    old = optimizer_of(name, old_bits, steps=2)
    own = optimizer_of(name, new_bits, steps=2).state_dict()
    before = copy.deepcopy(old.state_dict())
    new = optimizer_of(name, new_bits)
    converted = convert_checkpoint(old.state_dict(), new)
    assert_identical(old.state_dict(), before)
    new.load_state_dict(converted)
    assert form(new.state_dict()["state"]) == form(own["state"])
    assert new.state_dict()["param_groups"] == own["param_groups"]
    if old_bits == new_bits:
        assert_identical(new.state_dict(), before)
        return
    for was, now in zip(states_of(old), states_of(new), strict=True):
        at_8_bit, at_32_bit = (was, now) if old_bits == 8 else (now, was)
        assert now.get("step", 2) == 2 or name == "sgd"
        for number, key in enumerate(STATES_OF_TORCH[name], 1):
            moment, stored = at_32_bit[key], at_8_bit[f"state{number}"]
            if moment.numel() < 4096:
                assert torch.equal(moment, stored)
            elif old_bits == 8:
                # Exactly what the codes stand for.
                assert torch.equal(moment, decoded(was, number))
            else:
                largest = by_block(moment).abs().amax(dim=1)
                lowest = by_block(moment).amin(dim=1)
                scales = largest.maximum(lowest / dynamic_tree(signed=True)[0])
                assert torch.equal(now[f"absmax{number}"], scales)
                error = by_block(decoded(now, number) - moment).abs()
                assert (error / largest[:, None]).max() <= HALF_STEP[number]


@pytest.mark.parametrize("name", NAMES)
def test_from_8_to_32_bits_and_back_nothing_shrinks(name):
    old = optimizer_of(name, 8, steps=3)
    between, new = optimizer_of(name, 32), optimizer_of(name, 8)
    between.load_state_dict(convert_checkpoint(old.state_dict(), between))
    new.load_state_dict(convert_checkpoint(between.state_dict(), new))
    for was, now in zip(states_of(old), states_of(new), strict=True):
        assert was.keys() == now.keys()
        for key in was.keys() - ({"step"} if name == "sgd" else {}):
            if key.startswith("absmax"):
                # The scale of a lowest value is a quotient of its product.
                torch.testing.assert_close(now[key], was[key], rtol=2**-22, atol=0)
            else:
                assert_identical(now[key], was[key])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_checkpoint_with_another_keep_32bit_keeps_the_bits_of_the_rest(name, keeps):
    weights, others = ([parameter(70, 70), parameter(80, 80)] for _ in range(2))
    kept = [[], others[:1]] if keeps else [weights[:1], []]
    old = optimizer_of(name, 8, weights=weights, steps=3, keep_32bit=kept[0])
    new = optimizer_of(name, 8, weights=others, keep_32bit=kept[1])
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    (was, same), (now, unchanged) = states_of(old), states_of(new)
    assert_identical(unchanged, same)
    if keeps:
        assert torch.equal(now["state1"], decoded(was, 1))
    else:
        error = by_block(decoded(now, 1) - was["state1"]).abs()
        assert (error / now["absmax1"][:, None]).max() <= HALF_STEP[1]
    step(new, 3)


@each_way
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.01}),
        ("adamw", {"lr": 0.3, "betas": (0.7, 0.8), "eps": 1e-6, "weight_decay": 0.01}),
    ],
)
def test_the_options_are_those_of_the_checkpoint(name, options, old_bits, new_bits):
    old, new = (
        optimizer_of(name, old_bits, steps=1, **options),
        optimizer_of(name, new_bits),
    )
    # Schedulers of torch leave where they started from in the group.
    torch.optim.lr_scheduler.ExponentialLR(old, 0.9)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    expected = options | {"initial_lr": 0.3}
    assert {key: new.param_groups[0][key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"momentum": 0.0}, "sgd at 8 bit cannot do momentum=0"),
        ("adam", {"amsgrad": True}, "adam at 8 bit cannot do amsgrad"),
    ],
)
def test_options_that_8_bit_does_not_honour_are_refused_and_off_after_it(
    name, options, message
):
    at_32, at_8 = optimizer_of(name, 32, steps=1, **options), optimizer_of(name, 8)
    assert message in refused(convert_checkpoint, at_32.state_dict(), at_8)
    at_32.load_state_dict(convert_checkpoint(at_8.state_dict(), at_32))
    assert not at_32.param_groups[0].get("amsgrad")
    step(at_32)


def test_options_that_32_bit_does_not_honour_are_refused():
    at_8 = optimizer_of("sgd", 8, steps=1, decoupled_decay=True, weight_decay=0.1)
    said = refused(convert_checkpoint, at_8.state_dict(), optimizer_of("sgd", 32))
    assert "sgd at 32 bit cannot do decoupled_decay=True" in said


def test_a_moment_that_is_not_finite_stays_visible():
    (weight,) = weights = [parameter(70, 70)]
    old = optimizer_of("adamw", 32, weights=weights)
    weight.grad = torch.ones(70, 70).index_fill(0, torch.tensor(0), torch.inf)
    old.step()
    resumed = torch.nn.Parameter(torch.ones(70, 70))
    new = optimizer_of("adamw", 8, weights=[resumed])
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    step(new)
    assert resumed[0].isnan().all()
    assert resumed[4:].isfinite().all()


#: Blocks, and whether small tensors share them.
FORMS = [(256, False), (2048, False), (256, True), (2048, True)]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(("block", "pack"), FORMS)
@pytest.mark.parametrize(("new_block", "new_pack"), FORMS)
def test_states_go_from_one_form_to_another_by_conversion_alone(
    name, block, pack, new_block, new_pack
):
    old = optimizer_of(name, 8, steps=2, block=block, pack_small=pack)
    new = optimizer_of(name, 8, block=new_block, pack_small=new_pack)
    saved = old.state_dict()
    if (block, pack) == (new_block, new_pack):
        new.load_state_dict(convert_checkpoint(saved, new))
        assert_identical(new.state_dict(), saved)
        new.load_state_dict(saved)
        assert_identical(new.state_dict(), saved)
        return
    said = refused(load, saved, new)
    assert f"blocks of {new_block} values with small tensors " in said
    assert f"but the checkpoint holds the states of {name} at 8 bit in " in said
    assert f"blocks of {block} values with small tensors " in said
    new.load_state_dict(convert_checkpoint(saved, new))
    pairs = zip(params_of(old), params_of(new), strict=True)
    for weight, other in pairs:
        moments = [o.read_moments(w) for o, w in ((old, weight), (new, other))]
        for number, (was, now) in enumerate(zip(*moments, strict=True), 1):
            # One small tensor is alone in the blocks that it might share.
            assert (now - was).abs().max() <= HALF_STEP[number] * was.abs().max()
    step(new)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(("block", "pack"), FORMS)
def test_every_form_goes_to_32_bit_as_what_its_codes_stand_for(name, block, pack):
    old = optimizer_of(name, 8, steps=2, block=block, pack_small=pack)
    new = optimizer_of(name, 32)
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    for weight, other in zip(params_of(old), params_of(new), strict=True):
        moments = [new.state[other][key] for key in STATES_OF_TORCH[name]]
        assert_identical(moments, old.read_moments(weight))


def test_tensors_that_no_longer_share_blocks_are_stored_anew():
    """Those kept at 32 bit filled one block: the others begin where they did in theirs."""
    sizes = (40, 100, 156, 50)
    weights, others = ([parameter(n, seed=n) for n in sizes] for _ in range(2))
    old = optimizer_of("sgd", 8, weights=weights, pack_small=True)
    for scale, weight in enumerate(weights, 1):
        weight.grad = torch.full_like(weight, 10.0**scale)
    old.step()
    new = optimizer_of(
        "sgd", 8, weights=others, pack_small=True, keep_32bit=others[1:3]
    )
    new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    for weight, other in zip(weights, others, strict=True):
        (was,), (now,) = old.read_moments(weight), new.read_moments(other)
        largest = max(old.read_moments(w)[0].abs().max() for w in weights)
        assert (now - was).abs().max() <= HALF_STEP[1] * largest
    step(new)


def test_what_a_scheduler_left_in_the_groups_is_resumed_and_copied():
    optimizer, other = (optimizer_of("sgd", 8, steps=1) for _ in range(2))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=9)
    other.load_state_dict(optimizer.state_dict())
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["max_lr"] == 0.5
    for each in (other, copy.deepcopy(optimizer)):
        assert_identical(each.state_dict()["param_groups"], [group])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [8, 32])
def test_checkpoints_of_torchs_own_optimizers_go_on_after_conversion(name, bits):
    own = optimizer_of(name, 32, steps=2)
    torchs = getattr(torch.optim, type(own)._named.__name__)
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    weights = [parameter(*p.shape) for p in params_of(own)]
    for weight, like in zip(weights, params_of(own), strict=True):
        weight.data = torch.empty_like(like).copy_(weight)
    theirs = torchs(weights, lr=0.1, weight_decay=0.0, **momentum)
    for seed in range(2):
        step(theirs, seed)
    saved, new = theirs.state_dict(), optimizer_of(name, bits)
    assert FOREIGN in refused(load, saved, new)
    new.load_state_dict(convert_checkpoint(saved, new))
    expected = optimizer_of(name, bits)
    expected.load_state_dict(convert_checkpoint(own.state_dict(), expected))
    assert_identical(states_of(new), states_of(expected))
    if name != "sgd":
        other = optimizer_of("adam" if name == "adamw" else "adamw", bits)
        said = refused(convert_checkpoint, saved, other)
        assert f"but the checkpoint holds the states of {name} at 32 bit" in said
    step(new, 2)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_checkpoints_of_bitsandbytes_form_are_read_to_the_bit(name):
    """As versions before 0.2 wrote them: steps that are counted in an int, tables, betas."""
    own = optimizer_of(name, 8, steps=3)
    saved = copy.deepcopy(own.state_dict())
    (group,) = saved["param_groups"]
    for key in ("block_size", "pack_small"):
        del group[key]
    if name == "sgd":
        group["betas"] = (group.pop("momentum"), 0.0)
        del group["nesterov"], group["decoupled_decay"]
    for number, state in saved["state"].items():
        state["step"], tensors = int(state["step"]), dict(state)
        step_of = tensors.pop("step")
        tensors |= {
            f"qmap{i}": torch.zeros(256) for i in (1, 2) if f"state{i}" in state
        }
        saved["state"][number] = {"step": step_of, WRAPPED: tensors}
    new = optimizer_of(name, 8)
    new.load_state_dict(saved)
    assert_identical(new.state_dict(), own.state_dict())
