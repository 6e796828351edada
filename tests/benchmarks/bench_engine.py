"""What the ways of not storing activations cost, on equal residual functions.

The peers are compared as they are published: ``pip install -e .[peers]``. Each way is
judged first (``engine_gate``); a mistake of ours ends the run, one of a peer is listed in
the column "wrong" beside its figures.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.planner.step import CPUFakes

from .engine_gate import (
    FACTOR,
    FEW_BLOCKS,
    PLAIN,
    ROUNDED,
    SCENARIOS,
    TOLERANCE,
    Chain,
    Encoder,
    Scenario,
    tensors,
    wrongs,
)
from .harness import NotEqual, Result, interleaved_seconds
from .peers import (
    CHUNK,
    PEERS,
    STORE,
    WAYS,
    NotInstalled,
    Way,
    encoder_by,
    versions,
)
from .precisions import PRECISIONS, Precision
from .streams import FRAMES, GB

KINDS = ("basic", "df_bottleneck")
DEPTHS = (4, 16, 32)
CHANNELS, N_MELS = 48, 80
ENCODER = "revnet57"
#: Of an input where bytes are counted with and without data.
FEW_FRAMES = 8
NOT_INSTALLED = "not installed"
CPU = torch.device("cpu")
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
ON_CPU = Sizes(128, 2, 100, 2, 3, DEPTHS[:1])
ON_CUDA = Sizes(16, 16, FRAMES, 64, 10, DEPTHS)


@dataclass(frozen=True)
class Subject:
    """What is trained in each way: its name in the table, network and input."""

    name: str
    depth: int
    network: Callable[[Way], nn.Module]
    input: Callable[[int, int], torch.Tensor]


def chain(kind: str, depth: int) -> Subject:
    """A chain of blocks, whose input needs a gradient."""
    return Subject(
        kind,
        depth,
        lambda way: Chain(kind, depth, CHANNELS).by(way).module,
        lambda batch, frames: torch.randn(
            batch, 2 * CHANNELS, N_MELS, frames, requires_grad=True
        ),
    )


def encoder(name: str) -> Subject:
    """A full encoder."""
    network = functools.partial(encoder_by, name=name)
    blocks = sum(len(stage.chain.blocks) for stage in network(STORE).stages)
    return Subject(
        name,
        blocks,
        network,
        lambda batch, frames: torch.randn(batch, frames, N_MELS),
    )


def train_step(network: nn.Module, x: torch.Tensor, precision: Precision) -> None:
    """One forward and backward pass."""
    # There is no autocast on meta, not even a disabled one.
    half = precision.half is not None
    with precision.autocast(x.device) if half else contextlib.nullcontext():
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


def peak_bytes(
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
        where = torch.device("meta") if precision.half is None else CPUFakes()
    with where:
        network = subject.network(way)
        x = subject.input(batch, frames)
        for leaf in (x, *network.parameters()):
            leaf.grad = torch.zeros_like(leaf)
        gc.collect()
        if device.type == "cuda":
            # The first step allocates what is kept, as workspaces of cuBLAS.
            for _ in range(2):
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                train_step(network, x, precision)
            return torch.cuda.max_memory_allocated(device) - before
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
    peak = functools.partial(
        peak_bytes, chain(kind, 2), way, precision, 2, CPU, frames=FEW_FRAMES
    )
    real = peak()
    try:
        counted = peak(without_data=True)
    except (RuntimeError, AssertionError, TypeError, AttributeError):
        counted = 0
    # Checkpoints under autocast differ by a weight or two.
    equal = abs(counted - real) <= 1e-3 * real
    if way.ours and counted != real:
        raise NotEqual(
            f"{way.name} of {kind} in {precision} holds {real} bytes, but {counted} "
            "were counted without data."
        )
    return equal


def bytes_per_utterance(
    subject: Subject, way: Way, precision: Precision, device: torch.device, sizes: Sizes
) -> float:
    """Peak of a large batch; what does not grow with it is less than 1 % of that."""
    batch, without_data = sizes.counted_batch, device.type == "cpu"
    kind = KINDS[0] if subject.name == ENCODER else subject.name
    if without_data and not counts_without_data(kind, way, precision):
        batch, without_data = sizes.batch, False
    return (
        peak_bytes(subject, way, precision, batch, device, without_data=without_data)
        / batch
    )


def verdict(
    way: Way,
    scenarios: Sequence[tuple[Chain | Encoder, Scenario]],
    precision: Precision,
    device: torch.device,
) -> list[str]:
    """List what a way gets wrong, or say that it cannot be judged here."""
    try:
        return wrongs(scenarios, way, precision, device)
    except NotInstalled as error:
        return [f"{NOT_INSTALLED}: {error}"]


def rows_of(
    subject: Subject,
    verdicts: dict[Way, list[str]],
    precision: str,
    device: torch.device,
    sizes: Sizes,
) -> list[dict[str, Any]]:
    """Time and count all ways that run."""
    in_precision = PRECISIONS[precision]
    able = [way for way, found in verdicts.items() if not _fails(found)]
    seconds = {}
    if subject.depth in sizes.timed_depths or subject.name == ENCODER:
        seconds = _seconds(subject, able, in_precision, device, sizes)
    grown = {
        way: bytes_per_utterance(subject, way, in_precision, device, sizes)
        for way in able
    }
    return [
        {
            "functions": subject.name,
            "blocks": subject.depth,
            "precision": precision,
            "way": way.name,
            "wrong": "; ".join(found) or "nothing",
            "s per step": _of(seconds, way, lambda s: s["median"]),
            "20 % to 80 %": _of(seconds, way, "{p20:.3g} to {p80:.3g}".format_map),
            "GB per utterance": _of(grown, way, lambda n: n / GB),
            "baseline": f"{subject.name} {subject.depth} {precision} {STORE.name}",
            "times the baseline": _of(
                seconds, way, lambda s: s["median"] / seconds[STORE]["median"]
            ),
            "share of the baseline": _of(grown, way, lambda n: n / grown[STORE]),
        }
        for way, found in verdicts.items()
    ]


def run(device: torch.device) -> Result:
    """Judge, time and count all ways; the baseline is our chain that stores, in float."""
    sizes = ON_CUDA if device.type == "cuda" else ON_CPU
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        # Peers call what torch deprecates; storages without data have an address, 0.
        warnings.simplefilter("ignore")
        for precision in NAMES:
            for kind in KINDS:
                rows += _chain_rows(kind, precision, device, sizes)
            rows += _encoder_rows(precision, device, sizes)
    memory = (
        f"allocator's peak at batch {sizes.counted_batch}"
        if device.type == "cuda"
        else f"live tensors counted without data at batch {sizes.counted_batch}, as "
        "many as where run"
    )
    return Result(
        "engine",
        "What do the ways of not storing activations cost, on equal residual functions?",
        f"{CHANNELS} channels in each half and {N_MELS} frequencies; time: median of "
        f"{sizes.repeats} interleaved steps of forward and backward pass at batch "
        f"{sizes.batch} and {sizes.frames} frames (encoder: batch {sizes.encoder_batch}, "
        f"{FRAMES} frames); memory at {FRAMES} frames: {memory}; chunks of {CHUNK} "
        f"channels; peers: {versions(PEERS)}, in torch's own layers, as torch checkpoint; "
        "in the encoder stem and transitions are checkpointed beside what is not ours, "
        "and peers are given float32",
        rows,
        f"float64: gradients and running statistics within {TOLERANCE:g} of plain "
        f"autograd's; bf16: at most {FACTOR} times as far from float32 as stored ones; "
        "also with dropout, with an input that needs no gradient or is bf16, and with an "
        f"output that is written to; exact streams: within {ROUNDED:g} of plain autograd, "
        "bits of stored ones; the rows list what others get wrong",
    )


def _chain_rows(
    kind: str, precision: str, device: torch.device, sizes: Sizes
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    scenarios = [
        (Chain(kind, FEW_BLOCKS), scenario)
        for scenario in SCENARIOS
        if PRECISIONS[precision].half or not scenario.half
    ]
    usual = {
        way: verdict(way, scenarios, PRECISIONS[precision], device) for way in WAYS
    }
    for depth in DEPTHS:
        plain = [(Chain(kind, depth), PLAIN)]
        verdicts = {
            way: found
            if _fails(found)
            else verdict(way, plain, PRECISIONS[precision], device) + found
            for way, found in usual.items()
        }
        rows += rows_of(chain(kind, depth), verdicts, precision, device, sizes)
        print(f"{kind} {depth} {precision}", flush=True)
    return rows


def _encoder_rows(
    precision: str, device: torch.device, sizes: Sizes
) -> list[dict[str, Any]]:
    plain = [(Encoder(ENCODER), PLAIN)]
    verdicts = {way: verdict(way, plain, PRECISIONS[precision], device) for way in WAYS}
    print(f"{ENCODER} {precision}", flush=True)
    return rows_of(encoder(ENCODER), verdicts, precision, device, sizes)


def _seconds(
    subject: Subject,
    ways: Sequence[Way],
    precision: Precision,
    device: torch.device,
    sizes: Sizes,
) -> dict[Way, dict[str, float]]:
    batch, frames = sizes.batch, sizes.frames
    if subject.name == ENCODER:
        batch, frames = sizes.encoder_batch, FRAMES
    with device:
        x = subject.input(batch, frames)
        networks = {way: subject.network(way) for way in ways}
    steps = {
        way: functools.partial(train_step, network, x, precision)
        for way, network in networks.items()
    }
    return interleaved_seconds(steps, device, repeats=sizes.repeats)


def _fails(found: Sequence[str]) -> bool:
    """Whether a way cannot even take a plain step."""
    return any(words.startswith(("raises", NOT_INSTALLED)) for words in found)


def _of(figures: dict[Way, Any], way: Way, show: Callable[[Any], Any]) -> Any:
    return show(figures[way]) if way in figures else None
