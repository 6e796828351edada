"""The tables of a study's report, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from results.figures import METHOD
from results.runs import EER, RATES
from results.verdicts import CANNOT_TELL, YES

from speechbrain_rev.sizes import MB

METHOD_NAMES = {"as_norm": "AS-Norm", "cosine": "cosine"}
#: Of each rate: its name, what it is multiplied by, and its digits.
SHOWN = {
    rate: ("EER, %", 100, 2)
    if rate == EER
    else (f"minDCF({rate.rpartition('_')[2]})", 1, 3)
    for rate in RATES
}
#: What a peak is of, by the device it was measured on.
_PEAKS = {
    "cpu": "peak of a step's tensors, counted, MB",
    "cuda": "allocator's peak in a step, MB",
}


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Lay rows out, the keys of the first as heads; "|" in a cell is escaped."""
    if not rows:
        return "There are none."
    heads = list(rows[0])
    cells = [[row[head].replace("|", "\\|") for head in heads] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = [heads, ["-" * width for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def conditions_table(results: Mapping[str, Any], method: str) -> str:
    """Show the rates of each condition."""
    rows = []
    for name, found in results["figures"]["conditions"].items():
        row = {"condition": name}
        for trials, rates in found["rates"].items():
            for rate in RATES:
                row[f"{trials}: {SHOWN[rate][0]}"] = interval_of(rates[method], rate)
            spread = number(rates[method][EER]["deviation"], EER)
            row[f"{trials}: SD of the EER over seeds, percentage points"] = spread
        rows.append(row)
    return markdown(rows)


def taken_table(results: Mapping[str, Any]) -> str:
    """Show what each condition is and takes, as far as that was measured."""
    rows = []
    for name, found in results["figures"]["conditions"].items():
        measured = results["measured"][name]
        step = measured.get("step", {})
        peak = _PEAKS.get(step.get("device", ""), _PEAKS["cpu"])
        minutes = [one["minutes"] for one in measured["trainings"].values() if one]
        rows.append(
            {
                "condition": name,
                "parameters": f"{found['encoder']['parameters']:,}",
                "at 8 bit, % of the encoder": _share(found),
                "minutes of a training": f"{fmean(minutes):.2f}" if minutes else "",
                peak: _of(step, "peak_bytes", _in_mb),
                "optimizer states, MB": _of(step, "optimizer_state_bytes", _in_mb),
                "s per step": _of(step, "seconds_per_step", lambda s: f"{s:.3g}"),
            }
        )
    heads = dict.fromkeys(head for row in rows for head in row)
    filled = [h for h in heads if any(row.get(h) for row in rows)]
    return markdown([{h: row.get(h, "") for h in filled} for row in rows])


def ways_table(ways: Mapping[str, Mapping[str, Any]]) -> str:
    """Show what a step of each encoder takes, by mode and bits of the optimizer."""
    return markdown(
        [
            {
                "encoder, mode, bits": name,
                _PEAKS[step["device"]]: _in_mb(step["peak_bytes"]),
                "activations, MB": _in_mb(step["activations_bytes"]),
                "optimizer states, MB": _in_mb(step["optimizer_state_bytes"]),
                "s per step": f"{step['seconds_per_step']:.3g}",
            }
            for name, step in ways.items()
        ]
    )


def _share(condition: Mapping[str, Any]) -> str:
    return f"{100 * condition['encoder']['share_at_8_bit']:.0f}"


def _in_mb(size_bytes: int) -> str:
    return f"{size_bytes / MB:.1f}"


def _of(step: Mapping[str, Any], key: str, show: Callable[[Any], str]) -> str:
    """Show what was measured; nothing where it was not."""
    return show(step[key]) if key in step else ""


def interval_of(rates: Mapping[str, Mapping[str, float]], rate: str) -> str:
    """Show a mean with its interval."""
    mean, low, high = (
        number(rates[rate][key], rate) for key in ("mean", "low", "high")
    )
    return f"{mean} [{low}, {high}]"


def answers_table(results: Mapping[str, Any]) -> str:
    """Show what each question came to on each list, by the primary measure."""
    figures = results["figures"]
    lists = next(iter(figures["margins"]["margins"].values()))
    return markdown(
        [
            {
                "question": comparison["question"],
                "candidate": comparison["candidate"],
                **{trials: _answer(comparison, trials) for trials in lists},
            }
            for comparison in figures["comparisons"]
        ]
    )


def _answer(comparison: Mapping[str, Any], trials: str) -> str:
    if not comparison["differences"]:
        return "not answered"
    if comparison["must_be_identical"]:
        return "yes" if comparison["identical"] else "no"
    found = comparison["differences"][trials][EER]
    if comparison["control"]:
        return "yes" if found["higher"] else "no"
    if found["within"] == CANNOT_TELL:
        return CANNOT_TELL
    if found["within"] != YES:
        return "no, it is worse" if found["higher"] else str(found["within"])
    but = ["worse within the margin"] * found["higher"]
    but += ["within a wide margin"] * found["wide"]
    return f"yes{' (' * bool(but)}{', '.join(but)}{')' * bool(but)}"


def differences_table(results: Mapping[str, Any], rates: Sequence[str]) -> str:
    """Show what each comparison came to, on each list and by some of the rates.

    Where weights had to be equal and are, there is no difference to show.
    """
    figures = results["figures"]
    conditions = figures["conditions"]
    rows = []
    for comparison in figures["comparisons"]:
        if comparison["must_be_identical"] and comparison["identical"]:
            continue
        names = comparison["candidate"], comparison["reference"]
        for trials, differences in comparison["differences"].items():
            for rate in rates:
                found = differences[rate]
                rows.append(
                    {
                        "candidate": names[0],
                        "reference": names[1],
                        "list": trials,
                        **({"rate": SHOWN[rate][0]} if len(rates) > 1 else {}),
                        "difference [95 %]": interval_of(differences, rate),
                        "upper 95 % bound": number(found["upper"], rate),
                        "margin (of the reference's)": _margin(found, rate),
                        "within the margin": found["within"],
                        "higher at all": "yes" if found["higher"] else "no",
                        "p": _p(found["p_value"]),
                        "p (Holm)": _p(found["p_holm"]),
                        "parameters, of the reference's": _ratio(conditions, *names),
                        "at 8 bit, % of the encoder": _share(conditions[names[0]]),
                    }
                )
    return markdown(rows)


def _margin(found: Mapping[str, Any], rate: str) -> str:
    margin, share = number(found["margin"], rate), found["margin_share"]
    if share is None:
        return margin
    return f"{margin} ({100 * share:.0f} %{', wide' if found['wide'] else ''})"


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _ratio(conditions: Mapping[str, Any], candidate: str, reference: str) -> str:
    return f"{parameters_ratio(conditions, candidate, reference):.3f}"


def parameters_ratio(
    conditions: Mapping[str, Any], candidate: str, reference: str
) -> float:
    """Divide the parameters of a candidate's encoder by those of the reference's."""
    ours, theirs = (
        conditions[name]["encoder"]["parameters"] for name in (candidate, reference)
    )
    return float(ours / theirs)


def identical_table(results: Mapping[str, Any]) -> str:
    """Show which weights had to be equal to the bit, and whether they are."""
    words = {True: "equal to the bit", False: "NOT equal to the bit", None: "not there"}
    return markdown(
        [
            {
                "question": comparison["question"],
                "candidate": comparison["candidate"],
                "reference": comparison["reference"],
                "weights at the end, all seeds": words[comparison["identical"]],
            }
            for comparison in results["figures"]["comparisons"]
            if comparison["must_be_identical"]
        ]
    )


def number(value: float, rate: str) -> str:
    """Write a rate or a difference of rates, never as a negative zero."""
    _, scale, digits = SHOWN[rate]
    return f"{round(scale * value, digits) + 0.0:.{digits}f}"


def margins_table(results: Mapping[str, Any]) -> str:
    """Show the margins that were stated for each reference, and their part of its rate."""
    figures = results["figures"]
    rows = []
    for name, lists in figures["margins"]["margins"].items():
        rates = figures["conditions"].get(name, {}).get("rates", {})
        for trials, margins in lists.items():
            for rate in RATES:
                mean = rates.get(trials, {}).get(METHOD, {}).get(rate, {}).get("mean")
                rows.append(
                    {
                        "reference": name,
                        "list": trials,
                        "rate": SHOWN[rate][0],
                        "margin": number(margins[rate], rate),
                        "of the reference's rate, %": f"{100 * margins[rate] / mean:.0f}"
                        if mean
                        else "",
                    }
                )
    return markdown(rows)
