"""Paste the committed figures into documents: python -m tests.benchmarks.readme.

``TABLES`` says which document has which; a table is moved by moving its line there.
The commands that draw pictures are in ``CONTRIBUTING.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.catalog import ListedEncoder, Training, select
from speechbrain_rev.catalog.counts import counted_peaks
from speechbrain_rev.catalog.table import EPOCHS, MODES
from speechbrain_rev.cli.encoders import models_notes
from speechbrain_rev.devices import parse_card
from speechbrain_rev.modes import Mode
from speechbrain_rev.sizes import GB, GIB, MB, MIB

from .harness import Result, markdown
from .inference import EVAL, FORM
from .launches import CARDS
from .launches import PLAIN as PLAIN_LAYERS
from .optimizers import FORMS, KINDS
from .optimizers import PLAIN as PLAIN_STATES
from .shares import WITH

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RECIPE = ROOT / "recipes" / "VoxCeleb" / "README.md"
DOCS = ROOT / "docs"

CARD = "11GB"
BATCH = 128
#: In the README: a shallow vanilla encoder, a deep one, and reversible ones that are deep.
FEW = ("resnet34", "resnet152", "revnet197", "df_revnet377")

Row = Mapping[str, Any]


def committed(name: str, device: str = "cpu") -> Result:
    """Read what a benchmark measured on a CPU or a GPU."""
    return Result(**json.loads((RESULTS / f"{name}_{device}.json").read_text()))


class _Empty(str):
    """A cell without a figure, in any format."""

    def __format__(self, spec: str) -> str:
        return ""


def cells(row: Row, columns: Mapping[str, str]) -> dict[str, str]:
    """Format the columns of a row, by their heads.

    A size is also there in MiB or GiB, as "peak MiB" where the row has "peak GB", of 1e9
    bytes; and a share in percent: two digits below a hundred, above it whole ones.
    """
    values = {key: _Empty() if value == "" else value for key, value in row.items()}
    for key, value in row.items():
        if not isinstance(value, float):
            continue
        digits = ".0f" if value >= 1 else ".2g"
        values[f"{key}, %"] = f"{100 * value:{digits}}"
        for unit, size in (("GB", GB), ("MB", MB)):
            if unit in key:
                values[key.replace(unit, "MiB")] = value * size / MIB
                values[key.replace(unit, "GiB")] = value * size / GIB
    return {head: cell.format_map(values) for head, cell in columns.items()}


#: What the columns of a table are, by its name: two lines at most.
CAPTIONS = {
    "planned": "Seconds of a step over those of the encoder in plain torch layers, also where these "
    "exceed the budget.\nMiB: the budget. Counterpart: resnet34 or df_resnet56 in plain torch "
    "layers.",
    "shares": "Budget: a share of the stored step's peak. Time: seconds of a step over those of "
    "a stored one.\nModes: of the plan that may choose all of them.",
    "joined": "MiB: memory per 2 s utterance. Batch: largest that fits an 11 GB GPU.\n"
    "Step time: estimated, over that of storing every block.",
    "converted": "Largest batch: at 600 frames on an 11 GB GPU. Then the plan of batch 64, or of "
    "the largest: memory,\nseconds of a step over those of a stored one, days of 150 epochs "
    "of VoxCeleb2, blocks by mode.",
    "selective": "MB: peak of a step. Time: seconds of a step over those of a stored one.",
    "deepest": "Batch: largest that fits an 11 GB GPU with a plan. Last column: seconds of a "
    "reconstructed step\nover those of a stored one.",
    "paper": "Memory per 2 s utterance, reconstructed. Float and exact: the streams. The last "
    "column divides bytes by bytes.",
    "users": "GiB: peak of a step at batch 128. Fits: frames of an utterance at which a "
    "training run fits such a GPU.\nTimes: seconds of a step at batch 4 over those of plain torch "
    "layers, and of the vanilla counterpart in them.",
    "users_on_a_gpu": "GiB and seconds of a step at batch 128. GiB: the allocator's peak, "
    "workspaces of cuDNN included; above, tensors alone.\nDays: 150 epochs of VoxCeleb2 dev at that "
    "speed, the encoder alone; DF encoders train 165.",
    "normalisation": "Times: seconds over those of plain operations. Maps: peak memory, in "
    "sizes of the input.",
    "engine": "MiB: memory per 2 s utterance of a chain of 32 basic blocks, of 32 DF blocks, and of "
    "revnet57.\nTimes plain: seconds of revnet57's step over those of plain torch layers, in "
    "float32 where bf16 is not named.",
    "launches": "Above: kernels that a step launches, and GB that it reads and writes beside "
    "convolutions and matrix products.\nBelow: operations, seconds on a CPU and modelled "
    "seconds. x: times those of plain torch layers.",
    "compressed": "Held: between forward and backward pass. Fewer, lower, times: over those of the "
    "ResNet's stored step.\nGradient error: of the whole gradient, relative to the stored step's. "
    "resnet34 had learned less than in the next tables.",
    "compressed_bounds": "First table: convolutions compressed. Deviation / sigma: measured error "
    "of weight gradients over the bound.\nSecond: normalisations compressed, by relative error of "
    "the gradients that they pass on.",
    "compressed_training": "Loss: mean of the last 50 steps.",
    "compressed_targets": "Loss: mean of the last 50 steps.",
    "optimizer_states": "Saved: part of the 32-bit states. Launches: kernels of a step with "
    "blocks of 256, and over those of torch's.",
    "optimizer_steps": "Error: of the update, in all and by kind of layer. ms: of an "
    "optimizer's step on a CPU.",
    "optimizers_on_a_gpu": "ms: of an optimizer's step. Times: over torch's 32-bit foreach.",
    "budgets": "Budgets: a part of the stored step's live peak, or the least that has a plan.\n"
    "activation_memory_budget: of torch.compile, whose live tensors cannot be counted.",
    "reading": "On one core. Times as fast: as the input path in the column before.",
    "manifests": "MB: resident memory, beyond that of a manifest of 10,000 rows.",
    "adaptation": "EER: on trials of speakers of neither. Times: over training anew.",
    "embedding": "The script: SpeechBrain's, with batches of 8.",
    "scoring_at_scale": "Seconds, of all scores with AS-Norm and then of each error rate. Intervals: "
    "by bootstrap.",
    "inference": "MiB: peak per 2 s utterance. Times: over those of the vanilla encoder beside "
    "it.",
    "graphs": "From waveform to embedding. Times: as many utterances per second as PyTorch.",
}


def folded(summary: str, *notes: str) -> str:
    """Fold notes away: as Markdown, on GitHub and on the site."""
    items = "\n".join(f"- {note}" for note in notes)
    return (
        f'<details markdown="1"><summary>{summary}</summary>\n\n{items}\n\n</details>'
    )


def captioned(
    rows: Sequence[dict[str, str]],
    result: Result,
    name: str = "",
    *,
    setting: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Write a table, its caption, and folded below it how and where it was measured."""
    setting = (setting or result.setting).replace(" GB:", " GiB:")
    # Parts of a setting stand between semicolons; those in brackets part nothing.
    parts = re.split(r"; (?![^(]*\))", setting)
    checked = f"checked: {result.correctness}"
    how = folded("How it was measured", *notes, *parts, checked, result.where)
    return "\n\n".join([markdown(list(rows)), CAPTIONS[name or result.name], how])


