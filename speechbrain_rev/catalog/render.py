"""Encoders, plans, sweeps and breakdowns as text and as JSON, each figure marked as what it is.

No torch is needed to show the table of encoders. What nobody counted or published is "-",
and null in JSON.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from speechbrain_rev.architectures import HEAD
from speechbrain_rev.catalog.published import (
    PAPER,
    TABLE_SEVEN,
    TOTAL_BATCH,
    as_published,
)
from speechbrain_rev.catalog.table import (
    BASELINE,
    FRAMES,
    MODES,
    SECONDS,
    Model,
    Training,
    counted_with,
)
from speechbrain_rev.modes import LOSSLESS, Mode
from speechbrain_rev.sizes import (
    GIB,
    MIB,
    RESERVE_BYTES,
    RESERVE_SHARE,
    card_text,
    reserve_of,
    size_text,
)

if TYPE_CHECKING:
    from speechbrain_rev.catalog.breakdown import EncoderBreakdown, StageMemory
    from speechbrain_rev.catalog.plans import PlannedEncoder, SweptEncoder
    from speechbrain_rev.devices import CardAtHand
    from speechbrain_rev.planner.sweep import BatchPlan
    from speechbrain_rev.planner.timing import Speed

    #: The breakdowns of an encoder: before and after, or one where that is the same.
    Cases = Sequence[EncoderBreakdown]

_WIDTH = 120
_RESERVE = (
    f"{RESERVE_BYTES / GIB:g} GiB and {RESERVE_SHARE:.0%} of its memory are assumed for "
    "CUDA, workspaces and fragmentation"
)
_CHUNK_NOTE = (
    "chunk: the channels of the first level that blocks work on at a time, - is all of "
    "them; it is chosen with the modes."
)

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes
    ----------
    group : str
        Title above the heads of neighbours that have the same one.
    head : str
        Above the cells.
    cell : callable
        Writes a row's cell.
    is_words : bool
        Whether cells begin on the left; figures end on the right.
    """

    group: str
    head: str
    cell: Callable[[Row], str]
    is_words: bool = False


