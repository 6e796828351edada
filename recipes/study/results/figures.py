"""The figures of a study: what a second one must repeat to the bit.

Rates of each condition, differences of each comparison, the margins that were stated
before anything was compared, and digests of weights. What is measured, as minutes, is not
among them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from results.files import MARGINS
from results.runs import METHODS, RATES, SCORED, Study
from results.verdicts import WIDE, correct_for_number, judged
from speechbrain_rev import scoring
from speechbrain_rev.scoring.paired import DRAWS
from speechbrain_rev.whole_files import write_whole

if TYPE_CHECKING:
    from design.conditions import Comparison, Condition

#: When margins were stated; another study states the same ones at another time.
STATED_AT = "stated_at"
#: What conditions are compared by.
METHOD = METHODS[0]


def state_margins(study: Study, references: Sequence[str]) -> dict[str, Any]:
    """Write the margins of each reference, from its own runs alone.

    Stated once, they stay: the same runs state the same, and nothing is written again.
    Those that were stated of fewer draws are held to as many.

    Parameters
    ----------
    study : Study
        Whose reference runs are scored; no other is yet, when margins are first stated.
    references : sequence of str
        Names of conditions that others are compared to, directly or by way of what is
        compared to them.

    Returns
    -------
    dict
        What margins.json holds: "margins" by reference, list and rate, as fractions,
        "made_of", what else verdicts depend on ("baseline", "wide"), and "stated_at".

    Raises
    ------
    ValueError
        If there is no reference, others were scored before margins were stated, or other
        margins were stated.
    """
    if not references:
        raise ValueError("Margins are made of the references; give at least one.")
    path = study.folder / MARGINS
    kept = read_margins(study) if path.exists() else None
    if kept is None:
        _refuse_to_state_late(study, references)
    # Those that say nothing of it drew as many seeds as speakers.
    draws = kept["made_of"].get("draws", study.replicates) if kept else DRAWS
    stated: dict[str, Any] = {
        "margins": {
            name: {
                trials: {
                    rate: scoring.detectable_margin(system, draws=draws)
                    for rate, system in study.rates(name, trials, METHOD).items()
                }
                for trials in study.lists
            }
            for name in references
        },
        "made_of": {
            "how": "speechbrain_rev.scoring.detectable_margin of each reference",
            "method": METHOD,
            "seeds": list(study.seeds),
            "replicates": study.replicates,
            "draws": draws,
            "weights": {name: study.digests(name) for name in references},
        },
        "baseline": baseline_figures(study),
        "wide": WIDE,
    }
    if kept is not None:
        same = {**kept, "made_of": {"draws": draws, **kept["made_of"]}}
        if _without_time(same) != stated:
            raise ValueError(
                f"{path} states other margins than these runs do; margins are not changed "
                "after they were stated. Begin a study in another folder."
            )
        return kept
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    stated[STATED_AT] = now
    write_whole(path, json.dumps(stated, indent=1) + "\n")
    return stated


def _refuse_to_state_late(study: Study, references: Sequence[str]) -> None:
    scored = [
        condition.name
        for condition in study.conditions
        if condition.name not in references
        and any(
            (study.run_folder(condition.name, s) / SCORED).exists() for s in study.seeds
        )
    ]
    if scored:
        raise ValueError(
            f"{study.folder} has no {MARGINS}, but scores of {', '.join(scored)} already: "
            "margins are stated before what they are for was looked at. Restore the file, "
            "or begin a study in another folder."
        )


def _without_time(margins: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in margins.items() if key != STATED_AT}


def read_margins(study: Study) -> dict[str, Any]:
    """Read the margins that were stated.

    Raises
    ------
    FileNotFoundError
        If none were.
    """
    path = study.folder / MARGINS
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: margins are stated, by state_margins, before anything "
            "is compared."
        )
    margins: dict[str, Any] = json.loads(path.read_text())
    return margins


def margin_of(study: Study, comparison: Comparison, stated: Mapping[str, Any]) -> str:
    """Name the reference whose margins count for a comparison.

    It is the comparison's own, or what that one is itself compared to.

    Parameters
    ----------
    study : Study
        Its comparisons lead from one to the next.
    comparison : Comparison
        Of which the margin is wanted.
    stated : mapping
        Margins by reference.

    Raises
    ------
    ValueError
        If no margin was stated for any of them.
    """
    name, passed = comparison.reference, set()
    to = {one.candidate: one.reference for one in study.comparisons}
    while name not in stated:
        passed.add(name)
        if name not in to or to[name] in passed:
            raise ValueError(
                f"No margin was stated for {', '.join(sorted(passed))}; there are some "
                f"for {', '.join(stated)}. State one for a condition that they are "
                "compared to."
            )
        name = to[name]
    return name


def baseline_figures(study: Study) -> dict[str, Any]:
    """Give the rates of what needs no training, by statistics, list and method."""
    found: dict[str, Any] = {}
    for trials in study.lists:
        for method in METHODS:
            for name, rates in study.baseline_rates(trials, method).items():
                found.setdefault(name, {}).setdefault(trials, {})[method] = {
                    rate: float(system.rates[0]) for rate, system in rates.items()
                }
    return found


def compute_figures(study: Study) -> dict[str, Any]:
    """Compute all rates, differences and digests.

    Parameters
    ----------
    study : Study
        Whose margins are stated. Conditions of which a run is not finished have no
        figures, nor have their comparisons. Where what needs no training was not scored,
        the study cannot tell whether its references do their task.

    Returns
    -------
    dict
        "seeds", "margins", "baseline", "conditions" by name, "unfinished" conditions with what is
        missing by seed, and "comparisons" in their order; plain numbers, rates as
        fractions.

    Raises
    ------
    FileNotFoundError
        If no margins are stated.
    ValueError
        If they are those of other trainings of the references.
    """
    margins = _without_time(read_margins(study))
    unfinished = {
        condition.name: missing
        for condition in study.conditions
        if (missing := study.unfinished(condition.name))
    }
    _check_references(study, margins, unfinished)
    comparisons = [
        _compared(study, comparison, margins["margins"])
        if not {comparison.candidate, comparison.reference} & unfinished.keys()
        else _described(comparison) | {"identical": None, "differences": {}}
        for comparison in study.comparisons
    ]
    for rate in RATES:
        correct_for_number(
            rates[rate]
            for comparison in comparisons
            if not comparison["control"]
            for rates in comparison["differences"].values()
        )
    return {
        "seeds": list(study.seeds),
        "margins": margins,
        "baseline": baseline_figures(study),
        "conditions": {
            condition.name: _condition(study, condition)
            for condition in study.conditions
            if condition.name not in unfinished
        },
        "unfinished": unfinished,
        "comparisons": comparisons,
    }


def _check_references(
    study: Study, margins: Mapping[str, Any], unfinished: Mapping[str, Any]
) -> None:
    """Refuse margins of other trainings than those that are there."""
    weights = margins["made_of"]["weights"]
    for name in weights.keys() - unfinished.keys():
        for seed, digest in study.digests(name).items():
            if digest != (then := weights[name].get(seed)):
                raise ValueError(
                    f"The margins of {name} are of a training of seed {seed} whose weights "
                    f"were {then}, and they are {digest}. Restore that training or "
                    f"{MARGINS}, or begin a study in another folder."
                )


def _condition(study: Study, condition: Condition) -> dict[str, Any]:
    rates = {
        trials: {
            method: {
                rate: _rates_of(study, system)
                for rate, system in study.rates(condition.name, trials, method).items()
            }
            for method in METHODS
        }
        for trials in study.lists
    }
    return {
        "arch": condition.arch,
        "settings": dict(condition.settings),
        "half_memory": condition.half_memory,
        "encoder": study.encoder(condition.name),
        "rates": rates,
        "weights": study.digests(condition.name),
    }


def _rates_of(study: Study, system: scoring.SeedRates) -> dict[str, Any]:
    seeds = map(str, study.seeds)
    found = scoring.rate_over_seeds(system)
    return {
        **asdict(found),
        # Of few seeds an interval is wide, and goes beyond what a rate can be.
        "low": max(found.low, 0.0),
        "high": min(found.high, 1.0),
        "seeds": dict(zip(seeds, system.rates.tolist(), strict=True)),
    }


def _described(comparison: Comparison) -> dict[str, Any]:
    return {
        "question": comparison.question,
        "candidate": comparison.candidate,
        "reference": comparison.reference,
        "must_be_identical": comparison.identical,
        "control": comparison.control,
    }


def _compared(
    study: Study,
    comparison: Comparison,
    stated: Mapping[str, Any],
) -> dict[str, Any]:
    """Compare two conditions on each list by each rate."""
    names = comparison.candidate, comparison.reference
    ours, theirs = (study.digests(name) for name in names)
    margin_of_reference = margin_of(study, comparison, stated)
    differences: dict[str, Any] = {}
    for trials in study.lists:
        candidate, reference = (study.rates(name, trials, METHOD) for name in names)
        baselines = study.baseline_rates(trials, METHOD).values()
        differences[trials] = {
            rate: judged(
                candidate[rate],
                reference[rate],
                rate=rate,
                margin=stated[margin_of_reference][trials][rate],
                baselines=[one[rate] for one in baselines],
                identical=ours == theirs,
                must_be_identical=comparison.identical,
            )
            for rate in RATES
        }
    return {
        **_described(comparison),
        "identical": ours == theirs,
        "margin_of": margin_of_reference,
        "differences": differences,
    }


def what_differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Compare the figures of two studies, to the bit.

    Parameters
    ----------
    one, other : mapping
        What results.json of each holds.

    Returns
    -------
    list of str
        A line for each figure that differs, its place and both values; empty if all are
        equal.
    """
    return list(_differing("", one["figures"], other["figures"]))


def _differing(place: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, list) and isinstance(other, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            inner = f"{place} > {key}" if place else str(key)
            if key not in one or key not in other:
                yield f"{inner}: only in the {'first' if key in one else 'second'}"
            else:
                yield from _differing(inner, one[key], other[key])
    elif one != other:
        yield f"{place}: {one!r} and {other!r}"
