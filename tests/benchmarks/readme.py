"""Paste the committed figures into documents: python -m tests.benchmarks.readme.

``TABLES`` says which document has which; a table is moved by moving its line there.
The commands that draw pictures are in ``CONTRIBUTING.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechbrain_rev.catalog import ListedEncoder, ModelsReport, Training, select
from speechbrain_rev.catalog.table import MODES
from speechbrain_rev.devices import parse_card
from speechbrain_rev.modes import Mode
from speechbrain_rev.sizes import MB, MIB

from . import tables
from .harness import markdown
from .tables import RESULTS, committed, mib_text, where

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RECIPE = ROOT / "recipes" / "VoxCeleb" / "README.md"
DOCS = ROOT / "docs"

CARD = "11GB"
BATCH = 128
#: A shallow and the deepest encoder of either kind, each with its reversible counterpart.
TELLING = (
    "resnet34",
    "revnet57",
    "resnet152",
    "revnet197",
    "df_resnet233",
    "df_revnet377",
)


def models(names: Sequence[str] = ()) -> str:
    """Show what each encoder needs, by mode, and what fits a card."""
    training = Training(parse_card(CARD).memory_bytes, batch=BATCH, frames=200)
    selected = select(training, names=names)
    heads = (
        "EER on Vox1-H. MiB: memory per 2 s utterance. Batch: largest that fits an "
        f"{CARD.removesuffix('GB')} GB GPU; bold if at least {BATCH}."
    )
    table = markdown([_model(model) for model in selected])
    return "\n\n".join([table, heads, *ModelsReport(selected).sources.values()])


def telling_models() -> str:
    """Show the same of a few encoders."""
    return models(TELLING)


def _model(model: ListedEncoder) -> dict[str, str]:
    eer = model.row.vox1_h_eer
    row = {
        "encoder": model.row.name,
        "params, M": f"{model.row.parameters / 1e6:.1f}",
        "published EER, %": "-" if eer is None else f"{eer:.2f}",
    }
    for mode in MODES:
        size = model.bytes_per_utterance(mode, 200)
        row[f"MiB {mode}"] = "" if size is None else f"{size / MIB:.1f}"
    for mode in MODES:
        batch = model.largest_batch(mode)
        # Bold is what the question asks for.
        shown = f"**{batch}**" if batch is not None and batch >= BATCH else batch
        row[f"batch {mode}"] = "" if shown is None else str(shown)
    return row


def paper() -> str:
    """Show what an utterance takes of memory beside what was published."""
    result = committed("paper")
    rows = [
        {
            "encoder": row["encoder"],
            "published GB": f"{row['published GB']:.3f}",
            **{
                head.replace("GB", "MiB").replace("float32", "fp32"): mib_text(size)
                for head, size in row.items()
                if head.startswith(("float ", "exact "))
            },
            "exact fp32 / published": f"{row['share of the baseline']:.2f}",
        }
        for row in result.rows
    ]
    held = [row["weight gradients of a stage, MB"] for row in result.rows]
    return (
        f"{markdown(rows)}\n\nMemory per utterance of 2 s; {result.setting}: "
        f"{min(held):.0f} to {max(held):.0f} MB here. {result.correctness}. "
        f"{where(result)}"
    )


def engine() -> str:
    """Show the ways of not storing activations, a row each, and what they get wrong."""
    result = committed("engine")
    shown: dict[str, dict[str, str]] = {}
    wrong: dict[str, dict[str, str]] = {}
    columns = {
        ("basic", 32, "float32"): "basic",
        ("df_bottleneck", 32, "float32"): "DF",
        ("revnet57", 13, "float32"): "revnet57",
        ("revnet57", 13, "bf16"): "revnet57 bf16",
    }
    for row in result.rows:
        way = shown.setdefault(row["way"], {"way": row["way"]})
        wrong.setdefault(row["way"], {}).update(_mistakes(row["wrong"]))
        column = columns.get((row["functions"], row["blocks"], row["precision"]))
        if column is None:
            continue
        way[f"MiB {column}"] = mib_text(row["GB per utterance"])
        if column == "revnet57":
            way["times storing"] = f"{row['times the baseline']:.2f}"
        elif column == "revnet57 bf16":
            way["in bf16"] = f"{row['times the baseline']:.2f}"
    for name, way in shown.items():
        way["gets wrong"] = "; ".join(wrong[name].values()) or "nothing"
    heads = ["way", *(f"MiB {column}" for column in columns.values())]
    heads += ["times storing", "in bf16", "gets wrong"]
    rows = [{head: way.get(head, "") for head in heads} for way in shown.values()]
    return (
        f"{markdown(rows)}\n\nMiB per utterance of 2 s, of 32 blocks of either kind and "
        f"of a whole encoder, whose time is shown. {result.setting}. {where(result)}"
    )


def _mistakes(words: str) -> dict[str, str]:
    """Tell mistakes apart by what they are in; the first of a kind is shown."""
    if words == "nothing":
        return {}
    return {mistake.partition(":")[0]: mistake for mistake in words.split("; ")}


#: What cells of ``users`` mean, beside what the result says of its figures.
_USERS_CELLS = (
    "fits: at how many frames an utterance the training fits such a card, with classifier, "
    "8-bit optimizer states, the input and with the reserve of speechbrain-rev models; "
    "empty: at neither length",
    "times storing: seconds of a step over those of the same encoder stored",
    "times counterpart: over those of the vanilla counterpart stored (resnet152 of "
    "revnet197, df_resnet233 of df_revnet377)",
)


def users() -> str:
    """Show what each way of training a deep encoder takes, a row for both lengths."""
    result = committed("users")
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result.rows:
        cases.setdefault((row["encoder"], row["way"]), []).append(row)
    twice = {row["way"] for row in result.rows if _updated_in_vain(row)}
    # Figures without a column here are left out.
    apart = ("training GiB", "fits", "statistics updated")
    setting = [
        part.replace("peak GiB:", "GiB:")
        for part in result.setting.split("; ")
        if part.partition(":")[0] not in apart
    ]
    return (
        f"{markdown([_users_row(rows) for rows in cases.values()])}\n\n"
        f"{'; '.join([*setting, *_USERS_CELLS])}. Running statistics updated more than once by a batch: "
        f"{', '.join(sorted(twice)) or 'in no way'}. {where(result)}"
    )


def _users_row(rows: list[dict[str, Any]]) -> dict[str, str]:
    first = rows[0]
    timed = [row for row in rows if row["s per step"]]
    shown = {"encoder": first["encoder"], "way": first["way"]}
    for row in rows:
        shown[f"GiB, {row['frames']} frames"] = f"{row['peak GiB']:.2f}"
    for fits in (head for head in first if head.startswith("fits ")):
        frames = [str(row["frames"]) for row in rows if row[fits] == "yes"]
        shown[fits] = ", ".join(frames)
    for head, times in {"storing": "baseline", "counterpart": "counterpart"}.items():
        ratios = [row[f"times the {times}"] for row in timed]
        shown[f"times {head}"] = " ".join(f"{r:.2f}" for r in ratios if r)
    shown["statistics of"] = str(first["statistics of"])
    return shown


def _updated_in_vain(row: dict[str, Any]) -> bool:
    parts = BATCH // row["statistics of"]
    return bool(row["statistics updated"] > parts)


def modes() -> str:
    """Show what is known of each memory mode, from its row."""
    words = {True: "yes", False: "no"}
    rows = [
        {
            "mode": f"`{mode.value}`",
            "a block keeps": mode.spec.keeps,
            "runs": "twice" if mode.spec.runs_twice else "once",
            "needs an inverse": words[mode.spec.needs_inverse],
            "gradients": "exact" if mode.spec.lossless else "within an error",
            "plans take it": "always"
            if mode.spec.planned and mode.spec.lossless
            else "for `max_gradient_error`"
            if mode.spec.planned
            else "never",
        }
        for mode in Mode
    ]
    return markdown(rows)


def planned() -> str:
    """Show step times within one budget, a row for each way and a column for a batch."""
    result = committed("planned")
    shown: dict[tuple[str, str], dict[str, str]] = {}
    for row in result.rows:
        key = row["encoder"], row["way"]
        heads = {"encoder": row["encoder"], "MiB": f"{row['budget MB'] * MB / MIB:.0f}"}
        way = shown.setdefault(key, heads | {"way": row["way"]})
        times = row["times the baseline"]
        way[f"batch {row['batch']}"] = f"{times:.2f}" if times else "does not fit"
    heads = list(dict.fromkeys(head for way in shown.values() for head in way))
    rows = [{head: way.get(head, "") for head in heads} for way in shown.values()]
    return (
        f"{markdown(rows)}\n\nTimes reconstructing all at the same batch, within so many MiB. "
        f"{planned_verdict(result.rows)}\n\n{result.setting}. {result.correctness}. {where(result)}\n\n"
        "![Seconds for each utterance against the batch, within one budget]"
        "(planned.png)"
    )


def planned_verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Say at which batches what is faster than the plan, and what has other statistics."""
    cases: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        case = cases.setdefault((row["encoder"], row["batch"]), {})
        if row["times the baseline"]:
            case[row["way"]] = row["times the baseline"]
    words_of: dict[str, list[str]] = {}
    for (encoder, batch), times in cases.items():
        shares = {way: times[way] / times["planned"] for way in times}
        faster = [
            f"{way} {share:.2f}"
            for way, share in sorted(shares.items(), key=lambda item: item[1])
            if f"{share:.2f}" < "1.00"
        ]
        words = f"at batch {batch} {' and '.join(faster) or 'nothing'}"
        words_of.setdefault(encoder, []).append(words)
    places = "; ".join(f"{name} {', '.join(words)}" for name, words in words_of.items())
    apart = {row["way"] for row in rows if row["statistics of"] < row["batch"]}
    return (
        f"Faster than the plan, in multiples of its time: {places}. Statistics of less than "
        f"the batch normalise in: {', '.join(sorted(apart)) or 'no way'}."
    )


