"""Tables of the study of accuracy, from the archive of it that is committed."""

from __future__ import annotations

import functools
import json
import tarfile
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from speechbrain_rev.sizes import MB

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
    setting, results = _read("setting.json"), _read("results.json")["figures"]
    steps = _read("measures.json")
    untrained = results["baseline"]["mean and deviation"]
    rows = [
        {
            "condition": "mean and deviation of filterbanks, untrained",
            "told right, %": "",
        }
        | {
            trials: _number(of["as_norm"]["eer"], "eer")
            for trials, of in untrained.items()
        }
        | {"peak, MB": "", "s per step": ""}
    ]
    for name, found in results["conditions"].items():
        told_right = fmean(_told_right(_run(name, seed)) for seed in results["seeds"])
        rows.append(
            {"condition": name, "told right, %": f"{told_right:.0f}"}
            | {
                trials: _interval(of["as_norm"]["eer"], "eer")
                for trials, of in found["rates"].items()
            }
            | {
                "peak, MB": f"{steps[name]['peak_bytes'] / MB:.1f}",
                "s per step": f"{steps[name]['seconds_per_step']:.3f}",
            }
        )
    machines = dict.fromkeys(
        f"{entry['processor']}, torch {entry['torch']}" for entry in setting["code"]
    )
    return (
        f"{markdown(rows)}\n\nEER in percent with AS-Norm, the mean of {_seeds()} "
        "with its 95 % interval over speakers and seeds; chunks of training speech that "
        "were told right in the last epoch; what a step takes, measured alone (below). "
        f"{setting['threads_of_a_training']} thread for a training, on "
        f"{'; '.join(machines)}."
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


def study_differences() -> str:
    """Show what each comparison came to by the EER."""
    rows = []
    for one in _read("results.json")["figures"]["comparisons"]:
        row = {"candidate": one["candidate"], "reference": one["reference"]}
        for trials, rates in one["differences"].items():
            found = rates["eer"]
            bounds = _number(found["upper"], "eer"), _number(found["margin"], "eer")
            row |= {
                trials: _interval(found, "eer"),
                f"{trials}: bound, margin": " and ".join(bounds),
                f"{trials}: within?": _answer(one, found),
            }
        rows.append(row)
    return (
        f"{markdown(rows)}\n\nDifference of the EER, candidate less reference, the mean of "
        f"{_seeds()} in percentage points with its 95 % interval over speakers and seeds; "
        "the one-sided 95 % bound and the margin that it must be below."
    )


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
        return "seen to be worse" if found["higher"] else "not seen to be worse"
    return f"{found['within']}{', but worse' * found['higher']}"


def study_repeated() -> str:
    """Show what was trained again, where, and what came out."""
    places: dict[tuple[str, str], list[str]] = {}
    repeated = _read("repeated.json")
    for name, found in repeated.items():
        key = _machines(found["origin"]), _machines(found["origin_again"])
        places.setdefault(key, []).append(name)
    rows = []
    for (first, again), names in places.items():
        same = [name for name in names if not repeated[name]["differing"]]
        rows.append(
            {
                "trained on": first,
                "trained again on": again,
                "trainings": str(len(names)),
                "the same to the bit": _by_seed(same),
                "otherwise": _by_seed(sorted(set(names).difference(same))) or "none",
            }
        )
    return markdown(rows)


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


def _machines(origin: Sequence[Mapping[str, str]]) -> str:
    """Name machines as the study does."""
    names = [
        f"{one['processor']} by {one['instructions']}, torch {one['torch']}"
        for one in origin
    ]
    return ", then ".join(dict.fromkeys(names)) or "not written down"


def _by_seed(names: Sequence[str]) -> str:
    """List trainings by seed, which is said once."""
    seeds: dict[str, list[str]] = {}
    for name in names:
        condition, _, seed = name.rpartition(", ")
        seeds.setdefault(seed, []).append(condition)
    return "; ".join(f"{seed}: {' / '.join(of)}" for seed, of in seeds.items())


def _told_right(folder: str) -> float:
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


def study_steps() -> str:
    """Show what a training step of each condition takes."""
    rows = [
        {
            "condition": name,
            "peak, MB": f"{step['peak_bytes'] / MB:.1f}",
            "activations, MB": f"{step['activations_bytes'] / MB:.1f}",
            "states, MB": f"{step['optimizer_state_bytes'] / MB:.1f}",
            "seconds": f"{step['seconds_per_step']:.3f}",
        }
        for name, step in _read("measures.json").items()
        if name != "revnet46, half the epochs"
    ]
    return (
        f"{markdown(rows)}\n\nPeak of a step's tensors, counted; median seconds with one "
        "thread, the conditions taking turns."
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
