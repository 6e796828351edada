"""Ways of training a deep encoder, and the check that they compute the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog import counted_peaks
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.planner.step import CPUFakes

from .gradients import TOLERANCE
from .harness import NotEqual
from .precisions import PRECISIONS

BATCH, PARTS = 128, 4
#: Bytes of the streams' checksums, which are counted, and not taken where it is timed.
CHECKSUMS = 64


@dataclass(frozen=True)
class Way:
    """One way of training an encoder.

    ``torch_checkpoint`` puts each block into torch's checkpoint; ``parts`` are those of
    a batch whose gradients are added up.
    """

    name: str
    mode: str = "store"
    streams: str = "float"
    precision: str = "float32"
    torch_checkpoint: bool = False
    parts: int = 1
    chunk: str | None = "auto"

    @property
    def stored(self) -> Way:
        """The way that stores and else computes the same."""
        # Bits are compared where streams are exact; else gradients, within a tolerance.
        chunk = self.chunk if self.streams == "exact" else None
        return dataclasses.replace(
            self, mode="store", torch_checkpoint=False, chunk=chunk
        )


#: Not in chunks, which make a step slower and of what is stored save nothing.
STORE = Way("store", chunk=None)
PLAIN = (
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

Case = tuple[str, Way]


class Checkpointed(nn.Module):
    """A block of a vanilla encoder, of which torch keeps the input."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, masks: Any, given: Tensor) -> Any:
        """Run the block, and again in the backward pass."""
        return checkpoint(self.unit, masks, given, use_reentrant=False)


def ways_of(name: str) -> tuple[Way, ...]:
    """List the ways that an encoder can be trained in."""
    return REVERSIBLE if architecture(name).reversible else PLAIN


def encoder_by(way: Way, name: str, **row: Any) -> SpeakerEncoder:
    """Build an encoder as it trains in a way, but for the check of every 100th step."""
    torch.manual_seed(0)
    encoder = build_encoder(
        name,
        mode=way.mode,
        streams=way.streams,
        chunk=way.chunk,
        verify=None,
        **row,
    )
    if way.torch_checkpoint:
        encoder.stem = Checkpointed(encoder.stem)
        for stage in encoder.stages:
            if stage.entry is not None:
                stage.entry = Checkpointed(stage.entry)
            stage.blocks = nn.ModuleList(map(Checkpointed, stage.blocks))
    for p in encoder.parameters():
        p.grad = torch.zeros_like(p)
    return encoder


def train_step(encoder: nn.Module, feats: Tensor, way: Way) -> None:
    """Forward and backward pass of a batch, in one or several parts."""
    for part in feats.chunk(way.parts):
        _loss(encoder, part, way).backward()


def _loss(encoder: nn.Module, feats: Tensor, way: Way) -> Tensor:
    precision = PRECISIONS[way.precision]
    # There is no autocast on meta, not even a disabled one.
    half = precision.half is not None
    with precision.autocast(feats.device) if half else contextlib.nullcontext():
        y = encoder(feats)
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().sum()


def step_bytes(
    way: Way,
    name: str,
    *,
    batch: int,
    frames: int,
    without_data: bool = True,
    **row: Any,
) -> int:
    """Count the peak of a step above weights, their gradients and the input."""
    where: Any = contextlib.nullcontext()
    if without_data:
        # Tensors on meta are the quicker ones, but autocast passes them by.
        fakes = way.precision != "float32" or way.torch_checkpoint
        where = CPUFakes() if fakes else torch.device("meta")
    with where, warnings.catch_warnings():
        # Storages without data have an address, 0, whose use is frowned upon.
        warnings.filterwarnings("ignore", "Accessing the data pointer")
        encoder = encoder_by(way, name, **row)
        feats = torch.randn(batch, frames, encoder.n_mels)
        return live_bytes_peak(functools.partial(train_step, encoder, feats, way))


@dataclass(frozen=True)
class Left:
    """What a step leaves behind: gradients, and how often statistics were updated."""

    gradients: Tensor
    updates: int


def small_step(way: Way, name: str, device: torch.device) -> Left:
    """Take a step of a small encoder, in float64 where nothing is in half precision."""
    encoder = encoder_by(way, name, **FEW_BLOCKS)
    dtype = torch.float64 if way.precision == "float32" else torch.float32
    encoder.to(device, dtype)
    torch.manual_seed(1)
    feats = torch.randn(2 * PARTS, 40, encoder.n_mels).to(device, dtype)
    train_step(encoder, feats, way)
    grads = [p.grad.flatten() for p in encoder.parameters()]
    counts = [int(b) for b in encoder.buffers() if not b.is_floating_point()]
    return Left(torch.cat(grads), max(counts))


def distance(got: Tensor, want: Tensor) -> float:
    """Tell the relative distance."""
    return float((got - want).norm() / want.norm())


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
            got, want = step(way, name), step(way.stored, name).gradients
            updates[name, way] = got.updates
            off = distance(got.gradients, want)
            allowed = TOLERANCE
            if way.streams == "exact":
                allowed = 0.0
            elif way.precision != "float32":
                wide = dataclasses.replace(way.stored, precision="float32")
                # What bf16 itself is off by.
                allowed = distance(want, step(wide, name).gradients.float())
            else:
                worst = max(worst, off)
            if not off <= allowed:
                raise NotEqual(
                    f"Gradients of {name}, {way.name}, are {off:.1e} from stored ones; "
                    f"allowed is {allowed:.1e}."
                )
            if way.parts > 1:
                whole = step(STORE, name).gradients
                apart = max(apart, distance(got.gradients, whole))
    return updates, worst, apart


def check_counts() -> None:
    """Run steps of few blocks on the CPU: they hold what is counted without data.

    Raises
    ------
    NotEqual
        If they do not.
    """
    for name in NAMES:
        for way in ways_of(name):
            counted, real = (
                step_bytes(
                    way,
                    name,
                    batch=2 * PARTS,
                    frames=40,
                    without_data=without_data,
                    blocks=(1, 2, 1, 1),
                )
                for without_data in (True, False)
            )
            if counted != real:
                raise NotEqual(
                    f"{name}, {way.name}, of few blocks holds {real} bytes, but {counted} "
                    "were counted without data."
                )


def check_committed(way: Way, name: str, frames: int, step: int) -> None:
    """Compare with the counts that ``speechbrain-rev models`` reads.

    Raises
    ------
    NotEqual
        If they are others.
    """
    usual = "exact" if architecture(name).reversible else "float"
    plain = way.precision == "float32" and not way.torch_checkpoint and way.parts == 1
    if way.streams != usual or not plain:
        return
    committed = counted_peaks()[name, way.mode, frames](BATCH)
    if not 0 <= committed - step <= CHECKSUMS:
        raise NotEqual(
            f"{name}, {way.name}, at {frames} frames holds {step} bytes, but the counts in "
            f"speechbrain_rev/catalog say {committed}: write them again, see counts.py."
        )
