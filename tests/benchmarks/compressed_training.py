"""Does training go on as before when stored activations are compressed?

Both ways of a seed begin with the same weights and see the same chunks of speech. What
is compared is the mean loss of the last steps; the default bounds are to keep it within
one percent. The rate falls as the recipe's does. Runs diverge from any difference, a
last bit too: a third way, stored, with weights that are off by about one such bit, shows
how much of a percent that alone is.

The stored run of the first seed leaves its state for what is measured of a trained encoder.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.compression import GradientBound

from .compressed_ways import N_MELS, RATE, STATE, TARGET, audited, follow, training_of
from .harness import Result, require
from .speech import Speech, Training, real_speech
from .steps import Way

STORED, COMPRESSED, NUDGED = "stored", "compressed", "stored, weights off by a bit"
WAYS = (STORED, COMPRESSED, NUDGED)
#: How far the mean loss may be from that of the stored run.
ALLOWED = 0.01
#: Of weights: about their last bit in float32.
NUDGE = 1e-7


@dataclass(frozen=True)
class Setting:
    """What is trained; ``row`` has widths and blocks of another encoder."""

    state: Path = STATE
    name: str = "resnet34"
    batch: int = 8
    frames: int = 64
    steps: int = 300
    last: int = 50
    seeds: tuple[int, ...] = (1, 2, 3)
    row: Mapping[str, Any] = field(default_factory=dict)


def start(way: str, seed: int, speech: Speech, setting: Setting) -> Training:
    """Begin a run; those of one seed have the same weights and chunks."""
    mode = Way(way, "compress" if way == COMPRESSED else "store", chunk=None)
    training = training_of(
        mode, setting.name, speech, setting.batch, seed=seed, **setting.row
    )
    if way == COMPRESSED:
        follow(training, GradientBound(TARGET))
    elif way == NUDGED:
        with torch.no_grad():
            for p in training.encoder.parameters():
                p.mul_(1 + NUDGE * torch.randn_like(p))
    return training


def trained(way: str, seed: int, speech: Speech, setting: Setting) -> dict[str, Any]:
    """Train, and make a row of the run."""
    training = start(way, seed, speech, setting)
    training.let_fall(setting.steps)
    losses, seconds = training.run(setting.steps, f"{way} {seed}")
    if way == STORED and seed == setting.seeds[0]:
        setting.state.parent.mkdir(parents=True, exist_ok=True)
        torch.save(training.state(), setting.state)
    records = training.encoder.compression.records.values()
    sizes = [(record.original_bytes, record.kept_bytes) for record in records]
    original, kept = map(sum, zip(*sizes, strict=True)) if sizes else (0, 1)
    return {
        "seed": seed,
        "way": way,
        "first loss": losses[0],
        "loss": statistics.mean(losses[-setting.last :]),
        "s per step": seconds,
        "ratio": original / kept if sizes else "",
        "least ratio": min((record.ratio for record in records), default=""),
        "losses": {"of each step": [round(loss, 4) for loss in losses]},
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each run its ratio to the stored one of the same seed."""
    stored = {row["seed"]: row for row in rows if row["way"] == STORED}
    return [
        row
        | {
            "baseline": f"{STORED}, seed {row['seed']}",
            "times the baseline": row["loss"] / stored[row["seed"]]["loss"],
            "times its seconds": row["s per step"] / stored[row["seed"]]["s per step"],
        }
        for row in rows
    ]


def check(speech: Speech, setting: Setting) -> str:
    """Compare what is kept with what was there, in three steps of a run.

    Raises
    ------
    NotEqual
        If a bound, a zero or a sign is not kept, or the loss of the first step, which
        no compression has touched yet, is another one.
    """
    stored = start(STORED, setting.seeds[0], speech, setting)
    ours = start(COMPRESSED, setting.seeds[0], speech, setting)
    with audited(ours.encoder) as audit:
        first = [training.step() for training in (stored, ours)]
        require(first[0] == first[1], f"Losses of the first step are {first}.")
        for _ in range(2):
            ours.step()
    return (
        f"{audit.tensors} tensors of three steps decoded: errors at most "
        f"{audit.largest:.4f} of their bounds, zeros and signs kept; the loss of the "
        "first step is the same to the bit"
    )


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Train all ways with all seeds; the baseline is the stored one of a seed."""
    setting = setting or Setting()
    speech = real_speech(N_MELS, setting.frames)
    checked = check(speech, setting)
    rows = compared(
        [trained(way, seed, speech, setting) for seed in setting.seeds for way in WAYS]
    )
    return Result(
        "compressed_training",
        f"Is the loss after {setting.steps} steps that of stored activations?",
        f"{setting.name}, batch {setting.batch} of {setting.frames} frames, {speech.source}, "
        f"AAM softmax, SGD from {RATE * 0.4:g} to a thousandth of it, momentum 0.9, "
        f"clipped gradients; bounds: GradientBound({TARGET:g}) and 0.03 of the "
        f"deviation for batch normalisations; loss: mean of the last {setting.last} steps",
        rows,
        f"{checked}. {verdict(rows)}",
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """State whether compressed runs end where stored ones do."""
    off, nudged = (
        [row["times the baseline"] - 1 for row in rows if row["way"] == way]
        for way in (COMPRESSED, NUDGED)
    )
    worst = max(map(abs, off))
    bit = f"{100 * max(map(abs, nudged)):.2f} %" if nudged else "not measured"
    return (
        f"Compressed runs end at most {100 * worst:.2f} % from stored ones (mean "
        f"{100 * statistics.mean(off):+.2f} %), which is "
        f"{'' if worst <= ALLOWED else 'NOT '}within {100 * ALLOWED:g} %; a change of the "
        f"weights' last bit alone {bit}"
    )
