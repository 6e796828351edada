"""Memory of a training step of all reversible encoders against the published figures."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder

from .gradients import check_modes
from .harness import NotEqual, Result
from .precisions import PRECISIONS
from .streams import FRAMES, GB, batches_on, bytes_per_utterance, check_counts

#: Streams and precision, as columns.
COLUMNS = (("float", "float32"), ("exact", "float32"), ("exact", "bf16"))
LONG = 600
#: Of a long utterance's memory against three short ones'.
ROUNDING = 0.01
#: Between encoders that differ in depth alone.
DEPTH = 0.01


def gradients_of_a_stage(encoder: nn.Module) -> int:
    """Bytes of the weight gradients of the largest chain, which wait for its end."""
    return max(
        sum(p.numel() * p.element_size() for p in stage.chain.parameters())
        for stage in encoder.stages
    )


def check_lengths(name: str, short: float, long: float) -> None:
    """Three times the frames take three times the memory, no more."""
    most = LONG / FRAMES * (1 + ROUNDING) * short
    if long > most:
        raise NotEqual(
            f"{name} takes {long:.0f} bytes for {LONG} frames and {short:.0f} for {FRAMES}."
        )


def check_depth(rows: list[dict[str, Any]]) -> float:
    """Compare encoders that differ in depth alone: the same memory.

    Returns
    -------
    float
        The largest relative difference.
    """
    worst = 0.0
    for a, b in itertools.combinations(rows, 2):
        first, second = (ARCHITECTURES[row["encoder"]] for row in (a, b))
        if (first.family, first.type, first.block) == (
            second.family,
            second.type,
            second.block,
        ) and first.widths[:3] == second.widths[:3]:
            for streams, precision in COLUMNS:
                column = f"{streams} {precision} GB"
                worst = max(worst, abs(a[column] / b[column] - 1))
    if worst > DEPTH:
        raise NotEqual(f"Memory grows with depth: by {worst:.3f} between encoders.")
    return worst


def run(device: torch.device, names: list[str] | None = None) -> Result:
    """Count all reversible encoders; the baseline is the published figure."""
    reversible = [name for name, row in ARCHITECTURES.items() if row.reversible]
    rows: list[dict[str, Any]] = []
    distance = 0.0
    if device.type != "cuda":
        for name in ("revnet57", "revnet155"):
            check_counts(name, device)
    for name in names or reversible:
        distance = max(distance, check_modes(name, ["reconstruct"], device))
        grown = {
            (streams, precision): bytes_per_utterance(
                name, ("reconstruct", streams), PRECISIONS[precision], device
            )
            for streams, precision in COLUMNS
        }
        exact = "exact", "float32"
        long = bytes_per_utterance(
            name, ("reconstruct", "exact"), PRECISIONS["float32"], device, frames=LONG
        )
        check_lengths(name, grown[exact], long)
        published = ARCHITECTURES[name].published_memory_gb
        with torch.device("meta"):
            held = gradients_of_a_stage(build_encoder(name))
        rows.append(
            {
                "encoder": name,
                "baseline": "published",
                "published GB": published,
                **{f"{s} {p} GB": n / GB for (s, p), n in grown.items()},
                "share of the baseline": grown[exact] / GB / published,
                f"{LONG} frames / {FRAMES}": long / grown[exact],
                "weight gradients of a stage, MB": held / 1e6,
            }
        )
        print(*rows[-1].values(), flush=True)
    few, many = batches_on(device)
    how = "allocator's peak" if device.type == "cuda" else "live tensors without data"
    return Result(
        "paper",
        "How much memory does one more utterance of 2 s take, against the paper?",
        f"mode reconstruct, default chunk, {FRAMES} frames, {how}, slope between batches "
        f"of {few} and {many}; the share is that of exact streams in float32; weight gradients of a "
        "stage wait for its end, at any batch",
        rows,
        f"gradients within {distance:.1e} of stored ones in float64, reduced widths and "
        f"chunks; depth changes memory by {check_depth(rows):.1e} at most",
    )
