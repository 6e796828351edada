"""From the runs of a study to its report: results.json, report.md and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from memory_plan import PLAN
from results.figures import STATED_AT, compute_figures, read_margins, what_differs
from results.files import (
    BUDGET,
    MEASURES,
    PROBES,
    REPEATED,
    REPORT,
    RESULTS,
    WAYS,
)
from results.origins import machines_of, read_origin
from results.runs import SCORED, Study

from report.document import report_of
from report.pictures import draw
from report.setting_tables import settings_in_common
from speechbrain_rev.environment import environment
from speechbrain_rev.planner import Plan
from speechbrain_rev.whole_files import write_whole

if TYPE_CHECKING:
    from design.conditions import Condition


def write_report(
    study: Study, setting: Mapping[str, Any], *, failed: Sequence[str] = ()
) -> dict[str, Any]:
    """Compute all figures of a study, and write them down.

    The report is there before pictures are drawn: what fails of these is told in it.

    Parameters
    ----------
    study : Study
        Whose margins are stated. What is not finished of its runs is told. Where its
        folder has measures.json, that is reported, too: for a condition's name
        "peak_bytes" and "seconds_per_step" of a step. So are probes.json, budget.json,
        repeated.json and the plans of runs.
    setting : mapping
        What the study was asked for, as plain values: its size, seeds, settings that all
        conditions have in common, widths. What its runs have "common", when margins were
        stated, hardware and versions are added.
    failed : sequence of str
        Sentences on what was to be in the report and failed.

    Returns
    -------
    dict
        What results.json holds: "figures", which a second study must repeat to the bit,
        "measured", which it never does, "ways" to train its encoders, "budget", what was
        "repeated", which "machines" did which trainings, "setting", what "failed", and
        what was not drawn ("undrawn").

    Raises
    ------
    FileNotFoundError
        If no margin was stated.
    ValueError
        If runs were scored on different trials, or measures are of other conditions.
    """
    probes = _read(study.folder / PROBES)
    results = {
        "figures": compute_figures(study) | ({"probes": probes} if probes else {}),
        "measured": measured(study),
        "budget": _read(study.folder / BUDGET),
        "ways": _read(study.folder / WAYS) or {},
        "repeated": _repeated(study),
        "machines": machines(study),
        "failed": list(failed),
        "undrawn": [],
        "setting": {
            **setting,
            "common": settings_in_common(study),
            "margins_stated_at": read_margins(study)[STATED_AT],
            "report_written_on": {
                "date": date.today().isoformat(),
                "threads": torch.get_num_threads(),
                **dict(environment()),
            },
        },
    }
    report = study.folder / REPORT
    write_whole(report, report_of(results, []))
    pictures, results["undrawn"] = draw(study, results)
    write_whole(report, report_of(results, pictures))
    # Last: where it is, the report of it is.
    write_whole(study.folder / RESULTS, json.dumps(results, indent=1) + "\n")
    return results


def _repeated(study: Study) -> list[dict[str, Any]]:
    """Read what was trained again of the trainings that the study has now."""
    known = _read(study.folder / REPEATED) or []
    digests = {
        f"{condition.name}, seed {seed}": study.digest(condition.name, seed)
        for condition in study.conditions
        for seed in study.seeds
        if (study.run_folder(condition.name, seed) / SCORED).is_file()
    }
    return [one for one in known if one["weights"] == digests.get(one["name"])]


def machines(study: Study) -> dict[str, dict[str, list[str]]]:
    """Gather where trainings were done: conditions by machine and seed."""
    found: dict[str, dict[str, list[str]]] = {}
    for seed in study.seeds:
        for condition in study.conditions:
            folder = study.run_folder(condition.name, seed)
            if (folder / SCORED).is_file():
                seeds = found.setdefault(machines_of(read_origin(folder)), {})
                seeds.setdefault(str(seed), []).append(condition.name)
    return found


def _read(path: Path) -> Any:
    """Read what was computed beside the scores; None if it was not."""
    return json.loads(path.read_text()) if path.exists() else None


def measured(study: Study) -> dict[str, dict[str, Any]]:
    """Gather what no second study repeats: what trainings took, and a step alone."""
    path = study.folder / MEASURES
    steps = _read(path) or {}
    unknown = set(steps) - {condition.name for condition in study.conditions}
    if unknown:
        raise ValueError(
            f"{path} has measures of {sorted(unknown)}, which are no conditions of the "
            "study. Measure its conditions again."
        )
    found: dict[str, dict[str, Any]] = {}
    for condition in study.conditions:
        seeds = {
            str(seed): _taken(study.epochs(condition.name, seed))
            for seed in study.seeds
        }
        found[condition.name] = {"trainings": seeds, "plans": _plans(study, condition)}
        if condition.name in steps:
            found[condition.name]["step"] = steps[condition.name]
    return found


def _plans(study: Study, condition: Condition) -> dict[str, str]:
    """Say how many blocks have which mode by the plans of a condition's runs."""
    paths = {
        seed: study.run_folder(condition.name, seed) / PLAN for seed in study.seeds
    }
    return {
        str(seed): Plan.load(path).counts()
        for seed, path in paths.items()
        if path.exists()
    }


def _taken(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up what a training took; nothing of one that ended no epoch."""
    if not epochs:
        return {}
    minutes = sum(epoch["minutes"] for epoch in epochs)
    peaks = [epoch.get("process_resident_peak_bytes", 0) for epoch in epochs]
    return {
        "minutes": minutes,
        "seconds_per_step": 60 * minutes / epochs[-1]["steps"],
        "skipped_steps": sum(epoch.get("skipped_steps", 0) for epoch in epochs),
        **({"process_resident_peak_bytes": max(peaks)} if any(peaks) else {}),
    }


def compare(folder: Path, other: Path) -> list[str]:
    """Compare the figures of two studies, to the bit.

    Parameters
    ----------
    folder, other : Path
        Of studies with a report.

    Returns
    -------
    list of str
        A line for each figure that differs; empty if all are equal.

    Raises
    ------
    FileNotFoundError
        If one has no results.json.
    """
    return what_differs(
        *(json.loads((path / RESULTS).read_text()) for path in (folder, other))
    )
