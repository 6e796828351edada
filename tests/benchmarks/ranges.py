"""How large exact streams become in training, against the range that they have."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.reversible.streams import FORMATS, StreamFormat

from .harness import Result, require
from .speech import RECIPE_BATCH, WARMUP_STEPS, Speech, Training

STEPS = 300
BATCH, FRAMES, N_MELS, WIDTHS = 8, 48, 40, (16, 16, 32, 32)
#: Times the recipe's rate at a batch of 256, with which the rate goes in proportion.
RATES = {
    "the recipe's": BATCH / RECIPE_BATCH,
    "4 times the recipe's": 4 * BATCH / RECIPE_BATCH,
    "that of a batch of 256": 1.0,
}
#: Of each family, and of each type of the depth-first one, a deep one.
NAMES = ("revnet197", "revnet245", "df_revnet258", "df_revnet281")
LIMIT, STEP = FORMATS["exact"].limit, 1 / FORMATS["exact"].steps


class NotedFormat(StreamFormat):
    """Float streams that are noted as exact ones are, so that they may go beyond."""

    name = "exact"
    limit = 1e30

    def encode(self, x: Tensor, largest: Tensor | None) -> Tensor:
        """Note what is put in."""
        return _noted(super().encode(x, largest), largest, 1)

    def decode(
        self, value: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Give new floats, as of exact streams: a value may be written to."""
        return super().decode(value, dtype, out=out).clone()

    def add(
        self,
        value: Tensor,
        residuals: list[Tensor],
        largest: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Note what is added and what results."""
        for f in residuals:
            _noted(f, largest, 0)
        return _noted(super().add(value, residuals, largest, **options), largest, 1)


def _noted(x: Tensor, largest: Tensor | None, place: int) -> Tensor:
    if largest is not None:
        largest[place] = torch.maximum(largest[place], x.detach().abs().max())
    return x


@contextlib.contextmanager
def without_limit() -> Iterator[None]:
    """Let exact streams be floats without a limit for a while."""
    exact = FORMATS["exact"]
    FORMATS["exact"] = NotedFormat()
    try:
        yield
    finally:
        FORMATS["exact"] = exact


def small(name: str, **settings: Any) -> SpeakerEncoder:
    """All blocks of an encoder at reduced widths."""
    torch.manual_seed(0)
    sizes = {"widths": WIDTHS, "n_mels": N_MELS, "mode": "store"}
    return build_encoder(name, **(sizes | settings))


def check_largest(name: str, device: torch.device) -> None:
    """Compare the figures of a step with what residual functions see and return."""
    encoder = small(name, blocks=(1, 2, 1, 1)).to(device)
    seen: dict[str, float] = {}
    hooks = []
    for i, stage in enumerate(encoder.stages):
        for half in [h for block in stage.chain.blocks for h in (block.f, block.g)]:

            def look(_: Any, inputs: Any, output: Tensor, i: int = i) -> None:
                # What goes in and what results, of all but the streams at both ends.
                key = f"stages.{i}.chain"
                largest = [float(x.detach().abs().max()) for x in (inputs[0], output)]
                seen[key] = max(seen.get(key, 0.0), *largest)

            hooks.append(half.register_forward_hook(look))
    feats = torch.randn(2, FRAMES, N_MELS, device=device)
    encoder(feats).sum().backward()
    reported = encoder.largest_streams()
    for hook in hooks:
        hook.remove()
    for stage, largest in seen.items():
        # Both ends are a sum of two of what was seen.
        require(
            largest - STEP <= reported[stage] <= 2 * largest + STEP,
            f"{name} {stage}: {reported[stage]} is reported, {largest} is seen.",
        )


def train(name: str, rate: str, speech: Speech, device: torch.device) -> dict[str, Any]:
    """Train and note the largest magnitudes, by stage and by time."""
    encoder = small(name, verify=None).to(device)
    training = Training(encoder, name, speech, rate=RATES[rate], batch=BATCH)
    stages: dict[str, float] = dict.fromkeys(encoder.largest_streams(), 0.0)
    losses = []
    for _ in range(STEPS):
        losses.append(training.step())
        now = encoder.largest_streams()
        stages = {stage: _larger(stages[stage], now[stage]) for stage in stages}
        if not math.isfinite(losses[-1]):
            break
    largest = _larger(*stages.values())
    return {
        "encoder": name,
        "optimizer": training.optimizer.__class__.__name__,
        "rate": rate,
        "learning rate": training.lr,
        "steps": training.steps_taken,
        **{f"stage {n}": value for n, value in enumerate(stages.values(), 1)},
        "largest": largest,
        "baseline": f"limit of {LIMIT:g}",
        "share of the limit": largest / LIMIT,
        "mean loss, first and last 20": [
            round(sum(part) / len(part), 2) for part in (losses[:20], losses[-20:])
        ],
    }


def _larger(*magnitudes: float) -> float:
    return math.nan if any(map(math.isnan, magnitudes)) else max(magnitudes)


def run(device: torch.device) -> Result:
    """Train one encoder of each kind at the recipe's rate and at four times it."""
    for name in NAMES:
        check_largest(name, device)
    speech = Speech(N_MELS, FRAMES)
    rows = []
    with without_limit():
        for rate in RATES:
            for name in NAMES:
                rows.append(train(name, rate, speech, device))
                print(rows[-1], flush=True)
    return Result(
        "ranges",
        "How large do streams become in training, against the exact format's limit?",
        f"{STEPS} steps in float32 on {speech.source}, AAM margin 0.2, float streams so "
        f"that they may go beyond; the recipe's optimizers, batch {BATCH}, rates reached "
        f"in {WARMUP_STEPS} steps and kept, that of a batch of 256 being harsher than the "
        f"recipe; {FRAMES} frames, {N_MELS} mel bands, all blocks, widths {WIDTHS}",
        rows,
        "reported magnitudes of exact streams agree with hooks on the residual functions",
    )
