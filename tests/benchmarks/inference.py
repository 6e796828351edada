"""What reversible encoders cost at inference, beside their vanilla counterparts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder, inference_form
from speechbrain_rev.sizes import MB
from tests.unit.lobes.encoders import with_statistics

from .harness import Result, interleaved_seconds, peak_bytes, require

#: Of an embedding's length: normalisations are folded, sums are of another order.
TOLERANCE = 1e-5
EVAL, FORM = "evaluation mode", "inference form"


@dataclass(frozen=True)
class Setting:
    """What is embedded; ``row`` has widths and blocks of other encoders."""

    vanilla: tuple[str, ...] = tuple(
        row.name for row in ARCHITECTURES.values() if not row.reversible
    )
    row: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 2
    frames: int = 200
    repeats: int = 3


@torch.no_grad()
def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Embed by each encoder in both ways; the baseline is the vanilla one's form."""
    setting = setting or Setting()
    torch.manual_seed(0)
    feats = torch.randn(setting.batch, setting.frames, 80, device=device)
    rows, worst = [], 0.0
    for vanilla in setting.vanilla:
        others = [r.name for r in ARCHITECTURES.values() if r.counterpart == vanilla]
        ways: dict[tuple[str, str], Callable[[], Any]] = {}
        for name in (vanilla, *others):
            encoder = encoder_of(name, setting.row).to(device)
            form = inference_form(encoder)
            worst = max(worst, check(name, encoder, form, feats))
            ways[name, EVAL] = functools.partial(encoder, feats)
            ways[name, FORM] = functools.partial(form, feats)
        peaks = {way: peak_bytes(step, device) for way, step in ways.items()}
        seconds = interleaved_seconds(ways, device, repeats=setting.repeats)
        base = vanilla, FORM
        rows += [
            {
                "encoder": name,
                "way": way,
                "baseline": f"{vanilla}, {FORM}",
                "MB per utterance": peaks[name, way] / MB / len(feats),
                "times the baseline's MB": peaks[name, way] / peaks[base],
                "ms per utterance": 1000 * seconds[name, way].median / len(feats),
                "times the baseline's ms": seconds[name, way].median
                / seconds[base].median,
            }
            for name, way in ways
        ]
    return Result(
        "inference",
        "What does an embedding cost without a graph?",
        f"float32, batch {setting.batch}, {setting.frames} frames, without lengths; MB "
        "beyond weights and input; both forms of an encoder and its vanilla counterpart "
        "in turn",
        rows,
        f"embeddings within {worst:.1e} of those in evaluation mode",
    )


def encoder_of(name: str, row: Mapping[str, Any]) -> SpeakerEncoder:
    """Build an encoder with statistics as after training."""
    torch.manual_seed(0)
    encoder: SpeakerEncoder = with_statistics(build_encoder(name, **row))
    return encoder


def check(name: str, encoder: nn.Module, form: nn.Module, feats: Tensor) -> float:
    """Compare both ways, as exact on a GPU as on a CPU."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        off = largest_distance(form(feats), encoder(feats))
    require(
        off <= TOLERANCE,
        f"{name}'s form for inference is off by {off} of an embedding",
    )
    return off


def largest_distance(ours: Tensor, expected: Tensor) -> float:
    """Measure how far embeddings are off, as a part of their length."""
    off = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(off.detach().max())
