"""Audio files that end before their sound does."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import soundfile

logger = logging.getLogger(__name__)

# Writers of streams, whose end is not known, put no size, or this or more
# (0x7FFFF000 sox, 0x80000000 arecord, 0xFFFFFFFF ffmpeg).
_STREAM_BYTES = 0x7FFF_F000
# An OGG page has at most as many bytes.
_OGG_PAGE_BYTES = 27 + 255 + 255 * 255


def refuse_cut_wav(path: str | Path) -> None:
    """Refuse a WAV file that ends before its data do, at which libsndfile is silent.

    Parameters
    ----------
    path : str or Path
        Any file.

    Raises
    ------
    ValueError
        If it is one.
    """
    with open(path, "rb") as file:
        position, is_riff = 12, file.read(4) == b"RIFF"
        file_bytes = file.seek(0, 2)
        while is_riff and position + 8 <= file_bytes:
            file.seek(position)
            name, chunk_bytes = struct.unpack("<4sI", file.read(8))
            missing_bytes = position + 8 + chunk_bytes - file_bytes
            if name == b"data":
                if chunk_bytes < _STREAM_BYTES and missing_bytes > 0:
                    raise ValueError(
                        f"{path} cannot be read as audio: it is cut short, "
                        f"{missing_bytes} of {chunk_bytes} bytes of data are missing. "
                        "Copy or convert it again."
                    )
                return
            # Chunks begin at even bytes.
            position += 8 + chunk_bytes + chunk_bytes % 2


def tell_of_cut(path: str | Path, audio: soundfile.SoundFile, count: int) -> None:
    """Refuse or warn of a file of which fewer samples came than it was to have.

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


def _marks_its_end(path: str | Path) -> bool:
    """Tell whether the last page of an OGG file says that it is the last."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _OGG_PAGE_BYTES))
        _, capture, page = file.read().rpartition(b"OggS")
    # After the version, a byte of flags.
    return bool(capture) and len(page) > 1 and bool(page[1] & 4)
