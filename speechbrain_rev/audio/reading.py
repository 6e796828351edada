"""Reading audio by range of samples, at one rate and of one channel.

torchaudio 2.11 can no longer read by itself, and a segment to train on is a small part of
its file: only the samples asked for are decoded. Lossy audio is decoded from its
beginning, for what a decoder gives depends on what came before.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from speechbrain_rev.lists import printable

from .checks import Channel, check_channel, take_channel
from .headers import read_sizes
from .m4a import SUFFIX as M4A
from .m4a import M4aFile
from .packed import PackedAudio, find_packed
from .resampling import rate_ratio, resampled_length, resampled_range
from .segments import Segment, file_of, find_segment
from .shards import FilePart, find_tar, stamp_of

logger = logging.getLogger(__name__)

# The frames of libsndfile for FLAC without a length.
_UNKNOWN = 2**63 - 1
# Samples that are read at a time to the end of a file, whose header may lie about it.
_BLOCK_SAMPLES = 2**22
# A FLAC frame of silence has up to 65,535 samples in 10 bytes or more.
_SAMPLES_PER_BYTE = 8192
# Samples that are decoded at a time from the beginning.
_DECODED = 2**14
# soundfile raises the second for formats without a header, such as .raw.
_REFUSALS = (soundfile.LibsndfileError, TypeError, UnicodeError, OSError)


@dataclass(frozen=True)
class AudioInfo:
    """What a file's header says, or decoding it where it is lossy.

    Attributes
    ----------
    samples : int
        Length in samples per channel.
    sample_rate : int
        Samples per second.
    channels : int
        Number of channels.
    lossy : bool
        Whether it is OGG, MP3 or m4a.
    """

    samples: int
    sample_rate: int
    channels: int
    lossy: bool = False

    def samples_at(self, sample_rate: int) -> int:
        """Give the length at another rate.

        Example
        -------
        >>> AudioInfo(48001, 48000, channels=1).samples_at(16000)
        16001
        """
        return resampled_length(self.samples, rate_ratio(self.sample_rate, sample_rate))


class _Opened(Protocol):
    """Audio that is open, at its own rate and with all its channels."""

    sample_rate: int
    channels: int
    lossy: bool

    def length(self, *, estimate: bool) -> int:
        """Give its samples per channel, of lossy audio perhaps what its header says."""

    def read(self, start: int, samples: int | None) -> NDArray[np.float32]:
        """Give a range, [samples, channels], which ends where the audio does."""


class _SoundFile(soundfile.SoundFile):  # type: ignore[misc]
    """A file of libsndfile that does not seek where other samples would come.

    Those of MP3 at 16 kHz are off by up to 0.3 of full scale. GSM 6.10 cannot seek, and in
    FLAC without a length it fails. soundfile itself seeks after each block that it read.
    """

    @functools.cached_property
    def lossy(self) -> bool:
        mpeg = self.subtype.startswith("MPEG")
        return self.format in ("OGG", "MP3") or mpeg or not super().seekable()

    def seekable(self) -> bool:
        return not (self.lossy or self.frames == _UNKNOWN)


class _OfSoundfile:
    """A file of libsndfile that is read from any place."""

    lossy = False

    def __init__(self, path: str | Path, audio: _SoundFile) -> None:
        self.path, self.audio = path, audio
        self.sample_rate, self.channels = int(audio.samplerate), int(audio.channels)
        self._place = 0

    def length(self, *, estimate: bool) -> int:
        with open_bytes(self.path) as file:
            file_bytes = file.seek(0, io.SEEK_END)
        if self.audio.frames > _SAMPLES_PER_BYTE * file_bytes:
            raise ValueError(
                f"{self.path} cannot be read as audio: its header says {self.audio.frames} "
                f"samples, more than {file_bytes} bytes can hold. Copy or convert it again."
            )
        return int(self.audio.frames)

    def read(self, start: int, samples: int | None) -> NDArray[np.float32]:
        if start != self._place:
            self._place = self.audio.seek(min(start, self.audio.frames))
        size = _BLOCK_SAMPLES if samples is None else samples
        blocks = _blocks_of(self.path, self.audio, self._place, size)
        values = np.concatenate([*blocks]) if samples is None else next(blocks)
        self._place += len(values)
        return values


def _blocks_of(
    path: str | Path, audio: _SoundFile, place: int, size: int
) -> Iterator[NDArray[np.float32]]:
    """Read blocks to the end, and refuse an end before that of the header; of lossy audio warn."""
    while True:
        values = audio.read(size, dtype="float32", always_2d=True)
        place += len(values)
        if len(values) < size and place < audio.frames < _UNKNOWN:
            message = (
                f"{path} seems to be cut short: its header says {audio.frames} samples, and "
                f"there are {place}. Copy or convert it again."
            )
            if not audio.lossy:
                raise ValueError(message)
            # Editors leave the headers of MP3 as they were: an estimate.
            logger.warning(message)
        yield values
        if len(values) < size:
            return


@functools.lru_cache(maxsize=1024)
def _decoded_length(path: str, changed: tuple[int, int]) -> int:
    """Count samples; of a file that is looked at, and then read, once."""
    del changed
    with _opened(path) as audio:
        return sum(map(len, _read_in_blocks(audio, _DECODED)))


def _read_in_blocks(audio: _Opened, size: int) -> Iterator[NDArray[np.float32]]:
    place = 0
    while len(values := audio.read(place, size)):
        place += len(values)
        yield values


class _Forward:
    """Audio that is decoded from its beginning: lossy, or FLAC without a length."""

    def __init__(
        self,
        path: str | Path,
        audio: M4aFile | _SoundFile,
        blocks: Iterator[NDArray[np.float32]],
        header_samples: int | None,
    ) -> None:
        self.path, self.lossy = path, audio.lossy
        self.sample_rate, self.channels = int(audio.samplerate), int(audio.channels)
        self._blocks, self._header_samples = blocks, header_samples
        self._place = 0
        self._left = np.empty((0, self.channels), np.float32)

    def length(self, *, estimate: bool) -> int:
        if estimate and self._header_samples is not None:
            return self._header_samples
        return _decoded_length(str(self.path), stamp_of(file_of(self.path)))

    def read(self, start: int, samples: int | None) -> NDArray[np.float32]:
        assert start >= self._place, "it is read forward"
        parts, begin, end = [self._left], self._place, self._place + len(self._left)
        wanted_end = math.inf if samples is None else start + samples
        while end < wanted_end and (block := next(self._blocks, None)) is not None:
            if end <= start:
                # Samples before the range are held no longer.
                parts, begin = [], end
            parts.append(block)
            end += len(block)
        whole = np.concatenate(parts)
        values = whole[start - begin :][:samples]
        used = min(len(whole), start - begin + len(values))
        self._place, self._left = begin + used, whole[used:]
        return values


class _OfPacked:
    """A file of a packed folder."""

    channels, lossy = 1, False

    def __init__(self, packed: PackedAudio, name: str) -> None:
        self.packed, self.name, self.sample_rate = packed, name, packed.sample_rate

    def length(self, *, estimate: bool) -> int:
        return self.packed.length(self.name)

    def read(self, start: int, samples: int | None) -> NDArray[np.float32]:
        return self.packed.read(self.name, start, samples)[:, None]


class _OfSegment:
    """A part of another file."""

    def __init__(self, whole: _Opened, segment: Segment) -> None:
        self.whole, self.segment = whole, segment
        self.sample_rate, self.lossy = whole.sample_rate, whole.lossy
        self.channels = whole.channels if segment.channel is None else 1
        if segment.channel is not None and segment.channel >= whole.channels:
            raise ValueError(
                f"{segment.recording} has no channel {segment.channel}: it has "
                f"{whole.channels}, counted from 0. Correct the list"
            )

    def length(self, *, estimate: bool) -> int:
        recording, start, samples, _ = self.segment
        # Whether it ends behind its recording is not estimated.
        whole = self.whole.length(estimate=False)
        if whole < start + (samples or 1):
            raise ValueError(
                f"{recording} has {whole} samples, and a segment of it begins at {start} "
                f"and ends at {start + (samples or 1)}: correct its times, or give the "
                "recording that they are of"
            )
        return whole - start if samples is None else samples

    def read(self, start: int, samples: int | None) -> NDArray[np.float32]:
        if self.segment.samples is not None:
            left = max(0, self.segment.samples - start)
            samples = left if samples is None else min(samples, left)
        values = self.whole.read(self.segment.start + start, samples)
        channel = self.segment.channel
        return values if channel is None else values[:, channel : channel + 1]


def audio_info(path: str | Path, *, estimate: bool = False) -> AudioInfo:
    """Read a file's header; of OGG, MP3 and m4a decode all of it.

    Parameters
    ----------
    path : str or Path
        WAV, FLAC, m4a or another format that libsndfile knows, a file of a packed folder, a
        member of a tar (``shards``), or a segment of a recording (``segments``).
    estimate : bool
        Whether the length of OGG, MP3 and m4a may be what the header says, right or wrong.

    Returns
    -------
    AudioInfo

    Raises
    ------
    ValueError
        If the file cannot be read as audio or is cut short, or a segment ends behind its
        recording; it names the file. Of FLAC a cut is only seen where it is decoded.
    ImportError
        If it is m4a, and PyAV is not installed.
    """
    with _opened(path) as audio:
        return AudioInfo(
            audio.length(estimate=estimate),
            audio.sample_rate,
            audio.channels,
            lossy=audio.lossy,
        )


def read_audio(
    path: str | Path,
    *,
    sample_rate: int,
    resample: bool = False,
    channel: Channel = None,
    start: int = 0,
    samples: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read one channel of audio at one rate, or a part of it.

    Parameters
    ----------
    path : str or Path
        The file, as of ``audio_info``.
    sample_rate : int
        The rate of what comes back, Hz.
    resample : bool
        Whether files of another rate are resampled, and not refused. A range is that of
        the whole resampled file, to 1e-6.
    channel : int, "mix" or None
        Which channel is read, counted from 0, or the mean of all; None: the only one.
    start : int
        First sample to read, at ``sample_rate``.
    samples : int, optional
        How many samples to read; all that follow by default. Fewer come back where
        the file ends before.
    out : torch.Tensor, [at least as many samples], optional
        Where they are put, float32 on the CPU; what comes back is a part of it.

    Returns
    -------
    torch.Tensor, [samples]
        Float32 between -1 and 1.

    Raises
    ------
    ValueError
        If the file cannot be read, is cut short, has another rate or several channels that
        are not treated, or no channel of that number.
    ImportError
        If it is m4a, and PyAV is not installed.

    Example
    -------
    >>> path = getfixture("tmp_path") / "second.wav"
    >>> soundfile.write(path, [0.0] * 16000, 16000)
    >>> read_audio(path, sample_rate=16000, start=4000, samples=8000).shape
    torch.Size([8000])
    >>> read_audio(path, sample_rate=8000, resample=True).shape
    torch.Size([8000])
    """
    with _opened(path) as audio:
        rates = None if resample else (audio.sample_rate, sample_rate)
        check_channel(path, audio.channels, channel, rates=rates)
        if isinstance(audio, _OfPacked) and audio.sample_rate == sample_rate:
            # Training reads most from packed folders: into the batch, without a copy.
            into = None if out is None else out.numpy()
            return torch.from_numpy(audio.packed.read(audio.name, start, samples, into))
        ratio = rate_ratio(audio.sample_rate, sample_rate)
        read = functools.partial(_of_one_channel, audio, channel)
        wav = resampled_range(read, ratio, start, samples)
    return wav if out is None else out[: len(wav)].copy_(wav)


