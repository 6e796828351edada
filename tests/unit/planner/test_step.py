"""A step of any module: other batches, the largest that fits, and what helps."""

import re

import pytest
import torch
from torch import nn

from speechbrain_rev.planner import (
    Infeasible,
    largest_batch,
    plan,
    plan_step,
    profile,
    remedies,
    step_of,
    sweep,
)
from speechbrain_rev.planner.step import NoStep, tensors_of
from speechbrain_rev.planner.timing import ASSUMED
from speechbrain_rev.sizes import enough_text
from tests.unit.planner.networks import Chained, half, plain
from tests.unit.planner.test_profiling import NETWORKS, X

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS = torch.arange(12.0).view(4, 3)


def step_of_rows(batch):
    return step_of(nn.Sequential(nn.Linear(3, 3)), batch, blocks="?")


BATCHES = {
    "tensor": ROWS,
    "tuple": (ROWS, ROWS[:, 0]),
    "list": [ROWS, ROWS[:, 0]],
    "dict": {"feats": ROWS, "lengths": ROWS[:, 0], "scale": torch.tensor(2.0)},
    "nested": ({"feats": ROWS}, [ROWS, None, 3]),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("count", [1, 3, 4, 5, 11])
def test_other_batches_are_of_the_example_s_rows_sliced_and_repeated(name, count):
    given = BATCHES[name]
    found = step_of_rows(given).inputs(count, CPU)
    assert type(found) is type(given)
    for own, example in zip(tensors_of(found), tensors_of(given), strict=True):
        if example.dim():
            wanted = torch.stack([example[i % 4] for i in range(count)])
            assert torch.equal(own, wanted)
        else:
            assert torch.equal(own, example)


def test_a_step_of_another_batch_is_about_that_one():
    step = step_of_rows(ROWS)
    assert (step.batch, step.about["batch"]) == (4, "4")
    other = step.at(7)
    assert (other.batch, other.about["batch"]) == (7, "7")
    assert step.batch == 4
    assert profile(other).about["batch"] == "7"


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
    step = step_of_rows(batch)
    whole = step.inputs(step.batch, CPU)
    assert len(tensors_of(whole)) == len(tensors_of(batch))
    with pytest.raises(
        NoStep, match=r"cannot be made into 2 samples: .* \[.*\] and ne"
    ):
        step.inputs(2, CPU)
    assert "batch" not in step.about


def test_a_batch_on_meta_is_planned_without_computing():
    found = plan(plain(2), torch.randn(8, 64, device=META), "1GB", blocks="?")
    assert found.about["seconds"].startswith("estimated")
    chained = plan(Chained(depth=2), torch.randn(8, 16, device=META), "1GB")
    assert chained.about["reconstruction"] == "not verified: no numbers on meta"


def normalised():
    """Does not run with one sample, of which there are no batch statistics."""
    torch.manual_seed(0)
    return nn.Sequential(*(half(32) for _ in range(3)))


BLOCKS = {"blocks": "?"}
NETWORK = {
    "plain": lambda: step_of(plain(3), torch.randn(16, 64), **BLOCKS),
    "chain": lambda: step_of(Chained(depth=2), torch.randn(64, 16), speed=ASSUMED),
    "normalised": lambda: step_of(
        normalised(), torch.randn(16, 32), **BLOCKS, speed=ASSUMED
    ),
    "made in its first step": lambda: step_of(
        NETWORKS["first_step"][0](), X[:4], blocks="b.*"
    ),
}


@pytest.mark.parametrize("name", NETWORK)
def test_the_largest_batch_has_a_plan_and_one_more_has_none(name):
    step = NETWORK[name]()
    lightest = profile(step)
    budget = 4 * lightest.peak_bytes(lightest.lightest())
    batch = largest_batch(step, budget)
    assert batch > step.batch
    assert plan_step(step.at(batch), budget).measured_bytes <= budget
    larger = profile(step.at(batch + 1))
    assert larger.peak_bytes(larger.lightest()) > budget


def test_where_not_even_one_sample_fits_the_largest_batch_is_none():
    assert largest_batch(NETWORK["plain"](), 1000) == 0


@pytest.mark.parametrize("budget", [0, 1, 1000])
def test_what_the_smallest_budgets_lack_is_reported(budget):
    with pytest.raises(Infeasible) as caught:
        plan_step(NETWORK["plain"](), budget)
    assert re.fullmatch(
        r"Even the lightest plan peaks at \S+ \S+ \(\d+ bytes\), but the budget is \d+ "
        r"bytes \(\d+ bytes\)\. It lacks \S+ \S+\. What helps: shorter .*; a budget of "
        r"[0-9.]+ \S+\.",
        str(caught.value),
    )


def layer():
    return nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU())


