"""A training step of the recipe, as the planner takes it, and the budget for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from speechbrain_rev import devices
from speechbrain_rev.catalog.steps import (
    shallow,
    shallow_blocks,
    usual_and_small_channels,
)
from speechbrain_rev.catalog.table import INPUT_BYTES_PER_FRAME
from speechbrain_rev.devices import device_name
from speechbrain_rev.filterbanks import FILTERBANKS
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.planner import Step
from speechbrain_rev.planner.memory import breakdown
from speechbrain_rev.planner.step import Alternative, Channels, Copy, Loss
from speechbrain_rev.sizes import EXAMPLES, parse_size

#: Utterances of the recipe's steps whose time is taken, at most, elsewhere and on a GPU,
#: which few do not keep busy.
_TIMED, _TIMED_ON_CUDA = 4, 32

# Small gradients of a half are not lost.
_LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class TrainingStep:
    """A training step of the recipe.

    Attributes
    ----------
    encoder, classifier, loss : nn.Module
        What is trained, and the loss of the classifier's cosines.
    make_optimizer : callable
        Makes the optimizer of parameters.
    optimizer_name, optimizer_bits : str, int
        Which one that is, and of how many bits its states are.
    batch, frames : int
        Utterances of a step of one process, and frames of each.
    precision : str
        fp32, bf16 or fp16.
    device : torch.device
        Where it will run.
    searches_chunk : bool
        Whether the chunk is chosen too; False keeps what the encoder was built with.
    begun : bool
        Whether steps were taken already: the chunk stays what it is.
    """

    encoder: SpeakerEncoder
    classifier: nn.Module
    loss: nn.Module
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    optimizer_name: str
    optimizer_bits: int
    batch: int
    frames: int
    precision: str
    device: torch.device
    searches_chunk: bool = False
    begun: bool = False

    @classmethod
    def of(
        cls,
        knobs: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        *,
        precision: str,
        device: torch.device,
        processes: int = 1,
        begun: bool = False,
    ) -> TrainingStep:
        """Describe a step of one process of a training run with such settings.

        Parameters
        ----------
        knobs : mapping of str to object
            Settings of ``hparams/train.yaml``, built.
        modules : mapping of str to nn.Module
            With an ``embedding_model`` and a ``classifier``.
        precision, device, begun
            As the attributes.
        processes : int
            That share a batch.
        """
        encoder = modules["embedding_model"]
        assert isinstance(encoder, SpeakerEncoder)
        return cls(
            encoder,
            modules["classifier"],
            knobs["compute_cost"],
            knobs["opt_class"],
            optimizer_name=knobs["optimizer_name"],
            optimizer_bits=knobs["optimizer_bits"],
            batch=-(-knobs["batch_size"] // processes),
            # Settings of earlier runs have no features, and are SpeechBrain's.
            frames=FILTERBANKS[knobs.get("features", "speechbrain")].frames(
                knobs["chunk_samples"], knobs["sample_rate"]
            ),
            precision=precision,
            device=device,
            searches_chunk=knobs["chunk"] == "auto",
            begun=begun,
        )

    def about(self) -> dict[str, str]:
        """List what a plan for this step is for: all that its budget depends on."""
        encoder = self.encoder
        profile = self.about_profile()
        # Bytes are those of a step that compares streams, however often and whatever then.
        if profile.pop("verify_every", None) is not None:
            profile["verify"] = "None" if profile["verify"] == "None" else "yes"
        profile.pop("deterministic")  # it changes time
        return {
            **profile,
            "encoder": encoder.architecture.name,
            "blocks": str(len(encoder.named_blocks())),
            "optimizer": f"{self.optimizer_name}, {self.optimizer_bits} bit",
            "chunk": "chosen" if self.searches_chunk else str(encoder.channels),
        }

    def about_profile(self) -> dict[str, str]:
        """List what costs of the encoder's blocks depend on beside depth and channels."""
        encoder = self.encoder
        shapes = [list(p.shape) for p in self.classifier.parameters()]
        settings = settings_of(encoder)
        if settings["sync_batchnorm"] and dist.is_available() and dist.is_initialized():
            settings["sync_batchnorm"] = f"{dist.get_world_size()} processes"
        return {
            "encoder": encoder.architecture.name,
            **{name: str(value) for name, value in settings.items()},
            "classifier": f"{type(self.classifier).__name__} {shapes}",
            "loss": type(self.loss).__name__,
            "batch": str(self.batch),
            "frames": str(self.frames),
            "precision": self.precision,
            "device": device_name(self.device),
        }

    def step(self) -> Step:
        """Give the step as the planner takes it: for all that the process holds."""
        encoder = self.encoder
        channels: tuple[Sequence[Channels], ...] = ([tuple(encoder.channels)], [])
        if self.searches_chunk and not self.begun:
            channels = usual_and_small_channels(encoder)
        on_gpu = self.device.type == "cuda"

        def inputs(batch: int, device: torch.device) -> Tensor:
            return torch.randn(
                batch, self.frames, encoder.n_mels, device=device, dtype=torch.float32
            )

        def loss(batch: int, device: torch.device, copied: Copy) -> Loss:
            classifier = copied(self.classifier)
            classes = torch.zeros(batch, 1, dtype=torch.long, device=device)
            scale = _LOSS_SCALE if self.precision == "fp16" else 1.0

            def made(embeddings: Tensor) -> Tensor:
                value: Tensor = self.loss(classifier(embeddings), classes)
                return value if scale == 1.0 else scale * value

            return made

        return Step(
            encoder,
            inputs,
            self.batch,
            self.device,
            loss,
            samples="noise",
            precision=self.precision,
            fixed_bytes=lambda batch: staying_bytes(replace(self, batch=batch)),
            is_card=on_gpu,
            timed_batch=_TIMED_ON_CUDA if on_gpu else _TIMED,
            shallow=lambda: shallow(encoder),
            channels=channels,
            about=self.about(),
            key=self.about_profile()
            | {"blocks of stages": str(shallow_blocks(encoder.architecture))},
            is_trusted=True,
            alternatives=self._alternatives,
        )

    def _alternatives(self, step: Step) -> list[Alternative]:
        """List what can help in the settings."""
        remedies = [
            Alternative(
                f"batch_size: {{fits}} for each process (now {step.batch})",
                of_modes=True,
            ),
            Alternative(
                f"lower chunk_samples (now {self.frames} frames)", of_modes=True
            ),
            Alternative("another arch"),
        ]
        if self.optimizer_bits == 32:
            remedies.append(Alternative("optimizer_bits: 8"))
        fixed = not (self.searches_chunk or self.begun)
        if fixed and self.encoder.reversible_blocks():
            words = "a smaller chunk, or chunk: auto, which is searched"
            remedies.append(Alternative(words, of_modes=True))
        return [*remedies, Alternative("memory_budget: {needed}")]


