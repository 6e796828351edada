"""Ways of holding less of a trained encoder's activations, steps in each, and their check."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.compression import (
    ActivationCompression,
    Compressed,
    DeviationBound,
    Form,
    GradientBound,
    RangeBound,
    decode,
)
from speechbrain_rev.compression.bounds import FixedBound, Rule
from speechbrain_rev.compression.layers import Kind
from speechbrain_rev.lobes import SpeakerEncoder

from .harness import require
from .speech import Batch, Speech, Training, real_speech
from .steps import PRECISIONS, Way, encoder_by

N_MELS = 80
#: Below the precision of any activation: these are kept as they are.
AS_IT_IS = FixedBound(1e-30)
#: Of convolutions' bounds: the weight gradient's error as a part of its momentum.
TARGET = 0.01
#: Times the recipe's rate, at first: a learning rate of 0.005. Larger ones end further
#: apart for a last bit alone: 0.025 half a percent.
RATE = 0.0125
#: What ``compressed_training`` leaves for what is measured of a trained encoder.
STATE = Path("results/compressed_training/stored_1.pt")


class Audited(ActivationCompression):
    """Compression that decodes at once what it encodes, and compares.

    Attributes
    ----------
    tensors : int
        How many tensors were compared.
    largest : float
        The largest error, as a part of its tensor's bound.
    """

    tensors = 0
    largest = 0.0

    def note(self, layer: str, x: Tensor, compressed: Compressed) -> None:
        """Keep a record, and refuse an error above the bound or another sign."""
        super().note(layer, x, compressed)
        if compressed.form is not Form.RAW:
            self.largest = max(self.largest, checked_error(layer, x, compressed))
            self.tensors += 1


@contextlib.contextmanager
def audited(encoder: SpeakerEncoder) -> Iterator[Audited]:
    """Compare what an encoder compresses here, by the rules it has.

    Raises
    ------
    NotEqual
        If an error is above its bound, a zero or sign is lost, or nothing is compressed.
    """
    own = encoder.compression
    audit = encoder.compression = Audited(
        convolutions=own.rules[Kind.CONVOLUTION],
        normalisations=own.rules[Kind.NORMALISATION],
    )
    try:
        yield audit
    finally:
        encoder.compression = own
    require(audit.tensors > 0, "Nothing was compressed.")


def checked_error(layer: str, x: Tensor, compressed: Compressed) -> float:
    """Compare a tensor with what was kept of it: the largest error over the bound."""
    kept, x = decode(compressed), x.detach()
    bound = float(compressed.error_bound)
    largest = float((kept.double() - x.double()).abs().max()) / bound
    require(largest <= 1, f"An input of {layer} is off by {largest:.4f} of its bound.")
    require(
        torch.equal(kept.sign(), x.sign()),
        f"An input of {layer} has other zeros or signs when decoded.",
    )
    return largest


@dataclass(frozen=True)
class Case:
    """An encoder in one way, and how it is compressed.

    Attributes
    ----------
    modes : tuple of str
        Blocks of a stage have these in turn; none where nothing is compressed.
    convolutions : Rule or "derived"
        Bounds of convolutions' inputs; "derived" follows the optimizer.
    """

    name: str
    way: Way
    modes: tuple[str, ...] = ()
    convolutions: Rule | str | None = "derived"
    normalisations: Rule | None = None


def stored(name: str) -> Case:
    """Store everything: the baseline."""
    return Case(name, Way("stored", chunk=None))


def compressed(name: str, words: str, *rules: Any, recompute: bool = False) -> Case:
    """Compress both kinds of layers' inputs, by the recipe's rules or others."""
    # The first block of a stage holds most, having a shortcut.
    modes = ("recompute", "compress") if recompute else ("compress",)
    return Case(name, Way(f"compressed, {words}", chunk=None), modes, *rules)


def cases_of(name: str, counterparts: tuple[str, ...]) -> list[Case]:
    """List what is compared; the first is the baseline."""
    range_bounds = {"1e-3": RangeBound(1e-3), "1e-2": RangeBound(1e-2)}
    finer = DeviationBound(1e-2)
    rebuilt = Way("reconstruct, exact", "reconstruct", "exact")
    return [
        stored(name),
        Case(name, Way("torch checkpoint", torch_checkpoint=True, chunk=None)),
        Case(name, Way("bf16", precision="bf16", chunk=None)),
        *(
            compressed(name, f"{words} of range", rule, rule)
            for words, rule in range_bounds.items()
        ),
        compressed(name, "recipe's bounds"),
        compressed(name, "recipe's bounds, deviation 1e-2", "derived", finer),
        compressed(name, "every 2nd block recomputed", recompute=True),
        *(Case(other, rebuilt) for other in counterparts),
    ]


def training_of(
    way: Way, name: str, speech: Speech, batch: int, *, seed: int = 0, **row: Any
) -> Training:
    """Build an encoder in a way, and what trains it; those of a seed begin alike."""
    encoder = encoder_by(way, name, seed=seed, **row)
    precision = PRECISIONS[way.precision]
    return Training(encoder, name, speech, precision, rate=RATE, batch=batch, seed=seed)


@dataclass
class Trained:
    """A trained encoder's state, and the batch that all is measured with.

    Attributes
    ----------
    name : str
        The encoder.
    state : mapping
        As ``Training.state`` gives it.
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
        size = len(self.batch[0])
        training = training_of(case.way, case.name, self.speech, size, **self.row)
        training.classifier.load_state_dict(self.state["classifier"])
        encoder = training.encoder
        if case.name == self.name:
            # Wrappers of checkpoints change names, not the order.
            values = self.state["encoder"].values()
            named = zip(encoder.state_dict(), values, strict=True)
            encoder.load_state_dict(dict(named))
        if case.modes:
            encoder.set_mode(
                {
                    block: case.modes[_place(block) % len(case.modes)]
                    for block in encoder.block_modes()
                }
            )
            derived = case.convolutions == "derived"
            encoder.compression = ActivationCompression(
                convolutions=self.derived[1] if derived else case.convolutions,
                normalisations=case.normalisations,
            )
        return training

    @functools.cached_property
    def derived(self) -> tuple[Training, GradientBound]:
        """The recipe's bounds of convolutions here, and the run whose optimizer they follow."""
        training = self.build(compressed(self.name, "derived", AS_IT_IS))
        return training, self.followed(training, GradientBound(TARGET, every=1))

    def followed(self, training: Training, bound: GradientBound) -> GradientBound:
        """Let bounds be made of the state's momentum and the batch's gradients."""
        training.optimizer.load_state_dict(self.state["optimizer"])
        follow(training, bound, self.state["steps"], normalisations=AS_IT_IS)
        # No step changes a weight. After the first it is known when to look.
        training.lr = 0.0
        for _ in range(2):
            training.step(self.batch)
        require(bool(bound.bounds), f"No bound was made for {self.name}.")
        bound.every = 10**9
        return bound


