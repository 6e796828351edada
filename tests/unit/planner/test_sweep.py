"""Of all batch sizes the one that trains the most samples a second is chosen."""

import functools
import gc
import sys
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from speechbrain_rev.planner import Step, step_of, sweep
from speechbrain_rev.planner.knapsack import Cost, Infeasible
from speechbrain_rev.planner.profile import BlockProfile, Profile
from speechbrain_rev.planner.profiling import Counted
from tests.unit.planner.networks import Chained

KIB = 1024
BUDGET = 300 * KIB

#: A step of any batch, whose profiles a test makes.
STEP = Step(nn.Identity(), lambda batch, device: None, 1, torch.device("cpu"))


@pytest.fixture
def swept(monkeypatch):
    """Sweep over profiles that a function makes of a batch."""

    def swept(profile_for, batches, budget=BUDGET, **given):
        made = functools.cache(profile_for)

        @dataclass(frozen=True)
        class Profiled:
            """What a sweep asks of a profiler."""

            step: Step
            probe: None = None

            def at(self, step):
                return Profiled(step)

            def counted(self, channels):
                return Counted(self.timed(channels))

            def timed(self, channels):
                return made(self.step.batch)

        module = sys.modules["speechbrain_rev.planner.sweep"]
        monkeypatch.setattr(module, "profiler_of", lambda step, limit: Profiled(step))
        return sweep(STEP, batches, budget, **given)

    return swept


MODES = {"store": (4, 0.01), "reconstruct": (0, 0.016), "recompute": (1, 0.015)}


def profile_for(batch, fixed=0.2, bend=0.0, modes=MODES):
    """Blocks that hold and take as much as the batch is large, beside a fixed part."""
    blocks = []
    for i in range(5):
        costs = {
            (before, own): Cost(
                held * batch * KIB,
                6 * batch * KIB,
                fixed / 5 + each * batch * (1 + bend * (batch > 8)),
            )
            for before in (modes if i else [None])
            for own, (held, each) in modes.items()
        }
        blocks.append(BlockProfile(f"chain.{i}", 0, costs))
    after = dict.fromkeys(modes, 2 * batch * KIB)
    return Profile(blocks, 10 * KIB, after, 0.0, {"inputs": str(batch)})


def test_the_best_has_the_most_samples_a_second_and_need_not_be_the_largest(swept):
    result = swept(profile_for, range(1, 100))
    speeds = {plan.batch: plan.samples_per_second for plan in result.plans}
    assert speeds[result.best.batch] == max(speeds.values())
    # All blocks store up to it, and a larger one that fits is slower.
    assert set(result.best.modes.values()) == {"store"}
    assert result.best.batch < max(speeds) < result.infeasible_batch
    assert not result.untried
    assert "not tried" not in str(result)
    # With much to be shared by a step, the largest is the best.
    dear = swept(profile_for, range(1, 100), other_seconds=lambda: 1000.0)
    assert dear.best.batch == max(speeds)
    assert not dear.untried
    alone = profile_for(dear.best.batch).seconds(dear.best.modes)
    assert dear.best.seconds == pytest.approx(1000 + alone)
    # Of equally good ones it is the smallest.
    assert swept(lambda b: profile_for(b, fixed=0.0), [2, 4, 8]).best.batch == 2


@pytest.mark.parametrize(
    ("batches", "untried"),
    [([2, 4], "larger"), ([13, 20], "smaller"), ([13], "smaller and larger"),
     ([1], "larger"), ([4, 13, 20], ""), ([48, 49], "smaller")],
)  # fmt: skip
def test_a_best_batch_at_the_edge_of_those_tried_is_named_so(swept, batches, untried):
    result = swept(profile_for, batches)
    assert result.untried == untried
    words = f"{untried} batches were not tried and may be better"
    assert (words in str(result)) == bool(untried)


