"""SpeechBrain's recipes within a memory budget: each plan beside checkpointing all blocks.

Brains are those of the tests, and ECAPA-TDNN as wide as in its recipe. A way's peak is that
of forward and backward pass, beside weights, gradients and optimizer states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import speechbrain as sb
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.planner import Infeasible, repeated_blocks
from speechbrain_rev.sizes import MIB
from speechbrain_rev.training.memory_budget import BrainStep, MemoryBudget
from tests.unit.training.brains import (
    batch_of,
    brain_of,
    full_ecapa,
    loader_of,
)

from .harness import Result, distance, interleaved_seconds, peak_bytes, require, times

STORED, CHECKPOINT = "stored", "torch checkpoint"
#: Parts of the stored peak that plans are given, beside the least that suffices.
SHARES = (0.75, 0.5)
#: Plain rounding, of convolutions whose sums run in another order.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Setting:
    """A recipe, its name in the table, and the size of a batch."""

    name: str
    recipe: Any
    rows: int = 8
    seconds: float = 2.0


SETTINGS = (
    Setting("ECAPA-TDNN, 1024 channels", full_ecapa, 8, 3.0),
    Setting("ECAPA-TDNN", "ecapa"),
    Setting("ResNet", "resnet"),
    Setting("x-vector", "xvector"),
    Setting("Conformer and decoder", "conformer"),
    Setting("WavLM", "wavlm", 4, 1.0),
)


def run(
    device: torch.device, settings: tuple[Setting, ...] = SETTINGS, repeats: int = 7
) -> Result:
    """Train a step of each Brain in each way; the baseline is the stored one."""
    rows: list[dict[str, Any]] = []
    for setting in settings:
        rows += _rows(setting, device, repeats)
        print(setting.name, flush=True)
    return Result(
        "budgets",
        "What does a memory budget take and cost in SpeechBrain's recipes?",
        "forward and backward pass in float32; 'least' is the smallest budget that has a "
        "plan; torch checkpoint: torch.utils.checkpoint of every block; live tensors beside "
        f"weights, gradients and optimizer states; medians of {repeats} interleaved steps",
        rows,
        "gradients of plans equal to the bit, of torch checkpoint within "
        f"{TOLERANCE:g}; peaks within their budgets",
    )


def _rows(
    setting: Setting, device: torch.device, repeats: int
) -> Iterator[dict[str, Any]]:
    batch = batch_of(setting.rows, setting.seconds)
    stored = _brain(setting, batch, device)
    expected, statistics = _stepped(stored, batch)
    peak = peak_bytes(functools.partial(_step, stored, batch), device)
    fixed = BrainStep(stored).fixed_bytes() + sum(
        x.nbytes for x in (*batch.sig, *batch.tokens, *batch.spk_id_encoded)
    )
    brains = {STORED: stored}
    budgets: dict[str, int] = {}
    for share in SHARES:
        name = f"memory_budget, {share:.0%}"
        try:
            budgets[name] = fixed + int(share * peak)
            brains[name] = _brain(setting, batch, device, budgets[name])
        except Infeasible as error:
            # The first that does not fit has the least one's place.
            name = "memory_budget, least"
            budgets[name] = error.needed_bytes
            brains[name] = _brain(setting, batch, device, budgets[name])
            break
        except ValueError:  # nothing to be planned
            break
    blocks = repeated_blocks(BrainStep(stored))
    if blocks:
        brains[CHECKPOINT] = _brain(setting, batch, device)
        for block in blocks:
            _checkpointed(BrainStep(brains[CHECKPOINT]).get_submodule(block))
    for name, brain in brains.items():
        gradients, own_statistics = _stepped(brain, batch)
        off, exact = distance(gradients, expected), name != CHECKPOINT
        require(off <= (0 if exact else TOLERANCE), f"{setting.name}, {name}: {off:g}")
        if exact:
            same = distance(own_statistics, statistics) == 0
            require(same, f"{setting.name}, {name}: statistics differ")
    steps: dict[str, Callable[[], None]] = {
        name: functools.partial(_step, brain, batch) for name, brain in brains.items()
    }
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}
    for name, budget in budgets.items():
        if name in brains:
            require(fixed + peaks[name] <= budget, f"{setting.name}, {name}: too much")
    taken = interleaved_seconds(steps, device, repeats=repeats)
    for name in brains:
        yield {
            "recipe": setting.name,
            "way": name,
            "baseline": STORED,
            "peak MiB": peaks[name] / MIB,
            "of the baseline's peak": peaks[name] / peaks[STORED],
            **times(taken[name], taken[STORED]),
        }


def _brain(
    setting: Setting, batch: Any, device: torch.device, budget: int | None = None
) -> sb.Brain:
    """Build a Brain and let it take a step, for which it plans; note how it began."""
    bases = [] if budget is None else [MemoryBudget]
    brain = brain_of(setting.recipe, *bases, device=str(device), memory_budget=budget)
    state = brain.modules.state_dict()
    brain.began_with = {name: value.clone() for name, value in state.items()}
    brain.fit([1], loader_of(batch), progressbar=False)
    brain.modules.train()
    return brain


def _step(brain: sb.Brain, batch: Any) -> None:
    torch.manual_seed(0)
    outputs = brain.compute_forward(batch, sb.Stage.TRAIN)
    brain.compute_objectives(outputs, batch, sb.Stage.TRAIN).backward()


def _stepped(brain: sb.Brain, batch: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Give the gradients of a first step, and the statistics after it."""
    brain.modules.load_state_dict(brain.began_with)
    for parameter in brain.modules.parameters():
        parameter.grad = torch.zeros_like(parameter)
    _step(brain, batch)
    # One of them always, so that there is something to compare.
    statistics = [torch.ones(()), *(x.float() for x in brain.modules.buffers())]
    return (
        [p.grad.clone() for p in brain.modules.parameters()],
        [x.clone() for x in statistics],
    )


def _checkpointed(block: nn.Module) -> None:
    """Checkpoint a block as torch's documentation does it."""
    forward = block.forward
    block.forward = functools.partial(  # type: ignore[method-assign]
        checkpoint, forward, use_reentrant=False
    )
