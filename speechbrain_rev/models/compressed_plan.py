"""Plans of a training that compress: tried on few utterances, then on the whole batch.

Features are noise and the weights those of the moment, so that sizes and errors are
those of the training's beginning. Few utterances tell how many bits a value takes and what
compression does to the gradient, which of more utterances is off by less; the whole batch
tells what the plan really takes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from speechbrain_rev.devices import described
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.memory import live_bytes_peak
from speechbrain_rev.memory.shapes import without_contents
from speechbrain_rev.models.training_step import TrainingStep
from speechbrain_rev.planner import Infeasible, Plan, Profile
from speechbrain_rev.planner.calling import trainable
from speechbrain_rev.planner.counting import profile_bytes
from speechbrain_rev.planner.probe import (
    CompressionProbe,
    checked_limit,
    without_optimizer,
)
from speechbrain_rev.planner.room import batch_that_fits, unless_memory_runs_out
from speechbrain_rev.planner.timing import measured_seconds
from speechbrain_rev.planner.views import Compressible
from speechbrain_rev.planner.within import held_to_limit
from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.norm import BatchNorm

#: How often a plan whose whole batch took more than the budget is made anew.
_TRIES = 4

# By what part of the room the next plan takes less if memory ran out.
_LESS_ROOM = 0.1

# Small gradients of a half are not lost.
_LOSS_SCALE = 1024.0

_REPEATS = 3


@dataclass(frozen=True)
class TrainingProbe:
    """What compression costs a training.

    Attributes
    ----------
    step : TrainingStep
        A step of the training.
    encoder : SpeakerEncoder
        A copy of its encoder.
    probe : CompressionProbe
        Of that copy.
    batch : int
        Utterances of the probe.
    bits : mapping of str to float
        By layer, what a value of its input takes.
    max_gradient_error : float
        What plans may have.
    """

    step: TrainingStep
    encoder: SpeakerEncoder
    probe: CompressionProbe
    batch: int
    bits: Mapping[str, float]
    max_gradient_error: float

    @classmethod
    def of(
        cls, step: TrainingStep, max_gradient_error: float, max_batch: int
    ) -> TrainingProbe:
        """Try what compression costs.

        Parameters
        ----------
        step : TrainingStep
            A step of the training.
        max_gradient_error : float
            What plans may have.
        max_batch : int
            Utterances that suffice. On a card as many are taken as fit.

        Raises
        ------
        ValueError
            If the limit is no number above 0, or gradients are not finite.
        MemoryError
            If not even one utterance fits the card, all stored, or memory ran out.
        """
        limit = checked_limit(max_gradient_error)

        def stored_bytes(count: int) -> int:
            with step.shapes() as device:
                own = without_contents(step.encoder, device)
                own.set_mode(Mode.STORE)
                some = replace(step, batch=count)
                return live_bytes_peak(some.run_without_contents(own, device))

        batch = batch_that_fits(stored_bytes, min(max_batch, step.batch), step.device)

        def tried() -> tuple[SpeakerEncoder, CompressionProbe]:
            own = _alone(step.encoder)
            return own, CompressionProbe(own, own, _run(step, own, batch))

        found = unless_memory_runs_out(tried)
        if found is None:
            raise MemoryError(
                f"Memory ran out on {step.device} while it was tried what compression "
                f"does to the gradient of {batch} utterances, all stored. End what else "
                "uses the card, or leave max_gradient_error out."
            )
        encoder, probe = found
        probe.gradient_error(dict.fromkeys(probe.squared_errors, Mode.COMPRESS.value))
        records = encoder.compression.records
        bits = {layer: record.bits for layer, record in records.items()}
        return cls(step, encoder, probe, batch, bits, limit)

    def compressible(self, encoder: SpeakerEncoder) -> Compressible:
        """Let the blocks of an encoder without contents compress as the probe's did."""
        encoder.compression.assumed_bits = dict(self.bits)
        return Compressible(encoder, self.probe.squared_errors.keys())

    @without_optimizer()
    def profile(self, channels: tuple[int | None, ...]) -> Profile:
        """Tell what each block costs in each mode, with some channels at a time."""
        step, device = self.step, self.step.device
        self.encoder.set_channels(channels)
        taken = measured_seconds(
            self.probe.network, self.probe.timed_step, device, repeats=_REPEATS
        )
        seconds = {key: s * step.batch / self.batch for key, s in taken.items()}
        about = {
            **step.about(),
            "seconds": f"measured on {described(device)}, at batch {self.batch}",
            "bytes": f"counted without contents, bits measured at batch {self.batch}",
            "gradient error": f"measured at batch {self.batch}, of noise",
        }
        with step.shapes() as no_contents:
            own = without_contents(step.encoder, no_contents)
            own.set_channels(channels)
            run = step.run_without_contents(own, no_contents)
            profile = profile_bytes(self.compressible(own), run, seconds, about)
        return profile.with_errors(self.probe.squared_errors, self.max_gradient_error)

    @without_optimizer()
    def held(
        self, profile: Profile, solve: Callable[[Profile, int], Plan], left: int
    ) -> Plan:
        """Make a plan whose error and whose bytes are within limits when it runs.

        Parameters
        ----------
        profile : Profile
            As ``profile`` made it.
        solve : callable
            Makes a plan of a profile, for a number of bytes.
        left : int
            What a step may allocate.

        Returns
        -------
        Plan
            Its ``measured_bytes`` are those of the whole batch, if it compresses.

        Raises
        ------
        Infeasible
            If no plan fits.
        """
        room, least = left, math.inf
        for _ in range(_TRIES):

            def in_room(profile: Profile, room: int = room) -> Plan:
                return solve(profile, room)

            try:
                plan = held_to_limit(profile, in_room, self.probe.gradient_error)
            except Infeasible:
                break
            if Mode.COMPRESS.value not in plan.modes.values():
                # Which was made for less room than a lossless plan has.
                break
            peak = self._peak_bytes(plan)
            if peak is not None and peak <= left:
                return replace(plan, measured_bytes=peak, budget_bytes=left)
            least = min(least, math.inf if peak is None else peak)
            room -= int(_LESS_ROOM * left) if peak is None else peak - left
        try:
            return solve(replace(profile, max_gradient_error=0.0), left)
        except Infeasible as error:
            needed_bytes = int(min(least, error.needed_bytes))
            raise Infeasible(needed_bytes, left, error.remedy) from None

    def _peak_bytes(self, plan: Plan) -> int | None:
        """Run the whole batch; None if memory ran out."""

        def peak() -> int:
            encoder = _alone(self.step.encoder)
            plan.apply(encoder)
            return live_bytes_peak(_run(self.step, encoder, self.step.batch))

        return unless_memory_runs_out(peak)


def _alone(encoder: SpeakerEncoder) -> SpeakerEncoder:
    """Copy an encoder for this process to run alone, while others wait for it."""
    own = copy.deepcopy(encoder)
    for norm in own.modules():
        if isinstance(norm, BatchNorm):
            norm.sync = False
    return own


def _run(step: TrainingStep, encoder: SpeakerEncoder, batch: int) -> Callable[[], None]:
    """Make a step of a copy of the encoder, with classifier and loss, of noise."""
    trainable(encoder)
    classifier = trainable(copy.deepcopy(step.classifier))
    feats = step.noise(batch)
    classes = torch.zeros(batch, 1, dtype=torch.long, device=step.device)
    scale = _LOSS_SCALE if step.precision == "fp16" else 1.0

    def run() -> None:
        with step.autocast(step.device.type):
            loss = step.loss(classifier(encoder(feats)), classes)
        (scale * loss).backward()

    return run
