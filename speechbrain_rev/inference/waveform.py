"""Models that take waveforms: an encoder behind training's features, and a baseline.

Both take batches of utterances padded to one length and embed each as if it were alone.
"""

from __future__ import annotations

import torch
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization
from torch import Tensor, nn

# Of Fbank, which centres its frames: an utterance has one more than whole hops.
_HOPS_PER_SECOND = 100


class WaveformEncoder(nn.Module):
    """Put training's features before an encoder.

    Parameters
    ----------
    encoder : nn.Module
        Takes filterbanks [batch, time, n_mels] and relative lengths [batch] or None.
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.

    Example
    -------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("revnet57", widths=(8,) * 4, blocks=(1,) * 4)
    >>> WaveformEncoder(encoder)(torch.randn(2, 16000)).shape
    torch.Size([2, 1, 256])
    """

    def __init__(
        self, encoder: nn.Module, *, n_mels: int = 80, sample_rate: int = 16000
    ):
        super().__init__()
        self.sample_rate = sample_rate
        self.compute_features = Fbank(n_mels=n_mels, sample_rate=sample_rate)
        self.mean_var_norm = InputNormalization(norm_type="sentence", std_norm=False)
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
        features = self.compute_features(waveforms)
        lengths = None
        if samples is not None:
            lengths = _frames(samples, self.sample_rate) / features.shape[1]
        whole = torch.ones(len(features), device=features.device)
        normalised = self.mean_var_norm(features, whole if lengths is None else lengths)
        embeddings: Tensor = self.encoder(normalised, lengths)
        return embeddings


class FbankStatistics(nn.Module):
    """Describe an utterance without a model: mean and deviation of its filterbanks.

    The baseline that a trained network must be clearly better than. Nothing is
    normalised, since the mean over a sentence is half of what it describes.

    Parameters
    ----------
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.

    Example
    -------
    >>> FbankStatistics()(torch.randn(2, 16000)).shape
    torch.Size([2, 1, 160])
    """

    def __init__(self, *, n_mels: int = 80, sample_rate: int = 16000):
        super().__init__()
        self.sample_rate = sample_rate
        self.compute_features = Fbank(n_mels=n_mels, sample_rate=sample_rate)

    def forward(self, waveforms: Tensor, samples: Tensor | None = None) -> Tensor:
        """Map [batch, samples], of which ``samples`` count, to [batch, 1, 2 * n_mels]."""
        features = self.compute_features(waveforms)
        frames = [features.shape[1]] * len(features)
        if samples is not None:
            frames = _frames(samples, self.sample_rate).tolist()
        return torch.stack(
            [
                torch.cat([f[:n].mean(dim=0), f[:n].std(dim=0)])
                for f, n in zip(features, frames, strict=True)
            ]
        ).unsqueeze(1)


def _frames(samples: Tensor, sample_rate: int) -> Tensor:
    return 1 + samples // (sample_rate // _HOPS_PER_SECOND)
