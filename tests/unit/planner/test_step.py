"""A step of any module: other batches, and losses and devices of its own."""

import pytest
import torch
from torch import nn

from speechbrain_rev.planner import plan, step_of
from speechbrain_rev.planner.network import tensors_of
from speechbrain_rev.planner.step import NoStep
from tests.unit.planner.networks import SCALARS, Chained, Scaled, plain

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS = torch.arange(12.0).view(4, 3)


def step_of_rows(batch):
    return step_of(nn.Sequential(nn.Linear(3, 3)), batch, blocks="?")


BATCHES = {
    "tensor": ROWS,
    "tuple": (ROWS, ROWS[:, 0]),
    "dict": {"feats": ROWS, "lengths": ROWS[:, 0], "scale": torch.tensor(2.0)},
    "nested": [{"feats": ROWS}, [ROWS, None, 3]],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("count", [1, 4, 11])
def test_other_batches_are_of_the_example_s_rows_sliced_and_repeated(name, count):
    given = BATCHES[name]
    step = step_of_rows(given).at(count)
    assert (step.batch, step.about["batch"]) == (count, str(count))
    inputs = step.inputs(count, CPU)
    assert type(inputs) is type(given)
    for own, example in zip(tensors_of(inputs), tensors_of(given), strict=True):
        if example.dim():
            example = torch.stack([example[i % 4] for i in range(count)])
        assert torch.equal(own, example)


def test_inputs_are_detached_and_need_gradients_where_the_example_does():
    leaf = torch.ones(4, 3, requires_grad=True)
    step = step_of_rows((leaf * 2, ROWS))
    for count in (2, 4, 9):
        first, second = step.inputs(count, CPU)
        assert first.is_leaf
        assert first.requires_grad
        assert not second.requires_grad
    first.sum().backward()
    assert leaf.grad is None


@pytest.mark.parametrize(
    "batch", [(ROWS, torch.ones(1, 3)), torch.tensor(1.0), torch.ones(0, 3), ()]
)
def test_example_batches_that_cannot_be_divided_are_refused(batch):
    step, count = step_of_rows(batch), len(tensors_of(batch))
    assert len(tensors_of(step.inputs(step.batch, CPU))) == count
    assert len(tensors_of(step.few(2))) == count
    words = r"cannot be made into 2 samples: .* \[.*\] and ne"
    with pytest.raises(NoStep, match=words):
        step.inputs(2, CPU)
    assert "batch" not in step.about


def test_batches_may_be_tuples_or_dicts_and_losses_ones_own():
    x, scale = torch.randn(64, 64), torch.rand(64, 1)
    plans = [
        plan(Scaled(*plain(2)), batch, 10**9, blocks="?", loss=loss, measure=False)
        for batch in ((x, scale), [x, scale], {"scale": scale, "feats": x})
        for loss in (None, lambda y: y.square().sum())
    ]
    peaks = [each.measured_bytes for each in plans]
    assert max(peaks) - min(peaks) <= SCALARS
    assert plans[0].about["inputs"] == "[[64, 64], [64, 1]]"


class Silent(nn.Sequential):
    """Returns no tensor."""

    def __init__(self):
        super().__init__(*plain(2))

    def forward(self, x):
        return type(super().forward(x)).__name__


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize(
    ("network", "loss", "message"),
    [
        (plain(2), lambda y: y, "The loss is .* a tensor of one number"),
        (plain(2), lambda y: 3.0, "The loss is .* a tensor of one number"),
        (plain(2).requires_grad_(False), None, "depends on nothing that is trained"),
        (Silent(), None, "without a tensor. Give a loss"),
    ],
)
def test_what_is_no_loss_is_refused(network, loss, message, measure):
    with pytest.raises(ValueError, match=message):
        plan(network, torch.randn(4, 64), 10**9, blocks="?", loss=loss, measure=measure)


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_plans_are_made_where_gradients_are_off(off, measure):
    module, x = plain(2), torch.randn(4, 64)
    expected = plan(module, x, 10**9, blocks=["?"], measure=False)
    with off():
        planned = plan(module, x.clone(), 10**9, blocks=["?"], measure=measure)
        assert not torch.is_grad_enabled()
    assert abs(planned.measured_bytes - expected.measured_bytes) <= SCALARS


def test_a_batch_on_meta_is_planned_without_computing():
    planned = plan(plain(2), torch.randn(8, 64, device=META), "1GB", blocks="?")
    assert planned.about["seconds"].startswith("estimated")
    chained = plan(Chained(depth=2), torch.randn(8, 16, device=META), "1GB")
    assert chained.about["reconstruction"] == "not verified: no numbers on meta"
