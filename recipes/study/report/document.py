"""The report of a study: its sentences, tables and pictures in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from results.figures import METHOD
from results.runs import EER, METHODS, RATES

from report.probe_tables import parts_of
from report.sentences import (
    claims_not_shown,
    notes,
    repetitions,
    seeds_so_far,
    tests,
    what_cannot_be_told,
)
from report.setting_tables import machines_table, plan_parts, setting_table
from report.tables import (
    METHOD_NAMES,
    answers_table,
    conditions_table,
    differences_table,
    identical_table,
    margins_table,
    taken_table,
    ways_table,
)


def report_of(results: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Write the report.

    Parameters
    ----------
    results : mapping
        What results.json holds.
    pictures : sequence of str
        Names of files beside the report.

    Returns
    -------
    str
        Markdown.
    """
    parts = [
        *seeds_so_far(results),
        *what_cannot_be_told(results),
        "# Study: error rates of reversible encoders, 8-bit optimizers and memory modes",
        _method(results),
        "## Answers: EER",
        answers_table(results),
        "## Claims that are not shown",
        _claims(results),
    ]
    if failed := [*results["failed"], *results["undrawn"]]:
        parts += ["## What failed", _points(failed)]
    parts += [
        "## To be known beside them",
        _points(notes(results)),
        "## Comparisons: EER, in percentage points",
        differences_table(results, [EER]),
    ]
    if any(c["must_be_identical"] for c in results["figures"]["comparisons"]):
        parts += ["Weights that must be equal:", identical_table(results)]
    parts += [
        "## Comparisons: detection costs",
        differences_table(results, [rate for rate in RATES if rate != EER]),
        *_conditions(results),
        *plan_parts(results),
        *parts_of(results["figures"]),
        "## Trained again",
        _points(repetitions(results)),
        "## Margins",
        _margins(results),
        margins_table(results),
        "## Setting",
        setting_table(results),
        "## Where it was trained",
        machines_table(results),
    ]
    if pictures:
        parts += ["## Pictures", "\n".join(f"![]({name})" for name in pictures)]
    return "\n\n".join(parts) + "\n"


def _points(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _method(results: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, results["figures"]["seeds"]))
    return (
        f"Seeds {seeds}. Each number is the mean over them, with the 95 % interval that "
        "other speakers and other seeds would make. A candidate is within the margin if "
        "the upper 95 % bound of its difference to the reference is below the margin, "
        "which was stated before anything was compared; else it is not shown to be, which "
        "does not show that it is worse. It cannot be told where the reference, made "
        "worse by the margin, is not shown to be better than what needs no training, or "
        "would be no better than chance: no candidate could fail there. The primary "
        f"measure is the EER with {METHOD_NAMES[METHOD]}; number of its tests: "
        f"{tests(results)}. Verdicts are of each by itself, so that one in 20 of such as "
        "are worse by the margin passes; p is shown as it is and corrected for their "
        "number by Holm's method, for each rate by itself. Lists may have trials in "
        "common: that both show something is not two findings. All is said of trainings "
        "of this length and rate; encoders that learn at other speeds may end elsewhere."
    )


def _claims(results: Mapping[str, Any]) -> str:
    if failed := claims_not_shown(results):
        return _points(failed)
    untold = what_cannot_be_told(results)
    if untold and not tests(results):
        return "None in EER, the primary measure, of which the study can tell nothing."
    return (
        "None in EER, the primary measure: "
        + ("where the study can tell, every" if untold else "every")
        + " candidate is within the margin on every list, and all weights that had to be "
        "equal are."
    )


def _conditions(results: Mapping[str, Any]) -> list[str]:
    if not results["figures"]["conditions"]:
        return []
    parts = []
    for method in METHODS:
        parts += [
            f"## Conditions: {METHOD_NAMES[method]}",
            conditions_table(results, method),
        ]
    parts += ["## Conditions: what they are and take", taken_table(results)]
    if results["ways"]:
        parts += [
            "## Encoders: a step in all ways that compute the same",
            ways_table(results["ways"]),
        ]
    return parts


def _margins(results: Mapping[str, Any]) -> str:
    references = ", ".join(results["figures"]["margins"]["margins"])
    return (
        f"Made of {references}, of each alone, at "
        f"{results['setting']['margins_stated_at']}. What is compared to a candidate of a "
        "reference has the margin of that reference. Of two systems equal to the "
        "reference, trained with seeds of their own, one is found within the margin with "
        "a power of about 75 % if there are five seeds, 65 % if three, at a one-sided "
        "level of 5 %. The power is lower where a candidate errs on other "
        "speakers than the reference, which the reference cannot tell. Margins say what "
        "this study can show, not which difference would matter to a user."
    )
