"""Recordings in files or in memory, brought to one channel and one sample rate."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechbrain_rev.audio import AudioInfo, audio_info, read_blocks
from speechbrain_rev.audio.checks import (
    MAXIMUM_SECONDS,
    Channel,
    check_channel,
    check_samples,
    check_seconds,
    is_silent,
    silence,
    take_channel,
    whole_rate,
)
from speechbrain_rev.audio.resampling import rate_ratio, resample

#: One utterance: a path; [samples] or [channels, samples]; or what Hugging Face's datasets
#: decode, {"array": samples, "sampling_rate": hertz}.
Audio: TypeAlias = "str | PathLike[str] | Tensor | NDArray[Any] | Mapping[str, Any]"
_ARRAY, _RATE = "array", "sampling_rate"
_BYTES = bytes, bytearray, memoryview

# Numbers of all channels that are read of a file, or prepared of an array, at a time.
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
    >>> Recording.of(np.zeros((2, 8000)), 16000, "the waveform").info()
    AudioInfo(samples=8000, sample_rate=16000, channels=2, lossy=False)
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
        if is_decoded(audio):
            assert isinstance(audio, Mapping)
            return cls.of(audio[_ARRAY], audio[_RATE], what)
        if isinstance(audio, np.ndarray):
            audio = _tensor(audio, what)
        if not isinstance(audio, Tensor):
            raise ValueError(
                f"{what} is of type {type(audio).__name__}; give a path, or an array or a "
                "tensor of floats from -1 to 1: [samples] or [channels, samples]. Of an "
                "open file: samples, rate = soundfile.read(file, always_2d=True), and then "
                "samples.T and sample_rate=rate."
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

    def info(self) -> AudioInfo:
        """Read the header; the length of lossy audio is known when it was read.

        Raises
        ------
        ValueError
            If the file cannot be read.
        """
        if isinstance(self.audio, Tensor):
            channels, samples = self.audio.shape
            assert self.sample_rate is not None
            return AudioInfo(samples, self.sample_rate, channels)
        info = audio_info(self.audio, estimate=True)
        whole_rate(info.sample_rate, self.what)
        return info

    def checked_info(
        self, channel: Channel, *, most: float = MAXIMUM_SECONDS
    ) -> AudioInfo:
        """Read the header, and refuse what it shows to be no utterance.

        Parameters
        ----------
        channel : int, "mix" or None
            As of ``check_channel``.
        most : float
            Seconds that the recording may have.

        Raises
        ------
        ValueError
            If it cannot be read, has several channels of which none is chosen, or is too
            short or too long.
        """
        info, what = self.info(), self.what
        if isinstance(self.audio, Tensor):
            what += ", an array [channels, samples] and no list(batch),"
        check_channel(what, info.channels, channel)
        check_seconds(info.samples, info.sample_rate, self.what, most=most)
        return info

    def waveform(self, target_rate: int, channel: Channel) -> tuple[Tensor, int]:
        """Read all of it.

        Parameters
        ----------
        target_rate : int
            Hertz that the encoder takes.
        channel : int, "mix" or None
            As of ``check_channel``.

        Returns
        -------
        waveform : torch.Tensor, [samples]
            At ``target_rate``, one channel.
        count : int
            How many channels there are.

        Raises
        ------
        ValueError
            As ``checked_info``; if it is NaN, infinite, silent or absurdly loud.
        """
        info = self.checked_info(channel)
        waveform = torch.cat(list(self.blocks(info, channel)))
        if is_silent(waveform):
            raise ValueError(silence(self.what))
        ratio = rate_ratio(info.sample_rate, target_rate)
        return resample(waveform, ratio), info.channels

    def blocks(
        self, info: AudioInfo, channel: Channel, *, most: float = MAXIMUM_SECONDS
    ) -> Iterator[Tensor]:
        """Read it a block [samples] at a time, at its own rate, as one channel.

        Parameters
        ----------
        info : AudioInfo
            As ``checked_info`` gives it.
        channel : int, "mix" or None
            As of ``checked_info``.
        most : float
            Seconds that the recording may have.

        Yields
        ------
        torch.Tensor, [samples]
            In float32; a million numbers at a time at most, of all channels together.

        Raises
        ------
        ValueError
            If it cannot be read, is NaN, infinite, absurdly loud, too short or too long.
        """
        parts: Iterable[Tensor]
        samples = max(1, _BLOCK_NUMBERS // info.channels)
        if isinstance(self.audio, Tensor):
            parts = torch.split(self.audio, samples, dim=1)
        else:
            parts = read_blocks(self.audio, block_samples=samples)
        count = 0
        for part in parts:
            block = take_channel(part, channel)
            yield check_samples(block, info.sample_rate, self.what, start=count)
            count += len(block)
        # A header may say another length.
        check_seconds(count, info.sample_rate, self.what, most=most)


def is_decoded(audio: object) -> bool:
    """Return whether audio is samples with their rate, as Hugging Face's datasets have it.

    Example
    -------
    >>> is_decoded({"array": np.zeros(8000), "sampling_rate": 8000, "path": "a.wav"})
    True
    """
    return isinstance(audio, Mapping) and {_ARRAY, _RATE} <= audio.keys()


def refuse_unordered(audio: object) -> None:
    """Refuse a set or a mapping where results come in the order of utterances.

    Raises
    ------
    ValueError
        If it is one.

    Example
    -------
    >>> refuse_unordered({"b.wav", "a.wav"})
    Traceback (most recent call last):
    ValueError: a set has no order that results could have: give a list, as sorted(...).
    """
    if isinstance(audio, Set | Mapping):
        raise ValueError(
            f"a {type(audio).__name__} has no order that results could have: give a list, "
            "as sorted(...)."
        )


def _tensor(audio: NDArray[Any], what: str) -> Tensor:
    """Make a tensor of an array, of which nothing may be lost or misread."""
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(audio))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} is an array of {audio.dtype.str}; give floats from -1 to 1, as by "
            f'astype("float32"): {error}'
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
    """List the utterances given, and whether it was one alone.

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
    >>> utterances, alone = recordings(
    ...     ["a.wav", np.zeros(16000)], 16000, assumed_rate=16000
    ... )
    >>> [one.what for one in utterances], alone
    (['a.wav', 'utterance 1 of the list'], False)
    """
    rate = assumed_rate if sample_rate is None else sample_rate
    if isinstance(audio, np.ndarray) and audio.dtype.kind in "UO":
        # An array of paths.
        audio = audio.tolist()
    # An open file, or its bytes, could be iterated over.
    alone = (
        isinstance(audio, (str, PathLike, Tensor, np.ndarray, *_BYTES))
        or hasattr(audio, "read")
        or is_decoded(audio)
    )
    given: list[Any]
    if alone:
        given = [audio]
        utterances = [Recording.of(audio, rate, alone_is)]  # type: ignore[arg-type]
    else:
        if not isinstance(audio, Iterable):
            raise ValueError(
                f"{audio!r} is no audio; give a path, an array, a tensor, or a list of them."
            )
        refuse_unordered(audio)
        # A generator may fill one buffer again and again.
        given = list(_copies(audio) if iter(audio) is audio else audio)
        utterances = [
            Recording.of(one, rate, f"utterance {index} of the list")
            for index, one in enumerate(given)
        ]
    if not utterances:
        raise ValueError("there is nothing to embed; give at least one utterance.")
    check_rate(sample_rate, utterances)
    arrays = [
        one.what
        for one, source in zip(utterances, given, strict=True)
        if isinstance(one.audio, Tensor) and not is_decoded(source)
    ]
    if sample_rate is None and arrays:
        warnings.warn(
            f"Arrays do not say their sample rate: {arrays[0]} is taken as of "
            f"{assumed_rate} Hz, the model's. Give sample_rate, in hertz.",
            stacklevel=3,
        )
    return utterances, alone


def _copies(audio: Iterable[Audio]) -> Iterator[Audio]:
    for one in audio:
        if isinstance(one, Tensor):
            yield one.clone()
        elif isinstance(one, Mapping):
            yield dict(one)
        else:
            yield one.copy() if isinstance(one, np.ndarray) else one


def check_rate(sample_rate: object, utterances: Sequence[Recording]) -> None:
    """Refuse a sample rate where no array is that it could be of.

    Raises
    ------
    ValueError
        If it is given and all are files.
    """
    if sample_rate is not None and all(
        isinstance(one.audio, Path) for one in utterances
    ):
        raise ValueError(
            f"sample_rate is {sample_rate!r}, but files say their own, which counts. Leave "
            "it out."
        )
