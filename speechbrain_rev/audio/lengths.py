"""How long audio files are: where headers promise more, say nothing, or are overlooked.

libsndfile reads a file that is cut short to its end, silently. Where a header has no length,
it reads no samples, or reports the largest number. Of NIST and W64 it reads what follows the
samples as if it were some.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import soundfile

from .shards import FilePart, find_member

logger = logging.getLogger(__name__)

#: Formats of libsndfile of which it is known whether they are whole; others (VOC, IRCAM,
#: MAT, ...) do not show it, or hold no speech.
FORMATS = (
    "WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "NIST", "FLAC", "OGG", "MP3",
)  # fmt: skip

# Writers of streams, whose end is not known, put no size, or about one of these
# (0x7F000000 sox for AIFF, 0x7FFFF000 sox, 0x80000000 arecord, 0xFFFFFFFF ffmpeg).
_STREAMS = (range(0x7EFF_0000, 0x8000_1000), range(0xFFFF_0000, 2**32))
# Formats whose samples depend on those before.
_LOSSY = ("OGG", "MP3")
# An OGG page has at most as many bytes; its head has as many.
_OGG_PAGE_BYTES, _OGG_HEAD_BYTES = 27 + 255 + 255 * 255, 27
# Bytes behind the samples that are no chunk and are passed over, 32 ms of 16-bit samples at 16 kHz;
# what tags begin with, which may be longer; and how much is looked at.
_MOST_PASSED_OVER, _LOOKED_AT = 1024, 2**16
_TAGS = (b"TAG", b"ID3", b"APETAGEX")
# A header of NIST has 1024; what is not read of a longer one is not needed.
_NIST_BYTES = 2**16
_COUNTED_AT_ONCE = 2**16
# A frame of MP3 has fewer; bit rates by whether it is MPEG 1, and rates of MPEG 1.
_MP3_HEAD_BYTES = 4096
_MP3_KILOBITS = (
    (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
)
_MP3_HERTZ = (44100, 48000, 32000)
# Before, libsndfile ended with the last whole frame, without a word.
_REPORTS_CUT_FLAC = (1, 2, 2)


@dataclass(frozen=True)
class _Chunks:
    """How a format of chunks writes them: each a name, a size and so many bytes."""

    first: int
    name_bytes: int
    size: str
    #: Bytes before the content that the size counts.
    counted: int
    #: What the size is where there are no samples.
    least: int
    #: Chunks begin at multiples of this.
    multiple: int
    data: bytes
    #: Whether libsndfile reads on behind the samples.
    runs_on: bool = False

    @property
    def head(self) -> int:
        return self.name_bytes + struct.calcsize(self.size)


_RIFF = _Chunks(12, 4, "<I", 0, 0, 2, b"data")
_CHUNKS = {
    b"RIFF": _RIFF,
    b"RIFX": _Chunks(12, 4, ">I", 0, 0, 2, b"data"),
    b"RF64": _RIFF,
    b"BW64": _RIFF,
    b"FORM": _Chunks(12, 4, ">I", 0, 8, 2, b"SSND"),
    # W64, whose names have 16 bytes.
    b"riff": _Chunks(40, 16, "<Q", 24, 24, 8, b"data", runs_on=True),
    b"caff": _Chunks(8, 4, ">Q", 0, 4, 1, b"data"),
}
_AU = {b".snd": ">I", b"dns.": "<I"}


@dataclass(frozen=True)
class _Samples:
    """Where the samples of a file are, by its header."""

    begin: int
    #: Bytes, None where it does not say how many.
    size: int | None
    #: Whether libsndfile reads on behind them.
    runs_on: bool = False
    #: What the header has to say, and where, so that libsndfile reads all of them.
    place: int = 0
    instead: bytes = b""


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
    if inside := find_member(path):
        tar, member = inside
        if member is None:
            raise FileNotFoundError(f"{tar} has no member of this name")
        name, begin, size = f"{tar}/{member.name}", member.begin, member.size
        return cast(BinaryIO, FilePart(open(tar, "rb"), begin, size, name=name))
    return open(path, "rb")


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[soundfile.SoundFile]:
    """Open a file that is as long as it says, or has the length that its header lacks.

    FLAC without a length in its header is decoded as a whole to find it.

    Parameters
    ----------
    path : str or Path
        Any file, or a member of a tar.

    Yields
    ------
    soundfile.SoundFile
        Its ``frames`` are those that there are, unless it is not ``seekable``: of OGG and
        MP3, which are read from the beginning alone, they may be an estimate.

    Raises
    ------
    ValueError
        If it ends before its samples do or goes on behind them, or is of a format in which
        this cannot be known.
    soundfile.LibsndfileError, TypeError, UnicodeError, OSError
        If it cannot be read.
    """
    with contextlib.ExitStack() as files:
        file = files.enter_context(open_bytes(path))
        samples = _samples(file)
        file_bytes = end = _bytes_of(file)
        if samples is not None and samples.size is not None:
            end = samples.begin + samples.size
        source = _source(path, file)
        if samples is not None and (
            samples.instead or (samples.runs_on and end < file_bytes)
        ):
            size, place = min(end, file_bytes), samples.place
            source = FilePart(file, 0, size, place=place, instead=samples.instead)
        file.seek(0)
        audio = files.enter_context(_Sound(source))
        if audio.format not in FORMATS:
            raise ValueError(
                f"{path} cannot be read as audio: the format {audio.format} does not "
                "show whether a file is whole. Convert it to WAV or FLAC."
            )
        if end > file_bytes:
            assert samples is not None
            raise ValueError(
                f"{path} cannot be read as audio: it is cut short, {end - file_bytes} of "
                f"{samples.size} bytes of data are missing. Copy or convert it again."
            )
        yield audio


def _source(path: str | Path, file: BinaryIO) -> Any:
    """Give what libsndfile opens: a path, which it reads faster, unless it is in a tar."""
    return file if isinstance(file, FilePart) else str(path)


def report_cut(path: str | Path, audio: soundfile.SoundFile, count: int) -> None:
    """Refuse a file that is shorter than its header says, or warn of an estimate.

    Parameters
    ----------
    path : str or Path
        The file.
    audio : soundfile.SoundFile
        The same, open.
    count : int
        Samples of each channel that came.

    Raises
    ------
    ValueError
        If its header says more, and is no estimate.
    """
    missing = (
        f"{path} seems to be cut short: its header says {audio.frames} samples, and there "
        f"are {count}. Copy or convert it again."
    )
    if audio.format == "MP3":
        # Editors leave headers as they were: an estimate.
        if count < audio.frames:
            logger.warning(missing)
    elif audio.format == "OGG":
        # It has no length in its header: libsndfile finds the last page, or not.
        if not _marks_its_end(path):
            logger.warning(
                f"{path} seems to be cut short after {count} samples: its last page is "
                "not marked as the end. If that is not how it was recorded, copy it again."
            )
    elif count < audio.frames:
        raise ValueError(missing)


class _Sound(soundfile.SoundFile):  # type: ignore[misc]
    """A file that does not seek where other samples would come.

    Those of MP3 at 16 kHz are off by up to 0.3 of full scale. soundfile seeks behind each
    block that it read, too.
    """

    @functools.cached_property
    def _seeks(self) -> bool:
        lossy = self.format in _LOSSY or self.subtype.startswith("MPEG")
        return not lossy and bool(super().seekable())

    def seekable(self) -> bool:
        return self._seeks


class _Forward(soundfile.SoundFile):  # type: ignore[misc]
    """A file of unknown length: to seek behind its end, as soundfile does, is an error."""

    def seekable(self) -> bool:
        return False


def _samples(file: BinaryIO) -> _Samples | None:
    """Find what a header says of its samples; None for other formats."""
    base = _behind_tag(file)
    file.seek(base)
    magic = file.read(4)
    if magic in _CHUNKS:
        return _of_chunks(file, base, _CHUNKS[magic])
    if magic in _AU:
        head = file.read(8)
        if len(head) == 8:
            form = _AU[magic]
            offset, size = struct.unpack(f"{form}I", head)
            return _as_said(file, base + 8, form, base + offset, size)
    if magic == b"NIST":
        return _of_nist(file, base)
    if magic == b"fLaC":
        return _of_flac(file, base)
    if magic == b"OggS":
        _refuse_chain(file, base)
        return None
    return _of_mp3(file, base)


def _bytes_of(file: BinaryIO) -> int:
    return file.seek(0, io.SEEK_END)


def _behind_tag(file: BinaryIO) -> int:
    """Find where a file begins behind an ID3 tag, which libsndfile skips."""
    head = file.read(10)
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    # Seven bits of each byte count.
    return 10 + sum(
        (byte & 127) << shift
        for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True)
    )


def _of_chunks(file: BinaryIO, base: int, chunks: _Chunks) -> _Samples | None:
    large = None
    for begin, name, size in _walk(file, base, chunks, base + chunks.first):
        if name == b"ds64":
            large = begin + 8
        if name[:4] != chunks.data:
            continue
        place, form = begin - struct.calcsize(chunks.size), chunks.size
        if large is not None and size == 0xFFFF_FFFF:
            place, form = large, "<Q"
            file.seek(place)
            (size,) = struct.unpack(form, file.read(8).ljust(8, b"\0"))
        start = begin - chunks.counted
        if size <= chunks.least:
            if _only_chunks(file, base, chunks, start + chunks.least):
                return None
            size = 0
        samples = _as_said(file, place, form, start, size, chunks.runs_on)
        if samples.size is not None:
            _refuse_more(file, base, chunks, start, samples.size)
        return samples
    return None


def _walk(
    file: BinaryIO, base: int, chunks: _Chunks, position: int
) -> Iterator[tuple[int, bytes, int]]:
    """Go from chunk to chunk: where the content begins, the name, and the size."""
    while True:
        file.seek(position)
        head = file.read(chunks.head)
        if len(head) < chunks.head:
            return
        begin = position + chunks.head
        (size,) = struct.unpack(chunks.size, head[chunks.name_bytes :])
        yield begin, head[: chunks.name_bytes], size
        end = max(begin, begin - chunks.counted + size) - base
        position = base + end + -end % chunks.multiple


def _only_chunks(file: BinaryIO, base: int, chunks: _Chunks, position: int) -> bool:
    """Return whether other chunks follow and nothing else: then there are no samples."""
    return _bytes_of(file) - _behind(file, base, chunks, position) < chunks.multiple


def _behind(file: BinaryIO, base: int, chunks: _Chunks, position: int) -> int:
    """Go from chunk to chunk, to where something else begins or the file ends."""
    whole = _bytes_of(file)
    for begin, name, size in _walk(file, base, chunks, position):
        end, kind = begin - chunks.counted + size, name[:4]
        printable = kind.isascii() and kind.decode().isprintable()
        # One of these begins another file.
        if not printable or kind in _CHUNKS or end > whole:
            break
        position = end
    return position


def _refuse_more(
    file: BinaryIO, base: int, chunks: _Chunks, start: int, size: int
) -> None:
    """Refuse a file of which more follows the samples than chunks, a tag or zeros."""
    whole, end = _bytes_of(file), start + size
    if whole - end <= _MOST_PASSED_OVER:
        return
    # Not all writers make the size of a chunk even.
    ends = {end, end + (base - end) % chunks.multiple}
    behind = max(_behind(file, base, chunks, one) for one in ends)
    file.seek(behind)
    rest = file.read(_LOOKED_AT)
    if whole - behind > _MOST_PASSED_OVER and any(rest) and not rest.startswith(_TAGS):
        raise ValueError(
            f"{file.name} cannot be read as audio: {whole - behind} bytes follow the {size} "
            "bytes of samples that its header says. Files were joined, or it was not "
            "written to its end: convert it again from the original."
        )


def _refuse_chain(file: BinaryIO, base: int) -> None:
    """Refuse OGG of several streams one after another: libsndfile reads the first."""
    position, begun = base, False
    while True:
        file.seek(position)
        head = file.read(_OGG_HEAD_BYTES)
        if len(head) < _OGG_HEAD_BYTES or not head.startswith(b"OggS"):
            return
        # Behind the version, flags: 2 at the first page of a stream.
        if head[5] & 2 and begun:
            raise ValueError(
                f"{file.name} cannot be read as audio: it is several OGG files joined, of "
                "which the first alone would be read. Convert it: ffmpeg -i IN OUT.flac."
            )
        begun = begun or not head[5] & 2
        position += _OGG_HEAD_BYTES + head[26] + sum(file.read(head[26]))


def _of_nist(file: BinaryIO, base: int) -> _Samples | None:
    """Read the header of NIST, which is lines of text."""
    file.seek(base)
    head = file.read(_NIST_BYTES).partition(b"end_head")[0]
    lines = head.split(b"\n", 2)
    # libsndfile writes some numbers as texts.
    fields = re.findall(rb"^(\w+) -(?:i|s\d+) (\d{1,18})\s*$", head, re.MULTILINE)
    known = {name: int(number) for name, number in fields}
    names = b"sample_count", b"channel_count", b"sample_n_bytes"
    if len(lines) < 3 or not re.fullmatch(rb" *\d{1,9} *", lines[1]):
        return None
    if not all(known.get(name) for name in names):
        return None
    return _Samples(base + int(lines[1]), math.prod(known[n] for n in names), True)


def _of_flac(file: BinaryIO, base: int) -> _Samples | None:
    """Read the first block of FLAC; where it does not say how long it is, count."""
    place = base + 21
    file.seek(place)
    head = file.read(5)
    if len(head) < 5 or int.from_bytes(head, "big") % 2**36:
        return None
    version = soundfile.__libsndfile_version__
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _REPORTS_CUT_FLAC:
        raise ValueError(
            f"{file.name} cannot be read as audio: it does not say how long it is, and "
            f"libsndfile {version} not whether it is whole. Convert it again, or install "
            "soundfile 0.13 or newer."
        )
    changed = os.fstat(file.fileno()).st_mtime_ns
    count = _decoded(str(file.name), _bytes_of(file), changed)
    if not count:
        raise ValueError(f"{file.name} holds no samples. Leave it out.")
    total = (int.from_bytes(head, "big") + count).to_bytes(5, "big")
    return _Samples(base, None, place=place, instead=total)


def _of_mp3(file: BinaryIO, base: int) -> _Samples | None:
    """Read the first frame of MP3; where it says fewer than there are, count.

    libsndfile decodes as many frames as it says, and of files that were joined that is a
    part.
    """
    file.seek(base)
    content = file.read(_MP3_HEAD_BYTES)
    first = _mp3_frame(content, 0)
    # The tag is where the side information of the frame would end.
    place = max(content.find(name, 0, min(first, 64)) for name in (b"Xing", b"Info"))
    if place < 0 or len(content) < place + 12 or not content[place + 7] & 1:
        return None
    said = int.from_bytes(content[place + 8 : place + 12], "big")
    content += file.read()
    count, begin = 0, first
    while size := _mp3_frame(content, begin):
        begin, count = begin + size, count + 1
    if begin > len(content):
        count -= 1
    if count <= said:
        return None
    return _Samples(
        base, None, place=base + place + 8, instead=count.to_bytes(4, "big")
    )


def _mp3_frame(content: bytes, begin: int) -> int:
    """Give the bytes of the frame of MP3 that begins at a place; 0 if none does."""
    head = int.from_bytes(content[begin : begin + 4], "big")
    # 11 bits of synchronisation, version, layer III, a bit rate and a rate.
    version, bits, rate = head >> 19 & 3, head >> 12 & 15, head >> 10 & 3
    if head >> 21 != 0x7FF or version == 1 or head >> 17 & 3 != 1 or rate == 3:
        return 0
    rates = _MP3_KILOBITS[version == 3]
    if not 0 < bits <= len(rates):
        return 0
    hertz = _MP3_HERTZ[rate] >> (0 if version == 3 else 1 if version == 2 else 2)
    factor = 144 if version == 3 else 72
    return factor * rates[bits - 1] * 1000 // hertz + (head >> 9 & 1)


@functools.lru_cache(maxsize=1024)
def _decoded(path: str, file_bytes: int, changed: int) -> int:
    """Count samples; of a file that is looked at, and then read, once."""
    del file_bytes, changed
    count = 0
    with open_bytes(path) as file, _Forward(_source(path, file)) as audio:
        block = np.empty((_COUNTED_AT_ONCE, audio.channels), np.float32)
        while got := len(audio.read(out=block)):
            count += got
    return count


def _as_said(
    file: BinaryIO, place: int, form: str, start: int, size: int, runs_on: bool = False
) -> _Samples:
    """Take the size that a header has at a place, or the rest of a file for none."""
    most = 256 ** struct.calcsize(form) - 1
    rest = max(0, _bytes_of(file) - start)
    # ffmpeg writes the largest number, with or without a sign.
    if size == 0 or (size > rest and size in (most // 2, most)):
        if rest > most:
            raise ValueError(
                f"{file.name} cannot be read as audio: it holds {rest} bytes, more than "
                "its kind of header can say. Convert it to FLAC."
            )
        instead = struct.pack(form, rest)
        return _Samples(start, None, place=place, instead=instead)
    is_stream = form[1] == "I" and any(size in sizes for sizes in _STREAMS)
    return _Samples(start, None if is_stream and size > rest else size, runs_on)


def _marks_its_end(path: str | Path) -> bool:
    """Return whether the last page of an OGG file is marked as the last."""
    with open_bytes(path) as file:
        file.seek(max(0, file.seek(0, 2) - _OGG_PAGE_BYTES))
        _, capture, page = file.read().rpartition(b"OggS")
    # After the version, a byte of flags.
    return bool(capture) and len(page) > 1 and bool(page[1] & 4)
