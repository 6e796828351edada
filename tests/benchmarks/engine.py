"""What the ways of not storing activations cost, on equal residual functions.

The peers are compared as they are published: ``pip install -e .[peers]``. Each way is
judged first (``engine_gate``); a mistake of ours ends the run, one of a peer is listed in
the column "wrong" beside its figures.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.planner.step import cpu_fakes
from speechbrain_rev.sizes import GB

from .engine_gate import (
    FACTOR,
    FEW_BLOCKS,
    NOT_INSTALLED,
    PLAIN,
    ROUNDED,
    SCENARIOS,
    Chain,
    Encoder,
    Subject,
    tensors,
    wrongs,
)
from .harness import (
    CPU,
    HALF_TIMED,
    Piece,
    Result,
    Spread,
    anew,
    has_half,
    interleaved_seconds,
    peak_bytes,
    require,
    times,
)
from .peers import CHUNK, PLAIN_TORCH, WAYS, Way, versions
from .steps import FRAMES, PRECISIONS, TOLERANCE, Precision

KINDS = ("basic", "df_bottleneck")
DEPTHS = (4, 16, 32)
CHANNELS = 48
ENCODER = Encoder("revnet57", small=False)
#: Of an input where bytes are counted with and without data.
FEW_FRAMES = 8
#: Bytes of scalars, such as flags of overflow, that data alone needs.
SCALARS = 64
#: fp16 has no instructions on most CPUs.
NAMES = ("float32", "bf16")


@dataclass(frozen=True)
class Sizes:
    """What a machine can be asked for."""

    counted_batch: int
    batch: int
    frames: int
    encoder_batch: int
    repeats: int
    timed_depths: tuple[int, ...]


#: A step's time grows with its depth; a CPU measures it at the smallest.
ON_CPU = Sizes(128, 2, 100, 8, 15, DEPTHS[:1])
ON_CUDA = Sizes(16, 16, FRAMES, 64, 10, DEPTHS)


def train_step(network: nn.Module, x: torch.Tensor, precision: Precision) -> None:
    """One forward and backward pass."""
    with precision.autocast(x.device):
        # Not the caller's: a peer empties what it is given.
        outputs = network(x * 1)
    sum(y.float().square().sum() for y in tensors(outputs)).backward()


class ActualBytes(LiveBytes):
    """Live bytes where storages are emptied and filled again, as MemCNN does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what all storages hold."""
        self._count()
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        self._count()
        return outputs

    def _count(self) -> None:
        storages = [known() for known in list(self._known.values())]
        self.live = sum(s.nbytes() for s in storages if s is not None)
        self.peak = max(self.peak, self.live)


def way_bytes(
    subject: Subject,
    way: Way,
    precision: Precision,
    batch: int,
    device: torch.device,
    *,
    frames: int = FRAMES,
    without_data: bool = False,
) -> int:
    """Peak of forward and backward above weights, their gradients and the input."""
    where: Any = device
    if without_data:
        # Tensors on meta are the quicker ones, but autocast passes them by.
        where = cpu_fakes() if precision.half else torch.device("meta")
    with where:
        network = subject.by(way).module
        x = subject.input(batch, frames)
        for leaf in (x, *network.parameters()):
            leaf.grad = torch.zeros_like(leaf)
        if device.type == "cuda":
            step = functools.partial(train_step, network, x, precision)
            return peak_bytes(step, device)
        gc.collect()
        # Only peers empty storages, and to look at all of them takes long in chunks.
        with LiveBytes() if way.ours else ActualBytes() as meter:
            train_step(network, x, precision)
        return meter.peak


@functools.cache
def counts_without_data(kind: str, way: Way, precision: Precision) -> bool:
    """Whether a way of CPU training holds as many bytes without data as with it.

    Raises
    ------
    NotEqual
        If a way of ours does not.
    """
    subject = Chain(kind, 2, CHANNELS)
    count = functools.partial(
        way_bytes, subject, way, precision, 2, CPU, frames=FEW_FRAMES
    )
    real = count()
    try:
        counted = count(without_data=True)
    except (RuntimeError, AssertionError, TypeError, AttributeError):
        counted = 0
    require(
        abs(counted - real) <= SCALARS or not way.ours,
        f"{way.name} of {kind} in {precision} holds {real} bytes, but {counted} were "
        "counted without data.",
    )
    # Checkpoints under autocast differ by a weight or two.
    return abs(counted - real) <= 1e-3 * real


def bytes_per_utterance(
    subject: Subject, way: Way, precision: Precision, device: torch.device, sizes: Sizes
) -> float:
    """Peak of a large batch; what does not grow with it is less than 1 % of that."""
    batch, without_data = sizes.counted_batch, device.type == "cpu"
    kind = KINDS[0] if subject == ENCODER else subject.name
    if without_data and not counts_without_data(kind, way, precision):
        batch, without_data = sizes.batch, False
    return (
        way_bytes(subject, way, precision, batch, device, without_data=without_data)
        / batch
    )


def rows_of(
    subject: Subject,
    verdicts: dict[Way, list[str]],
    precision: str,
    device: torch.device,
    sizes: Sizes,
) -> list[dict[str, Any]]:
    """Time and count all ways that run."""
    in_precision = PRECISIONS[precision]
    able = [way for way, wrong in verdicts.items() if not _fails(wrong)]
    seconds: dict[Way, Spread] = {}
    is_timed = subject.depth in sizes.timed_depths or subject == ENCODER
    if is_timed and (has_half(device) or not in_precision.half):
        batch, frames = sizes.batch, sizes.frames
        if subject == ENCODER:
            batch, frames = sizes.encoder_batch, FRAMES
        with device:
            x = subject.input(batch, frames)
            networks = {way: subject.by(way).module for way in able}
        steps: dict[Way, Callable[[], Any]] = {
            way: functools.partial(train_step, network, x, in_precision)
            for way, network in networks.items()
        }
        seconds = interleaved_seconds(steps, device, repeats=sizes.repeats)
        del steps, networks
    taken = {
        way: bytes_per_utterance(subject, way, in_precision, device, sizes)
        for way in able
    }
    return [
        {
            "functions": subject.name,
            "blocks": subject.depth,
            "precision": precision,
            "way": way.name,
            "wrong": "; ".join(wrong) or "nothing",
            "GB per utterance": taken[way] / GB if way in taken else "",
            "baseline": f"{subject.name} {subject.depth} {precision} {PLAIN_TORCH.name}",
            **times(seconds.get(way), seconds.get(PLAIN_TORCH)),
            "share of the baseline": taken[way] / taken[PLAIN_TORCH]
            if way in taken
            else "",
        }
        for way, wrong in verdicts.items()
    ]


def _fails(wrong: Sequence[str]) -> bool:
    """Whether a way cannot even take a plain step."""
    return any(words.startswith(("raises", NOT_INSTALLED)) for words in wrong)


def measured(
    kind: str | None, precision: str, device: torch.device, sizes: Sizes
) -> list[dict[str, Any]]:
    """Judge, time and count all ways, of chains of a kind or of the encoder."""
    judge = functools.partial(wrongs, precision=PRECISIONS[precision], device=device)
    rows: list[dict[str, Any]] = []
    scenarios = [s for s in SCENARIOS if PRECISIONS[precision].half or not s.half]
    others: dict[Way, list[str]] = {way: [] for way in WAYS}
    if kind is not None:
        few = [(Chain(kind, FEW_BLOCKS), scenario) for scenario in scenarios]
        others |= {way: judge(few, way) for way in WAYS if way is not PLAIN_TORCH}
    for depth in DEPTHS if kind else (ENCODER.depth,):
        subject: Subject = Chain(kind, depth, CHANNELS) if kind else ENCODER
        small = Chain(kind, depth) if kind else Encoder(ENCODER.name)
        verdicts = {
            way: wrong
            if way is PLAIN_TORCH or _fails(wrong)
            else judge([(small, PLAIN)], way) + wrong
            for way, wrong in others.items()
        }
        rows += rows_of(subject, verdicts, precision, device, sizes)
    return rows


def run(device: torch.device, piece: Piece = anew) -> Result:
    """Judge, time and count all ways; the baseline is what all must equal."""
    sizes = ON_CUDA if device.type == "cuda" else ON_CPU
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        # Peers call what torch deprecates; storages without data have an address, 0.
        warnings.simplefilter("ignore")
        for precision in NAMES:
            for kind in (*KINDS, None):
                measure = functools.partial(measured, kind, precision, device, sizes)
                rows += piece(f"{kind or ENCODER.name} {precision}", measure)
    memory = (
        f"allocator's peak at batch {sizes.counted_batch}"
        if device.type == "cuda"
        else f"live tensors counted without data at batch {sizes.counted_batch}, as "
        "many as where run"
    )
    return Result(
        "engine",
        "What do the ways of not storing activations cost, on equal residual functions?",
        f"{CHANNELS} channels in each half and 80 frequencies; time: median of "
        f"{sizes.repeats} interleaved steps of forward and backward pass at batch "
        f"{sizes.batch} and {sizes.frames} frames (encoder: batch {sizes.encoder_batch}, "
        f"{FRAMES} frames; {HALF_TIMED}); memory at {FRAMES} frames: {memory}; chunks of {CHUNK} "
        f"channels; peers: {versions()}, in torch's own layers, as torch checkpoint; "
        "in the encoder stem and transitions are checkpointed beside what is not ours, "
        "and peers are given float32",
        rows,
        f"float64: gradients and running statistics within {TOLERANCE:g} of plain "
        f"autograd's; bf16: at most {FACTOR} times as far from float32 as stored ones; "
        "also with dropout, with an input that needs no gradient or is bf16, and with an "
        f"output that is written to; exact streams: within {ROUNDED:g} of plain autograd, "
        "bits of stored ones; the rows list what others get wrong",
    )
