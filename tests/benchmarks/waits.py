"""How long a device waits for the host in a training step, and its longest kernels.

The profiler of torch records a step of each encoder in each way. The device is busy while
one of its kernels runs (on a CPU, while an operation of torch runs), and waits otherwise.
On a GPU a step is also captured as a CUDA graph, whose replay has no host to wait for.

python -m tests.benchmarks --only waits --device cuda
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .harness import Result, Spread, distance, has_half, interleaved_seconds, require
from .steps import TOLERANCE, Step, Way, check_modes, encoder_by, train_step

PLAIN = Way("plain torch layers", plain=True, chunk=None)
WAYS = (
    PLAIN,
    Way("store", "store", "exact", chunk=None),
    Way("selective", "selective", "exact", chunk=None),
    Way("reconstruct, chunk null", "reconstruct", "exact", chunk=None),
    Way("reconstruct, chunk auto", "reconstruct", "exact"),
)
#: Kernels that a row names.
_LONGEST = 10


@dataclass(frozen=True)
class Setting:
    """Which encoders, at which batch and size, and how often a step is timed."""

    names: tuple[str, ...] = ("revnet197", "df_revnet377")
    precisions: tuple[str, ...] = ("float32", "bf16")
    batch: int = 128
    frames: int = 200
    repeats: int = 5
    row: dict[str, Any] = field(default_factory=dict)


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Time and profile each way; compare gradients of modes, and those of a graph."""
    setting = setting or Setting()
    for name in setting.names:
        check_modes(name, ("selective", "reconstruct"), device)
    table = []
    for name in setting.names:
        for precision in setting.precisions:
            if precision == "float32" or has_half(device):
                table += _rows(name, precision, device, setting)
    return Result(
        "waits",
        "How long does a device wait for the host in a step?",
        f"Encoder alone, batch {setting.batch}, {setting.frames} frames; waits: the part of "
        "a step in which no kernel runs; graph: the step captured as a CUDA graph",
        table,
        f"modes make stored gradients, and a replayed graph the eager step's, to {TOLERANCE}",
    )


def _rows(
    name: str, precision: str, device: torch.device, setting: Setting
) -> Iterable[dict[str, Any]]:
    with device:
        feats = torch.randn(setting.batch, setting.frames, 80)
        steps: dict[str, Step] = {}
        for way in (replace(way, precision=precision) for way in WAYS):
            encoder = encoder_by(way, name, **setting.row)
            steps[way.name] = functools.partial(train_step, encoder, feats, way)
    graphs: dict[str, Callable[[], Any]] = {}
    if device.type == "cuda":
        graphs = {way: captured(*step.args) for way, step in steps.items()}
    seconds = interleaved_seconds(steps, device, repeats=setting.repeats)
    in_graphs = interleaved_seconds(graphs, device, repeats=setting.repeats)
    baseline = seconds[PLAIN.name]
    for way, step in steps.items():
        waits, longest = profiled(step, device, seconds[way])
        yield {
            "encoder": name,
            "precision": precision,
            "way": way,
            "s per step": seconds[way].median,
            "20 % to 80 %": str(seconds[way]),
            "baseline": PLAIN.name,
            "times the baseline": seconds[way].median / baseline.median,
            "waits": waits,
            "s of a graph": in_graphs[way].median if way in in_graphs else "",
            "graph, times the baseline": in_graphs[way].median
            / in_graphs[PLAIN.name].median
            if way in in_graphs
            else "",
            "longest kernels": longest,
        }


def captured(encoder: nn.Module, feats: Tensor, way: Way) -> Callable[[], None]:
    """Capture a step as a CUDA graph, whose gradients are those of the eager step."""
    step = functools.partial(train_step, encoder, feats, way)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    gradients = []
    for taken in (step, graph.replay):
        for p in encoder.parameters():
            assert p.grad is not None
            p.grad.zero_()
        taken()
        gradients.append([p.grad.clone() for p in encoder.parameters()])
    worst = distance(*gradients)
    require(worst <= TOLERANCE, f"{way}: a replayed graph is off by {worst:.1e}.")
    replay: Callable[[], None] = graph.replay
    return replay


def profiled(
    step: Callable[[], Any], device: torch.device, seconds: Spread
) -> tuple[float, dict[str, float]]:
    """Give the part of a step in which the device waits, and its longest kernels.

    The profiler slows the host down: busy is what it records, of the seconds without it.
    """
    on_gpu = device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with profile(activities=activities) as recorded:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    kernels = [
        event
        for event in recorded.events()
        if event.device_type == kind and (on_gpu or event.name.startswith("aten::"))
    ]
    spans = ((e.time_range.start, e.time_range.end) for e in kernels)
    busy = union(spans) / 1e6
    longest: dict[str, float] = {}
    for event in kernels:
        took = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        longest[event.name] = longest.get(event.name, 0.0) + took / 1e6
    ranked = sorted(longest.items(), key=lambda item: -item[1])[:_LONGEST]
    return max(0.0, 1 - busy / seconds.median), dict(ranked)


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Add up spans of time; what several cover counts once.

    Example
    -------
    >>> union([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
