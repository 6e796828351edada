"""Speaker embeddings of audio, from the folder of a training run or an exported model.

The path from waveform to embedding is that of training: the run's filterbanks, the mean
of each sentence subtracted, the encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from speechbrain_rev.audio.checks import Channel
from speechbrain_rev.inference.archive import check_same
from speechbrain_rev.inference.audio import (
    Audio,
    Recording,
    check_rate,
    recordings,
)
from speechbrain_rev.inference.front_ends import usable_device, usable_precision
from speechbrain_rev.inference.running import OnBad, RunningModel, Windows
from speechbrain_rev.inference.thresholds import Thresholds
from speechbrain_rev.inference.trained import read_trained
from speechbrain_rev.inference.verification import (
    Cohort,
    EnrolledSpeaker,
    Verification,
    compare,
)


class SpeakerEmbedder:
    """Embed utterances and compare speakers.

    Utterances of similar length are embedded together. Padding does not count: but for
    rounding an embedding does not depend on what else is embedded.

    Parameters
    ----------
    model : nn.Module
        Maps waveforms [batch, samples], and how many samples of each count [batch] or
        None for all, to [batch, 1, embedding_dim].
    sample_rate : int
        Hertz of the waveforms the model takes; all audio is resampled to it.
    device : str, torch.device or None
        Where to run: cpu, cuda or cuda:N; None takes the GPU if there is one.
    precision : {"fp32", "bf16", "fp16"}
        What the encoder computes in, under autocast; features and embeddings are
        float32 in all. bf16 for CPUs and GPUs, fp16 for GPUs.
    fingerprint : str
        Marks embeddings of one state of one model; the hash of its weights. Without it, nothing can be enrolled or kept in archives. Of half precision
        it is completed by that, for its embeddings are others.
    thresholds : Thresholds
        Of scores, for ``verify``.

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
        precision: str = "fp32",
        fingerprint: str = "",
        thresholds: Thresholds | None = None,
    ):
        self.device = usable_device(device)
        self.precision = usable_precision(precision, self.device)
        self.model = model.to(self.device).eval()
        self.sample_rate = sample_rate
        half = "" if self.precision == "fp32" or not fingerprint else f", {precision}"
        self.fingerprint = f"{fingerprint}{half}"
        self.thresholds = Thresholds() if thresholds is None else thresholds
        self._running = RunningModel(
            self.model,
            sample_rate=sample_rate,
            device=self.device,
            precision=self.precision,
        )

    @classmethod
    def from_hparams(
        cls,
        source: str | PathLike[str],
        *,
        revision: str | None = None,
        encoder: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        precision: str = "fp32",
    ) -> SpeakerEmbedder:
        """Load a trained encoder, from whomever it came.

        Nothing of it is executed, whatever it holds: weights are tensors of exactly the
        names, shapes and types of the encoder that they say they are of, and have the
        checksums of ``SHA256SUMS`` where there are some.

        Parameters
        ----------
        source : str or path-like
            The ``output_folder`` of a training run, whose newest checkpoint is taken until
            it has ended; what ``speechbrain-rev export`` or ``convert`` wrote; a file of
            weights; or the id of a model on the Hugging Face Hub, "owner/model". A folder
            that is there is always taken for one.
        revision : str, optional
            Of a model on the Hub: a branch, a tag or a commit; main by default. It is
            resolved to a commit once, which is logged at the level INFO. With a whole
            commit hash and the model in the cache, the Hub is not asked.
        encoder : mapping of str to object, optional
            Of weights that do not say of which encoder they are: arguments of
            ``build_encoder``, as {"name": "resnet34", "front_end": {"kind":
            "speechbrain", "sample_rate": 16000}}.
        device, precision
            As of the class.

        Returns
        -------
        SpeakerEmbedder
            Ready to embed.

        Raises
        ------
        FileNotFoundError
            If there is no such folder, or no weights in it.
        OSError
            If the Hub has no such model, cannot be reached, or gives the user no access.
        ValueError
            If a file is damaged, leads out of the folder, or has other weights than its
            encoder; if the encoder or its features are not known; if the device or the
            precision cannot be used.
        """
        device = usable_device(device)
        usable_precision(precision, device)
        trained = read_trained(source, revision, encoder=encoder)
        return cls(
            trained.model_for(device, precision),
            sample_rate=trained.front_end.sample_rate,
            device=device,
            precision=precision,
            fingerprint=trained.fingerprint,
            thresholds=trained.thresholds,
        )

    @classmethod
    def from_run(
        cls,
        folder: str | PathLike[str],
        *,
        encoder: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        precision: str = "fp32",
    ) -> SpeakerEmbedder:
        """Load the encoder of a training run: ``from_hparams`` of a local folder.

        Parameters
        ----------
        folder : str or path-like
            The run's ``output_folder``.
        encoder, device, precision
            As of ``from_hparams``.

        Returns
        -------
        SpeakerEmbedder
            Ready to embed.

        Raises
        ------
        FileNotFoundError, ValueError
            As of ``from_hparams``.
        """
        return cls.from_hparams(
            Path(folder), encoder=encoder, device=device, precision=precision
        )

    def embed(
        self,
        audio: Audio | Iterable[Audio],
        sample_rate: int | None = None,
        *,
        channel: Channel = None,
        window: float | None = None,
    ) -> NDArray[np.float32]:
        """Embed one utterance, or a list of them.

        Parameters
        ----------
        audio : path, array or tensor [samples] or [channels, samples], or a list of them
            Files of any sample rate that libsndfile reads; floats from -1 to 1. An array
            is one utterance always; ``list(batch)`` makes a list of rows.
        sample_rate : int, optional
            Hertz of arrays and tensors, which have no rate; files have their own.
            Anything else than the encoder's is resampled. Without it arrays are taken as
            of the encoder's rate, with a warning.
        channel : int or "mix", optional
            What is read of several channels: the one of this number, counted from 0, or
            the mean of all. Without it, they are refused.
        window : float, optional
            Seconds. Utterances that are longer are cut into windows of this length, and
            the mean of their embeddings is given, in which each window has an equal say;
            see ``Windows.mean``. Without it, no more than 600 s are embedded.

        Returns
        -------
        numpy.ndarray, [embedding_dim], or [n, embedding_dim] of a list; float32
            The embeddings, not normalised in length.

        Raises
        ------
        ValueError
            If an utterance cannot be read, has several channels without ``channel``, is
            shorter than a quarter of a second or too long, silent, NaN, absurdly loud or
            no floats. The message names it: its path, or its place in the list.
        """
        given, alone = recordings(audio, sample_rate, assumed_rate=self.sample_rate)
        rows = self._rows(given, channel, window)
        return np.asarray(rows[0]) if alone else rows

    def embed_each(
        self,
        audio: Iterable[Audio],
        sample_rate: int | None = None,
        *,
        channel: Channel = None,
        window: float | None = None,
        on_bad: OnBad | None = None,
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Embed a list as ``embed`` does, giving each row once it is ready.

        More than a few get a progress bar; of several processes the first shows its own.

        Parameters
        ----------
        audio : iterable of path, array or tensor
            The utterances. Arrays are all in memory before the first is embedded: give
            paths where they are many.
        sample_rate, channel, window
            As of ``embed``.
        on_bad : callable, optional
            Takes the position of an utterance that cannot be embedded and the error; the
            utterance is left out. It may be called in another thread. Without it the
            error is raised, once all before it were given.

        Yields
        ------
        index : int
            Position in the list; they come in an order of their own.
        embedding : numpy.ndarray, [embedding_dim], float32
            The embedding of that utterance.

        Raises
        ------
        ValueError
            As ``embed``.
        """
        given, alone = recordings(audio, sample_rate, assumed_rate=self.sample_rate)
        if alone:
            raise ValueError("embed_each takes a list; embed takes one utterance.")
        return self._running.each(given, channel, window, on_bad)

    def windows(
        self,
        audio: Audio,
        sample_rate: int | None = None,
        *,
        channel: Channel = None,
        seconds: float = 3.0,
        hop: float = 1.5,
    ) -> Windows:
        """Embed a recording of any length window by window.

        A part of the recording is in memory at a time. Windows that are silent are left
        out and named in the result; see ``Windows`` for the last one.

        Parameters
        ----------
        audio : path, array or tensor, [samples] or [channels, samples]
            One recording.
        sample_rate, channel
            As of ``embed``.
        seconds : float
            Length of a window.
        hop : float
            Seconds from the start of one to that of the next; at most ``seconds``.

        Returns
        -------
        Windows
            Start, end and embedding of each, and what was silent.

        Raises
        ------
        ValueError
            As ``embed``; if all of it is silent; if a length is out of range.
        """
        given, alone = recordings(audio, sample_rate, assumed_rate=self.sample_rate)
        if not alone:
            raise ValueError("windows takes one recording, and no list.")
        return self._running.windows(given[0], channel, seconds, hop)

    def enrol(
        self,
        audio: Iterable[Audio],
        sample_rate: int | None = None,
        *,
        channel: Channel = None,
        window: float | None = None,
    ) -> EnrolledSpeaker:
        """Learn a speaker by one or more utterances.

        Parameters
        ----------
        audio : iterable of path, array or tensor
            Utterances of one speaker.
        sample_rate, channel, window
            As of ``embed``.

        Returns
        -------
        EnrolledSpeaker
            For either side of ``verify``; it can be saved.

        Raises
        ------
        ValueError
            As ``embed``; if the embedder has no fingerprint.
        """
        if not self.fingerprint:
            raise ValueError(
                "an embedder without a fingerprint cannot enrol: its speakers would "
                "look like another's. Give SpeakerEmbedder one."
            )
        given, alone = recordings(audio, sample_rate, assumed_rate=self.sample_rate)
        if alone:
            raise ValueError("enrol takes a list of utterances: [utterance].")
        return EnrolledSpeaker(self._rows(given, channel, window), self.fingerprint)

    def verify(
        self,
        a: Audio | EnrolledSpeaker,
        b: Audio | EnrolledSpeaker,
        sample_rate: int | None = None,
        *,
        channel: Channel = None,
        window: float | None = None,
        threshold: float | str | None = None,
        cohort: Cohort | None = None,
    ) -> Verification:
        """Score how alike two speakers are, and decide where a threshold is known.

        Parameters
        ----------
        a, b : path, array, tensor or EnrolledSpeaker
            One utterance each, or a speaker that was enrolled.
        sample_rate, channel, window
            As of ``embed``.
        threshold : float or str, optional
            The score from which on two voices count as one speaker's, or the name of one
            that the model has, see ``thresholds.known``. Without it the model's own is
            taken: at the equal error rate of its list of trials, if it has one list.
        cohort : Cohort, optional
            Normalise the score with it by AS-Norm; ``read_cohort`` reads a model's.
            Without it the score is the cosine of the embeddings.

        Returns
        -------
        Verification
            Score, decision, and where the threshold is from. Without any threshold the
            decision is None.

        Raises
        ------
        ValueError
            As ``embed``; if a speaker was enrolled by another model, or the cohort made
            by one; if there is no such threshold.
        """
        if cohort is not None:
            remedy = (
                "Give read_cohort(...) of the model that embeds, and precision fp32."
            )
            check_same("the cohort", cohort.fingerprint, self.fingerprint, remedy)
        speakers: dict[str, EnrolledSpeaker] = {}
        heard: dict[str, Recording] = {}
        for name, side in (("a", a), ("b", b)):
            if isinstance(side, EnrolledSpeaker):
                made, remedy = side.fingerprint, "Enrol it again."
                check_same(name, made, self.fingerprint, remedy)
                speakers[name] = side
                continue
            rate = None if isinstance(side, (str, PathLike)) else sample_rate
            (recording, *_), alone = recordings(
                side, rate, assumed_rate=self.sample_rate, alone_is=name
            )
            if not alone:
                raise ValueError(f"{name} is a list. Give one utterance, or enrol it.")
            heard[name] = recording
        check_rate(sample_rate, list(heard.values()))
        if heard:
            rows = self._rows(list(heard.values()), channel, window)
            for name, row in zip(heard, rows, strict=True):
                speakers[name] = EnrolledSpeaker(row[None], self.fingerprint)
        return compare(
            speakers["a"],
            speakers["b"],
            cohort=cohort,
            thresholds=self.thresholds,
            threshold=threshold,
        )

    def _rows(
        self, given: list[Recording], channel: Channel, window: float | None
    ) -> NDArray[np.float32]:
        rows = dict(self._running.each(given, channel, window))
        return np.stack([rows[index] for index in range(len(given))])
