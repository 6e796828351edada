"""A model at work: recordings in, embeddings out, in batches or in windows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from speechbrain.utils.distributed import if_main_process
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from speechbrain_rev.inference.audio import Channels, check_channels, check_choice
from speechbrain_rev.inference.batches import batch_size, read_batches
from speechbrain_rev.inference.precisions import Precision, computing_in
from speechbrain_rev.inference.recordings import Recording
from speechbrain_rev.inference.windows import (
    WindowGroups,
    Windows,
    check_window,
    windows_of,
)

logger = logging.getLogger(__name__)

#: Takes the position of an utterance that cannot be embedded, and why.
OnBad = Callable[[int, Exception], None]

_MANY = 20


class _DivergedError(ValueError):
    """The encoder's fault, and not that of the audio."""


class RunningModel:
    """Embed recordings with a model, on its device and in its precision.

    Parameters
    ----------
    model : nn.Module
        As of ``SpeakerEmbedder``; in eval mode and on the device.
    sample_rate : int
        Hertz of what it takes.
    device : torch.device
        Where it is.
    precision : {"fp32", "bf16", "fp16"}
        What it computes in under autocast.

    Example
    -------
    >>> from speechbrain_rev.inference import FbankStatistics
    >>> running = RunningModel(
    ...     FbankStatistics(),
    ...     sample_rate=16000,
    ...     device=torch.device("cpu"),
    ...     precision="fp32",
    ... )
    >>> running.run([torch.randn(16000), torch.randn(8000)]).shape
    (2, 160)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sample_rate: int,
        device: torch.device,
        precision: Precision,
    ):
        self.model, self.sample_rate = model, sample_rate
        self.device, self.precision = device, precision

    def each(
        self,
        found: Sequence[Recording],
        channels: Channels,
        window: float | None,
        on_bad: OnBad | None = None,
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Embed recordings as ``SpeakerEmbedder.embed_each`` does.

        Yields
        ------
        index : int
            Position of a recording.
        embedding : numpy.ndarray, [embedding_dim], float32
        """
        channels = check_choice(channels)
        if window is not None:
            check_window(window, window, "window")
        mixed: list[str] = []
        silent: list[str] = []

        def refuse(index: int, error: Exception) -> None:
            if on_bad is None:
                raise error
            on_bad(index, error)
            progress.update()

        def read(index: int) -> Tensor | None:
            try:
                waveform, count = found[index].waveform(self.sample_rate, channels)
            except (ValueError, OSError) as error:
                refuse(index, error)
                return None
            if count > 1:
                mixed.append(f"{found[index].what} ({count})")
            return waveform

        long = set() if window is None else self._longer(found, window)
        short = [index for index in range(len(found)) if index not in long]
        with tqdm(
            total=len(found),
            desc="embedding",
            unit="utt",
            disable=len(found) < _MANY or not if_main_process(),
        ) as progress:
            for group in read_batches(short, read, self.device):
                indices, waveforms = zip(*group, strict=True)
                yield from zip(indices, self.run(waveforms), strict=True)
                progress.update(len(group))
            for index in sorted(long):
                one = found[index]
                try:
                    cut, count = self._cut(one, channels, window), one.header()[2]
                except _DivergedError:
                    raise
                except (ValueError, OSError) as error:
                    refuse(index, error)
                    continue
                if count > 1:
                    mixed.append(f"{one.what} ({count})")
                if out := len(cut.silent):
                    of_all = out + len(cut.embeddings)
                    silent.append(f"{one.what} ({out} of {of_all})")
                yield index, cut.mean()
                progress.update()
        done = "were averaged" if channels == "mean" else f"give channel {channels}"
        _tell(mixed, len(found), f"have several channels, which {done}")
        _tell(silent, len(found), "have silent windows, which do not count")

    def _longer(self, found: Sequence[Recording], window: float) -> set[int]:
        """Find the recordings that are longer than a window."""
        longer = set()
        for index, one in enumerate(found):
            try:
                samples, rate, _ = one.header()
            except (ValueError, OSError):
                # It is told of where it is read.
                continue
            if samples > window * rate:
                longer.add(index)
        return longer

    def _cut(self, one: Recording, channels: Channels, window: float | None) -> Windows:
        # Without a window no recording is longer than one.
        assert window is not None
        return self.windows(one, channels, float(window), float(window))

    def windows(
        self, one: Recording, channels: Channels, seconds: float, hop: float
    ) -> Windows:
        """Embed a recording as ``SpeakerEmbedder.windows`` does."""
        check_window(seconds, hop)
        channels = check_choice(channels)
        _, _, count = one.header()
        check_channels(count, channels, one.what)
        samples = round(seconds * self.sample_rate)
        cut = windows_of(
            one,
            self.sample_rate,
            channels,
            window_samples=samples,
            hop_samples=round(hop * self.sample_rate),
        )
        groups = WindowGroups(cut, batch_size(samples, self.device))
        rows = [self.run(group) for group in groups]
        return groups.result(rows, self.sample_rate, one.what)

    @torch.no_grad()
    def run(self, waveforms: Sequence[Tensor]) -> NDArray[np.float32]:
        """Embed waveforms [samples] at the model's sample rate, as one batch.

        Returns
        -------
        numpy.ndarray, [n, embedding_dim], float32

        Raises
        ------
        ValueError
            If the model gives NaN or infinity.
        """
        padded = pad_sequence(list(waveforms), batch_first=True).to(self.device)
        counts = [len(w) for w in waveforms]
        samples = None
        if min(counts) < max(counts):
            samples = torch.tensor(counts, device=self.device)
        with computing_in(self.precision, self.device):
            embeddings = self.model(padded, samples).squeeze(1).float().cpu()
        if not embeddings.isfinite().all():
            raise _DivergedError(
                "the encoder gave NaN or infinity for audio that is finite. "
                + _REMEDIES[self.precision]
            )
        return np.asarray(embeddings.numpy())


_DIVERGED = "Its weights are from a training that has diverged: use an earlier one."
_REMEDIES = {
    "fp32": _DIVERGED,
    "bf16": _DIVERGED,
    "fp16": "Numbers beyond 65,504 are none in fp16: give precision bf16 or fp32. If that "
    "does not help, its weights are from a training that has diverged.",
}


def _tell(which: Sequence[str], total: int, what: str) -> None:
    if which:
        logger.warning(
            "%d of %d utterances %s: %s",
            len(which),
            total,
            what,
            ", ".join(which[:5]) + (", ..." if len(which) > 5 else ""),
        )
