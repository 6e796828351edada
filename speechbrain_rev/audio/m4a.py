"""AAC in MP4 (.m4a), as VoxCeleb2 is published, by PyAV, which is imported here alone.

ffmpeg leaves out what the encoder put before the first sample and behind the last one. The
decoder of PyAV does the first; the second follows from the durations in the file.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

SUFFIX = ".m4a"
# The duration may be rounded to a movie's units, often 1 ms; a packet has 20 ms or more.
_ROUNDED_SECONDS = 0.01
_CONVERT = "ffmpeg -i IN.m4a -ar 16000 -ac 1 OUT.flac"


class M4aFile:
    """A file of AAC, which is decoded from its beginning, with soundfile's names.

    Parameters
    ----------
    file : binary file
        Open, with its path as its name.

    Raises
    ------
    ImportError
        If PyAV is not installed.
    ValueError
        If the file is damaged, no MP4 or has no audio. Of a cut behind the table of samples
        ``blocks`` raises.
    """

    lossy = True

    def __init__(self, file: BinaryIO) -> None:
        self._av, self._path = _pyav(file.name), file.name
        try:
            self._container = self._av.open(
                file, format="mp4", metadata_errors="ignore"
            )
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(error) from error
        if not self._container.streams.audio:
            self._container.close()
            raise ValueError(
                f"{file.name} cannot be read as audio: it has no stream of audio. Leave it "
                "out, or copy it again."
            )
        self._stream = self._container.streams.audio[0]
        #: Samples per second, and the number of channels.
        self.samplerate = int(self._stream.rate)
        self.channels = int(self._stream.channels)
        #: Samples by its header, None if it has none.
        self.header_samples: int | None = None
        if self._stream.duration:
            seconds = self._stream.duration * self._stream.time_base
            self.header_samples = round(seconds * self.samplerate)

    def __enter__(self) -> M4aFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Decode it, once.

        Yields
        ------
        numpy.ndarray, [samples, channels]
            Float32.

        Raises
        ------
        ValueError
            If it is cut short or damaged, or rate or channels change.
        """
        stream = self._stream
        to_float = self._av.AudioResampler(format="fltp")
        end, given = 0, 0
        last: NDArray[np.float32] | None = None
        try:
            for packet in self._container.demux(stream):
                if packet.pts is not None:
                    end = packet.pts + (packet.duration or 0)
                for frame in packet.decode():
                    if (frame.sample_rate, frame.layout.nb_channels) != (
                        self.samplerate,
                        self.channels,
                    ):
                        raise ValueError("its rate or channels change")
                    alike = frame.format.name == "fltp"
                    for part in [frame] if alike else to_float.resample(frame):
                        if last is not None:
                            given += len(last)
                            yield last
                        last = part.to_ndarray().T
            # Files in fragments have no table of samples, and ffmpeg leaves their end as it is.
            if stream.frames and stream.duration:
                if (stream.duration - end) * stream.time_base > _ROUNDED_SECONDS:
                    raise ValueError("packets of its end are missing")
                seconds = min(stream.duration, end) * stream.time_base
                rest = max(0, round(seconds * self.samplerate) - given)
                last = None if last is None else last[:rest]
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(error) from error
        if last is not None:
            yield last

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self._path} cannot be read as audio: it is cut short, damaged or no m4a "
            f"({error}). Copy it again."
        )


def _pyav(path: str) -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ImportError(
            f"{path} is m4a, which PyAV reads, and PyAV cannot be imported here ({error}): pip "
            f"install 'speechbrain_rev[m4a]', or convert each file: {_CONVERT}."
        ) from error
