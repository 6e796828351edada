"""Count what a training step of an encoder holds, byte by byte, without computing it.

On the meta device tensors have shapes and no contents: a step at any batch and length
takes less than a second and no memory, and makes and frees the same storages as on a
CPU.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence

import torch

from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.memory import live_bytes_peak
from speechbrain_rev.memory.report import make_gradients
from speechbrain_rev.models.counts import BATCHES, FRAMES, counted_peaks


def training_step_peak(
    name: str,
    *,
    mode: str | None = None,
    frames: int,
    batch: int,
    device: str | torch.device = "meta",
) -> int:
    """Count the bytes of live tensors at the peak of a forward and backward pass.

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

    Returns
    -------
    int
        Bytes in float32 of activations and all that the step makes. Weights, their
        gradients and the input exist before the step and are not among them.

    Raises
    ------
    ValueError
        If there is no such encoder, or it has no such mode.

    Examples
    --------
    >>> store = training_step_peak("resnet34", frames=200, batch=128)
    >>> recompute = training_step_peak(
    ...     "resnet34", mode="recompute", frames=200, batch=128
    ... )
    >>> recompute < 0.4 * store
    True
    """
    _, step = training_step(name, mode=mode, frames=frames, batch=batch, device=device)
    return live_bytes_peak(step)


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
    name, mode, frames, batch, device
        As :func:`training_step_peak` takes them.
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
        feats = torch.randn(batch, frames, encoder.n_mels)
    make_gradients(encoder)
    return encoder, lambda: encoder(feats).square().sum().backward()


@functools.cache
def activations_bytes(name: str, mode: str, batch: int, frames: int) -> int:
    """Bytes at the peak of an encoder's step, from the counts where they reach.

    Parameters
    ----------
    name, mode : str
        The encoder and what its blocks keep.
    batch, frames : int
        Utterances, and the length of each.

    Returns
    -------
    int
        Bytes; :func:`how_counted` says how they came about.

    Examples
    --------
    >>> activations_bytes("resnet34", "store", 64, 200)
    4036560136
    """
    if frames in FRAMES:
        return counted_peaks()[name, mode, frames](batch)
    return training_step_peak(name, mode=mode, batch=batch, frames=frames)


def how_counted(batch: int, frames: int) -> str:
    """Say how the activations of such a batch are counted.

    Parameters
    ----------
    batch, frames : int
        Utterances, and the length of each.

    Returns
    -------
    str
        Words to go on after "activations were".

    Examples
    --------
    >>> how_counted(64, 200), how_counted(64, 300)
    ('counted', 'counted just now')
    >>> how_counted(100, 200)
    'bounded from above by the line through their counts at batches of 64 and 128'
    """
    if frames not in FRAMES:
        return "counted just now"
    if batch in BATCHES:
        return "counted"
    right = min(bisect.bisect(BATCHES, batch), len(BATCHES) - 1)
    few, many = BATCHES[right - 1 : right + 1]
    return (
        f"bounded from above by the line through their counts at batches of {few} and "
        f"{many}"
    )
