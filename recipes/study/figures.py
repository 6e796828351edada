"""From the scores of a study's runs to its figures, and into one archive.

A folder of a study holds runs/<condition>/<seed> as the recipe's train.py, extract.py and
score.py write them, baseline/<statistics> with scores of untrained statistics, and:

- setting.json: what the study was begun as
- margins.json: the margins, stated from the references before another run is scored
- measures.json: the memory of a step of each condition
- results.json: rates, differences and verdicts
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from conditions import EQUAL, WORSE, Condition
from paired import (
    DRAWS,
    SeedRates,
    detectable_margin,
    holm,
    rate_difference,
    rate_over_seeds,
)

from speechbrain_rev import scoring
from speechbrain_rev.data.rows import speaker_of_name
from speechbrain_rev.files import write_whole

SETTING, MARGINS, MEASURES = "setting.json", "margins.json", "measures.json"
RESULTS, EPOCHS, ORIGIN = "results.json", "train_log.jsonl", "origin.json"
#: Of each run: the peak of a step.
PEAK = "peak_bytes.json"
#: Written last by a run that is scored.
SCORED = Path("scores", "results.json")
#: Untrained statistics of filterbanks: whether the mean over a sentence, which encoders do
#: not see, is among them.
BASELINES = {"deviation": False, "mean and deviation": True}
#: The primary measure: the equal error rate of these scores.
METHOD, EER = "as_norm", "eer"
YES, NOT_SHOWN, CANNOT_TELL = "yes", "not shown", "cannot tell"
#: A margin beyond this part of the reference's mean rate is called wide.
WIDE = 0.2
#: Why there is no verdict.
BASELINE, CEILING, SAME_WEIGHTS = (
    "the reference is not shown to be better than what needs no training by more than the "
    "margin",
    "the reference and the margin reach the highest rate there is",
    "both ended with the same weights: what was to be tested changed nothing",
)
#: What the archive holds.
PACKED = (
    *(SETTING, MARGINS, MEASURES, RESULTS),
    *("baseline/*/scores/*.txt", f"baseline/*/{SCORED}"),
    *(f"runs/*/*/{EPOCHS}", f"runs/*/*/{ORIGIN}"),
    *("runs/*/*/scores/*.txt", f"runs/*/*/{SCORED}"),
)
#: Of all files of an archive together, unpacked.
MAX_BYTES = 2**30


@dataclass(frozen=True)
class Study:
    """The runs of a study, and what they were scored on.

    Attributes
    ----------
    folder : Path
        Holds runs/.
    conditions : sequence of Condition
        What is trained.
    seeds : sequence of int
        Each condition is trained with each.
    lists : sequence of str
        The trial lists, by name.
    replicates : int
        Draws of speakers.
    """

    folder: Path
    conditions: Sequence[Condition]
    seeds: Sequence[int]
    lists: Sequence[str]
    replicates: int = 1000
    _drawn: dict[Path, tuple[float, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _listed: dict[str, scoring.Trials] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def references(self) -> list[str]:
        """The conditions that are compared with nothing: margins are made of them."""
        return [one.name for one in self.conditions if not one.references]

    def run_folder(self, name: str, seed: int) -> Path:
        """Return the folder of a run of a condition."""
        (condition,) = [one for one in self.conditions if one.name == name]
        return self.folder / "runs" / condition.folder / str(seed)

    def baseline_folder(self, name: str) -> Path:
        """Return the folder of an untrained baseline."""
        return self.folder / "baseline" / name.replace(" ", "_")

    def is_scored(self, name: str) -> bool:
        """Whether all runs of a condition are scored."""
        return all((self.run_folder(name, s) / SCORED).is_file() for s in self.seeds)

    def digests(self, name: str) -> dict[str, str]:
        """Read the digests of the weights that a condition was scored with, by seed."""
        return {str(s): digest(self.run_folder(name, s)) for s in self.seeds}

    def rates(self, name: str, trials: str) -> SeedRates:
        """Compute a condition's EERs of all seeds, and those of drawn speakers."""
        return self._rates([self.run_folder(name, s) for s in self.seeds], trials)

    def baseline(self, name: str, trials: str) -> SeedRates:
        """Compute the EER of an untrained baseline, the same for all seeds."""
        return self._rates([self.baseline_folder(name)] * len(self.seeds), trials)

    def _rates(self, folders: Sequence[Path], trials: str) -> SeedRates:
        runs = [self._eer(one / "scores" / f"{trials}.{METHOD}.txt") for one in folders]
        rates, draws = zip(*runs, strict=True)
        return SeedRates(np.array(rates), np.stack(draws))

    def _eer(self, path: Path) -> tuple[float, Any]:
        """Compute the EER of a file of scores and those of drawn speakers, once."""
        if path not in self._drawn:
            listed, scores = scoring.read_scores(path)
            first = self._listed.setdefault(path.name, listed)
            if (listed.enrol, listed.test) != (first.enrol, first.test):
                raise ValueError(
                    f"{path} has other trials than the runs before it: their rates cannot "
                    "be compared. Score all runs on one list."
                )
            speakers = {n: speaker_of_name(n) or n for n in listed.utterances}
            drawn = scoring.bootstrap(
                scores,
                listed.labels,
                [speakers[name] for name in listed.enrol],
                [speakers[name] for name in listed.test],
                p_targets=(),
                replicates=self.replicates,
            )
            self._drawn[path] = scoring.eer(scores, listed.labels), drawn.eer
        return self._drawn[path]


