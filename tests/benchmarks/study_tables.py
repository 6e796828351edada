"""Tables of the study of accuracy, from the archive of it that is committed."""

from __future__ import annotations

import functools
import json
import tarfile
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from speechbrain_rev.sizes import MB
from tests.recipes.study import study

from .harness import markdown
from .tables import RESULTS

ARCHIVE = RESULTS / "study_small.tar.xz"


@functools.cache
def _texts() -> Mapping[str, str]:
    with tarfile.open(ARCHIVE) as tar:
        return {
            member.name: file.read().decode()
            for member in tar
            if (file := tar.extractfile(member)) and member.name.endswith(("json", "l"))
        }


def _read(name: str) -> Any:
    return json.loads(_texts()[name])


def _run(name: str, seed: int) -> str:
    """Name the folder of a training."""
    return f"runs/{name.replace(',', '').replace(' ', '_')}/{seed}"


def study_rates() -> str:
    """Show the EERs of all conditions and what they take, and of what needs no training."""
    results, steps = _read("results.json")["figures"], _read("measures.json")
    untrained = results["baseline"]["mean and deviation"]
    rows = [
        {
            "condition": "mean and deviation of filterbanks, untrained",
            "training accuracy, %": "",
        }
        | {
            trials: _number(of["as_norm"]["eer"], "eer")
            for trials, of in untrained.items()
        }
        | {"peak, MB": "", "s per step": ""}
    ]
    for name, found in results["conditions"].items():
        accuracy = fmean(_last_accuracy(_run(name, seed)) for seed in results["seeds"])
        rows.append(
            {"condition": name, "training accuracy, %": f"{accuracy:.0f}"}
            | {
                trials: _interval(of["as_norm"]["eer"], "eer")
                for trials, of in found["rates"].items()
            }
            | {
                "peak, MB": f"{steps[name]['peak_bytes'] / MB:.1f}",
                "s per step": f"{steps[name]['seconds_per_step']:.3f}",
            }
        )
    threads = next(iter(steps.values()))["threads"]
    # Measured with the first seed, where the study began.
    processor = _read("setting.json")["code"][0]["processor"]
    return (
        f"{markdown(rows)}\n\nEER in percent with AS-Norm, the mean of {_seeds()} "
        "with its 95 % interval over speakers and seeds; the part of training chunks whose "
        "class was recognised in the last epoch; the peak of a step's tensors, counted, "
        f"and its median seconds, with {threads} thread of an {processor}, "
        "other work beside, the conditions taking turns."
    )


def study_encoders() -> str:
    """Show what a step of each encoder takes in all ways that compute the same."""
    rows: dict[str, dict[str, str]] = {}
    for name, step in _read("ways.json").items():
        arch, mode, bits = name.split(", ")
        row = rows.setdefault(f"{arch}, {mode}", {"encoder, mode": f"{arch}, {mode}"})
        row[f"peak at {bits}, MB"] = f"{step['peak_bytes'] / MB:.1f}"
        if bits == "32 bit":
            row["activations, MB"] = f"{step['activations_bytes'] / MB:.1f}"
            row["s per step"] = f"{step['seconds_per_step']:.3f}"
    step = next(iter(_read("ways.json").values()))
    return (
        f"{markdown(list(rows.values()))}\n\nPeak of a step's tensors, counted: weights, "
        "gradients, activations, states of the optimizer and speech; median seconds at 32 "
        f"bit, with {step['threads']} thread of an {step['processor']}, all in turns."
    )


def study_costs() -> str:
    """Show the detection costs of all conditions."""
    rows = [
        {"condition": name}
        | {
            f"{trials}, p {rate.rpartition('_')[2]}": _interval(cost, rate)
            for trials, of in found["rates"].items()
            for rate, cost in of["as_norm"].items()
            if rate != "eer"
        }
        for name, found in _read("results.json")["figures"]["conditions"].items()
    ]
    return (
        f"{markdown(rows)}\n\nminDCF with AS-Norm for two probabilities of a target: the "
        "mean of the seeds with its 95 % interval over speakers and seeds."
    )


