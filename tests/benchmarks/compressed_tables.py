"""Tables of what compressed activations cost and give."""

from __future__ import annotations

from .harness import markdown
from .tables import committed, told

_BOTH = "both kinds' gradient error"


def compressed() -> str:
    """Show what each way of holding less takes, a row for each."""
    result = committed("compressed")
    rows = [
        {
            "encoder": row["encoder"],
            "way": row["way"],
            "held GB": f"{row['held GB']:.4f}",
            "fewer": f"{row['held fewer']:.1f}",
            "peak GB": f"{row['live peak GB']:.4f}",
            "lower": f"{row['peak lower']:.1f}",
            "times the time": f"{row['times the baseline']:.2f}",
            "gradient error, %": f"{100 * row['gradient error']:.2g}",
        }
        for row in result.rows
    ]
    return told(rows, result)


def compressed_bounds() -> str:
    """Show what bounds of both kinds of layers give, in a table for each."""
    result = committed("compressed_bounds")
    forms = [
        {
            "bound": row["rule"],
            "inputs smaller": f"{row['inputs smaller']:.1f}",
            "deviation / sigma": f"{row['deviation / sigma']:.3g}",
            "from, to": f"{row['least']:.2g}, {row['largest']:.3g}",
            "gradient error, %": f"{100 * row['gradient error']:.2g}",
        }
        for row in result.rows
        if row["inputs of"] == "convolutions"
    ]
    rows = [
        {
            "bound": row["rule"],
            "inputs smaller": f"{row['inputs smaller']:.1f}",
            "handed down, %": f"{100 * row['handed down']:.2g}",
            "at the features, %": f"{100 * row['at the features']:.2g}",
            "both kinds smaller": f"{row['both kinds smaller']:.1f}",
            "their gradient error, %": f"{100 * row[_BOTH]:.2g}",
        }
        for row in result.rows
        if row["inputs of"] == "normalisations"
    ]
    return f"{markdown(forms)}\n\n{told(rows, result)}"


def compressed_training() -> str:
    """Show where trainings end, a row for each seed."""
    result = committed("compressed_training")
    rows: dict[int, dict[str, str]] = {}
    for row in result.rows:
        shown = rows.setdefault(row["seed"], {"seed": str(row["seed"])})
        shown[row["way"]] = f"{row['loss']:.3f}"
        if row["way"] != "plain":
            shown[f"{row['way']}: times plain"] = f"{row['times the baseline']:.4f}"
    return told(list(rows.values()), result)


def compressed_targets() -> str:
    """Show where trainings end whose gradients are off."""
    result = committed("compressed_targets")
    rows = [
        {
            "activations": row["activations"],
            "loss": f"{row['loss']:.3f}",
            "times plain": f"{row['times the baseline']:.4f}",
            "inputs smaller": row["inputs smaller"] and f"{row['inputs smaller']:.1f}",
        }
        for row in result.rows
    ]
    return (
        f"{told(rows, result)}\n\n![Loss over training steps, with gradients off by a "
        "part of their momentum](docs/compressed_targets.png)"
    )
