"""Filterbanks of training batches, by Kaldi's definition or SpeechBrain's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchaudio.compliance import kaldi

from speechbrain_rev.audio.packed import FULL_SCALE
from speechbrain_rev.filterbanks import FILTERBANKS, HOP_MS, WINDOW_MS
from speechbrain_rev.reversible.replay import autocast_off

# WeSpeaker's standard deviation of the noise in training: one step of 16-bit samples.
_DITHER = 1.0
# 16 utterances at a time stay in a CPU's cache: 128 took three times as long.
_UTTERANCES_AT_ONCE = 16


class KaldiFilterbanks(nn.Module):
    """Kaldi's filterbanks, with the arguments of SpeechBrain's Fbank.

    Log energies of Hamming windows, as in WeSpeaker. All windows lie within the utterance.
    They are computed in float32, under autocast too.

    Parameters
    ----------
    sample_rate : int
        Hertz.
    n_mels : int
        Mel bands.
    win_length, hop_length : float
        Milliseconds of a window, and from one to the next.
    dither : float
        Standard deviation of the noise in training, on the scale of 16-bit samples. Each
        window has its own, drawn from torch's global generator. Evaluation adds none.

    Examples
    --------
    >>> KaldiFilterbanks(n_mels=80)(torch.randn(2, 32240)).shape
    torch.Size([2, 200, 80])
    """

    def __init__(
        self,
        *,
        sample_rate: int = 16000,
        n_mels: int = 80,
        win_length: float = WINDOW_MS,
        hop_length: float = HOP_MS,
        dither: float = 0.0,
    ) -> None:
        super().__init__()
        self.sample_rate, self.n_mels = sample_rate, n_mels
        self.win_length, self.hop_length = win_length, hop_length
        self.dither = dither

    def forward(self, waveforms: Tensor) -> Tensor:
        """Compute features.

        Parameters
        ----------
        waveforms : torch.Tensor, [batch, samples]
            Samples from -1 to 1; at least one window.

        Returns
        -------
        torch.Tensor, [batch, time, n_mels]
            Natural logarithms of the energies.
        """

        def compute(waveform: Tensor) -> Tensor:
            features: Tensor = kaldi.fbank(
                # Kaldi's floor of energies is that of 16-bit samples.
                waveform.unsqueeze(0) * FULL_SCALE,
                num_mel_bins=self.n_mels,
                frame_length=self.win_length,
                frame_shift=self.hop_length,
                sample_frequency=self.sample_rate,
                window_type="hamming",
                dither=self.dither if self.training else 0.0,
            )
            return features

        batched = torch.vmap(
            compute, randomness="different", chunk_size=_UTTERANCES_AT_ONCE
        )
        with autocast_off(waveforms.device):
            return batched(waveforms)


def build_features(kind: str, *, sample_rate: int, n_mels: int) -> nn.Module:
    """Make the filterbanks of training.

    Parameters
    ----------
    kind : str
        A key of ``speechbrain_rev.filterbanks.FILTERBANKS``.
    sample_rate : int
        Hertz.
    n_mels : int
        Mel bands.

    Returns
    -------
    nn.Module
        Maps [batch, samples] to [batch, time, n_mels]. Kaldi's add dither in training.

    Examples
    --------
    >>> features = build_features("speechbrain", sample_rate=16000, n_mels=80)
    >>> features(torch.randn(2, 31840)).shape
    torch.Size([2, 200, 80])
    """
    dither = {"dither": _DITHER} if kind == "kaldi" else {}
    features: nn.Module = FILTERBANKS[kind].made(
        sample_rate=sample_rate,
        n_mels=n_mels,
        win_length=WINDOW_MS,
        hop_length=HOP_MS,
        **dither,
    )
    return features
