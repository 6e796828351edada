"""Speaker embeddings of audio, from the folder of a training run.

The path from waveform to embedding is that of training: the run's filterbanks, the mean
of each sentence subtracted, the encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from speechbrain.utils.distributed import if_main_process
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from speechbrain_rev.inference.audio import prepare_waveform
from speechbrain_rev.inference.batches import read_batches
from speechbrain_rev.inference.device import usable_device
from speechbrain_rev.inference.encoder_settings import encoder_of, run_settings
from speechbrain_rev.inference.model_folder import read_model
from speechbrain_rev.inference.run_folder import read_weights
from speechbrain_rev.inference.waveform import WaveformEncoder
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.scoring import cosine

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
        encoder = encoder_of(settings)
        weights = read_weights(folder)
        try:
            encoder.load_state_dict(weights.state_dict, strict=True)
        except RuntimeError as error:
            raise ValueError(
                f"{weights.path} does not fit the encoder that hyperparams.yaml beside "
                f"it describes. Are both from the same run? {error}"
            ) from error
        return cls._of(
            encoder,
            settings["sample_rate"],
            weights.sha256,
            device,
            front_end=settings["front_end"],
        )

    @classmethod
    def from_hparams(
        cls, source: str | PathLike[str], *, device: str | torch.device | None = None
    ) -> SpeakerEmbedder:
        """Load a model that ``speechbrain-rev export`` wrote, from whomever it came.

        Nothing in the folder is executed, whatever it holds: settings are read as data
        and compared with what an exported model looks like, and weights are tensors of
        exactly the names, shapes and types that the encoder has. Both must have the
        checksums in ``SHA256SUMS``. It takes less memory than four times the weights
        and 200 MB more.

        Parameters
        ----------
        source : str or path-like
            A local folder; of a model elsewhere, download the folder first.
        device : str, torch.device or None
            Where to run: cpu, cuda or cuda:N; None takes the GPU if there is one.

        Returns
        -------
        SpeakerEmbedder
            Ready to embed.

        Raises
        ------
        FileNotFoundError
            If the folder or one of its files is missing.
        ValueError
            If a file is damaged, leads out of the folder, or holds anything else than
            an exported model does; the message names it, and says how to load it all
            the same if you trust it.
        """
        device = usable_device(device)
        model = read_model(source)
        rate = model.settings["sample_rate"]
        return cls._of(model.encoder, rate, model.sha256, device)

    @classmethod
    def _of(
        cls,
        encoder: SpeakerEncoder,
        sample_rate: int,
        fingerprint: str,
        device: torch.device,
        *,
        front_end: str = "speechbrain",
    ) -> SpeakerEmbedder:
        return cls(
            WaveformEncoder(
                encoder,
                n_mels=encoder.n_mels,
                sample_rate=sample_rate,
                front_end=front_end,
            ),
            sample_rate=sample_rate,
            device=device,
            fingerprint=fingerprint,
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
