"""Tables of the study of accuracy, from the archive of it that is committed."""

from __future__ import annotations

import functools
import json
import tarfile
from collections.abc import Iterable, Mapping
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


def _eers(folder: str) -> dict[str, float]:
    """Give the EERs with AS-Norm in percent, by trial list."""
    rows = _read(f"{folder}/scores/results.json")["results"]
    return {r["trials"]: 100 * r["eer"] for r in rows if r["method"] == "as_norm"}


def _scored(name: str) -> dict[int, str]:
    """Give the folders of a condition's scored trainings, by seed."""
    folders = {
        seed: f"runs/{name.replace(',', '').replace(' ', '_')}/{seed}"
        for seed in _read("setting.json")["seeds"]
    }
    texts = _texts()
    return {s: f for s, f in folders.items() if f"{f}/scores/results.json" in texts}


def study_rates() -> str:
    """Show the error rates of all trainings that ended, a row for each condition."""
    setting, margins = _read("setting.json"), _read("margins.json")["margins"]
    untrained = _eers("baseline/mean_and_deviation")
    rows = [
        {"condition": "mean and deviation of filterbanks, untrained"}
        | {trials: f"{eer:.1f}" for trials, eer in untrained.items()}
    ]
    count = 0
    for condition in setting["conditions"]:
        name = condition["name"]
        scored = _scored(name)
        count += len(scored)
        row = {"condition": name, "seeds": _listed(map(str, scored))}
        if scored:
            row["told right, %"] = (
                f"{fmean(_told_right(f) for f in scored.values()):.0f}"
            )
            eers = [_eers(folder) for folder in scored.values()]
            for trials in untrained:
                row[trials] = _mean([eer[trials] for eer in eers])
                if name in margins:
                    margin = 100 * margins[name][trials]["eer"]
                    row[f"margin, {trials}"] = f"{margin:.2f}"
        rows.append(row)
    heads = ["condition", "seeds", "told right, %", *untrained]
    heads += [f"margin, {trials}" for trials in untrained]
    cells = [{head: row.get(head, "") for head in heads} for row in rows]
    wanted = len(setting["conditions"]) * len(setting["seeds"])
    machines = dict.fromkeys(
        f"{entry['processor']}, torch {entry['torch']}" for entry in setting["code"]
    )
    return (
        f"{markdown(cells)}\n\nEER in percent with AS-Norm, mean over seeds with the lowest "
        "and the highest; chunks of training speech that were told right in the last "
        "epoch; margins in percentage points, stated before anything was compared. "
        f"{count} of {wanted} trainings have ended, {setting['threads_of_a_training']} "
        f"thread each, on {'; '.join(machines)}."
    )


def _told_right(folder: str) -> float:
    last = json.loads(_texts()[f"{folder}/train_log.jsonl"].splitlines()[-1])
    return float(last["train_accuracy_percent"])


def _mean(values: list[float]) -> str:
    mean = f"{fmean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.2f} to {max(values):.2f})"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


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
