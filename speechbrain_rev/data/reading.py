"""Reading audio with soundfile, by frame range.

torchaudio 2.11 can no longer read by itself, and a training chunk is a small part of
its file: only the samples asked for are decoded.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import soundfile
import torch

from .lengths import open_bytes, opened, report_cut
from .packed import find_packed
from .segments import Segment, file_of, find_segment

# A FLAC frame of silence has up to 65,535 samples in 10 bytes or more.
_SAMPLES_PER_BYTE = 8192
# What is read at a time where a file is read to its end: a header may lie about that.
_BLOCK_SAMPLES = 2**22
# soundfile raises the second for formats without a header, such as .raw.
_REFUSALS = (soundfile.LibsndfileError, TypeError, UnicodeError, OSError)


@dataclass(frozen=True)
class AudioInfo:
    """What a file's header says.

    Attributes
    ----------
    samples : int
        Length in samples per channel.
    sample_rate : int
        Samples per second.
    channels : int
        Number of channels.
    """

    samples: int
    sample_rate: int
    channels: int


def audio_info(path: str | Path) -> AudioInfo:
    """Read a file's header.

    Parameters
    ----------
    path : str or Path
        WAV, FLAC or another format that libsndfile knows, a file of a packed folder, a
        member of a tar (``shards``), or a segment of a recording (``segments``).

    Returns
    -------
    AudioInfo

    Raises
    ------
    ValueError
        If the file cannot be read as audio or is cut short, or a segment ends behind its
        recording; it names the file. Of FLAC and OGG a cut is only seen where it is
        decoded.
    """
    if segment := find_segment(path):
        return _info_of_segment(segment)
    if inside := find_packed(path):
        packed, name = inside
        return AudioInfo(packed.length(name), packed.sample_rate, channels=1)
    with _opened(path) as audio:
        info = AudioInfo(audio.frames, audio.samplerate, audio.channels)
    with open_bytes(path) as file:
        file_bytes = file.seek(0, io.SEEK_END)
    if info.samples > _SAMPLES_PER_BYTE * file_bytes:
        raise ValueError(
            f"{path} cannot be read as audio: its header says {info.samples} samples, more "
            f"than {file_bytes} bytes can hold. Copy or convert it again."
        )
    return info


def read_audio(
    path: str | Path,
    *,
    sample_rate: int,
    start: int = 0,
    samples: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read audio of one channel, or a part of it.

    Parameters
    ----------
    path : str or Path
        The file.
    sample_rate : int
        The rate that the file must have, Hz.
    start : int
        First sample to read.
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
        If the file cannot be read, is cut short, has another rate or several channels.

    Example
    -------
    >>> path = getfixture("tmp_path") / "second.wav"
    >>> soundfile.write(path, [0.0] * 16000, 16000)
    >>> read_audio(path, sample_rate=16000, start=4000, samples=8000).shape
    torch.Size([8000])
    """
    if segment := find_segment(path):
        begin, count = _in_recording(segment, start, samples)
        return read_audio(
            segment.recording,
            sample_rate=sample_rate,
            start=begin,
            samples=count,
            out=out,
        )
    if inside := find_packed(path):
        packed, name = inside
        if packed.sample_rate != sample_rate:
            raise ValueError(_other_rate(path, packed.sample_rate, sample_rate))
        into = None if out is None else out.numpy()
        return torch.from_numpy(packed.read(name, start, samples, into))
    values, file_rate = _decode(path, start, samples)
    if file_rate != sample_rate:
        raise ValueError(_other_rate(path, file_rate, sample_rate))
    if values.shape[1] != 1:
        raise ValueError(
            f"{path} has {values.shape[1]} channels, but one is expected. Convert the "
            "files (for example: sox IN OUT remix -)."
        )
    wav = values[:, 0]
    return wav if out is None else out[: len(wav)].copy_(wav)


def read_blocks(
    path: str | Path, *, block_samples: int = _BLOCK_SAMPLES
) -> Iterator[torch.Tensor]:
    """Read all channels of a file to its end, a block at a time.

    Of MP3 files headers may estimate, and OGG files of a recording that was stopped may
    not mark their end: where those seem to be cut short, there is a warning.

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

    Example
    -------
    >>> path = getfixture("tmp_path") / "stereo.wav"
    >>> soundfile.write(path, [[0.0, 0.5]] * 12000, 16000)
    >>> [tuple(block.shape) for block in read_blocks(path, block_samples=8000)]
    [(2, 8000), (2, 4000)]
    """
    if segment := find_segment(path):
        for start in range(0, audio_info(path).samples, block_samples):
            begin, count = _in_recording(segment, start, block_samples)
            yield _part(segment.recording, begin, count)[0].T
        return
    if inside := find_packed(path):
        packed, name = inside
        for start in range(0, packed.length(name), block_samples):
            one = torch.from_numpy(packed.read(name, start, block_samples))
            yield one.unsqueeze(0)
        return
    with _opened(path) as audio:
        count = 0
        while len(values := audio.read(block_samples, dtype="float32", always_2d=True)):
            count += len(values)
            yield torch.from_numpy(values).T
        report_cut(path, audio, count)
        if not count:
            raise ValueError(f"{path} holds no samples. Leave it out.")


