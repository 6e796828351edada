"""Recordings in files or in memory, brought to one channel and one sample rate."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechbrain_rev.audio.resampling import rate_ratio, resample
from speechbrain_rev.data import audio_info, read_blocks

#: What to do with several channels: average them, take the one of this number, or
#: refuse them.
Channels: TypeAlias = "Literal['mean'] | int | None"

#: Less than this says little about a voice.
MINIMUM_SECONDS = 0.25
#: More than this is embedded in windows, not as one: the memory for it grows with its
#: length.
MAXIMUM_SECONDS = 600.0
#: Sample rates beyond these are a mistake, not audio.
LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000

# -80 dB of full scale: only the dither of a converter stays below.
_SILENCE = 1e-4
# The power spectrum of 32-bit integers that were not divided by full scale still
# fits float32.
_LOUDEST = 2.0**31


def check_channels(count: int, channels: Channels, what: str) -> None:
    """Refuse several channels unless one or their mean is chosen.

    Parameters
    ----------
    count : int
        Channels that there are.
    channels : "mean", int or None
        Average them, take the one of this number, counted from 0, or refuse several.
    what : str
        How errors call the audio.

    Raises
    ------
    ValueError
        If none is chosen, or there is no channel of that number.

    Example
    -------
    >>> check_channels(1, None, "a.wav")
    >>> check_channels(2, None, "a.wav")
    Traceback (most recent call last):
    ValueError: a.wav has 2 channels, ...
    """
    channels = check_choice(channels)
    if count > 1 and channels is None:
        raise ValueError(
            f"{what} has {count} channels, and which of them counts is not guessed. Give "
            'channels="mean" (--channel=mix) to average them, or channels=0 '
            "(--channel=0) to take the first. (An array of two dimensions is one "
            "utterance, [channels, samples]; for one utterance in each row give "
            "list(batch).)"
        )
    if isinstance(channels, int) and channels >= count:
        raise ValueError(
            f"{what} has no channel {channels}: it has {count}, counted from 0."
        )


def check_choice(channels: object) -> Channels:
    """Refuse what chooses no channel.

    Parameters
    ----------
    channels : "mean", integer of any type, or None
        What was given.

    Returns
    -------
    "mean", int or None
        The same.

    Raises
    ------
    ValueError
        If it is neither "mean", nor a number that is not negative, nor None.

    Example
    -------
    >>> check_choice(np.int64(1))
    1
    """
    if channels is None:
        return None
    if isinstance(channels, str) and channels == "mean":
        return "mean"
    if isinstance(channels, SupportsIndex) and not isinstance(channels, bool):
        # Arrays have the method, and no index.
        with contextlib.suppress(TypeError):
            number = operator.index(channels)
            if number >= 0:
                return number
    raise ValueError(
        f'channels takes "mean", the number of a channel counted from 0, or None, but is '
        f"{channels!r}."
    )


def checked(samples: Tensor, sample_rate: int, what: str, *, start: int = 0) -> Tensor:
    """Refuse samples that are no audio.

    Parameters
    ----------
    samples : torch.Tensor, [samples]
        A waveform or a part of one.
    sample_rate : int
        Hertz.
    what : str
        How errors call it.
    start : int
        Samples before this part.

    Returns
    -------
    torch.Tensor, [samples]
        In float32.

    Raises
    ------
    ValueError
        If they are NaN, infinite or absurdly loud.
    """
    finite = samples.isfinite()
    if not finite.all():
        first = start + int((~finite).nonzero()[0, -1])
        raise ValueError(
            f"{what} holds NaN or infinity, first at {first / sample_rate:.3f} s. "
            "Repair or leave out this audio."
        )
    peak = float(samples.abs().max())
    if peak > _LOUDEST:
        raise ValueError(
            f"{what} reaches {peak:.3g}, but full scale is 1. Divide it by the full "
            "scale of where it is from (32768 for 16-bit integers)."
        )
    return samples.to(torch.float32)


def is_silent(samples: Tensor) -> bool:
    """Return whether samples stay where they are, but for the dither of a converter.

    Parameters
    ----------
    samples : torch.Tensor, [samples]
        A waveform or a window of one.

    Returns
    -------
    bool

    Example
    -------
    >>> is_silent(torch.full((8,), 0.5)), is_silent(torch.randn(8))
    (True, False)
    """
    return bool((samples - samples.mean()).abs().max() < _SILENCE)


def silence(what: str) -> str:
    """Say that audio is silent, and what to do.

    Parameters
    ----------
    what : str
        How errors call it.

    Returns
    -------
    str
        For an error.

    Example
    -------
    >>> silence("a.wav")[:16]
    'a.wav is silent:'
    """
    return (
        f"{what} is silent: it stays below {20 * np.log10(_SILENCE):.0f} dB of full "
        "scale (after averaging its channels, if it has several). Leave it out, or pick "
        "the channel with speech."
    )


def whole_rate(sample_rate: object, what: str) -> int:
    """Give a sample rate as an integer of hertz.

    Raises
    ------
    ValueError
        If it is none of audio.

    Example
    -------
    >>> whole_rate(8000.0, "a tone")
    8000
    """
    if (
        not isinstance(sample_rate, int | float | np.integer | np.floating)
        or isinstance(sample_rate, bool)
        or sample_rate % 1 != 0
    ):
        raise ValueError(
            f"{what} has a sample rate of {sample_rate!r}; give the samples per second "
            "as a whole number, such as 16000."
        )
    if not LOWEST_RATE <= sample_rate <= HIGHEST_RATE:
        raise ValueError(
            f"{what} has a sample rate of {sample_rate} Hz; it must be the samples per "
            f"second of audio, from {LOWEST_RATE} to {HIGHEST_RATE}."
        )
    return int(sample_rate)


def check_seconds(
    samples: int, sample_rate: int, what: str, *, most: float = MAXIMUM_SECONDS
) -> None:
    """Refuse audio that is too short for a voice, or too long to be embedded as one.

    Raises
    ------
    ValueError
        If it has less than ``MINIMUM_SECONDS`` or more than ``most``.
    """
    seconds = samples / sample_rate
    given = f"{what} has {samples} samples, {seconds:.3f} s at {sample_rate} Hz; "
    if seconds < MINIMUM_SECONDS:
        raise ValueError(
            f"{given}an utterance has at least {MINIMUM_SECONDS} s. Leave it out. (The "
            "last axis of an array must be time: transpose what soundfile.read gives.)"
        )
    if seconds > most:
        raise ValueError(
            f"{given}as one utterance at most {most:.0f} s are embedded, since memory "
            f"grows with them. Give window=SECONDS (--window), no more than {most:.0f}, to "
            "average the embeddings of windows."
        )


#: One utterance: a path; [samples] or [channels, samples]; or what Hugging Face's datasets
#: decode, {"array": samples, "sampling_rate": hertz}.
Audio: TypeAlias = "str | PathLike[str] | Tensor | NDArray[Any] | Mapping[str, Any]"
_ARRAY, _RATE = "array", "sampling_rate"

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
        if is_decoded(audio):
            assert isinstance(audio, Mapping)
            return cls.of(audio[_ARRAY], audio[_RATE], what)
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
        # Of lossy audio, whose length is known when it was read.
        info = audio_info(self.audio, estimate=True)
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
            If it cannot be read, has several channels of which none is chosen, is too
            short or too long, NaN, infinite, silent or absurdly loud.
        """
        samples, rate, count = self.header()
        check_channels(count, channels, self.what)
        check_seconds(samples, rate, self.what)
        waveform = torch.cat(list(self.blocks(channels, count)))
        # A header may say another length.
        check_seconds(len(waveform), rate, self.what)
        waveform = checked(waveform, rate, self.what)
        if is_silent(waveform):
            raise ValueError(silence(self.what))
        return resample(waveform, rate_ratio(rate, target_rate)), count

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
            if len(part) > 1 and channels == "mean":
                yield part.mean(dim=0)
            else:
                yield part[channels if isinstance(channels, int) else 0]


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


def _is_open(audio: object) -> bool:
    """Return whether it is an open file, or what is in one."""
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
    is_array = isinstance(audio, Tensor | np.ndarray)
    if isinstance(audio, np.ndarray) and audio.dtype.kind in "UO":
        # An array of paths.
        audio, is_array = audio.tolist(), False
    # An open file could be iterated over, line by line.
    alone = is_array or isinstance(audio, (str, PathLike)) or _is_open(audio)
    alone = alone or is_decoded(audio)
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
