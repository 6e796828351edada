"""What tests of the planner share: profiling is what takes their time."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from speechbrain_rev.compression import reference
from speechbrain_rev.planner import step_of
from speechbrain_rev.planner.plan import held_to_limit, plan_within
from speechbrain_rev.planner.profiling import profiler_of
from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
from tests.unit.planner.networks import SCALARS, convolutions


class Mixed(nn.Module):
    """Ordinary blocks around a chain; to recompute the first one saves next to nothing."""

    blocks = "head", "tail"

    def __init__(self):
        super().__init__()
        couplings = [
            AdditiveCoupling(convolutions(4, 1), convolutions(4, 1)) for _ in range(2)
        ]
        self.head = convolutions(8, 8)
        self.body = ReversibleChain(couplings, verify="raise", verify_every=1)
        self.tail = convolutions(8, 1)

    def forward(self, x):
        x = self.head(x)
        return self.tail(torch.cat(self.body(*x.chunk(2, dim=1)), dim=1))


class Compressing:
    """A network whose blocks may compress, and its plans, each made once."""

    def __init__(self):
        torch.manual_seed(0)
        self.module, self.x = Mixed(), torch.randn(2, 8, 30, 40)
        self.step = step_of(self.module, self.x, blocks=Mixed.blocks)
        with self.step.training():
            self.profiler = profiler_of(self.step, 1.0)
            self.profile = self.profiler.counted().profile
        self.probe = self.profiler.probe
        self.trial = self.probe.trial._replace(network=self.probe.network)
        lossless = self.limited(0.0)
        #: The least that a lossless plan takes.
        self.lossless_bytes = lossless.peak_bytes(lossless.lightest()) + SCALARS
        self.plan = functools.cache(self._plan)

    def limited(self, limit):
        return replace(self.profile, max_gradient_error=limit)

    def solve(self, profile, budget):
        return plan_within(profile, self.trial, budget)

    def _plan(self, budget, limit):
        solve = functools.partial(self.solve, budget=budget)
        return held_to_limit(self.limited(limit), solve, self.probe.gradient_error)


@contextlib.contextmanager
def _small_slices():
    """Let the codec work on small pieces, as tensors of a test are small.

    With slices twice as large the lightest plan of all keeps the limit of the error.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SLICE", 2**13)
        yield


@pytest.fixture(scope="module", autouse=True)
def small_slices():
    with _small_slices():
        yield


@pytest.fixture(scope="session")
def compressing():
    with _small_slices():
        return Compressing()
