"""What all benchmarks share: the environment, repeats, tables, results as JSON.

A benchmark is a function from a device to a ``Result``. It first checks that what it
compares computes the same, and raises ``NotEqual`` otherwise: then nothing is printed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.planner import timing


class NotEqual(AssertionError):
    """Two things that a benchmark compares do not compute the same."""


@dataclass
class Result:
    """Rows of one benchmark, each with a ratio to a named baseline of the same run."""

    name: str
    question: str
    setting: str
    rows: list[dict[str, Any]]
    correctness: str
    environment: dict[str, Any] = field(default_factory=dict)

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

    hardware = {"processor": _processor(), "cores": os.cpu_count()}
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


def interleaved_seconds(
    steps: Mapping[str, Callable[[], Any]], device: torch.device, *, repeats: int
) -> dict[str, dict[str, float]]:
    """Time steps in turn, so that a machine's mood meets all of them alike.

    Returns
    -------
    dict of str to dict
        Median and the 20 to 80 percent range of the repeats, after one warm-up.
    """
    times = timing.interleaved_seconds(steps, device, repeats=repeats)
    return {name: _spread(values) for name, values in times.items()}


def _spread(values: list[float]) -> dict[str, float]:
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "p20": fifths[0], "p80": fifths[3]}


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()