def compressed_step():
    """Four samples of it fit 4 MiB without loss, and seven with."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(*(layer() for _ in range(6))) for _ in range(2))
    x = torch.randn(2, 8, 2000)
    return step_of(nn.Sequential(*blocks), x, **BLOCKS, speed=ASSUMED)


def test_more_samples_fit_where_the_gradient_may_have_an_error():
    step = compressed_step()
    lossless, lossy = (
        largest_batch(step, "4MB", max_gradient_error=limit) for limit in (None, 0.5)
    )
    assert step.batch < lossless < lossy


def test_larger_batches_are_swept_where_the_gradient_may_have_an_error():
    step = compressed_step()
    assert sweep(step, [2, 6], "4MB").infeasible_batch == 6
    swept = sweep(step, [2, 6], "4MB", max_gradient_error=0.5)
    assert swept.infeasible_batch is None
    assert set(swept.plans[0].modes.values()) == {"store"}
    assert "compress" in swept.plans[1].modes.values()
    assert swept.about["gradient error"] == "measured at batch 2, of the example batch"


@pytest.mark.parametrize("name", ["lstm", "item"])
def test_a_network_that_is_counted_in_real_steps_has_no_largest_batch(name):
    step = step_of(NETWORKS[name][0](), X[:4], blocks="b.*")
    with pytest.raises(ValueError, match="Plan for each batch, as sweep does"):
        largest_batch(step, "1GB")
    with pytest.raises(Infeasible) as caught:
        plan_step(step, 1000)
    assert "a batch of" not in str(caught.value)
    assert "a budget of" in str(caught.value)


def test_a_batch_that_cannot_be_divided_has_no_largest_one_and_is_no_remedy():
    class Scaled(nn.Sequential):
        def forward(self, x, scale):
            return super().forward(x * scale)

    step = step_of(Scaled(*plain(2)), (torch.randn(8, 64), torch.ones(1, 64)), **BLOCKS)
    with pytest.raises(NoStep, match="same number of rows"):
        largest_batch(step, "1GB")
    with pytest.raises(Infeasible) as caught:
        plan_step(step, 1000)
    assert "a batch of" not in str(caught.value)


class Eight(nn.Sequential):
    """Runs with eight samples alone."""

    def forward(self, x):
        return super().forward(x.view(8, 64))


def test_a_network_that_runs_with_one_batch_alone_has_no_largest_one():
    step = step_of(Eight(*plain(2)), torch.randn(8, 64), **BLOCKS)
    with pytest.raises(ValueError, match="A step of 2 samples does not run"):
        largest_batch(step, "1GB")


def test_remedies_are_those_of_the_refusal_and_each_is_enough():
    step = step_of(plain(3), torch.randn(256, 64), **BLOCKS, speed=ASSUMED)
    lightest = profile(step)
    budget = lightest.peak_bytes(lightest.lightest()) // 2
    with pytest.raises(Infeasible) as caught:
        plan_step(step, budget)
    found = remedies(step, caught.value)
    assert str(caught.value).endswith(f" What helps: {'; '.join(found)}.")
    batch, shorter, blocks, size = found
    assert batch == f"a batch of {largest_batch(step, budget)}"
    assert plan_step(step.at(int(batch.split()[-1])), budget)
    assert shorter == "shorter or smaller inputs"
    assert blocks == "more blocks than blocks='?': what is outside of blocks stores"
    assert size == f"a budget of {enough_text(caught.value.needed_bytes)}"
    assert plan_step(step, size.removeprefix("a budget of "))


def test_names_with_braces_are_advised_as_they_are():
    named = nn.ModuleDict({"{a}": nn.Linear(4, 4)})
    named.forward = lambda x: named["{a}"](x)
    found = remedies(step_of(named, torch.randn(2, 4), blocks="{a}"), Infeasible(9, 8))
    assert "more blocks than blocks='{a}': what is outside of blocks stores" in found


@pytest.mark.parametrize(
    "use",
    [
        lambda step: plan_step(step, "1GB"),
        profile,
        lambda step: sweep(step, [4], "1GB"),
        lambda step: largest_batch(step, "1GB"),
    ],
)
def test_what_is_warned_of_is_reported_at_the_caller_s_line(use):
    module = nn.Sequential(*plain(2), nn.ReLU(inplace=True))
    step = step_of(module, torch.randn(8, 64), **BLOCKS)
    with pytest.warns(UserWarning, match="Not recomputed") as caught:
        use(step)
    assert [warning.filename for warning in caught] == [__file__]
