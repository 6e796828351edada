"""Tables of what compressed activations cost and give."""

from __future__ import annotations

from .harness import markdown
from .tables import committed, mib_text, told

_BOTH = "both kinds' gradient error"


def _percent(share: float) -> str:
    """Give two digits of what is below a hundred percent, and whole percent above."""
    percent = 100 * share
    return f"{percent:.0f}" if percent >= 100 else f"{percent:.2g}"


def compressed() -> str:
    """Show what each way of holding less takes, a row for each."""
    result = committed("compressed")
    rows = [
        {
            "encoder": row["encoder"],
            "way": row["way"],
            "held MiB": mib_text(row["held GB"]),
            "fewer": f"{row['held fewer']:.1f}",
            "peak MiB": mib_text(row["live peak GB"]),
            "lower": f"{row['peak lower']:.1f}",
            "times the time": f"{row['times the baseline']:.2f}",
            "gradient error, %": _percent(row["gradient error"]),
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
            "gradient error, %": _percent(row["gradient error"]),
        }
        for row in result.rows
        if row["inputs of"] == "convolutions"
    ]
    rows = [
        {
            "bound": row["rule"],
            "inputs smaller": f"{row['inputs smaller']:.1f}",
            "handed down, %": _percent(row["handed down"]),
            "at the features, %": _percent(row["at the features"]),
            "both kinds smaller": f"{row['both kinds smaller']:.1f}",
            "their gradient error, %": _percent(row[_BOTH]),
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
        "part of their momentum](compressed_targets.png)"
    )
