"""Tables of what embeddings cost where a model is used."""

from __future__ import annotations

from speechbrain_rev.sizes import MB, MIB

from .inference import EVAL, FORM
from .tables import committed, told

_MB, _MS = "times the baseline's MB", "times the baseline's ms"


def graphs() -> str:
    """Show utterances per second of each way, by encoder and batch."""
    result = committed("graphs")
    rows = [
        {
            "encoder": row["encoder"],
            "batch": str(row["batch"]),
            "way": row["way"],
            "utterances per second": f"{row['utterances per s']:.2f}",
            "times PyTorch's": f"{row['times the baseline']:.2f}",
        }
        for row in result.rows
    ]
    return told(rows, result)


def inference() -> str:
    """Show memory and time of each encoder, beside its vanilla counterpart."""
    result = committed("inference")
    ways = {(row["encoder"], row["way"]): row for row in result.rows}
    rows = []
    for (name, way), row in ways.items():
        if way != FORM:
            continue
        counterpart = row["baseline"].partition(",")[0]
        before = ways[name, EVAL]
        rows.append(
            {
                "encoder": name,
                "beside": "" if name == counterpart else counterpart,
                "MiB": f"{row['MB per utterance'] * MB / MIB:.1f}",
                "times its MiB": f"{row[_MB]:.2f}",
                "ms": f"{row['ms per utterance']:.0f}",
                "times its ms": f"{row[_MS]:.2f}",
                "MiB in evaluation mode": f"{before['MB per utterance'] * MB / MIB:.1f}",
                "ms in evaluation mode": f"{before['ms per utterance']:.0f}",
            }
        )
    words = told(rows, result)
    return words.replace("MB beyond", "MiB beyond")
