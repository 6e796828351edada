import copy
import pathlib
import runpy
import subprocess
import sys

import pytest
import torch

from speechbrain_rev.optim import build_optimizer, convert_checkpoint
from tests.unit.optim.steps import DEVICES, assert_identical

SCRIPT = pathlib.Path(__file__).with_name("resumable_run.py")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_a_new_process_resumes_bit_for_bit_through_the_checkpointer(tmp_path, script):
    expected = {}
    for case in script["CASES"]:
        network, optimizer, checkpointer = script["run"](case, tmp_path / case)
        script["train"](network, optimizer, 0, script["SAVED_AFTER"])
        checkpointer.save_checkpoint()
        script["train"](network, optimizer, script["SAVED_AFTER"], script["STEPS"])
        expected[case] = script["outcome"](network, optimizer)
    subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        check=True,
    )
    for case, uninterrupted in expected.items():
        resumed = torch.load(tmp_path / f"{case}.pt", weights_only=True)
        assert_identical(resumed, uninterrupted)


@pytest.mark.parametrize("case", ["sgd8", "adamw8"])
def test_without_the_optimizers_states_a_resumed_run_would_differ(
    tmp_path, script, case
):
    network, optimizer, _ = script["run"](case, tmp_path)
    script["train"](network, optimizer, 0, 3)
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    script["train"](network, optimizer, 3, 6)
    fresh, fresh_optimizer, _ = script["run"](case, tmp_path)
    fresh.load_state_dict(weights)
    fresh_optimizer.param_groups[0]["lr"] *= 0.9**3
    script["train"](fresh, fresh_optimizer, 3, 6)
    assert not torch.equal(fresh[0].weight, network[0].weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["sgd8", "adamw8"])
def test_loaded_states_have_the_bits_kind_and_place_of_the_saved_ones(
    tmp_path, script, case, device
):
    network, optimizer, checkpointer = script["run"](case, tmp_path, device)
    script["train"](network, optimizer, 0, 2)
    checkpointer.save_checkpoint()
    _, loaded, checkpointer = script["run"](case, tmp_path, device)
    checkpointer.recover_if_possible()
    assert_identical(loaded.state_dict(), optimizer.state_dict())
    for state in loaded.state.values():
        for value in state.values():
            assert not isinstance(value, torch.Tensor) or value.device.type == device


def trained(layer=None, **changes):
    """An optimizer that has made a step with a weight of 64 x 64."""
    layer = layer or torch.nn.Linear(64, 64)
    options = {"name": "sgd", "bits": 8, "lr": 0.1} | changes
    optimizer = build_optimizer(layer.parameters(), **options)
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        (("sgd", 32), ("sgd", 8)),
        (("sgd", 8), ("sgd", 32)),
        (("adamw", 8), ("sgd", 8)),
        (("adam", 8), ("adamw", 8)),
        (("adamw", 32), ("adam", 32)),
        (("adamw", 32), ("sgd", 32)),
        (("adamw", 32), ("adamw", 8)),
    ],
)
def test_states_of_another_optimizer_or_precision_are_refused(saved, loading):
    source = trained(name=saved[0], bits=saved[1])
    target = trained(name=loading[0], bits=loading[1])
    before = copy.deepcopy(target.state_dict())
    message = (
        f"This optimizer is {loading[0]} at {loading[1]} bit, but the checkpoint holds "
        f"the states of {saved[0]} at {saved[1]} bit.*convert_checkpoint"
    )
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(source.state_dict())
    assert_identical(target.state_dict(), before)


@pytest.mark.parametrize("bits", [8, 32])
def test_states_of_an_optimizer_from_elsewhere_are_refused(bits):
    layer = torch.nn.Linear(64, 64)
    foreign = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 64)).sum().backward()
    foreign.step()
    with pytest.raises(
        ValueError, match="not written by an optimizer of speechbrain_rev"
    ):
        trained(bits=bits).load_state_dict(foreign.state_dict())
    with pytest.raises(
        ValueError, match="not written by an optimizer of speechbrain_rev"
    ):
        trained(bits=bits).load_state_dict(layer.state_dict())


def load(checkpoint, optimizer):
    optimizer.load_state_dict(checkpoint)


def malformed(part, value):
    """A checkpoint of which one part is another value, or missing if that is None."""
    checkpoint = copy.deepcopy(trained().state_dict())
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
        (None, "checkpoint is a NoneType; give the dict"),
        ([1], "checkpoint is a list; give the dict"),
        ("optimizer.ckpt", "checkpoint is a str; give the dict"),
        ({}, "not written by an optimizer of speechbrain_rev"),
        ({"param_groups": None}, "not written by an optimizer of speechbrain_rev"),
        ({"param_groups": [1]}, "not written by an optimizer of speechbrain_rev"),
        (malformed("built_as", "x"), "not written by an optimizer of speechbrain_rev"),
        (malformed("built_as", [8]), "not written by an optimizer of speechbrain_rev"),
        (malformed("params", None), "it is of sgd at 8 bit, but has no .*'params'"),
        (malformed("params", 2), "it is of sgd at 8 bit, but has no .*'params'"),
        (malformed("state", None), "it is of sgd at 8 bit, but has no dict of states"),
        (malformed("state", [1]), "it is of sgd at 8 bit, but has no dict of states"),
        (malformed("state", {0: 1}), "sgd at 8 bit, but has no dict of states"),
    ],
)
def test_what_has_not_the_form_of_a_checkpoint_is_refused(take, checkpoint, message):
    target = trained()
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match=message):
        take(checkpoint, target)
    assert_identical(target.state_dict(), before)


@pytest.mark.parametrize("keeps", [True, False])
def test_states_that_keep_other_parameters_at_32_bit_are_refused(keeps):
    layer, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    plain, keeping = trained(layer), trained(other, keep_32bit=other)
    source, target = (keeping, plain) if keeps else (plain, keeping)
    with pytest.raises(
        ValueError, match=r"parameter 0, .*keep_32bit as in.*convert_chec"
    ):
        target.load_state_dict(source.state_dict())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("bits", [8, 32])
def test_states_of_another_network_are_refused(name, bits):
    target = trained(name=name, bits=bits)
    wide = trained(torch.nn.Linear(64, 128), name=name, bits=bits)
    with pytest.raises(ValueError, match=r"shape \[64, 64\], .* shape \[128, 64\]"):
        target.load_state_dict(wide.state_dict())
    short = trained(torch.nn.Linear(64, 64, bias=False), name=name, bits=bits)
    with pytest.raises(ValueError, match=r"one group of 2 parameters.*the first has 1"):
        target.load_state_dict(short.state_dict())


@pytest.mark.parametrize("bits", [8, 32])
def test_a_checkpoint_from_before_the_first_step_loads(bits):
    layer = torch.nn.Linear(64, 64)
    fresh = build_optimizer(layer.parameters(), name="sgd", bits=bits, lr=0.3)
    target = trained(bits=bits)
    target.load_state_dict(fresh.state_dict())
    assert not target.state
    assert target.param_groups[0]["lr"] == 0.3


def test_plain_sgd_without_momentum_resumes_at_32_bit():
    source, target = (trained(bits=32, momentum=0.0) for _ in range(2))
    target.load_state_dict(source.state_dict())
    assert_identical(target.state_dict(), source.state_dict())