def _of_one_channel(
    audio: _Opened, channel: Channel, start: int, samples: int | None
) -> torch.Tensor:
    """Read a range at the audio's own rate: [samples]."""
    values = torch.from_numpy(audio.read(start, samples)).T
    return take_channel(values, channel).contiguous()


def read_blocks(
    path: str | Path, *, block_samples: int = _BLOCK_SAMPLES
) -> Iterator[torch.Tensor]:
    """Read all channels of a file to its end, a block at a time.

    Headers of MP3 files may be estimates: where one seems to be cut short, there is a
    warning. OGG files end where libsndfile finds their last page.

    Parameters
    ----------
    path : str or Path
        The file.
    block_samples : int
        Samples of each channel in a block; the last one may have fewer.

    Yields
    ------
    torch.Tensor, [channels, samples]
        Float32 between -1 and 1.

    Raises
    ------
    ValueError
        If the file cannot be read, is cut short, or holds no samples.
    ImportError
        If it is m4a, and PyAV is not installed.

    Example
    -------
    >>> path = getfixture("tmp_path") / "stereo.wav"
    >>> soundfile.write(path, [[0.0, 0.5]] * 12000, 16000)
    >>> [tuple(block.shape) for block in read_blocks(path, block_samples=8000)]
    [(2, 8000), (2, 4000)]
    """
    with _opened(path) as audio:
        is_empty = True
        for values in _read_in_blocks(audio, block_samples):
            is_empty = False
            yield torch.from_numpy(values).T
        if is_empty:
            raise ValueError(f"{path} holds no samples. Leave it out.")