#: How a step was taken, what it asks of a GPU and its times. "x" heads multiples of what
#: plain layers take.
_WAY = {"encoder": "{encoder}", "mode": "{mode}"}
_ASKED = {
    "launches": "{launches:,}",
    "x launches": "{times its launches:.2f}",
    "GB beside": "{GB beside:.1f}",
    "x GB": "{times its GB beside:.2f}",
}
_TIMES = {
    "x FLOPs": "{times its FLOPs:.2f}",
    "x host time": "{times its host time:.2f}",
    **{f"x modelled, {card}": f"{{modelled times, {card}:.2f}}" for card in CARDS},
}

#: What pages show of a row, by the benchmark.
COLUMNS = {
    "reading": {
        "input path": "{input path}",
        "utterances per second": "{utterances per second:,.0f}",
        "ms per utterance": "{ms per utterance:.3f}",
        "beside": "{baseline}",
        "times as fast": "{times the baseline:.2f}",
    },
    "adaptation": {
        "way": "{way}",
        "seed": "{seed}",
        "steps": "{steps}",
        "EER of the source, %": "{EER of the source, %:.2f}",
        "EER after an epoch, %": "{EER after an epoch, %:.2f}",
        "EER at the end, %": "{EER at the end, %:.2f}",
        "times its EER": "{times its EER:.2f}",
    },
    "manifests": {
        "manifest": "{manifest}",
        "rows": "{rows:,}",
        "s to list": "{s to list:.1f}",
        "s to list and check": "{s to list and check:.1f}",
        "s to the first batch": "{s to the first batch:.1f}",
        "s since the process began": "{s since the process began:.1f}",
        "MB of the main process": "{MB of the main process:.0f}",
        "MB of the largest worker": "{MB of the largest worker:.0f}",
        "MB of all": "{MB of all:.0f}",
        "bytes a row in the largest worker": "{bytes a row in the largest worker:.0f}",
        "times SpeechBrain's seconds": "{times its seconds:.3f}",
    },
    "embedding": {
        "job": "{job}",
        "way": "{way}",
        "utterances per second": "{utterances per s:,.2f}",
        "times the script": "{times the baseline:.2f}",
    },
    "scoring_at_scale": {
        "trials": "{trials:,}",
        "scores": "{s:.2f}",
        "a loop over trials": "{baseline s:,.0f}",
        "EER": "{EER s:.2f}",
        "minDCF": "{minDCF s:.2f}",
        "intervals, 1000 draws": "{s per 1000 draws:.0f}",
        "peak GiB": "{peak GiB:.2f}",
    },
    "budgets": {
        "recipe": "{recipe}",
        "way": "{way}",
        "live MiB": "{live MiB:.0f}",
        "of stored": "{of the baseline's live:.2f}",
        "allocated MiB": "{allocated MiB:.0f}",
        "of stored ": "{of the baseline's allocated:.2f}",
        "times the stored step": "{times the baseline:.2f}",
    },
    "joined": {
        "encoder": "{encoder}",
        "MiB store": "{store MiB:.1f}",
        "MiB recompute": "{recompute MiB:.1f}",
        "MiB runs": "{runs MiB:.1f}",
        "runs / recompute": "{times the baseline:.2f}",
        "batch recompute": "{batch recompute}",
        "batch runs": "{batch runs}",
        "step time recompute": "{recompute time:.2f}",
        "step time runs": "{runs time:.2f}",
    },
    "converted": {
        "encoder": "{encoder}",
        "parameters, M": "{parameters, M:.1f}",
        "largest batch": "{largest batch}",
        "batch": "{batch}",
        "GiB": "{GiB:.2f}",
        "step time": "{times the baseline:.2f}",
        "days": "{days:.0f}",
        "blocks": "{blocks}",
    },
    "selective": {
        "encoder": "{encoder}",
        "batch": "{batch}",
        "stored, MB": "{store MB:,.0f}",
        "selective, MB": "{selective MB:,.0f}",
        "of stored": "{of the baseline's peak:.2f}",
        "time": "{times the baseline:.2f}",
    },
    "deepest": {
        "layers": "{layers}",
        "blocks": "{blocks}",
        "parameters, M": "{parameters, M:.1f}",
        "MiB an utterance": "{MiB an utterance:.1f}",
        "MiB stored": "{MiB stored:.1f}",
        "batch on 11GB": "{batch on 11GB}",
        "times the stored step": "{times the baseline:.2f}",
    },
    "graphs": {
        "encoder": "{encoder}",
        "batch": "{batch}",
        "way": "{way}",
        "utterances per second": "{utterances per s:.2f}",
        "times PyTorch's": "{times the baseline:.2f}",
    },
    "compressed": {
        "encoder": "{encoder}",
        "way": "{way}",
        "held MiB": "{held MiB:.1f}",
        "fewer": "{held fewer:.1f}",
        "peak MiB": "{live peak MiB:.1f}",
        "lower": "{peak lower:.1f}",
        "times the time": "{times the baseline:.2f}",
        "gradient error, %": "{gradient error, %}",
    },
    "compressed_targets": {
        "activations": "{activations}",
        "loss": "{loss:.3f}",
        "times stored": "{times the baseline:.4f}",
        "inputs smaller": "{inputs smaller:.1f}",
    },
}


