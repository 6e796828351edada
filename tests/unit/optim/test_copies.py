"""Copies and pickles of the 8-bit optimizers."""

import copy
import pickle

import pytest
import torch

from speechbrain_rev.optim import build_optimizer
from tests.unit.optim.steps import DEVICES, NAMES, assert_identical, parameter, step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
def test_a_copy_goes_on_as_the_optimizer_would_and_leaves_it_alone(
    duplicate, steps, name, device
):
    weights = [parameter(70, 70, device=device) for _ in range(3)]
    optimizer = build_optimizer(
        weights, name=name, bits=8, lr=0.1, keep_32bit=weights[1]
    )
    for seed in range(steps):
        step(optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.05
    before = copy.deepcopy([optimizer.state_dict(), weights])
    copied_weights, copied = duplicate((weights, optimizer))
    for seed in (steps, steps + 1):
        step(copied, seed)
    assert_identical([optimizer.state_dict(), weights], before)
    for seed in (steps, steps + 1):
        step(optimizer, seed)
    expected = [optimizer.state_dict(), weights]
    assert_identical([copied.state_dict(), copied_weights], expected)
    states = [copied.state[weight]["state1"].dtype for weight in copied_weights]
    assert states == [torch.uint8, torch.float32, torch.uint8]
    copied.load_state_dict(optimizer.state_dict())
