"""The pictures of a study: how trainings went, and differences with their margins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from results.figures import METHOD
from results.runs import EER, Study
from results.verdicts import YES

from report.setting_tables import trained_on
from report.tables import METHOD_NAMES, SHOWN
from speechbrain_rev import plots

ANGLES, ERRORS = "angles.png", "state_errors.png"
_CURVES = {"train_loss": "training loss", "train_accuracy_percent": "accuracy, %"}


def draw(study: Study, results: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Draw all pictures into the study's folder, those that can be.

    Parameters
    ----------
    study : Study
        Its folder and runs.
    results : mapping
        What results.json holds.

    Returns
    -------
    names, failed : list of str
        The files that were drawn, and a sentence for each that could not be.
    """
    source = trained_on(results["setting"])
    failures = {
        name: _failure(draw_into, study.folder / name, source)
        for name, draw_into in _pictures(study, results).items()
    }
    drawn = [name for name, failure in failures.items() if failure is None]
    return drawn, [failure for failure in failures.values() if failure is not None]


def _failure(
    draw_into: Callable[[Path, str], None], path: Path, source: str
) -> str | None:
    """Draw a picture; say what is wrong if it cannot be, as that must not cost the report."""
    try:
        draw_into(path, source)
    except Exception as error:
        return f"{path.name} was not drawn: {type(error).__name__}: {error}"
    return None


def _pictures(
    study: Study, results: Mapping[str, Any]
) -> dict[str, Callable[[Path, str], None]]:
    """Say what draws each picture, given its path and what it is from."""
    figures = results["figures"]
    pictures: dict[str, Callable[[Path, str], None]] = {}
    compared = [c for c in figures["comparisons"] if c["differences"]]
    for name in dict.fromkeys(c["margin_of"] for c in compared):
        picture = f"differences_{study.condition(name).folder}.png"
        rows = [c for c in compared if c["margin_of"] == name]
        pictures[picture] = partial(draw_differences, rows)
    # All conditions at once could not be told apart.
    for name in dict.fromkeys(c["reference"] for c in compared):
        picture = f"training_{study.condition(name).folder}.png"
        others = [c["candidate"] for c in compared if c["reference"] == name]
        pictures[picture] = partial(draw_curves, study, name, others)
    if "probes" in figures:
        pictures[ANGLES] = partial(draw_angles, figures["probes"])
        pictures[ERRORS] = partial(draw_errors, figures["probes"])
    return pictures


def draw_angles(probes: Mapping[str, Any], path: Path, source: str) -> None:
    """Draw angles of gradients over a training."""
    angles: dict[str, list[tuple[int, float]]] = {}
    for row in probes["angles"]:
        name = f"{row['compared']}: {row['streams']} streams, {row['precision']}"
        angles.setdefault(name, []).append((row["step"], row["mean_degrees"]))
    plots.gradient_angles(
        angles,
        path,
        title=f"Angle between gradients over the training of {probes['run']}",
        source=source,
    )


def draw_errors(probes: Mapping[str, Any], path: Path, source: str) -> None:
    """Draw errors of 8-bit states over a training."""
    errors: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in probes["errors"]:
        if row["state"] != "update":
            layers = errors.setdefault(row["state"], {})
            point = row["epoch"], row["relative_error"]
            layers.setdefault(row["layers"], []).append(point)
    plots.state_errors(
        errors,
        path,
        title=f"Error of 8-bit optimizer states over the epochs of {probes['run']}",
        source=source,
    )


def draw_differences(
    comparisons: Sequence[Mapping[str, Any]], path: Path, source: str
) -> None:
    """Draw the differences, by the primary measure, of comparisons with one margin."""
    _, scale, _ = SHOWN[EER]
    panels = {}
    for trials in comparisons[0]["differences"]:
        rows, margin = [], 0.0
        for comparison in comparisons:
            found = comparison["differences"][trials][EER]
            margin = found["margin"]
            rows.append(
                plots.Difference(
                    _subtraction(comparison),
                    *(scale * found[key] for key in ("mean", "low", "high", "upper")),
                    shown=found["within"] == YES,
                )
            )
        panels[trials] = scale * margin, rows
    plots.forest_plot(
        panels,
        path,
        unit="percentage points",
        title=f"EER, {METHOD_NAMES[METHOD]}: candidate less reference",
        source="95 % intervals over speakers and seeds, and the one-sided 95 % bound; "
        f"filled where that is below the margin of {comparisons[0]['margin_of']}, and the "
        f"study can tell.\n{source}",
    )


def _subtraction(comparison: Mapping[str, Any]) -> str:
    """Name a comparison as the difference that it is."""
    role = "control: " if comparison["control"] else ""
    names = comparison["candidate"], comparison["reference"]
    return role + " \N{MINUS SIGN} ".join(names)


def draw_curves(
    study: Study, reference: str, candidates: Sequence[str], path: Path, source: str
) -> None:
    """Draw the training of a reference and of what is compared to it."""
    epochs = {
        name: [study.epochs(name, seed) for seed in study.seeds]
        for name in [reference, *dict.fromkeys(candidates)]
    }
    panels = {
        label: {
            name: [[epoch[key] for epoch in seed] for seed in seeds]
            for name, seeds in epochs.items()
        }
        for key, label in _CURVES.items()
    }
    plots.curves_over_seeds(
        panels,
        path,
        title=f"Training of {reference} and what is compared to it",
        source=f"Mean and range of {len(study.seeds)} seeds. {source}",
    )
