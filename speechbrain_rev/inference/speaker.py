"""Speaker embeddings of audio, from the folder of a training run.

The path from waveform to embedding is that of training: the run's filterbanks, the mean
of each sentence subtracted, the encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from speechbrain.utils.distributed import if_main_process
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from speechbrain_rev.hparams.knobs import KNOBS, Knob
from speechbrain_rev.inference.audio import prepare_waveform
from speechbrain_rev.inference.batches import read_batches
from speechbrain_rev.inference.device import usable_device
from speechbrain_rev.inference.front_ends import FRONT_ENDS
from speechbrain_rev.inference.run_folder import read_settings, read_weights
from speechbrain_rev.inference.waveform import WaveformEncoder
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.pooling import CORRECTIONS
from speechbrain_rev.scoring import cosine

_SETTINGS = ("arch", "widths", "blocks", "n_mels", "embedding_dim", "sample_rate")
# What training has one of; weights of others may have another.
_ASSUMED = {"front_end": "speechbrain", "pooling_variance": "population"}
_KNOBS = KNOBS | {
    "front_end": Knob("str", one_of=tuple(FRONT_ENDS)),
    "pooling_variance": Knob("str", one_of=tuple(CORRECTIONS)),
}

_MANY_FILES = 20


class SpeakerEmbedder:
    """Embed utterances and compare speakers.

    Utterances of similar length are embedded together. The padding of the shorter ones
    does not count, so that but for float32 rounding an embedding does not depend on
    what else is embedded.

    Parameters
    ----------
    model : nn.Module
        Maps waveforms [batch, samples], and how many samples of each count [batch] or
        None for all, to [batch, 1, embedding_dim].
    sample_rate : int
        Hertz of the waveforms the model takes; all audio is resampled to it.
    device : str, torch.device or None
        Where to run: cpu, cuda or cuda:N; None takes the GPU if there is one.
    fingerprint : str
        Tells embeddings of one state of one model from all others; the hash of its
        weights.

    Example
    -------
    >>> from speechbrain_rev.inference import FbankStatistics
    >>> embedder = SpeakerEmbedder(FbankStatistics(), device="cpu")
    >>> embedder.embed(torch.randn(24000), sample_rate=24000).shape
    (160,)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sample_rate: int = 16000,
        device: str | torch.device | None = None,
        fingerprint: str = "",
    ):
        self.device = usable_device(device)
        self.model = model.to(self.device).eval()
        self.sample_rate = sample_rate
        self.fingerprint = fingerprint

    @classmethod
    def from_run(
        cls, folder: str | PathLike[str], *, device: str | torch.device | None = None
    ) -> SpeakerEmbedder:
        """Load the encoder that a training run made.

        Nothing in the folder is executed: plain values are read from its
        ``hyperparams.yaml`` and tensors from its weights.

        Parameters
        ----------
        folder : str or path-like
            The run's ``output_folder``. Its ``embedding_model.ckpt`` is taken, or the
            newest checkpoint while the run has not ended.
        device : str, torch.device or None
            Where to run: cpu, cuda or cuda:N; None takes the GPU if there is one.

        Returns
        -------
        SpeakerEmbedder
            Ready to embed.

        Raises
        ------
        FileNotFoundError
            If the folder, its hyperparams.yaml or any weights are missing.
        ValueError
            If a file is not what training writes, leads out of the folder, or the
            weights are not those of the encoder that hyperparams.yaml names; or if the
            device cannot be used.
        """
        device = usable_device(device)
        settings = run_settings(folder)
        features = {
            "n_mels": settings["n_mels"],
            "sample_rate": settings.pop("sample_rate"),
            "front_end": settings.pop("front_end"),
        }
        encoder = build_encoder(settings.pop("arch"), **settings)
        weights = read_weights(folder)
        try:
            encoder.load_state_dict(weights.state_dict, strict=True)
        except RuntimeError as error:
            raise ValueError(
                f"{weights.path} does not fit the encoder that hyperparams.yaml beside "
                f"it describes. Are both from the same run? {error}"
            ) from error
        return cls(
            WaveformEncoder(encoder, **features),
            sample_rate=features["sample_rate"],
            device=device,
            fingerprint=weights.sha256,
        )

    def embed(
        self, waveform: Tensor | ArrayLike, sample_rate: int
    ) -> NDArray[np.float32]:
        """Embed one waveform, or a batch of equally long ones.

        Parameters
        ----------
        waveform : torch.Tensor or array-like, [samples] or [batch, samples]
            One channel of floats from -1 to 1.
        sample_rate : int
            Hertz, a whole number; anything else than the encoder's is resampled.

        Returns
        -------
        numpy.ndarray, [embedding_dim] or [batch, embedding_dim], float32
            The embeddings, not normalised in length.

        Raises
        ------
        ValueError
            If the waveform has another shape, is shorter than a quarter of a second,
            silent, NaN, absurdly loud, or no floating-point audio.
        """
        if not isinstance(waveform, Tensor):
            waveform = torch.from_numpy(np.ascontiguousarray(waveform))
        samples = waveform.detach()
        if samples.dim() not in (1, 2) or not samples.numel():
            raise ValueError(
                f"a waveform has the shape [samples] or [batch, samples], but got "
                f"{list(samples.shape)}. Average the channels of multi-channel audio "
                "first, or use embed_files."
            )
        samples = prepare_waveform(
            samples, sample_rate, self.sample_rate, "the waveform"
        )
        embeddings = self._run(samples.reshape(-1, samples.shape[-1]).unbind())
        return embeddings if samples.dim() == 2 else embeddings[0]

    def embed_files(self, paths: Iterable[str | PathLike[str]]) -> NDArray[np.float32]:
        """Embed audio files of any sample rate, each as one utterance.

        Files of several channels are averaged to one, which is logged. More than a
        few files get a progress bar.

        Parameters
        ----------
        paths : iterable of str or path-like
            The files.

        Returns
        -------
        numpy.ndarray, [n, embedding_dim], float32
            One row per path, in their order.

        Raises
        ------
        ValueError
            If a file is missing, no audio or cannot be embedded; the message names it.
        """
        rows = dict(self.embed_each(paths))
        return np.stack([rows[index] for index in range(len(rows))])

    def embed_each(
        self, paths: Iterable[str | PathLike[str]]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Embed audio files as ``embed_files`` does, giving each row once it is ready.

        Of several processes the first shows its progress.

        Parameters
        ----------
        paths : iterable of str or path-like
            The files.

        Yields
        ------
        index : int
            Position in ``paths``; they come in an order of their own.
        embedding : numpy.ndarray, [embedding_dim], float32
            The embedding of that file.

        Raises
        ------
        ValueError
            As ``embed_files``.
        """
        if isinstance(paths, (str, PathLike)):
            raise ValueError(f"give a list of paths: [{str(paths)!r}].")
        paths = list(paths)
        if not paths:
            raise ValueError("there is no path to embed; give at least one.")
        with tqdm(
            total=len(paths),
            desc="embedding",
            unit="utt",
            disable=len(paths) < _MANY_FILES or not if_main_process(),
        ) as progress:
            for group in read_batches(paths, self.sample_rate, self.device):
                indices, waveforms = zip(*group, strict=True)
                yield from zip(indices, self._run(waveforms), strict=True)
                progress.update(len(group))

    def verify(self, a: str | PathLike[str], b: str | PathLike[str]) -> float:
        """Score how alike the speakers of two audio files are.

        Parameters
        ----------
        a, b : str or path-like
            Audio files.

        Returns
        -------
        float
            The cosine of their embeddings, from -1 to 1; higher is more alike. Which
            score means "the same speaker" is a threshold to be chosen on trials.

        Raises
        ------
        ValueError
            As ``embed_files``.
        """
        return float(cosine(*np.split(self.embed_files([a, b]), 2))[0])

    @torch.no_grad()
    def _run(self, waveforms: Sequence[Tensor]) -> NDArray[np.float32]:
        """Embed waveforms [samples] at the model's sample rate."""
        padded = pad_sequence(list(waveforms), batch_first=True).to(self.device)
        counts = [len(w) for w in waveforms]
        samples = None
        if min(counts) < max(counts):
            samples = torch.tensor(counts, device=self.device)
        embeddings = self.model(padded, samples).squeeze(1).float().cpu()
        if not embeddings.isfinite().all():
            raise ValueError(
                "the encoder gave NaN or infinity for audio that is finite. Its "
                "weights are from a training that has diverged: use an earlier one."
            )
        return np.asarray(embeddings.numpy())


def run_settings(folder: str | PathLike[str]) -> dict[str, Any]:
    """Read which encoder a run has, and behind which front-end.

    Parameters
    ----------
    folder : str or path-like
        The run's ``output_folder``.

    Returns
    -------
    dict of str to object
        Keywords of ``build_encoder``, its name as ``arch``, ``sample_rate`` and
        ``front_end``.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no hyperparams.yaml in it.
    ValueError
        If a value is missing or none that it takes.
    """
    settings = _ASSUMED | read_settings(folder, _SETTINGS, optional=tuple(_ASSUMED))
    wrong = []
    for name, value in settings.items():
        knob = _KNOBS[name]
        # build_encoder names the nearest of the architectures.
        if not knob.has_kind(value) or (name != "arch" and not knob.allows(value)):
            wrong.append(f"{name}: {value!r} (it takes {knob.takes()})")
    if wrong:
        raise ValueError(
            f"{Path(folder) / 'hyperparams.yaml'} has {', '.join(wrong)}. Give the folder of "
            "a run of recipes/VoxCeleb/train.py, which writes plain values without "
            "tags or references."
        )
    return settings
