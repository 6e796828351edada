"""Every picture of the package, from plain data to a PNG file.

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
from speechbrain_rev.plots.memory import (
    PartsBar,
    memory_by_depth,
    memory_parts,
    time_against_memory,
    time_by_batch,
)
from speechbrain_rev.plots.plans import plan_map
from speechbrain_rev.plots.reversible import reversible_step
from speechbrain_rev.plots.training import (
    Difference,
    curves_over_seeds,
    forest_plot,
    gradient_angles,
    loss_curves,
    training_curves,
)

__all__ = [
    "Difference",
    "EncoderPoint",
    "ErrorRates",
    "PartsBar",
    "SizedEncoder",
    "by_parameters",
    "corpus_histograms",
    "curves_over_seeds",
    "det_plot",
    "encoder_map",
    "forest_plot",
    "gradient_angles",
    "loss_curves",
    "memory_by_depth",
    "memory_parts",
    "plan_map",
    "reversible_step",
    "time_against_memory",
    "time_by_batch",
    "training_curves",
]
