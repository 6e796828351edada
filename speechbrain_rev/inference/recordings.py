"""What is embedded: recordings in files or in memory, one or many."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechbrain_rev.inference.audio import (
    Channels,
    check_channels,
    check_seconds,
    one_channel,
    prepare_waveform,
    whole_rate,
)
from speechbrain_rev.speech import audio_info, read_blocks

#: One utterance: a path, or [samples] or [channels, samples].
Audio: TypeAlias = "str | PathLike[str] | Tensor | NDArray[Any]"

# What is read of a file, or prepared of an array, at a time: of all channels.
_BLOCK_NUMBERS = 2**20


@dataclass(frozen=True, eq=False)
class Recording:
    """One utterance that is to be embedded.

    Attributes
    ----------
    audio : pathlib.Path or torch.Tensor, [channels, samples]
        Where it is, or what it is.
    sample_rate : int or None
        Hertz of samples in memory; a file says its own.
    what : str
        How errors call it.

    Example
    -------
    >>> Recording.of(np.zeros((2, 8000)), 16000, "the waveform").header()
    (8000, 16000, 2)
    """

    audio: Path | Tensor
    sample_rate: int | None
    what: str

    @classmethod
    def of(cls, audio: Audio, sample_rate: object, what: str) -> Recording:
        """Check what kind of audio this is.

        Raises
        ------
        ValueError
            If it is none.
        """
        if isinstance(audio, (str, PathLike)):
            return cls(Path(audio), None, fspath(audio))
        if isinstance(audio, np.ndarray):
            audio = _tensor(audio, what)
        if _is_open(audio):
            raise ValueError(
                f"{what} is of type {type(audio).__name__}; give a path, or samples: "
                "samples, rate = soundfile.read(file, always_2d=True), of which samples.T "
                "and sample_rate=rate are taken. Bytes are made a file by io.BytesIO."
            )
        if not isinstance(audio, Tensor):
            raise ValueError(
                f"{what} is of type {type(audio).__name__}; give a path, or an array or a "
                "tensor of floats from -1 to 1: [samples] or [channels, samples]."
            )
        if audio.dim() not in (1, 2) or not audio.numel():
            raise ValueError(
                f"{what} has the shape {list(audio.shape)}, but an utterance is [samples] "
                "or [channels, samples]. A batch is a list of utterances: list(batch)."
            )
        if not audio.is_floating_point():
            raise ValueError(
                f"{what} holds {str(audio.dtype).removeprefix('torch.')} values; give "
                "floats from -1 to 1 (16-bit integers divided by 32768)."
            )
        samples = audio.detach().cpu()
        rate = whole_rate(sample_rate, what)
        return cls(samples if samples.dim() == 2 else samples[None], rate, what)

    def header(self) -> tuple[int, int, int]:
        """Give samples of each channel, their rate and the number of channels.

        Raises
        ------
        ValueError
            If the file cannot be read.
        """
        if isinstance(self.audio, Tensor):
            channels, samples = self.audio.shape
            assert self.sample_rate is not None
            return samples, self.sample_rate, channels
        info = audio_info(self.audio)
        return info.samples, whole_rate(info.sample_rate, self.what), info.channels

    def waveform(self, target_rate: int, channels: Channels) -> tuple[Tensor, int]:
        """Read all of it.

        Parameters
        ----------
        target_rate : int
            Hertz that the encoder takes.
        channels : "mean", int or None
            As of ``check_channels``.

        Returns
        -------
        waveform : torch.Tensor, [samples]
            At ``target_rate``, one channel.
        count : int
            How many channels there are.

        Raises
        ------
        ValueError
            If it cannot be read, has several channels of which none is chosen, or
            cannot be embedded; see ``prepare_waveform``.
        """
        samples, rate, count = self.header()
        check_channels(count, channels, self.what)
        check_seconds(samples, rate, self.what)
        waveform = torch.cat(list(self.blocks(channels, count)))
        return prepare_waveform(waveform, rate, target_rate, self.what), count

    def blocks(self, channels: Channels, count: int) -> Iterator[Tensor]:
        """Read it a block [samples] at a time, at its own rate, as one channel.

        Parameters
        ----------
        channels : "mean", int or None
            As of ``check_channels``.
        count : int
            How many channels there are.

        Yields
        ------
        torch.Tensor, [samples]
            A million numbers at a time at most, of all channels together.

        Raises
        ------
        ValueError
            If it cannot be read, or has several channels of which none is chosen.
        """
        parts: Iterable[Tensor]
        samples = max(1, _BLOCK_NUMBERS // count)
        if isinstance(self.audio, Tensor):
            parts = torch.split(self.audio, samples, dim=1)
        else:
            parts = read_blocks(self.audio, block_samples=samples)
        for part in parts:
            check_channels(len(part), channels, self.what)
            yield one_channel(part, channels)


def _is_open(audio: object) -> bool:
    """Tell whether it is an open file, or what is in one."""
    return isinstance(audio, (bytes, bytearray, memoryview)) or hasattr(audio, "read")


def _tensor(audio: NDArray[Any], what: str) -> Tensor:
    """Make a tensor of an array, of which nothing may be lost or misread."""
    if isinstance(audio, np.ma.MaskedArray):
        raise ValueError(
            f"{what} is a masked array, whose masked samples would count as audio: give "
            "filled(0), or leave them out."
        )
    if not audio.dtype.isnative:
        raise ValueError(
            f"{what} is an array of {audio.dtype.str}, the byte order of another machine: "
            'give audio.astype("float32").'
        )
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(audio))
    except TypeError as error:
        raise ValueError(
            f"{what} is an array of {audio.dtype}; give floats from -1 to 1."
        ) from error
    # An array of no axes came back with one.
    return tensor.reshape(audio.shape)


def recordings(
    audio: Audio | Iterable[Audio],
    sample_rate: object = None,
    *,
    assumed_rate: int,
    alone_is: str = "the waveform",
) -> tuple[list[Recording], bool]:
    """Tell one utterance from several, and what each is.

    Parameters
    ----------
    audio : path, array, tensor, or an iterable of them
        What is to be embedded.
    sample_rate : int or None
        Hertz of arrays and tensors.
    assumed_rate : int
        Hertz of those where none is given: that of the model.
    alone_is : str
        How errors call one utterance in memory.

    Returns
    -------
    list of Recording
        In order.
    bool
        Whether it is one, and no list.

    Raises
    ------
    ValueError
        If something is no audio, there is none at all, or a sample rate has nothing to be
        of.

    Warns
    -----
    UserWarning
        If an array has no sample rate.

    Example
    -------
    >>> found, alone = recordings(
    ...     ["a.wav", np.zeros(16000)], 16000, assumed_rate=16000
    ... )
    >>> [one.what for one in found], alone
    (['a.wav', 'utterance 1 of the list'], False)
    """
    rate = assumed_rate if sample_rate is None else sample_rate
    is_array = isinstance(audio, Tensor | np.ndarray)
    if isinstance(audio, np.ndarray) and audio.dtype.kind in "UO":
        # An array of paths.
        audio, is_array = audio.tolist(), False
    # An open file could be iterated over, line by line.
    alone = is_array or isinstance(audio, (str, PathLike)) or _is_open(audio)
    if alone:
        found = [Recording.of(audio, rate, alone_is)]  # type: ignore[arg-type]
    else:
        if not isinstance(audio, Iterable):
            raise ValueError(
                f"{audio!r} is no audio; give a path, an array, a tensor, or a list of them."
            )
        found = [
            Recording.of(one, rate, f"utterance {index} of the list")
            # A generator may fill one buffer again and again.
            for index, one in enumerate(
                _copies(audio) if iter(audio) is audio else audio
            )
        ]
    if not found:
        raise ValueError("there is nothing to embed; give at least one utterance.")
    check_rate(sample_rate, found)
    arrays = [one.what for one in found if isinstance(one.audio, Tensor)]
    if sample_rate is None and arrays:
        warnings.warn(
            f"Arrays do not say their sample rate: {arrays[0]} is taken as of "
            f"{assumed_rate} Hz, the model's. Give sample_rate, in hertz.",
            stacklevel=3,
        )
    return found, alone


def _copies(audio: Iterable[Audio]) -> Iterator[Audio]:
    for one in audio:
        if isinstance(one, Tensor):
            yield one.clone()
        else:
            yield one.copy() if isinstance(one, np.ndarray) else one


def check_rate(sample_rate: object, found: Sequence[Recording]) -> None:
    """Refuse a sample rate where no array is that it could be of.

    Raises
    ------
    ValueError
        If it is given and all are files.
    """
    if sample_rate is not None and all(isinstance(one.audio, Path) for one in found):
        raise ValueError(
            f"sample_rate is {sample_rate!r}, but files say their own, which counts. Leave "
            "it out."
        )
