"""Ways of keeping a training step within a budget, and the check that they are right.

A reversible encoder stores, reconstructs or is planned; its vanilla counterpart, built
of torch's own layers, is stored, put into torch's checkpoint, or compiled with a budget
for activations.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.planner import Infeasible, Plan
from speechbrain_rev.planner.plan import plan_within
from speechbrain_rev.planner.profiling import count
from speechbrain_rev.planner.step import Trial
from speechbrain_rev.planner.timing import (
    beyond_noise,
    measured_repeats,
    measured_seconds,
)
from speechbrain_rev.reversible import Mode

from .gradients import TOLERANCE
from .harness import NotEqual
from .plain import PlainEncoder
from .user_ways import Way, distance, encoder_by, step_bytes, train_step

CPU = torch.device("cpu")
STORE = Way("store", streams="exact", chunk=None)
RECONSTRUCT = Way("reconstruct", "reconstruct", "exact")
#: Of the vanilla counterpart; what it computes does not depend on these.
VANILLA = Way("counterpart stored", chunk=None)
#: A plan is made for each, and the one that is predicted to be faster is taken.
CHUNKS = (None, "auto")

#: Where only gradients are compared; with chunks of so many bytes blocks of the first
#: stage work in pieces.
CHUNK = 130_000
SMALL = {"widths": (8, 8, 16, 16), "blocks": (1, 2, 1, 1)}

Seconds = Mapping[tuple[str, str], float]


def vanilla(name: str, *, checkpointed: int = 0, **row: Any) -> PlainEncoder:
    """Build the counterpart of a reversible encoder, its gradients there already."""
    counterpart = architecture(name).counterpart
    assert counterpart is not None
    encoder = encoder_by(VANILLA, counterpart, **row)
    return PlainEncoder(encoder, checkpointed=checkpointed)


@dataclass(frozen=True)
class Planned:
    """A plan, and the chunks that it is for."""

    plan: Plan
    chunk: str | int | None

    @property
    def words(self) -> str:
        """How many blocks have each mode, and whether they work in chunks."""
        modes = list(self.plan.modes.values())
        counts = ", ".join(f"{modes.count(m)} {m.value}" for m in Mode if m in modes)
        return f"{counts}; {'whole' if self.chunk is None else 'in chunks'}"

    def encoder(self, name: str, **row: Any) -> nn.Module:
        """Build the encoder with its plan."""
        way = dataclasses.replace(STORE, name="planned", chunk=self.chunk)
        encoder = encoder_by(way, name, **row)
        self.plan.apply(encoder)
        return encoder


def seconds_by_chunk(
    name: str, batch: int, frames: int, *, repeats: int, **row: Any
) -> dict[str | None, Seconds]:
    """Take the times of all blocks in all modes here, the sizes of chunks in turn."""
    steps = {}
    for chunk in CHUNKS:
        encoder = encoder_by(dataclasses.replace(STORE, chunk=chunk), name, **row)
        feats = torch.randn(batch, frames, encoder.n_mels)
        steps[chunk] = encoder, functools.partial(train_step, encoder, feats, STORE)
    taken: dict[str | None, dict[tuple[str, str], list[float]]] = {
        chunk: {} for chunk in CHUNKS
    }
    for _ in range(repeats):
        for chunk, (encoder, step) in steps.items():
            found = measured_repeats(encoder, step, CPU, repeats=1)
            for key, times in found.items():
                taken[chunk].setdefault(key, []).extend(times)
    return {chunk: beyond_noise(found) for chunk, found in taken.items()}


def planned_within(
    name: str,
    batch: int,
    frames: int,
    budget_bytes: int,
    seconds: Mapping[Any, Seconds],
    **row: Any,
) -> Planned:
    """Plan for a budget, with each size of chunks; of these take the faster plan.

    Raises
    ------
    Infeasible
        If no plan fits.
    """
    found, last = [], None
    for chunk, by_mode in seconds.items():
        with torch.device("meta"):
            encoder = encoder_by(dataclasses.replace(STORE, chunk=chunk), name, **row)
            feats = torch.randn(batch, frames, encoder.n_mels)
        step = functools.partial(train_step, encoder, feats, STORE)
        trial = Trial(encoder, encoder, step)
        profile = count(trial, {"batch": str(batch)}).with_seconds(by_mode)
        try:
            plan = plan_within(profile, trial, budget_bytes)
        except Infeasible as error:
            last = error
        else:
            found.append(Planned(plan, chunk))
    if not found:
        assert last is not None
        raise last
    return min(found, key=lambda planned: planned.plan.seconds)


def compiled(encoder: nn.Module, memory_budget: float, backend: str) -> nn.Module:
    """Compile an encoder whole, with a budget as a share of what it would store."""

    def within_budget(graph: Any, inputs: Any) -> Any:
        with functorch.patch(activation_memory_budget=memory_budget):
            return lookup_backend(backend)(graph, inputs)

    return torch.compile(encoder, backend=within_budget, fullgraph=True)


def features(batch: int, frames: int, n_mels: int) -> Tensor:
    """Make a batch whose size the compiler takes for a variable."""
    torch.manual_seed(1)
    feats = torch.randn(batch, frames, n_mels)
    torch._dynamo.mark_dynamic(feats, 0)
    return feats


def recorded_peak(step: Callable[[], Any]) -> int:
    """Run a step and read its peak off the record of the CPU's allocator.

    It is the yardstick of all ways: what torch's compiler runs is not seen as operations
    of torch, so that live tensors could not be counted there, and it has workspaces of
    operations, too.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(
            activities=activities, profile_memory=True
        ) as profile:
            step()
    events = [
        e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def gradients(encoder: nn.Module, feats: Tensor) -> Tensor:
    """Take a step and give its gradients, in the order of the parameters' names."""
    parameters = dict(encoder.named_parameters())
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    train_step(encoder, feats, VANILLA)
    return torch.cat([parameters[n].grad.flatten() for n in sorted(parameters)])


def updates(encoder: nn.Module, feats: Tensor) -> int:
    """Count how often a step updates the running statistics of a layer."""

    before = _updates(encoder)
    train_step(encoder, feats, VANILLA)
    return _updates(encoder) - before


def _updates(encoder: nn.Module) -> int:
    tracked = "num_batches_tracked"
    return max(int(b) for n, b in encoder.named_buffers() if n.endswith(tracked))


def check_plans(name: str) -> None:
    """Hold that a planned step leaves the bits of the stored one, at equal chunks.

    Raises
    ------
    NotEqual
        If a gradient or a running statistic differs, statistics are not updated once, or
        the plan is of one mode only, which says nothing.
    """
    way = dataclasses.replace(STORE, chunk=CHUNK)
    sizes = {"batch": 2, "frames": 40}
    lowest, highest = (
        step_bytes(dataclasses.replace(way, mode=mode), name, **sizes, **SMALL)
        for mode in ("reconstruct", "store")
    )
    encoder = encoder_by(way, name, **SMALL)
    feats = torch.randn(sizes["batch"], sizes["frames"], encoder.n_mels)
    step = functools.partial(train_step, encoder, feats, way)
    seconds = {CHUNK: measured_seconds(encoder, step, CPU, repeats=1)}
    budget_bytes = (lowest + highest) // 2
    planned = planned_within(
        name, **sizes, budget_bytes=budget_bytes, seconds=seconds, **SMALL
    )
    if len(set(planned.plan.modes.values())) < 2:
        raise NotEqual(f"The plan of {name} is of one mode: {planned.words}.")
    left = []
    for each in (encoder_by(way, name, **SMALL), planned.encoder(name, **SMALL)):
        grads = gradients(each, feats)
        left.append((grads, torch.cat([b.flatten() for b in each.buffers()])))
        if _updates(each) != 1:
            raise NotEqual(f"A step of {name} updates statistics not once.")
    if not all(torch.equal(a, b) for a, b in zip(*left, strict=True)):
        raise NotEqual(
            f"Gradients or statistics of {name} as planned are not the bits of STORE's."
        )


def check_vanilla(name: str) -> tuple[float, dict[str, int]]:
    """Hold that the counterpart of torch's layers computes what the package's does.

    Returns
    -------
    tuple
        The largest distance of gradients in float64; how often a step updates running
        statistics, stored and in torch's checkpoint.

    Raises
    ------
    NotEqual
        If they differ by more than rounding.
    """
    counterpart = architecture(name).counterpart
    assert counterpart is not None
    # What PlainEncoder takes its weights from, which orders them as it does.
    own = encoder_by(VANILLA, counterpart, **SMALL).double()
    feats = torch.randn(4, 40, own.n_mels, dtype=torch.float64)
    want = _by_weight(own, own, feats)
    worst, updated = 0.0, {}
    depth = len(vanilla(name, **SMALL).blocks)
    for checkpointed in (0, depth // 2, depth):
        plain = PlainEncoder(own, checkpointed=checkpointed).double()
        off = distance(_by_weight(plain, own, feats), want)
        if not off <= TOLERANCE:
            raise NotEqual(
                f"Gradients of {counterpart} of torch's layers are {off:.1e} from those "
                f"of the package's; allowed is {TOLERANCE:.0e}."
            )
        worst = max(worst, off)
        updated["checkpoint" if checkpointed else "stored"] = updates(plain, feats)
    return worst, updated


def _by_weight(run: nn.Module, owner: nn.Module, feats: Tensor) -> Tensor:
    """Take a step of one module and read gradients in the order of another."""
    for p in owner.parameters():
        p.grad = torch.zeros_like(p)
    train_step(run, feats, VANILLA)
    return torch.cat([p.grad.flatten() for p in owner.parameters()])


def check_compiled(encoder: nn.Module, plain: PlainEncoder, feats: Tensor) -> float:
    """Hold that compiled gradients are as exact as those that are not compiled.

    Returns
    -------
    float
        Their distance from float64 as a multiple of the other's.

    Raises
    ------
    NotEqual
        If they are more than twice as far.
    """
    wide = copy.deepcopy(plain).double()
    exact = gradients(wide, feats.double())
    usual = distance(gradients(plain, feats).double(), exact)
    off = distance(gradients(encoder, feats).double(), exact)
    if not off <= 2 * usual + torch.finfo(torch.float32).eps:
        raise NotEqual(
            f"Compiled gradients are {off:.1e} from float64, others {usual:.1e}."
        )
    return off / usual
