"""Does training go on as before when stored activations are compressed?

Both ways of a seed begin with the same weights and see the same chunks of speech. What
is told is the mean loss of the last steps; the default bounds are to keep it within one
percent. The rate falls as the recipe's does. Trainings diverge from any difference, a
last bit too: a third way, stored, with weights that are off by about one such bit, tells
how much of a percent that alone is.

Each finished run is written to a folder of its own, and not run again.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.compression import ActivationCompression, GradientBound
from speechbrain_rev.lobes import build_encoder

from .compressed_checks import Audited, real_speech
from .harness import NotEqual, Result
from .precisions import PRECISIONS
from .speech import Speech, Training

PLAIN, COMPRESSED, NUDGED = "plain", "compressed", "plain, weights off by a bit"
#: Those of the first seed leave their state for what is measured of a trained encoder.
WAYS = (PLAIN, COMPRESSED, NUDGED)
N_MELS = 80
#: How far the mean loss may be from that of the stored run.
ALLOWED = 0.01
#: Of weights: about their last bit in float32.
NUDGE = 1e-7


@dataclass(frozen=True)
class Setting:
    """What is trained, and where finished runs are kept.

    Attributes
    ----------
    rate : float
        Times the recipe's rate, at first: 0.0125 is a learning rate of 0.005. Larger ones end
        further apart for a last bit alone: 0.025 half a percent.
    target : float
        Of convolutions' bounds: deviation of the weight gradient's error as a part of
        its momentum.
    row : mapping
        Widths and blocks of another encoder.
    """

    folder: Path = Path("results/compressed_training")
    name: str = "resnet34"
    batch: int = 8
    frames: int = 64
    steps: int = 300
    last: int = 50
    seeds: tuple[int, ...] = (1, 2, 3)
    rate: float = 0.0125
    target: float = 0.01
    row: Mapping[str, Any] = field(default_factory=dict)

    def words(self) -> dict[str, Any]:
        """Give what a run depends on."""
        own = asdict(self)
        for key in ("folder", "seeds", "last"):
            own.pop(key)
        return json.loads(json.dumps(own))


@dataclass
class Run:
    """One training: its loss after each step, and what became of activations."""

    way: str
    seed: int
    setting: dict[str, Any]
    losses: list[float]
    seconds_per_step: float
    bounds: dict[str, float]
    layers: dict[str, dict[str, Any]]


def start(way: str, seed: int, speech: Speech, setting: Setting) -> Training:
    """Begin a run; those of one seed have the same weights and chunks."""
    torch.manual_seed(seed)
    mode = "compress" if way == COMPRESSED else "store"
    encoder = build_encoder(setting.name, mode=mode, **setting.row)
    training = Training(
        encoder,
        setting.name,
        speech,
        PRECISIONS["float32"],
        rate=setting.rate,
        batch=setting.batch,
    )
    training._draw.manual_seed(seed)
    if way == COMPRESSED:
        bound = GradientBound(setting.target)
        bound.follow(training.optimizer)
        encoder.compression = ActivationCompression(convolutions=bound)
    elif way == NUDGED:
        with torch.no_grad():
            for p in encoder.parameters():
                p.mul_(1 + NUDGE * torch.randn_like(p))
    return training


def trained(way: str, seed: int, speech: Speech, setting: Setting) -> Run:
    """Train, or take the finished run of the folder."""
    stem = f"{way.replace(' ', '_').replace(',', '')}_{seed}"
    file = setting.folder / f"{stem}.json"
    if file.exists():
        run = Run(**json.loads(file.read_text()))
        if run.setting == setting.words():
            return run
    training = start(way, seed, speech, setting)
    training.let_fall(setting.steps)
    compression = training.encoder.compression
    losses, times = [], []
    for i in range(setting.steps):
        batch = training.next_batch()
        begin = time.perf_counter()
        losses.append(training.step(batch))
        times.append(time.perf_counter() - begin)
        if i % 10 == 9:
            recent = statistics.mean(losses[-10:])
            print(f"{stem} step {i + 1}: {recent:.4f} {times[-1]:.2f} s", flush=True)
    run = Run(
        way,
        seed,
        setting.words(),
        losses,
        statistics.median(times),
        dict(getattr(compression.rules["convolution"], "bounds", {})),
        {
            layer: {**asdict(record), "ratio": record.ratio}
            for layer, record in compression.records.items()
        },
    )
    setting.folder.mkdir(parents=True, exist_ok=True)
    if seed == setting.seeds[0]:
        torch.save(state_of(training), setting.folder / f"{stem}.pt")
    file.write_text(f"{json.dumps(asdict(run))}\n")
    return run


def state_of(training: Training) -> dict[str, Any]:
    """Return all that a run resumes from."""
    return {
        "encoder": training.encoder.state_dict(),
        "classifier": training.classifier.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "compression": training.encoder.compression.state_dict(),
        "draw": training._draw.get_state(),
        "steps": training.steps_taken,
    }


def resume(training: Training, state: Mapping[str, Any]) -> None:
    """Resume a run from what ``state_of`` returned."""
    training.encoder.load_state_dict(state["encoder"])
    training.classifier.load_state_dict(state["classifier"])
    # Torch would go on in the tensors that it is given.
    training.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    training._draw.set_state(state["draw"])
    training.steps_taken = state["steps"]


def check(speech: Speech, setting: Setting) -> str:
    """Compare what is kept with what was there, in three steps of a run.

    Raises
    ------
    NotEqual
        If a bound, a zero or a sign is not kept, or the loss of the first step, which
        no compression has touched yet, is another one.
    """
    plain = start(PLAIN, setting.seeds[0], speech, setting)
    ours = start(COMPRESSED, setting.seeds[0], speech, setting)
    rules = ours.encoder.compression.rules
    audit = ours.encoder.compression = Audited(
        convolutions=rules["convolution"], normalisations=rules["normalisation"]
    )
    first = [training.step(training.next_batch()) for training in (plain, ours)]
    if first[0] != first[1]:
        raise NotEqual(f"Losses of the first step are {first[0]} and {first[1]}.")
    for _ in range(2):
        ours.step(ours.next_batch())
    return (
        f"{audit.tensors} tensors of three steps decoded: errors at most "
        f"{audit.largest:.4f} of their bounds, zeros and signs kept; the loss of the "
        "first step is the same to the bit"
    )


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Train all ways with all seeds; the baseline is the stored one of a seed."""
    if device.type != "cpu":
        raise ValueError(f"Trainings are kept of the CPU; {device} was asked for.")
    setting = setting or Setting()
    speech = real_speech(N_MELS, setting.frames)
    checked = check(speech, setting)
    # The first seed's first, so that its state is there for what needs it.
    runs = [
        trained(way, seed, speech, setting)
        for ways in (WAYS[:2], WAYS[2:])
        for seed in setting.seeds
        for way in ways
    ]
    rows = rows_of(runs, setting)
    return Result(
        "compressed_training",
        f"Is the loss after {setting.steps} steps that of stored activations?",
        f"{setting.name}, batch {setting.batch} of {setting.frames} frames, {speech.source}, "
        f"AAM softmax, SGD from {setting.rate * 0.4:g} to a thousandth of it, momentum 0.9, "
        f"clipped gradients; bounds: GradientBound({setting.target:g}) and 0.03 of the "
        f"deviation for batch normalisations; loss: mean of the last {setting.last} steps",
        rows,
        f"{checked}. {verdict(rows)}",
    )


