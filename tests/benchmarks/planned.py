"""Step time over batch size within one budget: Figure 5 of Jiang et al. for two encoders.

A reversible encoder stores all, reconstructs all, is planned, or stores parts of the
batch one after the other; its vanilla counterpart is stored, in torch's checkpoint, as a
whole or as far as its peak is above the plan's, or compiled with a budget for
activations. What is above the budget has no time. The peak of each way is read off the
same record: that of the allocator, in one step.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speechbrain_rev.architectures import architecture
from speechbrain_rev.plots import time_by_batch
from speechbrain_rev.sizes import MB

from .harness import Result, interleaved_seconds
from .planned_ways import (
    RECONSTRUCT,
    STORE,
    VANILLA,
    check_compiled,
    check_plans,
    check_vanilla,
    compiled,
    features,
    planned_within,
    recorded_peak,
    seconds_by_chunk,
    updates,
    vanilla,
)
from .user_ways import encoder_by, train_step

#: How much slower than the faster extreme a plan may be.
ALLOWED = 1.03
PLANNED, ACCUMULATION = "planned", "accumulation"
COMPILED = "counterpart compiled"
#: In torch's checkpoint: all blocks, or as few as keep it within the plan's peak.
CHECKPOINT = "counterpart torch checkpoint"
PART_CHECKPOINT = "counterpart part checkpoint"
#: All blocks alike; a plan is compared with the faster one of those that fit.
EXTREMES = (STORE.name, RECONSTRUCT.name)
#: What distinguishes a backend from what a user has by default.
_CODE = {"aot_eager": " (torch's kernels; those that inductor generates may be faster)"}


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


@dataclass(frozen=True)
class Case:
    """A way at one batch: its step, and the peak of one."""

    way: str
    network: str
    step: Callable[[], Any]
    peak_bytes: int
    note: str
    statistics_of: int
    updated: int = 1


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
        stored = encoder_by(STORE, name, **setting.row)
        self.budget_bytes = recorded_peak(self._step(stored, setting.stored_batch))
        self.seconds = seconds_by_chunk(
            name, setting.batches[0], setting.frames, repeats=3, **setting.row
        )
        self.updated = check_vanilla(name)[1]
        plain = vanilla(name, **setting.row)
        self.depth = len(plain.blocks)
        self.compiled: dict[float, nn.Module] = {}
        self.compiled_distance = 0.0
        for share in setting.memory_budgets:
            module = compiled(plain, share, setting.backend)
            feats = self._features(setting.batches[0])
            off = check_compiled(module, plain, feats)
            self.compiled_distance = max(self.compiled_distance, off)
            self.compiled[share] = module
            print(f"{self.counterpart} compiled for {share:g}", flush=True)

    def rows(self, batch: int) -> list[dict[str, Any]]:
        """Measure all ways at a batch; the baseline is to reconstruct all."""
        cases = self.cases(batch)
        steps = {
            case.way: case.step
            for case in cases
            if case.peak_bytes <= self.budget_bytes
        }
        seconds = interleaved_seconds(
            steps, torch.device("cpu"), repeats=self.setting.repeats
        )
        medians = {way: spread["median"] for way, spread in seconds.items()}
        fitting = [medians[way] for way in EXTREMES if way in medians]
        return [self._row(case, batch, seconds, min(fitting)) for case in cases]

    def cases(self, batch: int) -> list[Case]:
        """Find the peaks of all ways."""
        planned = self._planned(batch)
        return [
            self._extreme(STORE, batch),
            self._extreme(RECONSTRUCT, batch),
            planned,
            *self._accumulated(batch),
            self._vanilla("counterpart stored", batch, 0),
            self._part_checkpointed(batch, planned.peak_bytes),
            self._vanilla(CHECKPOINT, batch, self.depth),
            self._compiled_case(batch),
        ]

    def _extreme(self, way: Any, batch: int) -> Case:
        step = self._step(encoder_by(way, self.name, **self.setting.row), batch)
        note = "whole" if way.chunk is None else "in chunks"
        return Case(way.name, self.name, step, recorded_peak(step), note, batch)

    def _planned(self, batch: int) -> Case:
        """Plan by counts, for less until the record of a step is within the budget."""
        sizes = batch, self.setting.frames
        aim_bytes = self.budget_bytes
        while True:
            found = planned_within(
                self.name, *sizes, aim_bytes, self.seconds, **self.setting.row
            )
            step = self._step(found.encoder(self.name, **self.setting.row), batch)
            peak = recorded_peak(step)
            if peak <= self.budget_bytes:
                return Case(PLANNED, self.name, step, peak, found.words, batch)
            aim_bytes -= peak - self.budget_bytes

    def _accumulated(self, batch: int) -> list[Case]:
        """Store the batch in as few parts as fit; nothing where it fits as a whole."""
        encoder = encoder_by(STORE, self.name, **self.setting.row)
        for parts in range(1, batch + 1):
            size = math.ceil(batch / parts)
            parts = math.ceil(batch / size)
            step = self._step(encoder, batch, parts)
            peak = recorded_peak(step)
            if peak <= self.budget_bytes:
                note = f"{parts} parts of at most {size}, stored"
                case = Case(ACCUMULATION, self.name, step, peak, note, size, parts)
                return [case] if parts > 1 else []
        return []

    def _vanilla(self, way: str, batch: int, checkpointed: int) -> Case:
        """Put so many blocks of the counterpart into torch's checkpoint."""
        network = vanilla(self.name, checkpointed=checkpointed, **self.setting.row)
        step = self._step(network, batch)
        note = f"the first {checkpointed} of {self.depth}: stem, blocks, transitions"
        return Case(
            way,
            self.counterpart,
            step,
            recorded_peak(step),
            note if checkpointed else "",
            batch,
            self.updated["checkpoint" if checkpointed else "stored"],
        )

    def _part_checkpointed(self, batch: int, within_bytes: int) -> Case:
        """Put as few blocks into it as keep the peak within the plan's, if any do."""
        cases = (
            self._vanilla(PART_CHECKPOINT, batch, checkpointed)
            for checkpointed in range(self.depth + 1)
        )
        for case in cases:
            if case.peak_bytes <= within_bytes:
                break
        return case

    def _compiled_case(self, batch: int) -> Case:
        """Take the largest share whose peak is within the budget, or the lowest peak."""
        steps = {
            share: self._step(module, batch) for share, module in self.compiled.items()
        }
        peaks = {share: recorded_peak(step) for share, step in steps.items()}
        fitting = [s for s, peak in peaks.items() if peak <= self.budget_bytes]
        share = max(fitting) if fitting else min(peaks, key=lambda s: peaks[s])
        return Case(
            COMPILED,
            self.counterpart,
            steps[share],
            peaks[share],
            f"{self.setting.backend}, activation_memory_budget={share:g}",
            batch,
            updates(self.compiled[share], self._features(batch)),
        )

    def _row(
        self,
        case: Case,
        batch: int,
        seconds: Mapping[str, Mapping[str, float]],
        best_extreme: float,
    ) -> dict[str, Any]:
        spread = seconds.get(case.way)
        median = spread["median"] if spread else None
        baseline = seconds[RECONSTRUCT.name]["median"]
        planned = case.way == PLANNED and median
        return {
            "encoder": self.name,
            "batch": batch,
            "way": case.way,
            "network": case.network,
            "how": case.note,
            "budget MB": self.budget_bytes / MB,
            "peak MB": case.peak_bytes / MB,
            "s per step": median or "does not fit",
            "20 % to 80 %": "{p20:.3g} to {p80:.3g}".format(**spread) if spread else "",
            "baseline": f"{self.name} {RECONSTRUCT.name}, batch {batch}",
            "times the baseline": median / baseline if median else "",
            "planned / best extreme": median / best_extreme if planned else "",
            "statistics of": case.statistics_of,
            "statistics updated": case.updated,
        }

    def _features(self, batch: int) -> torch.Tensor:
        return features(batch, self.setting.frames, 80)

    def _step(
        self, network: nn.Module, batch: int, parts: int = 1
    ) -> Callable[[], Any]:
        way = replace(VANILLA, parts=parts)
        return functools.partial(train_step, network, self._features(batch), way)


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Check, plan, count and time all ways at all batches."""
    if device.type != "cpu":
        raise ValueError(f"planned is measured on the CPU; {device} was asked for.")
    setting = setting or Setting()
    worst_vanilla = max(check_vanilla(name)[0] for name in setting.names)
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
    return Result(
        "planned",
        "Within one budget, how long is a step at each batch?",
        f"float32, exact streams, {setting.frames} frames, forward and backward pass; "
        f"budget: what batch {setting.stored_batch} takes all stored; peaks of all ways: "
        "the allocator's record of a step, beyond weights, gradients and input; median of "
        f"{setting.repeats} interleaved steps; planned: times of blocks measured here at "
        f"batch {setting.batches[0]}, in chunks and whole; counterpart: of torch's own "
        f"layers; part checkpoint: as few blocks in torch's checkpoint, from the first on, as "
        f"keep its peak within the plan's; compiled: {setting.backend}{_CODE.get(setting.backend, '')}, one graph of "
        "any batch, activation_memory_budget the largest of "
        f"{', '.join(f'{s:g}' for s in setting.memory_budgets)} that fits; statistics of: "
        "utterances whose batch statistics normalise, which accumulation changes; "
        "statistics updated: times in a step, measured",
        rows,
        "reduced widths: gradients and statistics of plans have the bits of stored ones at "
        "equal chunks; gradients of the counterpart of torch's layers are within "
        f"{worst_vanilla:.1e} of the package's in float64. Full widths: compiled gradients are at most "
        f"{worst_compiled:.1f} times as far from float64 as others. {verdict(rows)}",
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """Say whether plans were ever slower than an extreme that fits the same budget."""
    ratios = {
        f"{row['encoder']} at batch {row['batch']}": row["planned / best extreme"]
        for row in rows
        if row["way"] == PLANNED
    }
    slow = {where: ratio for where, ratio in ratios.items() if ratio > ALLOWED}
    slowest = (
        f"Planned takes at most {max(ratios.values()):.2f} times the faster extreme"
    )
    if not slow:
        return f"{slowest}, within {ALLOWED:.2f}"
    places = ", ".join(f"{where} {ratio:.2f}" for where, ratio in slow.items())
    return f"{slowest}, which is NOT within {ALLOWED:.2f}: {places}"


def draw(result: Result, path: Path) -> None:
    """Draw seconds of a step for each utterance over the batch, a curve for each way."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for row in result.rows:
        if row["s per step"] == "does not fit":
            continue
        title = f"{row['encoder']}, {row['budget MB']:.0f} MB"
        curve = panels.setdefault(title, {}).setdefault(row["way"], {})
        curve[row["batch"]] = row["s per step"] / row["batch"]
    environment = result.environment
    source = (
        "float32, median of interleaved steps; a curve ends where its peak is above the "
        "budget. Counterparts: resnet34 and df_resnet56 of torch's own layers. "
        f"{environment['processor']}, {environment['threads']} thread(s), torch "
        f"{environment['torch']}, {environment['date']}."
    )
    time_by_batch(
        panels,
        path,
        title="Time of a training step for each utterance, within one budget",
        source=source,
    )
