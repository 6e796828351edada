"""Vanilla encoders whose blocks run again in runs, beside blocks that do so one by one.

The runs are those of the lightest plan. Bytes are counted on meta tensors; times are
estimated from counts of operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.steps import encoder_step
from speechbrain_rev.devices import ASSUMED, parse_card
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner import largest_batch
from speechbrain_rev.planner.profiling import profiler_of
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.sizes import GIB, MIB

from .harness import Result, require

NAMES = tuple(name for name, row in ARCHITECTURES.items() if not row.reversible)
#: By how much a peak that was predicted may differ from the one that was counted.
ALIKE = 0.01


@dataclass(frozen=True)
class Setting:
    """Which encoders, at which batch and length."""

    names: tuple[str, ...] = NAMES
    batch: int = 64
    frames: int = 200
    card: str = "11 GiB"


def check_bits(name: str) -> None:
    """Hold that runs of two and three blocks leave the gradients of stored ones."""
    gradients = []
    for length in (None, 2, 3):
        torch.manual_seed(0)
        encoder = build_encoder(name, widths=(8, 8, 16, 16), blocks=(1, 2, 2, 1))
        names = list(encoder.block_modes())
        if length is not None:
            encoder.set_mode(
                {n: "join" if i % length else "recompute" for i, n in enumerate(names)}
            )
        encoder(torch.randn(2, 40, 80)).square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])
    stored, *others = gradients
    equal = [all(map(torch.equal, own, stored)) for own in others]
    require(all(equal), f"Gradients of {name} in runs are not those of stored blocks.")


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Count the lightest runs; the baseline is an encoder whose blocks recompute alone."""
    setting = setting or Setting()
    card = parse_card(setting.card).memory_bytes
    training = Training(card, batch=setting.batch, frames=setting.frames)
    rows, worst = [], 0.0
    for name in setting.names:
        check_bits(name)
        step = encoder_step(ARCHITECTURES[name], training, speed=ASSUMED)
        with step.training():
            profiler = profiler_of(step)
            profile = profiler.timed()
            ways = {mode: profile.uniform(mode) for mode in ("store", "recompute")}
            ways["runs"] = profile.lightest()
            peaks = {}
            with profiler.bare() as trial:
                for way, modes in ways.items():
                    trial.network.set_mode(modes)
                    peaks[way] = trace_bytes(trial.network, trial.run).peak_bytes
                    off = abs(profile.peak_bytes(modes) / peaks[way] - 1)
                    worst = max(worst, off)
                    require(
                        off <= ALIKE,
                        f"{name}, {way}: {peaks[way]} bytes counted, "
                        f"{profile.peak_bytes(modes)} predicted.",
                    )
        batches = {
            "recompute": training.largest_batch(ARCHITECTURES[name], "recompute"),
            "runs": largest_batch(step, card),
        }
        chosen = list(ways["runs"].values())
        rows.append(
            {
                "encoder": name,
                **{f"{way} MiB": peaks[way] / setting.batch / MIB for way in ways},
                "baseline": "recompute",
                "times the baseline": peaks["runs"] / peaks["recompute"],
                **{f"batch {way}": batch for way, batch in batches.items()},
                **{
                    f"{way} time": profile.seconds(ways[way])
                    / profile.seconds(ways["store"])
                    for way in batches
                },
                "runs": chosen.count("recompute"),
                "joined": chosen.count("join"),
                "stored": chosen.count("store"),
            }
        )
    return Result(
        "joined",
        "What do encoders take whose blocks recompute in runs?",
        f"float32, {setting.frames} frames, batch {setting.batch}; peaks of live tensors, "
        "counted on meta tensors, beside weights, gradients and input; times beside the "
        f"stored step are estimated for {ASSUMED}; batch: largest that fits "
        f"{card / GIB:.0f} GiB with weights, gradients, 8-bit states and a classifier",
        rows,
        "gradients of runs equal those of stored blocks to the bit (small widths); "
        f"counted peaks are within {100 * worst:.2f} % of predicted ones",
    )
