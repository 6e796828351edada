"""SpeechBrain's recipes within a memory budget: each plan beside what torch has for it.

Brains are those of the tests, and ECAPA-TDNN as wide as in its recipe. torch checkpoints
every block, or compiles the modules with an ``activation_memory_budget``. A way's peak is
that of forward and backward pass, beside weights, gradients and optimizer states.
"""

from __future__ import annotations

import functools
import warnings
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

from .harness import (
    Result,
    allocated_bytes,
    distance,
    interleaved_seconds,
    peak_bytes,
    require,
    times,
)
from .planned import within_budget

STORED, CHECKPOINT = "stored", "torch checkpoint"
COMPILED = "activation_memory_budget"
#: Parts of the stored peak that plans are given, beside the least that suffices.
SHARES = (0.75, 0.5)
#: Plain rounding, of convolutions whose sums run in another order.
TOLERANCE = 1e-5
#: Of torch's compiler: parts of what a graph would keep, of which the largest is taken
#: whose step needs no more than the plan that needs least.
ACTIVATIONS = (0.7, 0.5, 0.3, 0.1)
#: Runs torch's own kernels, as all other ways do.
BACKEND = "aot_eager"


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's compiler, and of masks
            # Layers of all Brains are compiled from one code; beyond a limit they are not.
            with torch._dynamo.config.patch(
                recompile_limit=1000, accumulated_recompile_limit=10_000
            ):
                rows += _rows(setting, device, repeats)
        print(setting.name, flush=True)
    return Result(
        "budgets",
        "What does a memory budget take and cost in SpeechBrain's recipes?",
        "forward and backward pass in float32; 'least' is the smallest budget that has a "
        "plan; torch checkpoint: torch.utils.checkpoint of every block; "
        f"{COMPILED}: torch.compile ({BACKEND}) of the modules, the largest of "
        f"{', '.join(f'{share:g}' for share in ACTIVATIONS)} that allocates no more than "
        "the plan that allocates least, or else the one that allocates least; live: tensors "
        "beside weights, gradients and optimizer states, which cannot be counted in compiled "
        f"code; allocated: by the allocator; medians of {repeats} interleaved steps",
        rows,
        "gradients of plans equal to the bit, of torch checkpoint within "
        f"{TOLERANCE:g}, of compiled code, without dropout, at most twice as far from float64 as stored ones; "
        "live peaks within their budgets",
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
            budgets[name] = error.enough_bytes
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
    live = {
        name: peak_bytes(functools.partial(_step, brain, batch), device)
        for name, brain in brains.items()
    }
    for name in budgets.keys() & live.keys():
        budget = budgets[name]
        require(fixed + live[name] <= budget, f"{setting.name}, {name}: too much")
    allocated = {name: _allocated(brain, batch) for name, brain in brains.items()}
    share, brain = _compiled(setting, batch, device, min(allocated.values()))
    _check_compiled(setting, batch, device, share)
    name = f"{COMPILED}, {share:g}"
    brains[name], allocated[name] = brain, _allocated(brain, batch)
    steps: dict[str, Callable[[], None]] = {
        name: functools.partial(_step, brain, batch) for name, brain in brains.items()
    }
    taken = interleaved_seconds(steps, device, repeats=repeats)
    for name in brains:
        yield {
            "recipe": setting.name,
            "way": name,
            "baseline": STORED,
            "live MiB": live[name] / MIB if name in live else "",
            "of the baseline's live": live[name] / live[STORED] if name in live else "",
            "allocated MiB": allocated[name] / MIB,
            "of the baseline's allocated": allocated[name] / allocated[STORED],
            **times(taken[name], taken[STORED]),
        }
    torch._dynamo.reset()


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


def _compiled(
    setting: Setting, batch: Any, device: torch.device, within_bytes: int
) -> tuple[float, sb.Brain]:
    """Compile for the largest part that is within the bytes, or else for the best one."""
    made: list[tuple[int, float, sb.Brain]] = []
    for share in ACTIVATIONS:
        brain = _brain(setting, batch, device)
        _compile(brain, share)
        _step(brain, batch)
        made.append((_allocated(brain, batch), share, brain))
        if made[-1][0] <= within_bytes:
            break
    _, share, brain = min(made, key=lambda each: each[0])
    return share, brain


def _compile(brain: sb.Brain, share: float) -> None:
    for module in brain.modules.values():
        module.compile(backend=within_budget(share, BACKEND))


def _check_compiled(
    setting: Setting, batch: Any, device: torch.device, share: float
) -> None:
    """Hold that compiled gradients are at most twice as far from float64 as stored ones.

    Without dropout, of which compiled code draws others.

    Raises
    ------
    NotEqual
        If they are farther.
    """
    stored, wide, compiled = (_brain(setting, batch, device) for _ in range(3))
    for brain in (stored, wide, compiled):
        for module in brain.modules.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
            if hasattr(module, "config"):  # of transformers
                module.config.layerdrop = 0.0
    for module in wide.modules.values():  # features stay as they are
        if any(p.requires_grad for p in module.parameters()):
            for each in module.double().modules():
                each.register_forward_pre_hook(
                    lambda _, given: tuple(map(_widened, given))
                )
    wide.began_with = {n: _widened(x) for n, x in wide.began_with.items()}
    _compile(compiled, share)
    exact = _stepped(wide, batch)[0]
    usual = distance(_stepped(stored, batch)[0], exact)
    off = distance(_stepped(compiled, batch)[0], exact)
    require(
        off <= 2 * usual + torch.finfo(torch.float32).eps,
        f"{setting.name}, compiled: {off:.1e} from float64, stored {usual:.1e}",
    )


def _widened(x: Any) -> Any:
    is_float = isinstance(x, Tensor) and x.is_floating_point()
    return x.double() if is_float else x


def _allocated(brain: sb.Brain, batch: Any) -> int:
    step = functools.partial(_step, brain, batch)
    return allocated_bytes(step, torch.device(brain.device))


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
