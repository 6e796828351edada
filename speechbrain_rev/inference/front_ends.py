"""From waveforms to features, and models that take waveforms.

A front-end takes utterances padded to one length, and gives relative lengths with their
features, so that none depends on what it is batched with. It computes in float32, under
autocast too.

``WaveformEncoder`` and ``FbankStatistics`` embed each utterance of a batch as if alone.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization, spectral_magnitude
from torch import Tensor, nn

from speechbrain_rev.filterbanks import FILTERBANKS, WINDOW_MS
from speechbrain_rev.lobes.description import FrontEnd
from speechbrain_rev.lobes.features import KaldiFilterbanks
from speechbrain_rev.reversible.replay import autocast_off


def usable_device(device: str | torch.device | None) -> torch.device:
    """Check that a device is one that embedding runs on, and that it is there.

    Parameters
    ----------
    device : str, torch.device or None
        ``cpu``, ``cuda`` or ``cuda:N``; None takes the GPU if there is one.

    Returns
    -------
    torch.device

    Raises
    ------
    ValueError
        If it is another one, or this machine has no such GPU.

    Example
    -------
    >>> usable_device("cpu")
    device(type='cpu')
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device takes cpu, cuda, or cuda:N for the GPU of number N, not {device}."
        )
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (chosen.index or 0) >= count:
            raise ValueError(
                f"device {device} is not there: torch sees {count} CUDA devices. "
                "`speechbrain-rev env` shows them; cpu always works."
            )
    return chosen


#: As the knob ``precision`` of training has them.
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def usable_precision(precision: str, device: torch.device) -> Precision:
    """Check that an encoder computes in a format on a device, and gains by it.

    Parameters
    ----------
    precision : {"fp32", "bf16", "fp16"}
        The format of convolutions under autocast; features, pooling and embeddings stay
        in float32.
    device : torch.device
        Where it runs.

    Returns
    -------
    Precision

    Raises
    ------
    ValueError
        If there is no such format, or the device has no use for it.

    Example
    -------
    >>> usable_precision("bf16", torch.device("cpu"))
    'bf16'
    """
    precisions: dict[object, Precision] = {name: name for name in get_args(Precision)}
    if precision not in precisions:
        raise ValueError(
            f"precision takes {', '.join(get_args(Precision))}, not {precision!r}."
        )
    if precision == "fp16" and device.type == "cpu":
        raise ValueError(
            "precision fp16 is for GPUs: a CPU computes convolutions in it many times "
            "slower than in float32. Give precision bf16 or fp32, or another device."
        )
    if precision == "bf16" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise ValueError(
                f"precision bf16 needs a GPU of compute capability 8.0, and {device} has "
                f"{'.'.join(map(str, capability))}. Give precision fp16 or fp32."
            )
    return precisions[precision]


