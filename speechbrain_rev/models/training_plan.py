"""A plan for a training of the recipe: what a memory budget leaves for activations.

The budget is for all that the training process holds of a card. What stays from step to
step is counted on encoder, classifier and optimizer themselves; the rest is what a step
may make, within which ``planner`` chooses modes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.memory.report import breakdown
from speechbrain_rev.memory.shapes import cpu_fakes, without_contents
from speechbrain_rev.models.card import (
    INPUT_BYTES_PER_FRAME,
    RESERVE_BYTES,
    RESERVE_SHARE,
)
from speechbrain_rev.models.profiling import (
    Channels,
    fastest_channels,
    hardware,
    shallow,
    shallow_blocks,
)
from speechbrain_rev.planner import Infeasible, Plan, Profile
from speechbrain_rev.planner.calling import trainable
from speechbrain_rev.planner.plan import plan_within
from speechbrain_rev.planner.profile import profile_bytes
from speechbrain_rev.planner.saved import saved_profile
from speechbrain_rev.planner.timing import measured_seconds
from speechbrain_rev.sizes import GB, GIB, MIB

#: Utterances of the steps whose time is taken, at most, elsewhere and on a card, which
#: few do not keep busy.
_TIMED, _TIMED_ON_CUDA = 4, 32

_UNITS = {"gb": GB, "gib": GIB, "mb": 10**6, "mib": MIB}


def parse_budget(text: str) -> int:
    """Read a memory budget.

    Parameters
    ----------
    text : str
        As 11GB (1e9 bytes), 10.5GiB (2**30 bytes), 800MB or 800MiB. What is sold as a
        card of 11GB has 11GiB.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        If it is no size above zero with a unit.

    Examples
    --------
    >>> parse_budget("11GB"), parse_budget("10 GiB")
    (11000000000, 10737418240)
    """
    match = re.fullmatch(
        r"(\d{1,6}(?:\.\d{1,6})?) ?([gm]i?b)", text.strip(), re.ASCII | re.I
    )
    size = math.floor(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ValueError(
            "memory_budget takes a size as 11GB (1e9 bytes each), 11GiB (2**30, what a "
            f"card that is sold as 11GB has) or 800MB, or auto, not {text}."
        )
    return size


@dataclass(frozen=True)
class TrainingStep:
    """A training step of the recipe.

    Attributes
    ----------
    encoder, classifier, loss : nn.Module
        What is trained, and the loss of the classifier's cosines.
    make_optimizer : callable
        Makes the optimizer of parameters.
    batch, frames : int
        Utterances of a step of one process, and frames of each.
    precision : str
        fp32, bf16 or fp16.
    device : torch.device
        Where it will run.
    searches_chunk : bool
        Whether the chunk is chosen too; False keeps what the encoder was built with.
    """

    encoder: SpeakerEncoder
    classifier: nn.Module
    loss: nn.Module
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: int
    frames: int
    precision: str
    device: torch.device
    searches_chunk: bool = False

    def about(self) -> dict[str, str]:
        """Say what a plan for this step is for."""
        encoder = self.encoder
        return {
            "encoder": encoder.architecture.name,
            "blocks": str(len(encoder.named_blocks())),
            "batch": str(self.batch),
            "frames": str(self.frames),
            "precision": self.precision,
            "chunk": "chosen" if self.searches_chunk else str(encoder.channels),
            "device": device_name(self.device),
        }


def device_name(device: torch.device) -> str:
    """Name a card, or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def free_bytes(device: torch.device) -> int:
    """Tell what is free on a card.

    Raises
    ------
    ValueError
        If it is no card.
    """
    if device.type != "cuda":
        raise ValueError(
            "memory_budget: auto asks a card for its free memory, and this training "
            f"runs on {device.type}. Give a size, as 11GB."
        )
    return torch.cuda.mem_get_info(device)[0]


