"""Figure 9 of the paper on error-bounded compression, redone for one encoder.

A training goes on from one state with stored and with compressed activations, whose
weight gradients are to be off by 1, 2 and 5 percent of their momentum.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.compression import GradientBound

from .compressed_ways import (
    N_MELS,
    STATE,
    audited,
    follow,
    ratio_of,
    read_state,
    training_of,
)
from .harness import Result, require
from .pictures import loss_curves
from .speech import Speech, Training, real_speech
from .steps import Way


@dataclass(frozen=True)
class Setting:
    """What is trained; ``last`` steps are compared, bounds looked at every ``every``."""

    name: str = "resnet34"
    state: Path = STATE
    batch: int = 8
    frames: int = 64
    steps: int = 150
    last: int = 50
    every: int = 50
    targets: tuple[float, ...] = (0.01, 0.02, 0.05)
    row: Mapping[str, Any] = field(default_factory=dict)


def continued(
    target: float | None, speech: Speech, state: Mapping[str, Any], setting: Setting
) -> tuple[list[float], Training]:
    """Go on from a state, with all stored where there is no target."""
    way = Way("stored" if target is None else f"target {100 * target:g} %", chunk=None)
    training = training_of(way, setting.name, speech, setting.batch, **setting.row)
    training.resume(state)
    training.let_fall(setting.steps)
    bound = GradientBound(target or 1.0, every=1)
    if target is not None:
        training.encoder.set_mode("compress")
        follow(training, bound, training.steps_taken)
    losses, _ = training.run(2, way.name)
    # The first bounds are there; from now on they are looked at as in training.
    bound.every = setting.every
    return losses + training.run(setting.steps - 2, way.name)[0], training


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Go on with all targets; the baseline is to store everything."""
    setting = setting or Setting()
    speech = real_speech(N_MELS, setting.frames)
    state = read_state(setting.state)
    rows: list[dict[str, Any]] = []
    tensors = 0
    for target in (None, *setting.targets):
        losses, training = continued(target, speech, state, setting)
        ratio: float | str = ""
        if target is not None:
            ratio = ratio_of(training)
            with audited(training.encoder) as audit:
                training.step()
            tensors += audit.tensors
        loss = statistics.mean(losses[-setting.last :])
        rows.append(
            {
                "activations": f"target {100 * target:g} %" if target else "stored",
                "loss": loss,
                "baseline": "stored",
                "times the baseline": loss / rows[0]["loss"] if rows else 1.0,
                "inputs smaller": ratio,
                "losses": {"of each step": losses},
            }
        )
        require(
            losses[0] == rows[0]["losses"]["of each step"][0],
            f"The first loss of target {target} is {losses[0]}.",
        )
    return Result(
        "compressed_targets",
        "How large may the error of weight gradients be?",
        f"{setting.name} from step {state['steps']} of compressed_training, batch "
        f"{setting.batch} of {setting.frames} frames, {speech.source}, {setting.steps} "
        f"steps more, the rate falling again; loss: mean of the last {setting.last}; "
        "target: of convolutions, batch normalisations at 0.03 of their deviation",
        rows,
        f"{tensors} tensors decoded: errors within bounds, zeros and signs kept; the "
        "first loss is the same to the bit",
    )


def draw(result: Result, path: Path) -> None:
    """Draw the losses."""
    loss_curves(
        {row["activations"]: row["losses"]["of each step"] for row in result.rows},
        path,
        title="Training goes on with weight gradients off by a part of their momentum",
        source=f"{result.setting}. {result.where}",
        mean_of=25,
    )
