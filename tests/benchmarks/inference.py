"""What reversible encoders cost at inference, beside their vanilla counterparts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder, inference_form
from speechbrain_rev.planner.memory import live_bytes_peak
from tests.unit.lobes.encoders import with_statistics

from .harness import NotEqual, Result, interleaved_seconds

#: Of an embedding's length: normalisations are folded, sums are of another order.
TOLERANCE = 1e-5
EVAL, FORM = "evaluation mode", "inference form"


@dataclass(frozen=True)
class Setting:
    """What is embedded; widths and blocks of None are the encoder's."""

    vanilla: tuple[str, ...] = tuple(
        row.name for row in ARCHITECTURES.values() if not row.reversible
    )
    widths: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    batch: int = 2
    frames: int = 200
    repeats: int = 3


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Embed by each encoder in both ways; the baseline is the vanilla one's form."""
    setting = setting or Setting()
    torch.manual_seed(0)
    feats = torch.randn(setting.batch, setting.frames, 80, device=device)
    rows, worst = [], 0.0
    for vanilla in setting.vanilla:
        found, off = _against(vanilla, setting, feats)
        rows += found
        worst = max(worst, off)
    return Result(
        "inference",
        "What does an embedding cost without a graph?",
        f"float32, batch {setting.batch}, {setting.frames} frames, without lengths; MB "
        "beyond weights and input; both forms of an encoder and its vanilla counterpart "
        "in turn",
        rows,
        f"embeddings within {worst:.1e} of those in evaluation mode",
    )


@torch.no_grad()
def _against(
    vanilla: str, setting: Setting, feats: Tensor
) -> tuple[list[dict[str, Any]], float]:
    """Measure a vanilla encoder and those that have it as counterpart."""
    names = [vanilla] + [
        row.name for row in ARCHITECTURES.values() if row.counterpart == vanilla
    ]
    ways: dict[tuple[str, str], Callable[[], Any]] = {}
    worst = 0.0
    for name in names:
        encoder = encoder_of(name, setting).to(feats.device)
        form = inference_form(encoder)
        worst = max(worst, check(name, encoder, form, feats))
        ways[name, EVAL] = functools.partial(encoder, feats)
        ways[name, FORM] = functools.partial(form, feats)
    peaks = {way: peak_bytes(step, feats.device) for way, step in ways.items()}
    labels = {" ".join(way): step for way, step in ways.items()}
    seconds = interleaved_seconds(labels, feats.device, repeats=setting.repeats)
    medians = {way: seconds[" ".join(way)]["median"] for way in ways}
    base = vanilla, FORM
    return [
        {
            "encoder": name,
            "way": way,
            "baseline": f"{vanilla}, {FORM}",
            "MB per utterance": peaks[name, way] / 1e6 / len(feats),
            "times the baseline's MB": peaks[name, way] / peaks[base],
            "ms per utterance": 1000 * medians[name, way] / len(feats),
            "times the baseline's ms": medians[name, way] / medians[base],
        }
        for name, way in ways
    ], worst


def encoder_of(name: str, setting: Setting) -> SpeakerEncoder:
    """Build an encoder with statistics as after training."""
    torch.manual_seed(0)
    sizes: dict[str, Sequence[int] | None] = {
        "widths": setting.widths,
        "blocks": setting.blocks,
    }
    encoder: SpeakerEncoder = with_statistics(build_encoder(name, **sizes))
    return encoder


def check(name: str, encoder: nn.Module, form: nn.Module, feats: Tensor) -> float:
    """Compare both ways, as exact on a GPU as on a CPU."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected, ours = encoder(feats), form(feats)
    off = float(((ours - expected).norm(dim=2) / expected.norm(dim=2)).max())
    if not off <= TOLERANCE:
        raise NotEqual(f"{name}'s form for inference is off by {off} of an embedding")
    return off


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """Bytes of live tensors at the peak; on a GPU what its allocator handed out."""
    if device.type != "cuda":
        return live_bytes_peak(step)
    step()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
