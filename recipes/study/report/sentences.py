"""What a study shows, does not show and cannot tell, in plain sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from results.figures import METHOD
from results.origins import machines_of
from results.repetitions import once_more
from results.runs import EER, RATES
from results.verdicts import BASELINE, CANNOT_TELL, NOT_SHOWN, WIDE, YES

from report.tables import SHOWN, number, parameters_ratio

#: Beyond this, encoders that are compared do not have as many parameters.
MOST_PARAMETERS = 0.02


def what_cannot_be_told(results: Mapping[str, Any]) -> list[str]:
    """Say where the study shows nothing by the primary measure, whatever it found.

    Parameters
    ----------
    results : mapping
        What results.json holds.

    Returns
    -------
    list of str
        A sentence for each list, reference and reason; empty if all can be told.
    """
    untold: dict[tuple[str, str, str], list[str]] = {}
    for comparison, trials, found in _tested(results):
        if found["within"] == CANNOT_TELL:
            key = trials, comparison["reference"], found["reason"]
            untold.setdefault(key, []).append(comparison["candidate"])
    unseen = [
        f"On {trials} this study does not see what is known to make {c['candidate']} worse "
        f"than {c['reference']}: it may see as little of what makes others worse."
        for c, trials, found in _primary(results)
        if c["control"] and not found["higher"]
    ]
    return unseen + [
        f"On {trials} this study shows nothing of {_listed(candidates)} compared to "
        f"{reference}: {reason}{_rates(results, trials, reference, reason)}."
        for (trials, reference, reason), candidates in untold.items()
    ]


def seeds_so_far(results: Mapping[str, Any]) -> list[str]:
    """Say it where seeds are still to be trained; empty once all are there."""
    seeds, all_seeds = results["figures"]["seeds"], results["setting"]["seeds"]
    if seeds == all_seeds:
        return []
    return [
        f"Seeds {_listed([*map(str, seeds)])} of {_listed([*map(str, all_seeds)])} are "
        "there. Verdicts are those of all seeds; of some, intervals are wider, and answers "
        "may change with the others."
    ]


def _rates(results: Mapping[str, Any], trials: str, reference: str, reason: str) -> str:
    """Give the two rates where a reference is no better than what needs no training."""
    if reason != BASELINE:
        return ""
    figures = results["figures"]
    mean = figures["conditions"][reference]["rates"][trials][METHOD][EER]["mean"]
    baseline = min(lists[trials][METHOD][EER] for lists in figures["baseline"].values())
    return f" (EER {number(mean, EER)} % and {number(baseline, EER)} %)"


def claims_not_shown(results: Mapping[str, Any]) -> list[str]:
    """Say what the study does not show, or shows to be otherwise.

    Parameters
    ----------
    results : mapping
        What results.json holds.

    Returns
    -------
    list of str
        Of trainings that are missing, of EERs and of weights that had to be equal; empty
        if all holds that can be told.
    """
    figures = results["figures"]
    sentences = []
    for comparison in figures["comparisons"]:
        candidate, reference = comparison["candidate"], comparison["reference"]
        for name in (candidate, reference):
            for seed, reason in figures["unfinished"].get(name, {}).items():
                sentences.append(
                    f"{candidate} and {reference} are not compared. Of {name}, seed "
                    f"{seed}: {reason}."
                )
        if comparison["must_be_identical"] and comparison["identical"] is False:
            sentences.append(
                f"{candidate} does not end with the weights of {reference}, to whose "
                "last bit it should be equal."
            )
    sentences += [
        _not_within(comparison, trials, found)
        for comparison, trials, found in _tested(results)
        if found["within"] == NOT_SHOWN
    ]
    return sentences


def _not_within(
    comparison: Mapping[str, Any], trials: str, found: Mapping[str, Any]
) -> str:
    mean, low, upper, margin = (
        number(found[key], EER) for key in ("mean", "low", "upper", "margin")
    )
    higher = f", at least {low} of them by the interval," if found["higher"] else ""
    wide = ", which is wide" if found["wide"] else ""
    return (
        f"That {comparison['candidate']} is as accurate as {comparison['reference']} is "
        f"not shown on {trials}: its EER differs by {mean} percentage points{higher} and "
        f"may be up to {upper} higher, which is not below the margin of {margin}{wide}."
    )


def notes(results: Mapping[str, Any]) -> list[str]:
    """Say what must be known beside claims that hold: limits, margins, encoders.

    Parameters
    ----------
    results : mapping
        What results.json holds.

    Returns
    -------
    list of str
        Sentences.
    """
    return [
        *_scope(results),
        *_more_than_half(results),
        *_skipped(results),
        _costs(results),
        *_higher(results),
        *_wide(results),
        *_unequal(results),
    ]


def _scope(results: Mapping[str, Any]) -> Iterator[str]:
    conditions = results["figures"]["conditions"]
    names = [
        name for c in results["figures"]["comparisons"] for name in _pair(conditions, c)
    ]
    at_8_bit = {_mode(conditions[n]) for n in names if _bits(conditions[n]) == 8}
    if at_8_bit:
        yield f"8-bit states are tested {_listed(sorted(at_8_bit))} only."
    modes = [
        conditions[candidate]
        for c in results["figures"]["comparisons"]
        for candidate, reference in [_pair(conditions, c) or ("", "")]
        if candidate
        and conditions[candidate]["arch"] == conditions[reference]["arch"]
        and _bits(conditions[candidate]) == _bits(conditions[reference])
    ]
    if modes:
        archs = sorted({condition["arch"] for condition in modes})
        bits = sorted({str(_bits(condition)) for condition in modes})
        yield (
            f"Memory modes and precisions are tested with {_listed(archs)} only, at "
            f"{_listed(bits)} bit."
        )


def _more_than_half(results: Mapping[str, Any]) -> Iterator[str]:
    budget = results["budget"]
    if budget and budget["halved"] != "memory":
        planned = [
            name
            for name, found in results["figures"]["conditions"].items()
            if found["half_memory"]
        ]
        yield (
            f"No plan could take half of the memory: that of {_listed(planned or ['it'])} "
            f"takes half of the {budget['halved']}."
        )


def _skipped(results: Mapping[str, Any]) -> Iterator[str]:
    for name, found in results["measured"].items():
        for seed, taken in found["trainings"].items():
            if count := taken.get("skipped_steps", 0):
                yield (
                    f"{name}, seed {seed}, skipped {count} steps whose loss or gradient "
                    "was not finite: it is compared with trainings that took them."
                )


def _pair(conditions: Mapping[str, Any], comparison: Mapping[str, Any]) -> list[str]:
    """Name both conditions of a comparison, if both are finished."""
    pair = [comparison["candidate"], comparison["reference"]]
    return pair if conditions.keys() >= set(pair) else []


def _bits(condition: Mapping[str, Any]) -> int:
    bits: int = condition["settings"].get("optimizer_bits", 32)
    return bits


def _mode(condition: Mapping[str, Any]) -> str:
    if condition["half_memory"]:
        return "with a plan"
    mode = condition["settings"].get("mode")
    return f"in mode {mode}" if mode else "in the encoder's own mode"


def _costs(results: Mapping[str, Any]) -> str:
    """Sum up the secondary measures."""
    counts = Counter(
        differences[rate]["within"]
        for comparison in results["figures"]["comparisons"]
        if not (comparison["must_be_identical"] and comparison["identical"])
        and not comparison["control"]
        for differences in comparison["differences"].values()
        for rate in RATES
        if rate != EER
    )
    costs = " and ".join(SHOWN[rate][0] for rate in RATES if rate != EER)
    return (
        f"By {costs}, which are secondary, of {counts.total()} comparisons "
        f"{counts[YES]} are within the margin, {counts[NOT_SHOWN]} are not shown to be, and "
        f"{counts[CANNOT_TELL]} cannot be told."
    )


def _higher(results: Mapping[str, Any]) -> Iterator[str]:
    for comparison, trials, found in _tested(results):
        if found["higher"] and found["within"] != NOT_SHOWN:
            mean, low = (number(found[key], EER) for key in ("mean", "low"))
            yield (
                f"The EER of {comparison['candidate']} on {trials} is higher than that "
                f"of {comparison['reference']}: by {mean} percentage points, at least "
                f"{low} of them by the interval."
            )


def _wide(results: Mapping[str, Any]) -> Iterator[str]:
    figures = results["figures"]
    for name, lists in figures["margins"]["margins"].items():
        rates = figures["conditions"].get(name, {}).get("rates", {})
        for trials, margins in lists.items():
            if trials not in rates:
                continue
            mean, margin = rates[trials][METHOD][EER]["mean"], margins[EER]
            if margin > WIDE * mean:
                yield (
                    f"The margin of {name} on {trials} is wide: {number(margin, EER)} "
                    f"percentage points are {100 * margin / mean:.0f} % of its EER. What "
                    "is within it may yet be much worse."
                )


def _unequal(results: Mapping[str, Any]) -> Iterator[str]:
    conditions = results["figures"]["conditions"]
    for comparison in results["figures"]["comparisons"]:
        if not (pair := _pair(conditions, comparison)):
            continue
        ratio = parameters_ratio(conditions, *pair)
        if abs(ratio - 1) > MOST_PARAMETERS:
            yield (
                f"{pair[0]} has {ratio:.3f} times the parameters of {pair[1]}: the "
                "comparison is also one of sizes."
            )


def repetitions(results: Mapping[str, Any]) -> list[str]:
    """Say which trainings were done again, and whether the same came out.

    Parameters
    ----------
    results : mapping
        What results.json holds.

    Returns
    -------
    list of str
        A sentence for each machine and version of torch, and for each training that came
        out otherwise; one if nothing was repeated.
    """
    repeated = results["repeated"]
    if not repeated:
        return ["None was: recipes/study/repeat.py does that."]
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in repeated:
        machines = machines_of(one["origin"]), machines_of(one["origin_again"])
        places.setdefault(machines, []).append(one)
    sentences = []
    for (first, again), found in places.items():
        same = [one["name"] for one in found if not one["differing"]]
        sentences.append(
            f"First on {first}, again on {again}: {len(same)} of {len(found)} trainings "
            "gave the same weights, to the last bit, and the same scores of all trials"
            + (f": {'; '.join(same)}." if same else ".")
        )
        sentences += [_otherwise(one) for one in found if one["differing"]]
    return sentences


def _otherwise(repeated: Mapping[str, Any]) -> str:
    """Say what is other about a training that was done again."""
    if "weights" not in repeated["differing"]:
        return (
            f"{repeated['name']} has the same weights, to the last bit, and scores that are "
            f"off by up to {repeated['score_difference']:.1g}{once_more(repeated)}."
        )
    rates = [
        f"{number(first, EER)} and {number(repeated['eer_again'][trials], EER)} % on "
        f"{trials}"
        for trials, first in repeated["eer"].items()
    ]
    return (
        f"{repeated['name']} has other weights{_apart(repeated)}, and its EERs are "
        f"{_listed(rates)}{once_more(repeated)}."
    )


def _apart(repeated: Mapping[str, Any]) -> str:
    """Say how far the weights of two trainings are apart, where that is known."""
    apart = repeated["distance_over_way"]
    return "" if apart is None else f", {100 * apart:.0f} % of the way apart"


def tests(results: Mapping[str, Any]) -> int:
    """Count the tests by the primary measure."""
    return sum(found["p_value"] is not None for _, _, found in _tested(results))


def _primary(
    results: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    """Go through comparisons and lists: the comparison, the list, what was found."""
    for comparison in results["figures"]["comparisons"]:
        for trials, differences in comparison["differences"].items():
            yield comparison, trials, differences[EER]


def _tested(
    results: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    """Leave out what is known to be worse."""
    return (one for one in _primary(results) if not one[0]["control"])


def _listed(words: list[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]
