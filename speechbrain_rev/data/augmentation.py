"""Speed, noise and reverberation, drawn for each utterance of a training batch."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from scipy.fft import next_fast_len
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from torch.nn.utils.rnn import pad_sequence
from torchaudio.functional import fftconvolve

from speechbrain_rev.audio import audio_info, read_audio
from speechbrain_rev.audio.packed import find_packed
from speechbrain_rev.audio.resampling import resample
from speechbrain_rev.processes import process_rank

from .corpora import noise_files
from .dataset import repeat_to
from .rows import counted
from .seeding import generator, read_step, write_step

logger = logging.getLogger(__name__)

# Signal-to-noise ratios, dB, of the Kaldi x-vector recipe for MUSAN's three folders:
# speech serves as babble there. "babble" itself is ours.
_SNR_OF_FOLDER = {"music": (5.0, 15.0), "speech": (13.0, 20.0), "babble": (13.0, 20.0)}
# Batches whose labels are checked on a GPU: each check waits for it.
_LOOKS = (1, 10, 100, 1000)


def check_noise(settings: Mapping[str, Any]) -> None:
    """Refuse folders of noise or room impulse responses that are not there.

    Parameters
    ----------
    settings : mapping
        Of a run; ``noise_folder`` and ``rir_folder`` are looked at.

    Raises
    ------
    ValueError
        If one does not exist, or lies in a packed folder that cannot be read.

    Example
    -------
    >>> check_noise({"noise_folder": getfixture("tmp_path"), "rir_folder": None})
    """
    for option in ("noise_folder", "rir_folder"):
        folder = settings.get(option)
        try:
            # A folder of a packed one is no folder of a disk.
            there = folder is None or os.path.exists(folder) or find_packed(folder)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error
        if not there:
            raise ValueError(
                f"{option} is {folder}, which does not exist. Give a folder of audio or a "
                "list of files, or null for none."
            )


def at_speed(wavs: torch.Tensor, speed: float) -> torch.Tensor:
    """Play speech at another speed, which moves the pitch as well.

    Parameters
    ----------
    wavs : torch.Tensor, [batch, samples]
        Speech.
    speed : float
        Factor of the speed; above 1 is faster.

    Returns
    -------
    torch.Tensor, [batch, samples / speed]

    Example
    -------
    >>> at_speed(torch.zeros(2, 1100), 1.1).shape
    torch.Size([2, 1000])
    """
    # Small integers keep the resampling kernel small: 1.1 is 11 to 10.
    return resample(wavs, 1 / Fraction(speed).limit_denominator(1000))


@register_checkpoint_hooks
class SpeakerAugment:
    """Augment a batch of speech for speaker training, as SpeechBrain's `wav_augment`.

    Each utterance is first played at one of `speeds` (which moves the pitch as well,
    so that each speed makes a new speaker: label + k * number of speakers), cut to
    `chunk_samples` at a random place, then, with `augment_prob`, made noisy or
    reverberant; which of the two is drawn evenly where both folders are given.

    Noise comes from a random place of a random file, repeated where it is too short,
    at a signal-to-noise ratio drawn evenly from [`snr_low`, `snr_high`]. Files below
    folders called music, speech and babble (MUSAN has the first two) use 5 to 15, 13
    to 20 and 13 to 20 dB instead. A room impulse response has its energy set to 1
    and its strongest peak moved to time 0, so that speech keeps its place and level.

    All draws come from a generator seeded with (seed, rank, step): ranks differ, and a
    resumed run needs the step alone to draw what it would have drawn.

    Parameters
    ----------
    out_n_neurons : int
        Classes of the classifier: training speakers times the number of speeds.
    chunk_samples : int
        Samples of an utterance that leave; 31,840 give 200 frames, as SpeechBrain's
        centre-padded Fbank makes samples // 160 + 1.
    sample_rate : int
        Rate of the speech and of the files in both folders, Hz.
    resample, channel : bool, and int, "mix" or None
        What is done to files of another rate or of several channels, as of
        ``read_audio``; of impulse responses the first channel is taken.
    speeds : sequence of float
        Speeds, 1.0 among them, which keeps the labels whatever its place.
    augment_prob : float
        Probability of noise or reverberation.
    snr_low, snr_high : float
        Range of signal-to-noise ratios, dB.
    noise_folder, rir_folder : str or Path, optional
        Audio at any depth, or a list of them (``data.FORMATS``), which need
        name no speakers. With neither, only the speed changes. They are listed by the
        first batch, for SpeechBrain's script downloads them when this is built already.
    max_unread : int
        Files of both folders that may turn out not to be readable; the next one takes the
        place of such a file. One more is an error.
    seed : int
        Seed of all draws.

    Raises
    ------
    ValueError
        If settings contradict each other; at the first use, if a folder holds no audio.

    Example
    -------
    >>> augment = SpeakerAugment(out_n_neurons=30, chunk_samples=16000)
    >>> wavs, lens = augment(torch.randn(4, 17600), torch.ones(4))
    >>> wavs.shape
    torch.Size([4, 16000])
    >>> labels = augment.replicate_labels(torch.tensor([[3], [1], [4], [9]]))
    >>> (labels % 10).squeeze(1).tolist()
    [3, 1, 4, 9]
    """

    def __init__(
        self,
        *,
        out_n_neurons: int,
        chunk_samples: int = 31840,
        sample_rate: int = 16000,
        resample: bool = False,
        channel: int | str | None = None,
        speeds: Sequence[float] = (1.0, 0.9, 1.1),
        augment_prob: float = 0.6,
        snr_low: float = 0.0,
        snr_high: float = 15.0,
        noise_folder: str | Path | None = None,
        rir_folder: str | Path | None = None,
        max_unread: int = 100,
        seed: int = 0,
    ) -> None:
        self.speeds = _normal_speed_first(speeds)
        if out_n_neurons % len(self.speeds):
            raise ValueError(
                f"out_n_neurons is {out_n_neurons}, no multiple of the number of speeds "
                f"({len(self.speeds)}): it must be the number of training speakers "
                "times the number of speeds."
            )
        if not 0 <= augment_prob <= 1:
            raise ValueError(f"augment_prob is {augment_prob}; give 0 to 1.")
        if snr_low > snr_high:
            raise ValueError(f"snr_low ({snr_low}) is above snr_high ({snr_high}).")
        self.n_speakers = out_n_neurons // len(self.speeds)
        self.chunk_samples = chunk_samples
        self.sample_rate = sample_rate
        self.channel = channel
        self._read_audio = partial(
            read_audio, sample_rate=sample_rate, resample=resample
        )
        self.augment_prob = augment_prob
        self.snr_range = (float(snr_low), float(snr_high))
        self.noise_root = noise_folder
        self.rir_root = rir_folder
        self.max_unread = max_unread
        #: Files that turned out not to be readable, and those left out when listed.
        self.unread: set[Path] = set()
        self.aside: list[Path] = []
        self.seed = seed
        self.step = 0
        self._speed_index = torch.zeros(0, dtype=torch.long)

    @cached_property
    def noise_files(self) -> list[Path]:
        """The files of ``noise_folder``."""
        return self._listed("noise_folder", self.noise_root)

    @cached_property
    def rir_files(self) -> list[Path]:
        """The files of ``rir_folder``."""
        return self._listed("rir_folder", self.rir_root)

    def _listed(self, option: str, folder: str | Path | None) -> list[Path]:
        """List the files of an option's folder."""
        check_noise({option: folder})
        if folder is None:
            return []
        try:
            return noise_files(folder, aside=self.aside)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error

    @property
    def samples_needed(self) -> int:
        """Samples per utterance that the fastest speed needs."""
        return math.ceil(self.chunk_samples * max(self.speeds))

    def __call__(
        self, wavs: torch.Tensor, lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Augment a batch.

        Parameters
        ----------
        wavs : torch.Tensor, [batch, samples]
            At least `samples_needed` samples.
        lens : torch.Tensor, [batch]
            Relative lengths; utterances must be full.

        Returns
        -------
        wavs : torch.Tensor, [batch, chunk_samples]
        lens : torch.Tensor, [batch]
            Ones.
        """
        if wavs.shape[1] < self.samples_needed:
            raise ValueError(
                f"The batch has {wavs.shape[1]} samples per utterance; chunk_samples "
                f"{self.chunk_samples} at speed {max(self.speeds)} needs "
                f"{self.samples_needed}. Raise sentence_len to at least "
                f"{self.samples_needed / self.sample_rate:.2f} seconds."
            )
        draws = generator("augment", self.seed, process_rank(), self.step)
        self.step += 1
        # Autocast would resample in bfloat16, with noise at -40 dB of the speech.
        with torch.autocast(wavs.device.type, enabled=False):
            chunks = self._change_speed(wavs, draws)
            self._disturb(chunks, draws)
        return chunks, torch.ones_like(lens)

    def in_words(self) -> str:
        """Return which augmentation is on, and which is not.

        Returns
        -------
        str

        Raises
        ------
        ValueError
            If a folder does not exist or holds no audio.

        Example
        -------
        >>> SpeakerAugment(out_n_neurons=10, speeds=[1.0]).in_words()
        'Speeds: 1.0. Noise: none (noise_folder). Reverberation: none (rir_folder).'
        """
        speeds = ", ".join(map(str, self.speeds))
        noise, rirs = "none (noise_folder)", "none (rir_folder)"
        if self.noise_files:
            noise = f"{counted(len(self.noise_files), 'file')} in {self.noise_root}"
        if self.rir_files:
            rirs = f"{counted(len(self.rir_files), 'file')} in {self.rir_root}"
        words = f"Speeds: {speeds}. Noise: {noise}. Reverberation: {rirs}."
        if self.aside:
            words += f" Hidden, or converted to WAV or FLAC: {len(self.aside)}."
        if self.noise_files or self.rir_files:
            words += f" One of the two, with probability {self.augment_prob}."
        return words

    def used(self) -> dict[str, Any]:
        """Give what training draws from.

        Returns
        -------
        dict of str to object
            ``speeds``, and whether ``noise`` and ``reverberation`` are added to some
            utterances.

        Raises
        ------
        ValueError
            If a folder does not exist or holds no audio.

        Example
        -------
        >>> SpeakerAugment(out_n_neurons=10, speeds=[1.0]).used()
        {'speeds': [1.0], 'noise': False, 'reverberation': False}
        """
        drawn = self.augment_prob > 0
        return {
            "speeds": list(self.speeds),
            "noise": drawn and bool(self.noise_files),
            "reverberation": drawn and bool(self.rir_files),
        }

    def replicate_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Speaker labels of the batch augmented last.

        Parameters
        ----------
        labels : torch.Tensor, [batch, 1]
            Speakers, below the number of speakers.

        Returns
        -------
        torch.Tensor, [batch, 1]
            label + k * number of speakers, k the place of the speed drawn.

        Raises
        ------
        ValueError
            If labels are of another batch, or of a speaker beyond their number.
        """
        if len(labels) != len(self._speed_index):
            raise ValueError(
                f"There are {len(labels)} labels, but the batch augmented last had "
                f"{len(self._speed_index)} utterances. Pass the labels of that batch."
            )
        self._check_speakers(labels)
        offset = self._speed_index.to(labels.device) * self.n_speakers
        return labels + offset.reshape(-1, *[1] * (labels.dim() - 1))

    def _check_speakers(self, labels: torch.Tensor) -> None:
        """Refuse a label that would be another speaker at another speed."""
        if labels.device.type != "cpu" and self.step not in _LOOKS:
            return
        lowest, highest = (int(end) for end in labels.aminmax())
        if lowest < 0 or highest >= self.n_speakers:
            classes, speeds = self.n_speakers * len(self.speeds), len(self.speeds)
            raise ValueError(
                f"A label is {lowest if lowest < 0 else highest}, but out_n_neurons "
                f"{classes} at {speeds} speed(s) means speakers 0 to "
                f"{self.n_speakers - 1}. Give --out_n_neurons: the number of your "
                "speakers times that of the speeds."
            )

    def _change_speed(self, wavs: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
        self._speed_index = torch.randint(
            len(self.speeds), (len(wavs),), generator=draws
        )
        places = torch.rand(len(wavs), generator=draws, dtype=torch.float32).tolist()
        chunks = wavs.new_empty(len(wavs), self.chunk_samples)
        for index, speed in enumerate(self.speeds):
            rows = (self._speed_index == index).nonzero().flatten().tolist()
            if not rows:
                continue
            played = at_speed(wavs[rows], speed)
            spare = played.shape[1] - self.chunk_samples
            for row, wav in zip(rows, played, strict=True):
                start = int(places[row] * (spare + 1))
                chunks[row] = wav[start : start + self.chunk_samples]
        return chunks

    def _disturb(self, wavs: torch.Tensor, draws: torch.Generator) -> None:
        """Add noise or reverberation to some of the utterances, in place."""
        noises: dict[int, torch.Tensor] = {}
        rirs: dict[int, torch.Tensor] = {}
        snrs_db: list[float] = []
        # Both are listed by the first batch: a path that is wrong ends the training there
        # and not where the first of its files is drawn.
        disturbs = any([self.noise_files, self.rir_files])
        # Drawn even where unused: an utterance's draws must not depend on the folders'
        # contents, nor on what its neighbours in the batch drew.
        numbers = torch.rand(
            len(wavs), 5, generator=draws, dtype=torch.float32
        ).tolist()
        for row, (lot, kind, choice, place, level) in enumerate(numbers):
            if lot >= self.augment_prob or not disturbs:
                continue
            noisy = not self.rir_files or (self.noise_files and kind < 0.5)
            if noisy:
                path, noises[row] = self._first_readable(
                    self.noise_files, choice, partial(self._read_noise, place=place)
                )
                low, high = self._snr_range_of(path)
                snrs_db.append(low + level * (high - low))
            else:
                read = partial(self._read_audio, channel=0)
                _, rirs[row] = self._first_readable(self.rir_files, choice, read)
        if noises:
            rows = list(noises)
            levels = torch.tensor(snrs_db, dtype=torch.float32).to(wavs).unsqueeze(1)
            wavs[rows] = add_noise(wavs[rows], _stacked(noises, wavs), levels)
        if rirs:
            rows = list(rirs)
            wavs[rows] = reverberate(wavs[rows], _stacked(rirs, wavs))

    def _first_readable(
        self,
        files: list[Path],
        choice: float,
        read: Callable[[Path], torch.Tensor],
    ) -> tuple[Path, torch.Tensor]:
        """Read the file that was drawn or, where that cannot be, the next that can."""
        drawn = int(choice * len(files))
        for step in range(len(files)):
            path = files[(drawn + step) % len(files)]
            if path in self.unread:
                continue
            try:
                values = read(path)
                if not bool(values.isfinite().all()):
                    raise ValueError(f"{path} holds NaN or infinity")
                return path, values
            except (ValueError, OSError) as error:
                self.unread.add(path)
                logger.warning(f"Augmentation goes on without a file: {error}")
                if len(self.unread) > self.max_unread:
                    raise ValueError(
                        f"{counted(len(self.unread), 'file')} of noise_folder or rir_folder could not "
                        f"be read, more than max_unread: {self.max_unread}. The last "
                        f"because: {error}"
                    ) from error
        raise ValueError(
            f"None of {counted(len(files), 'file')} such as {files[drawn]} can be read. Give "
            "another noise_folder or rir_folder."
        )

    def _snr_range_of(self, path: Path) -> tuple[float, float]:
        assert self.noise_root is not None
        # Of a packed folder paths are absolute.
        whole, root = Path(os.path.abspath(path)), os.path.abspath(self.noise_root)
        if whole.is_relative_to(root):
            folders = whole.relative_to(root).parts[:-1]
        else:
            # Of a list: the folder next to the file that is one of MUSAN's.
            folders = whole.parts[-2::-1]
        for folder in map(str.lower, folders):
            if folder in _SNR_OF_FOLDER:
                return _SNR_OF_FOLDER[folder]
            if folder == "noise" and not whole.is_relative_to(root):
                break
        return self.snr_range

    def _read_noise(self, path: Path, place: float) -> torch.Tensor:
        available = audio_info(path).samples_at(self.sample_rate)
        if not available:
            raise ValueError(f"{path} holds no samples. Remove it from noise_folder.")
        start = int(place * (max(0, available - self.chunk_samples) + 1))
        noise = self._read_audio(
            path, channel=self.channel, start=start, samples=self.chunk_samples
        )
        return repeat_to(noise, self.chunk_samples)

    @mark_as_saver
    def _save(self, path: str | Path) -> None:
        write_step(path, self.step)

    @mark_as_loader
    def _load(self, path: str | Path, end_of_epoch: bool) -> None:
        del end_of_epoch
        self.step = read_step(path, "step of a SpeakerAugment", "wav_augment")


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
    """Convolve speech with a room impulse response.

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
    places = direct_path + torch.arange(samples, device=wav.device, dtype=torch.int64)
    return torch.where(energy > 0, echoed.gather(-1, places), wav)


def _stacked(drawn: dict[int, torch.Tensor], wavs: torch.Tensor) -> torch.Tensor:
    """Give what was drawn, [rows, longest], as the batch is."""
    return pad_sequence(list(drawn.values()), batch_first=True).to(wavs)


def _normal_speed_first(speeds: Sequence[float]) -> tuple[float, ...]:
    if 1.0 not in speeds or min(speeds) <= 0 or len(set(speeds)) != len(speeds):
        raise ValueError(
            f"speeds are {list(speeds)}; give different positive ones, 1.0 among them."
        )
    # The speaker as recorded must keep its label, whatever order the speeds come in.
    return (1.0, *(speed for speed in speeds if speed != 1.0))
