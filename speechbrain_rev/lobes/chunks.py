"""How many channels are worked on at a time, for a working set of some bytes."""

from __future__ import annotations

#: Bytes of one map of a chunk, for an utterance of 200 frames, where nothing is said.
AUTO = 1_024_000
_FRAMES = 200
_LEVELS = 4


def channels_by_level(chunk: int | str | None, n_mels: int) -> list[int | None]:
    """Turn a working set into channels at each level of an encoder.

    Channels decide in which order numbers are added up, hence bits. They depend on the
    encoder alone: not on the batch, and not on the length of utterances.

    Parameters
    ----------
    chunk : int, "auto" or None
        Bytes of the float32 map of one chunk, for an utterance of 200 frames; None
        works on all channels at once.
    n_mels : int
        Frequencies at the first level; each next one has half of them.

    Returns
    -------
    list of int, or of None
        Channels at a time, at least 1, at 4 levels.

    Raises
    ------
    ValueError
        If chunk is something else.

    Examples
    --------
    >>> channels_by_level(256_000, n_mels=80)
    [4, 16, 64, 256]
    """
    if chunk is None:
        return [None] * _LEVELS
    size = AUTO if chunk == "auto" else chunk
    if type(size) is not int or size < 1:
        raise ValueError(
            f"chunk is {chunk!r}; it takes 'auto', a number of bytes, or null to work on "
            "all channels at once."
        )
    channels: list[int | None] = []
    freq, frames = n_mels, _FRAMES
    for _ in range(_LEVELS):
        channels.append(max(1, size // (4 * freq * frames)))
        freq, frames = -(-freq // 2), -(-frames // 2)
    return channels
