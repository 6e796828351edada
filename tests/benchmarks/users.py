"""What a user can do about a deep encoder that does not fit: each way beside the others.

Two vanilla encoders and their reversible counterparts of about equal size, at the batch
of the paper. On a CPU the peak is counted without data at that very batch and the time
is that of a small one; on a GPU the peak is the allocator's, and the time that of the
whole batch.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import Training
from speechbrain_rev.devices import parse_card

from .harness import Result, interleaved_seconds
from .user_ways import (
    BATCH,
    NAMES,
    PAIRS,
    PARTS,
    STORE,
    Case,
    Way,
    check_committed,
    check_counts,
    check_gradients,
    encoder_by,
    step_bytes,
    train_step,
    ways_of,
)

GIB = 2**30
FRAMES = (200, 600)
CARDS = ("11 GiB", "24 GiB")
#: Of VoxCeleb2 dev. The recipe takes one chunk of each in an epoch: its three speeds
#: make classes, drawn for each chunk, and no further utterances.
UTTERANCES, EPOCHS = 1_092_009, 150
#: On a CPU a step of the whole batch takes minutes.
CPU_BATCH, CPU_FRAMES, CPU_REPEATS, CUDA_REPEATS = 4, (200,), 3, 5
COUNTED = (
    "bytes of few blocks equal those of a step that ran, and those of whole encoders the "
    "counts of speechbrain-rev models"
)


def needed_bytes(way: Way, name: str, frames: int, step: int) -> int:
    """All that training takes of a card, as ``speechbrain-rev models`` adds it up."""
    row, batch = architecture(name), BATCH // way.parts
    training = Training(card_bytes=None, batch=batch, frames=frames)
    return step + sum(training.fixed_bytes(row, batch).values())


def fits(card: str, needed: int) -> bool:
    """Whether a card has that and, as ``speechbrain-rev models`` asks, the reserve."""
    training = Training(parse_card(card).memory_bytes, batch=BATCH, frames=FRAMES[0])
    return needed <= training.card_bytes - training.reserve_bytes


@dataclass(frozen=True)
class Figures:
    """What was measured of a case: bytes of a step, and seconds where it was timed."""

    step_bytes: int | None
    seconds: Mapping[str, float] | None = None


def on_cpu(
    pair: Sequence[str], frames: int, device: torch.device, **row: Any
) -> dict[Case, Figures]:
    """Count at the whole batch; time a small one, both encoders of a pair in turn."""
    cases = [(name, way) for name in pair for way in ways_of(name)]
    seconds: dict[Case, dict[str, float]] = {}
    if frames in CPU_FRAMES:
        feats = torch.randn(CPU_BATCH, frames, 80)
        steps = {
            (name, way): functools.partial(
                train_step, encoder_by(way, name, **row), feats, way
            )
            for name, way in cases
        }
        seconds = interleaved_seconds(steps, device, repeats=CPU_REPEATS)
        del steps
    return {
        (name, way): Figures(
            counted(way, name, frames, **row), seconds.get((name, way))
        )
        for name, way in cases
    }


@functools.cache
def counted(way: Way, name: str, frames: int, **row: Any) -> int:
    """Count a step at the whole batch, as the package does where it does."""
    step = step_bytes(way, name, batch=BATCH, frames=frames, **row)
    if not row:
        check_committed(way, name, frames, step)
    return step


def on_cuda(
    pair: Sequence[str], frames: int, device: torch.device, **row: Any
) -> dict[Case, Figures]:
    """Measure at the whole batch, each case alone in the GPU's memory."""
    return {
        (name, way): _alone(way, name, frames, device, **row)
        for name in pair
        for way in ways_of(name)
    }


def _alone(
    way: Way, name: str, frames: int, device: torch.device, **row: Any
) -> Figures:
    gc.collect()
    torch.cuda.empty_cache()
    try:
        with device:
            encoder = encoder_by(way, name, **row)
            feats = torch.randn(BATCH, frames, encoder.n_mels)
        step = functools.partial(train_step, encoder, feats, way)
        step()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        seconds = interleaved_seconds({name: step}, device, repeats=CUDA_REPEATS)
        return Figures(peak, seconds[name])
    except RuntimeError as error:
        # cuDNN and cuBLAS say it in words of their own.
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not out_of_memory and "ALLOC_FAILED" not in str(error):
            raise
        return Figures(None)


