"""SpeechBrain's recipes within a memory budget on a CUDA device."""

import math

import pytest
import torch

from speechbrain_rev.sizes import GIB
from speechbrain_rev.training.memory_budget import BrainStep, MemoryBudget
from tests.unit.training.brains import batch_of, brain_of, loader_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def trained(name, *bases, **settings):
    brain = brain_of(name, *bases, device="cuda", **settings)
    torch.manual_seed(7)
    batches = [batch_of(rows=32, seconds=3.0, seed=seed) for seed in (1, 2)]
    brain.fit([1], loader_of(*batches), progressbar=False)
    return brain


def distance(one, other):
    pairs = zip(one.modules.parameters(), other.modules.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def step_bytes(brain):
    """Take a step, and give its peak above weights, gradients and optimizer states."""
    batch = batch_of(rows=32, seconds=3.0, seed=3)
    brain.modules.train()
    for parameter in brain.modules.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    brain.fit_batch(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture
def kernels_that_repeat():
    """Have torch choose them where it has any; others differ more in a second run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("kernels_that_repeat")
@pytest.mark.parametrize("name", ["ecapa", "resnet", "conformer", "wavlm"])
def test_two_lines_change_memory_and_nothing_else(name):
    plain, again = trained(name), trained(name)
    rounding = distance(plain, again)  # what kernels that do not repeat make of it
    stored = step_bytes(plain)
    fixed = BrainStep(plain).fixed_bytes()
    budget = math.ceil((fixed + 0.7 * stored + GIB) / 0.92)
    brain = trained(name, MemoryBudget, memory_budget=budget)
    assert "recompute" in brain.memory_plan.modes.values()
    # The plain one has taken one more step since.
    assert distance(brain, again) <= 2 * rounding
    assert step_bytes(brain) <= 0.75 * stored


def test_a_step_that_does_not_fit_stored_is_planned_from_smaller_ones():
    plain = trained("ecapa")
    stored = step_bytes(plain)
    fixed = BrainStep(plain).fixed_bytes()
    budget = math.ceil((fixed + 0.7 * stored + GIB) / 0.92)
    total = torch.cuda.get_device_properties(0).total_memory
    del plain
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    try:
        allowed = held + 3 * fixed + 0.95 * stored
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        with pytest.warns(UserWarning, match="does not fit"):
            brain = trained("ecapa", MemoryBudget, memory_budget=budget)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "samples" in brain.memory_plan.about["bytes"]
    assert step_bytes(brain) <= 0.75 * stored