def staying_bytes(step: TrainingStep) -> int:
    """Count what there is from one step to the next, which modes do not change.

    Parameters
    ----------
    step : TrainingStep
        A step of the training.

    Returns
    -------
    int
        Bytes of weights, gradients, optimizer states and classifier, and a batch's speech.
    """
    trained = nn.ModuleList([step.encoder, step.classifier])
    held = copy.deepcopy(trained).to("meta")
    report = breakdown(
        held,
        lambda: None,
        inputs=[torch.empty(0, device="meta", dtype=torch.float32)],
        optimizer=step.make_optimizer(held.parameters()),
    )
    return report.total_bytes + step.batch * step.frames * INPUT_BYTES_PER_FRAME


def budget_bytes_of(budget: str, device: torch.device) -> int:
    """Read a memory budget.

    Parameters
    ----------
    budget : str
        As 11GB or 10.5GiB (2**30 bytes each), 800MB, or 11000000000B; or auto: what nobody
        else has taken of the GPU.
    device : torch.device
        Where the training runs.

    Returns
    -------
    int
        Bytes that the process may hold, what it holds already among them.

    Raises
    ------
    ValueError
        If it is no size above zero with a unit, or auto where there is no GPU.

    Examples
    --------
    >>> budget_bytes_of("11GB", torch.device("cpu")) == 11 * 2**30
    True
    """
    if budget == "auto":
        size = devices.free_and_held_bytes(device)
        if size is None:
            raise ValueError(
                "memory_budget: auto asks a GPU for its free memory, and this run is "
                f"on {device.type}. Give a size, as 11GB."
            )
        return size
    size = parse_size(budget)
    if size is None:
        raise ValueError(
            f"memory_budget takes a size as {EXAMPLES}, or auto, not {budget}."
        )
    return size
