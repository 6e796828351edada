"""Scoring a list of VoxCeleb1-H's size, beside a loop over its trials.

Embeddings are random around a direction for each speaker. What is timed begins when all
utterances are embedded: AS-Norm statistics of each utterance, all trials, the metrics, and
intervals of speakers. It runs in a process of its own, whose resident memory is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from speechbrain_rev import scoring

from .harness import NotEqual, Result

GB = 1e9


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


class Case:
    """Embeddings, a list of trials, and a cohort."""

    def __init__(self, setting: Setting) -> None:
        draws = np.random.default_rng(0)
        self.setting = setting
        voices = draws.standard_normal((setting.speakers, setting.dim), np.float32)
        self.owner = np.arange(setting.utterances) % setting.speakers
        self.embeddings = draws.standard_normal(
            (setting.utterances, setting.dim), np.float32
        )
        self.embeddings *= 2
        self.embeddings += voices[self.owner]
        self.cohort = draws.standard_normal((setting.cohort, setting.dim), np.float32)
        self.enrol, other = draws.integers(setting.utterances, size=(2, setting.trials))
        same = self.enrol + setting.speakers * draws.integers(1, 9, setting.trials)
        self.test = np.where(
            np.arange(setting.trials) % 2, same % setting.utterances, other
        )
        self.labels = (self.owner[self.enrol] == self.owner[self.test]).astype(np.int8)

    def statistics(self) -> tuple[Any, Any]:
        """Mean and deviation of each utterance's nearest cohort scores."""
        return scoring.cohort_statistics(
            self.embeddings, self.cohort, top_n=self.setting.top_n
        )

    def scores(self, statistics: tuple[Any, Any]) -> np.ndarray:
        """All trials, normalised."""
        cosines = scoring.cosine_trials(self.embeddings, self.enrol, self.test)
        sides = [s[rows] for rows in (self.enrol, self.test) for s in statistics]
        return scoring.as_norm(cosines, *sides)

    def by_loop(self, count: int) -> np.ndarray:
        """The first trials one by one, each with the cohort for both of its sides."""
        unit = [v / np.linalg.norm(v) for v in self.cohort.astype(np.float64)]
        cohort = np.stack(unit)
        scores = []
        for i in range(count):
            a, b = (
                self.embeddings[rows[i]].astype(np.float64)
                for rows in (self.enrol, self.test)
            )
            a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
            score, parts = a @ b, []
            for side in (a, b):
                nearest = np.sort(cohort @ side)[-self.setting.top_n :]
                parts.append((score - nearest.mean()) / nearest.std())
            scores.append(sum(parts) / 2)
        return np.array(scores)


def measure(setting: Setting) -> dict[str, Any]:
    """Take the times of one process, and the most memory that it had."""
    case, found = Case(setting), {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = step()
        found[name] = time.perf_counter() - begin
        return result

    statistics = timed("statistics s", case.statistics)
    scores = timed("trials s", lambda: case.scores(statistics))
    timed("EER s", lambda: scoring.eer(scores, case.labels))
    timed("minDCF s", lambda: scoring.min_dcf(scores, case.labels))
    sides = [case.owner[rows].astype(str) for rows in (case.enrol, case.test)]
    timed(
        "intervals s",
        lambda: scoring.bootstrap(
            scores, case.labels, *sides, replicates=setting.replicates
        ),
    )
    found["peak GB"] = _peak_bytes() / GB
    loop = timed("loop s", lambda: case.by_loop(setting.compared))
    found["off"] = float(np.abs(loop - scores[: setting.compared]).max())
    return found


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Score in a process of its own; the baseline is a loop over trials."""
    if device.type != "cpu":
        raise ValueError(f"Scoring is on the CPU; {device} was asked for.")
    setting = setting or Setting()
    code = (
        "import json, sys; from tests.benchmarks.scoring_at_scale import *; "
        "print(json.dumps(measure(Setting(**json.loads(sys.argv[1])))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asdict(setting))],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    if found["off"] > 1e-6:
        raise NotEqual(f"AS-Norm is off by {found['off']} from a loop over trials.")
    seconds = found["statistics s"] + found["trials s"]
    loop = found["loop s"] / setting.compared * setting.trials
    rows = [
        {
            "trials": setting.trials,
            "s": seconds,
            "baseline": "a loop over trials",
            "baseline s": loop,
            "times the baseline": seconds / loop,
            **{name: found[name] for name in ("EER s", "minDCF s", "peak GB")},
            "s per 1000 draws": found["intervals s"] / setting.replicates * 1000,
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
        f"scores of {setting.compared} trials within {found['off']:.1e} of the loop's",
    )