def columns_of(name: str) -> str:
    """Show a row of each way."""
    result = committed(name)
    rows = [cells(row, COLUMNS[name]) for row in result.rows]
    if name == "embedding":
        # Run again, there is nothing to compute: an archive is read.
        rows[-1]["times the script"] = "read back, not computed"
    return captioned(rows, result)


def optimizer_states() -> str:
    """Show a row of each encoder, with what each form of 8-bit states saves."""
    result = committed("optimizers")
    rows: dict[str, dict[str, str]] = {}
    for row in result.rows:
        if row["way"] not in (PLAIN_STATES, *FORMS):
            continue
        shown = rows.setdefault(row["encoder"], {"encoder": row["encoder"]})
        if row["way"] == PLAIN_STATES:
            shown["optimizer"] = row["optimizer"]
            shown["MiB at 32 bit"] = f"{row['MiB']:.1f}"
            continue
        shown[f"saved, {row['way']}"] = f"{100 * row['saved']:.2f} %"
        if row["way"] == next(iter(FORMS)):
            shown["launches"] = f"{row['kernels']}"
            shown["times torch's"] = f"{row['times its kernels']:.3f}"
    return captioned(list(rows.values()), result, "optimizer_states")


def optimizer_steps() -> str:
    """Show errors and times of the encoders that were trained, a row of each way."""
    result = committed("optimizers")
    rows = [row for row in result.rows if row["ms"] != ""]
    # Of kinds of layers that an encoder does not have there is no error.
    rows = [
        {key: _Empty() if value == "" else value for key, value in row.items()}
        for row in rows
    ]
    columns = {
        "encoder": "{encoder}",
        "way": "{way}",
        "error": "{error:.1%}",
        **{kind: f"{{error, {kind}:.1%}}" for kind in KINDS},
        "ms": "{ms:.0f}",
        "times torch's ms": "{times the baseline:.1f}",
        "of the training step, %": "{of the training step, %}",
    }
    return captioned([cells(row, columns) for row in rows], result, "optimizer_steps")


