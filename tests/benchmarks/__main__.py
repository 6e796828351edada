"""Run benchmarks and write their results with hardware and versions.

python -m tests.benchmarks [--only memory] [--device cpu|cuda|meta] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from . import counts, imports, memory, scoring, speed
from .harness import NotEqual

BENCHMARKS = {
    "memory": memory.run,
    "speed": speed.run,
    "scoring": scoring.run,
    "imports": imports.run,
}
#: On meta tensors nothing is computed: there is only to count.
ON_META = {"counts": counts.run}


def main() -> None:
    """Run what was asked for; a failed correctness check prints no figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*BENCHMARKS, *ON_META], action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    options = parser.parse_args()
    device = torch.device(options.device)
    benchmarks = ON_META if device.type == "meta" else BENCHMARKS
    for name in options.only or benchmarks:
        if name not in benchmarks:
            parser.error(f"--only={name} cannot run with --device={device}")
        try:
            result = benchmarks[name](device)
        except NotEqual as error:
            sys.exit(f"{name}: no figures, for the check failed: {error}")
        file = result.save(options.results, device)
        print(f"\n{result.question}\n{result.setting}\n{result.correctness}\n")
        print(f"{result.table()}\n\nwritten to {file}\n")


if __name__ == "__main__":
    main()
