"""Whether two voices are one speaker's: a score, and a decision where one is possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from speechbrain_rev.inference.cohort import Cohort
from speechbrain_rev.inference.enrolment import EnrolledSpeaker
from speechbrain_rev.inference.recordings import (
    Audio,
    Recording,
    check_rate,
    recordings,
)
from speechbrain_rev.inference.thresholds import Normalisation, Thresholds
from speechbrain_rev.scoring import as_norm, cohort_statistics, cosine


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
