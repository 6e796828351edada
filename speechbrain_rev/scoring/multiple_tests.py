"""Several tests at once: what chance alone would find among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of several tests by Holm's step-down method.

    Parameters
    ----------
    p_values : sequence of float, [tests]
        Of tests that need not be independent.

    Returns
    -------
    list of float, [tests]
        In the order of the tests: those below a level are rejected, and with that
        probability none of them wrongly (Holm, "A simple sequentially rejective multiple
        test procedure", Scandinavian Journal of Statistics 1979).

    Raises
    ------
    ValueError
        If one does not lie between 0 and 1.

    Example
    -------
    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    values = np.asarray(p_values, dtype=np.float64)
    wrong = values[~((values >= 0) & (values <= 1))]
    if len(wrong):
        raise ValueError(f"A p-value is {wrong[0]}; each must lie between 0 and 1.")
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(stepped, 1)
    return [float(value) for value in corrected]
