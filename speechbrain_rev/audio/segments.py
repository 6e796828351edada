"""Segments of recordings, as paths: `rec.wav/16000+32000.wav` is a part of `rec.wav`.

No file can lie in a file, so that such a path means nothing else; lists, manifests and
readers take it wherever they take the path of a file. A recording may be a file of a packed
folder or a member of a tar. `rec.wav/16000+32000@1.wav` is of its second channel.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from .shards import find_tar

_SEGMENT = re.compile(r"(.+)[/\\](\d+)\+(\d*)(?:@(\d+))?\.\w+")


class Segment(NamedTuple):
    """A part of a recording.

    Attributes
    ----------
    recording : Path
        Its file.
    start : int
        First sample.
    samples : int or None
        How many; None for all that follow.
    channel : int or None
        Of the recording, from 0 on; None for what the reader takes.
    """

    recording: Path
    start: int
    samples: int | None
    channel: int | None = None

    def path(self) -> Path:
        """Give the path that stands for it.

        Example
        -------
        >>> Segment(Path("rec.wav"), 16000, 32000).path().as_posix()
        'rec.wav/16000+32000.wav'
        """
        length = "" if self.samples is None else self.samples
        channel = "" if self.channel is None else f"@{self.channel}"
        return self.recording / f"{self.start}+{length}{channel}{self.recording.suffix}"


def find_segment(path: str | Path) -> Segment | None:
    """Give the segment that a path stands for; None if it is that of a file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Segment or None

    Example
    -------
    >>> find_segment("rec.wav/16000+32000.wav").samples
    32000
    >>> find_segment("speaker/16000.wav") is None
    True
    """
    text = os.fspath(path)
    # Most paths have none, which is seen at once.
    found = _SEGMENT.fullmatch(text) if "+" in text else None
    # A folder, a packed one or a tar may hold a file of such a name.
    if found is None or os.path.isdir(found[1]):
        return None
    if (inside := find_tar(path)) and inside[0].member(inside[1]):
        return None
    samples, channel = (int(text) if text else None for text in found.groups()[2:])
    return Segment(Path(found[1]), int(found[2]), samples, channel)


def file_of(path: str | Path) -> Path:
    """Give the file of a disk in which audio is, which is there or not.

    Parameters
    ----------
    path : str or Path
        Of a file, a segment of one or a member of a tar.

    Returns
    -------
    Path

    Example
    -------
    >>> file_of("rec.wav/16000+32000.wav").as_posix()
    'rec.wav'
    """
    if segment := find_segment(path):
        return file_of(segment.recording)
    inside = find_tar(path)
    return Path(path if inside is None else inside[0].tar)


def audio_exists(path: str | Path) -> bool:
    """Return whether there is such a file, in a folder, a packed one or a tar.

    A segment is there if its recording is.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    bool
    """
    return bytes_of(path) is not None


def bytes_of(path: str | Path) -> int | None:
    """Give the bytes of a file wherever it is, of a segment its recording's; None if none."""
    if segment := find_segment(path):
        return bytes_of(segment.recording)
    if inside := find_tar(path):
        tar, name = inside
        part = tar.member(name)
        return None if part is None else part[1]
    return os.stat(path).st_size if os.path.isfile(path) else None
