"""Cosine scores of pairs of embeddings, in memory that does not grow with the pairs.

The cosine of the angle between two embeddings is the score of a trial: section V-D of
"Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker Verification".
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechbrain_rev.scoring.arrays import as_array, as_values, as_vectors, same_length

# Pairs gathered at a time: 16 MiB a side at 256 dimensions in float32.
_TRIALS_PER_CHUNK = 16_384


def cosine(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """Score embeddings row by row: row i of ``a`` against row i of ``b``.

    Sums are taken in float64, whatever the embeddings' precision.

    Parameters
    ----------
    a, b : array-like, [trials, dim]
        The two sides of each trial.

    Returns
    -------
    numpy.ndarray, [trials], float64
        Cosines, from -1 to 1.

    Raises
    ------
    ValueError
        If the shapes differ or a row is zero or not finite.

    Example
    -------
    >>> cosine([[1.0, 0.0], [1.0, 1.0]], [[2.0, 0.0], [1.0, -1.0]]).tolist()
    [1.0, 0.0]
    """
    a, a_norms = as_vectors("a", a)
    b, b_norms = as_vectors("b", b)
    if a.shape != b.shape:
        raise ValueError(
            f"a has shape {list(a.shape)} and b {list(b.shape)}; both must be the same "
            f"[trials, dim], one row per trial. To score pairs of rows of one matrix "
            f"use cosine_trials."
        )
    return _cosines(a, b, a_norms, b_norms)


def cosine_trials(
    embeddings: ArrayLike, enrol_rows: ArrayLike, test_rows: ArrayLike
) -> NDArray[np.float64]:
    """Score trials between rows of one matrix of embeddings.

    Each utterance is embedded once and met in many trials; the pairs are gathered a
    chunk at a time, so memory does not grow with their number.

    Parameters
    ----------
    embeddings : array-like, [utterances, dim]
        One row per utterance.
    enrol_rows, test_rows : array-like of int, [trials]
        The rows of either side, as :meth:`Trials.rows` gives them.

    Returns
    -------
    numpy.ndarray, [trials], float64
        Cosines, from -1 to 1.

    Raises
    ------
    ValueError
        If a row number is no integer or beyond the matrix, the two sides differ in
        length, or an embedding is zero or not finite.

    Example
    -------
    >>> cosine_trials([[1.0, 0.0], [0.0, 2.0]], [0, 0], [0, 1]).tolist()
    [1.0, 0.0]
    """
    embeddings, norms = as_vectors("embeddings", embeddings)
    enrol = _row_numbers("enrol_rows", enrol_rows, len(embeddings))
    test = _row_numbers("test_rows", test_rows, len(embeddings))
    same_length(enrol_rows=enrol, test_rows=test)
    scores = np.empty(len(enrol))
    for start in range(0, len(enrol), _TRIALS_PER_CHUNK):
        chunk = slice(start, start + _TRIALS_PER_CHUNK)
        left, right = enrol[chunk], test[chunk]
        scores[chunk] = _cosines(
            embeddings[left], embeddings[right], norms[left], norms[right]
        )
    return scores


def subtract_mean(embeddings: ArrayLike, mean: ArrayLike) -> NDArray[np.floating[Any]]:
    """Centre embeddings on the mean of the training set's embeddings.

    Optional, before any cosine. The mean must come from training speakers, never from
    the trials that are scored; the cohort must be centred on the same mean.

    Parameters
    ----------
    embeddings : array-like, [utterances, dim]
        One row per utterance, not normalised in length.
    mean : array-like, [dim]
        Mean over training utterances, not normalised in length either.

    Returns
    -------
    numpy.ndarray, [utterances, dim]
        Centred embeddings, in the embeddings' own floating-point type.

    Raises
    ------
    ValueError
        If the dimensions differ or a value is not finite.

    Example
    -------
    >>> subtract_mean([[1.0, 2.0], [3.0, 4.0]], [1.0, 1.0]).tolist()
    [[0.0, 1.0], [2.0, 3.0]]
    """
    vectors, _ = as_vectors("embeddings", embeddings)
    offset = as_values("mean", mean)
    if vectors.shape[1] != len(offset):
        raise ValueError(
            f"embeddings have {vectors.shape[1]} dimensions but mean has "
            f"{len(offset)}; both must come from the same network."
        )
    dtype = vectors.dtype if vectors.dtype.kind == "f" else np.dtype(np.float64)
    centred: NDArray[np.floating[Any]] = vectors - offset.astype(dtype)
    return centred


def _cosines(
    a: NDArray[Any],
    b: NDArray[Any],
    a_norms: NDArray[np.float64],
    b_norms: NDArray[np.float64],
) -> NDArray[np.float64]:
    dots = np.einsum("td,td->t", a, b, dtype=np.float64)
    # Rounding can carry the cosine of parallel vectors an ulp beyond 1.
    cosines: NDArray[np.float64] = np.clip(dots / (a_norms * b_norms), -1.0, 1.0)
    return cosines


def _row_numbers(name: str, values: ArrayLike, rows: int) -> NDArray[np.integer[Any]]:
    numbers = as_array(name, values)
    if numbers.ndim != 1 or numbers.size == 0 or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has shape {list(numbers.shape)} and type {numbers.dtype}; it must "
            f"be a one-dimensional array of integers with at least one row number."
        )
    if numbers.min() < 0 or numbers.max() >= rows:
        raise ValueError(
            f"{name} reaches from {numbers.min()} to {numbers.max()}, but embeddings "
            f"has rows 0 to {rows - 1}."
        )
    return numbers
