"""Time of a training step against its memory, for chunks of several sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes.geometry import AUTO
from speechbrain_rev.sizes import GB, MIB

from .harness import Result, times
from .pictures import time_against_memory
from .steps import (
    FRAMES,
    Case,
    Way,
    bytes_per_utterance,
    check_counts,
    check_modes,
    timed,
)

NAMES = ("revnet57", "df_revnet89")
#: Bytes of a chunk of one utterance; None is no chunk.
CHUNKS = (None, 4 * AUTO, 2 * AUTO, "auto", AUTO, AUTO // 2, AUTO // 4)
#: Those that a picture names.
NAMED = (f"{AUTO / 4e6:g} MB", f"{AUTO / 1e6:g} MB", "whole")
STORED = Way("stored", chunk=None)
COUNTERPART = Way("counterpart stored")


def cases_of(name: str) -> list[Case]:
    """Ways to train an encoder of a size, itself or its counterpart; two to compare with."""
    counterpart = str(ARCHITECTURES[name].counterpart)
    recomputed = Way("counterpart recomputed", "recompute")
    stored = [(name, STORED), (counterpart, COUNTERPART), (counterpart, recomputed)]
    sizes = {
        c: f"{c / 1e6:g} MB" if isinstance(c, int) else c or "whole" for c in CHUNKS
    }
    return stored + [
        (name, Way(f"{streams}, {size}", "reconstruct", streams, chunk=chunk))
        for streams in ("float", "exact")
        for chunk, size in sizes.items()
    ]


def run(device: torch.device, names: tuple[str, ...] = NAMES) -> Result:
    """Time and count chunks of all sizes; the baseline is the same encoder, stored."""
    batch, repeats = (64, 10) if device.type == "cuda" else (4, 3)
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for name in names:
        worst = max(worst, check_modes(name, ["reconstruct"], device))
        if device.type != "cuda":
            check_counts(name, [Way("", "store"), Way("", "reconstruct", "exact")])
        cases = cases_of(name)
        seconds = timed(cases, device, batch=batch, repeats=repeats)
        stored, counterpart, *_ = (seconds[case] for case in cases)
        for own, way in cases:
            spread = seconds[own, way]
            rows.append(
                {
                    "encoder": name,
                    "way": way.name,
                    "default": way.chunk == "auto",
                    "GB per utterance": bytes_per_utterance(way, own, device) / GB,
                    "baseline": f"{name} stored, float",
                    **times(spread, stored),
                    "counterpart": ARCHITECTURES[name].counterpart,
                    "times the counterpart": spread.median / counterpart.median,
                }
            )
            print(*rows[-1].values(), flush=True)
    how = "allocator's peak" if device.type == "cuda" else "live tensors without data"
    return Result(
        "chunks",
        "What does a training step take in time and memory, by size of the chunks?",
        f"float32, time at batch {batch}, {FRAMES} frames, median of {repeats} "
        f"interleaved steps; memory: {how}, slope between two batches",
        rows,
        f"gradients within {worst:.1e} of stored ones in float64, reduced widths and "
        "chunks",
    )


def draw(result: Result, path: Path) -> None:
    """Draw each encoder's curves, and what stores or recomputes beside them."""
    panels: dict[str, dict[str, list[tuple[float, float, str]]]] = {}
    for row in result.rows:
        way, _, size = row["way"].partition(", ")
        curves = panels.setdefault(row["encoder"], {})
        # Names of more points would cover each other.
        named = way == "exact" and size in NAMED
        memory = row["GB per utterance"] * GB / MIB
        curves.setdefault(f"reconstructed, {way}" if size else way, []).append(
            (memory, row["times the baseline"], size if named else "")
        )
    time_against_memory(
        panels,
        path,
        title="Time of a training step against its memory, by size of the chunks",
        source=f"{result.setting}. {result.where}",
    )
