"""Step time over batch size within one budget: Figure 5 of Jiang et al. for two encoders.

A reversible encoder stores all, reconstructs all, is planned, or stores parts of the
batch one after the other; its vanilla counterpart, built of torch's own layers, is stored,
in torch's checkpoint, as a whole or as far as its peak is above the plan's, or compiled with
a budget for activations. What is above the budget has no time. The peak of each way is read
off the same record: that of the allocator, in one step.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
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
from speechbrain_rev.sizes import MB

from .harness import (
    CPU,
    Result,
    distance,
    interleaved_seconds,
    recorded_peak,
    require,
    times,
)
from .launches import check_plain_layers
from .pictures import time_by_batch
from .plain import PlainEncoder
from .steps import TOLERANCE, Way, encoder_by, train_step, way_bytes

#: How much slower than the faster extreme a plan may be.
ALLOWED = 1.03
STORE = Way("store", streams="exact", chunk=None)
RECONSTRUCT = Way("reconstruct", "reconstruct", "exact")
#: The baseline, which is timed whether it fits or not: no layer of this package.
TORCH = Way("plain torch layers", chunk=None, plain=True)
#: Of the vanilla counterpart; what it computes does not depend on these.
VANILLA = Way("counterpart stored", chunk=None)
PLANNED, ACCUMULATION = "planned", "accumulation"
COMPILED = "counterpart compiled"
#: In torch's checkpoint: all blocks, or as few as keep it within the plan's peak.
CHECKPOINT = "counterpart torch checkpoint"
PART_CHECKPOINT = "counterpart part checkpoint"
#: All blocks alike; a plan is compared with the faster one of those that fit.
EXTREMES = (STORE.name, RECONSTRUCT.name)
#: A plan is made for each, and the one that is predicted to be faster is taken.
CHUNKS = (None, "auto")
#: Where only gradients are compared; with chunks of so many bytes blocks of the first
#: stage work in pieces.
SMALL, CHUNK = {"widths": (8, 8, 16, 16), "blocks": (1, 2, 1, 1)}, 130_000

Seconds = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes
    ----------
    names : tuple of str
        Reversible encoders.
    batches : tuple of int
        From 2 on: of one utterance torch's compiler makes a network of its own.
    stored_batch : int
        The budget is what this batch takes, all stored: more is to be planned.
    memory_budgets : tuple of float
        Shares of activations for torch's compiler, falling. Its real peak does not
        always fall with them, so that all are tried.
    backend : str
        Of torch's compiler. "aot_eager" partitions the graph within the budget and runs
        torch's own kernels, as all other ways do. The backward pass that "inductor"
        generates of small encoders crashes on a CPU (torch 2.11), and takes minutes to
        compile of whole ones.
    row : mapping
        Widths and blocks of other encoders.
    """

    names: tuple[str, ...] = ("revnet57", "df_revnet89")
    batches: tuple[int, ...] = (2, 4, 8)
    stored_batch: int = 3
    frames: int = 200
    repeats: int = 4
    memory_budgets: tuple[float, ...] = (1.0, 0.7, 0.5, 0.3)
    backend: str = "aot_eager"
    row: Mapping[str, Any] = field(default_factory=dict)


def vanilla(name: str, *, checkpointed: int = 0, **row: Any) -> PlainEncoder:
    """Build the counterpart of a reversible encoder, its gradients there already."""
    encoder = encoder_by(VANILLA, str(architecture(name).counterpart), **row)
    return PlainEncoder(encoder, checkpointed=checkpointed)


def features(batch: int, frames: int) -> Tensor:
    """Make a batch whose size the compiler takes for a variable."""
    torch.manual_seed(1)
    feats = torch.randn(batch, frames, 80)
    torch._dynamo.mark_dynamic(feats, 0)
    return feats


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
        encoder = encoder_by(replace(STORE, chunk=self.chunk), name, **row)
        self.plan.apply(encoder)
        return encoder


