"""EER and minDCF by sorting, against SpeechBrain's search over thresholds."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import torch
from speechbrain.utils.metric_stats import EER, minDCF

from speechbrain_rev.scoring import eer, min_dcf

from .harness import CPU, Result, interleaved_seconds, require

# With both costs 1 the cost of accepting nobody is the prior, 0.01.
MEASURES = {
    "EER": (eer, EER, 1.0),
    "minDCF": (min_dcf, partial(minDCF, c_miss=1.0, c_fa=1.0), 0.01),
}


def run(device: torch.device) -> Result:
    """Time both on the CPU; the baseline is quadratic in the trials."""
    rows, worst = [], 0.0
    draws = np.random.default_rng(0)
    for trials, (name, measure) in itertools.product((1000, 4000), MEASURES.items()):
        our_measure, their_measure, scale = measure
        labels = np.arange(trials) % 2
        scores = (draws.normal(size=trials) + labels).astype(np.float32)
        classes = [torch.from_numpy(scores[labels == k]) for k in (1, 0)]
        ways = {
            "ours": partial(our_measure, scores, labels),
            "SpeechBrain": partial(their_measure, *classes),
        }
        off = abs(float(ways["ours"]()) - float(ways["SpeechBrain"]()[0]) / scale)
        worst = max(worst, off)
        # One trial in either class moves a rate by 2 / trials.
        require(off <= 4 / trials, f"{name} differs by {off} at {trials} trials.")
        seconds = interleaved_seconds(ways, CPU, repeats=5)
        ours, theirs = seconds["ours"].median, seconds["SpeechBrain"].median
        rows.append(
            {
                "measure": name,
                "trials": trials,
                "s": ours,
                "baseline": "SpeechBrain",
                "baseline s": theirs,
                "times the baseline": ours / theirs,
            }
        )
    return Result(
        "scoring",
        "What do EER and minDCF cost?",
        "float32 scores, median of 5 interleaved runs on the CPU",
        rows,
        f"figures within {worst:.1e} of SpeechBrain's",
    )
