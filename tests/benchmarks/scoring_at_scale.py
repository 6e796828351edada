"""Scoring a list of VoxCeleb1-H's size, beside a loop over its trials.

Embeddings are random around a direction for each speaker. What is timed begins when all
utterances are embedded: AS-Norm statistics of each utterance, all trials, the metrics, and
intervals of speakers. It runs in a process of its own, whose resident memory is measured.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from speechbrain_rev import scoring
from speechbrain_rev.sizes import GB

from .harness import Result, in_a_process, require


@dataclass(frozen=True)
class Setting:
    """How much is scored; the loop takes ``compared`` of the trials."""

    trials: int = 580_000
    utterances: int = 145_000
    speakers: int = 1_190
    cohort: int = 5_994
    dim: int = 256
    top_n: int = 600
    compared: int = 200
    replicates: int = 100


def measure(given: dict[str, int]) -> dict[str, float]:
    """Take the times of one process, and the most memory that it had."""
    setting = Setting(**given)
    draws = np.random.default_rng(0)
    voices = draws.standard_normal((setting.speakers, setting.dim), np.float32)
    owner = np.arange(setting.utterances) % setting.speakers
    embeddings = draws.standard_normal((setting.utterances, setting.dim), np.float32)
    embeddings *= 2
    embeddings += voices[owner]
    cohort = draws.standard_normal((setting.cohort, setting.dim), np.float32)
    enrol, other = draws.integers(setting.utterances, size=(2, setting.trials))
    same = enrol + setting.speakers * draws.integers(1, 9, setting.trials)
    odd = np.arange(setting.trials) % 2
    test = np.where(odd, same % setting.utterances, other)
    labels = (owner[enrol] == owner[test]).astype(np.int8)
    measures: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = step()
        measures[name] = time.perf_counter() - begin
        return result

    def normalised() -> np.ndarray:
        statistics = scoring.cohort_statistics(embeddings, cohort, top_n=setting.top_n)
        cosines = scoring.cosine_trials(embeddings, enrol, test)
        sides = [s[rows] for rows in (enrol, test) for s in statistics]
        return scoring.as_norm(cosines, *sides)

    def by_loop() -> np.ndarray:
        """The first trials one by one, each with the cohort for both of its sides."""
        wide = cohort.astype(np.float64)
        unit = wide / np.linalg.norm(wide, axis=1, keepdims=True)
        scores = []
        for i in range(setting.compared):
            pair = embeddings[[enrol[i], test[i]]].astype(np.float64)
            a, b = pair / np.linalg.norm(pair, axis=1, keepdims=True)
            nearest = [np.sort(unit @ side)[-setting.top_n :] for side in (a, b)]
            scores.append(sum((a @ b - n.mean()) / n.std() for n in nearest) / 2)
        return np.array(scores)

    scores = timed("s", normalised)
    timed("EER s", lambda: scoring.eer(scores, labels))
    timed("minDCF s", lambda: scoring.min_dcf(scores, labels))
    sides = [owner[rows].astype(str) for rows in (enrol, test)]
    draw = {"replicates": setting.replicates}
    timed("intervals s", lambda: scoring.bootstrap(scores, labels, *sides, **draw))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loop = timed("loop s", by_loop)
    off = float(np.abs(loop - scores[: setting.compared]).max())
    return measures | {"peak GB": peak / GB, "off": off}


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Score in a process of its own; the baseline is a loop over trials."""
    setting = setting or Setting()
    row = in_a_process(__name__, "measure", asdict(setting))
    off = row.pop("off")
    require(off <= 1e-6, f"AS-Norm is off by {off} from a loop over trials.")
    loop = row.pop("loop s") / setting.compared * setting.trials
    draws = row.pop("intervals s") / setting.replicates * 1000
    rows = [
        {
            "trials": setting.trials,
            "baseline": "a loop over trials",
            "baseline s": loop,
            "times the baseline": row["s"] / loop,
            **row,
            "s per 1000 draws": draws,
        }
    ]
    return Result(
        "scoring_at_scale",
        "How long does scoring take after embedding?",
        f"{setting.trials} trials between {setting.utterances} embeddings of "
        f"{setting.dim} dimensions, cohort {setting.cohort}, of which {setting.top_n} "
        f"count; the loop takes {setting.compared} trials; peak GB: resident memory of "
        "the process, embeddings among it",
        rows,
        f"scores of {setting.compared} trials within {off:.1e} of the loop's",
    )
