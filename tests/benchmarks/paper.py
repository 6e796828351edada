"""Memory of a training step of all reversible encoders against the published figures."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.sizes import GB

from .harness import Result, require
from .steps import (
    FRAMES,
    Way,
    batches_on,
    bytes_per_utterance,
    check_counts,
    check_modes,
)

#: Streams and precision, as columns.
COLUMNS = {
    f"{streams} {precision} GB": Way("", "reconstruct", streams, precision)
    for streams, precision in (
        ("float", "float32"),
        ("exact", "float32"),
        ("exact", "bf16"),
    )
}
EXACT = "exact float32 GB"
LONG = 600
#: Of a long utterance's memory against three short ones', and between encoders that
#: differ in depth alone.
ROUNDING = DEPTH = 0.01


def gradients_of_a_stage(encoder: nn.Module) -> int:
    """Bytes of the weight gradients of the largest chain, which wait for its end."""
    return max(
        sum(p.numel() * p.element_size() for p in stage.chain.parameters())
        for stage in encoder.stages
    )


def check_depth(rows: list[dict[str, Any]]) -> float:
    """Compare encoders that differ in depth alone: the same memory.

    Returns
    -------
    float
        The largest relative difference.
    """

    def but_depth(row: dict[str, Any]) -> tuple[Any, ...]:
        encoder = ARCHITECTURES[row["encoder"]]
        return encoder.family, encoder.type, encoder.block, encoder.widths[:3]

    worst = max(
        (
            abs(a[column] / b[column] - 1)
            for a, b in itertools.combinations(rows, 2)
            if but_depth(a) == but_depth(b)
            for column in COLUMNS
        ),
        default=0.0,
    )
    require(
        worst <= DEPTH, f"Memory grows with depth: by {worst:.3f} between encoders."
    )
    return worst


def run(device: torch.device, names: list[str] | None = None) -> Result:
    """Count all reversible encoders; the baseline is the published figure."""
    reversible = [name for name, row in ARCHITECTURES.items() if row.reversible]
    rows: list[dict[str, Any]] = []
    worst = 0.0
    if device.type != "cuda":
        for name in ("revnet57", "revnet155"):
            check_counts(name, COLUMNS.values())
    for name in names or reversible:
        worst = max(worst, check_modes(name, ["reconstruct"], device))
        sizes = {
            column: bytes_per_utterance(way, name, device) / GB
            for column, way in COLUMNS.items()
        }
        long = bytes_per_utterance(COLUMNS[EXACT], name, device, frames=LONG) / GB
        require(
            long <= LONG / FRAMES * (1 + ROUNDING) * sizes[EXACT],
            f"{name} takes {long} GB for {LONG} frames and {sizes[EXACT]} for {FRAMES}.",
        )
        published = ARCHITECTURES[name].published_memory_gb
        with torch.device("meta"):
            held = gradients_of_a_stage(build_encoder(name))
        rows.append(
            {
                "encoder": name,
                "baseline": "published",
                "published GB": published,
                **sizes,
                "share of the baseline": sizes[EXACT] / published,
                f"{LONG} frames / {FRAMES}": long / sizes[EXACT],
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
        f"gradients within {worst:.1e} of stored ones in float64, reduced widths and "
        f"chunks; depth changes memory by {check_depth(rows):.1e} at most",
    )