def inference() -> str:
    """Show memory and time of each encoder, beside its vanilla counterpart."""
    result = committed("inference")
    ways = {(row["encoder"], row["way"]): row for row in result.rows}
    figures = {
        "MiB": "{MiB per utterance:.1f}",
        "times its MiB": "{times the baseline's MB:.2f}",
        "ms": "{ms per utterance:.0f}",
        "times its ms": "{times the baseline's ms:.2f}",
    }
    before = {f"{head} in evaluation mode": figures[head] for head in ("MiB", "ms")}
    rows = []
    for (name, way), row in ways.items():
        counterpart = row["baseline"].partition(",")[0]
        if way == FORM:
            rows.append(
                {
                    "encoder": name,
                    "beside": "" if name == counterpart else counterpart,
                    **cells(row, figures),
                    **cells(ways[name, EVAL], before),
                }
            )
    return captioned(rows, result).replace("MB beyond", "MiB beyond")


def compressed_bounds() -> str:
    """Show what bounds of both kinds of layers give, in a table for each."""
    result = committed("compressed_bounds")
    both = {"bound": "{rule}", "inputs smaller": "{inputs smaller:.1f}"}
    columns = {
        "convolutions": {
            "deviation / sigma": "{deviation / sigma:.3g}",
            "from, to": "{least:.2g}, {largest:.3g}",
            "gradient error, %": "{gradient error, %}",
        },
        "normalisations": {
            "handed down, %": "{handed down, %}",
            "at the features, %": "{at the features, %}",
            "both kinds smaller": "{both kinds smaller:.1f}",
            "their gradient error, %": "{both kinds' gradient error, %}",
        },
    }
    forms, rules = (
        [cells(row, both | own) for row in result.rows if row["inputs of"] == kind]
        for kind, own in columns.items()
    )
    return f"{markdown(forms)}\n\n{captioned(rules, result)}"


def compressed_training() -> str:
    """Show where runs end, a row for each seed."""
    result = committed("compressed_training")
    rows: dict[int, dict[str, str]] = {}
    for row in result.rows:
        columns = {"seed": "{seed}", row["way"]: "{loss:.3f}"}
        if row["way"] != "stored":
            columns[f"{row['way']}: times stored"] = "{times the baseline:.4f}"
        rows.setdefault(row["seed"], {}).update(cells(row, columns))
    return captioned(list(rows.values()), result)


def compressed_targets() -> str:
    """Show where runs with an error in their gradients end."""
    return (
        f"{columns_of('compressed_targets')}\n\n![Loss over training steps, with "
        "gradients off by a part of their momentum](compressed_targets.png)"
    )


def few_models() -> str:
    """Show a part of the table, without its sources."""
    return models(FEW).partition("\n\n<details")[0]


