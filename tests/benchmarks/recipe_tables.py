"""Tables of how fast speech is read, embedded and scored."""

from __future__ import annotations

from .tables import committed, gib_text, told


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
    return told(rows, result)


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
    return told(rows, result)


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
    return told(rows, result)


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
    return told(rows, result)
