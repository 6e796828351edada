"""From embeddings to error rates: cosine, AS-Norm, EER, minDCF and trial lists.

Plain numpy, sized for VoxCeleb: 580,000 trials, 150,000 embeddings and a cohort of
18,000 speakers are scored in bounded memory. Every function takes array-likes, torch
tensors on the CPU among them; label 1 means the same speaker.

Example
-------
>>> trials = Trials([1, 0], enrol=["a", "a"], test=["b", "c"])
>>> embeddings = [[1.0, 0.1], [0.9, 0.2], [0.1, 1.0]]
>>> enrol, test = trials.rows(["a", "b", "c"])
>>> scores = cosine_trials(embeddings, enrol, test)
>>> mean, std = cohort_statistics(embeddings, [[1, 0], [0, 1], [-1, 0]], top_n=2)
>>> scores = as_norm(scores, mean[enrol], std[enrol], mean[test], std[test])
>>> eer(scores, trials.labels)
0.0
"""

from speechbrain_rev.scoring.as_norm import (
    as_norm,
    cohort_statistics,
    speaker_means,
)
from speechbrain_rev.scoring.bootstrap import BootstrapRates, bootstrap, interval
from speechbrain_rev.scoring.cosine import cosine, cosine_trials, subtract_mean
from speechbrain_rev.scoring.metrics import (
    MEASURES,
    DetCurve,
    Measure,
    det_curve,
    eer,
    measured,
    measures_in,
    min_dcf,
)
from speechbrain_rev.scoring.trials import (
    Trials,
    read_scores,
    read_trials,
    write_scores,
)

__all__ = [
    "MEASURES",
    "BootstrapRates",
    "DetCurve",
    "Measure",
    "Trials",
    "as_norm",
    "bootstrap",
    "cohort_statistics",
    "cosine",
    "cosine_trials",
    "det_curve",
    "eer",
    "interval",
    "measured",
    "measures_in",
    "min_dcf",
    "read_scores",
    "read_trials",
    "speaker_means",
    "subtract_mean",
    "write_scores",
]
