"""The encoders in one table: size, published accuracy, memory, and what fits a GPU.

What is exported here reads committed counts and needs no torch. Training steps of encoders
are in ``steps``, plans of them in ``plans``, and where the memory of a step goes in
``breakdown``.
"""

from speechbrain_rev.catalog.counts import counted_peaks
from speechbrain_rev.catalog.table import ListedEncoder, Training, select

__all__ = [
    "ListedEncoder",
    "Training",
    "counted_peaks",
    "select",
]
