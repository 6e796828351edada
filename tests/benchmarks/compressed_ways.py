"""Ways of holding less of a trained encoder's activations, and a step in each of them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    GradientBound,
    RangeBound,
)
from speechbrain_rev.compression.bounds import FixedBound, Rule
from speechbrain_rev.compression.layers import Kind
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.planner.memory import LiveBytes

from .compressed_checks import real_speech
from .compressed_training import N_MELS, state_of
from .compressed_training import Setting as TrainingSetting
from .harness import NotEqual
from .precisions import PRECISIONS
from .speech import Speech, Training
from .user_ways import Way, encoder_by

#: Below the precision of any activation: these are kept as they are.
AS_IT_IS = FixedBound(1e-30)
TARGET, RATE = TrainingSetting.target, TrainingSetting.rate

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """An encoder in one way, and how it is compressed.

    Attributes
    ----------
    modes : tuple of str
        Blocks of a stage have these in turn.
    convolutions : Rule or "derived"
        Bounds of convolutions' inputs; "derived" follows the optimizer.
    """

    name: str
    way: Way
    modes: tuple[str, ...] = ()
    convolutions: Rule | str | None = None
    normalisations: Rule | None = None

    @property
    def compresses(self) -> bool:
        """Whether anything is compressed."""
        return "compress" in self.modes


def plain(name: str) -> Case:
    """Store everything: the baseline."""
    return Case(name, Way("plain", chunk=None))


def compressed(
    name: str,
    words: str,
    convolutions: Rule | str | None,
    normalisations: Rule | None,
    modes: tuple[str, ...] = ("compress",),
) -> Case:
    """Compress both kinds of layers' inputs."""
    way = Way(words, chunk=None)
    return Case(name, way, modes, convolutions, normalisations)


def cases_of(name: str, counterparts: tuple[str, ...]) -> list[Case]:
    """List what is compared; the first is the baseline."""
    ways = [
        plain(name),
        Case(name, Way("torch checkpoint", torch_checkpoint=True, chunk=None)),
        Case(name, Way("bf16", precision="bf16", chunk=None)),
    ]
    for words, fraction in (("1e-3", 1e-3), ("1e-2", 1e-2)):
        rule = RangeBound(fraction)
        ways.append(compressed(name, f"compressed, {words} of range", rule, rule))
    # The first block of a stage holds most, having a shortcut.
    both = ("recompute", "compress")
    ways += [
        compressed(name, "compressed, recipe's bounds", "derived", None),
        compressed(
            name,
            "compressed, recipe's bounds, deviation 1e-2",
            "derived",
            DeviationBound(1e-2),
        ),
        compressed(
            name, "compressed, every 2nd block recomputed", "derived", None, both
        ),
    ]
    rebuilt = Way("reconstruct, exact", "reconstruct", "exact")
    return ways + [Case(other, rebuilt) for other in counterparts]


@dataclass
class Trained:
    """A trained encoder's state, and the batch that all is measured with.

    Attributes
    ----------
    name : str
        The encoder.
    state : mapping
        As ``compressed_training.state_of`` gives it.
    speech : Speech
        Of the length that is measured.
    batch : tuple of torch.Tensor
        Features, [batch, time, n_mels], and speakers, [batch, 1].
    """

    name: str
    state: Mapping[str, Any]
    speech: Speech
    batch: Batch
    row: Mapping[str, Any] = field(default_factory=dict)

    def build(self, case: Case) -> Training:
        """Build an encoder in a way, and with it what trains it, at these weights.

        Counterparts have weights of their own, as they are at first.
        """
        encoder = encoder_by(case.way, case.name, **self.row)
        training = training_of(encoder, case.name, self.speech, len(self.batch[0]))
        training.precision = PRECISIONS[case.way.precision]
        training.classifier.load_state_dict(self.state["classifier"])
        if case.name == self.name:
            # Wrappers of checkpoints change names, not the order.
            names = encoder.state_dict()
            values = self.state["encoder"].values()
            encoder.load_state_dict(dict(zip(names, values, strict=True)))
        if case.compresses:
            modes = case.modes
            encoder.set_mode(
                {
                    name: modes[_place(name) % len(modes)]
                    for name in encoder.block_modes()
                }
            )
            convolutions = case.convolutions
            if convolutions == "derived":
                convolutions = self.derived.encoder.compression.rules[Kind.CONVOLUTION]
            encoder.compression = ActivationCompression(
                convolutions=convolutions, normalisations=case.normalisations
            )
        return training

    @functools.cached_property
    def derived(self) -> Training:
        """Compress with derived bounds, of which others take theirs."""
        training = self.build(compressed(self.name, "derived", None, None))
        self.followed(training, GradientBound(TARGET, every=1))
        return training

    def followed(self, training: Training, bound: GradientBound) -> GradientBound:
        """Let bounds be made of the state's momentum and the batch's gradients."""
        training.optimizer.load_state_dict(self.state["optimizer"])
        bound.load_state_dict({"steps": self.state["steps"], "bounds": {}})
        bound.follow(training.optimizer)
        encoder = training.encoder
        encoder.compression = ActivationCompression(
            convolutions=bound, normalisations=AS_IT_IS
        )
        # No step changes a weight. After the first it is known when to look.
        training.lr = 0.0
        for _ in range(2):
            training.step(self.batch)
        if not bound.bounds:
            raise NotEqual(f"No bound was made for {self.name} from its gradients.")
        bound.every = 10**9
        return bound


