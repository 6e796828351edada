"""What the layout of maps in memory and cuDNN's choice of kernels do to a step's time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.modes import MEMORY_FORMATS

from .harness import Result, distance, require, times
from .steps import (
    FRAMES,
    TOLERANCE,
    Case,
    Step,
    Way,
    encoder_by,
    timed,
    train_step,
)

NAMES = ("resnet34", "df_resnet56", "revnet57", "df_revnet89")
#: Whether cuDNN's kernels are deterministic; the default first.
FLAGS = (True, False)
#: Of a CPU: two blocks of each stage have both inputs of a block, from the stem and of
#: another block.
FEW_BLOCKS = (2, 2, 2, 2)


def ways_of(name: str, precision: str, device: torch.device) -> list[Way]:
    """All ways to train an encoder, by mode; the first of a mode is its baseline."""
    reversible = ARCHITECTURES[name].reversible
    modes = ("store", "reconstruct") if reversible else ("store",)
    flags = FLAGS if device.type == "cuda" else FLAGS[:1]
    return [
        Way(
            f"{mode}, {memory_format}" + ", not deterministic" * (not deterministic),
            mode,
            "exact",
            precision,
            memory_format=memory_format,
            deterministic=deterministic,
        )
        for mode, deterministic, memory_format in itertools.product(
            modes, flags, MEMORY_FORMATS
        )
    ]


def check_bits(steps: Mapping[Case, Step]) -> None:
    """Take the first step of each way: in one format modes must agree to the bit."""
    grads: dict[str, list[torch.Tensor]] = {}
    for (name, way), step in steps.items():
        step()
        if way.deterministic:
            own = [p.grad.clone() for p in step.args[0].parameters()]
            stored = grads.setdefault(way.memory_format, own)
            require(
                all(map(torch.equal, own, stored)),
                f"Gradients of {name} in {way.memory_format} depend on the mode.",
            )
        step.args[0].zero_grad(set_to_none=False)


def check_formats(name: str, device: torch.device) -> float:
    """Compare the gradients of both formats in float64, stored.

    Returns
    -------
    float
        Their relative distance.

    Raises
    ------
    NotEqual
        If it is more than rounding.
    """
    gradients = []
    for memory_format in MEMORY_FORMATS:
        way = Way("", "store", "exact", chunk=None, memory_format=memory_format)
        encoder = encoder_by(way, name, widths=(8, 16, 16, 24), blocks=(1, 2, 2, 1))
        encoder.to(device, torch.float64)
        torch.manual_seed(1)
        feats = torch.randn(2, 40, 80, dtype=torch.float64).to(device)
        train_step(encoder, feats, way)
        gradients.append([p.grad for p in encoder.parameters()])
    apart = distance(*gradients)
    require(
        apart <= TOLERANCE,
        f"Gradients of {name} in both memory formats are {apart:.1e} apart.",
    )
    return apart


def run(device: torch.device, names: tuple[str, ...] = NAMES) -> Result:
    """Time all ways; the baseline is the same mode in contiguous maps, pinned."""
    on_gpu = device.type == "cuda"
    size: dict[str, Any] = {"batch": 64, "repeats": 5}
    if not on_gpu:
        size = {"batch": 4, "repeats": 5, "blocks": FEW_BLOCKS}
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for name in names:
        worst = max(worst, check_formats(name, device))
        for precision in ("float32", "bf16") if on_gpu else ("float32",):
            ways = ways_of(name, precision, device)
            cases = [(name, way) for way in ways]
            seconds = timed(cases, device, check=check_bits, **size)
            baselines = {way.mode: way for way in reversed(ways)}
            for way in ways:
                baseline = baselines[way.mode]
                rows.append(
                    {
                        "encoder": name,
                        "precision": precision,
                        "way": way.name,
                        "baseline": f"{name} {precision} {baseline.name}",
                        **times(seconds[name, way], seconds[name, baseline]),
                    }
                )
                print(*rows[-1].values(), flush=True)
    shallow = "" if on_gpu else ", two blocks in each stage"
    return Result(
        "formats",
        "Which memory format and which flags of cuDNN make a training step fast?",
        f"batch {size['batch']}, {FRAMES} frames{shallow}, exact streams, default chunk; "
        f"median of {size['repeats']} interleaved steps of forward and backward pass",
        rows,
        "with pinned flags gradients are equal to the bit in all modes of one format; "
        f"those of both formats are within {worst:.1e} in float64, reduced widths",
    )
