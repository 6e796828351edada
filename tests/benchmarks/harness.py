"""What all benchmarks share: times, peaks, checks, tables, results as JSON.

A benchmark is a function from a device to a ``Result``. It first checks that what it
compares computes the same, and raises ``NotEqual`` otherwise: then nothing is printed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from speechbrain_rev.files import write_whole
from speechbrain_rev.planner import timing
from speechbrain_rev.planner.memory import live_bytes_peak

CPU = torch.device("cpu")
PACKAGE = Path(timing.__file__).parents[1]

Row = dict[str, Any]
#: Gives the rows of a part of a benchmark, by its name.
Piece = Callable[[str, Callable[[], list[Row]]], list[Row]]

Name = TypeVar("Name")


class NotEqual(AssertionError):
    """Two things that a benchmark compares do not compute the same."""


def require(holds: bool, otherwise: str) -> None:
    """Stop a benchmark whose check failed.

    Raises
    ------
    NotEqual
        If it does not hold.
    """
    if not holds:
        raise NotEqual(otherwise)


def distance(got: Tensor | Iterable[Tensor], want: Tensor | Iterable[Tensor]) -> float:
    """Measure how far tensors are from others, relative to these, in float64."""
    ours, theirs = (
        torch.cat(
            [
                x.detach().double().flatten()
                for x in ([tensors] if isinstance(tensors, Tensor) else tensors)
            ]
        )
        for tensors in (got, want)
    )
    return float((ours - theirs).norm() / theirs.norm())


@dataclass
class Result:
    """Rows of one benchmark, each with a ratio to a named baseline of the same run."""

    name: str
    question: str
    setting: str
    rows: list[dict[str, Any]]
    correctness: str
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """On which machine it was measured, and when."""
        versions = self.environment
        # Results of before there were instructions have none.
        with_them = f" with {known}" if (known := versions.get("instructions")) else ""
        host = f"{versions['processor']}{with_them}, {versions['threads']} thread(s)"
        return f"{versions.get('gpu', host)}, torch {versions['torch']}, {versions['date']}."

    def table(self) -> str:
        """Print rows as a table in Markdown, without what is a table of its own."""
        return markdown(
            [
                {h: v for h, v in row.items() if not isinstance(v, dict)}
                for row in self.rows
            ]
        )

    def save(self, folder: Path, device: torch.device) -> Path:
        """Write the result with hardware and versions."""
        self.environment = environment(device)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.name}_{device.type}.json"
        # A row is a line, so that a difference between two results can be read.
        rows = ",\n  ".join(json.dumps(row) for row in self.rows)
        document = json.dumps({**asdict(self), "rows": []}, indent=1)
        document = document.replace('"rows": []', f'"rows": [\n  {rows}\n ]')
        file.write_text(f"{document}\n")
        return file


class Pieces:
    """Rows of a long benchmark that was interrupted: run again, it measures the others.

    Ratios are of one piece. Rows hold for the same code and machine alone.
    """

    def __init__(self, file: Path, device: torch.device) -> None:
        self.file = file
        self._of = {"code": _code(), **environment(device)}
        del self._of["date"]
        kept = json.loads(file.read_text()) if file.exists() else {}
        self._rows: dict[str, Any] = kept["rows"] if kept.get("of") == self._of else {}

    def rows(self, name: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """Give the rows of a piece, which are measured unless they were before."""
        if name not in self._rows:
            self._rows[name] = anew(name, measure)
            write_whole(self.file, json.dumps({"of": self._of, "rows": self._rows}))
        rows: list[Row] = self._rows[name]
        return rows


def anew(name: str, measure: Callable[[], list[Row]]) -> list[Row]:
    """Measure the rows of a piece."""
    rows = measure()
    print(name, flush=True)
    return rows


def _code() -> str:
    """Digest what a benchmark runs: the package, and the benchmarks themselves."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("*.py"), *PACKAGE.rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def markdown(rows: list[dict[str, Any]]) -> str:
    """Print rows as a table in Markdown."""
    heads = list(rows[0])
    cells = [[_text(row[h]) for h in heads] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = [heads, ["-" * w for w in widths], *cells]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware and versions that a figure depends on."""
    import speechbrain_rev

    hardware = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return {
        "date": date.today().isoformat(),
        "device": device.type,
        **hardware,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "speechbrain_rev": speechbrain_rev.__version__,
    }


class Spread(NamedTuple):
    """Seconds of repeated steps: median and 20 to 80 percent range."""

    median: float
    p20: float
    p80: float

    def __str__(self) -> str:
        return f"{self.p20:.3g} to {self.p80:.3g}"


def interleaved_seconds(
    steps: Mapping[Name, Callable[[], Any]], device: torch.device, *, repeats: int
) -> dict[Name, Spread]:
    """Time steps in turn, after one warm-up, so that load on the machine meets all alike."""
    seconds = {}
    for name, times in timing.interleaved_seconds(
        steps, device, repeats=repeats
    ).items():
        fifths = statistics.quantiles(times, n=5, method="inclusive")
        seconds[name] = Spread(statistics.median(times), fifths[0], fifths[3])
    return seconds


#: What a benchmark says of times in half precision.
HALF_TIMED = "bf16 is timed where the processor has AVX-512"


def has_half(device: torch.device) -> bool:
    """Whether a device computes bf16; a CPU without AVX-512 takes some 50 times as long."""
    return device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith(
        "AVX512"
    )


def times(
    step: Spread | None, baseline: Spread | None, *, missing: str = ""
) -> dict[str, Any]:
    """Make the columns of a step's time; what was not timed has none."""
    return {
        "s per step": step.median if step else missing,
        "20 % to 80 %": str(step) if step else "",
        "times the baseline": step.median / baseline.median
        if step and baseline
        else "",
    }


def step_bytes(step: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """Measure what a step takes beyond what is there before it.

    Returns
    -------
    dict of str to int
        Bytes of ``live`` tensors at the peak; on a GPU what its allocator had
        ``allocated`` at the peak, and ``reserved``.
    """
    if device.type != "cuda":
        return {"live": live_bytes_peak(step)}
    # The first step allocates what later ones reuse: workspaces of cuBLAS.
    step()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    step()
    torch.cuda.synchronize(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device) - before[0],
        "reserved": torch.cuda.max_memory_reserved(device) - before[1],
    }


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """Measure the peak of live tensors, or that of a GPU's allocator."""
    return next(iter(step_bytes(step, device).values()))


def recorded_peak(step: Callable[[], Any]) -> int:
    """Run a step and read its peak off the record of the CPU's allocator.

    What torch's compiler runs is not seen as operations of torch, so that its live tensors
    cannot be counted. The record has them, and workspaces of operations, too.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(
            activities=activities, profile_memory=True
        ) as profile:
            step()
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def allocated_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """Measure what the allocator of a device gave a step at most."""
    return recorded_peak(step) if device == CPU else peak_bytes(step, device)


def in_a_process(module: str, function: str, *arguments: Any) -> Any:
    """Call a benchmark's function in a new process; both ways through JSON."""
    code = (
        "import importlib, json, sys; module, name, given = json.loads(sys.argv[1]); "
        "result = getattr(importlib.import_module(module), name)(*given); "
        "print(json.dumps(result))"
    )
    given = json.dumps([module, function, arguments])
    command = [sys.executable, "-c", code, given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()
