"""Time of a training step against its memory, for chunks of several sizes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes.geometry import AUTO
from speechbrain_rev.plots import time_against_memory
from speechbrain_rev.sizes import MIB

from .gradients import check_modes
from .harness import Result, interleaved_seconds
from .precisions import PRECISIONS
from .streams import (
    FRAMES,
    GB,
    bytes_per_utterance,
    check_counts,
    encoder_of,
    train_step,
)

NAMES = ("revnet57", "df_revnet89")
#: Bytes of a chunk of one utterance; None is no chunk.
CHUNKS = (None, 4 * AUTO, 2 * AUTO, AUTO, AUTO // 2, AUTO // 4)
FORMATS = ("float", "exact")
FLOAT32 = PRECISIONS["float32"]


def cases(name: str) -> dict[str, dict[str, Any]]:
    """Ways to train an encoder of a size, by what they are called in the table."""
    counterpart = ARCHITECTURES[name].counterpart
    assert counterpart is not None
    vanilla = {"streams": "float"}
    found = {
        "stored": {"name": name, "mode": "store", "streams": "float", "chunk": None},
        "counterpart stored": {"name": counterpart, "mode": "store", **vanilla},
        "counterpart recomputed": {"name": counterpart, "mode": "recompute", **vanilla},
    }
    for streams in FORMATS:
        for chunk in CHUNKS:
            size = "whole" if chunk is None else f"{chunk / 1e6:g} MB"
            found[f"{streams}, {size}"] = {
                "name": name, "mode": "reconstruct", "streams": streams, "chunk": chunk
            }  # fmt: skip
    return found


def run(device: torch.device, names: tuple[str, ...] = NAMES) -> Result:
    """Time and count chunks of all sizes; the baseline is the same encoder, stored."""
    batch, repeats = (64, 10) if device.type == "cuda" else (4, 3)
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for name in names:
        worst = max(worst, check_modes(name, ["reconstruct"], device))
        if device.type != "cuda":
            check_counts(name, device)
        feats = torch.randn(batch, FRAMES, 80).to(device)
        ways = cases(name)
        steps = {
            way: functools.partial(
                train_step,
                encoder_of(device=device, **{"chunk": "auto", **options}),
                feats,
                FLOAT32,
            )
            for way, options in ways.items()
        }
        seconds = interleaved_seconds(steps, device, repeats=repeats)
        del steps
        for way, options in ways.items():
            grown = bytes_per_utterance(
                options["name"],
                (options["mode"], options["streams"]),
                FLOAT32,
                device,
                chunk=options.get("chunk", "auto"),
            )
            median = seconds[way]["median"]
            rows.append(
                {
                    "encoder": name,
                    "way": way,
                    "default": options.get("chunk") == AUTO,
                    "GB per utterance": grown / GB,
                    "s per step": median,
                    "20 % to 80 %": "{p20:.3g} to {p80:.3g}".format(**seconds[way]),
                    "baseline": f"{name} stored, float",
                    "times the baseline": median / seconds["stored"]["median"],
                    "counterpart": ARCHITECTURES[name].counterpart,
                    "times the counterpart": median
                    / seconds["counterpart stored"]["median"],
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
    environment = result.environment
    source = (
        f"{result.setting}. {environment['processor']}, torch {environment['torch']}, "
        f"{environment['date']}."
    )
    panels: dict[str, dict[str, list[tuple[float, float, str]]]] = {}
    for row in result.rows:
        way, _, size = row["way"].partition(", ")
        curves = panels.setdefault(row["encoder"], {})
        name = f"reconstructed, {way}" if size else f"{way}"
        curves.setdefault(name, []).append(
            (row["GB per utterance"] * GB / MIB, row["times the baseline"], size)
        )
    time_against_memory(
        panels,
        path,
        title="Time of a training step against its memory, by size of the chunks",
        source=source,
    )