def study_encoders_compared() -> str:
    """Show what came of comparing reversible encoders with vanilla ones."""
    return _differences("encoders")


def study_bits_compared() -> str:
    """Show what came of comparing 8 bit with 32."""
    return _differences("bits")


def study_modes_compared() -> str:
    """Show what came of comparing memory modes and precisions, and of the control."""
    return _differences("modes")


def _what_differs(comparison: Mapping[str, Any]) -> str:
    """Say what a comparison is of: encoders, bits of the optimizer's states, or modes."""
    names = comparison["candidate"], comparison["reference"]
    if len({name.partition(",")[0] for name in names}) > 1:
        return "encoders"
    return "bits" if names[0].endswith("8 bit") else "modes"


def _differences(what: str) -> str:
    rows = []
    for one in _read("results.json")["figures"]["comparisons"]:
        if _what_differs(one) != what:
            continue
        tested = not (one["must_be_identical"] or one["control"])
        for trials, rates in one["differences"].items():
            found = rates["eer"]
            share = f", {100 * found['margin_share']:.0f} %"
            rows.append(
                {
                    "candidate": one["candidate"],
                    "reference": one["reference"],
                    "list": trials,
                    "difference": _interval(found, "eer"),
                    "bound": _number(found["upper"], "eer"),
                    "margin": _number(found["margin"], "eer") + share,
                    "power": f"{100 * found['power']:.0f} %" if tested else "",
                    "p by Holm": _p_value(found),
                    "within": _answer(one, found),
                }
            )
    return markdown(rows)


def _p_value(found: Mapping[str, float | None]) -> str:
    p_holm = found["p_holm"]
    return "" if p_holm is None else f"{p_holm:.2g}"


def _seeds() -> str:
    """Say of which seeds figures are, and of how many there will be."""
    seeds = _read("results.json")["figures"]["seeds"]
    wanted = _read("setting.json")["seeds"]
    of = "" if seeds == wanted else f" of {', '.join(map(str, wanted))}"
    return f"seeds {', '.join(map(str, seeds))}{of},"


