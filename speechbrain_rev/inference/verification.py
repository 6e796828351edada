"""Known speakers, and whether two voices are one speaker's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from speechbrain_rev.inference.archive import check_fingerprint, check_same
from speechbrain_rev.inference.audio import (
    Audio,
    Recording,
    check_rate,
    recordings,
)
from speechbrain_rev.inference.cohort import Cohort
from speechbrain_rev.inference.running import unit_mean
from speechbrain_rev.inference.thresholds import Normalisation, Thresholds
from speechbrain_rev.scoring import as_norm, cohort_statistics, cosine, subtract_mean
from speechbrain_rev.whole_files import check_path, check_regular, write_whole

# 10,000 utterances of 1,024 dimensions are 41 MB.
_MAX_BYTES = 10**8
_NAMES = {"embeddings", "fingerprint"}


@dataclass(frozen=True, eq=False)
class EnrolledSpeaker:
    """A speaker as a model knows it: the embeddings of some utterances.

    They are kept one by one, since what is subtracted before averaging (a cohort's
    centre) is known only when the speaker is compared.

    Attributes
    ----------
    embeddings : numpy.ndarray, [utterances, dim], float32
        As ``SpeakerEmbedder.embed`` gives them.
    fingerprint : str
        Of the model that made them.

    Example
    -------
    >>> ann = EnrolledSpeaker(np.array([[2, 0], [0, 4]], np.float32), "f00d")
    >>> ann.utterances, ann.embedding.tolist()
    (2, [0.5, 0.5])
    """

    embeddings: NDArray[np.float32]
    fingerprint: str

    def __post_init__(self) -> None:
        rows = self.embeddings
        if rows.ndim != 2 or not rows.size or rows.dtype != np.float32:
            raise ValueError(
                f"embeddings are {list(rows.shape)} of {rows.dtype}, but must be "
                "[utterances, dim] of float32, with at least one utterance."
            )
        if not np.isfinite(rows).all() or not rows.any(axis=1).all():
            raise ValueError("an embedding is zero, NaN or infinite.")
        check_fingerprint(self.fingerprint)

    @property
    def utterances(self) -> int:
        """How many utterances it is known by."""
        return len(self.embeddings)

    @property
    def embedding(self) -> NDArray[np.float32]:
        """The mean of the embeddings, each at length one: [dim]."""
        return self.centred(None)

    def centred(self, centre: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Average after a mean was subtracted: [dim].

        Parameters
        ----------
        centre : numpy.ndarray, [dim], or None
            What is subtracted from each embedding; None for nothing.
        """
        rows = self.embeddings
        if centre is not None:
            rows = np.asarray(subtract_mean(rows, centre), dtype=np.float32)
        return unit_mean(rows)

    def check_model(self, fingerprint: str, name: str) -> None:
        """Refuse to be compared by another model than the one that enrolled.

        Parameters
        ----------
        fingerprint : str
            Of the model that compares.
        name : str
            How errors call the speaker.

        Raises
        ------
        ValueError
            If it is another one, the same in another precision, or either has no
            fingerprint.
        """
        check_same(name, self.fingerprint, fingerprint, "Enrol it again.")

    def save(self, path: str | PathLike[str]) -> None:
        """Write a .safetensors file; one of that name is replaced in one step.

        Parameters
        ----------
        path : str or path-like
            Its name.
        """
        arrays: dict[str, NDArray[Any]] = {
            "embeddings": np.ascontiguousarray(self.embeddings),
            "fingerprint": np.frombuffer(self.fingerprint.encode(), dtype=np.uint8),
        }
        write_whole(Path(path), safetensors.numpy.save(arrays))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> EnrolledSpeaker:
        """Read what ``save`` wrote.

        Parameters
        ----------
        path : str or path-like
            A .safetensors file.

        Returns
        -------
        EnrolledSpeaker

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no enrolled speaker.
        """
        check_path(path, "an enrolled speaker")
        check_regular(path)
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(
                f"There is no enrolled speaker at {file}. SpeakerEmbedder.enrol(...) makes "
                "one, and its save(...) writes it."
            )
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES + 1)
        try:
            if len(content) > _MAX_BYTES:
                raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
            arrays = safetensors.numpy.load(content)
            if set(arrays) != _NAMES or arrays["fingerprint"].dtype != np.uint8:
                raise ValueError(f"it holds {json.dumps(sorted(arrays))[:100]}")
            return cls(arrays["embeddings"], arrays["fingerprint"].tobytes().decode())
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is no enrolled speaker ({error}). Enrol and save it again."
            ) from error


