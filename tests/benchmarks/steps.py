"""Training steps of an encoder in several ways: built, taken, counted and compared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.planner.step import cpu_fakes

from .harness import (
    CPU,
    Spread,
    distance,
    interleaved_seconds,
    peak_bytes,
    require,
)
from .peers import in_plain_layers

#: Of a training step, bound to its encoder, features and way.
Step = functools.partial[None]

FRAMES = 200
#: float64 rounding through a small network; an error of the method shows at 1e-3.
TOLERANCE = 1e-9
#: Bytes that reversible encoders work on at a time in checks: less than they have.
_CHUNK = 60_000


@dataclass(frozen=True)
class Setting:
    """Which encoders at which batches, of which size, and how often a step is timed."""

    batches: Mapping[str, int]
    frames: int = 200
    repeats: int = 5
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Precision:
    """The type that autocast computes in, or None for float32."""

    half: torch.dtype | None = None

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Compute in this precision."""
        # There is no autocast on meta, not even a disabled one.
        if self.half is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.half)


PRECISIONS = {
    "float32": Precision(),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}


@dataclass(frozen=True)
class Way:
    """One way of training an encoder.

    ``torch_checkpoint`` puts each block into torch's checkpoint; ``parts`` are those of
    a batch whose gradients are added up; ``plain`` has none of this package's layers, and
    so no mode. ``deterministic`` is for torch's cuDNN and the encoder alike;
    None leaves both as they are.
    """

    name: str
    mode: str = "store"
    streams: str = "float"
    precision: str = "float32"
    torch_checkpoint: bool = False
    parts: int = 1
    plain: bool = False
    chunk: int | str | None = "auto"
    memory_format: str = "contiguous"
    deterministic: bool | None = None

    @property
    def stored(self) -> Way:
        """The way that stores and else computes the same."""
        # Bits are compared where streams are exact; else gradients, within a tolerance.
        chunk = self.chunk if self.streams == "exact" else None
        return dataclasses.replace(
            self, mode="store", torch_checkpoint=False, plain=False, chunk=chunk
        )


#: An encoder, and how it trains.
Case = tuple[str, Way]


