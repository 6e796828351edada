"""Times by the clock, whose noise makes no mode faster, and speeds fitted to them."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from speechbrain_rev.catalog import steps
from speechbrain_rev.planner import plan, timing
from speechbrain_rev.planner.timing import (
    beyond_noise,
    copied_bytes_per_second,
    fitted_speed,
    interleaved_seconds,
)
from speechbrain_rev.reversible import Mode
from speechbrain_rev.speed import ASSUMED, Speed, Work
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
    factors = {**dict.fromkeys(Mode, 1.0), Mode.STORE: stored_seconds}
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


WORKS = [
    Work(10**9, 10**6, 50),
    Work(10**8, 10**8, 10),
    Work(10**7, 10**5, 90),
    Work(10**9, 10**8, 20),
]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_speeds_are_fitted_to_times(noise):
    true = Speed(2e12, 3e11, 4e4, {"device": "a test"})
    turns = [1 + noise, 1 - noise, 1, 1 + noise]
    seconds = [t * true.seconds(w) for w, t in zip(WORKS, turns, strict=True)]
    fitted = fitted_speed(WORKS, seconds, true.about)
    for work in WORKS:
        expected = pytest.approx(true.seconds(work), rel=3 * noise + 1e-9)
        assert fitted.seconds(work) == expected
    assert fitted.about["error of a block's time"].startswith("median ")


def test_what_costs_nothing_is_infinitely_fast_and_written_so():
    only_flops = Speed(1e12, math.inf, math.inf, {"torch": "2", "device": "a test"})
    seconds = [only_flops.seconds(work) for work in WORKS]
    assert fitted_speed(WORKS, seconds, only_flops.about).bytes_per_second > 1e15
    assert Speed.from_json(only_flops.to_json()) == only_flops
    assert "Infinity" not in only_flops.to_json()
    assert str(only_flops).startswith("a test, 1 TFLOP/s, inf GiB/s")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"flops_per_second": -1}, "each must be above zero"),
        ({"flops_per_second": True}, "each must be above zero"),
        ({"bytes_per_second": math.nan}, "each must be above zero"),
        ({"host_bytes_per_second": 0}, "each must be above zero"),
        (
            {f"{each}_per_second": None for each in ("flops", "bytes", "operations")},
            "No speed is finite",
        ),
        ({"about": {"torch": "2"}}, "must name the device, under 'device'"),
        ({"about": "a GPU"}, "about is 'a GPU'"),
        ({"about": {"device": 3}}, "about has 3 under 'device'"),
        ({"cards": 3}, "'cards' is none of its names: flops_per_second, "),
        ("{}", "'flops_per_second' is missing"),
        ("[]", "takes names with values"),
        ("[" * 200_000, "recursion"),
    ],
)
def test_what_is_no_speed_is_refused(changed, reason):
    if isinstance(changed, dict):
        changed = json.dumps(json.loads(ASSUMED.to_json()) | changed)
    with pytest.raises(ValueError, match=f"no speed of a device .*{reason}"):
        Speed.from_json(changed)


def test_a_file_that_is_no_text_is_no_speed(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(ASSUMED.to_json())
    assert Speed.load(path) == ASSUMED
    path.write_bytes(b"\x8b")
    with pytest.raises(ValueError, match=r"speed\.json: .*\(it is no text in UTF-8\)"):
        Speed.load(path)
