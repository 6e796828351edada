"""What can be done about a vanilla encoder's activations, each way beside the others.

All ways take a step with the same trained weights and the same batch of real speech,
for what compresses well depends on both. What is held between forward and backward pass
and the peak of live tensors are counted byte by byte; both are beyond weights and
gradients.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .compressed_checks import audited
from .compressed_ways import (
    Case,
    Step,
    Trained,
    cases_of,
    measured,
    plain,
    ratio_of,
    take_step,
    trained,
)
from .harness import NotEqual, Result, interleaved_seconds
from .speech import Training

GB = 1e9
#: Utterances of the step whose compressed tensors are all decoded and compared.
AUDITED = 2
#: How many times fewer bytes a way is to hold, and to have alive at once.
REQUIRED = {
    "compressed, 1e-3 of range": (5.0, 4.0),
    "compressed, 1e-2 of range": (8.0, None),
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
            "resnet34",
            ("revnet46", "revnet57"),
            batch=8,
            timed_batch=4,
            state=Path("results/compressed_training/plain_1.pt"),
        ),
        Network("resnet152", ("revnet197",), batch=4, timed_batch=2, steps=30),
    )
    frames: int = 200
    repeats: int = 3


def counted(state: Trained, cases: list[Case]) -> list[dict[str, Any]]:
    """Take a step in each way; the baseline is the first."""
    rows: list[dict[str, Any]] = []
    base: Step | None = None
    for case in cases:
        gc.collect()
        training = state.build(case)
        step = measured(training, state.batch)
        base = base or step
        exact = base if case.name == state.name else _stored(state, case)
        off = step.gradients - exact.gradients
        error = float(off.norm() / exact.gradients.norm())
        ratio = ratio_of(training) if case.compresses else ""
        _check(case, training, error)
        utterances = len(state.batch[0])
        rows.append(
            {
                "encoder": case.name,
                "way": case.way.name,
                "held GB": step.held_bytes / utterances / GB,
                "live peak GB": step.peak_bytes / utterances / GB,
                "baseline": f"{state.name} plain",
                "held fewer": base.held_bytes / step.held_bytes,
                "peak lower": base.peak_bytes / step.peak_bytes,
                "gradient error": error,
                "inputs smaller": ratio,
            }
        )
        print({k: v for k, v in rows[-1].items() if k != "baseline"}, flush=True)
    return rows


def _stored(state: Trained, case: Case) -> Step:
    """Take the step of a counterpart that stores, which computes the same."""
    other = Case(case.name, case.way.stored)
    return measured(state.build(other), state.batch)


def _check(case: Case, training: Training, error: float) -> None:
    """Refuse ways that do not compute what their name says.

    Raises
    ------
    NotEqual
        If nothing was compressed or not within the bounds, or a way without compression
        and in float32 has other gradients.
    """
    if case.compresses:
        feats, speakers = training.next_batch()
        with audited(training.encoder) as audit:
            take_step(training, (feats[:AUDITED], speakers[:AUDITED]))
        if not audit.tensors:
            raise NotEqual(f"{case.name}, {case.way.name}: nothing was compressed.")
    elif case.way.precision == "float32" and not error < 1e-4:
        raise NotEqual(
            f"Gradients of {case.name}, {case.way.name}, are off by {error}."
        )


def timed(
    state: Trained, cases: list[Case], timed_batch: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Take the times of a step in turn."""
    feats, speakers = state.batch
    batch = feats[:timed_batch], speakers[:timed_batch]
    steps: dict[str, Callable[[], Any]] = {}
    for case in cases:
        training = state.build(case)
        steps[_key(case)] = functools.partial(take_step, training, batch)
    return interleaved_seconds(steps, training.device, repeats=repeats)


def _key(case: Case) -> str:
    return f"{case.name} {case.way.name}"


def rows_of(network: Network, setting: Setting) -> list[dict[str, Any]]:
    """Count and time all ways of a network."""
    state = trained(
        network.name,
        batch=network.batch,
        frames=setting.frames,
        state=network.state,
        steps=network.steps,
        **network.row,
    )
    cases = cases_of(network.name, network.counterparts)
    rows = counted(state, cases)
    seconds = timed(state, cases, network.timed_batch, setting.repeats)
    base = seconds[_key(plain(network.name))]["median"]
    for case, row in zip(cases, rows, strict=True):
        spread = seconds[_key(case)]
        row |= {
            "s per step": spread["median"],
            "20 % to 80 %": "{p20:.3g} to {p80:.3g}".format(**spread),
            "times the baseline": spread["median"] / base,
        }
        print(_key(case), spread, flush=True)
    return rows


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Measure all ways of all networks; the baseline is to store everything."""
    if device.type != "cpu":
        raise ValueError(f"compressed is measured on the CPU; {device} was asked for.")
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
        "from the plain one's, as a part of it, of a reversible encoder from its own "
        "stored one; recipe's bounds: GradientBound(0.01) and DeviationBound(3e-2); every "
        "2nd block recomputed: the 1st, 3rd, ... of each stage, the others compressed; "
        "torch checkpoint: around each block; reversible encoders at first weights; time: median of "
        f"{setting.repeats} interleaved forward and backward passes",
        rows,
        f"every compressed tensor of a step of {AUDITED} utterances decoded: errors within "
        f"bounds, zeros and signs kept. {verdict(rows)}",
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """Say what was required of ways, and whether it was reached."""
    verdicts = []
    for row in rows:
        for head, required in zip(
            ("held fewer", "peak lower"), REQUIRED.get(row["way"], ()), strict=False
        ):
            if required is not None:
                missed = "" if row[head] >= required else ", which is MISSED"
                verdicts.append(
                    f"{row['encoder']} {row['way']}: {head} {row[head]:.2f} times, "
                    f"{required:g} required{missed}"
                )
    return "; ".join(verdicts)
