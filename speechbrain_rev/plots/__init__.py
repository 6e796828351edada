"""Pictures that commands and the recipe draw, from plain data to a file.

matplotlib is imported when a picture is drawn. Figures are made without pyplot, so
neither the caller's backend nor its open figures are touched, and no display is needed.
"""

from speechbrain_rev.plots.memory import (
    EncoderPoint,
    PartsBar,
    encoder_map,
    memory_parts,
    plan_map,
)
from speechbrain_rev.plots.training import (
    ErrorRates,
    corpus_histograms,
    det_plot,
    training_curves,
)

__all__ = [
    "EncoderPoint",
    "ErrorRates",
    "PartsBar",
    "corpus_histograms",
    "det_plot",
    "encoder_map",
    "memory_parts",
    "plan_map",
    "training_curves",
]