def open_bytes(path: str | Path) -> BinaryIO:
    """Open a file, or a member of a tar, for its bytes.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    binary file

    Raises
    ------
    ValueError
        If the tar is damaged.
    OSError
        If it cannot be opened.
    """
    if inside := find_tar(path):
        tar, name = inside
        if (part := tar.member(name)) is None:
            raise FileNotFoundError(f"{tar.tar} has no member of this name")
        return cast(BinaryIO, FilePart(open(tar.tar, "rb"), *part, name=str(path)))
    # To open a pipe would wait for whoever writes into it.
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is no regular file")
    return open(path, "rb")


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[_Opened]:
    """Open audio, wherever it is; every problem becomes the same kind of error."""
    if segment := find_segment(path):
        with _opened(segment.recording) as whole:
            yield _OfSegment(whole, segment)
        return
    if inside := find_packed(path):
        yield _OfPacked(*inside)
        return
    try:
        if Path(path).suffix.lower() == M4A:
            with open_bytes(path) as file, M4aFile(file) as m4a:
                yield _Forward(path, m4a, m4a.blocks(), m4a.header_samples)
        else:
            with open_bytes(path) as file, _open_soundfile(path, file) as audio:
                if audio.seekable():
                    yield _OfSoundfile(path, audio)
                else:
                    samples = audio.frames if audio.frames < _UNKNOWN else None
                    blocks = _blocks_of(path, audio, 0, _DECODED)
                    yield _Forward(path, audio, blocks, samples)
    except _REFUSALS as error:
        raise _unreadable(path, error) from error