def digest(folder: Path) -> str:
    """Read the digest of the weights that a run was scored with."""
    return str(_read(folder / SCORED)["model"])


def differing(one: Path, other: Path) -> list[str]:
    """List what two scored runs do not share to the bit: "weights", files of scores."""
    here, there = (
        {path.name: path.read_bytes() for path in run.glob("scores/*.txt")}
        for run in (one, other)
    )
    files = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
    return ["weights"] * (digest(one) != digest(other)) + files


def state_margins(study: Study) -> dict[str, Any]:
    """Write the margins of the references, from their own runs alone; once.

    Parameters
    ----------
    study : Study
        Whose references are scored, and none of the other runs.

    Returns
    -------
    dict
        What margins.json holds: "margins" by reference, list and rate, as fractions, and
        what they are "made_of".

    Raises
    ------
    ValueError
        If others were scored before margins were stated, or those that were stated are of
        other weights of the references.
    """
    path = study.folder / MARGINS
    weights = {name: study.digests(name) for name in study.references}
    if path.is_file():
        stated: dict[str, Any] = _read(path)
        if stated["made_of"]["weights"] != weights:
            raise ValueError(
                f"{path} states margins of other weights than the references have. Restore "
                "these runs or that file, or give another --output_folder."
            )
        return stated
    for one in study.conditions:
        if one.references and any(study.folder.glob(f"runs/{one.folder}/*/{SCORED}")):
            raise ValueError(
                f"{study.folder} has no {MARGINS}, but scores of {one.name}: margins are "
                "stated first. Restore the file, or give another --output_folder."
            )
    stated = {
        "margins": {
            name: {
                trials: {EER: detectable_margin(study.rates(name, trials))}
                for trials in study.lists
            }
            for name in study.references
        },
        "made_of": {
            "seeds": list(study.seeds),
            "replicates": study.replicates,
            "draws": DRAWS,
            "weights": weights,
        },
        "stated_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    _write(path, stated)
    return stated


def compute(study: Study) -> dict[str, Any]:
    """Compute rates and differences of all conditions whose runs are scored.

    Parameters
    ----------
    study : Study
        Whose margins are stated, and whose baselines are scored.

    Returns
    -------
    dict
        "seeds", "baseline", "conditions" by name with "rates" and "weights",
        the names of "unfinished" conditions, and "comparisons"; rates as fractions.
    """
    margins = _read(study.folder / MARGINS)["margins"]
    done = [one for one in study.conditions if study.is_scored(one.name)]
    names = [one.name for one in done]
    comparisons = [
        _compared(study, one, reference, margins)
        for one in done
        for reference in one.references
        if reference in names
    ]
    correct_for_number(
        rates[EER]
        for one in comparisons
        if not one["control"]
        for rates in one["differences"].values()
    )
    return {
        "seeds": list(study.seeds),
        "baseline": {
            name: {
                trials: {METHOD: {EER: float(study.baseline(name, trials).rates[0])}}
                for trials in study.lists
            }
            for name in BASELINES
        },
        "conditions": {
            name: {
                "rates": {
                    trials: {METHOD: {EER: _rates_of(study, name, trials)}}
                    for trials in study.lists
                },
                "weights": study.digests(name),
            }
            for name in names
        },
        "unfinished": [c.name for c in study.conditions if c.name not in names],
        "comparisons": comparisons,
    }


def _rates_of(study: Study, name: str, trials: str) -> dict[str, Any]:
    system = study.rates(name, trials)
    rate = rate_over_seeds(system)
    seeds = dict(zip(map(str, study.seeds), system.rates.tolist(), strict=True))
    # Of few seeds an interval is wide, and goes beyond what a rate can be.
    low, high = max(rate.low, 0.0), min(rate.high, 1.0)
    return {**asdict(rate), "low": low, "high": high, "seeds": seeds}


def _compared(
    study: Study, candidate: Condition, reference: str, margins: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare two conditions on each list."""
    parents = {one.name: one.references for one in study.conditions}
    margin_of = reference
    while margin_of not in margins:
        # That of what the reference is itself compared with.
        (margin_of,) = parents[margin_of][:1]
    identical = study.digests(candidate.name) == study.digests(reference)
    return {
        "candidate": candidate.name,
        "reference": reference,
        "must_be_identical": candidate.claim == EQUAL,
        "control": candidate.claim == WORSE,
        "identical": identical,
        "margin_of": margin_of,
        "differences": {
            trials: {
                EER: judged(
                    study.rates(candidate.name, trials),
                    study.rates(reference, trials),
                    margin=margins[margin_of][trials][EER],
                    baselines=[study.baseline(name, trials) for name in BASELINES],
                    identical=identical,
                    must_be_identical=candidate.claim == EQUAL,
                )
            }
            for trials in study.lists
        },
    }


def judged(
    candidate: SeedRates,
    reference: SeedRates,
    *,
    margin: float,
    baselines: Sequence[SeedRates],
    identical: bool,
    must_be_identical: bool,
) -> dict[str, Any]:
    """Compare the EERs of two conditions on one list.

    There is a verdict only where the reference, made worse by the margin, would still be
    better than the untrained baselines, and better than chance.

    Parameters
    ----------
    candidate, reference : SeedRates
        Their EERs.
    margin : float
        As it was stated.
    baselines : sequence of SeedRates
        The EERs of the untrained baselines.
    identical, must_be_identical : bool
        Whether both ended with the same weights, and whether they had to.

    Returns
    -------
    dict
        The fields of RateDifference; ``within`` ("yes", "not shown" or "cannot tell") the
        margin, and the ``reason`` where there is no verdict; whether the rate is ``higher``
        at all; the ``power`` that an equal candidate had; ``margin_share`` of the
        reference's mean, and whether that is ``wide``.
    """
    difference = rate_difference(candidate, reference, margin=margin)
    mean = float(reference.rates.mean())
    reason = None
    if mean + margin >= 0.5:
        reason = CEILING
    elif any(
        rate_difference(reference, one, margin=0).upper >= -margin for one in baselines
    ):
        reason = BASELINE
    if identical:
        reason = None if must_be_identical else SAME_WEIGHTS
    shown = YES if identical or difference.non_inferior else NOT_SHOWN
    return {
        **asdict(difference),
        "p_value": None if identical or reason else difference.p_value,
        "p_holm": None,
        "within": CANNOT_TELL if reason else shown,
        "reason": reason,
        "higher": difference.higher,
        "power": difference.power,
        "margin_share": margin / mean if mean else None,
        "wide": margin > WIDE * mean,
    }


def correct_for_number(differences: Iterable[dict[str, Any]]) -> None:
    """Write Holm's p-values into differences that are tested together."""
    tested = [
        difference for difference in differences if difference["p_value"] is not None
    ]
    corrected = holm([difference["p_value"] for difference in tested])
    for difference, p_holm in zip(tested, corrected, strict=True):
        difference["p_holm"] = p_holm


def pack(folder: Path, file: Path) -> None:
    """Write what a report reads, and the scores, into one file; equal ones make equal bits.

    Parameters
    ----------
    folder : Path
        The study's, with results.json.
    file : Path
        Where to, as .tar.xz.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for path in sorted(p for pattern in PACKED for p in folder.glob(pattern)):
            content = path.read_bytes()
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    write_whole(file, lzma.compress(raw.getvalue(), preset=9))


def read_archive(file: Path) -> dict[str, str]:
    """Read the JSON of an archive, by name; nothing is written.

    Raises
    ------
    ValueError
        If there is no such file, it is damaged or too large, or no study's.
    """
    if not file.is_file():
        raise ValueError(f"There is no file {file}. Name an archive that run.py wrote.")
    texts, total = {}, 0
    try:
        with tarfile.open(file, "r:xz") as tar:
            for member in tar:
                total += member.size
                if total > MAX_BYTES:
                    raise ValueError(f"it holds more than {MAX_BYTES} bytes")
                content = tar.extractfile(member) if member.isreg() else None
                if content and member.name.endswith((".json", ".jsonl")):
                    texts[member.name] = content.read().decode()
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise ValueError(f"{file} is damaged, or no archive: {error}.") from error
    if missing := {SETTING, RESULTS, MEASURES} - texts.keys():
        raise ValueError(
            f"{file} holds no study: it lacks {', '.join(sorted(missing))}."
        )
    return texts


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")
