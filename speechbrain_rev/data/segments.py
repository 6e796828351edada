"""Segments of recordings, as paths: `rec.wav/16000+32000.wav` is a part of `rec.wav`.

No file can lie in a file, so that such a path means nothing else; lists, manifests and
readers take it wherever they take the path of a file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_SEGMENT = re.compile(r"(.+)[/\\](\d+)\+(\d*)\.\w+")


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
    """

    recording: Path
    start: int
    samples: int | None

    def path(self) -> Path:
        """Give the path that stands for it.

        Example
        -------
        >>> Segment(Path("rec.wav"), 16000, 32000).path().as_posix()
        'rec.wav/16000+32000.wav'
        """
        length = "" if self.samples is None else self.samples
        return self.recording / f"{self.start}+{length}{self.recording.suffix}"


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
    found = _SEGMENT.fullmatch(os.fspath(path))
    # A folder may hold a file of such a name.
    if found is None or os.path.isdir(found[1]):
        return None
    return Segment(Path(found[1]), int(found[2]), int(found[3]) if found[3] else None)