def aligned(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[str]:
    """Write the lines of a table.

    Parameters
    ----------
    columns : sequence of Column
        From left to right.
    rows : sequence
        From top to bottom.

    Returns
    -------
    list of str
        Groups' titles, heads, then a line for each row.

    Examples
    --------
    >>> names = Column("", "encoder", str, is_words=True)
    >>> lengths = Column("of it", "letters", lambda name: str(len(name)))
    >>> aligned([names, lengths], ["revnet57"])
    ['            of it', 'encoder   letters', 'revnet57        8']
    """
    blocks: list[list[str]] = []
    for title in dict.fromkeys(column.group for column in columns):
        padded = []
        for column in columns:
            if column.group == title:
                texts = [column.head, *map(column.cell, rows)]
                width = max(map(len, texts))
                pad = str.ljust if column.is_words else str.rjust
                padded.append([pad(text, width) for text in texts])
        lines = [" ".join(row) for row in zip(*padded, strict=True)]
        width = max(len(title), len(lines[0]))
        blocks.append([text.rjust(width) for text in [title, *lines]])
    return ["  ".join(row).rstrip() for row in zip(*blocks, strict=True)]


def page(*parts: Iterable[str], notes: Iterable[str]) -> str:
    """Put parts of a text below each other, and notes below them in lines that fit."""
    groups = ["\n".join(lines) for lines in parts]
    groups.append("\n".join(textwrap.fill(note, _WIDTH) for note in notes))
    return "\n\n".join(group for group in groups if group) + "\n"


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _text(value: object, form: str = "") -> str:
    """Write a figure, - if there is none."""
    return "-" if value is None else format(value, form)


def chunk_text(channels: Sequence[int | None]) -> str:
    """Write the cell of a chunk.

    Parameters
    ----------
    channels : sequence of int or None
        Channels at a time, at each level.

    Returns
    -------
    str
        Those of the first level, - if it is all of them.

    Examples
    --------
    >>> chunk_text([32, 128, 512, None]), chunk_text([None] * 4)
    ('32', '-')
    """
    return str(channels[0] or "-")


def speed_text(speed: Speed) -> str:
    """Say which device times are for, and how its speed was found.

    Parameters
    ----------
    speed : Speed
        What they are estimated from.

    Returns
    -------
    str
        Words to go on after "for".

    Examples
    --------
    >>> from speechbrain_rev.planner.timing import Speed
    >>> speed_text(Speed(1e12, 2e11, 1e5, {"device": "a GPU"}))
    'a GPU, 1 TFLOP/s, 200 GB/s, 1e+05 operations/s; no clock was read'
    """
    measured = "; ".join(f"{n}: {v}" for n, v in speed.about.items() if n != "device")
    return (
        f"{speed.about['device']}, {speed.flops_per_second / 1e12:.3g} TFLOP/s, "
        f"{speed.bytes_per_second / 1e9:.3g} GB/s, "
        f"{speed.operations_per_second:.3g} operations/s"
        + (f" ({measured})" if measured else "; no clock was read")
    )


def _plain_training(training: Training) -> dict[str, Any]:
    """Say in JSON for which GPU and which training figures are."""
    plain: dict[str, Any] = {"frames": training.frames, "precision": "float32"}
    if training.card_bytes is not None:
        plain |= {
            "card_bytes": training.card_bytes,
            "reserve_bytes": training.reserve_bytes,
            "optimizer_state_bits": training.optimizer_bits,
            "classes": HEAD.classes,
        }
    return plain


# --- the table of encoders ---


def models_text(models: Sequence[Model]) -> str:
    """Print encoders as a table of at most 130 columns, and what its figures are.

    Parameters
    ----------
    models : sequence of Model
        The rows; at least one, all of the same training.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> from speechbrain_rev.catalog import select
    >>> models = select(Training(None, batch=128, frames=200), names=["resnet34"])
    >>> models_text(models).splitlines()[2].split()[:4]
    ['resnet34', '-', '34', '6.63']
    """
    training = models[0].training
    notes = [*model_sources(training).values()]
    if training.card_bytes is not None:
        notes.append("fits: whether the batch does in the encoder's default mode.")
    return page(aligned(_model_columns(training), models), notes=notes)


def models_json(models: Sequence[Model]) -> str:
    """Print encoders as JSON: each figure under what it is, units in the names.

    Parameters
    ----------
    models : sequence of Model
        The rows; at least one, all of the same training.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> from speechbrain_rev.catalog import select
    >>> models = select(Training(None, batch=128, frames=200), names=["resnet34"])
    >>> json.loads(models_json(models))["encoders"][0]["published"]["vox1_h_eer_percent"]
    1.86
    """
    training = models[0].training
    return _json(
        {
            "sources": model_sources(training),
            "counted_with": counted_with(),
            "training": {"batch": training.batch, **_plain_training(training)},
            "encoders": [_plain_model(model) for model in models],
        }
    )


def model_sources(training: Training) -> dict[str, str]:
    """Say what each kind of figure of the table is.

    Parameters
    ----------
    training : Training
        What was asked; without a GPU there is nothing computed.

    Returns
    -------
    dict of str to str
        Sentences by kind: published, counted and, with a GPU, computed.
    """
    versions = counted_with()
    kinds = {
        "published": f'Published: Tables V and VI of "{PAPER}". EER, in percent on '
        "Vox1-O, E and H, were not reproduced here.",
        "counted": "Counted: parameters; bytes alive in a training step of the encoder, "
        "in float32, on meta tensors, which take the same as on a CPU (torch "
        f"{versions['torch']}, {versions['date']}). GB (1e9 bytes) per utterance is what "
        "one more adds to a large batch; reconstruct is the default of reversible "
        "encoders, store that of the others, recompute is checkpointing of each block.",
    }
    if training.card_bytes is not None:
        kinds["computed"] = (
            f"Computed: what fits {card_text(training.card_bytes)} with "
            f"{training.frames} frames: the encoder's counted step, weights, gradients "
            f"and {training.optimizer_bits}-bit optimizer of the encoder and of a classifier "
            f"of {HEAD.classes} (VoxCeleb2 at three speeds), the classifier's step and the "
            f"input, as if all peaked at once; {training.reserve_bytes / GIB:.1f} GiB stay "
            f"free: {_RESERVE}. With it, batches published for stored vanilla encoders on "
            "11 GiB are met within a fifth with the states of 32 bit that they had, within "
            "a tenth with 8. No GPU was tried."
        )
    return kinds


def _model_columns(training: Training) -> list[Column[Model]]:
    columns: list[Column[Model]] = [
        Column("", "encoder", lambda m: m.row.name, is_words=True),
        Column("", "type", _type, is_words=True),
        Column("", "layers", lambda m: str(m.row.layers)),
        Column("parameters, M", "here", lambda m: f"{m.row.parameters / 1e6:.2f}"),
        Column(
            "parameters, M", "publ.", lambda m: _text(m.row.published_params_m, ".1f")
        ),
        Column("parameters, M", "diff.", _parameter_difference),
        Column("published EER", "O", lambda m: _text(m.row.vox1_o_eer, ".2f")),
        Column("published EER", "E", lambda m: _text(m.row.vox1_e_eer, ".2f")),
        Column("published EER", "H", lambda m: _text(m.row.vox1_h_eer, ".2f")),
    ]
    lengths = FRAMES if training.card_bytes is None else (training.frames,)
    for frames in lengths:
        title = f"GB per {SECONDS[frames]} s utterance"
        columns += [
            Column(title, Mode(mode).spec.column, _gb(mode, frames)) for mode in MODES
        ]
        if frames == 200:
            columns.append(
                Column(title, "publ.", lambda m: _text(m.row.published_memory_gb, "g"))
            )
    if training.card_bytes is not None:
        columns.append(Column(f"batch {training.batch}", "fits", _fits))
        title = f"largest batch on {training.card_bytes / GIB:g} GiB"
        columns += [
            Column(title, Mode(mode).spec.column, _largest(mode)) for mode in MODES
        ]
    return columns


def _type(model: Model) -> str:
    return model.row.type if model.row.reversible else "-"


def _parameter_difference(model: Model) -> str:
    published = model.row.published_params_m
    if published is None:
        return "-"
    difference = model.row.parameters / 1e6 - published
    return f"{round(difference, 2) + 0.0:+.2f}"  # no minus before a zero


def _gb(mode: str, frames: int) -> Callable[[Model], str]:
    def cell(model: Model) -> str:
        size = model.bytes_per_utterance(mode, frames)
        return "-" if size is None else f"{size / 1e9:.4f}"

    return cell


def _fits(model: Model) -> str:
    return {None: "-", True: "yes", False: "no"}[model.fits(model.row.default_mode)]


def _largest(mode: str) -> Callable[[Model], str]:
    return lambda model: _text(model.largest_batch(mode))


def _plain_model(model: Model) -> dict[str, Any]:
    row, training = model.row, model.training
    plain: dict[str, Any] = {
        "name": row.name,
        "family": row.family,
        "type": row.type,
        "layers": row.layers,
        "counterpart": row.counterpart,
        "default_mode": model.row.default_mode,
        "published": {
            "parameters_millions": row.published_params_m,
            "vox1_o_eer_percent": row.vox1_o_eer,
            "vox1_e_eer_percent": row.vox1_e_eer,
            "vox1_h_eer_percent": row.vox1_h_eer,
            "gb_per_2_s_utterance": row.published_memory_gb,
            "largest_batch_on_11_gib": row.published_max_batch_11gb,
        },
        "counted": {
            "parameters": row.parameters,
            **{
                f"bytes_per_{SECONDS[frames]}_s_utterance": {
                    mode: model.bytes_per_utterance(mode, frames)
                    for mode in model.modes
                }
                for frames in FRAMES
            },
            "step_peak_bytes": {m: model.step_peak_bytes(m) for m in model.modes},
        },
    }
    if training.card_bytes is not None:
        plain["computed"] = {
            mode: {
                "fits": model.fits(mode),
                "largest_batch": model.largest_batch(mode),
                "needed_bytes": training.needed_bytes(row, mode, training.batch),
            }
            for mode in model.modes
        }
    return plain


# --- plans ---


def plans_text(
    encoders: Sequence[PlannedEncoder], at_hand: CardAtHand | None = None
) -> str:
    """Print planned encoders as a table, and what its figures are.

    Parameters
    ----------
    encoders : sequence of PlannedEncoder
        The rows; at least one, all of the same training.
    at_hand : CardAtHand or None
        The GPU, if it was asked and not named.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> from speechbrain_rev.catalog.plans import plan_encoders
    >>> training = Training(11 * GIB, batch=128, frames=200)
    >>> text = plans_text(plan_encoders(training, names=["resnet34"]))
    >>> text.splitlines()[2].split()[:7]
    ['resnet34', '1.86', '6.6', '7.74', '-', 'counted', '17']
    """
    table = aligned(_plan_columns(encoders[0].model.training), encoders)
    return page(table, notes=_plan_sources(encoders[0], at_hand).values())


def plans_json(
    encoders: Sequence[PlannedEncoder], at_hand: CardAtHand | None = None
) -> str:
    """Print planned encoders as JSON: each figure under what it is, units in the names.

    Parameters
    ----------
    encoders : sequence of PlannedEncoder
        As :func:`plans_text` takes them.
    at_hand : CardAtHand or None
        The GPU, if it was asked and not named.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> from speechbrain_rev.catalog.plans import plan_encoders
    >>> training = Training(11 * GIB, batch=128, frames=200)
    >>> document = json.loads(plans_json(plan_encoders(training, names=["resnet34"])))
    >>> document["encoders"][0]["published"]["cards_of_11_gib_for_256"] is None
    True
    """
    training = encoders[0].model.training
    return _json(
        {
            "sources": _plan_sources(encoders[0], at_hand),
            "counted_with": counted_with(),
            "speed": json.loads(encoders[0].speed.to_json()),
            "training": {
                "batch": training.batch,
                "card_name": None if at_hand is None else at_hand.name,
                **_plain_training(training),
            },
            "encoders": [_plain_plan(encoder) for encoder in encoders],
        }
    )


def _plan_sources(
    encoder: PlannedEncoder, at_hand: CardAtHand | None = None
) -> dict[str, str]:
    """Say what each kind of figure of a plan is."""
    training = encoder.model.training
    assert training.card_bytes is not None
    card = card_text(training.card_bytes)
    if at_hand is None:
        named = f"A GPU of {card} was named; none was tried."
    else:
        named = (
            f"{card} were free of {card_text(at_hand.total_bytes)} on {at_hand.name}, "
            "which was asked for that alone."
        )
    versions = counted_with()
    return {
        "published": f"Published: {_compared(training)} of "
        f'"{PAPER}". They were not reproduced here.',
        "card": f"{named} {training.reserve_bytes / GIB:.2f} GiB stay free: {_RESERVE}.",
        "plan": f"Plan: the fastest modes of all blocks with which {training.batch} "
        f"utterances of {training.frames} frames in float32 fit, or the lightest where "
        "none fit; then `lacks` says how much there is too little. GiB: the peak of the "
        f"encoder's step, with weights, gradients, {training.optimizer_bits}-bit states, a "
        f"classifier of {HEAD.classes} and the input, as if all peaked at once. store, "
        f"recom., recon.: blocks of each mode. {_CHUNK_NOTE}",
        "how": "predicted: the step's peak follows from a shallow encoder of the kind, run "
        "on meta tensors; counted: the encoder itself ran with the plan, on meta tensors. "
        f"Neither was measured on a GPU (torch {encoder.profile.about['torch']}).",
        "time": "Step time: estimated from counts of operations for "
        f"{speed_text(encoder.speed)}. store and {BASELINE}: times that of the same "
        f"encoder, and of {BASELINE}, all stored and all channels at once. utt./s: "
        f"estimated likewise for {training.batch} utterances with this plan, with the "
        "optimizer's step, without classifier and reading.",
        "batch": "max batch: the largest that fits, at least, computed from counts on meta "
        f"tensors (torch {versions['torch']}, {versions['date']}), for the lightest of the "
        "modes that all blocks can share, at the default chunk (that of the plan is chosen "
        "for its batch alone), or for the plan if that is more. Plans whose chunk is "
        "chosen for it may fit a larger one; --batch tries it. GPUs for "
        f"{TOTAL_BATCH}: such GPUs for batches that large to make a total of that, "
        "computed, so at most; `store` if all is stored.",
    }


def _compared(training: Training) -> str:
    """Name what is shown of the paper: batches and GPUs only beside the same ones."""
    if as_published(training):
        return "EER on Vox1-H, largest batch and 11 GB GPUs (Tables V, VI, VII)"
    return (
        "EER on Vox1-H (Tables V, VI; largest batches there are for 2 s on 11 GiB, not "
        "shown)"
    )


def _plan_columns(training: Training) -> list[Column[PlannedEncoder]]:
    plan, time = f"plan for batch {training.batch}", "estimated time, rate"
    largest, cards = "max batch", f"GPUs for {TOTAL_BATCH}"
    columns: list[Column[PlannedEncoder]] = [
        Column("", "encoder", lambda e: e.model.row.name, is_words=True),
        Column("publ.", "EER", lambda e: _text(e.model.row.vox1_h_eer, ".2f")),
        Column("param.", "M", lambda e: f"{e.model.row.parameters / 1e6:.1f}"),
        Column(plan, "GiB", lambda e: f"{e.needed_bytes / GIB:.2f}"),
        Column(
            plan,
            "lacks",
            lambda e: size_text(e.lacking_bytes) if e.lacking_bytes else "-",
        ),
        Column(plan, "how", _how, is_words=True),
        *(Column(plan, mode.spec.column, _count(mode)) for mode in LOSSLESS),
        Column(plan, "chunk", lambda e: chunk_text(e.channels)),
        Column(time, "store", lambda e: f"{e.times_stored:.2f}"),
        Column(time, BASELINE, lambda e: f"{e.times_baseline:.2f}"),
        Column(time, "utt./s", lambda e: _text(e.utterances_per_second, ".1f")),
        Column(largest, ">=", lambda e: _text(e.largest_batch)),
        Column(largest, "publ.", lambda e: _text(e.model.row.published_max_batch_11gb)),
        Column(cards, "store", lambda e: _text(e.cards_stored)),
        Column(cards, "<=", lambda e: _text(e.cards)),
        Column(cards, "publ.", lambda e: _text(_published_cards(e))),
    ]
    compared = as_published(training)
    return [
        column
        for column in columns
        if compared or column.head != "publ." or column.group not in (largest, cards)
    ]


def _how(encoder: PlannedEncoder) -> str:
    return "predicted" if encoder.counted_bytes is None else "counted"


def _count(mode: Mode) -> Callable[[PlannedEncoder], str]:
    def cell(encoder: PlannedEncoder) -> str:
        has_it = mode.value in encoder.model.modes
        return str(encoder.mode_counts[mode.value]) if has_it else "-"

    return cell


def _published_cards(encoder: PlannedEncoder) -> int | None:
    row = TABLE_SEVEN.get(encoder.model.row.name)
    return None if row is None else row.cards


def _plain_plan(encoder: PlannedEncoder) -> dict[str, Any]:
    model = encoder.model
    row = model.row
    return {
        "name": row.name,
        "family": row.family,
        "type": row.type,
        "parameters": row.parameters,
        "published": {
            "vox1_h_eer_percent": row.vox1_h_eer,
            "gb_per_2_s_utterance": row.published_memory_gb,
            "largest_batch_on_11_gib": row.published_max_batch_11gb,
            f"cards_of_11_gib_for_{TOTAL_BATCH}": _published_cards(encoder),
        },
        "plan": {
            "fits": not encoder.lacking_bytes,
            "modes": dict(encoder.modes),
            "channels": list(encoder.channels),
        },
        "predicted": {
            "step_peak_bytes": encoder.predicted_bytes,
            "seconds": encoder.seconds,
            "utterances_per_second": encoder.utterances_per_second,
            "times_stored": encoder.times_stored,
            f"times_{BASELINE}_stored": encoder.times_baseline,
        },
        "counted": {
            "step_peak_bytes": encoder.counted_bytes,
        },
        "computed": {
            "needed_bytes": encoder.needed_bytes,
            "lacking_bytes": encoder.lacking_bytes,
            "largest_batch": encoder.largest_batch,
            "largest_batch_by_mode": {m: model.largest_batch(m) for m in model.modes},
            f"cards_for_{TOTAL_BATCH}": encoder.cards,
            f"cards_for_{TOTAL_BATCH}_stored": encoder.cards_stored,
        },
    }


# --- sweeps ---


def sweep_text(swept: SweptEncoder) -> str:
    """Print a sweep as a table, the fit of times, the best batch, and what figures are.

    Parameters
    ----------
    swept : SweptEncoder
        The encoder with its plans.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> from speechbrain_rev.architectures import (HEAD, architecture,)
    >>> from speechbrain_rev.catalog.plans import sweep_encoder
    >>> training = Training(4 * GIB, batch=1, frames=200)
    >>> swept = sweep_encoder(architecture("resnet34"), training, [8, 16])
    >>> sweep_text(swept).splitlines()[2].split()[0], swept.sweep.best.batch
    ('8', 16)
    """
    table = aligned(_sweep_columns(swept), swept.sweep.plans)
    return page(table, [str(swept.sweep)], notes=_sweep_sources(swept).values())


def sweep_json(swept: SweptEncoder) -> str:
    """Print a sweep as JSON: each figure under what it is, units in the names.

    Parameters
    ----------
    swept : SweptEncoder
        The encoder with its plans.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> from speechbrain_rev.architectures import (HEAD, architecture,)
    >>> from speechbrain_rev.catalog.plans import sweep_encoder
    >>> training = Training(4 * GIB, batch=1, frames=200)
    >>> swept = sweep_encoder(architecture("resnet34"), training, [8, 16])
    >>> json.loads(sweep_json(swept))["best_batch"]
    16
    """
    found = swept.sweep
    return _json(
        {
            "sources": _sweep_sources(swept),
            "encoder": swept.row.name,
            "training": _plain_training(swept.training),
            "times": {
                "device": swept.device,
                "how": found.about["seconds"],
                "speed": None if swept.device else json.loads(swept.speed.to_json()),
                "optimizer_seconds": found.other_seconds,
                "linear_in_the_batch": {
                    mode: {
                        "fixed_seconds": time.fixed_seconds,
                        "utterance_seconds": time.sample_seconds,
                        "worst_deviation": time.worst_deviation,
                    }
                    for mode, time in found.times.items()
                },
            },
            "best_batch": found.best.batch,
            "infeasible_batch": found.infeasible_batch,
            "out_of_memory": found.out_of_memory,
            "batches": [
                {
                    "batch": plan.batch,
                    "utterances_per_second": plan.samples_per_second,
                    "step_seconds": plan.seconds,
                    "timed_batch": plan.timed_batch,
                    "needed_bytes": plan.predicted_bytes,
                    "modes": dict(plan.modes),
                    "channels": list(plan.channels or ()),
                }
                for plan in found.plans
            ],
        }
    )


def _sweep_sources(swept: SweptEncoder) -> dict[str, str]:
    """Say what each kind of figure of a sweep is."""
    training = swept.training
    assert training.card_bytes is not None
    if swept.device is None:
        time = (
            f"Times: predicted from counts of operations for {speed_text(swept.speed)}. "
            f"{_start_up(swept.speed)} In all else the device is taken to be used no better "
            "by a large batch."
        )
    else:
        time = (
            f"Times: measured on {swept.device} ({swept.sweep.about['seconds']}), of a "
            "shallow encoder of the kind at each batch, or of as many utterances as fit "
            "there, and of the optimizer; those of the whole encoder follow. Plans were "
            "not run."
        )
    return {
        "card": f"A GPU of {card_text(training.card_bytes)}; "
        f"{training.reserve_bytes / GIB:.2f} GiB stay free: {_RESERVE}.",
        "plan": "Each batch has its own plan: the fastest modes of all blocks with which "
        f"utterances of {training.frames} frames in float32 fit. GiB: the peak of the "
        "encoder's step, predicted from a shallow encoder on meta tensors, with weights, "
        f"gradients, {training.optimizer_bits}-bit states, a classifier of {HEAD.classes} "
        "and the input. store, recompute, reconstruct: blocks of each mode. "
        f"{_CHUNK_NOTE}",
        "time": f"{time} A step is the encoder's forward and backward pass and the "
        f"optimizer's, {1e3 * swept.sweep.other_seconds:.3g} ms at any batch; classifier "
        "and reading come on top.",
    }


def _start_up(speed: Speed) -> str:
    """Say why estimated times have a part that is the same for all batches."""
    microseconds = 1e6 / speed.operations_per_second
    return (
        f"To start an operation takes {microseconds:.3g} microseconds, whatever the batch: "
        "that is most of t0, of which a larger batch has less for each utterance."
    )


def _sweep_columns(swept: SweptEncoder) -> list[Column[BatchPlan]]:
    best = swept.sweep.best
    rate, blocks = "utterances / s", "plan"

    def planned(
        group: str, head: str, cell: Callable[[BatchPlan], str]
    ) -> Column[BatchPlan]:
        return Column(group, head, lambda plan: cell(plan) if plan.modes else "-")

    def count(mode: str) -> Column[BatchPlan]:
        return planned(blocks, mode, lambda p: str(list(p.modes.values()).count(mode)))

    def share(plan: BatchPlan) -> str:
        return f"{plan.samples_per_second / best.samples_per_second:.3f}"

    return [
        Column("", "batch", lambda p: str(p.batch)),
        planned(rate, "number", lambda p: f"{p.samples_per_second:.1f}"),
        planned(rate, "of best", share),
        *(count(mode) for mode in swept.sweep.times),
        planned(blocks, "chunk", lambda p: chunk_text(p.channels or [None])),
        planned("peak", "GiB", lambda p: f"{p.predicted_bytes / GIB:.2f}"),
        Column(" ", "", lambda p: _remark(p, best), is_words=True),
    ]


def _remark(plan: BatchPlan, best: BatchPlan) -> str:
    if not plan.modes:
        return "memory ran out while it was timed"
    words = ["best"] if plan.batch == best.batch else []
    if plan.timed_batch not in (None, plan.batch):
        words.append(f"timed at batch {plan.timed_batch}")
    return ", ".join(words)


# --- breakdowns of a step ---


def breakdowns_text(encoders: Sequence[Cases], card_bytes: int | None = None) -> str:
    """Print breakdowns as a table, what each change saves, and what figures are.

    Parameters
    ----------
    encoders : sequence of Cases
        For each encoder one breakdown, or two: before and after. At least one encoder,
        all of the same batch.
    card_bytes : int or None
        Memory of a GPU that the step must fit.

    Returns
    -------
    str
        Lines, the last one ended too. Activations and the total are in GiB; the other
        parts are small and in MiB, so that none of them is a zero.

    Examples
    --------
    >>> from speechbrain_rev.catalog.breakdown import before_and_after
    >>> text = breakdowns_text([before_and_after("revnet57", batch=64, frames=200)])
    >>> [line.split()[:5] for line in text.splitlines()[2:4]]
    [['revnet57', 'before', 'store', 'sgd', '32'],
     ['revnet57', 'after', 'reconstruct', 'sgd', '8']]
    """
    rows = [
        (word if len(cases) > 1 else "", case)
        for cases in encoders
        for word, case in zip(("before", "after"), cases, strict=False)
    ]
    savings = [
        textwrap.fill(saved(*cases), _WIDTH, subsequent_indent="  ")
        for cases in encoders
        if len(cases) > 1
    ]
    stages = [stages_text(case) for cases in encoders for case in cases if case.stages]
    return page(
        aligned(_breakdown_columns(rows, card_bytes), rows),
        savings,
        *stages,
        notes=_breakdown_sources(encoders[0], card_bytes).values(),
    )


def breakdowns_json(encoders: Sequence[Cases], card_bytes: int | None = None) -> str:
    """Print breakdowns as JSON, sizes in bytes.

    Parameters
    ----------
    encoders : sequence of Cases
        As :func:`breakdowns_text` takes them.
    card_bytes : int or None
        Memory of a GPU that the step must fit.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> from speechbrain_rev.catalog.breakdown import before_and_after
    >>> encoders = [before_and_after("resnet34", batch=64, frames=200)]
    >>> document = json.loads(breakdowns_json(encoders))
    >>> document["breakdowns"][0]["report"]["activations_bytes"]
    4036560136
    """
    document: dict[str, Any] = {
        "sources": _breakdown_sources(encoders[0], card_bytes),
        "counted_with": counted_with(),
    }
    if card_bytes is not None:
        document |= {"card_bytes": card_bytes, "reserve_bytes": reserve_of(card_bytes)}
    document["breakdowns"] = []
    for case in (case for cases in encoders for case in cases):
        plain = dataclasses.asdict(case)
        if not case.stages:
            del plain["stages"]
        del plain["speed"]
        if case.speed is not None:
            plain["speed"] = json.loads(case.speed.to_json())
        plain["total_bytes"] = case.report.total_bytes
        if card_bytes is not None:
            plain["fits"] = case.fits(card_bytes)
        document["breakdowns"].append(plain)
    return _json(document)


def saved(before: EncoderBreakdown, after: EncoderBreakdown) -> str:
    """Say what mode and bits save, each on its own and as part of the whole.

    Parameters
    ----------
    before, after : EncoderBreakdown
        Of one encoder.

    Returns
    -------
    str
        A sentence.

    Examples
    --------
    >>> from speechbrain_rev.catalog.breakdown import before_and_after
    >>> print(saved(*before_and_after("resnet34", batch=64, frames=200)))
    resnet34: 8 bit saves 75 % of the optimizer states, 0.8 % of the total.
    """
    changes = []
    if before.mode != after.mode:
        of_what = f" ({blocks_text(after.blocks)})" if after.mode == "plan" else ""
        changes.append((f"{after.mode}{of_what}", "activations"))
    if before.optimizer_bits != after.optimizer_bits:
        changes.append((f"{after.optimizer_bits} bit", "optimizer_states"))
    words = []
    for change, part in changes:
        size = before.report.parts[part]
        less = size - after.report.parts[part]
        of_part, of_all = less / size, less / before.report.total_bytes
        words.append(
            f"{change} saves {100 * of_part:.0f} % of the {part.replace('_', ' ')}, "
            f"{100 * of_all:.1f} % of the total"
        )
    return f"{before.name}: {'; '.join(words)}."


def _breakdown_sources(cases: Cases, card_bytes: int | None) -> dict[str, str]:
    """Say what each part of a breakdown is and how it came about."""
    batch, frames, _ = cases[0].report.input_shape
    versions = counted_with()
    hows = {case.how: case for case in cases}
    how = "; ".join(
        f"{words} ({case.mode})" if len(hows) > 1 else words
        for words, case in hows.items()
    )
    kinds = {
        "step": f"One training step of {batch} utterances of {frames} frames in float32, "
        "with percent of the total. No GPU was asked.",
        "activations": "Activations: most bytes alive in the encoder's forward and "
        f"backward pass, {how}, on meta tensors, which take the same as on a CPU "
        f"(committed counts: torch {versions['torch']}, {versions['date']}).",
        "parameters": "Optimizer states, weights and gradients: counted, tensor by "
        f"tensor, of the encoder and a classifier of {cases[0].classes}. Small tensors "
        "have states of 32 bit always.",
        "others": "Others: the batch as waveforms and filterbanks, and most bytes alive in "
        "the step of classifier and loss.",
        "total": "Total: an upper bound, as parts do not all peak at once. CUDA's "
        "context, workspaces and fragmentation come on top.",
    }
    if cases[-1].stages:
        kinds["stages"] = (
            "Stages, each with the transition into it: held is what a stage's forward pass "
            "leaves for the backward pass, beside what was held before; together that is "
            "what is alive when the last block's forward pass ends. Working is the most in "
            "a stage's forward or backward pass above what it and all before it hold, peak "
            "the same with what they hold; the largest peak is that of the activations. "
            "The classifier's own step is among the others."
        )
    if card_bytes is not None:
        kinds["fits"] = (
            f"Fits: whether the total leaves {reserve_of(card_bytes) / GIB:.1f} GiB of "
            f"{card_text(card_bytes)} free for those. No GPU was tried."
        )
    if cases[-1].speed is not None:
        kinds["plan"] = (
            "Plan: how many blocks store / recompute / reconstruct, with the modes with "
            "which the step fits and is the fastest, or the lightest where none fit. Times "
            "are predicted from counts of operations for "
            f"{speed_text(cases[-1].speed)}."
        )
    return kinds


def _breakdown_columns(
    rows: Sequence[tuple[str, EncoderBreakdown]], card_bytes: int | None
) -> list[Column[tuple[str, EncoderBreakdown]]]:
    columns: list[Column[tuple[str, EncoderBreakdown]]] = [
        Column("", "encoder", lambda row: row[1].name, is_words=True),
        Column("", "", lambda row: row[0], is_words=True),
        Column("", "mode", lambda row: _mode(row[1]), is_words=True),
        Column("", "optimizer", lambda row: _optimizer(row[1]), is_words=True),
        *(_part_column(part) for part in rows[0][1].report.parts),
        Column("total", "GiB", lambda row: f"{row[1].report.total_bytes / GIB:.3f}"),
    ]
    if card_bytes is not None:
        columns.append(
            Column("fits", "", lambda row: "yes" if row[1].fits(card_bytes) else "no")
        )
    return columns


def _part_column(part: str) -> Column[tuple[str, EncoderBreakdown]]:
    title = "opt. states" if part == "optimizer_states" else part
    unit, unit_bytes, digits = ("MiB", MIB, 1)
    if part == "activations":
        unit, unit_bytes, digits = ("GiB", GIB, 3)

    def cell(row: tuple[str, EncoderBreakdown]) -> str:
        report = row[1].report
        size = f"{report.parts[part] / unit_bytes:.{digits}f}"
        return f"{size} {report.share(part):5.1%}"

    return Column(title, unit, cell)


def _mode(case: EncoderBreakdown) -> str:
    if case.mode != "plan":
        return case.mode
    return f"{case.mode} {'/'.join(str(case.blocks[each]) for each in MODES)}"


def _optimizer(case: EncoderBreakdown) -> str:
    return f"{case.optimizer_name} {case.optimizer_bits} bit"


def stages_text(case: EncoderBreakdown) -> list[str]:
    """Print what each stage takes as a table, with a line of their sums.

    Parameters
    ----------
    case : EncoderBreakdown
        A breakdown with stages.

    Returns
    -------
    list of str
        Lines: whose stages they are, heads, a line for each, and the sums, which for
        the peak is the largest.

    Examples
    --------
    >>> from speechbrain_rev.catalog.breakdown import encoder_breakdown
    >>> case = encoder_breakdown("resnet34", batch=64, frames=200, stages=True)
    >>> print(stages_text(case)[0])
    resnet34, store, sgd 8 bit:
    >>> stages_text(case)[-1].split()[:5]
    ['all', '17', 'store', '3.712', 'GiB']
    """
    title = f"{case.name}, {case.mode}, {_optimizer(case)}:"
    return [title, *aligned(_STAGES, [*case.stages, case.all_stages()])[1:]]


def blocks_text(blocks: Mapping[str, int]) -> str:
    """Say how many blocks have each mode.

    Parameters
    ----------
    blocks : mapping of str to int
        Blocks by mode.

    Returns
    -------
    str
        Words, none for modes that no block has.

    Examples
    --------
    >>> blocks_text({"reconstruct": 2, "store": 1, "recompute": 0})
    '1 store, 2 reconstruct'
    """
    counts = [(blocks.get(mode, 0), mode) for mode in MODES]
    return ", ".join(f"{count} {mode}" for count, mode in counts if count)


def _peak(stage: StageMemory) -> str:
    # The classifier has no part in the step, and its row no peak of its own.
    takes_part = stage.held_bytes or stage.working_bytes
    return _size(stage.peak_bytes) if takes_part else "-"


def _size(size_bytes: int) -> str:
    return size_text(size_bytes) if size_bytes else "-"


_STAGES: list[Column[StageMemory]] = [
    Column("", "stage", lambda s: s.name, is_words=True),
    Column("", "blocks", lambda s: blocks_text(s.blocks), is_words=True),
    Column("", "held", lambda s: _size(s.held_bytes)),
    Column("", "working", lambda s: _size(s.working_bytes)),
    Column("", "peak", _peak),
    Column("", "weights", lambda s: _size(s.weights_bytes)),
    Column("", "gradients", lambda s: _size(s.gradients_bytes)),
    Column("", "opt. states", lambda s: _size(s.optimizer_states_bytes)),
]
