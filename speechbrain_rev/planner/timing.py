"""How long each block takes in each mode: by the clock, or by what it does."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from speechbrain_rev.modes import ALONE, Mode, fallback
from speechbrain_rev.planner.network import Network, keeping_modes
from speechbrain_rev.planner.profile import parsed, reading, texts
from speechbrain_rev.planner.trace import Run, Work, trace_seconds
from speechbrain_rev.sizes import GIB

# What a mode takes more than STORE where no clock shows how much: solvers count in
# picoseconds, so that this is seen, and blocks take far longer.
_MORE_SECONDS = 1e-9

# Copied to measure how fast a device does that: some milliseconds of a GPU.
_COPIED_BYTES = 2**26


@dataclass(frozen=True)
class Speed:
    """How fast a device is, to estimate times from counts of operations.

    Attributes
    ----------
    flops_per_second : float
        Of convolutions and matrix products.
    bytes_per_second : float
        Read and written by all operations.
    operations_per_second : float
        Of operations that do nothing.
    host_bytes_per_second : float
        Copied between the device and the machine; infinite on a CPU.
    about : mapping of str to str
        Under "device" which one, then how this was measured.

    Raises
    ------
    ValueError
        If a speed is not above zero, all are infinite, or no device is named.

    Examples
    --------
    >>> Speed.from_json(ASSUMED.to_json()) == ASSUMED
    True
    >>> print(Speed(1e12, 2**38, 1e5, {"device": "a GPU", "torch": "2"}))
    a GPU, 1 TFLOP/s, 256 GiB/s, 100,000 operations/s (torch: 2)
    """

    flops_per_second: float
    bytes_per_second: float
    operations_per_second: float
    about: Mapping[str, str]
    host_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        speeds = (
            self.flops_per_second,
            self.bytes_per_second,
            self.operations_per_second,
        )
        every = (*speeds, self.host_bytes_per_second)
        if any(
            isinstance(s, bool) or not isinstance(s, int | float) or not s > 0
            for s in every
        ):
            raise ValueError(f"Speeds are {every}; each must be above zero.")
        if min(speeds) == math.inf:
            raise ValueError(
                "No speed is finite, so that nothing would take any time; one must be."
            )
        if "device" not in texts("about", self.about):
            raise ValueError(
                f"about is {self.about}; it must name the device, under 'device'."
            )

    def seconds(self, work: Work) -> float:
        """Estimate the time of what a block does."""
        return (
            work.flops / self.flops_per_second
            + work.moved_bytes / self.bytes_per_second
            + work.operations / self.operations_per_second
            + work.host_bytes / self.host_bytes_per_second
        )

    @property
    def rates(self) -> str:
        """All but the last of them, in words: no mode of a plan copies to the host."""
        return (
            f"{self.flops_per_second / 1e12:.3g} TFLOP/s, "
            f"{self.bytes_per_second / GIB:.3g} GiB/s, "
            f"{self.operations_per_second:,.0f} operations/s"
        )

    def __str__(self) -> str:
        measured = "; ".join(
            f"{n}: {v}" for n, v in self.about.items() if n != "device"
        )
        how = f" ({measured})" if measured else "; no clock was read"
        return f"{self.about['device']}, {self.rates}{how}"

    def to_json(self) -> str:
        """Write it as a JSON document, which ``from_json`` reads."""
        # JSON has no infinity, which a device that is measured can have.
        plain = {
            name: value if value != math.inf else None
            for name, value in asdict(self).items()
        }
        return json.dumps(plain, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Speed:
        """Read what ``to_json`` wrote.

        Raises
        ------
        ValueError
            If the text is no speed.
        """
        with reading("speed of a device", "Write one with speechbrain-rev calibrate."):
            plain: dict[str, Any] = {
                name: math.inf if value is None else value
                for name, value in parsed(text).items()
            }
            return cls(**plain)


#: Where no device was measured: an 11 GB GPU at about half of its peak figures in
#: float32 (an RTX 2080 Ti has 13.4 TFLOP/s and 616 GB/s), which starts an operation in
#: 10 microseconds and copies over PCIe 3.0 x16. A plan depends on the ratios.
ASSUMED = Speed(
    flops_per_second=6.7e12,
    bytes_per_second=0.4e12,
    operations_per_second=1e5,
    host_bytes_per_second=12e9,
    about={"device": "an assumed 11 GB GPU"},
)


def fitted_speed(
    works: Sequence[Work], seconds: Sequence[float], about: Mapping[str, str]
) -> Speed:
    """Find the speeds that explain times of blocks best; copies to the host are not fitted.

    Parameters
    ----------
    works : sequence of Work
        What blocks did.
    seconds : sequence of float
        How long each took.
    about : mapping of str to str
        On which device, under "device".

    Returns
    -------
    Speed
        Least squares of relative errors, no speed below zero. The median and the largest
        error are added to ``about``.

    Examples
    --------
    >>> works = [Work(10**9, 10**6, 50), Work(10**8, 10**8, 10), Work(10**7, 10**5, 90)]
    >>> true = Speed(1e12, 1e11, 1e5, {"device": "an example"})
    >>> seconds = [true.seconds(work) for work in works]
    >>> fitted = fitted_speed(works, seconds, true.about)
    >>> f"{fitted.flops_per_second:.2g} {fitted.bytes_per_second:.2g}"
    '1e+12 1e+11'
    """
    from scipy.optimize import nnls

    taken = np.array(seconds)
    counts = np.array([[w.flops, w.moved_bytes, w.operations] for w in works], float)
    # Columns of like size, and relative errors: small blocks count as large ones do.
    scale = np.maximum(counts.max(axis=0), 1)
    slowness, _ = nnls(counts / scale / taken[:, None], np.ones(len(taken)))
    slowness /= scale
    off = np.abs(counts @ slowness / taken - 1)
    flops, moved, operations = (float(1 / s) if s else math.inf for s in slowness)
    errors = f"median {np.median(off):.0%}, largest {off.max():.0%}"
    return Speed(flops, moved, operations, {**about, "error of a block's time": errors})


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
        for chosen in uniform_modes(network):
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


def copied_bytes_per_second(device: torch.device) -> float:
    """Measure how fast a device copies to the machine's memory and back.

    Parameters
    ----------
    device : torch.device
        A GPU, or the CPU.

    Returns
    -------
    float
        Bytes a second, of pageable memory; infinite on a CPU, which has nothing to copy.

    Examples
    --------
    >>> copied_bytes_per_second(torch.device("cpu"))
    inf
    """
    if device.type == "cpu":
        return math.inf
    x = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    return 2 * x.nbytes / seconds_of(lambda: x.cpu().to(device), device)


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


def uniform_modes(network: Network) -> Iterator[dict[str, str]]:
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
