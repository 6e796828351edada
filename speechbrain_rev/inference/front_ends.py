"""From waveforms to the filterbanks an encoder was trained on, each sentence's mean removed.

A front-end takes utterances padded to one length, and gives relative lengths with their
features, so that none depends on what it is batched with.
"""

from __future__ import annotations

import torch
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchaudio.compliance import kaldi

# Of Fbank, which centres its frames: an utterance has one more than whole hops.
_HOPS_PER_SECOND = 100
_KALDI_WINDOW_MS, _KALDI_HOP_MS = 25, 10
# Kaldi reads samples of 16 bits as they are, and its floor of energies is of their size.
_FULL_SCALE = 1 << 15


class SpeechBrainFbank(nn.Module):
    """The features of this package's training: SpeechBrain's Fbank, its mean removed.

    Parameters
    ----------
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.

    Example
    -------
    >>> features, lengths = SpeechBrainFbank()(torch.randn(2, 16000))
    >>> features.shape, lengths
    (torch.Size([2, 101, 80]), None)
    """

    def __init__(self, *, n_mels: int = 80, sample_rate: int = 16000):
        super().__init__()
        self.sample_rate = sample_rate
        self.compute_features = Fbank(n_mels=n_mels, sample_rate=sample_rate)
        self.mean_var_norm = InputNormalization(norm_type="sentence", std_norm=False)

    def forward(
        self, waveforms: Tensor, samples: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute features.

        Parameters
        ----------
        waveforms : torch.Tensor, [batch, samples]
            From -1 to 1, padded with zeros to the longest.
        samples : torch.Tensor, [batch], or None
            How many samples of each are its own; None if none is padded.

        Returns
        -------
        features : torch.Tensor, [batch, time, n_mels]
            Filterbanks.
        lengths : torch.Tensor, [batch], or None
            Relative, 1.0 for an utterance of all frames; None if none is padded.
        """
        features = self.compute_features(waveforms)
        lengths = None
        if samples is not None:
            lengths = fbank_frames(samples, self.sample_rate) / features.shape[1]
        whole = torch.ones(len(features), device=features.device)
        normalised = self.mean_var_norm(features, whole if lengths is None else lengths)
        return normalised, lengths


class KaldiFbank(nn.Module):
    """The features of Kaldi as WeSpeaker takes them: no dither, their mean removed.

    Log energies of Hamming windows of 25 ms each 10 ms, from samples on the scale of 16
    bits; an utterance has those frames only that lie within it.

    Parameters
    ----------
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.

    Example
    -------
    >>> features, lengths = KaldiFbank()(torch.randn(2, 16000))
    >>> features.shape, lengths
    (torch.Size([2, 98, 80]), None)
    """

    def __init__(self, *, n_mels: int = 80, sample_rate: int = 16000):
        super().__init__()
        self.n_mels, self.sample_rate = n_mels, sample_rate

    def forward(
        self, waveforms: Tensor, samples: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute features.

        Parameters
        ----------
        waveforms : torch.Tensor, [batch, samples]
            From -1 to 1, padded with zeros to the longest.
        samples : torch.Tensor, [batch], or None
            How many samples of each are its own; None if none is padded.

        Returns
        -------
        features : torch.Tensor, [batch, time, n_mels]
            Filterbanks.
        lengths : torch.Tensor, [batch], or None
            Relative, 1.0 for an utterance of all frames; None if none is padded.

        Raises
        ------
        ValueError
            If an utterance is shorter than a window.
        """
        counts = [waveforms.shape[1]] * len(waveforms)
        if samples is not None:
            counts = samples.tolist()
        window = self.sample_rate * _KALDI_WINDOW_MS // 1000
        if min(counts) < window:
            raise ValueError(
                f"an utterance has {min(counts)} samples, but a window of Kaldi's "
                f"filterbanks has {window} ({_KALDI_WINDOW_MS} ms). Leave it out."
            )
        features = [
            self._features(waveform[:count])
            for waveform, count in zip(waveforms, counts, strict=True)
        ]
        padded = pad_sequence(features, batch_first=True)
        if samples is None:
            return padded, None
        frames = torch.tensor([len(f) for f in features], device=padded.device)
        return padded, frames / padded.shape[1]

    def _features(self, waveform: Tensor) -> Tensor:
        features: Tensor = kaldi.fbank(
            waveform.unsqueeze(0) * _FULL_SCALE,
            num_mel_bins=self.n_mels,
            frame_length=_KALDI_WINDOW_MS,
            frame_shift=_KALDI_HOP_MS,
            sample_frequency=self.sample_rate,
            window_type="hamming",
            dither=0.0,
            use_energy=False,
        )
        return features - features.mean(dim=0)


#: By the word that hyperparams.yaml has for each.
FRONT_ENDS: dict[str, type[SpeechBrainFbank] | type[KaldiFbank]] = {
    "speechbrain": SpeechBrainFbank,
    "kaldi": KaldiFbank,
}


def fbank_frames(samples: Tensor, sample_rate: int) -> Tensor:
    """Count the frames that SpeechBrain's Fbank makes of so many samples."""
    return 1 + samples // (sample_rate // _HOPS_PER_SECOND)
