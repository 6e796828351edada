"""Plans for an 11 GB GPU on a GPU that is capped at 11 GiB: peak, bits and time.

For each encoder a plan is made that leaves enough for all that a training run holds beside
the step (weights, gradients, optimizer and classifier); bytes that it does not hold here are
taken before the step runs. The allocator's peak stands beside the plan's, and times of all
modes that fit beside the plan's time.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speechbrain_rev.catalog import Training
from speechbrain_rev.catalog.plans import check_fits, plan_encoders
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.planner import Plan
from speechbrain_rev.planner.memory import make_gradients
from speechbrain_rev.sizes import GIB

from .harness import Result, interleaved_seconds, peak_bytes, require
from .steps import FRAMES

NAMES = (
    "resnet34",
    "resnet152",
    "revnet57",
    "revnet197",
    "df_resnet233",
    "df_revnet377",
)
PLANNED, UNIFORM = "plan", ("store", "recompute", "reconstruct")


def step_in(encoder: SpeakerEncoder, feats: torch.Tensor, mode: Any) -> None:
    """Forward and backward pass, all blocks in a mode or each in its own."""
    encoder.set_mode(mode)
    encoder(feats).square().mean().backward()


def gradients(
    encoder: SpeakerEncoder, mode: Any, device: torch.device
) -> list[torch.Tensor]:
    """Take a small step; give gradients and buffers, and leave the encoder as it was."""
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    feats = torch.randn(2, 40, encoder.n_mels, generator=draw).to(device)
    make_gradients(encoder)
    step_in(encoder, feats, mode)
    left = [weight.grad for weight in encoder.parameters()]
    left += [buffer.clone() for buffer in encoder.buffers()]
    encoder.load_state_dict(before)
    encoder.zero_grad(set_to_none=True)
    return left


def modes_by_name(plan: Plan) -> dict[str, Any]:
    """Name what is compared: the plan, and each mode for all blocks that can have it."""
    reversible = any("chain" in name for name in plan.modes)
    uniform = UNIFORM if reversible else UNIFORM[:2]
    return {PLANNED: dict(plan.modes), **{mode: mode for mode in uniform}}


def check_bits(encoder: SpeakerEncoder, plan: Plan, device: torch.device) -> None:
    """Compare all modes with storing, to the bit.

    Raises
    ------
    NotEqual
        If a gradient or a buffer differs.
    """
    expected = gradients(encoder, "store", device)
    for name, mode in modes_by_name(plan).items():
        equal = map(torch.equal, gradients(encoder, mode, device), expected)
        require(all(equal), f"{name} has other bits than store with {plan.about}")


def measured(
    name: str, card_bytes: int, batch: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Plan an encoder, and run what was planned."""
    training = Training(card_bytes, batch=batch, frames=FRAMES)
    (planned,) = plan_encoders(training, names=[name])
    check_fits(planned)
    plan = planned.as_plan()
    encoder = build_encoder(name).to(device)
    encoder.set_channels(plan.channels)
    check_bits(encoder, plan, device)
    make_gradients(encoder)
    feats = torch.randn(batch, FRAMES, encoder.n_mels, device=device)
    held = 2 * sum(weight.nbytes for weight in encoder.parameters()) + feats.nbytes
    beside = training.available_bytes - plan.budget_bytes - held
    taken = torch.empty(max(0, beside), dtype=torch.uint8, device=device)
    steps = {
        way: functools.partial(step_in, encoder, feats, mode)
        for way, mode in modes_by_name(plan).items()
    }
    peak = peak_bytes(steps[PLANNED], device)
    fitting = {way: step for way, step in steps.items() if way == PLANNED or fits(step)}
    seconds = interleaved_seconds(fitting, device, repeats=repeats)
    baseline = seconds[PLANNED].median
    del taken
    return {
        "encoder": name,
        "batch": batch,
        "modes": plan.counts(),
        "baseline": "the plan",
        "planned GiB": plan.measured_bytes / GIB,
        "peak GiB": peak / GIB,
        "peak / planned": peak / plan.measured_bytes,
        "s per step, plan": baseline,
        **{
            f"{mode} / plan": seconds[mode].median / baseline
            if mode in seconds
            else "-"
            for mode in UNIFORM
        },
    }


def fits(step: Callable[[], Any]) -> bool:
    """Try whether a step fits the memory."""
    try:
        step()
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return False
    return True


def run(
    device: torch.device,
    names: Sequence[str] = NAMES,
    *,
    card_bytes: int = 11 * GIB,
    batch: int = 64,
    repeats: int = 5,
) -> Result:
    """Measure the encoders; the baseline of each is its plan."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, card_bytes / total), device)
    rows = []
    for name in names:
        rows.append(measured(name, card_bytes, batch, repeats, device))
        print(*rows[-1].values(), flush=True)
    return Result(
        "capped",
        "Does a plan for an 11 GB GPU hold on one, and what does it cost?",
        f"float32, {FRAMES} frames, memory capped at {card_bytes / GIB:.4g} GiB",
        rows,
        "gradients and buffers of a small step equal those of store to the bit in all modes",
    )