def rows_of(runs: list[Run], setting: Setting) -> list[dict[str, Any]]:
    """Make a row of each run, with its ratio to the stored one of the same seed."""

    def loss(run: Run) -> float:
        return statistics.mean(run.losses[-setting.last :])

    plain = {run.seed: run for run in runs if run.way == PLAIN}
    rows = []
    for run in sorted(runs, key=lambda run: run.seed):
        sizes = [
            sum(layer[key] for layer in run.layers.values())
            for key in ("original_bytes", "kept_bytes")
        ]
        ratios = [layer["ratio"] for layer in run.layers.values()]
        other = plain[run.seed]
        rows.append(
            {
                "seed": run.seed,
                "way": run.way,
                "first loss": run.losses[0],
                "loss": loss(run),
                "baseline": f"{PLAIN}, seed {run.seed}",
                "times the baseline": loss(run) / loss(other),
                "s per step": run.seconds_per_step,
                "times its seconds": run.seconds_per_step / other.seconds_per_step,
                "ratio": sizes[0] / sizes[1] if ratios else "",
                "least ratio": min(ratios) if ratios else "",
                "bounds": run.bounds,
                "ratios": {name: lay["ratio"] for name, lay in run.layers.items()},
                "losses": {"of each step": [round(x, 4) for x in run.losses]},
            }
        )
    return rows


def verdict(rows: list[dict[str, Any]]) -> str:
    """State whether compressed runs end where stored ones do."""
    off = {
        way: [row["times the baseline"] - 1 for row in rows if row["way"] == way]
        for way in (COMPRESSED, NUDGED)
    }
    worst = {way: max(map(abs, found)) for way, found in off.items() if found}
    mean = statistics.mean(off[COMPRESSED])
    kept = worst[COMPRESSED] <= ALLOWED
    verdict = (
        f"Compressed runs end at most {100 * worst[COMPRESSED]:.2f} % from stored "
        f"ones (mean {100 * mean:+.2f} %), which is {'' if kept else 'NOT '}within "
        f"{100 * ALLOWED:g} %"
    )
    if NUDGED in worst:
        verdict += (
            f"; a change of the weights' last bit alone {100 * worst[NUDGED]:.2f} %"
        )
    return verdict