def read_first_channel(path: str | Path, *, sample_rate: int) -> torch.Tensor:
    """Read the first channel of a file of one or more.

    Parameters
    ----------
    path : str or Path
        The file, for example of room responses, which may have a channel per
        microphone.
    sample_rate : int
        The rate that it must have, Hz.

    Returns
    -------
    torch.Tensor, [samples]

    Raises
    ------
    ValueError
        If the file cannot be read or has another rate.
    """
    values, file_rate = _part(*(find_segment(path) or (path, 0, None)))
    if file_rate != sample_rate:
        raise ValueError(_other_rate(path, file_rate, sample_rate))
    return values[:, 0].contiguous()


def _info_of_segment(segment: Segment) -> AudioInfo:
    """Give length, rate and channels of a segment, which must end within its recording."""
    whole = audio_info(segment.recording)
    left = whole.samples - segment.start
    if left < (segment.samples or 1):
        end = segment.start + (segment.samples or 1)
        raise ValueError(
            f"{segment.recording} has {whole.samples} samples, and a segment of it begins "
            f"at {segment.start} and ends at {end}: correct its times, or give the "
            "recording that they are of"
        )
    samples = left if segment.samples is None else segment.samples
    return AudioInfo(samples, whole.sample_rate, whole.channels)


def _in_recording(
    segment: Segment, start: int, samples: int | None
) -> tuple[int, int | None]:
    """Give start and length in the recording of a part of a segment."""
    if segment.samples is not None:
        left = max(0, segment.samples - start)
        samples = left if samples is None else min(samples, left)
    return segment.start + start, samples


def _part(
    path: str | Path, start: int, samples: int | None
) -> tuple[torch.Tensor, int]:
    """Read a range of a file or of one that is packed, as ``_decode``."""
    if inside := find_packed(path):
        packed, name = inside
        values = torch.from_numpy(packed.read(name, start, samples))
        return values.unsqueeze(1), packed.sample_rate
    return _decode(path, start, samples)


def _decode(
    path: str | Path, start: int, samples: int | None
) -> tuple[torch.Tensor, int]:
    """Decode a range: float32 [samples, channels], and the file's rate."""
    with _opened(path) as audio:
        start = audio.seek(min(start, audio.frames))
        if samples is not None:
            values = torch.from_numpy(
                audio.read(samples, dtype="float32", always_2d=True)
            )
            if len(values) < samples:
                report_cut(path, audio, start + len(values))
            return values, audio.samplerate
        blocks: list[torch.Tensor] = []
        while not blocks or len(blocks[-1]) == _BLOCK_SAMPLES:
            block = audio.read(_BLOCK_SAMPLES, dtype="float32", always_2d=True)
            blocks.append(torch.from_numpy(block))
        report_cut(path, audio, start + sum(map(len, blocks)))
        return torch.cat(blocks), audio.samplerate


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[soundfile.SoundFile]:
    """Open a file; every problem becomes the same kind of error."""
    try:
        with opened(path) as audio:
            yield audio
    except _REFUSALS as error:
        raise _unreadable(path, error) from error


def _other_rate(path: str | Path, rate: int, expected: int) -> str:
    return (
        f"{path} has {rate} samples per second, but {expected} are expected. Convert "
        f"the files (for example: sox IN -r {expected} OUT), or set sample_rate to "
        "what the files have."
    )


def _unreadable(path: str | Path, error: Exception) -> ValueError:
    reason = str(error)
    if isinstance(error, FileNotFoundError) or not file_of(path).exists():
        reason = "there is no such file"
    elif isinstance(error, UnicodeError):
        reason = "its name is not in UTF-8; rename it"
    elif isinstance(error, TypeError):
        reason = "it has no header; convert it to WAV or FLAC"
    # A name that is not in UTF-8 cannot be printed everywhere.
    shown = str(path).encode(errors="backslashreplace").decode()
    return ValueError(f"{shown} cannot be read as audio: {reason}")
