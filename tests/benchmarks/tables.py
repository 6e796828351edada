"""The tables of committed figures that documents show.

Each is a function of no argument that returns Markdown; ``readme`` says which document
has which.
"""

from __future__ import annotations

import json
from pathlib import Path

from speechbrain_rev.sizes import GB, GIB, MB, MIB

from .harness import Result, markdown
from .inference import EVAL, FORM

RESULTS = Path(__file__).parent / "results"


def committed(name: str) -> Result:
    """Read what a benchmark measured on a CPU."""
    return Result(**json.loads((RESULTS / f"{name}_cpu.json").read_text()))


def mib_text(gb: float) -> str:
    """Write in MiB what results have in GB, which are 1e9 bytes there."""
    return f"{gb * GB / MIB:.1f}"


def gib_text(gb: float) -> str:
    """Write in GiB what results have in GB."""
    return f"{gb * GB / GIB:.2f}"


def where(result: Result) -> str:
    """Say on which machine it was measured, and when."""
    versions = result.environment
    return (
        f"{versions['processor']}, {versions['threads']} thread(s), torch "
        f"{versions['torch']}, {versions['date']}."
    )


def captioned(rows: list[dict[str, str]], result: Result) -> str:
    """Write a table, and below it how and where it was measured."""
    setting = result.setting.replace(" GB:", " GiB:")
    words = f"{setting}. {result.correctness}. {where(result)}"
    return f"{markdown(rows)}\n\n{words[0].upper()}{words[1:]}"


def reading() -> str:
    """Show utterances per second of each way of reading, and of the stages behind it."""
    result = committed("reading")
    rows = [
        {
            "input path": row["input path"],
            "utterances per second": f"{row['utterances per second']:,.0f}",
            "ms per utterance": f"{row['ms per utterance']:.3f}",
            "beside": row["baseline"],
            "times as fast": f"{row['times the baseline']:.2f}",
        }
        for row in result.rows
    ]
    return captioned(rows, result)


def manifests() -> str:
    """Show what a manifest of a million rows costs."""
    result = committed("manifests")
    rows = [
        {
            "manifest": row["manifest"],
            "rows": f"{row['rows']:,}",
            **{
                head: f"{row[head]:.1f}"
                for head in ("s to the first batch", "s since the process began")
            },
            **{head: f"{row[head]:.0f}" for head in row if head.startswith("MB of")},
            "times SpeechBrain's seconds": f"{row['times its seconds']:.3f}",
        }
        for row in result.rows
    ]
    return captioned(rows, result)


def embedding() -> str:
    """Show how fast a trial list is embedded, beside SpeechBrain's script."""
    result = committed("embedding")
    rows = [
        {
            "job": row["job"],
            "way": row["way"],
            "utterances per second": f"{row['utterances per s']:,.2f}",
            # Run again, there is nothing to compute: an archive is read.
            "times the script": "read back, not computed"
            if (row["job"], row["way"]) == ("both sides, run again", "embed_into")
            else f"{row['times the baseline']:.2f}",
        }
        for row in result.rows
    ]
    return captioned(rows, result)


def scoring_at_scale() -> str:
    """Show how long scoring takes after embedding."""
    result = committed("scoring_at_scale")
    rows = [
        {
            "trials": f"{row['trials']:,}",
            **{head: f"{row[head]:.2f}" for head in ("s", "EER s", "minDCF s")},
            "peak GiB": gib_text(row["peak GB"]),
            "a loop over trials, s": f"{row['baseline s']:,.0f}",
            "s for intervals of 1000 draws": f"{row['s per 1000 draws']:.0f}",
        }
        for row in result.rows
    ]
    return captioned(rows, result)


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
    return captioned(rows, result)


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
    words = captioned(rows, result)
    return words.replace("MB beyond", "MiB beyond")


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
    return captioned(rows, result)


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
    return f"{markdown(forms)}\n\n{captioned(rows, result)}"


def compressed_training() -> str:
    """Show where runs end, a row for each seed."""
    result = committed("compressed_training")
    rows: dict[int, dict[str, str]] = {}
    for row in result.rows:
        shown = rows.setdefault(row["seed"], {"seed": str(row["seed"])})
        shown[row["way"]] = f"{row['loss']:.3f}"
        if row["way"] != "plain":
            shown[f"{row['way']}: times plain"] = f"{row['times the baseline']:.4f}"
    return captioned(list(rows.values()), result)


def compressed_targets() -> str:
    """Show where runs with an error in their gradients end."""
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
        f"{captioned(rows, result)}\n\n![Loss over training steps, with gradients off by a "
        "part of their momentum](compressed_targets.png)"
    )
