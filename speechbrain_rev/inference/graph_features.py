"""Front-ends for graphs that leave PyTorch: spectra as convolutions, nothing else own.

A short-time Fourier transform is a convolution, whose weights are what the library makes
of unit impulses. ONNX has an operator STFT, which is slower and less exact in onnxruntime
1.32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization
from torch import Tensor, nn
from torchaudio.compliance import kaldi

from speechbrain_rev.inference.front_ends import (
    FULL_SCALE,
    KALDI_HOP_MS,
    KALDI_WINDOW_MS,
    fbank_frames,
    within,
    without_padding,
)

# Of torchaudio's kaldi.fbank, whose defaults front_ends leaves as they are.
_PREEMPHASIS, _LOW_HZ = 0.97, 20.0


class PowerSpectra(nn.Module):
    """Power spectra of overlapping windows, by a convolution.

    Parameters
    ----------
    transform : torch.Tensor, [window, bins], complex
        The spectrum of a unit impulse at each place of a window.
    hop : int
        Samples from one window to the next.
    padding : int
        Zeros before and after the signal.

    Examples
    --------
    >>> spectra = PowerSpectra(torch.fft.rfft(torch.eye(8)), hop=4, padding=0)
    >>> spectra(torch.ones(1, 16)).shape
    torch.Size([1, 3, 5])
    """

    weight: Tensor

    def __init__(self, transform: Tensor, *, hop: int, padding: int) -> None:
        super().__init__()
        self.hop, self.padding = hop, padding
        parts = torch.cat([transform.real, transform.imag], dim=1)
        self.register_buffer("weight", parts.T.unsqueeze(1).float().contiguous())

    def forward(self, waveforms: Tensor) -> Tensor:
        """Map [batch, samples] to [batch, time, bins]."""
        parts = F.conv1d(
            waveforms.unsqueeze(1), self.weight, stride=self.hop, padding=self.padding
        )
        real, imaginary = parts.chunk(2, dim=1)
        return (real.square() + imaginary.square()).transpose(1, 2)


class SpeechBrainGraphFbank(nn.Module):
    """``SpeechBrainFbank`` in operators of any runtime.

    Parameters
    ----------
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.

    Examples
    --------
    >>> samples = torch.tensor([16000, 8000])
    >>> features, lengths = SpeechBrainGraphFbank()(torch.randn(2, 16000), samples)
    >>> features.shape, lengths.shape
    (torch.Size([2, 101, 80]), torch.Size([2]))
    """

    def __init__(self, *, n_mels: int = 80, sample_rate: int = 16000) -> None:
        super().__init__()
        self.sample_rate = sample_rate
        fbank = Fbank(n_mels=n_mels, sample_rate=sample_rate)
        stft = fbank.compute_STFT
        impulses = torch.eye(stft.n_fft, dtype=torch.float64)
        transform = torch.stft(
            impulses, stft.n_fft, stft.hop_length, stft.win_length,
            stft.window.double(), center=False, return_complex=True,
        ).squeeze(2)  # fmt: skip
        self.power_spectra = PowerSpectra(
            transform, hop=stft.hop_length, padding=stft.n_fft // 2
        )
        self.compute_fbanks = fbank.compute_fbanks
        self.mean_var_norm = InputNormalization(norm_type="sentence", std_norm=False)

    def forward(self, waveforms: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features [batch, time, n_mels] and relative lengths [batch]."""
        power = self.power_spectra(waveforms)
        frames, longest = fbank_frames(samples, self.sample_rate), power.shape[1]
        features = self.compute_fbanks(without_padding(power, frames))
        return self.mean_var_norm(features, within(frames, longest)), frames / longest


class KaldiGraphFbank(nn.Module):
    """``KaldiFbank`` in operators of any runtime, for a whole batch at once.

    Parameters
    ----------
    n_mels : int
        Mel bands.
    sample_rate : int
        Hertz.

    Examples
    --------
    >>> samples = torch.tensor([16000, 8000])
    >>> features, lengths = KaldiGraphFbank()(torch.randn(2, 16000), samples)
    >>> features.shape, lengths.shape
    (torch.Size([2, 98, 80]), torch.Size([2]))
    """

    mels: Tensor

    def __init__(self, *, n_mels: int = 80, sample_rate: int = 16000) -> None:
        super().__init__()
        self.window = sample_rate * KALDI_WINDOW_MS // 1000
        self.hop = sample_rate * KALDI_HOP_MS // 1000
        n_fft = 1 << (self.window - 1).bit_length()
        frames = FULL_SCALE * torch.eye(self.window, dtype=torch.float64)
        frames = frames - frames.mean(dim=1, keepdim=True)
        before = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
        hamming = torch.hamming_window(self.window, periodic=False).double()
        windowed = (frames - _PREEMPHASIS * before) * hamming
        transform = torch.fft.rfft(windowed, n_fft)
        self.power_spectra = PowerSpectra(transform, hop=self.hop, padding=0)
        filters, _ = kaldi.get_mel_banks(
            n_mels, n_fft, sample_rate, _LOW_HZ, 0.0, 100.0, -500.0, 1.0
        )
        # The highest bin is in none of them.
        self.register_buffer("mels", F.pad(filters, (0, 1)).T.contiguous())
        self.mean_var_norm = InputNormalization(norm_type="sentence", std_norm=False)

    def forward(self, waveforms: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features [batch, time, n_mels] and relative lengths [batch].

        No utterance may be shorter than a window: in a graph that cannot be refused, and
        what is given means nothing.
        """
        # The mean of each window is taken off in the convolution, where a larger constant
        # would take the precision of what is left.
        offset = waveforms.sum(dim=1, keepdim=True) / samples.unsqueeze(1)
        energies = self.power_spectra(waveforms - offset) @ self.mels
        features = energies.clamp_min(torch.finfo(torch.float32).eps).log()
        frames = 1 + (samples - self.window) // self.hop
        longest = features.shape[1]
        return self.mean_var_norm(features, within(frames, longest)), frames / longest


#: By the word that hyperparams.yaml has for each.
GRAPH_FRONT_ENDS: dict[str, type[SpeechBrainGraphFbank] | type[KaldiGraphFbank]] = {
    "speechbrain": SpeechBrainGraphFbank,
    "kaldi": KaldiGraphFbank,
}
