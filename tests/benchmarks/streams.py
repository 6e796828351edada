"""What exact streams cost in time and memory against float ones, per precision."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from typing import Any

import torch
from torch import nn

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.planner.step import CPUFakes

from .grid import grid_among_the_formats
from .harness import NotEqual, Result, interleaved_seconds
from .precisions import PRECISIONS, Precision

FRAMES = 200
GB = 1e9
NAMES = ("revnet57", "df_revnet89")
#: Mode and format; the first is the baseline, the last the alternative in ``grid``.
CASES = (
    ("store", "float"),
    ("store", "exact"),
    ("reconstruct", "float"),
    ("reconstruct", "exact"),
    ("reconstruct", "grid"),
)
BASELINE = CASES[0]


def train_step(encoder: nn.Module, feats: torch.Tensor, precision: Precision) -> None:
    """One forward and backward pass of a loss without a preferred direction."""
    with precision.autocast(feats.device):
        y = encoder(feats)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    (y.float() * weights).sum().backward()


def encoder_of(
    name: str, mode: str, streams: str, device: torch.device, **options: Any
) -> nn.Module:
    """An encoder as it trains, but for the check of every hundredth step."""
    torch.manual_seed(0)
    with device:
        return build_encoder(name, mode=mode, streams=streams, verify=None, **options)


def peak_bytes(
    name: str,
    case: tuple[str, str],
    precision: Precision,
    batch: int,
    device: torch.device,
    *,
    without_data: bool,
    frames: int = FRAMES,
    chunk: int | str | None = "auto",
) -> int:
    """Peak of forward and backward above weights, their gradients and the input."""
    with CPUFakes() if without_data else contextlib.nullcontext():
        encoder = encoder_of(name, *case, device, chunk=chunk)
        for p in encoder.parameters():
            p.grad = torch.zeros_like(p)
        feats = torch.randn(batch, frames, 80, device=device)
        step = functools.partial(train_step, encoder, feats, precision)
        if device.type != "cuda":
            with warnings.catch_warnings():
                # Storages without data have an address, 0, whose use is frowned upon.
                warnings.filterwarnings("ignore", "Accessing the data pointer")
                return live_bytes_peak(step)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def batches_on(device: torch.device) -> tuple[int, int]:
    """Two batches, so large that weight gradients do not matter where nothing is run."""
    return (32, 64) if device.type == "cuda" else (128, 256)


def bytes_per_utterance(
    name: str,
    case: tuple[str, str],
    precision: Precision,
    device: torch.device,
    *,
    frames: int = FRAMES,
    chunk: int | str | None = "auto",
) -> float:
    """Slope between two batch sizes, so that what does not grow drops out."""
    without_data = device.type != "cuda"
    batches = batches_on(device)
    few, many = (
        peak_bytes(
            name, case, precision, batch, device, without_data=without_data,
            frames=frames, chunk=chunk,
        )
        for batch in batches
    )  # fmt: skip
    return (many - few) / (batches[1] - batches[0])


def check_counts(name: str, device: torch.device) -> None:
    """Count a step that really runs: the same bytes as without data."""
    for case in (BASELINE, ("reconstruct", "exact")):
        for precision in (PRECISIONS["float32"], PRECISIONS["bf16"]):
            counted, real = (
                peak_bytes(name, case, precision, 2, device, without_data=without)
                for without in (True, False)
            )
            if counted != real:
                raise NotEqual(
                    f"{name} {case} {precision} holds {real} bytes at batch 2, but "
                    f"{counted} were counted without data."
                )


def check_bits(steps: dict[tuple[str, str], functools.partial], precision: str) -> None:
    """Take the first step of each case: exact modes must agree to the bit."""
    grads = {}
    for case, step in steps.items():
        step()
        grads[case] = [p.grad for p in step.args[0].parameters()]
        step.args[0].zero_grad()
    pairs = zip(grads["store", "exact"], grads["reconstruct", "exact"], strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        raise NotEqual(f"Exact gradients in {precision} depend on the mode.")


def sizes(device: torch.device, precision: str) -> tuple[int, int, int]:
    """Batch, frames and repeats that a machine can be asked for."""
    if device.type == "cuda":
        return 64, FRAMES, 10
    # Few CPUs have instructions for fp16; without them a step takes 20 times as long.
    return (2, 24, 3) if precision == "fp16" else (2, FRAMES, 5)


def run(device: torch.device) -> Result:
    """Time and count all cases; the baseline is the same encoder, stored, in float."""
    rows: list[dict[str, Any]] = []
    with grid_among_the_formats():
        for name in NAMES:
            if device.type != "cuda":
                check_counts(name, device)
            for precision in PRECISIONS:
                rows += _rows(name, precision, device)
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
        f"{how}, slope between batches of {few} and {many} at {FRAMES} frames; "
        "'grid': float32 on multiples of 2**-14, an alternative not taken",
        rows,
        "gradients of exact streams equal to the bit, stored and reconstructed",
    )


def _rows(name: str, precision: str, device: torch.device) -> list[dict[str, Any]]:
    batch, frames, repeats = sizes(device, precision)
    feats = torch.randn(batch, frames, 80).to(device)
    steps = {
        case: functools.partial(
            train_step, encoder_of(name, *case, device), feats, PRECISIONS[precision]
        )
        for case in CASES
    }
    check_bits(steps, precision)
    seconds = interleaved_seconds(steps, device, repeats=repeats)
    del steps
    grown = {
        case: bytes_per_utterance(name, case, PRECISIONS[precision], device)
        for case in CASES
    }
    return [
        {
            "encoder": name,
            "precision": precision,
            "mode": case[0],
            "streams": case[1],
            "batch": batch,
            "frames": frames,
            "s per step": seconds[case]["median"],
            "20 % to 80 %": "{p20:.3g} to {p80:.3g}".format(**seconds[case]),
            "GB per utterance": grown[case] / GB,
            "baseline": f"{name} {precision} " + " ".join(BASELINE),
            "times the baseline": seconds[case]["median"] / seconds[BASELINE]["median"],
            "share of the baseline": grown[case] / grown[BASELINE],
        }
        for case in CASES
    ]
