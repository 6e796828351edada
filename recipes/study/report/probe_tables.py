"""What probes of a study found, and what needs no training, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from report.tables import METHOD_NAMES, SHOWN, markdown, number

Row = Mapping[str, Any]


def baseline_table(rates: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Show the rates of what needs no training."""
    return markdown(
        [
            {
                "statistics": name,
                "list": trials,
                "score": METHOD_NAMES[method],
                **{SHOWN[rate][0]: number(found[rate], rate) for rate in SHOWN},
            }
            for name, lists in rates.items()
            for trials, methods in lists.items()
            for method, found in methods.items()
        ]
    )


def angles_table(rows: Sequence[Row]) -> str:
    """Show the angles of gradients at the beginning, at the end and at most."""
    kinds = dict.fromkeys(
        (row["compared"], row["streams"], row["precision"]) for row in rows
    )
    table = []
    for compared, streams, precision in kinds:
        found = [
            row
            for row in rows
            if (row["compared"], row["streams"], row["precision"])
            == (compared, streams, precision)
        ]
        table.append(
            {
                "gradient of": compared,
                "streams": streams,
                "precision": precision,
                "before training, degrees": f"{found[0]['mean_degrees']:.2g}",
                "at the end": f"{found[-1]['mean_degrees']:.2g}",
                "largest": f"{max(row['largest_degrees'] for row in found):.2g}",
            }
        )
    return markdown(table)


def errors_table(rows: Sequence[Row]) -> str:
    """Show the errors of 8-bit states after the first epoch and at the end."""
    kinds = dict.fromkeys((row["state"], row["layers"]) for row in rows)
    table = []
    for state, layers in kinds:
        found = [
            row for row in rows if (row["state"], row["layers"]) == (state, layers)
        ]
        errors = [f"{100 * row['relative_error']:.3g}" for row in found]
        table.append(
            {
                "state": state,
                "layers": layers,
                "at 8 bit, % of values": f"{100 * found[-1]['share_of_values']:.0f}",
                "error after the first epoch, %": errors[0],
                "at the end, %": errors[-1],
                "read back as zero, %": f"{100 * found[-1]['share_read_as_zero']:.2g}",
            }
        )
    return markdown(table)


def drift_table(drifts: Mapping[str, Sequence[Row]]) -> str:
    """Show how far the weights of two trainings of one seed part."""
    return markdown(
        [
            {
                "training": name,
                "after the first epoch, % of the way": _percent(rows[0]),
                "at the end, % of the way": _percent(rows[-1]),
            }
            for name, rows in drifts.items()
        ]
    )


def _percent(row: Row) -> str:
    return f"{100 * row['distance_over_way']:.3g}"


def parts_of(figures: Mapping[str, Any]) -> list[str]:
    """Give the parts of a report that show what was found, of what was."""
    parts = []
    if figures["baseline"]:
        parts += [
            "## Without training",
            "Statistics of each utterance's filterbanks, of as many bands as encoders are "
            "given, scored as embeddings are: a trained network is worth something below "
            "that. The mean over a sentence tells of the microphone and the room, too, "
            "and is not given to encoders.",
            baseline_table(figures["baseline"]),
        ]
    if "probes" in figures:
        probes = figures["probes"]
        parts += [
            f"## Gradients over the training of {probes['run']}",
            "Angle between the gradients of reconstructed and of stored activations at "
            "the weights of each epoch, means over batches; beside it what bf16 does.",
            angles_table(probes["angles"]),
            f"## 8-bit optimizer states over the training of {probes['run']}",
            "Relative error of storing the states of a 32-bit training in 8 bits, and "
            "what it does to the step that follows.",
            errors_table(probes["errors"]),
            "Distance between the weights of two trainings of one seed, over the way that "
            f"{probes['run']} has come:",
            drift_table(probes["drift"]),
        ]
    return parts