def seconds_by_chunk(
    name: str, batch: int, frames: int, *, repeats: int, **row: Any
) -> dict[str | None, Seconds]:
    """Take the times of all blocks in all modes here, the sizes of chunks in turn."""
    encoders = {c: encoder_by(replace(STORE, chunk=c), name, **row) for c in CHUNKS}
    taken: dict[str | None, dict[Any, list[float]]] = {chunk: {} for chunk in CHUNKS}
    feats = torch.randn(batch, frames, 80)
    for _ in range(repeats):
        for chunk, encoder in encoders.items():
            step = functools.partial(train_step, encoder, feats, STORE)
            measured = measured_repeats(encoder, step, CPU, repeats=1)
            for key, seconds in measured.items():
                taken[chunk].setdefault(key, []).extend(seconds)
    return {chunk: beyond_noise(seconds) for chunk, seconds in taken.items()}


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
    plans, refused = [], None
    for chunk, by_mode in seconds.items():
        with torch.device("meta"):
            encoder = encoder_by(replace(STORE, chunk=chunk), name, **row)
            feats = torch.randn(batch, frames, encoder.n_mels)
        step = functools.partial(train_step, encoder, feats, STORE)
        trial = Trial(encoder, encoder, step)
        profile = count(trial, {"batch": str(batch)}).with_seconds(by_mode)
        try:
            plans.append(Planned(plan_within(profile, trial, budget_bytes), chunk))
        except Infeasible as error:
            refused = error
    if not plans:
        assert refused is not None
        raise refused
    return min(plans, key=lambda planned: planned.plan.seconds)


def compiled(network: nn.Module, memory_budget: float, backend: str) -> nn.Module:
    """Compile an encoder whole, with a budget as a share of what it would store."""
    backends = within_budget(memory_budget, backend)
    return torch.compile(network, backend=backends, fullgraph=True)


@functools.cache
def within_budget(memory_budget: float, backend: str) -> Callable[..., Any]:
    """Make a backend of torch's compiler that has this ``activation_memory_budget``."""

    def backend_within(graph: Any, inputs: Any) -> Any:
        with functorch.patch(activation_memory_budget=memory_budget):
            return lookup_backend(backend)(graph, inputs)

    return backend_within