def _answer(comparison: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if comparison["must_be_identical"]:
        return "equal to the bit" if comparison["identical"] else "NOT EQUAL"
    if comparison["control"]:
        return "worse, as it must" if found["higher"] else "NOT SEEN"
    wide = ", a wide margin" * (found["wide"] and found["within"] == "yes")
    return f"{found['within']}{wide}{', but worse' * found['higher']}"


def study_repeated() -> str:
    """Show what was trained again, where, and what came out."""
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    machines_of = study("results.origins").machines_of
    for one in _read("results.json")["repeated"]:
        key = machines_of(one["origin"]), machines_of(one["origin_again"])
        places.setdefault(key, []).append(one)
    return markdown(
        [
            {
                "first on": first,
                "again on": again,
                "trainings": str(len(found)),
                "weights and scores the same": _by_seed(found, _SAME),
                "weights the same": _by_seed(found, _SAME_WEIGHTS),
                "other weights": _by_seed(found, _OTHER),
            }
            for (first, again), found in places.items()
        ]
    )


def study_machines() -> str:
    """Show which machines did how many trainings of which seeds."""
    return markdown(
        [
            {
                "machine": machine,
                "trainings": str(sum(map(len, seeds.values()))),
                "of seeds": ", ".join(f"{k} ({len(v)})" for k, v in seeds.items()),
            }
            for machine, seeds in _read("results.json")["machines"].items()
        ]
    )


_SAME, _SAME_WEIGHTS, _OTHER = "same", "same weights", "other"


def _came_out(repeated: Mapping[str, Any]) -> str:
    """Say what came out of a training that was done again."""
    if not repeated["differing"]:
        return _SAME
    return _OTHER if "weights" in repeated["differing"] else _SAME_WEIGHTS


def _by_seed(found: Sequence[Mapping[str, Any]], wanted: str) -> str:
    """List trainings of one outcome by seed, with what is other about them."""
    once_more = study("results.repetitions").once_more
    seeds: dict[str, list[str]] = {}
    for one in found:
        if (came_out := _came_out(one)) != wanted:
            continue
        condition, _, seed = one["name"].rpartition(", ")
        if came_out == _SAME_WEIGHTS:
            condition += (
                f" (scores off by {one['score_difference']:.1g}{once_more(one)})"
            )
        elif came_out == _OTHER:
            eers = [_number(one[k]["veri_test"], "eer") for k in ("eer", "eer_again")]
            apart = one["distance_over_way"]
            far = "" if apart is None else f"{100 * apart:.0f} % of the way apart; "
            condition += f" ({far}EER {' and '.join(eers)}{once_more(one)})"
        seeds.setdefault(seed, []).append(condition)
    return "; ".join(f"{seed}: {' / '.join(of)}" for seed, of in seeds.items())


def _last_accuracy(folder: str) -> float:
    last = json.loads(_texts()[f"{folder}/train_log.jsonl"].splitlines()[-1])
    return float(last["train_accuracy_percent"])


def _interval(found: Mapping[str, float], rate: str) -> str:
    mean, low, high = (_number(found[key], rate) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _number(value: float, rate: str) -> str:
    """Write an EER in percent or a cost, never as a negative zero."""
    scale, digits = (100, 2) if rate == "eer" else (1, 2)
    return f"{round(scale * value, digits) + 0.0:.{digits}f}"


def study_angles() -> str:
    """Show how far gradients of reconstructed activations are from those of stored ones."""
    found: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for row in _read("probes.json")["angles"]:
        key = row["compared"], row["streams"] or "", row["precision"]
        found.setdefault(key, {})[row["epoch"]] = row["degrees"]
    rows = []
    for (compared, streams, precision), epochs in found.items():
        everywhere = [one for degrees in epochs.values() for one in degrees]
        rows.append(
            {
                "compared": compared,
                "streams": streams,
                "precision": precision,
                "before training": f"{fmean(epochs[min(epochs)]):.2g}",
                "at the end": f"{fmean(epochs[max(epochs)]):.2g}",
                "largest of all": f"{max(everywhere):.2g}",
            }
        )
    run = _read("probes.json")["run"]
    return (
        f"{markdown(rows)}\n\nDegrees between gradients of the whole network, means over "
        f"batches and the largest of any batch, at the weights of all epochs of {run}."
    )


def study_states() -> str:
    """Show by how much states of 8 bits err after the first epoch and the last."""
    shown: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in _read("probes.json")["errors"]:
        shown.setdefault((row["state"], row["layers"]), {})[row["epoch"]] = row
    rows = []
    for (state, layers), epochs in shown.items():
        first, last = epochs[min(epochs)], epochs[max(epochs)]
        rows.append(
            {
                "what": state,
                "layers": layers,
                "values in 8 bits, %": f"{100 * last['share_of_values']:.0f}",
                f"error after epoch {min(epochs)}, %": _percent(first),
                f"after epoch {max(epochs)}, %": _percent(last),
                "largest of all epochs, %": _percent(
                    max(epochs.values(), key=lambda row: row["relative_error"])
                ),
            }
        )
    return (
        f"{markdown(rows)}\n\nNorm of the error, as a part of that of what 32 bits hold; "
        f"{_read('probes.json')['run']}."
    )


def _percent(row: Mapping[str, Any]) -> str:
    return f"{100 * row['relative_error']:.2g}"


def study_drift() -> str:
    """Show how far apart trainings end that differ by one thing."""
    rows = [
        {"condition": name, "apart, % of the way": f"{100 * last:.0f}"}
        for name, epochs in _read("probes.json")["drift"].items()
        for last in [epochs[-1]["distance_over_way"]]
    ]
    return (
        f"{markdown(rows)}\n\nDistance of the weights at the end from those of "
        f"{_read('probes.json')['run']}, as a part of the way that these have come."
    )
