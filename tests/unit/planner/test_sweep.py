"""Of all batch sizes the one that trains the most samples a second is found."""

import functools
import gc
import importlib
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from speechbrain_rev.planner import Step, profile, step_of, sweep
from speechbrain_rev.planner.knapsack import Cost, Infeasible, peak_bytes, solve
from speechbrain_rev.planner.profile import BlockProfile, Profile
from speechbrain_rev.planner.profiling import Counted
from tests.unit.planner.networks import Chained, encoder

KIB = 1024

#: A step of any batch, whose profiles a test makes.
STEP = Step(nn.Identity(), lambda batch, device: None, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Profiled:
    """What a sweep asks of a profiler."""

    profile_for: object
    step: Step
    probe: None = None

    def at(self, step):
        return replace(self, step=step, profile_for=functools.cache(self.profile_for))

    def counted(self, channels):
        return Counted(self.profile_for(self.step.batch))

    def timed(self, channels):
        return self.profile_for(self.step.batch)


@pytest.fixture
def swept(monkeypatch):
    """A sweep of profiles that a function makes of a batch."""
    module = importlib.import_module("speechbrain_rev.planner.sweep")

    def swept(profile_for, batches, budget=300 * KIB, **given):
        make = lambda step, limit: Profiled(profile_for, step)  # noqa: E731
        monkeypatch.setattr(module, "profiler_of", make)
        return sweep(STEP, batches, budget, **given)

    return swept


def profile_for(batch, blocks=5, fixed=0.2, bend=0.0):
    """Blocks that hold and take as much as the batch is large, beside a fixed part."""
    names = [f"chain.{i}" for i in range(blocks)]
    modes = {"store": (4, 0.01), "reconstruct": (0, 0.016), "recompute": (1, 0.015)}
    found = []
    for i, name in enumerate(names):
        costs = {
            (before, own): Cost(
                held * batch * KIB,
                6 * batch * KIB,
                fixed / blocks + each * batch * (1 + bend * (batch > 8)),
            )
            for before in (modes if i else [None])
            for own, (held, each) in modes.items()
        }
        found.append(BlockProfile(name, 0, costs))
    after = dict.fromkeys(modes, 2 * batch * KIB)
    return Profile(found, 10 * KIB, after, 0.0, {"inputs": str(batch)})


BUDGET = 300 * KIB


def test_each_batch_has_the_plan_of_its_own_knapsack(swept):
    found = swept(profile_for, range(1, 100))
    for plan in found.plans:
        profile = profile_for(plan.batch)
        *modes, _ = solve(profile.problem(), BUDGET)
        assert list(plan.modes.values()) == modes
        assert list(plan.modes) == [block.name for block in profile.blocks]
        assert plan.predicted_bytes == profile.peak_bytes(plan.modes) <= BUDGET
        assert plan.predicted_bytes == peak_bytes(profile.problem(), [*modes, "end"])
        assert plan.seconds == profile.seconds(plan.modes)
        assert plan.samples_per_second == plan.batch / plan.seconds


def test_the_best_has_the_most_samples_a_second_and_need_not_be_the_largest(swept):
    found = swept(profile_for, range(1, 100))
    speeds = {plan.batch: plan.samples_per_second for plan in found.plans}
    assert speeds[found.best.batch] == max(speeds.values())
    # All blocks store up to it, and a larger one that fits is slower.
    assert set(found.best.modes.values()) == {"store"}
    assert found.best.batch < max(speeds) < found.infeasible_batch
    # With much to be shared by a step, the largest is the best.
    dear = swept(profile_for, range(1, 100), other_seconds=lambda: 1000.0)
    assert dear.best.batch == max(speeds)
    assert f"the largest batch with a plan is {max(speeds)}" in str(found)
    assert "the largest batch with a plan is that one" in str(dear)
    assert dear.best.seconds == pytest.approx(
        1000 + profile_for(dear.best.batch).seconds(dear.best.modes)
    )


def test_the_smallest_of_equally_good_batches_is_the_best(swept):
    found = swept(lambda batch: profile_for(batch, fixed=0.0), [2, 4, 8])
    assert found.best.batch == 2


def test_the_sweep_ends_where_no_plan_fits(swept):
    asked = []

    def noted(batch):
        asked.append(batch)
        return profile_for(batch)

    found = swept(noted, [90, 3, 10, 80, 3])
    assert [plan.batch for plan in found.plans] == [3, 10]
    assert found.infeasible_batch == 80
    assert asked == [3, 10, 80]
    assert swept(profile_for, [3, 10]).infeasible_batch is None
    assert "batch 80 does not fit with any plan" in str(found)


def test_if_nothing_fits_it_says_what_is_needed(swept):
    with pytest.raises(Infeasible, match="What helps: a budget of ") as caught:
        swept(profile_for, [80, 90])
    problem = profile_for(80).problem()
    assert solve(problem, caught.value.needed_bytes)
    with pytest.raises(Infeasible):
        solve(problem, caught.value.needed_bytes - 1)


@pytest.mark.parametrize(
    ("batches", "other", "what"),
    [
        ([], 0, r"batches are \[\]"),
        ([0, 1], 0, r"\[0, 1\]"),
        ([1], -1, "other_seconds gives -1"),
        ([1], float("nan"), "other_seconds gives nan"),
    ],
)
def test_what_cannot_be_swept_is_refused(swept, batches, other, what):
    with pytest.raises(ValueError, match=what):
        swept(profile_for, batches, other_seconds=lambda: other)


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), "8", None, True])
def test_what_is_no_budget_is_refused(swept, budget):
    with pytest.raises(ValueError, match=r"budget_bytes is .*, which is no size"):
        swept(profile_for, [1], budget)


