"""Every picture of the package, from plain data to a PNG file.

matplotlib is imported when a picture is drawn. Figures are made without pyplot, so
neither the caller's backend nor its open figures are touched, and no display is needed.
"""

from speechbrain_rev.plots.angles import gradient_angles
from speechbrain_rev.plots.bars import memory_bars
from speechbrain_rev.plots.batches import time_by_batch
from speechbrain_rev.plots.by_parameters import SizedEncoder, by_parameters
from speechbrain_rev.plots.det import ErrorRates, det_plot
from speechbrain_rev.plots.differences import Difference, forest_plot
from speechbrain_rev.plots.encoders import EncoderPoint, encoder_map
from speechbrain_rev.plots.losses import loss_curves
from speechbrain_rev.plots.over_seeds import curves_over_seeds
from speechbrain_rev.plots.parts import PartsBar, memory_parts
from speechbrain_rev.plots.plans import plan_map
from speechbrain_rev.plots.reversible import reversible_step
from speechbrain_rev.plots.state_errors import state_errors
from speechbrain_rev.plots.tradeoff import time_against_memory
from speechbrain_rev.plots.training import training_curves

__all__ = [
    "Difference",
    "EncoderPoint",
    "ErrorRates",
    "PartsBar",
    "SizedEncoder",
    "by_parameters",
    "curves_over_seeds",
    "det_plot",
    "encoder_map",
    "forest_plot",
    "gradient_angles",
    "loss_curves",
    "memory_bars",
    "memory_parts",
    "plan_map",
    "reversible_step",
    "state_errors",
    "time_against_memory",
    "time_by_batch",
    "training_curves",
]
