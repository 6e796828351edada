"""Run benchmarks and write their results with hardware and versions.

python -m tests.benchmarks [--only memory] [--device cpu|cuda|meta] [--results FOLDER]
python -m tests.benchmarks --only angles [--pictures FOLDER]
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from .harness import NotEqual, Pieces

USUAL = ("memory", "scoring", "streams", "engine", "paper", "chunks", "formats")
#: Training runs of many minutes, and what was measured once: run by name only.
BY_NAME = (
    "angles",
    "budgets",
    "capped",
    "ranges",
    "rounding",
    "users",
    "reading",
    "adaptation",
    "waits",
    "embedding",
    "inference",
    "deepest",
    "optimizers",
    "classes",
)
CPU_ONLY = (
    "launches",
    "planned",
    "joined",
    "converted",
    "selective",
    "shares",
    "scoring_at_scale",
    "manifests",
    "graphs",
    "compressed_training",
    "compressed",
    "compressed_bounds",
    "compressed_targets",
)
#: Kernels of this package beside what they stand for.
CUDA_ONLY = ("normalisation",)
#: Of an hour on a CPU: run again after an interruption, they go on.
IN_PIECES = ("engine", "users")
#: On meta tensors nothing is computed: there is only to count.
ON_META = ("counts",)


def main() -> None:
    """Run what was asked for; a failed correctness check prints no figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = [*USUAL, *BY_NAME, *CPU_ONLY, *CUDA_ONLY, *ON_META]
    parser.add_argument("--only", choices=every, action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--pictures", type=Path, help="as --results where not given")
    options = parser.parse_args()
    device = torch.device(options.device)
    usual = {"meta": ON_META, "cuda": USUAL + CUDA_ONLY, "cpu": USUAL}[device.type]
    benchmarks = {
        "meta": ON_META,
        "cuda": USUAL + BY_NAME + CUDA_ONLY,
        "cpu": USUAL + BY_NAME + CPU_ONLY,
    }[device.type]
    for name in options.only or usual:
        if name not in benchmarks:
            parser.error(f"--only={name} cannot run with --device={device}")
        benchmark = importlib.import_module(f".{name}", __package__)
        more: dict[str, Any] = {}
        if name in IN_PIECES:
            options.results.mkdir(parents=True, exist_ok=True)
            file = options.results / f"{name}_{device.type}.pieces"
            pieces = Pieces(file, device)
            more["piece"] = pieces.rows
        try:
            result = benchmark.run(device, **more)
        except NotEqual as error:
            sys.exit(f"{name}: no figures, for the check failed: {error}")
        file = result.save(options.results, device)
        if name in IN_PIECES:
            pieces.file.unlink(missing_ok=True)
        print(f"\n{result.question}\n{result.setting}\n{result.correctness}\n")
        print(f"{result.table()}\n\nwritten to {file}\n")
        if hasattr(benchmark, "draw"):
            folder = options.pictures or options.results
            folder.mkdir(parents=True, exist_ok=True)
            picture = folder / f"{name}_{device.type}.png"
            benchmark.draw(result, picture)
            print(f"drawn to {picture}\n" * picture.exists())


if __name__ == "__main__":
    main()