#: Made where they are raised, for they keep the frames that they passed.
OUT_OF_MEMORY = {
    "cuda": lambda: torch.cuda.OutOfMemoryError("CUDA out of memory."),
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you"),
    "windows": lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you"),
    "python": MemoryError,
}


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_memory_that_runs_out_is_freed_and_the_sweep_goes_on(swept, name):
    held = []

    class Activations:
        """What only the frame of the failure knows, in a cycle."""

        def __init__(self):
            self.myself = self

    def failing(batch):
        assert not held or held[0]() is None, "what failed before is still there"
        if batch == 4:
            activations = Activations()
            held.append(weakref.ref(activations))
            raise OUT_OF_MEMORY[name]()
        return profile_for(batch)

    gc.disable()
    try:
        found = swept(failing, [2, 4, 6])
    finally:
        gc.enable()
    assert found.out_of_memory == [4]
    assert [plan.batch for plan in found.plans] == [2, 4, 6]
    assert found.plans[1].samples_per_second == 0
    assert found.plans[1].modes == {}
    assert found.best.batch in (2, 6)
    assert "too little memory to profile these: 4" in str(found)


def test_memory_that_always_runs_out_is_an_error(swept):
    def failing(batch):
        raise MemoryError

    with pytest.raises(MemoryError, match=r"batches \[2, 4\] were profiled"):
        swept(failing, [4, 2])


def test_a_machine_really_out_of_memory_is_noticed(swept):
    def greedy(batch):
        torch.empty(2**60)
        raise AssertionError

    with pytest.raises(MemoryError, match="Memory ran out"):
        swept(greedy, [1])


def test_other_errors_are_not_taken_for_it(swept):
    def failing(batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        swept(failing, [1])


def test_times_that_are_linear_in_the_batch_are_found_to_be(swept):
    found = swept(profile_for, range(1, 10), other_seconds=lambda: 0.25)
    each = {"store": 0.05, "reconstruct": 0.08, "recompute": 0.075}
    assert set(found.times) == set(each)
    for mode, time in found.times.items():
        assert time.fixed_seconds == pytest.approx(0.45)
        assert time.sample_seconds == pytest.approx(each[mode])
        assert time.worst_deviation < 1e-12
    assert "not linear" not in str(found)


def test_times_that_are_not_are_said_not_to_be(swept):
    bent = swept(lambda b: profile_for(b, fixed=0.1, bend=0.5), range(1, 13))
    worst = max(time.worst_deviation for time in bent.times.values())
    assert 0.05 < worst < 0.5
    (store,) = (line for line in str(bent).splitlines() if line.startswith("  store "))
    off = 100 * bent.times["store"].worst_deviation
    assert store.endswith(f"off by {off:.1f} % at most: not linear in the batch")


@pytest.mark.parametrize("batches", [[3], [3, 7]])
def test_two_batches_say_nothing_of_linearity(swept, batches):
    found = swept(profile_for, batches)
    assert all(time.worst_deviation < 1e-12 for time in found.times.values())
    assert str(found).count("too few batches to know whether it is so") == 3


def test_an_encoder_is_swept_on_meta_tensors():
    with torch.device("meta"):
        module = encoder("resnet34", blocks=(1, 2, 1, 1))

    step = step_of(module, torch.randn(4, 48, 80, device="meta"))
    stored = profile(step.at(8))
    budget = stored.peak_bytes(stored.uniform("store")) + KIB
    found = sweep(step, [4, 8, 9, 80], budget)
    assert [set(plan.modes.values()) == {"store"} for plan in found.plans[:3]] == [
        True, True, False,
    ]  # fmt: skip
    assert found.infeasible_batch == 80
    assert all(plan.predicted_bytes <= budget for plan in found.plans)


def test_a_network_is_swept_by_the_clock():
    asked = []
    step = step_of(Chained(depth=2), torch.randn(4, 16))
    found = sweep(step, [8, 16], 10**9, before_batch=asked.append)
    assert asked == [8, 16]
    assert found.best.samples_per_second > 0
    assert found.about["batch"] == "8"
    assert found.about["seconds"].startswith("measured")


def test_a_mode_that_no_block_can_have_has_no_time(swept):
    def plain_profile(batch):
        profile = profile_for(batch)
        blocks = [
            replace(
                block,
                costs={k: c for k, c in block.costs.items() if "reconstruct" not in k},
            )
            for block in profile.blocks
        ]
        after = {m: n for m, n in profile.after_bytes.items() if m != "reconstruct"}
        return replace(profile, blocks=blocks, after_bytes=after)

    assert set(swept(plain_profile, [1, 2]).times) == {"store", "recompute"}