def follow(
    training: Training, bound: GradientBound, steps: int = 0, **rules: Rule
) -> None:
    """Let convolutions be compressed by what the optimizer has after some steps."""
    bound.load_state_dict(bound.state_dict() | {"steps": steps, "bounds": {}})
    bound.follow(training.optimizer)
    training.encoder.compression = ActivationCompression(convolutions=bound, **rules)


def _place(block: str) -> int:
    """Number a block within its stage; what stands before the stages counts as second."""
    last = block.split(".")[-1]
    return int(last) if last.isdigit() else 1


def read_state(file: Path) -> dict[str, Any]:
    """Read the state that a run left.

    Raises
    ------
    NotEqual
        If there is none.
    """
    require(
        file.exists(),
        f"There is no trained state {file}: run --only compressed_training first.",
    )
    return torch.load(file, weights_only=True)


def trained(
    name: str,
    *,
    batch: int,
    frames: int,
    state: Path | None = None,
    steps: int = 0,
    row: Mapping[str, Any],
) -> Trained:
    """Take a state of a file, or train for some steps, and draw a batch."""
    speech = real_speech(N_MELS, frames)
    if state is None:
        short = real_speech(N_MELS, 64)
        training = training_of(stored(name).way, name, short, batch, **row)
        training.run(steps, name)
        left = training.state()
    else:
        left = read_state(state)
    drawn = speech.batch(batch, torch.Generator().manual_seed(1000))
    return Trained(name, left, speech, drawn, row)


def check_audit(training: Training) -> None:
    """Take a step of two utterances whose compressed tensors are all decoded."""
    feats, speakers = training.next_batch()
    with audited(training.encoder):
        training.loss_of((feats[:2], speakers[:2])).backward()


def ratio_of(training: Training, layers: Mapping[str, Any] | None = None) -> float:
    """Tell how many times smaller inputs of layers became, of all or of some."""
    records = [
        record
        for name, record in training.encoder.compression.records.items()
        if layers is None or name in layers
    ]
    return sum(r.original_bytes for r in records) / sum(r.kept_bytes for r in records)
