"""Times by the clock, whose noise makes no mode faster."""

import random

import pytest
import torch

from speechbrain_rev.planner import plan, timing
from speechbrain_rev.planner.timing import (
    beyond_noise,
    interleaved_seconds,
)
from speechbrain_rev.reversible import Mode
from tests.unit.planner.networks import plain

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("stored_seconds", "expected"),
    # Fresh memory can make what is stored really slower.
    [(1.0, "store"), (2.0, "recompute")],
)
def test_a_mode_is_faster_than_storing_beyond_the_noise_alone(
    monkeypatch, stored_seconds, expected
):
    once = dict.fromkeys((Mode.STORE, Mode.SELECTIVE), stored_seconds)
    factors = {**dict.fromkeys(Mode, 1.0), **once}
    noise = random.Random(0)

    def trace_seconds(network, step, device):
        modes = network.block_modes().items()
        taken = {n: factors[Mode(m)] * noise.uniform(0.9, 1.1) for n, m in modes}
        return {"": 1.0, **taken}

    monkeypatch.setattr(timing, "trace_seconds", trace_seconds)
    planned = plan(plain(6), torch.randn(8, 64), 10**9, blocks=["?"])
    assert {Mode(mode).alone for mode in planned.modes.values()} == {expected}


@pytest.mark.parametrize(
    ("stored", "other", "expected"),
    [
        ([1.0, 1.0, 1.0], [2.0, 3.0, 2.5], 2.5),
        ([1.0, 1.1, 0.9], [0.9, 0.9, 0.9], 1.0 + 1e-9),
        ([1.0, 1.1, 0.9], [0.5, 0.5, 0.5], 0.5),
        ([2.0], [0.5], 2.0 + 1e-9),  # One repeat has no spread and proves nothing.
        ([2.0, 2.0], [0.5, 0.5], 0.5),
    ],
)
def test_what_is_faster_within_the_noise_takes_as_long_as_storing(
    stored, other, expected
):
    times = {("b", "store"): stored, ("b", "recompute"): other, ("", ""): [3.0]}
    medians = beyond_noise(times)
    assert medians["b", "recompute"] == pytest.approx(expected, abs=1e-12)
    assert medians["b", "store"] == sorted(stored)[len(stored) // 2]
    assert medians["", ""] == 3.0


def test_what_is_timed_takes_turns_and_a_first_call_is_not_counted():
    called = []
    runs = {name: lambda name=name: called.append(name) for name in "ab"}
    taken = interleaved_seconds(runs, CPU, repeats=2)
    assert called == list("ababab")
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2}
    assert all(second >= 0 for seconds in taken.values() for second in seconds)