class Checkpointed(nn.Module):
    """A block of a vanilla encoder, of which torch keeps the input."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, masks: Any, given: Tensor) -> Any:
        """Run the block, and again in the backward pass."""
        return checkpoint(self.unit, masks, given, use_reentrant=False)


def encoder_by(way: Way, name: str, *, seed: int = 0, **row: Any) -> Any:
    """Build an encoder as it trains in a way, but for the check of every 100th step."""
    torch.manual_seed(seed)
    if way.plain:
        encoder: Any = in_plain_layers(build_encoder(name, **row))
    else:
        encoder = _ours(way, name, **row)
    for p in encoder.parameters():
        p.grad = torch.zeros_like(p)
    return encoder


def _ours(way: Way, name: str, **row: Any) -> SpeakerEncoder:
    encoder = build_encoder(
        name,
        mode=way.mode,
        streams=way.streams,
        chunk=way.chunk,
        memory_format=way.memory_format,
        verify=None,
        deterministic=way.deterministic is not False,
        **row,
    )
    if way.torch_checkpoint:
        encoder.stem = Checkpointed(encoder.stem)
        for stage in encoder.stages:
            if stage.entry is not None:
                stage.entry = Checkpointed(stage.entry)
            stage.blocks = nn.ModuleList(map(Checkpointed, stage.blocks))
    return encoder


def train_step(encoder: nn.Module, feats: Tensor, way: Way) -> None:
    """Forward and backward pass of a batch, in one or several parts."""
    cudnn = torch.backends.cudnn
    before = {name: getattr(cudnn, name) for name in ("benchmark", "deterministic")}
    try:
        if way.deterministic is not None:
            cudnn.deterministic = way.deterministic
            cudnn.benchmark = not way.deterministic
        for part in feats.chunk(way.parts):
            _loss(encoder, part, way).backward()
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)


def _loss(encoder: nn.Module, feats: Tensor, way: Way) -> Tensor:
    # Nobody but autograd has the embeddings in the backward pass.
    with PRECISIONS[way.precision].autocast(feats.device):
        y = encoder(feats)
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().sum()


def timed(
    cases: Iterable[Case],
    device: torch.device,
    *,
    batch: int,
    frames: int = FRAMES,
    repeats: int,
    check: Callable[[Mapping[Case, Step]], None] | None = None,
    **row: Any,
) -> dict[Case, Spread]:
    """Time steps of encoders in their ways, in turn; a check may take them first."""
    with device:
        feats = torch.randn(batch, frames, 80)
        steps = {
            (name, way): functools.partial(
                train_step, encoder_by(way, name, **row), feats, way
            )
            for name, way in cases
        }
    if check is not None:
        check(steps)
    return interleaved_seconds(steps, device, repeats=repeats)


def way_bytes(
    way: Way,
    name: str,
    *,
    batch: int,
    frames: int = FRAMES,
    device: torch.device = CPU,
    without_data: bool = True,
    **row: Any,
) -> int:
    """Count the peak of a step above weights, their gradients and the input."""
    where: Any = device
    if without_data:
        # Tensors on meta are the quicker ones, but know no autocast and no layout.
        last = way.memory_format != "contiguous"
        fakes = PRECISIONS[way.precision].half or way.torch_checkpoint or last
        where = cpu_fakes() if fakes else torch.device("meta")
    with where:
        encoder = encoder_by(way, name, **row)
        feats = torch.randn(batch, frames, encoder.n_mels)
        return peak_bytes(functools.partial(train_step, encoder, feats, way), device)


def batches_on(device: torch.device) -> tuple[int, int]:
    """Two batches, so large that weight gradients do not matter where nothing is run."""
    return (32, 64) if device.type == "cuda" else (128, 256)


def bytes_per_utterance(
    way: Way, name: str, device: torch.device, *, frames: int = FRAMES
) -> float:
    """Slope between two batch sizes, so that what does not grow drops out."""
    few, many = batches_on(device)
    real = {"device": device, "without_data": device.type != "cuda", "frames": frames}
    taken = way_bytes(way, name, batch=many, **real)
    return (taken - way_bytes(way, name, batch=few, **real)) / (many - few)


def check_counts(
    name: str, ways: Iterable[Way], *, batch: int = 2, **size: Any
) -> None:
    """Take steps that really run on the CPU: the same bytes as without data.

    Raises
    ------
    NotEqual
        If they hold others.
    """
    for way in ways:
        counted, real = (
            way_bytes(way, name, batch=batch, without_data=without, **size)
            for without in (True, False)
        )
        require(
            counted == real,
            f"{name}, {way}, holds {real} bytes, but {counted} were counted without data.",
        )


def check_modes(name: str, modes: Iterable[str], device: torch.device) -> float:
    """Compare the gradients of memory modes with stored ones, in float64.

    Returns
    -------
    float
        The largest relative distance.

    Raises
    ------
    NotEqual
        If it is more than rounding.
    """
    gradients = {}
    for mode in ("store", *modes):
        chunk = _CHUNK if ARCHITECTURES[name].reversible else None
        exact = "exact" if ARCHITECTURES[name].reversible else "float"
        way = Way(mode, mode, exact, chunk=chunk)
        encoder = encoder_by(way, name, widths=(8, 16, 16, 24), blocks=(1, 2, 2, 1))
        encoder.to(device, torch.float64)
        torch.manual_seed(1)
        feats = torch.randn(2, 40, 80, dtype=torch.float64).to(device)
        train_step(encoder, feats, way)
        gradients[mode] = [p.grad for p in encoder.parameters()]
    stored = gradients.pop("store")
    worst = max(distance(grads, stored) for grads in gradients.values())
    require(
        worst <= TOLERANCE,
        f"Gradients of {name} in modes {modes} differ from stored ones by {worst:.1e}.",
    )
    return worst
