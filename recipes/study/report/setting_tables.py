"""What a study was run with: common settings of its runs, plans, hardware and versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from results.runs import Study

from report.tables import markdown
from speechbrain_rev.hparams import plain_settings, resolve
from speechbrain_rev.inference.run_folder import HYPERPARAMS
from speechbrain_rev.sizes import MB

DEFAULTS = Path(__file__).parents[3] / "hparams" / "train.yaml"


def settings_in_common(study: Study) -> dict[str, Any]:
    """Gather the settings that all runs have in common and that are not train.yaml's.

    Parameters
    ----------
    study : Study
        Some of whose runs have begun.

    Returns
    -------
    dict
        Plain values by name, read from the files of settings that runs keep; those of
        conditions that have a part of the epochs do not count. Of a path only the name is
        told.
    """
    files = [
        study.run_folder(condition.name, seed) / HYPERPARAMS
        for condition in study.conditions
        if condition.part_of_epochs == 1
        for seed in study.seeds
    ]
    found = [plain_settings(file.read_text()) for file in files if file.exists()]
    defaults = plain_settings(resolve(DEFAULTS, {}))
    return {
        key: _named(value)
        for key, value in (found[0] if found else {}).items()
        if all(key in other and other[key] == value for other in found)
        and (key not in defaults or defaults[key] != value)
    }


def trained_on(setting: Mapping[str, Any]) -> str:
    """Say on what a study was run, each machine and version once."""
    entries = [
        f"{entry['processor']}, torch {entry['torch']}" for entry in setting["code"]
    ]
    since = setting["code"][0]["since"]
    return f"{'; '.join(dict.fromkeys(entries))}; since {since}."


def machines_table(results: Mapping[str, Any]) -> str:
    """Show which machine did which trainings, a row for each machine and seed."""
    return markdown(
        [
            {"machine": machine, "seed": seed, "conditions": "; ".join(names)}
            for machine, seeds in results["machines"].items()
            for seed, names in seeds.items()
        ]
    )


def _named(value: Any) -> Any:
    """Shorten paths to the names of what they lead to."""
    if isinstance(value, list):
        return [_named(one) for one in value]
    is_path = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_path else value


def setting_table(results: Mapping[str, Any]) -> str:
    """Show the setting, hardware and versions, a row for each value."""
    setting = dict(results["setting"])
    written_on = setting.pop("report_written_on")
    rows = {**setting, "report written on": written_on}
    # The report's first table has them.
    rows.pop("comparisons", None)
    return markdown([{"": name, "value": value} for name, value in _flat("", rows)])


def _flat(place: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{place} > {key}" if place else str(key)
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        elif isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
            for one in value:
                yield name, ", ".join(f"{k} {v}" for k, v in _flat("", one))
        elif isinstance(value, list):
            yield name, ", ".join(str(_named(one)) for one in value)
        else:
            yield name, str(_named(value))


def plan_parts(results: Mapping[str, Any]) -> list[str]:
    """Show what plans had to keep within, and which modes they gave, where there are some.

    Parameters
    ----------
    results : mapping
        What results.json holds.

    Returns
    -------
    list of str
        Paragraphs of Markdown.
    """
    plans = {
        name: found["plans"]
        for name, found in results["measured"].items()
        if found.get("plans")
    }
    budget = results["budget"]
    parts = []
    if budget:
        parts.append(
            f"The budget of plans is {budget['memory_budget']}, that of half the "
            f"{budget['halved']}: a step that stores all activations takes "
            f"{budget['stored_bytes'] / MB:.1f} MB, counted."
        )
    if plans:
        parts.append(
            markdown(
                [
                    {"condition": name, "seed": seed, "blocks": counts}
                    for name, seeds in plans.items()
                    for seed, counts in seeds.items()
                ]
            )
        )
    return ["## Plans", *parts] if parts else []