@contextlib.contextmanager
def _open_soundfile(path: str | Path, file: BinaryIO) -> Iterator[_SoundFile]:
    """Open a file, which is open for its bytes, to its end by the sizes in its header."""
    sizes, file_bytes = read_sizes(file), file.seek(0, io.SEEK_END)
    # libsndfile reads a path faster than the members of a tar and corrected headers.
    source: Any = file if isinstance(file, FilePart) else str(path)
    if sizes is not None and sizes.head:
        source = FilePart(file, 0, min(sizes.end, file_bytes), head=sizes.head)
    file.seek(0)
    with _SoundFile(source) as audio:
        if sizes is not None:
            sizes.check(path, file_bytes, audio.subtype)
        yield audio


def _unreadable(path: str | Path, error: Exception) -> ValueError:
    reason = str(error)
    if isinstance(error, FileNotFoundError) or not file_of(path).exists():
        reason = "there is no such file"
    elif isinstance(error, UnicodeError):
        reason = "its name is not in UTF-8; rename it"
    elif isinstance(error, TypeError):
        reason = "it has no header; convert it to WAV or FLAC"
    elif isinstance(error, soundfile.LibsndfileError) and _is_m4a(path):
        reason = f"it is m4a, and its name does not end in {M4A}; rename it"
    elif isinstance(error, soundfile.LibsndfileError):
        # Before it stands the file as it was opened, which in a tar is an object.
        reason = error.error_string
    return ValueError(f"{printable(str(path))} cannot be read as audio: {reason}")


def _is_m4a(path: str | Path) -> bool:
    with open_bytes(path) as file:
        return file.read(8)[4:] == b"ftyp"
