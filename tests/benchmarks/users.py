"""What a user can do about a deep encoder that does not fit: each way beside the others.

Two vanilla encoders and their reversible counterparts of about equal size, at the batch
of the paper. On a CPU the peak is counted without data at that very batch and the time
is that of a small one; on a GPU the peak is the allocator's, and the time that of the
whole batch.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import Training, counted_peaks
from speechbrain_rev.catalog.table import EPOCHS, UTTERANCES, training_days
from speechbrain_rev.devices import parse_card
from speechbrain_rev.sizes import GIB

from .harness import (
    HALF_TIMED,
    Piece,
    Result,
    Row,
    Spread,
    anew,
    distance,
    has_half,
    interleaved_seconds,
    peak_bytes,
    require,
    times,
)
from .steps import (
    TOLERANCE,
    Case,
    Way,
    check_counts,
    encoder_by,
    timed,
    train_step,
    way_bytes,
)

BATCH, PARTS = 128, 4
FRAMES = (200, 600)
CARDS = ("11 GiB", "24 GiB")
#: On a CPU a step of the whole batch takes minutes.
CPU_BATCH, CPU_FRAMES, CPU_REPEATS = 4, (200,), 3
CUDA_FRAMES, CUDA_REPEATS = (200,), 5
#: Bytes of the streams' checksums, which are counted, and not taken where it is timed.
CHECKSUMS = 64
#: Not in chunks, which make a step slower and of what is stored save nothing.
STORE = Way("store", chunk=None)
#: The baseline: no layer of this package.
TORCH = Way("plain torch layers", chunk=None, plain=True)
VANILLA = (
    STORE,
    Way("torch checkpoint", torch_checkpoint=True),
    Way("recompute", mode="recompute"),
    Way("bf16", precision="bf16"),
    Way("bf16 + torch checkpoint", precision="bf16", torch_checkpoint=True),
    Way(f"accumulation {PARTS} x {BATCH // PARTS}", parts=PARTS),
)
REVERSIBLE = (
    STORE,
    Way("reconstruct, float", mode="reconstruct"),
    Way("reconstruct, exact", mode="reconstruct", streams="exact"),
    Way("reconstruct, exact + bf16", "reconstruct", "exact", "bf16"),
)
#: A vanilla encoder and its reversible counterpart are timed together.
PAIRS = (("resnet152", "revnet197"), ("df_resnet233", "df_revnet377"))
NAMES = tuple(name for pair in PAIRS for name in pair)
#: An encoder of the same kinds of layers that takes no time.
FEW_BLOCKS = {"widths": (32, 32, 32, 48), "blocks": (1, 2, 2, 1)}


@dataclass(frozen=True)
class Figures:
    """What was measured of a case: bytes of a step, and seconds where it was timed."""

    step_bytes: int | None
    seconds: Spread | None = None


def ways_of(name: str) -> tuple[Way, ...]:
    """List the ways that an encoder can be trained in."""
    return (TORCH, *(REVERSIBLE if architecture(name).reversible else VANILLA))


def small_step(way: Way, name: str, device: torch.device) -> tuple[Tensor, int]:
    """Give gradients of a small encoder's step, and how often statistics are updated."""
    encoder = encoder_by(way, name, **FEW_BLOCKS)
    dtype = torch.float64 if way.precision == "float32" else torch.float32
    encoder.to(device, dtype)
    torch.manual_seed(1)
    feats = torch.randn(2 * PARTS, 40, encoder.n_mels).to(device, dtype)
    train_step(encoder, feats, way)
    updates = max(int(b) for b in encoder.buffers() if not b.is_floating_point())
    # In the order of ours, where an encoder was built anew in torch's layers.
    parts = getattr(encoder, "parts", [encoder])
    grads = [p.grad.flatten() for part in parts for p in part.parameters()]
    return torch.cat(grads), updates


