"""How long each block takes in each mode: by the clock, or by what it does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from speechbrain_rev.modes import ALONE, Mode, fallback
from speechbrain_rev.planner.network import Network, keeping_modes
from speechbrain_rev.planner.trace import Run, trace_seconds

# Seconds that a mode takes more than STORE where no clock shows how many: solvers count in
# picoseconds, so that this is seen, and blocks take far longer.
_MORE_SECONDS = 1e-9


#: Steps of each mode that are timed, after one that is not, where profiles are kept or
#: blocks compress.
REPEATS = 3


def measured_seconds(
    network: Network, run: Run, device: torch.device, *, repeats: int = 5
) -> dict[tuple[str, str], float]:
    """Take times by the clock: medians of training steps, without what is noise.

    Parameters
    ----------
    network, run, device, repeats
        As for :func:`measured_repeats`.

    Returns
    -------
    dict of (str, str) to float
        Seconds by block and mode, under ("", "") of the rest, as
        :func:`beyond_noise` gives them.
    """
    return beyond_noise(measured_repeats(network, run, device, repeats=repeats))


def measured_repeats(
    network: Network, run: Run, device: torch.device, *, repeats: int
) -> dict[tuple[str, str], list[float]]:
    """Take times of training steps by the clock, the modes taking turns.

    Parameters
    ----------
    network : Network
        Its blocks get each mode in turn, and then those that they had.
    run : callable
        Runs forward and backward pass.
    device : torch.device
        Where it runs.
    repeats : int
        Steps of each mode, after one that is not counted.

    Returns
    -------
    dict of (str, str) to list of float
        Seconds of each step by block and mode, under ("", "") of the rest.
    """
    taken: dict[tuple[str, str], list[float]] = {}
    for repeat in range(-1, repeats):
        for chosen in _uniform_modes(network):
            for name, seconds in trace_seconds(network, run, device).items():
                if repeat >= 0:
                    taken.setdefault((name, chosen.get(name, "")), []).append(seconds)
    return taken


def beyond_noise(
    taken: Mapping[tuple[str, str], Sequence[float]],
) -> dict[tuple[str, str], float]:
    """Give medians; no mode is faster than STORE by what may be noise.

    Every other mode does all that STORE does and more, so that noise alone would make it
    seem faster half of the time, and blocks recompute where memory is free. Yet fresh
    memory can make STORE really slower. So another mode is taken for faster only if its
    median is below STORE's by more than both spreads together (slowest less fastest
    repeat of either mode), which normal noise does once in 100 for three repeats and once
    in 10,000 for five. If it is not, or there is one repeat, which has no spread, it gets
    the time of STORE and a nanosecond: of equally fast modes a solver takes the lighter.

    Parameters
    ----------
    taken : mapping of (str, str) to sequence of float
        Seconds of each repeat by block and mode.

    Returns
    -------
    dict of (str, str) to float
        Seconds by block and mode.

    Examples
    --------
    >>> noisy = {("b.0", "store"): [1.1, 1.2, 1.3], ("b.0", "recompute"): [0.9, 1.0, 1.2]}
    >>> beyond_noise(noisy)[("b.0", "recompute")]
    1.200000001
    >>> clear = {**noisy, ("b.0", "recompute"): [0.5, 0.6, 0.7]}
    >>> beyond_noise(clear)[("b.0", "recompute")]
    0.6
    """
    medians = {key: statistics.median(times) for key, times in taken.items()}
    for (name, mode), times in taken.items():
        stored = taken.get((name, Mode.STORE.value))
        if stored is None or mode == Mode.STORE.value:
            continue
        least = medians[name, Mode.STORE.value]
        spread = sum(max(each) - min(each) for each in (times, stored))
        known = min(len(times), len(stored)) > 1
        if not (known and least - medians[name, mode] > spread):
            medians[name, mode] = max(medians[name, mode], least + _MORE_SECONDS)
    return medians


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
    return statistics.median(
        interleaved_seconds({"": run}, device, repeats=repeats)[""]
    )


def interleaved_seconds(
    runs: Mapping[str, Callable[[], Any]], device: torch.device, *, repeats: int
) -> dict[str, list[float]]:
    """Take times by the clock in turn, so that load on the machine meets all alike.

    Parameters
    ----------
    runs : mapping of str to callable
        What is timed, by name.
    device : torch.device
        Where they run.
    repeats : int
        How often, after a call of each that is not counted.

    Returns
    -------
    dict of str to list of float
        Seconds of each repeat, until the device is done.

    Examples
    --------
    >>> x = torch.ones(64, 64)
    >>> taken = interleaved_seconds({"product": lambda: x @ x}, x.device, repeats=3)
    >>> [len(seconds) for seconds in taken.values()]
    [3]
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-1, repeats):
        for name, run in runs.items():
            _wait_for(device)
            start = time.perf_counter()
            run()
            _wait_for(device)
            if repeat >= 0:
                taken[name].append(time.perf_counter() - start)
    return taken


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _uniform_modes(network: Network) -> Iterator[dict[str, str]]:
    """Give all blocks each mode in turn; those that cannot have it recompute.

    None joins: that takes as long as to recompute alone.

    Parameters
    ----------
    network : Network
        Its blocks have the modes that they had when all are through.

    Yields
    ------
    dict of str to str
        The modes that the blocks have now.
    """
    allowed = network.allowed_modes()
    with keeping_modes(network):
        for mode in ALONE:
            if not any(mode in own for own in allowed.values()):
                continue
            chosen = {name: fallback(mode, own) for name, own in allowed.items()}
            network.set_mode(chosen)
            yield {name: m.value for name, m in chosen.items()}