def gradients(
    network: nn.Module, feats: Tensor, owner: nn.Module | None = None
) -> Tensor:
    """Take a step; give gradients in the order of the network's own or other weights."""
    parameters = list((owner or network).parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    train_step(network, feats, VANILLA)
    return torch.cat([p.grad.flatten() for p in parameters])


def check_plans(name: str) -> None:
    """Hold that a planned step leaves the bits of the stored one, at equal chunks.

    Raises
    ------
    NotEqual
        If a gradient or a running statistic differs, or the plan is of one mode only,
        which says nothing.
    """
    way = replace(STORE, chunk=CHUNK)
    lowest, highest = (
        way_bytes(replace(way, mode=mode), name, batch=2, frames=40, **SMALL)
        for mode in ("reconstruct", "store")
    )
    encoder = encoder_by(way, name, **SMALL)
    feats = torch.randn(2, 40, encoder.n_mels)
    step = functools.partial(train_step, encoder, feats, way)
    seconds = {CHUNK: measured_seconds(encoder, step, CPU, repeats=1)}
    budget_bytes = (lowest + highest) // 2
    planned = planned_within(name, 2, 40, budget_bytes, seconds, **SMALL)
    require(
        len(set(planned.plan.modes.values())) > 1,
        f"The plan of {name} is of one mode: {planned.words}.",
    )
    encoders = encoder_by(way, name, **SMALL), planned.encoder(name, **SMALL)
    left = [[gradients(each, feats), *each.buffers()] for each in encoders]
    require(
        all(map(torch.equal, *left)),
        f"Gradients or statistics of {name} as planned are not the bits of STORE's.",
    )


def check_vanilla(name: str) -> float:
    """Hold that the counterpart of torch's layers computes what the package's does.

    Returns
    -------
    float
        The largest distance of gradients in float64, stored and in torch's checkpoint.

    Raises
    ------
    NotEqual
        If they differ by more than rounding.
    """
    counterpart = str(architecture(name).counterpart)
    own = encoder_by(VANILLA, counterpart, **SMALL).double()
    feats = torch.randn(4, 40, own.n_mels, dtype=torch.float64)
    want = gradients(own, feats)
    depth = len(vanilla(name, **SMALL).blocks)
    networks = [PlainEncoder(own, checkpointed=n) for n in (0, depth // 2, depth)]
    worst = max(distance(gradients(p.double(), feats, own), want) for p in networks)
    require(
        worst <= TOLERANCE,
        f"Gradients of {counterpart} of torch's layers are {worst:.1e} from those of the "
        f"package's; allowed is {TOLERANCE:.0e}.",
    )
    return worst


def check_compiled(network: nn.Module, plain: PlainEncoder, feats: Tensor) -> float:
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
    exact = gradients(copy.deepcopy(plain).double(), feats.double())
    usual = distance(gradients(plain, feats), exact)
    off = distance(gradients(network, feats, plain), exact)
    require(
        off <= 2 * usual + torch.finfo(torch.float32).eps,
        f"Compiled gradients are {off:.1e} from float64, others {usual:.1e}.",
    )
    return off / usual


@dataclass(frozen=True)
class Case:
    """A way at one batch: its step, and the peak of one."""

    way: str
    network: str
    step: Callable[[], Any]
    peak_bytes: int
    note: str
    statistics_of: int


class Benchmark:
    """All ways of one encoder within one budget.

    Parameters
    ----------
    name : str
        A reversible encoder.
    setting : Setting
        What is measured.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting
        self.counterpart = str(architecture(name).counterpart)
        self.depth = len(vanilla(name, **setting.row).blocks)
        self.compiled_distance = 0.0

    @cached_property
    def budget_bytes(self) -> int:
        """What the stored batch takes."""
        stored = encoder_by(STORE, self.name, **self.setting.row)
        return recorded_peak(self._step(stored, self.setting.stored_batch))

    @cached_property
    def seconds(self) -> dict[str | None, Seconds]:
        """Times of blocks, by chunk."""
        sizes = self.setting.batches[0], self.setting.frames
        return seconds_by_chunk(self.name, *sizes, repeats=3, **self.setting.row)

    @cached_property
    def compiled(self) -> dict[float, nn.Module]:
        """The counterpart, compiled for each share and compared with the plain one."""
        plain = vanilla(self.name, **self.setting.row)
        feats = features(self.setting.batches[0], self.setting.frames)
        networks = {}
        for share in self.setting.memory_budgets:
            networks[share] = compiled(plain, share, self.setting.backend)
            off = check_compiled(networks[share], plain, feats)
            self.compiled_distance = max(self.compiled_distance, off)
            print(f"{self.counterpart} compiled for {share:g}", flush=True)
        return networks

    def rows(self, batch: int) -> list[dict[str, Any]]:
        """Measure all ways at a batch; the baseline is the encoder in torch's own layers."""
        planned = self.planned(batch)
        cases = [
            *(self._extreme(way, batch) for way in (TORCH, STORE, RECONSTRUCT)),
            planned,
            *self.accumulated(batch),
            self.checkpointed(VANILLA.name, batch, 0),
            self.part_checkpointed(batch, planned.peak_bytes),
            self.checkpointed(CHECKPOINT, batch, self.depth),
            self._compiled(batch),
        ]
        fits = {c.way: c.peak_bytes <= self.budget_bytes for c in cases}
        steps = {c.way: c.step for c in cases if fits[c.way] or c.way == TORCH.name}
        seconds = interleaved_seconds(steps, CPU, repeats=self.setting.repeats)
        best = min(seconds[way].median for way in EXTREMES if way in seconds)
        baseline = seconds[TORCH.name]
        return [
            {
                "encoder": self.name,
                "batch": batch,
                "way": case.way,
                "network": case.network,
                "how": case.note,
                "budget MB": self.budget_bytes / MB,
                "peak MB": case.peak_bytes / MB,
                "fits": "yes" if fits[case.way] else "no",
                "baseline": f"{self.name} {TORCH.name}, batch {batch}",
                **times(seconds.get(case.way), baseline, missing="does not fit"),
                "planned / best extreme": seconds[PLANNED].median / best
                if case.way == PLANNED
                else "",
                "statistics of": case.statistics_of,
            }
            for case in cases
        ]

    def _step(
        self, network: nn.Module, batch: int, parts: int = 1
    ) -> Callable[[], Any]:
        feats = features(batch, self.setting.frames)
        way = replace(VANILLA, parts=parts)
        return functools.partial(train_step, network, feats, way)

    def _extreme(self, way: Way, batch: int) -> Case:
        step = self._step(encoder_by(way, self.name, **self.setting.row), batch)
        note = "whole" if way.chunk is None else "in chunks"
        return Case(way.name, self.name, step, recorded_peak(step), note, batch)

    def planned(self, batch: int) -> Case:
        """Plan by counts, for less until the record of a step is within the budget."""
        sizes = batch, self.setting.frames
        aim_bytes = self.budget_bytes
        while True:
            planned = planned_within(
                self.name, *sizes, aim_bytes, self.seconds, **self.setting.row
            )
            step = self._step(planned.encoder(self.name, **self.setting.row), batch)
            peak = recorded_peak(step)
            if peak <= self.budget_bytes:
                return Case(PLANNED, self.name, step, peak, planned.words, batch)
            aim_bytes -= peak - self.budget_bytes

    def accumulated(self, batch: int) -> list[Case]:
        """Store the batch in as few parts as fit; nothing where it fits as a whole."""
        encoder = encoder_by(STORE, self.name, **self.setting.row)
        for parts in range(1, batch + 1):
            size = math.ceil(batch / parts)
            parts = math.ceil(batch / size)
            step = self._step(encoder, batch, parts)
            peak = recorded_peak(step)
            if peak <= self.budget_bytes:
                note = f"{parts} parts of at most {size}, stored"
                case = Case(ACCUMULATION, self.name, step, peak, note, size)
                return [case] if parts > 1 else []
        return []

    def checkpointed(self, way: str, batch: int, blocks: int) -> Case:
        """Put so many blocks of the counterpart into torch's checkpoint."""
        network = vanilla(self.name, checkpointed=blocks, **self.setting.row)
        step = self._step(network, batch)
        peak = recorded_peak(step)
        note = f"the first {blocks} of {self.depth}: stem, blocks, transitions"
        return Case(way, self.counterpart, step, peak, note if blocks else "", batch)

    def part_checkpointed(self, batch: int, within_bytes: int) -> Case:
        """Put as few blocks into it as keep the peak within the plan's, if any do."""
        for blocks in range(self.depth + 1):
            case = self.checkpointed(PART_CHECKPOINT, batch, blocks)
            if case.peak_bytes <= within_bytes:
                break
        return case

    def _compiled(self, batch: int) -> Case:
        """Take the largest share whose peak is within the budget, or the lowest peak."""
        steps = {share: self._step(net, batch) for share, net in self.compiled.items()}
        peaks = {share: recorded_peak(step) for share, step in steps.items()}
        fitting = [s for s, peak in peaks.items() if peak <= self.budget_bytes]
        share = max(fitting) if fitting else min(peaks, key=lambda s: peaks[s])
        note = f"{self.setting.backend}, activation_memory_budget={share:g}"
        return Case(COMPILED, self.counterpart, steps[share], peaks[share], note, batch)


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Check, plan, count and time all ways at all batches."""
    setting = setting or Setting()
    worst_vanilla = max(map(check_vanilla, setting.names))
    worst_plain = max(check_plain_layers(architecture(name)) for name in setting.names)
    for name in setting.names:
        check_plans(name)
    rows: list[dict[str, Any]] = []
    worst_compiled = 0.0
    for name in setting.names:
        with warnings.catch_warnings():
            # Of torch's compiler, about what it traces.
            warnings.simplefilter("ignore")
            benchmark = Benchmark(name, setting)
            for batch in setting.batches:
                rows += benchmark.rows(batch)
                print(f"{name} {batch}", flush=True)
        worst_compiled = max(worst_compiled, benchmark.compiled_distance)
        torch._dynamo.reset()
    code = " (torch's kernels; those that inductor generates may be faster)"
    return Result(
        "planned",
        "Within one budget, how long is a step at each batch?",
        f"float32, exact streams, {setting.frames} frames, forward and backward pass; "
        f"budget: what batch {setting.stored_batch} takes all stored; plain torch layers: "
        "timed whether they fit or not; peaks of all ways: "
        "the allocator's record of a step, beyond weights, gradients and input; median of "
        f"{setting.repeats} interleaved steps; planned: times of blocks measured here at "
        f"batch {setting.batches[0]}, in chunks and whole; counterpart: of torch's own "
        f"layers; part checkpoint: as few blocks in torch's checkpoint, from the first on, as "
        f"keep its peak within the plan's; compiled: {setting.backend}"
        f"{code if setting.backend == 'aot_eager' else ''}, one graph of "
        "any batch, activation_memory_budget the largest of "
        f"{', '.join(f'{s:g}' for s in setting.memory_budgets)} that fits; statistics of: "
        "utterances whose batch statistics normalise, which accumulation changes",
        rows,
        "reduced widths: gradients and statistics of plans have the bits of stored ones at "
        "equal chunks; gradients of torch's layers are within "
        f"{max(worst_plain, worst_vanilla):.1e} of the package's in float64. Full widths: compiled gradients are at most "
        f"{worst_compiled:.1f} times as far from float64 as others. {verdict(rows)}",
    )


def is_an_extreme(row: Mapping[str, Any]) -> bool:
    """Return whether a plan is an extreme itself, so that noise alone parts their times."""
    return bool(re.fullmatch(r"\d+ (store; whole|reconstruct; in chunks)", row["how"]))


def verdict(rows: list[dict[str, Any]]) -> str:
    """State whether plans were ever slower than an extreme that fits the same budget."""
    ratios = {
        f"{row['encoder']} at batch {row['batch']}": row["planned / best extreme"]
        for row in rows
        if row["way"] == PLANNED and not is_an_extreme(row)
    }
    if not ratios:
        return "Each plan is an extreme itself"
    slow = [f"{where} {r:.2f}" for where, r in ratios.items() if r > ALLOWED]
    return (
        "Plans that are no extreme themselves take at most "
        f"{max(ratios.values()):.2f} times the faster one, "
        f"{'which is NOT ' if slow else ''}within {ALLOWED:.2f}"
        f"{': ' if slow else ''}{', '.join(slow)}"
    )


def draw(result: Result, path: Path) -> None:
    """Draw seconds of a step for each utterance over the batch, a curve for each way."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for row in result.rows:
        if row["fits"] == "no":
            continue
        title = f"{row['encoder']}, {row['budget MB']:.0f} MB"
        curve = panels.setdefault(title, {}).setdefault(row["way"], {})
        curve[row["batch"]] = row["s per step"] / row["batch"]
    time_by_batch(
        panels,
        path,
        title="Time of a training step for each utterance, within one budget",
        source="float32, median of interleaved steps; a curve ends where its peak is above "
        "the budget. Counterparts: resnet34 and df_resnet56 of torch's own layers. "
        f"{result.where}",
    )
