"""EER and minDCF by sorting, against SpeechBrain's search over thresholds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from speechbrain.utils.metric_stats import EER, minDCF

from speechbrain_rev.scoring import eer, min_dcf

from .harness import NotEqual, Result, interleaved_seconds

TRIALS = (1000, 4000)


def cases(trials: int) -> dict[str, tuple[Callable, Callable]]:
    """Both ways to compute each measure, on the same random scores."""
    rng = np.random.default_rng(0)
    labels = np.arange(trials) % 2
    scores = (rng.normal(size=trials) + labels).astype(np.float32)
    positive, negative = (torch.from_numpy(scores[labels == k]) for k in (1, 0))

    def speechbrain_min_dcf() -> float:
        # With both costs 1 the cost of accepting nobody is the prior, 0.01.
        return float(minDCF(positive, negative, c_miss=1.0, c_fa=1.0)[0]) / 0.01

    return {
        "EER": (lambda: eer(scores, labels), lambda: EER(positive, negative)[0]),
        "minDCF": (lambda: min_dcf(scores, labels), speechbrain_min_dcf),
    }


def run(device: torch.device) -> Result:
    """Time both on the CPU; the baseline is quadratic in the trials."""
    rows, worst = [], 0.0
    for trials in TRIALS:
        for name, (ours, theirs) in cases(trials).items():
            difference = abs(float(ours()) - float(theirs()))
            worst = max(worst, difference)
            # One trial in either class moves a rate by 2 / trials.
            if difference > 4 / trials:
                raise NotEqual(f"{name} differs by {difference} at {trials} trials.")
            seconds = interleaved_seconds(
                {"ours": ours, "speechbrain": theirs}, torch.device("cpu"), repeats=5
            )
            ratio = seconds["ours"]["median"] / seconds["speechbrain"]["median"]
            rows.append(
                {
                    "measure": name,
                    "trials": trials,
                    "s": seconds["ours"]["median"],
                    "baseline": "SpeechBrain",
                    "baseline s": seconds["speechbrain"]["median"],
                    "times the baseline": ratio,
                }
            )
    return Result(
        "scoring",
        "What do EER and minDCF cost?",
        "float32 scores, median of 5 interleaved runs on the CPU",
        rows,
        f"figures within {worst:.1e} of SpeechBrain's",
    )
