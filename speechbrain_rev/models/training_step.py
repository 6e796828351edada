"""A training step of the recipe: what is trained, on how much, where, and how it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from speechbrain_rev.devices import device_name, random_devices
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.memory.shapes import cpu_fakes, without_contents
from speechbrain_rev.planner.calling import trainable
from speechbrain_rev.reversible.compiled import backend_of


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
        """Describe a step of one process of a training with such settings.

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
            # Filterbanks are centre-padded, and shift by 10 ms.
            frames=1 + knobs["chunk_samples"] // (knobs["sample_rate"] // 100),
            precision=precision,
            device=device,
            searches_chunk=knobs["chunk"] == "auto",
            begun=begun,
        )

    def about(self) -> dict[str, str]:
        """Say what a plan for this step is for: all that its budget depends on."""
        encoder = self.encoder
        profile = self.about_profile()
        # Bytes are those of a step that compares streams, however often and whatever then.
        if profile.pop("verify_every", None) is not None:
            profile["verify"] = "None" if profile["verify"] == "None" else "yes"
        return {
            **profile,
            "encoder": encoder.architecture.name,
            "blocks": str(len(encoder.named_blocks())),
            "optimizer": f"{self.optimizer_name}, {self.optimizer_bits} bit",
            "chunk": "chosen" if self.searches_chunk else str(encoder.channels),
        }

    def about_profile(self) -> dict[str, str]:
        """Say what costs of the encoder's blocks depend on beside depth and channels."""
        encoder = self.encoder
        shapes = [list(p.shape) for p in self.classifier.parameters()]
        settings = settings_of(encoder)
        if settings["sync_batchnorm"] and dist.is_available() and dist.is_initialized():
            settings["sync_batchnorm"] = f"{dist.get_world_size()} processes"
        return {
            "encoder": encoder.architecture.name,
            **{name: str(value) for name, value in settings.items()},
            "compiled": str(backend_of(encoder)),
            "classifier": f"{type(self.classifier).__name__} {shapes}",
            "loss": type(self.loss).__name__,
            "batch": str(self.batch),
            "frames": str(self.frames),
            "precision": self.precision,
            "device": device_name(self.device),
        }

    def autocast(self, device_type: str) -> torch.autocast:
        """Give the autocast that it runs under."""
        half = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(device_type, half, enabled=self.precision != "fp32")

    @contextlib.contextmanager
    def shapes(self) -> Any:
        """Give the device of tensors without contents, and make all new ones such."""
        if self.precision == "fp32":
            yield torch.device("meta")
        else:
            with cpu_fakes():
                yield torch.device("cpu")

    def noise(self, batch: int) -> torch.Tensor:
        """Make features of noise, and leave random numbers as they were.

        Parameters
        ----------
        batch : int
            Utterances.

        Returns
        -------
        torch.Tensor, [batch, frames, n_mels]
            Where it runs.
        """
        with torch.random.fork_rng(random_devices(self.device)):
            shape = batch, self.frames, self.encoder.n_mels
            return torch.randn(shape, device=self.device)

    def run_of(
        self, encoder: SpeakerEncoder, batch: int, device: torch.device
    ) -> Callable[[], None]:
        """Make a step of an encoder alone.

        Parameters
        ----------
        encoder : SpeakerEncoder
            One of the kind, on the device.
        batch : int
            Utterances.
        device : torch.device
            Where the step runs; within ``shapes`` what that gives.

        Returns
        -------
        callable
            Runs forward and backward pass.
        """
        trainable(encoder)
        feats = torch.randn(batch, self.frames, encoder.n_mels, device=device)
        kind = "cpu" if device.type == "meta" else device.type

        def run() -> None:
            with self.autocast(kind):
                y = encoder(feats)
            y.float().square().sum().backward()

        return run

    def run_without_contents(
        self, encoder: SpeakerEncoder, device: torch.device
    ) -> Callable[[], None]:
        """Make the whole step, within ``shapes``, of an encoder without contents.

        Parameters
        ----------
        encoder : SpeakerEncoder
            The encoder, or another one of its kind.
        device : torch.device
            What ``shapes`` gives.

        Returns
        -------
        callable
            Runs forward and backward pass of encoder, classifier and loss.
        """
        trainable(encoder)
        classifier = trainable(without_contents(self.classifier, device))
        feats = torch.empty(self.batch, self.frames, encoder.n_mels, device=device)
        classes = torch.zeros(self.batch, 1, dtype=torch.long, device=device)

        def run() -> None:
            with self.autocast("cpu"):
                loss: Tensor = self.loss(classifier(encoder(feats)), classes)
            loss.backward()

        return run
