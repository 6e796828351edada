"""What exact streams cost in time and memory against float ones, per precision."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from speechbrain_rev.sizes import GB

from .harness import Result, require, times
from .steps import (
    FRAMES,
    PRECISIONS,
    Case,
    Step,
    Way,
    batches_on,
    bytes_per_utterance,
    check_counts,
    timed,
)

NAMES = ("revnet57", "df_revnet89")
MODES, STREAMS = ("store", "reconstruct"), ("float", "exact")


def check_bits(steps: Mapping[Case, Step]) -> None:
    """Take the first step of each way: exact modes must agree to the bit."""
    grads = {}
    for (_, way), step in steps.items():
        step()
        if way.streams == "exact":
            grads[way.mode] = [p.grad.clone() for p in step.args[0].parameters()]
        step.args[0].zero_grad()
    require(
        all(map(torch.equal, grads["store"], grads["reconstruct"])),
        f"Exact gradients depend on the mode: {list(steps)}.",
    )


def sizes(device: torch.device, precision: str) -> dict[str, int]:
    """Batch, frames and repeats that a machine can be asked for."""
    if device.type == "cuda":
        return {"batch": 64, "frames": FRAMES, "repeats": 10}
    # Few CPUs have instructions for fp16; without them a step takes 20 times as long.
    if precision == "fp16":
        return {"batch": 2, "frames": 24, "repeats": 3}
    return {"batch": 2, "frames": FRAMES, "repeats": 5}


def rows_of(name: str, precision: str, device: torch.device) -> list[dict[str, Any]]:
    """Time and count all cases of an encoder; the baseline is the first."""
    size = sizes(device, precision)
    cases = itertools.product(MODES, STREAMS)
    ways = [Way(" ".join(case), *case, precision) for case in cases]
    encoders = [(name, way) for way in ways]
    seconds = timed(encoders, device, check=check_bits, **size)
    taken = {way: bytes_per_utterance(way, name, device) for way in ways}
    return [
        {
            "encoder": name,
            "precision": precision,
            "mode": way.mode,
            "streams": way.streams,
            "batch": size["batch"],
            "frames": size["frames"],
            "GB per utterance": taken[way] / GB,
            "baseline": f"{name} {precision} {ways[0].name}",
            **times(seconds[name, way], seconds[name, ways[0]]),
            "share of the baseline": taken[way] / taken[ways[0]],
        }
        for way in ways
    ]


def run(device: torch.device) -> Result:
    """Time and count all cases; the baseline is the same encoder, stored, in float."""
    rows: list[dict[str, Any]] = []
    for name, precision in itertools.product(NAMES, PRECISIONS):
        if device.type != "cuda" and precision != "fp16":
            stored = Way("", "store", precision=precision)
            check_counts(name, [stored, Way("", "reconstruct", "exact", precision)])
        rows += rows_of(name, precision, device)
        print(f"{name} {precision}", flush=True)
    how = (
        "allocator's peak"
        if device.type == "cuda"
        else "live tensors, counted without data, equal to the byte where run"
    )
    few, many = batches_on(device)
    return Result(
        "streams",
        "What do exact streams cost against float ones?",
        "median of interleaved steps of forward and backward pass; memory: "
        f"{how}, slope between batches of {few} and {many} at {FRAMES} frames",
        rows,
        "gradients of exact streams equal to the bit, stored and reconstructed",
    )
