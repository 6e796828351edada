"""Training steps of encoders: of a row of the table on a GPU, and of the recipe.

No GPU is needed to plan them, and no deep encoder is profiled: of each kind a shallow one
is, which has of each stage the first block and one that all further blocks are like.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from speechbrain_rev import devices
from speechbrain_rev.architectures import (
    ARCHITECTURES,
    Architecture,
)
from speechbrain_rev.catalog.table import (
    INPUT_BYTES_PER_FRAME,
    Training,
    other_encoder,
    shorter_frames,
    speed_for,
)
from speechbrain_rev.devices import (
    Speed,
    device_name,
)
from speechbrain_rev.heads import Head
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.lobes.classifier import build_classifier, build_loss
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.lobes.geometry import AUTO, channels_at_the_peak
from speechbrain_rev.planner import Step
from speechbrain_rev.planner.memory import (
    breakdown,
    make_gradients,
)
from speechbrain_rev.planner.step import (
    Alternative,
    Channels,
    Copy,
    Loss,
)
from speechbrain_rev.sizes import EXAMPLES, parse_size

#: Bytes of a chunk that are tried where none is fixed: the larger, the faster.
CHUNKS = (None, 2 * AUTO, AUTO)

#: And where nothing fits with those: time grows faster than memory falls.
SMALL_CHUNKS = (AUTO // 2, AUTO // 4)

# Blocks of a stage that are run.
_SHALLOW = 2

#: Utterances of the recipe's steps whose time is taken, at most, elsewhere and on a GPU,
#: which few do not keep busy.
_TIMED, _TIMED_ON_CUDA = 4, 32

# Small gradients of a half are not lost.
_LOSS_SCALE = 1024.0


def encoder_step(
    row: Architecture,
    training: Training,
    *,
    speed: Speed | None = None,
    device: torch.device | None = None,
) -> Step:
    """Make the training step of a row of the table, for a GPU.

    Parameters
    ----------
    row : Architecture
        The encoder, of any widths and blocks.
    training : Training
        Batch, length of utterances and bits of optimizer states.
    speed : Speed or None
        Of the device that is asked about, to estimate times from; None for that of the
        listed GPU whose memory is nearest.
    device : torch.device or None
        Where the times of a shallow encoder are measured instead.

    Returns
    -------
    Step
        In float32, of the encoder's output alone. Its budgets are the memory of a GPU, for
        all that training takes.

    Examples
    --------
    >>> from speechbrain_rev.planner import profile
    >>> step = encoder_step(ARCHITECTURES["resnet152"], Training(None, 16, 200))
    >>> len(profile(step).blocks)
    51
    """
    with torch.device("meta"):
        encoder = build_encoder(row.name, widths=row.widths, blocks=row.blocks)
    blocks = shallow_blocks(row)
    # Encoders of one kind share a profile, kept under the name of the first of them.
    alike = (other for other in ARCHITECTURES.values() if other.kind == row.kind)
    first = next(alike, row)

    def inputs(batch: int, device: torch.device) -> Tensor:
        return torch.randn(
            batch, training.frames, encoder.n_mels, device=device, dtype=torch.float32
        )

    return Step(
        encoder,
        inputs,
        training.batch,
        torch.device("meta") if device is None else device,
        lambda batch, device, copied: _square,
        samples="noise",
        fixed_bytes=lambda batch: sum(training.fixed_bytes(row, batch).values()),
        is_card=True,
        speed=None if device is not None else speed_for(training, speed),
        shallow=lambda: build_encoder(first.name, widths=row.widths, blocks=blocks),
        channels=_usual_and_small_channels(encoder),
        about={
            "encoder": row.name,
            "widths": str(row.widths),
            "blocks": str(len(encoder.named_blocks())),
            "profiled": f"stages of at most {_SHALLOW} blocks",
            "batch": str(training.batch),
            "frames": str(training.frames),
            "precision": "fp32",
        },
        key={
            "encoder": first.name,
            "kind": str(row.kind),
            "blocks of stages": str(blocks),
            "batch": str(training.batch),
            "frames": str(training.frames),
            "precision": "fp32",
        },
        is_trusted=True,
        alternatives=functools.partial(_other_rows, row, training),
    )


def _square(y: Tensor) -> Tensor:
    return y.square().sum()


def _other_rows(row: Architecture, training: Training, step: Step) -> list[Alternative]:
    """List what else may fit a GPU; lengths and encoders by their counts."""
    remedies = [Alternative("a batch of {fits}", of_modes=True)]
    if training.card_bytes is not None:
        asked = training.at(step.batch)
        frames, other = shorter_frames(asked, row), other_encoder(asked, row)
        if frames is not None:
            remedies.append(Alternative(f"--frames={frames}"))
        if other not in (None, row.name):
            remedies.append(Alternative(f"another encoder, for instance {other}"))
    if training.optimizer_bits == 32:
        remedies.append(Alternative("--optimizer_bits=8"))
    return [*remedies, Alternative("a larger GPU, for instance {gpu}")]


def shallow_blocks(row: Architecture) -> tuple[int, ...]:
    """Give how many blocks of each stage are profiled."""
    return tuple(min(count, _SHALLOW) for count in row.blocks)


def shallow(encoder: SpeakerEncoder) -> SpeakerEncoder:
    """Build an encoder with few blocks in a stage, which is otherwise alike.

    Parameters
    ----------
    encoder : SpeakerEncoder
        As ``build_encoder`` makes them, of any size.

    Returns
    -------
    SpeakerEncoder
        Newly initialised, on torch's default device.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     small = shallow(build_encoder("df_revnet377", streams="float"))
    >>> small.architecture.blocks, small.architecture.widths, small.streams
    ((2, 2, 2, 2), (48, 96, 192, 384), 'float')
    """
    row = encoder.architecture
    blocks = shallow_blocks(row)
    settings = settings_of(encoder)
    small = build_encoder(row.name, blocks=blocks, **settings)
    small.set_channels(encoder.channels)
    return small


def channels_to_try(
    encoder: SpeakerEncoder, chunks: Sequence[int | None] = CHUNKS
) -> list[Channels]:
    """List channels at a time that make a difference, in the order of the chunks.

    Parameters
    ----------
    encoder : SpeakerEncoder
        An encoder; one that is not reversible works on all channels at once.
    chunks : sequence of int or None
        Bytes where a step holds most, see ``geometry.channels_at_the_peak``; None for all
        channels at once.

    Returns
    -------
    list of tuple
        Channels as ``set_channels`` takes them.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     channels_to_try(build_encoder("resnet34"))
    ...     channels_to_try(build_encoder("df_revnet89"))[::2]
    [(None, None, None, None)]
    [(None, None, None, None), (16, 64, None, None, 16, 64, 256, 1024)]
    """
    row, geometry = encoder.architecture, encoder.geometry
    tried: list[Channels] = []
    for size in chunks if encoder.reversible_blocks() else (None,):
        channels = tuple(
            [None] * geometry.levels
            if size is None
            else channels_at_the_peak(size, row, geometry)
        )
        if channels not in tried:
            tried.append(channels)
    return tried


def _usual_and_small_channels(encoder: SpeakerEncoder) -> tuple[list[Channels], ...]:
    """List channels at a time that plans try, and those where nothing fits with them."""
    usual = channels_to_try(encoder)
    small = [c for c in channels_to_try(encoder, SMALL_CHUNKS) if c not in usual]
    return usual, small


def head_modules(head: Head) -> tuple[nn.Module, nn.Module]:
    """Make classifier and loss of the recipe, on torch's default device.

    Parameters
    ----------
    head : Head
        Their shape, of at least one class.

    Returns
    -------
    nn.Module, nn.Module
        Cosines [batch, 1, classes] of embeddings [batch, 1, embedding_dim]; the loss of
        them and classes [batch, 1].

    Examples
    --------
    >>> classifier, loss = head_modules(Head(classes=10))
    >>> cosines = classifier(torch.randn(4, 1, 256))
    >>> cosines.shape, loss(cosines, torch.zeros(4, 1, dtype=torch.long)).shape
    (torch.Size([4, 1, 10]), torch.Size([]))
    """
    classifier = build_classifier(
        head.loss, input_size=head.embedding_dim, out_neurons=head.classes
    )
    return classifier, build_loss(head.loss)


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
            # Filterbanks are centre-padded, and shift by 10 ms.
            frames=1 + knobs["chunk_samples"] // (knobs["sample_rate"] // 100),
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
        for flag in ("cudnn_benchmark", "cudnn_deterministic"):
            profile.pop(flag)  # they change time
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
            channels = _usual_and_small_channels(encoder)
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


def training_step(
    name: str,
    *,
    mode: str | None = None,
    frames: int,
    batch: int,
    device: str | torch.device = "meta",
    widths: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
) -> tuple[SpeakerEncoder, Callable[[], None]]:
    """Build an encoder and its training step.

    Parameters
    ----------
    name : str
        An encoder, one of ``speechbrain_rev.architectures.ARCHITECTURES``.
    mode : str or None
        What its blocks keep: "store", "recompute" or "reconstruct". None for its
        default: reconstruct if it is reversible, else store.
    frames : int
        Of each utterance; 200 are two seconds.
    batch : int
        Utterances.
    device : str or torch.device
        "meta" counts without computing; on another device the step runs.
    widths, blocks : sequence of int, or None
        Channels and blocks of each stage, for an encoder of another size.

    Returns
    -------
    SpeakerEncoder
        The encoder, its parameters with gradients.
    callable
        A forward and backward pass.

    Raises
    ------
    ValueError
        If there is no such encoder, or it has no such mode or size.

    Examples
    --------
    >>> encoder, step = training_step("resnet34", frames=200, batch=128)
    >>> step()
    >>> encoder.fc.weight.grad.device.type
    'meta'
    """
    with torch.device(device):
        encoder = build_encoder(name, mode=mode, widths=widths, blocks=blocks)
        feats = torch.randn(batch, frames, encoder.n_mels, dtype=torch.float32)
    make_gradients(encoder)
    return encoder, lambda: encoder(feats).square().sum().backward()