def computing_in(precision: Precision, device: torch.device) -> torch.autocast:
    """Let what follows compute in a format: a context manager.

    Example
    -------
    >>> with computing_in("bf16", torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    half = precision != "fp32"
    dtype = _DTYPES[precision] if half else None
    return torch.autocast(device.type, dtype, enabled=half)


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
        with autocast_off(waveforms.device):
            frames = FILTERBANKS["speechbrain"].frames(
                _whole_lengths(waveforms) if samples is None else samples,
                self.sample_rate,
            )
            features = padded_fbank(self.compute_features, waveforms, frames)
            counted = within(frames, features.shape[1])
            normalised = self.mean_var_norm(features, counted)
        lengths = None if samples is None else frames.float() / features.shape[1]
        return normalised, lengths


class KaldiFbank(nn.Module):
    """The features of Kaldi as WeSpeaker takes them: no dither, their mean removed.

    An utterance has those frames only that lie within it.

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
        self.sample_rate = sample_rate
        self.compute_features = KaldiFilterbanks(n_mels=n_mels, sample_rate=sample_rate)
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
            Filterbanks; those of padding mean nothing.
        lengths : torch.Tensor, [batch], or None
            Relative, 1.0 for an utterance of all frames; None if none is padded.

        Raises
        ------
        ValueError
            If an utterance is shorter than a window.
        """
        counts = _whole_lengths(waveforms) if samples is None else samples
        frames = FILTERBANKS["kaldi"].frames(counts, self.sample_rate)
        if frames.min() < 1:
            raise ValueError(
                f"an utterance has {counts.min()} samples, but a window of Kaldi's "
                f"filterbanks has {self.sample_rate * WINDOW_MS // 1000} ({WINDOW_MS} ms). "
                "Leave it out."
            )
        features = self.compute_features(waveforms)
        normalised = self.mean_var_norm(features, within(frames, features.shape[1]))
        lengths = None if samples is None else frames.float() / features.shape[1]
        return normalised, lengths


#: By the word that hyperparams.yaml has for each.
FRONT_ENDS: dict[str, type[SpeechBrainFbank] | type[KaldiFbank]] = {
    "speechbrain": SpeechBrainFbank,
    "kaldi": KaldiFbank,
}


#: The features of this package's training.
DEFAULT = FrontEnd("speechbrain", 16000, 80)


def _whole_lengths(waveforms: Tensor) -> Tensor:
    batch, samples = waveforms.shape
    return torch.full((batch,), samples, device=waveforms.device, dtype=torch.int64)


def padded_fbank(fbank: Fbank, waveforms: Tensor, frames: Tensor) -> Tensor:
    """Compute SpeechBrain's filterbanks of utterances that are padded, each as if alone.

    Parameters
    ----------
    fbank : speechbrain.lobes.features.Fbank
        Without deltas and without context.
    waveforms : torch.Tensor, [batch, samples]
        Padded with zeros to the longest.
    frames : torch.Tensor, [batch]
        How many frames of each are its own.

    Returns
    -------
    torch.Tensor, [batch, time, n_mels]
        Filterbanks, in decibels; those of padding mean nothing.

    Example
    -------
    >>> padded_fbank(Fbank(), torch.randn(2, 16000), torch.tensor([101, 51])).shape
    torch.Size([2, 101, 40])
    """
    power = spectral_magnitude(fbank.compute_STFT(waveforms))
    features: Tensor = fbank.compute_fbanks(without_padding(power, frames))
    return features


def without_padding(power: Tensor, frames: Tensor) -> Tensor:
    """Set the power of padding's frames to zero.

    SpeechBrain's floor lies 80 dB below the loudest of all frames it is given, and the
    first frames of padding still hold an utterance's last samples.

    Parameters
    ----------
    power : torch.Tensor, [batch, time, bins]
        Power spectra.
    frames : torch.Tensor, [batch]
        How many frames of each utterance are its own.

    Returns
    -------
    torch.Tensor, [batch, time, bins]
        Power spectra.

    Example
    -------
    >>> without_padding(torch.ones(2, 3, 1), torch.tensor([3, 1])).squeeze(2).tolist()
    [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    """
    positions = torch.arange(power.shape[1], device=power.device, dtype=torch.int64)
    is_speech = positions < frames.to(power.device).unsqueeze(1)
    return power.where(is_speech.unsqueeze(2), 0)


def within(frames: Tensor, longest: int) -> Tensor:
    """Give relative lengths that end in the middle of the last frame.

    SpeechBrain's mask is of the product of length and longest, which rounding may put on
    either side of a whole number: some pairs of lengths lose a frame or gain one.

    Parameters
    ----------
    frames : torch.Tensor, [batch]
        How many frames of each utterance are its own.
    longest : int
        How many frames there are with padding.

    Returns
    -------
    torch.Tensor, [batch]
        Relative lengths, below 1.

    Example
    -------
    >>> within(torch.tensor([4, 2]), 4).tolist()
    [0.875, 0.375]
    """
    return (frames.float() - 0.5) / longest


class WaveformEncoder(nn.Module):
    """Put the front-end that an encoder was trained with before it.

    Parameters
    ----------
    encoder : nn.Module
        Takes filterbanks [batch, time, n_mels] and relative lengths [batch] or None.
    front_end : FrontEnd
        How the features are made that the encoder was trained with.

    Example
    -------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("revnet46", widths=(8,) * 4, blocks=(1,) * 4)
    >>> WaveformEncoder(encoder)(torch.randn(2, 16000)).shape
    torch.Size([2, 1, 256])
    """

    def __init__(
        self,
        encoder: nn.Module,
        front_end: FrontEnd = DEFAULT,
    ):
        super().__init__()
        self.front_end = FRONT_ENDS[front_end.kind](
            n_mels=front_end.n_mels, sample_rate=front_end.sample_rate
        )
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
        Whether the mean over a sentence is half of the description. It depends on
        the microphone and its place, too. Encoders are given filterbanks without it:
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
            samples = _whole_lengths(waveforms)
        frames = FILTERBANKS["speechbrain"].frames(samples, self.sample_rate)
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
