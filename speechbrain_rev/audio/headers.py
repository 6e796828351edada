"""Sizes in the headers of WAV, RF64 and SPHERE: whether a file is as long as it says.

libsndfile reads a file that is cut short to its end, silently. Of a stream, whose writer did
not know its end, it may read nothing; of SPHERE it reads what follows the samples as if it
were some.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

# Writers of streams put 0 or about one of these sizes (0x7FFFF000 sox, 0x80000000 arecord,
# 0xFFFFFFFF ffmpeg); of RF64 the largest number.
_STREAMS = (
    range(0x7FFF_0000, 0x8000_1000),
    range(0xFFFF_0000, 2**32),
    range(2**64 - 1, 2**64),
)
_RIFF = {b"RIFF": "<", b"RIFX": ">", b"RF64": "<", b"BW64": "<"}
# Bytes behind the last chunk that are passed over, 32 ms of 16-bit samples at 16 kHz; how
# much of more bytes is looked at, and what tags begin with.
_MOST_PASSED_OVER, _LOOKED_AT = 1024, 2**16
_TAGS = (b"TAG", b"ID3", b"APETAGEX")
# A header of SPHERE has 1024 bytes or some more.
_SPHERE_BYTES = 2**16
# Bytes of a sample, by libsndfile's names of what is not compressed further.
_WIDTHS = {
    "PCM_U8": 1, "ULAW": 1, "ALAW": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4,
    "DOUBLE": 8,
}  # fmt: skip


class Sizes(NamedTuple):
    """What the header of a file says of its samples, in bytes.

    Attributes
    ----------
    end : int
        Where the samples end; where the file does, if it is a stream.
    size : int
        How many bytes they have.
    head : bytes
        The header that libsndfile must read, of the part of the file that ends with the
        samples: of a stream one that has a size, of SPHERE its own. Empty where libsndfile
        reads the file itself right.
    widths : frozenset of int
        Bytes of a sample by other numbers of the header than those that libsndfile reads.
    """

    end: int
    size: int
    head: bytes = b""
    widths: frozenset[int] = frozenset()

    def check(self, path: str | Path, file_bytes: int, subtype: str) -> None:
        """Refuse a file that is cut short, or whose header contradicts itself.

        Parameters
        ----------
        path : str or Path
            How errors call the file.
        file_bytes : int
            Its length.
        subtype : str
            How libsndfile reads its samples: ``PCM_16``, for example.

        Raises
        ------
        ValueError
            If bytes are missing, or the samples have another width by other numbers of the
            header.
        """
        if self.end > file_bytes:
            raise ValueError(
                f"{path} cannot be read as audio: it is cut short, {self.end - file_bytes} "
                f"of {self.size} bytes of data are missing. Copy or convert it again."
            )
        width = _WIDTHS.get(subtype)
        if width is not None and (others := self.widths - {width}):
            raise ValueError(
                f"{path} cannot be read as audio: its header says {8 * width} bits for a "
                f"sample, and sizes as of {8 * min(others)}. Convert it again from the "
                "original."
            )


def read_sizes(file: BinaryIO) -> Sizes | None:
    """Read the sizes in the header of WAV, RF64 or SPHERE.

    Parameters
    ----------
    file : binary file
        With its path as its name.

    Returns
    -------
    Sizes or None
        None of other formats, and of a file without samples.

    Raises
    ------
    ValueError
        If more follows the samples than chunks and tags, or a stream is longer than its
        kind of header can say.
    """
    magic = _bytes_at(file, 0, 4)
    if magic in _RIFF:
        return _read_riff(file, _RIFF[magic])
    return _read_sphere(file) if magic == b"NIST" else None


def _read_riff(file: BinaryIO, order: str) -> Sizes | None:
    whole, wide, widths = file.seek(0, io.SEEK_END), None, frozenset[int]()
    for begin, name, size in _chunks(file, 12, order):
        if name == b"ds64":
            wide = begin + 8
        if name == b"fmt ":
            widths = _widths(_bytes_at(file, begin, 16), order)
        if name != b"data":
            continue
        place, form = begin - 4, f"{order}I"
        if wide is not None and size == 0xFFFF_FFFF:
            place, form = wide, "<Q"
            (size,) = struct.unpack(form, _bytes_at(file, place, 8).ljust(8, b"\0"))
        rest = whole - begin
        if size == 0 and whole - _end_of_chunks(file, begin, order, whole) < 2:
            return None
        if size == 0 or (size > rest and any(size in sizes for sizes in _STREAMS)):
            if rest >= 256 ** struct.calcsize(form):
                raise ValueError(
                    f"{file.name} cannot be read as audio: it holds {rest} bytes, more than "
                    "its kind of header can say. Convert it to FLAC."
                )
            head = bytearray(_bytes_at(file, 0, begin))
            struct.pack_into(form, head, place, rest)
            return Sizes(whole, rest, head=bytes(head), widths=widths)
        if rest - size > _MOST_PASSED_OVER:
            _refuse_more(file, begin + size, order, whole)
        return Sizes(begin + size, size, widths=widths)
    return None


def _bytes_at(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)


def _chunks(
    file: BinaryIO, position: int, order: str
) -> Iterator[tuple[int, bytes, int]]:
    """Go from chunk to chunk: where the content begins, the name, and the size."""
    while len(head := _bytes_at(file, position, 8)) == 8:
        name, size = struct.unpack(f"{order}4sI", head)
        yield position + 8, name, size
        position += 8 + size + size % 2


def _widths(form: bytes, order: str) -> frozenset[int]:
    """Give the bytes of a sample by bytes per second and by bytes of all channels."""
    if len(form) < 16:
        return frozenset()
    _, channels, rate, per_second, block, _ = struct.unpack(f"{order}HHIIHH", form)
    return frozenset(
        width
        for width in _WIDTHS.values()
        if block == width * channels or per_second == width * channels * rate
    )


def _end_of_chunks(file: BinaryIO, position: int, order: str, whole: int) -> int:
    """Go from chunk to chunk, to where something else begins or the file ends."""
    for begin, name, size in _chunks(file, position, order):
        is_name = name.isascii() and name.decode().isprintable()
        if not is_name or name in _RIFF or begin + size > whole:
            break
        position = begin + size
    return position


def _refuse_more(file: BinaryIO, end: int, order: str, whole: int) -> None:
    """Refuse a file of which more follows the samples than chunks, a tag or zeros."""
    # Not all writers make the size of a chunk even.
    behind = max(_end_of_chunks(file, end + odd, order, whole) for odd in {0, end % 2})
    rest = _bytes_at(file, behind, _LOOKED_AT)
    if whole - behind > _MOST_PASSED_OVER and any(rest) and not rest.startswith(_TAGS):
        raise ValueError(
            f"{file.name} cannot be read as audio: {whole - behind} bytes follow the samples "
            "that its header says. Files were joined, or it was not written to its end: "
            "convert it again from the original."
        )


def _read_sphere(file: BinaryIO) -> Sizes | None:
    """Read the header of SPHERE, which is lines of text."""
    head = _bytes_at(file, 0, _SPHERE_BYTES).partition(b"end_head")[0]
    # libsndfile writes some numbers as texts.
    fields = re.findall(rb"^(\w+) -(?:i|s\d+) (\d{1,18})\s*$", head, re.MULTILINE)
    numbers = {name: int(number) for name, number in fields}
    names = b"sample_count", b"channel_count", b"sample_n_bytes"
    begin = re.match(rb"NIST_1A *\n *(\d{1,9}) *\n", head)
    if begin is None or not all(numbers.get(name) for name in names):
        return None
    size = math.prod(numbers[name] for name in names)
    return Sizes(int(begin[1]) + size, size, head=head)
