"""What is done to speech: noise at a ratio of powers, and a room."""

from __future__ import annotations

import torch
from scipy.fft import next_fast_len
from torchaudio.functional import fftconvolve


def add_noise(
    wav: torch.Tensor, noise: torch.Tensor, snr_db: float | torch.Tensor
) -> torch.Tensor:
    """Add noise at a signal-to-noise ratio.

    Parameters
    ----------
    wav, noise : torch.Tensor, [..., samples]
        Silent noise changes nothing.
    snr_db : float or torch.Tensor, [..., 1]
        Ratio of the powers, dB.

    Returns
    -------
    torch.Tensor, [..., samples]

    Example
    -------
    >>> wav, noise = torch.ones(100), torch.full((100,), 5.0)
    >>> noisy = add_noise(wav, noise, snr_db=20.0)
    >>> round((noisy - wav).mean().item(), 6)
    0.1
    """
    power, noise_power = (x.square().mean(dim=-1, keepdim=True) for x in (wav, noise))
    gain = torch.sqrt(power / noise_power / 10 ** (snr_db / 10))
    return wav + torch.where(noise_power > 0, gain, 0.0) * noise


def reverberate(wav: torch.Tensor, rir: torch.Tensor) -> torch.Tensor:
    """Put speech into a room.

    Parameters
    ----------
    wav : torch.Tensor, [..., samples]
    rir : torch.Tensor, [..., taps]
        Impulse response; its energy and its delay up to the direct path do not matter.
        A silent one changes nothing.

    Returns
    -------
    torch.Tensor, [..., samples]

    Example
    -------
    >>> wav = torch.tensor([0.0, 1.0, 2.0, 3.0])
    >>> late_and_loud = torch.tensor([0.0, 0.0, 7.0])
    >>> torch.allclose(reverberate(wav, late_and_loud), wav, atol=1e-6)
    True
    """
    samples = wav.shape[-1]
    # Transforms of a length with large prime factors are many times slower.
    fast = next_fast_len(samples + rir.shape[-1] - 1, real=True)
    rir = torch.nn.functional.pad(rir, (0, fast - samples + 1 - rir.shape[-1]))
    energy = rir.square().sum(dim=-1, keepdim=True)
    echoed = fftconvolve(wav, rir / energy.sqrt())
    direct_path = rir.abs().argmax(dim=-1, keepdim=True)
    places = direct_path + torch.arange(samples, device=wav.device)
    return torch.where(energy > 0, echoed.gather(-1, places), wav)
