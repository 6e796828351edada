"""A reversible ResNet as deep as the deepest published one, on an 11 GB GPU.

A ResNet of 518 layers was trained on 60 GPUs of 32 GB (cited in the memory-efficient speaker
embedding paper, section I). Here one of as many layers is planned for 11 GB, its step is
counted, and taken on the CPU, where every mode makes the same gradients to the bit.

python -m tests.benchmarks --only deepest
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog.steps import encoder_step
from speechbrain_rev.catalog.table import Training
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.planner import largest_batch, live_bytes_peak, plan_step
from speechbrain_rev.sizes import MIB

from .harness import Result, interleaved_seconds, require, times

#: Blocks of encoders of one kind, which has 6 layers a block and 14 beside.
KIND = "revnet230"
DEPTHS = {230: (2, 7, 25, 2), 518: (3, 16, 62, 3)}
CARD, FRAMES, BATCH, REPEATS = "11GB", 200, 2, 3
MODES = ("reconstruct", "store")


def step(encoder: SpeakerEncoder, feats: Tensor) -> None:
    """Run a forward and a backward pass."""
    encoder.zero_grad()
    encoder(feats).square().sum().backward()


def checked(encoder: SpeakerEncoder, feats: Tensor) -> None:
    """Require the same gradients and statistics, to the bit, in both modes."""
    start = {name: x.clone() for name, x in encoder.state_dict().items()}
    results = []
    for mode in MODES:
        encoder.load_state_dict(start)
        encoder.set_mode(mode)
        step(encoder, feats)
        grads = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]
        results.append([*grads, *(b.clone() for b in encoder.buffers())])
    same = all(map(torch.equal, *results))
    finite = all(x.isfinite().all() for x in results[0])
    require(same and finite, "Modes differ, or a gradient is not finite.")


def counted(encoder: SpeakerEncoder, mode: str, batch: int) -> int:
    """Count the bytes that are alive at the peak of a step, beside what is there before."""
    encoder.set_mode(mode)
    feats = torch.randn(batch, FRAMES, encoder.n_mels, device="meta")
    return live_bytes_peak(functools.partial(step, encoder, feats))


def run(device: torch.device) -> Result:
    """Plan, count and run; the baseline is the same encoder, all stored."""
    rows: list[dict[str, Any]] = []
    for layers, blocks in DEPTHS.items():
        row = dataclasses.replace(architecture(KIND), blocks=blocks)
        require(6 * sum(blocks) + 14 == layers, f"{blocks} are not {layers} layers.")
        torch.manual_seed(0)
        encoder = build_encoder(KIND, blocks=blocks).to(device)
        feats = torch.randn(BATCH, FRAMES, encoder.n_mels, device=device)
        checked(encoder, feats)
        steps = {}
        for mode in MODES:
            own = build_encoder(KIND, blocks=blocks, mode=mode).to(device)
            steps[mode] = functools.partial(step, own, feats)
        seconds = interleaved_seconds(steps, device, repeats=REPEATS)
        del steps, own

        asked = encoder_step(row, Training(None, batch=64, frames=FRAMES))
        most = largest_batch(asked, CARD)
        plan = plan_step(asked.at(most), CARD)
        with torch.device("meta"):
            empty = build_encoder(KIND, blocks=blocks)
        few, many = (counted(empty, "reconstruct", n) for n in (32, 64))
        stored, more = (counted(empty, "store", n) for n in (32, 64))
        modes = [str(mode) for mode in plan.modes.values()]
        rows.append(
            {
                "layers": layers,
                "blocks": "-".join(map(str, blocks)),
                "parameters, M": sum(p.numel() for p in encoder.parameters()) / 1e6,
                "MiB an utterance": (many - few) / 32 / MIB,
                "MiB stored": (more - stored) / 32 / MIB,
                "share of the baseline": (many - few) / (more - stored),
                f"batch on {CARD}": most,
                "planned": {mode: modes.count(mode) for mode in sorted(set(modes))},
                "baseline": f"{layers} layers, stored",
                **times(seconds["reconstruct"], seconds["store"]),
            }
        )
        print(*rows[-1].values(), flush=True)
    return Result(
        "deepest",
        "What does a reversible ResNet of 518 layers take?",
        f"revnet of type I with bottlenecks, {FRAMES} frames, float32; memory: live tensors "
        f"counted without data, slope between batches of 32 and 64; batch: the largest that "
        f"is planned for a GPU of {CARD}, with weights, optimizer and reserve; time: batch "
        f"{BATCH}, median of {REPEATS} interleaved steps",
        rows,
        "gradients and statistics of reconstructed and stored blocks are equal to the bit",
    )