def models(names: Sequence[str] = ()) -> str:
    """Show what each encoder needs, by mode, and what fits a GPU."""
    gpu = parse_card(CARD)
    training = Training(gpu.memory_bytes, batch=BATCH, frames=200)
    selected = select(training, names=names)
    heads = (
        "EER on Vox1-H. MiB: memory per 2 s utterance. Batch: largest that fits an "
        f"{CARD.removesuffix('GB')} GB GPU; bold if at least {BATCH}.\n"
        f"Days: estimated for {EPOCHS} epochs of VoxCeleb2 at batch {BATCH} on an {gpu.name}, "
        "in the fastest mode that fits."
    )
    table = markdown([_model(model) for model in selected])
    notes = models_notes(selected[0])
    return "\n\n".join([table, heads, folded("Where these figures are from", *notes)])


def _model(model: ListedEncoder) -> dict[str, str]:
    eer = model.row.vox1_h_eer
    row = {
        "encoder": model.row.name,
        "params, M": f"{model.row.parameters / 1e6:.1f}",
        "published EER, %": "-" if eer is None else f"{eer:.2f}",
    }
    counted = [mode for mode in MODES if any(mode in key for key in counted_peaks())]
    for mode in counted:
        size = model.figure("bytes_per_utterance", mode)
        row[f"MiB {mode}"] = "" if size is None else f"{size / MIB:.1f}"
    for mode in counted:
        batch = model.figure("largest_batch", mode)
        # Bold is what the question asks for.
        shown = f"**{batch}**" if batch is not None and batch >= BATCH else batch
        row[f"batch {mode}"] = "" if shown is None else str(shown)
    return row | {"days": "" if model.days is None else f"{model.days:.0f}"}


def paper() -> str:
    """Show what an utterance takes of memory beside what was published."""
    result = committed("paper")
    columns = {
        "encoder": "{encoder}",
        "published GB": "{published GB:.3f}",
        "float fp32 MiB": "{float float32 MiB:.1f}",
        "exact fp32 MiB": "{exact float32 MiB:.1f}",
        "exact bf16 MiB": "{exact bf16 MiB:.1f}",
        "exact fp32 / published": "{share of the baseline:.2f}",
    }
    held = [row["weight gradients of a stage, MB"] for row in result.rows]
    setting = f"{result.setting}: {min(held):.0f} to {max(held):.0f} MB here"
    rows = [cells(row, columns) for row in result.rows]
    return captioned(rows, result, setting=setting)


def engine() -> str:
    """Show the ways of not storing activations, a row each, and what they get wrong."""
    result = committed("engine")
    size, time = "{MiB per utterance:.1f}", "{times the baseline:.2f}"
    columns = {
        ("basic", 32, "float32"): {"MiB basic": size},
        ("df_bottleneck", 32, "float32"): {"MiB DF": size},
        ("revnet57", 13, "float32"): {"MiB revnet57": size, "times plain": time},
        ("revnet57", 13, "bf16"): {"MiB revnet57 bf16": size, "in bf16": time},
    }
    ways: dict[str, dict[str, str]] = {}
    wrong: dict[str, dict[str, str]] = {}
    for row in result.rows:
        subject = row["functions"], row["blocks"], row["precision"]
        shown = ways.setdefault(row["way"], {"way": row["way"]})
        shown |= cells(row, columns.get(subject, {}))
        # Mistakes differ by what they are in; one of a kind is shown.
        for words in row["wrong"].split("; "):
            kinds = wrong.setdefault(row["way"], {})
            if words != "nothing":
                kinds[words.partition(":")[0]] = words
    for way, shown in ways.items():
        shown["gets wrong"] = "; ".join(wrong[way].values()) or "nothing"
    heads = ["way", *(f"MiB {c}" for c in ("basic", "DF", "revnet57", "revnet57 bf16"))]
    heads += ["times plain", "in bf16", "gets wrong"]
    # bf16 is not timed on every processor.
    heads = [h for h in heads if any(row.get(h) for row in ways.values())]
    return captioned(_filled_up(ways.values(), heads), result)


def _filled_up(
    rows: Iterable[Mapping[str, str]], heads: Iterable[str]
) -> list[dict[str, str]]:
    """Give all rows all columns, some of them empty."""
    heads = list(heads)
    return [{head: row.get(head, "") for head in heads} for row in rows]


