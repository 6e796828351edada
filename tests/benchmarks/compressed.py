"""What can be done about a vanilla encoder's activations, each way beside the others.

All ways take a step with the same trained weights and the same batch of real speech,
for what compresses well depends on both. What is held between forward and backward pass
and the peak of live tensors are counted byte by byte; both are beyond weights and
gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.sizes import GB

from .compressed_ways import (
    STATE,
    Case,
    Trained,
    cases_of,
    check_audit,
    ratio_of,
    trained,
)
from .harness import (
    CPU,
    HALF_TIMED,
    Result,
    distance,
    has_half,
    interleaved_seconds,
    require,
    times,
)

#: How many times fewer bytes a way is to hold, and to have alive at once.
REQUIRED = {
    "compressed, 1e-3 of range": {"held fewer": 5.0, "peak lower": 4.0},
    "compressed, 1e-2 of range": {"held fewer": 8.0},
}


@dataclass(frozen=True)
class Network:
    """A vanilla encoder, and at which weights it is measured.

    Attributes
    ----------
    state : Path or None
        What a run left; None to train for some steps here.
    batch, timed_batch : int
        Utterances of the step that is counted, and of the one that is timed.
    """

    name: str
    counterparts: tuple[str, ...]
    batch: int
    timed_batch: int
    state: Path | None = None
    steps: int = 0
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    networks: tuple[Network, ...] = (
        Network(
            "resnet34", ("revnet46", "revnet57"), batch=8, timed_batch=4, state=STATE
        ),
        Network("resnet152", ("revnet197",), batch=4, timed_batch=2, steps=30),
    )
    frames: int = 200
    repeats: int = 3


@dataclass(frozen=True)
class Step:
    """What a step held, reached and left, and by how much inputs were compressed."""

    held_bytes: int
    peak_bytes: int
    gradients: list[Tensor]
    ratio: float | str


def measured(state: Trained, case: Case) -> Step:
    """Count a step's bytes beyond weights and gradients, and take its gradients."""
    gc.collect()
    training = state.build(case)
    for p in training.parameters:
        p.grad = torch.zeros_like(p)
    with LiveBytes() as meter:
        loss = training.loss_of(state.batch)
        held = meter.live
        loss.backward()
    gradients = [p.grad.clone() for p in training.encoder.parameters()]
    ratio = ""
    if case.modes:
        ratio = ratio_of(training)
        check_audit(training)
    return Step(held, meter.peak, gradients, ratio)


def rows_of(network: Network, setting: Setting) -> list[dict[str, Any]]:
    """Count and time all ways of a network; the baseline is the first."""
    state = trained(
        network.name,
        batch=network.batch,
        frames=setting.frames,
        state=network.state,
        steps=network.steps,
        row=network.row,
    )
    cases = cases_of(network.name, network.counterparts)
    feats, speakers = state.batch
    timed = feats[: network.timed_batch], speakers[: network.timed_batch]
    built = [state.build(case) for case in cases]
    steps = {
        case: lambda training=training: training.loss_of(timed).backward()
        for case, training in zip(cases, built, strict=True)
        if has_half(CPU) or case.way.precision == "float32"
    }
    seconds = interleaved_seconds(steps, CPU, repeats=setting.repeats)
    del steps, built
    base = measured(state, cases[0])
    rows = []
    for case in cases:
        step, exact = measured(state, case), base
        if case.name != state.name:
            # What a counterpart computes is what its own stored step does.
            exact = measured(state, Case(case.name, case.way.stored))
        error = distance(step.gradients, exact.gradients)
        lossless = not case.modes and case.way.precision == "float32"
        require(
            error < 1e-4 or not lossless,
            f"Gradients of {case.name}, {case.way.name}, are off by {error}.",
        )
        rows.append(
            {
                "encoder": case.name,
                "way": case.way.name,
                "held GB": step.held_bytes / network.batch / GB,
                "live peak GB": step.peak_bytes / network.batch / GB,
                "baseline": f"{state.name} stored",
                "held fewer": base.held_bytes / step.held_bytes,
                "peak lower": base.peak_bytes / step.peak_bytes,
                "gradient error": error,
                "inputs smaller": step.ratio,
                **times(seconds.get(case), seconds[cases[0]]),
            }
        )
        print(*rows[-1].values(), flush=True)
    return rows


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Measure all ways of all networks; the baseline is to store everything."""
    setting = setting or Setting()
    rows = [row for network in setting.networks for row in rows_of(network, setting)]
    weights = "; ".join(
        f"{n.name}: batch {n.batch} (time: {n.timed_batch}), weights after "
        f"{'300 steps of compressed_training' if n.state else f'{n.steps} steps'}"
        for n in setting.networks
    )
    return Result(
        "compressed",
        "What is held of activations, how long is a step, how far is its gradient?",
        f"float32, or bf16 where named, {setting.frames} frames of minivox; {weights}; "
        "held: live bytes between forward and backward pass, both beyond weights and "
        "gradients, for each utterance; gradient error: distance of the whole gradient "
        "from the stored one's, as a part of it, of a reversible encoder from its own "
        "stored one; recipe's bounds: GradientBound(0.01) and DeviationBound(3e-2); every "
        "2nd block recomputed: the 1st, 3rd, ... of each stage, the others compressed; "
        "torch checkpoint: around each block; reversible encoders at first weights; time: median of "
        f"{setting.repeats} interleaved forward and backward passes; {HALF_TIMED}",
        rows,
        "every compressed tensor of a step of 2 utterances decoded: errors within bounds, "
        f"zeros and signs kept. {verdict(rows)}",
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """State what was required of ways, and whether it was reached."""
    return "; ".join(
        f"{row['encoder']} {row['way']}: {head} {row[head]:.2f} times, {required:g} "
        f"required{'' if row[head] >= required else ', which is MISSED'}"
        for row in rows
        for head, required in REQUIRED.get(row["way"], {}).items()
    )
