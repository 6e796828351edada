"""What a training step holds, counted on meta tensors: what the package commits.

The counts are the same on every machine. After a change to what the engine or the
encoders store, and when a test says so, write them again:

python -m tests.benchmarks --device meta --results speechbrain_rev/catalog
python -m tests.benchmarks.readme
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog.counts import (
    BATCHES,
    FRAMES,
    Peak,
    StepWork,
)
from speechbrain_rev.catalog.steps import training_step
from speechbrain_rev.devices import Work
from speechbrain_rev.planner import live_bytes_peak
from speechbrain_rev.planner.trace import trace_bytes

from .harness import CPU, Result, require
from .steps import check_modes

#: One of each kind of block and transition, also counted where they really run.
RUN = ("resnet34", "resnet101", "df_resnet56", "revnet46", "revnet126", "revnet140",
       "revnet57", "revnet155", "df_revnet66", "df_revnet89")  # fmt: skip

#: Batches between which what a step does is a line.
WORK_BATCHES = (32, 128)


def training_step_peak(
    name: str,
    *,
    mode: str | None = None,
    frames: int,
    batch: int,
    device: str | torch.device = "meta",
) -> int:
    """Count the bytes of live tensors at the peak of a forward and backward pass.

    Weights, their gradients and the input exist before the step and are not among them.
    """
    _, step = training_step(name, mode=mode, frames=frames, batch=batch, device=device)
    return live_bytes_peak(step)


def modes_of(name: str) -> list[str]:
    """Modes that an encoder has."""
    reversible = ARCHITECTURES[name].reversible
    return ["store", "selective", "recompute"] + ["reconstruct"] * reversible


def step_work(name: str, *, mode: str, frames: int) -> StepWork:
    """Count what a step of 32 utterances or more does: it grows by the utterance."""

    def counted(batch: int) -> Work:
        encoder, step = training_step(
            name, mode=mode, frames=frames, batch=batch, device="meta"
        )
        work = trace_bytes(encoder, step, with_work=True).work
        return functools.reduce(operator.add, work.values())

    first, second = WORK_BATCHES
    few, many = counted(first), counted(second)
    per_utterance = (many.moved_bytes - few.moved_bytes) // (second - first)
    work = StepWork(
        many.flops // second,
        per_utterance,
        many.moved_bytes - per_utterance * second,
        many.operations,
    )
    # Of one encoder of each kind at a third batch, too.
    third = {64: counted(64)} if name in RUN else {}
    for batch, seen in {first: few, second: many, **third}.items():
        require(
            seen == work(batch),
            f"{name} {mode} at {frames} frames does {seen} for {batch} utterances, where "
            f"the line through {WORK_BATCHES} says {work(batch)}.",
        )
    return work


def check_counts(name: str, batch: int = 2) -> None:
    """Run a step on the CPU and count what lives: the same to the byte."""
    for mode in modes_of(name):
        for frames in FRAMES:
            meta, real = (
                training_step_peak(
                    name, mode=mode, frames=frames, batch=batch, device=device
                )
                for device in ("meta", "cpu")
            )
            require(
                meta == real,
                f"{name} {mode} at batch {batch} and {frames} frames holds {real} bytes "
                f"on the CPU, but {meta} were counted on meta tensors.",
            )


def check_between(name: str, mode: str, frames: int, peak: Peak) -> None:
    """Count at other batches: never above what is read off, equal in the end."""
    for batch, exact in {3: False, 96: False, 4096: True}.items():
        counted = training_step_peak(name, mode=mode, frames=frames, batch=batch)
        require(
            counted == peak(batch) or (not exact and counted < peak(batch)),
            f"{name} {mode} at batch {batch} and {frames} frames holds {counted} bytes, "
            f"where the counts say {peak(batch)}.",
        )


def run(device: torch.device) -> Result:
    """Count all encoders; the baseline is the vanilla counterpart, stored."""
    assert device.type == "meta"
    rows, worst = [], 0.0
    stored: dict[tuple[str, int], int] = {}
    for name in RUN:
        check_counts(name)
    for name, row in ARCHITECTURES.items():
        worst = max(worst, check_modes(name, modes_of(name)[1:], CPU))
        baseline = row.counterpart or name
        for mode in modes_of(name):
            for frames in FRAMES:
                peaks = {
                    batch: training_step_peak(
                        name, mode=mode, frames=frames, batch=batch
                    )
                    for batch in BATCHES
                }
                peak = Peak(BATCHES, tuple(peaks.values()))
                if name in RUN:
                    check_between(name, mode, frames, peak)
                if mode == "store":
                    stored[name, frames] = peak.bytes_per_utterance
                gb = peak.bytes_per_utterance / 1e9
                rows.append(
                    {
                        "encoder": name,
                        "mode": mode,
                        "frames": frames,
                        "GB per utterance": gb,
                        "baseline": f"{baseline} store",
                        "share of the baseline": peak.bytes_per_utterance
                        / stored[baseline, frames],
                        "peak bytes": peaks,
                        "work": dataclasses.asdict(
                            step_work(name, mode=mode, frames=frames)
                        ),
                    }
                )
                print(f"{name:14}{mode:12}{frames:4} {gb:.4f}", flush=True)
    return Result(
        "counts",
        "How many bytes does a training step hold at its peak, by batch, and what does it do?",
        "float32, 80 mel bands, live tensors of forward and backward pass, counted on "
        "meta tensors; not among them: weights, their gradients, optimizer, classifier, "
        "the input, and what operations allocate within themselves; GB per utterance "
        f"is the slope between batches of {BATCHES[-2]} and {BATCHES[-1]}; work: FLOPs of "
        "convolutions and matrix products, bytes that operations read and write, and how "
        f"many operations there are, from {WORK_BATCHES[0]} utterances on",
        rows,
        f"gradients within {worst:.1e} of stored ones in float64, reduced widths; "
        f"equal to the byte on a CPU for {', '.join(RUN)} at batch 2; for these at "
        "batches between never below the count, at 1024 equal",
    )
