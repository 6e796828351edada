"""Plans at shares of the stored peak: what they cost, with mode selective and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.modes import Mode
from speechbrain_rev.planner import Infeasible, Plan
from speechbrain_rev.planner.network import Network, without
from speechbrain_rev.planner.plan import plan_within
from speechbrain_rev.planner.profiling import count
from speechbrain_rev.planner.step import Trial
from speechbrain_rev.planner.timing import measured_seconds
from speechbrain_rev.sizes import MB

from .harness import Result, interleaved_seconds, peak_bytes, require, times
from .steps import Setting, Way, encoder_by, train_step

STORED = Way("store", streams="exact", chunk=None)
WITH, WITHOUT = "all modes", "without selective"


SETTING = Setting(
    {
        "df_resnet56": 4,
        "resnet152": 2,
        "df_resnet233": 2,
        "revnet197": 2,
        "df_revnet377": 2,
    }
)
SHARES = (0.85, 0.7, 0.6, 0.55, 0.5)


class _Planner:
    """Makes plans of an encoder for one batch, from times measured here."""

    def __init__(self, name: str, feats: Tensor, setting: Setting) -> None:
        self._name, self._row, self._feats = name, setting.row, feats
        encoder = self.encoder()
        step = functools.partial(train_step, encoder, feats, STORED)
        self._seconds = measured_seconds(encoder, step, feats.device, repeats=3)

    def encoder(self, plan: Plan | None = None) -> nn.Module:
        """Build the encoder, with a plan or all stored."""
        with self._feats.device:
            encoder: nn.Module = encoder_by(STORED, self._name, **self._row)
        if plan is not None:
            plan.apply(encoder)
        return encoder

    def plan(self, way: str, budget_bytes: int) -> Plan:
        """Make the fastest plan."""
        with torch.device("meta"):
            encoder = encoder_by(STORED, self._name, **self._row)
            feats = torch.empty(self._feats.shape)
        network: Network = encoder
        if way == WITHOUT:
            network = without(encoder, Mode.SELECTIVE, list(encoder.allowed_modes()))
        step = functools.partial(train_step, encoder, feats, STORED)
        trial = Trial(encoder, network, step)
        about = {"batch": str(len(feats))}
        profile = count(trial, about).with_seconds(self._seconds)
        return plan_within(profile, trial, budget_bytes)


def after_a_step(encoder: nn.Module, feats: Tensor) -> list[Tensor]:
    """Take a step; give gradients and buffers."""
    torch.manual_seed(1)
    train_step(encoder, feats, STORED)
    after = [*(p.grad for p in encoder.parameters()), *encoder.buffers()]
    return [x.clone() for x in after if x is not None]


def _rows(
    name: str, feats: Tensor, setting: Setting, shares: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    planner, device = _Planner(name, feats, setting), feats.device
    stored = planner.encoder()
    expected = after_a_step(stored, feats)
    steps: dict[Any, Callable[[], Any]] = {
        STORED.name: functools.partial(train_step, stored, feats, STORED)
    }
    peaks = {STORED.name: peak_bytes(steps[STORED.name], device)}
    ways: dict[tuple[float, str], str | None] = {}
    for share in shares:
        budget = int(share * peaks[STORED.name])
        for way in (WITHOUT, WITH):
            try:
                plan = planner.plan(way, budget)
            except Infeasible:
                ways[share, way] = None
                continue
            # Plans of the same modes are measured once.
            modes = ways[share, way] = ", ".join(plan.modes.values())
            if modes not in steps:
                encoder = planner.encoder(plan)
                same = map(torch.equal, after_a_step(encoder, feats), expected)
                require(all(same), f"{name} at {share:g}: planned bits differ")
                steps[modes] = functools.partial(train_step, encoder, feats, STORED)
                peaks[modes] = peak_bytes(steps[modes], device)
            require(peaks[modes] <= budget, f"{name} at {share:g} takes too much")
    seconds = interleaved_seconds(steps, device, repeats=setting.repeats)
    for (share, way), key in ways.items():
        counted = [] if key is None else key.split(", ")
        yield {
            "encoder": name,
            "batch": len(feats),
            "share": share,
            "way": way,
            "modes": ", ".join(
                f"{counted.count(m)} {m.value}" for m in Mode if m in counted
            ),
            "baseline": STORED.name,
            "store MB": peaks[STORED.name] / MB,
            "peak MB": "" if key is None else peaks[key] / MB,
            **times(
                None if key is None else seconds[key],
                seconds[STORED.name],
                missing="no plan",
            ),
        }


def run(
    device: torch.device,
    setting: Setting = SETTING,
    shares: tuple[float, ...] = SHARES,
) -> Result:
    """Measure a step of each plan; the baseline is the encoder with all blocks stored."""
    rows: list[dict[str, Any]] = []
    for name, batch in setting.batches.items():
        torch.manual_seed(1)
        feats = torch.randn(batch, setting.frames, 80, device=device)
        rows += _rows(name, feats, setting, shares)
        print(name, flush=True)
    return Result(
        "shares",
        "What does a plan cost at a share of the stored peak, with mode selective and without?",
        f"float32, exact streams, {setting.frames} frames, chunk null; peaks of live tensors "
        "above weights, gradients and input; plans from times of blocks measured here; "
        f"median of {setting.repeats} interleaved steps",
        rows,
        "gradients and buffers of each plan equal those of stored blocks to the bit; each "
        "peak is within its share",
    )
