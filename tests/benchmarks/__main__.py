"""Run benchmarks and write their results with hardware and versions.

python -m tests.benchmarks [--only memory] [--device cpu|cuda|meta] [--results FOLDER]
python -m tests.benchmarks --only angles [--pictures FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from . import (
    angles,
    bench_engine,
    capped,
    chunks,
    compressed,
    compressed_bounds,
    compressed_targets,
    compressed_training,
    counts,
    embedding,
    graphs,
    grid,
    imports,
    inference,
    manifests,
    memory,
    paper,
    planned,
    ranges,
    reading,
    scoring,
    scoring_at_scale,
    streams,
    users,
)
from .harness import NotEqual

BENCHMARKS = {
    "memory": memory.run,
    "scoring": scoring.run,
    "imports": imports.run,
    "streams": streams.run,
    "engine": bench_engine.run,
    "paper": paper.run,
    "chunks": chunks.run,
}
#: On meta tensors nothing is computed: there is only to count.
ON_META = {"counts": counts.run}
#: Trainings of many minutes, and what was measured once: run by name only.
BY_NAME = {
    "angles": angles.run,
    "capped": capped.run,
    "ranges": ranges.run,
    "grid": grid.run,
    "users": users.run,
    "planned": planned.run,
    "scoring_at_scale": scoring_at_scale.run,
    "reading": reading.run,
    "manifests": manifests.run,
    "embedding": embedding.run,
    "inference": inference.run,
    "graphs": graphs.run,
    "compressed_training": compressed_training.run,
    "compressed": compressed.run,
    "compressed_bounds": compressed_bounds.run,
    "compressed_targets": compressed_targets.run,
}
#: Results that are drawn, too.
PICTURES = {
    "angles": angles.draw,
    "chunks": chunks.draw,
    "planned": planned.draw,
    "compressed_targets": compressed_targets.draw,
}


def main() -> None:
    """Run what was asked for; a failed correctness check prints no figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", choices=[*BENCHMARKS, *BY_NAME, *ON_META], action="append"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--pictures", type=Path, help="as --results where not given")
    options = parser.parse_args()
    device = torch.device(options.device)
    usual = ON_META if device.type == "meta" else BENCHMARKS
    benchmarks = usual if device.type == "meta" else usual | BY_NAME
    for name in options.only or usual:
        if name not in benchmarks:
            parser.error(f"--only={name} cannot run with --device={device}")
        try:
            result = benchmarks[name](device)
        except NotEqual as error:
            sys.exit(f"{name}: no figures, for the check failed: {error}")
        file = result.save(options.results, device)
        print(f"\n{result.question}\n{result.setting}\n{result.correctness}\n")
        print(f"{result.table()}\n\nwritten to {file}\n")
        if name in PICTURES:
            folder = options.pictures or options.results
            folder.mkdir(parents=True, exist_ok=True)
            picture = folder / f"{name}_{device.type}.png"
            PICTURES[name](result, picture)
            print(f"drawn to {picture}\n")


if __name__ == "__main__":
    main()