def test_the_sweep_ends_where_no_plan_fits(swept):
    asked = []
    result = swept(profile_for, [90, 3, 10, 80, 3], before_batch=asked.append)
    assert [plan.batch for plan in result.plans] == [3, 10]
    assert result.infeasible_batch == 80
    assert asked == [3, 10, 80]
    assert "batch 80 does not fit with any plan" in str(result)
    assert swept(profile_for, [3, 10]).infeasible_batch is None
    with pytest.raises(Infeasible, match="What helps: a budget of "):
        swept(profile_for, [80, 90])


@pytest.mark.parametrize(
    ("batches", "other", "budget", "what"),
    [
        ([], 0, BUDGET, r"batches are \[\]"),
        ([0, 1], 0, BUDGET, r"\[0, 1\]"),
        ([1], -1, BUDGET, "other_seconds gives -1"),
        ([1], float("nan"), BUDGET, "other_seconds gives nan"),
        ([1], 0, "8", "budget_bytes is .*, which is no size"),
    ],
)
def test_what_cannot_be_swept_is_refused(swept, batches, other, budget, what):
    with pytest.raises(ValueError, match=what):
        swept(profile_for, batches, budget, other_seconds=lambda: other)


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError, MemoryError, lambda: torch.empty(2**60)]
)
def test_memory_that_runs_out_is_freed_and_the_sweep_goes_on(swept, error):
    held = []

    class Activations:
        """What only the frame of the failure refers to, in a cycle."""

        def __init__(self):
            self.myself = self

    def failing(batch):
        assert not held or held[0]() is None, "what failed before is still there"
        if batch == 4:
            activations = Activations()
            held.append(weakref.ref(activations))
            # Made where it is raised, for it keeps the frames that it passed.
            raise error()
        return profile_for(batch)

    gc.disable()
    try:
        result = swept(failing, [2, 4, 6])
    finally:
        gc.enable()
    assert result.out_of_memory == [4]
    assert [plan.batch for plan in result.plans] == [2, 4, 6]
    assert (result.plans[1].samples_per_second, result.plans[1].modes) == (0, {})
    assert result.best.batch in (2, 6)
    assert "too little memory to profile these: 4" in str(result)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (MemoryError(), r"batches \[2, 4\] were profiled"),
        (RuntimeError("mat1 and mat2 cannot be multiplied"), "cannot be multiplied"),
    ],
)
def test_memory_that_always_runs_out_is_an_error_as_others_are(swept, error, what):
    def failing(batch):
        raise error

    with pytest.raises(type(error), match=what):
        swept(failing, [4, 2])


def test_times_are_fitted_by_a_line_and_how_far_they_are_off_is_reported(swept):
    modes = {mode: MODES[mode] for mode in ("store", "recompute")}
    line = swept(
        lambda b: profile_for(b, modes=modes), range(1, 10), other_seconds=lambda: 0.25
    )
    # A mode that no block can have has no time.
    of_sample = {mode: time.sample_seconds for mode, time in line.times.items()}
    assert of_sample == pytest.approx({"store": 0.05, "recompute": 0.075})
    for time in line.times.values():
        assert time.fixed_seconds == pytest.approx(0.45)
        assert time.worst_deviation < 1e-12
    assert "not linear" not in str(line)
    bent = swept(lambda b: profile_for(b, fixed=0.1, bend=0.5), range(1, 13))
    off = bent.times["store"].worst_deviation
    assert 0.05 < off < 0.5
    (row,) = (row for row in str(bent).splitlines() if row.startswith("  store "))
    assert row.endswith(f"off by {100 * off:.1f} % at most: not linear in the batch")
    for batches in ([3], [3, 7]):
        few = str(swept(profile_for, batches))
        assert few.count("too few batches to know whether it is so") == 3


def test_a_network_is_swept_by_the_clock():
    result = sweep(step_of(Chained(depth=2), torch.randn(4, 16)), [8, 16], 10**9)
    assert result.best.samples_per_second > 0
    assert result.about["batch"] == "8"
    assert result.about["seconds"].startswith("measured")
