"""What the runs of a study left behind: scores, weights, epochs.

A run's folder is OUT/runs/<condition>/<seed>, as train.py, extract.py and score.py of the
recipe write it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from layout import speaker_of
from score import P_TARGETS, REPLICATES

from speechbrain_rev import scoring
from speechbrain_rev.inference.encoder_settings import encoder_of, run_settings
from speechbrain_rev.inference.run_folder import WEIGHTS, read_settings, read_weights
from speechbrain_rev.optim.strict import MIN_8BIT_ELEMENTS
from speechbrain_rev.whole_files import read_rows

if TYPE_CHECKING:
    from design.conditions import Comparison, Condition

#: Statistics of filterbanks, which need no training, by their names: whether the mean over
#: a sentence, which encoders are not given, is among them.
BASELINES = {"deviation": False, "mean and deviation": True}
#: Below a study's folder.
BASELINE = "baseline"
METHODS = ("as_norm", "cosine")
#: Written last by a training that is scored.
SCORED = Path("scores", "results.json")
#: What it gives each trial, a file for each list and method.
SCORES = "scores/*.txt"
EPOCHS = "train_log.jsonl"
#: Of the draws of speakers: one for all runs, so that replicates are paired.
DRAWS_SEED = 0
EER = "eer"
#: Each rate's name in results.json.
RATES = (EER, *(f"min_dcf_{p}" for p in P_TARGETS))


def baseline_folder(study: Path, name: str) -> Path:
    """Say where the scores of what needs no training are."""
    return study / BASELINE / name.replace(" ", "_")


@dataclass(frozen=True)
class Study:
    """What is trained and compared, and what finished trainings left.

    Parameters
    ----------
    folder : Path
        Holds runs/.
    conditions : sequence of Condition
        What was trained.
    comparisons : sequence of Comparison
        Which of them answer which question.
    seeds : sequence of int
        With which each condition was trained.
    lists : sequence of str
        The trial lists, by name.
    replicates : int
        Draws of speakers.
    """

    folder: Path
    conditions: Sequence[Condition]
    comparisons: Sequence[Comparison]
    seeds: Sequence[int]
    lists: Sequence[str] = ("veri_test", "veri_test_hard")
    replicates: int = REPLICATES
    _drawn: dict[tuple[str, str, str], dict[str, scoring.SeedRates]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _listed: dict[str, scoring.Trials] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def condition(self, name: str) -> Condition:
        """Find a condition.

        Raises
        ------
        ValueError
            If there is none of that name.
        """
        for condition in self.conditions:
            if condition.name == name:
                return condition
        known = ", ".join(repr(condition.name) for condition in self.conditions)
        raise ValueError(f"There is no condition {name!r}; there are {known}.")

    def run_folder(self, name: str, seed: int) -> Path:
        """Say where a training of a condition is."""
        return self.folder / "runs" / self.condition(name).folder / str(seed)

    def rates(
        self, name: str, trials: str, method: str
    ) -> dict[str, scoring.SeedRates]:
        """Compute a condition's rates of all seeds, and those of drawn speakers, once.

        Parameters
        ----------
        name : str
            Of the condition.
        trials, method : str
            The list and "as_norm" or "cosine".

        Returns
        -------
        dict of str to SeedRates
            By the names of RATES.

        Raises
        ------
        FileNotFoundError
            If a run was not scored.
        ValueError
            If it was scored on another list than the other runs.
        """
        folders = [self.run_folder(name, seed) for seed in self.seeds]
        return self._rates_of(name, folders, trials, method)

    def baseline_rates(
        self, trials: str, method: str
    ) -> dict[str, dict[str, scoring.SeedRates]]:
        """Compute the rates of what needs no training: the same for all seeds.

        Parameters
        ----------
        trials, method : str
            The list and "as_norm" or "cosine".

        Returns
        -------
        dict of str to dict
            By the names of BASELINES, those that were scored; as ``rates`` gives them.
        """
        folders = {name: baseline_folder(self.folder, name) for name in BASELINES}
        return {
            name: self._rates_of(name, [folder] * len(self.seeds), trials, method)
            for name, folder in folders.items()
            if (folder / SCORED).is_file()
        }

    def _rates_of(
        self, name: str, folders: Sequence[Path], trials: str, method: str
    ) -> dict[str, scoring.SeedRates]:
        key = name, trials, method
        if key not in self._drawn:
            once = {
                f: self._bootstrap(f, trials, method) for f in dict.fromkeys(folders)
            }
            runs = [once[folder] for folder in folders]
            self._drawn[key] = {
                rate: scoring.SeedRates(
                    np.array([points[rate] for points, _ in runs]),
                    np.stack([draws[rate] for _, draws in runs]),
                )
                for rate in RATES
            }
        return self._drawn[key]

    def _bootstrap(
        self, folder: Path, trials: str, method: str
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Compute one run's rates, and the same of drawn speakers."""
        path = folder / "scores" / f"{trials}.{method}.txt"
        listed, scores = scoring.read_scores(path)
        self._check_same(listed, trials, path)
        curve = scoring.det_curve(scores, listed.labels)
        points = [curve.eer(), *(curve.min_dcf(p_target=p) for p in P_TARGETS)]
        drawn = scoring.bootstrap(
            scores,
            listed.labels,
            [speaker_of(name) for name in listed.enrol],
            [speaker_of(name) for name in listed.test],
            p_targets=P_TARGETS,
            replicates=self.replicates,
            seed=DRAWS_SEED,
        )
        draws = [drawn.eer, *(drawn.min_dcf[p] for p in P_TARGETS)]
        return (
            dict(zip(RATES, points, strict=True)),
            dict(zip(RATES, draws, strict=True)),
        )

    def _check_same(self, listed: scoring.Trials, trials: str, path: Path) -> None:
        first = self._listed.setdefault(trials, listed)
        if (listed.enrol, listed.test) != (first.enrol, first.test) or not (
            np.array_equal(listed.labels, first.labels)
        ):
            raise ValueError(
                f"{path} has other trials than the runs before it: their rates cannot be "
                "compared. Score all runs on one list."
            )

    def digests(self, name: str) -> dict[str, str]:
        """Read the digests of the weights that a condition was scored with, by seed."""
        return {str(seed): self.digest(name, seed) for seed in self.seeds}

    def digest(self, name: str, seed: int) -> str:
        """Read the digest of the weights that a training was scored with.

        Scoring has compared it with that of the weights.
        """
        scored = (self.run_folder(name, seed) / SCORED).read_text(encoding="utf-8")
        digest: str = json.loads(scored)["model"]
        return digest

    def eers(self, name: str, seed: int) -> dict[str, float]:
        """Compute the EER with AS-Norm of one training, by list, as a fraction."""
        found = {}
        for trials in self.lists:
            path = self.run_folder(name, seed) / "scores" / f"{trials}.{METHODS[0]}.txt"
            listed, scores = scoring.read_scores(path)
            found[trials] = scoring.eer(scores, listed.labels)
        return found

    def differing(self, other: Study, name: str, seed: int) -> list[str]:
        """Say what of a training is not, to the bit, what another study has of it.

        Returns
        -------
        list of str
            Of "weights" and the names of files of scores; empty if all is equal.
        """
        here, there = (
            {path.name: path.read_bytes() for path in folder.glob(SCORES)}
            for folder in (self.run_folder(name, seed), other.run_folder(name, seed))
        )
        weights = (
            [] if self.digest(name, seed) == other.digest(name, seed) else ["weights"]
        )
        files = sorted(here.keys() | there.keys())
        return weights + [name for name in files if here.get(name) != there.get(name)]

    def score_difference(self, other: Study, name: str, seed: int) -> float:
        """Give the largest difference of a trial's scores in two studies' trainings."""
        largest = 0.0
        for path in self.run_folder(name, seed).glob(SCORES):
            _, scores = scoring.read_scores(path)
            there = other.run_folder(name, seed) / "scores" / path.name
            _, others = scoring.read_scores(there)
            largest = max(largest, float(np.abs(scores - others).max()))
        return largest

    def epochs(self, name: str, seed: int) -> list[dict[str, Any]]:
        """Read what a training wrote down about its epochs; empty if it never did."""
        path = self.run_folder(name, seed) / EPOCHS
        return read_rows(path) if path.exists() else []

    def unfinished(self, name: str) -> dict[str, str]:
        """Say what is missing of a condition's trainings, by seed; empty if nothing is."""
        missing = {str(seed): self._missing(name, seed) for seed in self.seeds}
        return {seed: reason for seed, reason in missing.items() if reason}

    def _missing(self, name: str, seed: int) -> str | None:
        folder, epochs = self.run_folder(name, seed), self.epochs(name, seed)
        for epoch in epochs:
            if not math.isfinite(epoch["train_loss"]):
                return (
                    f"it diverged: its loss is {epoch['train_loss']} in epoch "
                    f"{epoch['epoch']}"
                )
        if (folder / SCORED).is_file():
            return None
        if not (folder / WEIGHTS).is_file():
            return f"its training has not ended, after {len(epochs)} epochs"
        try:
            read_weights(folder)
        except ValueError as error:
            return str(error)
        return "it was not scored"

    def encoder(self, name: str) -> dict[str, Any]:
        """Count a condition's encoder: its parameters, and the share of 8-bit states.

        Raises
        ------
        ValueError
            If trainings of other seeds had another encoder or other bits.
        """
        folders = [self.run_folder(name, seed) for seed in self.seeds]
        found = [
            run_settings(folder) | read_settings(folder, ["optimizer_bits"])
            for folder in folders
        ]
        if any(other != found[0] for other in found):
            raise ValueError(
                f"The trainings of {name} are not of one encoder: {found}. Train them "
                "with the same settings."
            )
        sizes = [p.numel() for p in encoder_of(found[0]).parameters()]
        large = sum(size for size in sizes if size >= MIN_8BIT_ELEMENTS)
        bits = found[0]["optimizer_bits"]
        return {
            "parameters": sum(sizes),
            "share_at_8_bit": large / sum(sizes) if bits == 8 else 0.0,
        }