def _place(block: str) -> int:
    """Number a block within its stage; what stands before the stages counts as second."""
    last = block.split(".")[-1]
    return int(last) if last.isdigit() else 1


def training_of(
    encoder: SpeakerEncoder, name: str, speech: Speech, batch: int
) -> Training:
    """Give an encoder the loss and optimizer of ``compressed_training``."""
    return Training(
        encoder, name, speech, PRECISIONS["float32"], rate=RATE, batch=batch
    )


def state_after(
    name: str, speech: Speech, *, steps: int, batch: int, **row: Any
) -> dict[str, Any]:
    """Train an encoder for some steps."""
    training = training_of(
        encoder_by(plain(name).way, name, **row), name, speech, batch
    )
    for i in range(steps):
        loss = training.step(training.next_batch())
        if i % 10 == 9:
            print(f"{name} step {i + 1}: {loss:.3f}", flush=True)
    return state_of(training)


def read_state(file: Path) -> dict[str, Any]:
    """Read the state that a run left.

    Raises
    ------
    NotEqual
        If there is none.
    """
    if not file.exists():
        raise NotEqual(
            f"There is no trained state {file}: run --only compressed_training first."
        )
    return torch.load(file, weights_only=True)


def trained(
    name: str,
    *,
    batch: int,
    frames: int,
    state: Path | None = None,
    steps: int = 0,
    step_frames: int = 64,
    **row: Any,
) -> Trained:
    """Take a state of a file, or train for some steps, and draw a batch."""
    speech = real_speech(N_MELS, frames)
    if state is None:
        short = real_speech(N_MELS, step_frames)
        found = state_after(name, short, steps=steps, batch=batch, **row)
    else:
        found = read_state(state)
    drawn = speech.batch(batch, torch.Generator().manual_seed(1000))
    return Trained(name, found, speech, drawn, row)


@dataclass(frozen=True)
class Step:
    """What a step held, reached and left."""

    held_bytes: int
    peak_bytes: int
    gradients: Tensor


def loss_of(training: Training, batch: Batch) -> Tensor:
    """Compute the loss of a batch."""
    feats, speakers = batch
    with training.precision.autocast(training.device):
        return training.loss(training.classifier(training.encoder(feats)), speakers)


def take_step(training: Training, batch: Batch) -> None:
    """Forward and backward pass."""
    loss_of(training, batch).backward()


def measured(training: Training, batch: Batch) -> Step:
    """Count a step's bytes beyond weights and gradients, and take its gradients."""
    parameters = list(training.encoder.parameters())
    for p in (*parameters, *training.classifier.parameters()):
        p.grad = torch.zeros_like(p)
    with LiveBytes() as meter:
        loss = loss_of(training, batch)
        held = meter.live
        loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in parameters])
    return Step(held, meter.peak, gradients)


def ratio_of(training: Training, layers: Collection[str] | None = None) -> float:
    """Tell how many times smaller inputs of layers became, of all or of some."""
    records = training.encoder.compression.records.items()
    found = [record for name, record in records if layers is None or name in layers]
    return sum(r.original_bytes for r in found) / sum(r.kept_bytes for r in found)