def _there(**named: Callable[[], str]) -> dict[str, Callable[[], str]]:
    """Leave out tables whose results are not committed."""
    return {n: t for n, t in named.items() if (RESULTS / f"{n}_cpu.json").exists()}


#: Tables of committed results; each has a place in one of the documents.
TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"telling_models": telling_models},
    DOCS / "choosing_an_encoder.md": {"models": models},
    DOCS / "memory_plans.md": _there(planned=planned),
    DOCS / "reversible_training.md": {"modes": modes},
    DOCS / "comparisons.md": _there(paper=paper, users=users, engine=engine),
    DOCS / "compression.md": _there(
        compressed=tables.compressed,
        compressed_bounds=tables.compressed_bounds,
        compressed_training=tables.compressed_training,
        compressed_targets=tables.compressed_targets,
    ),
    RECIPE: _there(
        reading=tables.reading,
        manifests=tables.manifests,
        embedding=tables.embedding,
        scoring_at_scale=tables.scoring_at_scale,
    ),
    DOCS / "deploying.md": _there(inference=tables.inference, graphs=tables.graphs),
}


def rendered(document: Path) -> str:
    """Give a document with its tables written anew, from the committed figures."""
    return filled(document.read_text(), TABLES[document])


def filled(text: str, by_name: Mapping[str, Callable[[], str]]) -> str:
    """Fill each marked place of a page with the table of its name."""
    for name, table in by_name.items():
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        new = f"{table()}\n"
        text = place.sub(lambda m, new=new: f"{m[1]}{new}{m[2]}", text)
    return text


if __name__ == "__main__":
    for document in TABLES:
        document.write_text(rendered(document))