def plan_training(step: TrainingStep, budget_bytes: int) -> Plan:
    """Choose what the encoder's blocks keep.

    Parameters
    ----------
    step : TrainingStep
        A step of the training.
    budget_bytes : int
        What the process may hold of the card's memory. On a card a part of it is
        reserved for what cannot be counted, as ``speechbrain-rev models`` does.

    Returns
    -------
    Plan
        Its ``budget_bytes`` are what was left for a step.

    Raises
    ------
    Infeasible
        If no plan fits; the message says by how much, and what to change.
    """
    staying = _staying_bytes(step)
    if step.device.type == "cuda":
        staying += RESERVE_BYTES + math.ceil(RESERVE_SHARE * budget_bytes)
    left = budget_bytes - staying
    channels = tuple(step.encoder.channels)
    if step.searches_chunk:
        profile_for = functools.partial(_profile, step)
        channels, profile = fastest_channels(profile_for, step.encoder, left)
    else:
        profile = _profile(step, channels)
    with _shapes(step.precision) as device:
        encoder = without_contents(step.encoder, device)
        encoder.set_channels(channels)
        run = _step_without_contents(step, encoder, device)
        try:
            return plan_within(profile, encoder, run, left)
        except Infeasible as error:
            raise Infeasible(
                needed_bytes=error.needed_bytes + staying,
                budget_bytes=budget_bytes,
                remedy=(
                    f"Lower batch_size (now {step.batch} for each process) or "
                    f"chunk_samples (now {step.frames} frames), choose another arch, "
                    "optimizer_bits: 8 if it is 32, or a smaller chunk."
                ),
            ) from None


def _profile(step: TrainingStep, channels: Channels) -> Profile:
    """Profile a shallow encoder of the kind, or read what was found on this device."""
    names = list(step.encoder.named_blocks())
    classifier = [list(p.shape) for p in step.classifier.parameters()]
    about = step.about()
    key = {
        **{name: about[name] for name in about.keys() - {"blocks", "chunk"}},
        "channels": str(list(channels)),
        "widths": str(step.encoder.architecture.widths),
        "blocks of stages": str(shallow_blocks(step.encoder.architecture)),
        "input and output": f"{step.encoder.n_mels}, {step.encoder.fc.out_features}",
        "streams": str(step.encoder.streams),
        "classifier": f"{type(step.classifier).__name__} {classifier}",
        "loss": type(step.loss).__name__,
        **hardware(step.device),
    }

    def make() -> Profile:
        with torch.random.fork_rng(_cuda(step.device)), step.device:
            small = shallow(step.encoder)
        small.set_channels(channels)
        seconds = _seconds(step, small)
        with _shapes(step.precision) as device:
            encoder = without_contents(small, device)
            run = _step_without_contents(step, encoder, device)
            return profile_bytes(encoder, run, seconds, {})

    return saved_profile(key, make).stretched(names, about)


def _staying_bytes(step: TrainingStep) -> int:
    """Count what there is from one step to the next."""
    trained = nn.ModuleList([step.encoder, step.classifier])
    held = copy.deepcopy(trained).to("meta")
    report = breakdown(
        held,
        lambda: None,
        inputs=[torch.empty(0, device="meta")],
        optimizer=step.make_optimizer(held.parameters()),
    )
    speech = step.batch * step.frames * INPUT_BYTES_PER_FRAME
    return report.total_bytes + speech


def _seconds(
    step: TrainingStep, encoder: SpeakerEncoder
) -> dict[tuple[str, str], float]:
    """Take the times of some utterances on the device: a step's are in proportion."""
    on_cuda = step.device.type == "cuda"
    batch = min(_TIMED_ON_CUDA if on_cuda else _TIMED, step.batch)
    feats = torch.randn(batch, step.frames, encoder.n_mels, device=step.device)
    trainable(encoder)

    def run() -> None:
        with _autocast(step.device.type, step.precision):
            y = encoder(feats)
        y.float().square().sum().backward()

    with torch.random.fork_rng(_cuda(step.device)):
        taken = measured_seconds(encoder, run, step.device, repeats=3)
    return {key: seconds * step.batch / batch for key, seconds in taken.items()}


@contextlib.contextmanager
def _shapes(precision: str) -> Any:
    """Give the device of tensors without contents, and make all new ones such."""
    if precision == "fp32":
        yield torch.device("meta")
    else:
        with cpu_fakes():
            yield torch.device("cpu")


def _step_without_contents(
    step: TrainingStep, encoder: SpeakerEncoder, device: torch.device
) -> Callable[[], None]:
    """Give the training step of an encoder and the classifier, both without contents."""
    trainable(encoder)
    classifier = trainable(without_contents(step.classifier, device))
    feats = torch.empty(step.batch, step.frames, encoder.n_mels, device=device)
    classes = torch.zeros(step.batch, 1, dtype=torch.long, device=device)

    def run() -> None:
        with _autocast("cpu", step.precision):
            loss: Tensor = step.loss(classifier(encoder(feats)), classes)
        loss.backward()

    return run


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _autocast(device_type: str, precision: str) -> torch.autocast:
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device_type, half, enabled=precision != "fp32")
