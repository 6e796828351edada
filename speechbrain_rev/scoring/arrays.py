"""Arrays that callers pass: shapes and values are checked here.

``scoring`` accepts what ``numpy.asarray`` accepts, and torch tensors on the CPU with or
without a gradient. A wrong array is refused by the name that the caller knows.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def as_array(name: str, values: ArrayLike) -> NDArray[Any]:
    """Turn an array-like into a numpy array, without a copy where that is possible.

    Parameters
    ----------
    name : str
        What the caller calls this argument; used in error messages.
    values : array-like
        Numbers, nested sequences, numpy arrays or torch tensors on the CPU.

    Returns
    -------
    numpy.ndarray
        The same values.

    Raises
    ------
    ValueError
        If the values cannot be read as numbers.

    Example
    -------
    >>> as_array("scores", [1.0, 2.0]).shape
    (2,)
    """
    # A tensor that needs a gradient refuses numpy until it is detached.
    detach = getattr(values, "detach", None)
    try:
        array = np.asarray(values if detach is None else detach())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} cannot be read as a numpy array ({error}). Give numbers of one "
            f"shape; for a torch tensor give tensor.float().cpu()."
        ) from error
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} holds {array.dtype} values; real numbers are needed "
            f"(bool, integer or floating point)."
        )
    return array


def as_vectors(name: str, values: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read a matrix of embeddings and the length of each row.

    The lengths are summed in float64, so that no float32 row over- or underflows;
    they separate NaN, infinity and zero rows in one pass and without a temporary
    of the matrix' size.

    Parameters
    ----------
    name : str
        What the caller calls this argument; used in error messages.
    values : array-like, [rows, dim]
        One embedding per row.

    Returns
    -------
    vectors : numpy.ndarray, [rows, dim]
        The same values.
    norms : numpy.ndarray, [rows], float64
        Euclidean length of each row, positive and finite.

    Raises
    ------
    ValueError
        If the array is not a matrix, is empty, or has a row that holds NaN or
        infinity or whose length is zero.

    Example
    -------
    >>> vectors, norms = as_vectors("embeddings", [[3.0, 4.0]])
    >>> vectors.shape, norms.tolist()
    ((1, 2), [5.0])
    """
    vectors = as_array(name, values)
    if vectors.ndim != 2 or vectors.size == 0:
        raise ValueError(
            f"{name} has shape {list(vectors.shape)}; it must be [rows, dim] with at "
            f"least one row and one column. Embeddings of shape [rows, 1, dim] need "
            f"a squeeze(1)."
        )
    with np.errstate(over="ignore"):
        squares = np.einsum("rd,rd->r", vectors, vectors, dtype=np.float64)
    norms = np.sqrt(squares)
    _refuse_rows(name, ~np.isfinite(norms), "NaN, infinity or values beyond float64")
    _refuse_rows(name, norms == 0.0, "zeros only, so its direction is undefined")
    return vectors, norms


def as_values(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Read a vector of finite numbers as float64.

    Parameters
    ----------
    name : str
        What the caller calls this argument; used in error messages.
    values : array-like, [values]
        Scores, means or deviations.

    Returns
    -------
    numpy.ndarray, [values], float64
        The same values.

    Raises
    ------
    ValueError
        If the array is not a vector, is empty, or holds NaN or infinity.

    Example
    -------
    >>> as_values("scores", [0, 1]).tolist()
    [0.0, 1.0]
    """
    array = as_array(name, values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"{name} has shape {list(array.shape)}; it must be one-dimensional with "
            f"at least one value."
        )
    array = array.astype(np.float64, copy=False)
    _refuse_rows(name, ~np.isfinite(array), "NaN or infinity")
    return array


def as_labels(name: str, values: ArrayLike) -> NDArray[np.int8]:
    """Read trial labels, of which both kinds must be present.

    Parameters
    ----------
    name : str
        What the caller calls this argument; used in error messages.
    values : array-like, [trials]
        1 where both sides are one speaker (target), 0 where not (impostor).

    Returns
    -------
    numpy.ndarray, [trials], int8
        The same labels.

    Raises
    ------
    ValueError
        If the array is not a vector, holds anything but 0 and 1, or holds only one
        of the two.

    Example
    -------
    >>> as_labels("labels", [True, False]).tolist()
    [1, 0]
    """
    array = as_array(name, values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"{name} has shape {list(array.shape)}; it must be one-dimensional with "
            f"at least one label."
        )
    _refuse_rows(
        name,
        (array != 0) & (array != 1),
        "a label that is neither 1 (same speaker) nor 0",
    )
    labels = array.astype(np.int8)
    if labels.min() == labels.max():
        raise ValueError(
            f"{name} holds {labels.size} labels, all of them {labels[0]}. Error rates "
            f"need trials of the same speaker (1) and of different speakers (0)."
        )
    return labels


def same_length(**arrays: NDArray[Any]) -> None:
    """Refuse arrays whose first axes differ.

    Parameters
    ----------
    **arrays : numpy.ndarray
        The arrays by the names their caller knows.

    Raises
    ------
    ValueError
        If the lengths differ.

    Example
    -------
    >>> same_length(scores=np.zeros(3), labels=np.zeros(3))
    """
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise ValueError(f"These must be of one length, but are: {lengths}.")


def _refuse_rows(name: str, bad: NDArray[np.bool_], what: str) -> None:
    count = int(bad.sum())
    if count:
        first = int(bad.argmax())
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise ValueError(
            f"{name}[{first}]{more} of {bad.size} holds {what}. Look at how it was "
            f"computed, or leave it out."
        )
