"""The 25 encoders in one table: size, published accuracy, memory, and what fits a card.

All but the modules that count on meta tensors, ``counting`` and those of plans and of the
breakdown of a step, reads committed figures and needs no torch.
"""

from speechbrain_rev.models.card import Training, parse_card
from speechbrain_rev.models.counts import counted_peaks
from speechbrain_rev.models.render import as_json, as_text
from speechbrain_rev.models.table import Model, select

__all__ = [
    "Model",
    "Training",
    "as_json",
    "as_text",
    "counted_peaks",
    "parse_card",
    "select",
]