@dataclass(frozen=True)
class Verification:
    """What came of comparing two speakers.

    Attributes
    ----------
    score : float
        Higher is more alike.
    normalisation : {"cosine", "as_norm"}
        A cosine, from -1 to 1, or AS-Norm's, in deviations.
    threshold : float or None
        The score from which on they count as one; None if nothing says which.
    same_speaker : bool or None
        Whether the score reaches the threshold; None without one.
    origin : str
        Where the threshold is from: the list of trials it was found on with its error
        rate, or the caller. Without a threshold, how to get one.

    Example
    -------
    >>> found = Verification(0.5, "cosine", 0.3, True, "given by the caller")
    >>> found.same_speaker == (found.score >= found.threshold)
    True
    """

    score: float
    normalisation: Normalisation
    threshold: float | None
    same_speaker: bool | None
    origin: str


def sides(
    given: Mapping[str, Audio | EnrolledSpeaker],
    sample_rate: int | None,
    fingerprint: str,
    *,
    assumed_rate: int,
) -> tuple[dict[str, EnrolledSpeaker], dict[str, Recording]]:
    """Part what is to be compared into enrolled speakers and recordings to embed.

    Parameters
    ----------
    given : mapping of str to path, array, tensor or EnrolledSpeaker
        By the names that errors call them.
    sample_rate : int or None
        Hertz of arrays and tensors.
    fingerprint : str
        Of the model that compares.
    assumed_rate : int
        Hertz of arrays where none is given: that of the model.

    Returns
    -------
    speakers : dict of str to EnrolledSpeaker
        Those enrolled.
    heard : dict of str to Recording
        The others.

    Raises
    ------
    ValueError
        If one is a list, a speaker was enrolled by another model, or the sample rate is
        not asked for.
    """
    speakers: dict[str, EnrolledSpeaker] = {}
    heard: dict[str, Recording] = {}
    for name, side in given.items():
        if isinstance(side, EnrolledSpeaker):
            side.check_model(fingerprint, name)
            speakers[name] = side
            continue
        rate = None if isinstance(side, (str, PathLike)) else sample_rate
        (found, *_), alone = recordings(
            side, rate, assumed_rate=assumed_rate, alone_is=name
        )
        if not alone:
            raise ValueError(f"{name} is a list. Give one utterance, or enrol it.")
        heard[name] = found
    check_rate(sample_rate, list(heard.values()))
    return speakers, heard


def compare(
    a: EnrolledSpeaker,
    b: EnrolledSpeaker,
    *,
    cohort: Cohort | None,
    thresholds: Thresholds,
    threshold: float | str | None,
) -> Verification:
    """Score two speakers and judge the score.

    Parameters
    ----------
    a, b : EnrolledSpeaker
        By one utterance or more.
    cohort : Cohort or None
        For AS-Norm; None for the cosine.
    thresholds : Thresholds
        Those the model has.
    threshold : float, str or None
        As of ``Thresholds.choose``.

    Returns
    -------
    Verification

    Raises
    ------
    ValueError
        If there is no such threshold, or the dimensions of the three differ.

    Example
    -------
    >>> ann = EnrolledSpeaker(np.ones((1, 2), np.float32), "f00d")
    >>> found = compare(ann, ann, cohort=None, thresholds=Thresholds(), threshold=0.3)
    >>> found.same_speaker, found.origin
    (True, 'given by the caller')
    """
    _check_dimensions(a, b, cohort)
    normalisation: Normalisation = "cosine" if cohort is None else "as_norm"
    value, origin = thresholds.choose(threshold, normalisation)
    centre = None if cohort is None else cohort.centre
    sides = np.stack([a.centred(centre), b.centred(centre)])
    score = _score(sides, cohort)
    same = None if value is None else score >= value
    return Verification(score, normalisation, value, same, origin)


def _check_dimensions(
    a: EnrolledSpeaker, b: EnrolledSpeaker, cohort: Cohort | None
) -> None:
    """Refuse what a model of that fingerprint cannot have made: a file was changed."""
    found = {"a": a.embeddings.shape[1], "b": b.embeddings.shape[1]}
    if cohort is not None:
        found["the cohort"] = cohort.means.shape[1]
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in found.items())
        raise ValueError(
            f"embeddings of one model have one number of dimensions, but {told}. A file "
            "was changed: enrol again, or download the cohort's folder again."
        )


def _score(sides: NDArray[np.float32], cohort: Cohort | None) -> float:
    cosines = cosine(sides[:1], sides[1:])
    if cohort is None:
        return float(cosines[0])
    mean, std = cohort_statistics(sides, cohort.means, top_n=cohort.top_n)
    return float(as_norm(cosines, mean[:1], std[:1], mean[1:], std[1:])[0])
