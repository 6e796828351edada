"""Times by the clock: noise makes no mode faster than one that does strictly less."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from speechbrain_rev.planner import plan
from speechbrain_rev.planner import timing as planner_timing
from speechbrain_rev.planner.timing import (
    ASSUMED,
    Speed,
    beyond_noise,
    interleaved_seconds,
)
from speechbrain_rev.planner.trace import Work
from speechbrain_rev.reversible import Mode
from tests.unit.planner.networks import plain


def noisy_clock(monkeypatch, seed, *, factors, noise=0.1):
    """Let each block take a second times its mode's factor, off by some noise."""
    rng = random.Random(seed)

    def trace_seconds(network, step, device):
        modes = network.block_modes()
        return {
            "": 1.0,
            **{
                name: factors[Mode(mode)] * rng.uniform(1 - noise, 1 + noise)
                for name, mode in modes.items()
            },
        }

    monkeypatch.setattr(planner_timing, "trace_seconds", trace_seconds)


ALIKE = dict.fromkeys(Mode, 1.0)


@pytest.mark.parametrize("seed", range(10))
def test_noise_makes_no_block_recompute_where_memory_is_free(monkeypatch, seed):
    noisy_clock(monkeypatch, seed, factors=ALIKE)
    found = plan(plain(6), torch.randn(8, 64), 10**9, blocks=["?"])
    assert set(found.modes.values()) == {"store"}


def test_a_mode_that_is_faster_beyond_the_noise_is_taken_for_faster(monkeypatch):
    """Fresh memory can make what is stored really slower."""
    slow = {**ALIKE, Mode.STORE: 2.0}
    noisy_clock(monkeypatch, 0, factors=slow)
    found = plan(plain(6), torch.randn(8, 64), 10**9, blocks=["?"])
    assert set(found.modes.values()) == {"recompute"}


def test_what_is_slower_keeps_its_time_and_so_does_the_rest():
    taken = {
        ("", ""): [3.0, 5.0, 4.0],
        ("b", "store"): [1.0, 1.1, 1.2],
        ("b", "recompute"): [1.5, 1.3, 1.4],
        ("b", "reconstruct"): [1.0, 1.0, 1.1],
    }
    assert beyond_noise(taken) == {
        ("", ""): 4.0,
        ("b", "store"): 1.1,
        ("b", "recompute"): 1.4,
        ("b", "reconstruct"): pytest.approx(1.1, abs=1e-8),
    }
    assert beyond_noise(taken)["b", "reconstruct"] > 1.1


def test_one_repeat_has_no_spread_and_proves_nothing():
    times = {("b", "store"): [2.0], ("b", "recompute"): [0.5]}
    assert beyond_noise(times)["b", "recompute"] > 2.0
    assert beyond_noise({key: 2 * each for key, each in times.items()}) == {
        ("b", "store"): 2.0,
        ("b", "recompute"): 0.5,
    }


def test_what_is_timed_takes_turns_and_a_first_call_is_not_counted():
    called = []
    runs = {name: lambda name=name: called.append(name) for name in "ab"}
    taken = interleaved_seconds(runs, torch.device("cpu"), repeats=2)
    assert called == list("ababab")
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2}
    assert all(second >= 0 for seconds in taken.values() for second in seconds)


def test_a_speed_of_version_0_1_0_is_read_and_copies_take_it_no_time():
    document = json.loads(ASSUMED.to_json())
    del document["host_bytes_per_second"]
    old = Speed.from_json(json.dumps(document))
    assert old == replace(ASSUMED, host_bytes_per_second=math.inf)
    assert Speed.from_json(old.to_json()) == old
    work = Work(10**9, 10**6, 100)
    copies = replace(work, host_bytes=10**9)
    assert old.seconds(copies) == old.seconds(work) == ASSUMED.seconds(work)
    assert ASSUMED.seconds(copies) > ASSUMED.seconds(work)


@pytest.mark.parametrize("speed", [0, -1.0, "fast", True, [1]])
def test_a_speed_that_is_none_is_refused(speed):
    for name in ("flops_per_second", "host_bytes_per_second"):
        document = json.loads(ASSUMED.to_json()) | {name: speed}
        with pytest.raises(ValueError, match=r"no speed of a device .*above zero"):
            Speed.from_json(json.dumps(document))
