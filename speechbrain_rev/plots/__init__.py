"""Pictures that commands and the recipe draw, from plain data to a file.

matplotlib is imported when a picture is drawn. Figures are made without pyplot, so
neither the caller's backend nor its open figures are touched, and no display is needed.
"""

from speechbrain_rev.plots.corpora import corpus_histograms
from speechbrain_rev.plots.det import ErrorRates, det_plot
from speechbrain_rev.plots.encoders import (
    EncoderPoint,
    SizedEncoder,
    by_parameters,
    encoder_map,
)
from speechbrain_rev.plots.memory import PartsBar, memory_parts
from speechbrain_rev.plots.plans import plan_map
from speechbrain_rev.plots.training import training_curves

__all__ = [
    "EncoderPoint",
    "ErrorRates",
    "PartsBar",
    "SizedEncoder",
    "by_parameters",
    "corpus_histograms",
    "det_plot",
    "encoder_map",
    "memory_parts",
    "plan_map",
    "training_curves",
]
