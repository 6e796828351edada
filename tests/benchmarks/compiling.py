"""What ``compile: true`` changes in a training step, and how long it takes to begin."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from speechbrain_rev.reversible import compile_pieces
from speechbrain_rev.reversible.compiled import compiling

from .harness import (
    Result,
    allocated_bytes,
    in_a_process,
    interleaved_seconds,
    require,
    times,
)
from .steps import FRAMES, Way, encoder_by, train_step

NAMES = ("revnet57",)
WAYS = (
    Way("stored", "store", "exact"),
    Way("reconstructed", "reconstruct", "exact"),
)
BACKEND = "inductor"
#: The batch of the times on a CPU.
BATCH = 2


def check_bits(name: str, device: torch.device, backend: str) -> None:
    """Compare the gradients and buffers of compiled steps in all modes, bit by bit.

    Raises
    ------
    NotEqual
        If a mode makes others than stored activations do.
    """
    states = {}
    for mode in ("store", "reconstruct", "recompute"):
        way = Way(mode, mode, "exact", chunk=60_000)
        encoder = encoder_by(way, name, widths=(8, 16, 16, 24), blocks=(1, 2, 2, 1))
        compile_pieces(encoder.to(device), backend)
        torch.manual_seed(1)
        train_step(encoder, torch.randn(2, 40, 80).to(device), way)
        grads = [p.grad for p in encoder.parameters()]
        states[mode] = [*grads, *encoder.buffers()]
    stored = states.pop("store")
    for mode, state in states.items():
        require(
            all(map(torch.equal, state, stored)),
            f"Compiled, mode {mode} of {name} has other bits than mode store.",
        )


def startup(name: str, device: str, backend: str, size: dict[str, Any]) -> float:
    """Compile what a first step needs, in a process without anything kept of before."""
    from torch._inductor import config

    with config.patch(force_disable_caches=True):
        encoder = encoder_by(WAYS[1], name, **size).to(device)
        compile_pieces(encoder, backend)
        train_step(encoder, torch.randn(2, 40, 80, device=device), WAYS[1])
    return compiling()[1]


def run(
    device: torch.device,
    names: Sequence[str] = NAMES,
    *,
    backend: str = BACKEND,
    batch: int = BATCH,
    frames: int = FRAMES,
    repeats: int = 7,
    **size: Any,
) -> Result:
    """Time and count steps; the baseline is the same step as Python runs it."""
    if device.type == "cuda":
        batch, repeats = 64, 10
    rows: list[dict[str, Any]] = []
    for name in names:
        check_bits(name, device, backend)
        own = f"{__package__}.compiling"
        seconds = in_a_process(own, "startup", name, device.type, backend, size)
        with device:
            feats = torch.randn(batch, frames, 80)
            steps = {}
            for way in WAYS:
                for compiled in (False, True):
                    encoder = encoder_by(way, name, **size)
                    compile_pieces(encoder, backend if compiled else None)
                    steps[way, compiled] = functools.partial(
                        train_step, encoder, feats, way
                    )
        spreads = interleaved_seconds(steps, device, repeats=repeats)
        for (way, compiled), step in steps.items():
            plain = steps[way, False]
            baseline = spreads[way, False]
            shown = f"{way.name}, compiled" if compiled else way.name
            rows.append(
                {
                    "encoder": name,
                    "way": shown,
                    "baseline": f"{way.name}, not compiled",
                    **times(spreads[way, compiled], baseline),
                    "of the baseline's peak": allocated_bytes(step, device)
                    / allocated_bytes(plain, device),
                    "start-up s": seconds if compiled else 0.0,
                    "start-up, steps": seconds / baseline.median if compiled else 0.0,
                }
            )
            print(*rows[-1].values(), flush=True)
    return Result(
        "compiling",
        "What does compile: true change in a training step, and how long does it take to begin?",
        f"float32, exact streams, batch {batch}, {frames} frames, forward and backward pass; "
        f"median of {repeats} interleaved steps; {backend}; start-up: compiling the pieces of "
        "a first step in a new process, without caches and with the import of the compiler, "
        "and the same in steps of the baseline; peak: the allocator's",
        rows,
        "Reduced widths: gradients and buffers of compiled steps have the same bits stored, "
        "reconstructed and recomputed",
    )
