"""Models that take waveforms: an encoder behind its front-end, and a baseline.

Both take batches of utterances padded to one length and embed each as if it were alone.
"""

from __future__ import annotations

import torch
from speechbrain.lobes.features import Fbank
from torch import Tensor, nn

from speechbrain_rev.inference.front_ends import FRONT_ENDS, fbank_frames, padded_fbank
from speechbrain_rev.reversible.autocast import autocast_off


class WaveformEncoder(nn.Module):
    """Put the front-end that an encoder was trained with before it.

    Parameters
    ----------
    encoder : nn.Module
        Takes filterbanks [batch, time, n_mels] and relative lengths [batch] or None.
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.
    front_end : {"speechbrain", "kaldi"}
        Whose filterbanks: those of this package's training, or WeSpeaker's.

    Example
    -------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("revnet57", widths=(8,) * 4, blocks=(1,) * 4)
    >>> WaveformEncoder(encoder)(torch.randn(2, 16000)).shape
    torch.Size([2, 1, 256])
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        n_mels: int = 80,
        sample_rate: int = 16000,
        front_end: str = "speechbrain",
    ):
        super().__init__()
        if front_end not in FRONT_ENDS:
            raise ValueError(
                f"front_end must be one of {', '.join(FRONT_ENDS)}, but is {front_end!r}."
            )
        self.front_end = FRONT_ENDS[front_end](n_mels=n_mels, sample_rate=sample_rate)
        self.encoder = encoder

    def forward(self, waveforms: Tensor, samples: Tensor | None = None) -> Tensor:
        """Embed a batch.

        Parameters
        ----------
        waveforms : torch.Tensor, [batch, samples]
            Utterances, padded with zeros to the longest.
        samples : torch.Tensor, [batch], or None
            How many samples of each are its own; None if none is padded.

        Returns
        -------
        torch.Tensor, [batch, 1, embedding_dim]
            Embeddings.
        """
        features, lengths = self.front_end(waveforms, samples)
        embeddings: Tensor = self.encoder(features, lengths)
        return embeddings


class FbankStatistics(nn.Module):
    """Describe an utterance without a model: mean and deviation of its filterbanks.

    The baseline that a trained network must be clearly better than.

    Parameters
    ----------
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.
    mean : bool
        Whether the mean over a sentence is half of the description. It tells of the
        microphone and the room, too, and encoders are given filterbanks without it:
        False describes no more than they see.

    Example
    -------
    >>> FbankStatistics()(torch.randn(2, 16000)).shape
    torch.Size([2, 1, 160])
    >>> FbankStatistics(mean=False)(torch.randn(2, 16000)).shape
    torch.Size([2, 1, 80])
    """

    def __init__(
        self, *, n_mels: int = 80, sample_rate: int = 16000, mean: bool = True
    ):
        super().__init__()
        self.sample_rate = sample_rate
        self.mean = mean
        self.compute_features = Fbank(n_mels=n_mels, sample_rate=sample_rate)

    def forward(self, waveforms: Tensor, samples: Tensor | None = None) -> Tensor:
        """Map [batch, samples], of which ``samples`` count, to [batch, 1, statistics]."""
        if samples is None:
            samples = torch.full((len(waveforms),), waveforms.shape[1])
        frames = fbank_frames(samples, self.sample_rate)
        with autocast_off(waveforms.device):
            features = padded_fbank(self.compute_features, waveforms, frames)
        return torch.stack(
            [
                torch.cat([f[:n].mean(dim=0), f[:n].std(dim=0)])
                if self.mean
                else f[:n].std(dim=0)
                for f, n in zip(features, frames.tolist(), strict=True)
            ]
        ).unsqueeze(1)
