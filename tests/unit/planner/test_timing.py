"""Times by the clock: noise makes no mode faster than one that does strictly less."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from speechbrain_rev.catalog import steps
from speechbrain_rev.planner import plan, timing
from speechbrain_rev.planner.timing import (
    ASSUMED,
    Speed,
    beyond_noise,
    copied_bytes_per_second,
    interleaved_seconds,
)
from speechbrain_rev.planner.trace import Work
from speechbrain_rev.reversible import Mode
from tests.unit.planner.networks import plain

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("stored_seconds", "seeds", "expected"),
    [
        (1.0, range(2), "store"),
        # Fresh memory can make what is stored really slower.
        (2.0, [0], "recompute"),
    ],
)
def test_a_mode_is_faster_than_storing_beyond_the_noise_alone(
    monkeypatch, stored_seconds, seeds, expected
):
    factors = {**dict.fromkeys(Mode, 1.0), Mode.STORE: stored_seconds}
    for seed in seeds:
        noise = random.Random(seed)

        def trace_seconds(network, step, device, noise=noise):
            modes = network.block_modes().items()
            taken = {n: factors[Mode(m)] * noise.uniform(0.9, 1.1) for n, m in modes}
            return {"": 1.0, **taken}

        monkeypatch.setattr(timing, "trace_seconds", trace_seconds)
        planned = plan(plain(6), torch.randn(8, 64), 10**9, blocks=["?"])
        assert set(planned.modes.values()) == {expected}


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


def test_a_gpu_s_copies_to_the_host_and_back_are_timed_and_a_cpu_has_none(monkeypatch):
    assert copied_bytes_per_second(CPU) == math.inf
    monkeypatch.setattr(timing, "seconds_of", lambda run, device: 0.5)
    rate = copied_bytes_per_second(torch.device("meta"))
    assert rate == 2 * timing._COPIED_BYTES / 0.5
    monkeypatch.setattr(steps, "copied_bytes_per_second", lambda device: 7.0)
    speed = steps.calibrate(CPU, names=("resnet34",), frames=9, repeats=1)
    assert speed.host_bytes_per_second == 7.0


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
    document["host_bytes_per_second"] = 0
    with pytest.raises(ValueError, match=r"no speed of a device .*above zero"):
        Speed.from_json(json.dumps(document))