def rows_of(
    found: Mapping[Case, Figures],
    updates: Mapping[Case, int],
    frames: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Make a row of each case; what was not measured stays empty."""
    return [_row(case, found, updates, frames, device) for case in found]


def _row(
    case: Case,
    found: Mapping[Case, Figures],
    updates: Mapping[Case, int],
    frames: int,
    device: torch.device,
) -> dict[str, Any]:
    name, way = case
    step, seconds = found[case].step_bytes, found[case].seconds
    counterpart = architecture(name).counterpart
    timed = CPU_BATCH if device.type == "cpu" else BATCH
    kept = 2 * 4 * architecture(name).parameters
    needed = None if step is None else needed_bytes(way, name, frames, step)
    by = "counted" if device.type == "cpu" else "allocator"
    row: dict[str, Any] = {
        "encoder": name,
        "frames": frames,
        "way": way.name,
        "peak GiB": "" if step is None else (step + kept) / GIB,
        "peak by": "does not fit" if step is None else f"{by}, batch {BATCH}",
        "training GiB": "" if needed is None else needed / GIB,
        **{f"fits {card}": _fits(card, needed, device) for card in CARDS},
        "s per step": seconds["median"] if seconds else "",
        "20 % to 80 %": "{p20:.3g} to {p80:.3g}".format(**seconds) if seconds else "",
        "time of": f"batch {timed}" if seconds else "",
        "baseline": f"{name} {frames} {STORE.name}",
        "times the baseline": _ratio(found, case, name),
        "counterpart": f"{counterpart} {frames} {STORE.name}" if counterpart else "",
        "times the counterpart": _ratio(found, case, counterpart),
        "statistics of": BATCH // way.parts,
        "statistics updated": updates[case],
    }
    if device.type == "cuda":
        row |= _whole_training(seconds["median"] if seconds else None)
    return row


def _whole_training(seconds: float | None) -> dict[str, float | str]:
    """Say how fast the batch's step is, and how long the recipe's training takes."""
    steps = EPOCHS * (UTTERANCES // BATCH)
    return {
        "utterances per second": BATCH / seconds if seconds else "",
        f"days for {EPOCHS} epochs": steps * seconds / 86400 if seconds else "",
    }


def _ratio(found: Mapping[Case, Figures], case: Case, name: str | None) -> float | str:
    """Tell how many times as long a step takes as that of an encoder, stored."""
    stored = None if name is None else found[name, STORE].seconds
    seconds = found[case].seconds
    return seconds["median"] / stored["median"] if seconds and stored else ""


def _fits(card: str, needed: int | None, device: torch.device) -> str:
    if needed is not None:
        return "yes" if fits(card, needed) else "no"
    # Memory that does not fit a larger GPU; a driver keeps some of what a card is named by.
    total = torch.cuda.get_device_properties(device).total_memory
    return "no" if 0.9 * parse_card(card).memory_bytes < total else ""


def run(device: torch.device, **row: Any) -> Result:
    """Judge, count and time all ways; the baseline is the same encoder, stored."""
    updates, worst, apart = check_gradients(device)
    measure = on_cuda if device.type == "cuda" else on_cpu
    if device.type == "cpu":
        check_counts()
        # First, for what is wrong here must not wait for the times.
        for name, frames in itertools.product(NAMES, FRAMES):
            for way in ways_of(name):
                counted(way, name, frames, **row)
    rows: list[dict[str, Any]] = []
    for pair in PAIRS:
        for frames in FRAMES:
            found = measure(pair, frames, device, **row)
            rows += rows_of(found, updates, frames, device)
            print(f"{' '.join(pair)} {frames}", flush=True)
    return Result(
        "users",
        f"How can a deep encoder be trained at batch {BATCH}, and what does each way cost?",
        _setting(device),
        rows,
        f"float64, reduced widths and blocks: gradients within {worst:.1e} of stored "
        "ones (accumulated: of stored ones of the same parts); exact streams: bits of "
        "stored ones, bf16 too; other ways in bf16: no further from stored ones than "
        "bf16 is from float32; accumulated gradients are those of parts with statistics "
        f"of their own, {100 * apart:.0f} % from the whole batch's for {PARTS} x 2 "
        "utterances of noise in an untrained encoder"
        f"{'; ' + COUNTED if device.type == 'cpu' else ''}",
    )


def _setting(device: torch.device) -> str:
    if device.type == "cuda":
        memory = "allocator's peak of a step"
        time = (
            f"median of {CUDA_REPEATS} steps at batch {BATCH}, each way alone in memory; "
            f"days: {EPOCHS} epochs of {UTTERANCES:,} utterances of VoxCeleb2 dev, one "
            "chunk of each, at one of three speeds, as in the recipe; encoder only, "
            "without loss, optimizer and reading"
        )
    else:
        memory = f"live tensors of a step, counted without data at batch {BATCH}"
        time = (
            f"median of {CPU_REPEATS} interleaved steps at batch {CPU_BATCH} "
            f"(accumulation: {PARTS} x {CPU_BATCH // PARTS}) and "
            f"{CPU_FRAMES[0]} frames, forward and backward pass"
        )
    return (
        f"float32, or bf16 (autocast) where named; peak GiB: {memory}, and weights and "
        "gradients of the encoder; training GiB: also classifier, optimizer states of 8 "
        "bit and input, as speechbrain-rev models adds them up; fits: training leaves its "
        f"reserve free; time: {time}; store: without chunks; torch checkpoint: around "
        "each block, stem and transition, use_reentrant=False; statistics of: utterances "
        "whose batch statistics normalise; statistics updated: times in a step, measured"
    )