def check_gradients(device: torch.device) -> tuple[dict[Case, int], float, float]:
    """Compare each way with the stored one that computes the same.

    Returns
    -------
    tuple
        How often each way updates statistics in a step; the largest distance of
        gradients; the distance of accumulated ones from those of the whole batch.

    Raises
    ------
    NotEqual
        If a way does not compute what it should.
    """
    # What is stored is compared with several ways.
    step = functools.cache(functools.partial(small_step, device=device))
    updates, worst, apart = {}, 0.0, 0.0
    for name in NAMES:
        for way in ways_of(name):
            got, updates[name, way] = step(way, name)
            want, _ = step(way.stored, name)
            off, allowed = distance(got, want), TOLERANCE
            if way.streams == "exact":
                allowed = 0.0
            elif way.precision != "float32":
                # What bf16 itself is off by.
                wide = dataclasses.replace(way.stored, precision="float32")
                allowed = distance(want, step(wide, name)[0])
            else:
                worst = max(worst, off)
            require(
                off <= allowed,
                f"Gradients of {name}, {way.name}, are {off:.1e} from stored ones; "
                f"allowed is {allowed:.1e}.",
            )
            if way.parts > 1:
                apart = max(apart, distance(got, step(STORE, name)[0]))
    return updates, worst, apart


def check_committed(way: Way, name: str, frames: int, step: int) -> None:
    """Compare with the counts that ``speechbrain-rev models`` reads, where it has them."""
    usual = "exact" if architecture(name).reversible else "float"
    other = way.plain or way.torch_checkpoint or way.parts > 1
    if way.streams == usual and way.precision == "float32" and not other:
        committed = counted_peaks()[name, way.mode, frames](BATCH)
        require(
            0 <= committed - step <= CHECKSUMS,
            f"{name}, {way.name}, at {frames} frames holds {step} bytes, but the counts "
            f"in speechbrain_rev/catalog say {committed}: write them again, see counts.py.",
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


@functools.cache
def counted(way: Way, name: str, frames: int, **row: Any) -> int:
    """Count a step at the whole batch, as the package does where it does."""
    step = way_bytes(way, name, batch=BATCH, frames=frames, **row)
    if not row:
        check_committed(way, name, frames, step)
    return step


def alone(
    way: Way, name: str, frames: int, device: torch.device, **row: Any
) -> Figures:
    """Measure at the whole batch, the case alone in the GPU's memory."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        with device:
            encoder = encoder_by(way, name, **row)
            feats = torch.randn(BATCH, frames, encoder.n_mels)
        step = functools.partial(train_step, encoder, feats, way)
        peak = peak_bytes(step, device)
        seconds = interleaved_seconds({name: step}, device, repeats=CUDA_REPEATS)
        return Figures(peak, seconds[name])
    except RuntimeError as error:
        # cuDNN and cuBLAS say it in words of their own.
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not out_of_memory and "ALLOC_FAILED" not in str(error):
            raise
        return Figures(None)


def row_of(
    case: Case,
    figures: Mapping[Case, Figures],
    updates: int,
    frames: int,
    device: torch.device,
) -> dict[str, Any]:
    """Make the row of a case; what was not measured stays empty."""
    name, way = case
    step, seconds = figures[case].step_bytes, figures[case].seconds
    counterpart = architecture(name).counterpart
    cuda = device.type == "cuda"
    kept = 2 * 4 * architecture(name).parameters
    needed = None if step is None else needed_bytes(way, name, frames, step)
    by = f"{'allocator' if cuda else 'counted'}, batch {BATCH}"
    beside = figures[counterpart, TORCH].seconds if counterpart else None
    row: dict[str, Any] = {
        "encoder": name,
        "frames": frames,
        "way": way.name,
        "peak GiB": "" if step is None else (step + kept) / GIB,
        "peak by": "does not fit" if step is None else by,
        "training GiB": "" if needed is None else needed / GIB,
        **{f"fits {card}": _fits(card, needed, device) for card in CARDS},
        "time of": f"batch {BATCH if cuda else CPU_BATCH}" if seconds else "",
        "baseline": f"{name} {frames} {TORCH.name}",
        **times(seconds, figures[name, TORCH].seconds),
        "counterpart": f"{counterpart} {frames} {TORCH.name}" if counterpart else "",
        "times the counterpart": times(seconds, beside)["times the baseline"],
        "statistics of": BATCH // way.parts,
        "statistics updated": updates,
    }
    if cuda:
        rate = BATCH / seconds.median if seconds else None
        row |= {
            "utterances per second": rate or "",
            f"days for {EPOCHS} epochs": training_days(rate) if rate else "",
        }
    return row


def _fits(card: str, needed: int | None, device: torch.device) -> str:
    if needed is not None:
        return "yes" if fits(card, needed) else "no"
    # Memory that does not fit a larger GPU; a driver keeps some of what a card is named by.
    total = torch.cuda.get_device_properties(device).total_memory
    return "no" if 0.9 * parse_card(card).memory_bytes < total else ""


def measured(
    pair: Sequence[str],
    frames: int,
    updates: Mapping[Case, int],
    device: torch.device,
    **row: Any,
) -> list[Row]:
    """Count and time the ways of an encoder and its counterpart."""
    cases = [case for case in updates if case[0] in pair]
    if device.type == "cuda":
        figures = {
            (name, way): alone(way, name, frames, device, **row) for name, way in cases
        }
    else:
        seconds = {}
        if frames in CPU_FRAMES:
            sizes = {"batch": CPU_BATCH, "frames": frames, "repeats": CPU_REPEATS}
            half = [case for case in cases if case[1].precision == "bf16"]
            left_out = () if has_half(device) else half
            quick = [case for case in cases if case not in left_out]
            seconds = timed(quick, device, **sizes, **row)
        figures = {
            (name, way): Figures(
                counted(way, name, frames, **row), seconds.get((name, way))
            )
            for name, way in cases
        }
    return [row_of(case, figures, updates[case], frames, device) for case in cases]


def run(device: torch.device, piece: Piece = anew, **row: Any) -> Result:
    """Judge, count and time all ways; the baseline is the same encoder in torch's own layers."""
    updates, worst, apart = check_gradients(device)
    if device.type == "cpu":
        # First, for what is wrong here must not wait for the times.
        for name, way in updates:
            size = {"batch": 2 * PARTS, "frames": 40, "blocks": (1, 2, 1, 1)}
            check_counts(name, [way], **size)
            for frames in FRAMES:
                counted(way, name, frames, **row)
    rows: list[Row] = []
    for pair in PAIRS:
        for frames in CUDA_FRAMES if device.type == "cuda" else FRAMES:
            measure = functools.partial(measured, pair, frames, updates, device, **row)
            rows += piece(f"{' '.join(pair)} {frames}", measure)
    also = (
        "; bytes of few blocks equal those of a step that ran, and those of whole encoders "
        "the counts of speechbrain-rev models"
    )
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
        f"utterances of noise in an untrained encoder{also if device.type == 'cpu' else ''}",
    )


