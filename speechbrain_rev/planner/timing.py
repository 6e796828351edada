"""How long each block takes in each mode: by the clock, or by what it does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from speechbrain_rev.planner.network import Network
from speechbrain_rev.planner.trace import Step, trace_seconds, trace_work
from speechbrain_rev.reversible import Mode

#: Seconds by block and mode; of what is outside of blocks under ("", "").
Seconds = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Speed:
    """How fast a device is, to estimate times from operations.

    Attributes
    ----------
    flops_per_second : float
        Of convolutions and matrix products.
    bytes_per_second : float
        Read and written by all operations.
    """

    flops_per_second: float
    bytes_per_second: float


#: Where no device was measured: a card of 11 GB at about half of its peak figures in
#: float32 (an RTX 2080 Ti has 13.4 TFLOP/s and 616 GB/s). A plan depends on the ratio.
ASSUMED = Speed(flops_per_second=6.7e12, bytes_per_second=0.4e12)


def estimated_seconds(
    network: Network, step: Step, speed: Speed = ASSUMED
) -> dict[tuple[str, str], float]:
    """Estimate times from counts of operations.

    Parameters
    ----------
    network : Network
        Its blocks get each mode in turn, and then those that they had.
    step : callable
        Runs forward and backward pass, on meta tensors too.
    speed : Speed
        Of the device.

    Returns
    -------
    dict of (str, str) to float
        Seconds by block and mode, under ("", "") of the rest.
    """
    seconds: dict[tuple[str, str], float] = {}
    for chosen in _uniform(network):
        for name, work in trace_work(network, step).items():
            taken = work.flops / speed.flops_per_second
            taken += work.moved_bytes / speed.bytes_per_second
            seconds.setdefault((name, chosen.get(name, "")), taken)
    return seconds


def measured_seconds(
    network: Network, step: Step, device: torch.device, *, repeats: int = 5
) -> dict[tuple[str, str], float]:
    """Take times by the clock: medians of training steps, the modes taking turns.

    Parameters
    ----------
    network : Network
        Its blocks get each mode in turn, and then those that they had.
    step : callable
        Runs forward and backward pass.
    device : torch.device
        Where it runs.
    repeats : int
        Steps of each mode, after one that is not counted.

    Returns
    -------
    dict of (str, str) to float
        Seconds by block and mode, under ("", "") of the rest.
    """
    taken: dict[tuple[str, str], list[float]] = {}
    for repeat in range(-1, repeats):
        for chosen in _uniform(network):
            for name, seconds in trace_seconds(network, step, device).items():
                if repeat >= 0:
                    taken.setdefault((name, chosen.get(name, "")), []).append(seconds)
    return {key: statistics.median(times) for key, times in taken.items()}


def seconds_of(
    run: Callable[[], Any], device: torch.device, *, repeats: int = 5
) -> float:
    """Take the time of anything by the clock: the median, until the device is done.

    Parameters
    ----------
    run : callable
        What is timed.
    device : torch.device
        Where it runs.
    repeats : int
        How often, after a call that is not counted.

    Returns
    -------
    float
        Seconds.

    Examples
    --------
    >>> x = torch.ones(64, 64)
    >>> 0 < seconds_of(lambda: x @ x, x.device) < 1
    True
    """
    taken = []
    for repeat in range(-1, repeats):
        _wait_for(device)
        start = time.perf_counter()
        run()
        _wait_for(device)
        if repeat >= 0:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _uniform(network: Network) -> Iterator[dict[str, str]]:
    """Give all blocks each mode in turn; those that cannot have it recompute."""
    allowed = network.allowed_modes()
    kept = dict(network.block_modes())
    try:
        for mode in Mode:
            if not any(mode in own for own in allowed.values()):
                continue
            chosen = {n: mode if mode in own else own[-1] for n, own in allowed.items()}
            network.set_mode(chosen)
            yield {name: m.value for name, m in chosen.items()}
    finally:
        network.set_mode(kept)
