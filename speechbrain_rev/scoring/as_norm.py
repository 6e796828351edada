"""Adaptive symmetric score normalisation (AS-Norm) against a cohort of impostors.

A score is judged by how each of its two sides scores against the speakers of a cohort
that resemble it most: Matejka et al., "Analysis of score normalization in multilingual
speaker recognition", Interspeech 2017, the normalisation the memory-efficient speaker
embedding paper uses with a cohort size of 600 (section V).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechbrain_rev.scoring.arrays import as_values, as_vectors, same_length

# Scores against the cohort held at a time; 18,000 speakers give 466 rows in float32.
_BLOCK_BYTES = 32 * 2**20
# Cosines closer than this are one value: float32 resolves 6e-8 and sums add to it.
_COSINE_RESOLUTION = 1e-6


def speaker_means(
    embeddings: ArrayLike, speakers: Sequence[str]
) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Average the embeddings of each speaker: the cohort of AS-Norm.

    Each embedding is normalised to length one before averaging, so that every
    utterance has an equal say and the result is a mean direction; long embeddings
    would otherwise rule. (Whatever is subtracted with ``subtract_mean`` must be
    subtracted before.) The means are shorter than one themselves, which no cosine sees.

    Parameters
    ----------
    embeddings : array-like, [utterances, dim]
        Embeddings of training utterances.
    speakers : sequence of str, [utterances]
        Who speaks in each.

    Returns
    -------
    names : tuple of str
        The speakers, sorted.
    means : numpy.ndarray, [speakers, dim], float64
        Their mean embeddings, in that order.

    Raises
    ------
    ValueError
        If the lengths differ or an embedding is zero or not finite.

    Example
    -------
    >>> names, means = speaker_means([[2.0, 0.0], [0.0, 4.0], [0.0, 1.0]], "aab")
    >>> names, means.tolist()
    (('a', 'b'), [[0.5, 0.5], [0.0, 1.0]])
    """
    embeddings, norms = as_vectors("embeddings", embeddings)
    names, speaker_of = np.unique(
        np.array(list(speakers), dtype=str), return_inverse=True
    )
    same_length(embeddings=embeddings, speakers=speaker_of)
    counts = np.bincount(speaker_of)
    sums = np.zeros((len(names), embeddings.shape[1]))
    for rows in _row_blocks(len(embeddings), embeddings.shape[1] * sums.itemsize):
        order = np.argsort(speaker_of[rows], kind="stable")
        sorted_speakers = speaker_of[rows][order]
        unit = embeddings[rows][order] / norms[rows][order, None]
        starts = np.flatnonzero(np.diff(sorted_speakers, prepend=-1))
        sums[sorted_speakers[starts]] += np.add.reduceat(unit, starts, axis=0)
    return tuple(names.tolist()), sums / counts[:, None]


