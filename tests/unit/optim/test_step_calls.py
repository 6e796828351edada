"""What happens around the updates of an 8-bit step: closures, hooks, refusals."""

import copy

import pytest
import torch

from speechbrain_rev.optim import build_optimizer
from tests.unit.optim.steps import NAMES, assert_identical, parameter, step


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by_closure", [False, True])
def test_a_sparse_gradient_is_refused_before_anything_is_changed(name, by_closure):
    dense, sparse = parameter(64, 64), parameter(64, 64)
    optimizer = build_optimizer([dense, sparse], name=name, bits=8, lr=0.1)
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


def test_hooks_run_once_a_step_where_the_librarys_own_optimizer_is_in_use_too():
    import bitsandbytes

    # torch wraps the step of each class of which there is an optimizer.
    bitsandbytes.optim.SGD([parameter(2)], lr=0.1, momentum=0.9)
    optimizer = build_optimizer([parameter(64, 64)], name="sgd", bits=8, lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step(optimizer)
    assert calls == ["before", "after"]