def _setting(device: torch.device) -> str:
    if device.type == "cuda":
        memory = "allocator's peak of a step"
        time = (
            f"median of {CUDA_REPEATS} steps at batch {BATCH}, each way alone in memory; "
            f"days: {EPOCHS} epochs of {UTTERANCES:,} utterances of VoxCeleb2 dev, one "
            "segment of each, at one of three speeds, as in the recipe; encoder only, "
            "without loss, optimizer and reading"
        )
    else:
        memory = f"live tensors of a step, counted without data at batch {BATCH}"
        time = (
            f"median of {CPU_REPEATS} interleaved steps at batch {CPU_BATCH} "
            f"(accumulation: {PARTS} x {CPU_BATCH // PARTS}) and "
            f"{CPU_FRAMES[0]} frames, forward and backward pass; {HALF_TIMED}"
        )
    return (
        f"float32, or bf16 (autocast) where named; peak GiB: {memory}, and weights and "
        "gradients of the encoder; training GiB: also classifier, 8-bit optimizer "
        "states and input, as speechbrain-rev models adds them up; fits: training leaves its "
        f"reserve free; time: {time}; store: without chunks; torch checkpoint: around "
        "each block, stem and transition, use_reentrant=False; statistics of: utterances "
        "whose batch statistics normalise; statistics updated: times in a step, measured"
    )