def cohort_statistics(
    embeddings: ArrayLike, cohort: ArrayLike, *, top_n: int = 600
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Score each embedding against a cohort; describe the highest ``top_n`` scores.

    Scores are cosines, computed in float32 (in float64 where an input is float64), a
    block of embeddings at a time: memory grows neither with the number of embeddings
    nor with their product with the cohort's size.

    Parameters
    ----------
    embeddings : array-like, [n, dim]
        The utterances of the trials, each once.
    cohort : array-like, [speakers, dim]
        Impostors: mean embeddings of training speakers, see :func:`speaker_means`.
    top_n : int
        How many of the nearest cohort speakers are looked at. 600 is our reading of
        the paper's "cohort size of 600".

    Returns
    -------
    mean, std : numpy.ndarray, [n], float64
        Mean and standard deviation (divided by ``top_n``) of those cosines.

    Raises
    ------
    ValueError
        If a vector is zero or not finite, the dimensions differ, ``top_n`` is no whole
        number from two to the cohort's size, or a row's scores are all the same.

    Example
    -------
    >>> mean, std = cohort_statistics(
    ...     [[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], top_n=2
    ... )
    >>> mean.tolist(), std.tolist()
    ([0.5], [0.5])
    """
    embeddings, norms = as_vectors("embeddings", embeddings)
    cohort, cohort_norms = as_vectors("cohort", cohort)
    if embeddings.shape[1] != cohort.shape[1]:
        raise ValueError(
            f"embeddings have {embeddings.shape[1]} dimensions but the cohort has "
            f"{cohort.shape[1]}; both must come from the same network."
        )
    check_top_n(top_n, len(cohort))
    precision = np.result_type(embeddings.dtype, cohort.dtype, np.float32)
    unit_cohort = (cohort / cohort_norms[:, None]).astype(precision, copy=False).T
    mean, std = np.empty(len(embeddings)), np.empty(len(embeddings))
    for rows in _row_blocks(len(embeddings), len(cohort) * precision.itemsize):
        unit = (embeddings[rows] / norms[rows, None]).astype(precision, copy=False)
        scores = unit @ unit_cohort
        if top_n < len(cohort):
            scores.partition(len(cohort) - top_n, axis=1)
        nearest = scores[:, -top_n:]
        mean[rows] = nearest.mean(axis=1, dtype=np.float64)
        std[rows] = nearest.std(axis=1, dtype=np.float64)
    degenerate = std < _COSINE_RESOLUTION
    if degenerate.any():
        raise ValueError(
            f"embeddings[{degenerate.argmax()}] scores alike against all of its "
            f"{top_n} nearest cohort speakers, so there is no deviation. Look for "
            f"the same embedding given for many cohort speakers."
        )
    return mean, std


def check_top_n(top_n: object, speakers: int) -> None:
    """Refuse a number of nearest speakers that a cohort does not have.

    A cohort that is silently smaller than asked for gives scores that cannot be compared
    with anybody's, so it is the caller who chooses a smaller one.

    Parameters
    ----------
    top_n : object
        How many are to be looked at.
    speakers : int
        Of the cohort.

    Raises
    ------
    ValueError
        If it is no whole number from two to the cohort's size.

    Example
    -------
    >>> check_top_n(600, 5994)
    """
    whole = isinstance(top_n, int | np.integer) and not isinstance(top_n, bool)
    if not whole or not 2 <= top_n <= speakers:  # type: ignore[operator]
        raise ValueError(
            f"top_n is {top_n!r}, but the cohort has {speakers} speakers. Give a whole "
            f"top_n (cohort_top_n in a recipe) from 2 to {speakers}, or a cohort of more "
            "training speakers."
        )


def as_norm(
    scores: ArrayLike,
    enrol_mean: ArrayLike,
    enrol_std: ArrayLike,
    test_mean: ArrayLike,
    test_std: ArrayLike,
) -> NDArray[np.float64]:
    """Normalise the scores of trials by the cohort statistics of both sides.

    ``((s - enrol_mean) / enrol_std + (s - test_mean) / test_std) / 2``

    Parameters
    ----------
    scores : array-like, [trials]
        Cosines.
    enrol_mean, enrol_std, test_mean, test_std : array-like, [trials]
        :func:`cohort_statistics` of the enrolment and test utterance of each trial.

    Returns
    -------
    numpy.ndarray, [trials], float64
        Normalised scores, in deviations.

    Raises
    ------
    ValueError
        If the lengths differ, a value is not finite, or a deviation is not positive.

    Example
    -------
    >>> as_norm([0.5], [0.1], [0.1], [0.3], [0.2]).round(6).tolist()
    [2.5]
    """
    score = as_values("scores", scores)
    sides = {
        "enrol_mean": as_values("enrol_mean", enrol_mean),
        "enrol_std": as_values("enrol_std", enrol_std),
        "test_mean": as_values("test_mean", test_mean),
        "test_std": as_values("test_std", test_std),
    }
    same_length(scores=score, **sides)
    for name in ("enrol_std", "test_std"):
        if sides[name].min() <= 0.0:
            raise ValueError(
                f"{name}[{sides[name].argmin()}] is {sides[name].min()}; deviations "
                f"must be positive, as cohort_statistics gives them."
            )
    by_enrol = (score - sides["enrol_mean"]) / sides["enrol_std"]
    by_test = (score - sides["test_mean"]) / sides["test_std"]
    return (by_enrol + by_test) / 2.0


def _row_blocks(rows: int, bytes_per_row: int) -> list[slice]:
    step = max(1, _BLOCK_BYTES // bytes_per_row)
    return [slice(start, start + step) for start in range(0, rows, step)]
