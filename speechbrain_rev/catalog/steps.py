"""Training steps of a row of the table on a GPU.

No GPU is needed to plan them, and no deep encoder is profiled: of each kind a shallow one
is, which has of each stage the first block and one that all further blocks are like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from speechbrain_rev.architectures import (
    ENCODERS,
    Architecture,
)
from speechbrain_rev.catalog.table import (
    Training,
    other_encoder,
    shorter_frames,
    speed_for,
)
from speechbrain_rev.devices import (
    Speed,
)
from speechbrain_rev.heads import Head
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.lobes.classifier import build_classifier, build_loss
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.lobes.geometry import AUTO, channels_at_the_peak
from speechbrain_rev.planner import Step
from speechbrain_rev.planner.memory import (
    make_gradients,
)
from speechbrain_rev.planner.step import (
    Alternative,
    Channels,
)

#: Bytes of a chunk that are tried where none is fixed: the larger, the faster.
CHUNKS = (None, 2 * AUTO, AUTO)

#: And where nothing fits with those: time grows faster than memory falls.
SMALL_CHUNKS = (AUTO // 2, AUTO // 4)

# Blocks of a stage that are run.
_SHALLOW = 2


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
    >>> step = encoder_step(ENCODERS["resnet152"], Training(None, 16, 200))
    >>> len(profile(step).blocks)
    51
    """
    with torch.device("meta"):
        encoder = build_encoder(row.name, widths=row.widths, blocks=row.blocks)
    blocks = shallow_blocks(row)
    # Encoders of one kind share a profile, kept under the name of the first of them.
    alike = (other for other in ENCODERS.values() if other.kind == row.kind)
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
        channels=usual_and_small_channels(encoder),
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


def usual_and_small_channels(encoder: SpeakerEncoder) -> tuple[list[Channels], ...]:
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
        An encoder, one of ``speechbrain_rev.architectures.ENCODERS``.
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