#: What cells of ``users`` mean, beside what the result says of its figures.
_USERS_CELLS = (
    "fits: at how many frames an utterance the run fits such a GPU, with classifier, "
    "8-bit optimizer states, the input and with the reserve of speechbrain-rev models; "
    "empty: at neither length",
    "times plain: seconds of a step over those of the same encoder in plain torch layers",
    "times counterpart: over those of the vanilla counterpart in plain torch layers (resnet152 "
    "of revnet197, df_resnet233 of df_revnet377)",
)


def users() -> str:
    """Show what each way of training a deep encoder takes, a row for both lengths."""
    result = committed("users")
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result.rows:
        cases.setdefault((row["encoder"], row["way"]), []).append(row)
    twice = {
        row["way"]
        for row in result.rows
        if row["statistics updated"] > BATCH // row["statistics of"]
    }
    # Figures without a column here are left out.
    apart = ("training GiB", "fits", "statistics updated")
    setting = [
        part.replace("peak GiB:", "GiB:")
        for part in result.setting.split("; ")
        if part.partition(":")[0] not in apart
    ]
    updated = (
        "Running statistics updated more than once by a batch: "
        f"{', '.join(sorted(twice)) or 'in no way'}."
    )
    return captioned(
        [_users_row(rows) for rows in cases.values()],
        result,
        setting="; ".join([*setting, *_USERS_CELLS]),
        notes=[updated],
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
    heads = {"plain": "baseline", "counterpart": "counterpart"}
    for head, times in heads.items():
        ratios = [row[f"times the {times}"] for row in timed]
        shown[f"times {head}"] = " ".join(f"{r:.2f}" for r in ratios if r)
    shown["statistics of"] = str(first["statistics of"])
    return shown


def users_on_a_gpu() -> str:
    """Show what each way takes where the whole batch was run."""
    result = committed("users", "cuda")
    columns = {
        "encoder": "{encoder}",
        "way": "{way}",
        "GiB": "{peak GiB:.2f}",
        "s per step": "{s per step:.3f}",
        "times plain": "{times the baseline:.2f}",
        "utterances per second": "{utterances per second:.0f}",
        "days": "{days for 150 epochs:.1f}",
    }
    said = [
        part
        for part in result.setting.split("; ")
        if part.partition(":")[0]
        not in ("training GiB", "fits", "statistics of", "statistics updated")
    ]
    rows = [cells(row, columns) for row in result.rows]
    return captioned(rows, result, "users_on_a_gpu", setting="; ".join(said))


def optimizers_on_a_gpu() -> str:
    """Show what a step with 8-bit states takes on a GPU."""
    result = committed("optimizers", "cuda")
    columns = {
        "encoder": "{encoder}",
        "optimizer": "{optimizer}",
        "way": "{way}",
        "ms": "{ms:.2f}",
        "times torch's foreach": "{times the baseline:.2f}",
    }
    rows = [cells(row, columns) for row in result.rows]
    return captioned(rows, result, "optimizers_on_a_gpu")


def normalisation() -> str:
    """Show each map's time in kernels and in torch's layers over plain operations."""
    result = committed("normalisation", "cuda")
    shown: dict[str, dict[str, str]] = {}
    for row in result.rows:
        own = shown.setdefault(row["map"], {"map": row["map"]})
        if row["way"] == "plain":
            own["ms, plain operations"] = f"{1e3 * row['s per step']:.2f}"
        else:
            own[f"{row['way']}, times"] = f"{row['times the baseline']:.2f}"
        own[f"{row['way']}, maps"] = f"{row['maps at the peak']:.1f}"
    return captioned(list(shown.values()), result)


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
    ways: dict[tuple[str, str], dict[str, str]] = {}
    columns = {"encoder": "{encoder}", "MiB": "{budget MiB:.0f}", "way": "{way}"}
    for row in result.rows:
        way = ways.setdefault((row["encoder"], row["way"]), cells(row, columns))
        times = row["times the baseline"]
        shown = f"{times:.2f}" if times else ""
        fits = row["fits"] == "yes"
        way[f"batch {row['batch']}"] = shown if fits else f"{shown} over budget".strip()
    heads = dict.fromkeys(head for way in ways.values() for head in way)
    notes = planned_verdicts(result.rows)
    table = captioned(_filled_up(ways.values(), heads), result, notes=notes)
    picture = "![Seconds for each utterance against the batch, within one budget]"
    return f"{table}\n\n{picture}(planned.png)"


def shares() -> str:
    """Show what plans cost at shares of the stored peak, a column for each set of modes."""
    result = committed("shares")
    shown: dict[tuple[str, float], dict[str, str]] = {}
    columns = {"encoder": "{encoder}", "batch": "{batch}", "budget": "{share:.0%}"}
    for row in result.rows:
        cell = shown.setdefault((row["encoder"], row["share"]), cells(row, columns))
        cell[f"time, {row['way']}"] = f"{row['times the baseline']:.2f}"
        if row["way"] == WITH:
            cell["modes"] = row["modes"]
    return captioned(list(shown.values()), result)


def planned_verdicts(rows: Sequence[Row]) -> list[str]:
    """List what is faster than the plan, at which batch, and what has other statistics."""
    cases: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        case = cases.setdefault((row["encoder"], row["batch"]), {})
        if row["fits"] == "yes":
            case[row["way"]] = row["times the baseline"]
    verdicts = []
    for (encoder, batch), times in cases.items():
        shares = {way: times[way] / times["planned"] for way in times}
        faster = [
            f"{way} {share:.2f}"
            for way, share in sorted(shares.items(), key=lambda item: item[1])
            if f"{share:.2f}" < "1.00"
        ]
        words = ", ".join(faster) or "nothing"
        verdicts.append(
            f"{encoder} at batch {batch}, faster than the plan (1.00): {words}"
        )
    apart = {row["way"] for row in rows if row["statistics of"] < row["batch"]}
    normalised = (
        f"batch statistics of less than the batch: {', '.join(sorted(apart)) or 'none'}"
    )
    return [*verdicts, normalised]


def launches() -> str:
    """Show what steps ask of a GPU, and then host and modelled times."""
    result = committed("launches")
    detailed = {row["encoder"] for row in result.rows if row["times its host time"]}
    asked: dict[tuple[str, str], dict[str, str]] = {}
    times = []
    for row in result.rows:
        encoder = ARCHITECTURES[row["encoder"]]
        is_usual = row["mode"] == encoder.default_mode
        if row["mode"] == PLAIN_LAYERS or not (is_usual or row["encoder"] in detailed):
            continue
        if row["times its host time"]:
            times.append(cells(row, _WAY | {"chunk": "{chunk}"} | _TIMES))
        differs = {
            ", bf16": row["precision"] == "bf16",
            ", chunk null": encoder.reversible and row["chunk"] == "null",
        }
        variant = "".join(name for name, is_so in differs.items() if is_so)
        columns = {f"{head}{variant}": cell for head, cell in _ASKED.items()}
        shown = asked.setdefault((row["encoder"], row["mode"]), cells(row, _WAY))
        shown |= cells(row, columns)
    heads = dict.fromkeys(head for shown in asked.values() for head in shown)
    return (
        f"{markdown(_filled_up(asked.values(), heads))}\n\n{captioned(times, result)}"
    )


#: Tables of pages; each has a place in one of them.
TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    DOCS / "choosing_an_encoder.md": {"models": models},
    DOCS / "memory_plans.md": {
        "shares": shares,
        "planned": planned,
        "joined": partial(columns_of, "joined"),
    },
    DOCS / "reversible_training.md": {
        "modes": modes,
        "selective": partial(columns_of, "selective"),
        "deepest": partial(columns_of, "deepest"),
    },
    DOCS / "comparisons.md": {
        "paper": paper,
        "users": users,
        "users_on_a_gpu": users_on_a_gpu,
        "normalisation": normalisation,
        "engine": engine,
        "launches": launches,
    },
    DOCS / "compression.md": {
        "compressed": partial(columns_of, "compressed"),
        "compressed_bounds": compressed_bounds,
        "compressed_training": compressed_training,
        "compressed_targets": compressed_targets,
    },
    README: {"few_models": few_models},
    RECIPE: {
        name: partial(columns_of, name)
        for name in (
            "adaptation",
            "reading",
            "manifests",
            "embedding",
            "scoring_at_scale",
        )
    },
    DOCS / "optimizers.md": {
        "optimizer_states": optimizer_states,
        "optimizer_steps": optimizer_steps,
        "optimizers_on_a_gpu": optimizers_on_a_gpu,
    },
    DOCS / "other_networks.md": {
        "budgets": partial(columns_of, "budgets"),
        "converted": partial(columns_of, "converted"),
    },
    DOCS / "deploying.md": {
        "inference": inference,
        "graphs": partial(columns_of, "graphs"),
    },
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
