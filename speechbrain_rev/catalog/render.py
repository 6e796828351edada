"""Encoders, plans, sweeps and breakdowns as tables and as JSON, each figure marked.

No torch is needed to show the table of encoders. What nobody counted or published is "-",
and null in JSON. How figures are made is in ``docs/choosing_an_encoder.md``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from speechbrain_rev.architectures import HEAD, Architecture
from speechbrain_rev.catalog.columns import Column, Row, Table, page
from speechbrain_rev.catalog.table import (
    BASELINE,
    FRAMES,
    MODES,
    PAPER,
    SECONDS,
    TABLE_SEVEN,
    TOTAL_BATCH,
    ListedEncoder,
    Training,
    as_published,
    counted_with,
)
from speechbrain_rev.modes import Mode
from speechbrain_rev.sizes import GIB, MIB, card_text, reserve_of, size_text

if TYPE_CHECKING:
    from speechbrain_rev.catalog.breakdown import EncoderBreakdown, StageMemory
    from speechbrain_rev.catalog.plans import PlannedEncoder, SweptEncoder
    from speechbrain_rev.devices import CardAtHand
    from speechbrain_rev.planner.sweep import BatchPlan

    #: The breakdowns of an encoder: before and after, or one where that is the same.
    Cases = Sequence[EncoderBreakdown]

_CHUNK = "chunk: channels at a time; -: all."


class Report(ABC):
    """What a command prints: tables with notes, or the same figures as JSON."""

    def text(self, width: int | None = None) -> str:
        """Write tables, what they show, and what each kind of figure is.

        Parameters
        ----------
        width : int or None
            Of the terminal; None for all columns.

        Returns
        -------
        str
            Lines, the last one ended too.
        """
        notes = self.sources.values()
        return page(self._tables(), remarks=self._remarks(), notes=notes, width=width)

    def json(self) -> str:
        """Write all figures as JSON: each under what it is, units in the names."""
        document = {"sources": self.sources, **self._document()}
        return json.dumps(document, indent=1) + "\n"

    @property
    @abstractmethod
    def sources(self) -> dict[str, str]:
        """A sentence or two for each kind of figure: what it is, where it is from."""

    @abstractmethod
    def _tables(self) -> Sequence[Table[Any]]: ...

    def _remarks(self) -> Iterable[str]:
        return ()

    @abstractmethod
    def _document(self) -> dict[str, Any]: ...


def _text(value: object, form: str = "") -> str:
    """Write a figure, - if there is none."""
    return "-" if value is None else format(value, form)


def _of(name: str, form: str = "") -> Callable[[object], str]:
    """Make cells of an attribute, named with dots, of the row."""
    value = attrgetter(name)
    return lambda row: _text(value(row), form)


def _for_modes(
    group: str,
    cell: Callable[[str, Row], str],
    importance: float = math.inf,
    modes: Iterable[str] = MODES,
) -> list[Column[Row]]:
    """Make a column for each mode, whose cells need the mode before the row."""
    return [
        Column(group, Mode(mode).spec.column, partial(cell, mode), importance)
        for mode in modes
    ]


def _free(card_bytes: int) -> str:
    gib = reserve_of(card_bytes) / GIB
    return f"{gib:.2f} GiB stay free for CUDA and fragmentation"


def _beside(training: Training) -> str:
    """Name what a step needs beside the encoder's own."""
    bits = f"{training.optimizer_bits}-bit states"
    return f"weights, gradients, {bits} and a classifier of {HEAD.classes}"


def _taken(thing: object, *names: str, **renamed: str) -> dict[str, Any]:
    """Take attributes by their names, and others under new names."""
    new = {name: getattr(thing, old) for name, old in renamed.items()}
    return {name: getattr(thing, name) for name in names} | new


def _plain_training(training: Training) -> dict[str, Any]:
    """Say in JSON for which GPU and which training figures are."""
    plain: dict[str, Any] = {"frames": training.frames, "precision": "float32"}
    if training.card_bytes is not None:
        plain |= _taken(training, "card_bytes", "reserve_bytes")
        plain["optimizer_state_bits"] = training.optimizer_bits
        plain["classes"] = HEAD.classes
    return plain


def _plain_published(row: Architecture) -> dict[str, Any]:
    return {
        "vox1_h_eer_percent": row.vox1_h_eer,
        "gb_per_2_s_utterance": row.published_memory_gb,
        "largest_batch_on_11_gib": row.published_max_batch_11gb,
    }


@dataclass(frozen=True)
class ModelsReport(Report):
    """Encoders: size, published accuracy, memory, and what fits a GPU.

    Attributes
    ----------
    models : sequence of ListedEncoder
        The rows; at least one, all of the same training.

    Examples
    --------
    >>> from speechbrain_rev.catalog import select
    >>> models = select(Training(None, batch=128, frames=200), names=["resnet34"])
    >>> ModelsReport(models).text().splitlines()[2].split()[:4]
    ['resnet34', '-', '34', '6.63']
    >>> plain = json.loads(ModelsReport(models).json())
    >>> plain["encoders"][0]["published"]["vox1_h_eer_percent"]
    1.86
    """

    models: Sequence[ListedEncoder]

    @property
    def sources(self) -> dict[str, str]:
        """What is published, counted and, with a GPU, computed."""
        versions, training = counted_with(), self.models[0].training
        kinds = {
            "published": f'Published: Tables V and VI of "{PAPER}"; EER in percent, GB per '
            "2 s utterance. Not reproduced here.",
            "counted": "Counted: parameters, and what an utterance adds to a training step "
            f"in float32 on meta tensors (torch {versions['torch']}, {versions['date']}).",
        }
        if training.card_bytes is not None:
            kinds["computed"] = (
                f"Computed: what fits {card_text(training.card_bytes)} with "
                f"{training.frames} frames, {_beside(training)}; "
                f"{_free(training.card_bytes)}. fits: in the default mode. No GPU was tried."
            )
        return kinds

    def _tables(self) -> Sequence[Table[ListedEncoder]]:
        training, published = self.models[0].training, "published"
        columns: list[Column[ListedEncoder]] = [
            Column("", "encoder", _of("row.name"), is_words=True),
            Column("", "type", _type, 1, is_words=True),
            Column("", "layers", _of("row.layers"), 1),
            Column("counted", "M params", _millions, 6),
            Column(published, "M params", _of("row.published_params_m", ".1f"), 2),
            Column(published, "EER O", _of("row.vox1_o_eer", ".2f"), 2),
            Column(published, "EER E", _of("row.vox1_e_eer", ".2f"), 2),
            Column(published, "EER H", _of("row.vox1_h_eer", ".2f"), 7),
            Column(published, "GB", _of("row.published_memory_gb", "g"), 3),
        ]
        if training.card_bytes is None:
            importances = dict(zip(FRAMES, (math.inf, 4), strict=True))
        else:
            importances = {training.frames: 5}
            title = f"largest batch on {card_text(training.card_bytes)}"
            columns.append(Column(f"batch {training.batch}", "fits", _fits))
            columns += _for_modes(title, _largest_batch)
        for frames, importance in importances.items():
            title = f"MiB per {SECONDS[frames]} s utterance"
            columns += _for_modes(title, partial(_mib, frames), importance)
        return [Table(columns, self.models)]

    def _document(self) -> dict[str, Any]:
        training = self.models[0].training
        return {
            "counted_with": counted_with(),
            "training": {"batch": training.batch, **_plain_training(training)},
            "encoders": [_plain_model(model) for model in self.models],
        }


def _type(model: ListedEncoder) -> str:
    return model.row.type if model.row.reversible else "-"


def _millions(model: ListedEncoder) -> str:
    return f"{model.row.parameters / 1e6:.2f}"


def _largest_batch(mode: str, model: ListedEncoder) -> str:
    return _text(model.largest_batch(mode))


def _mib(frames: int, mode: str, model: ListedEncoder) -> str:
    size = model.bytes_per_utterance(mode, frames)
    return "-" if size is None else f"{size / MIB:.1f}"


def _fits(model: ListedEncoder) -> str:
    return {None: "-", True: "yes", False: "no"}[model.fits(model.row.default_mode)]


def _plain_model(model: ListedEncoder) -> dict[str, Any]:
    row, training, modes = model.row, model.training, model.modes
    plain: dict[str, Any] = {
        **_taken(
            row, "name", "family", "type", "layers", "counterpart", "default_mode"
        ),
        "published": {
            "parameters_millions": row.published_params_m,
            "vox1_o_eer_percent": row.vox1_o_eer,
            "vox1_e_eer_percent": row.vox1_e_eer,
            **_plain_published(row),
        },
        "counted": {
            "parameters": row.parameters,
            **{
                f"bytes_per_{SECONDS[frames]}_s_utterance": {
                    mode: model.bytes_per_utterance(mode, frames) for mode in modes
                }
                for frames in FRAMES
            },
            "step_peak_bytes": {mode: model.step_peak_bytes(mode) for mode in modes},
        },
    }
    if training.card_bytes is not None:
        plain["computed"] = {
            mode: {
                "fits": model.fits(mode),
                "largest_batch": model.largest_batch(mode),
                "needed_bytes": training.needed_bytes(row, mode, training.batch),
            }
            for mode in modes
        }
    return plain


@dataclass(frozen=True)
class PlansReport(Report):
    """Planned encoders: what blocks keep, time, and the largest batch.

    Attributes
    ----------
    encoders : sequence of PlannedEncoder
        The rows; at least one, all of the same training.
    at_hand : CardAtHand or None
        The GPU, if it was asked and not named.

    Examples
    --------
    >>> from speechbrain_rev.catalog.plans import plan_encoders
    >>> training = Training(11 * GIB, batch=128, frames=200)
    >>> report = PlansReport(plan_encoders(training, names=["resnet34"]))
    >>> report.text().splitlines()[2].split()[:8]
    ['resnet34', '6.63', '1.86', '154', '-', '7.74', '-', 'counted']
    >>> json.loads(report.json())["encoders"][0]["predicted"]["times_stored"]
    1.0
    """

    encoders: Sequence[PlannedEncoder]
    at_hand: CardAtHand | None = None

    @property
    def sources(self) -> dict[str, str]:
        """What is published, predicted or counted, estimated, and computed."""
        encoder, at_hand, versions = self.encoders[0], self.at_hand, counted_with()
        training = encoder.model.training
        assert training.card_bytes is not None
        card = card_text(training.card_bytes)
        named = f"A GPU of {card} was named; none was tried."
        if at_hand is not None:
            total = card_text(at_hand.total_bytes)
            named = f"{card} were free of {total} on {at_hand.name}."
        shown = "EER on Vox1-H (Tables V, VI)"
        if as_published(training):
            shown = "EER on Vox1-H, largest batch, 11 GB GPUs (Tables V, VI, VII)"
        return {
            "published": f'Published: {shown} of "{PAPER}". Not reproduced here.',
            "card": f"{named} {_free(training.card_bytes)}.",
            "plan": f"Plan: the fastest modes with which {training.batch} utterances of "
            f"{training.frames} frames fit, else the lightest. GiB: all that a step takes, "
            f"{training.optimizer_bits}-bit states and classifier included. {_CHUNK}",
            "how": "Peak counted: the encoder ran with its plan on meta tensors; predicted: "
            f"a shallow one of its kind did (torch {encoder.profile.about['torch']}).",
            "time": f"Estimated: from counts of operations for {encoder.speed}. / stored, "
            f"/ {BASELINE}: over the time all stored, over {BASELINE}'s.",
            "batch": "Computed: at least such a batch fits, in one mode at the default chunk "
            f"or planned. GPUs: at most so many for {TOTAL_BATCH}; stored: if all is stored "
            f"(torch {versions['torch']}, {versions['date']}).",
        }

    def _tables(self) -> Sequence[Table[PlannedEncoder]]:
        training = self.encoders[0].model.training
        published, computed = "published", "computed"
        plan, time = f"plan for batch {training.batch}", "estimated time"

        def blocks(mode: str, encoder: PlannedEncoder) -> str:
            has_mode = mode in encoder.model.modes
            return str(encoder.mode_counts[mode]) if has_mode else "-"

        columns: list[Column[PlannedEncoder]] = [
            Column("", "encoder", _of("model.row.name"), is_words=True),
            Column("", "M params", lambda e: _millions(e.model), 1),
            Column(published, "EER", _of("model.row.vox1_h_eer", ".2f"), 7),
            Column(published, "batch", _of("model.row.published_max_batch_11gb"), 2),
            Column(published, "GPUs", lambda e: _text(_published_cards(e)), 2),
            Column(plan, "GiB", lambda e: f"{e.needed_bytes / GIB:.2f}"),
            Column(plan, "lacks", lambda e: _size(e.lacking_bytes), 9),
            Column(plan, "peak", _how, 3, is_words=True),
            *_for_modes(plan, blocks),
            Column(plan, "chunk", lambda e: _text(e.channels[0]), 4),
            Column(time, "/ stored", _of("times_stored", ".2f"), 5),
            Column(time, f"/ {BASELINE}", _of("times_baseline", ".2f"), 2),
            Column(time, "utt./s", _of("utterances_per_second", ".1f"), 8),
            Column(computed, "batch", _of("largest_batch"), 6),
            Column(computed, "GPUs", _of("cards"), 2),
            Column(computed, "stored", _of("cards_stored"), 1),
        ]
        if not as_published(training):
            # Published batches and numbers of GPUs compare with nothing.
            del columns[3:5]
        return [Table(columns, self.encoders)]

    def _document(self) -> dict[str, Any]:
        training, at_hand = self.encoders[0].model.training, self.at_hand
        return {
            "counted_with": counted_with(),
            "speed": json.loads(self.encoders[0].speed.to_json()),
            "training": {
                "batch": training.batch,
                "card_name": None if at_hand is None else at_hand.name,
                **_plain_training(training),
            },
            "encoders": [_plain_plan(encoder) for encoder in self.encoders],
        }


def _how(encoder: PlannedEncoder) -> str:
    return "predicted" if encoder.counted_bytes is None else "counted"


def _published_cards(encoder: PlannedEncoder) -> int | None:
    row = TABLE_SEVEN.get(encoder.model.row.name)
    return None if row is None else row.cards


def _plain_plan(encoder: PlannedEncoder) -> dict[str, Any]:
    model = encoder.model
    return {
        **_taken(model.row, "name", "family", "type", "parameters"),
        "published": {
            **_plain_published(model.row),
            f"cards_of_11_gib_for_{TOTAL_BATCH}": _published_cards(encoder),
        },
        "plan": {
            "fits": not encoder.lacking_bytes,
            "modes": dict(encoder.modes),
            "channels": list(encoder.channels),
        },
        "predicted": {
            "step_peak_bytes": encoder.predicted_bytes,
            **_taken(encoder, "seconds", "utterances_per_second", "times_stored"),
            f"times_{BASELINE}_stored": encoder.times_baseline,
        },
        "counted": {"step_peak_bytes": encoder.counted_bytes},
        "computed": {
            **_taken(encoder, "needed_bytes", "lacking_bytes", "largest_batch"),
            "largest_batch_by_mode": {m: model.largest_batch(m) for m in model.modes},
            f"cards_for_{TOTAL_BATCH}": encoder.cards,
            f"cards_for_{TOTAL_BATCH}_stored": encoder.cards_stored,
        },
    }


@dataclass(frozen=True)
class SweepReport(Report):
    """The plan of each batch, the fit of times, and the best batch.

    Attributes
    ----------
    swept : SweptEncoder
        The encoder with its plans.

    Examples
    --------
    >>> from speechbrain_rev.architectures import architecture
    >>> from speechbrain_rev.catalog.plans import sweep_encoder
    >>> training = Training(4 * GIB, batch=1, frames=200)
    >>> report = SweepReport(sweep_encoder(architecture("resnet34"), training, [8, 16]))
    >>> report.text().splitlines()[2].split()[0], json.loads(report.json())["best_batch"]
    ('8', 16)
    """

    swept: SweptEncoder

    @property
    def sources(self) -> dict[str, str]:
        """What is predicted, and whether times are estimated or measured."""
        swept, training = self.swept, self.swept.training
        assert training.card_bytes is not None
        if swept.device is None:
            time = f"Times: estimated from counts of operations for {swept.speed}."
        else:
            time = (
                f"Times: measured on {swept.device} ({swept.sweep.about['seconds']}), of a "
                "shallow encoder at each batch, or of as many utterances as fit there. "
                "Plans were not run."
            )
        return {
            "card": f"A GPU of {card_text(training.card_bytes)} was named. "
            f"{_free(training.card_bytes)}.",
            "plan": f"Plan: the fastest with which utterances of {training.frames} frames "
            "in float32 fit. Peak: predicted on meta tensors, "
            f"{training.optimizer_bits}-bit states and classifier included. {_CHUNK}",
            "time": f"{time} With the optimizer's {1e3 * swept.sweep.other_seconds:.3g} ms, "
            "without classifier and reading.",
        }

    def _tables(self) -> Sequence[Table[BatchPlan]]:
        found = self.swept.sweep
        rate, blocks, best = "utterances / s", "plan", found.best

        def planned(cell: Callable[[BatchPlan], str]) -> Callable[[BatchPlan], str]:
            return lambda plan: cell(plan) if plan.modes else "-"

        def share(plan: BatchPlan) -> str:
            return f"{plan.samples_per_second / best.samples_per_second:.3f}"

        def peak(plan: BatchPlan) -> str:
            return f"{plan.predicted_bytes / GIB:.2f}"

        def count(mode: str, plan: BatchPlan) -> str:
            return str(list(plan.modes.values()).count(mode)) if plan.modes else "-"

        columns: list[Column[BatchPlan]] = [
            Column("", "batch", _of("batch")),
            Column(rate, "number", planned(_of("samples_per_second", ".1f"))),
            Column(rate, "of best", planned(share), 3),
            Column("peak", "GiB", planned(peak), 5),
            *_for_modes(blocks, count, 4, found.times),
            Column(blocks, "chunk", lambda p: _text((p.channels or [None])[0]), 1),
            Column(" ", "", lambda p: _remark(p, best), 2, is_words=True),
        ]
        return [Table(columns, found.plans)]

    def _remarks(self) -> Iterable[str]:
        return str(self.swept.sweep).splitlines()

    def _document(self) -> dict[str, Any]:
        swept, found = self.swept, self.swept.sweep
        parts = ("fixed_seconds", "worst_deviation")
        renamed = {
            "utterances_per_second": "samples_per_second",
            "step_seconds": "seconds",
            "needed_bytes": "predicted_bytes",
        }
        return {
            "encoder": swept.row.name,
            "training": _plain_training(swept.training),
            "times": {
                "device": swept.device,
                "how": found.about["seconds"],
                "speed": None if swept.device else json.loads(swept.speed.to_json()),
                "optimizer_seconds": found.other_seconds,
                "linear_in_the_batch": {
                    mode: _taken(time, *parts, utterance_seconds="sample_seconds")
                    for mode, time in found.times.items()
                },
            },
            "best_batch": found.best.batch,
            **_taken(found, "infeasible_batch", "out_of_memory"),
            "batches": [
                {
                    **_taken(plan, "batch", "timed_batch", **renamed),
                    "modes": dict(plan.modes),
                    "channels": list(plan.channels or ()),
                }
                for plan in found.plans
            ],
        }


def _remark(plan: BatchPlan, best: BatchPlan) -> str:
    if not plan.modes:
        return "memory ran out while it was timed"
    words = ["best"] if plan.batch == best.batch else []
    if plan.timed_batch not in (None, plan.batch):
        words.append(f"timed at batch {plan.timed_batch}")
    return ", ".join(words)


@dataclass(frozen=True)
class BreakdownReport(Report):
    """The parts of training steps, what each change saves, and stages if asked for.

    Activations and the total are in GiB; the other parts are small and in MiB, so that
    none of them is a zero.

    Attributes
    ----------
    encoders : sequence of Cases
        For each encoder one breakdown, or two: before and after. At least one encoder,
        all of the same batch.
    card_bytes : int or None
        Memory of a GPU that the step must fit.

    Examples
    --------
    >>> from speechbrain_rev.catalog.breakdown import before_and_after
    >>> report = BreakdownReport([before_and_after("resnet34", batch=64, frames=200)])
    >>> [line.split()[:5] for line in report.text().splitlines()[2:4]]
    [['resnet34', 'before', 'store', 'sgd', '32'],
     ['resnet34', 'after', 'store', 'sgd', '8']]
    >>> json.loads(report.json())["breakdowns"][0]["report"]["activations_bytes"]
    4036560136
    """

    encoders: Sequence[Cases]
    card_bytes: int | None = None

    @property
    def sources(self) -> dict[str, str]:
        """How each part came about."""
        cases, card_bytes, versions = self.encoders[0], self.card_bytes, counted_with()
        batch, frames, _ = cases[0].report.input_shape
        hows = {case.how: case for case in cases}
        how = "; ".join(
            f"{words} ({case.mode})" if len(hows) > 1 else words
            for words, case in hows.items()
        )
        kinds = {
            "step": f"One step of {batch} utterances of {frames} frames in float32, with "
            "percent of the total. No GPU was tried.",
            "activations": f"Activations: the peak of the encoder's own step, {how}, on meta "
            f"tensors (committed counts: torch {versions['torch']}, {versions['date']}).",
            "parameters": "Optimizer states, weights and gradients: counted, of the encoder "
            f"and a classifier of {cases[0].classes}.",
            "others": "Others: counted, the batch and the peak of the classifier's step.",
            "total": "Total: an upper bound, as parts do not all peak at once.",
        }
        if cases[-1].stages:
            kinds["stages"] = (
                "Stages: held is kept for the backward pass, working is the most beyond it, "
                "peak is working and all that is held. The largest peak is that of the "
                "activations."
            )
        if card_bytes is not None:
            kinds["fits"] = (
                f"Fits: whether {card_text(card_bytes)} hold the total and "
                f"{_free(card_bytes)}."
            )
        if cases[-1].speed is not None:
            kinds["plan"] = (
                f"Plan: how many blocks {' / '.join(MODES)}, the fastest that fit or the "
                "lightest. Times: predicted from counts of operations for "
                f"{cases[-1].speed}."
            )
        return kinds

    def _tables(self) -> Sequence[Table[Any]]:
        rows = [
            (word if len(cases) > 1 else "", case)
            for cases in self.encoders
            for word, case in zip(("before", "after"), cases, strict=False)
        ]
        columns: list[Column[tuple[str, EncoderBreakdown]]] = [
            Column("", "encoder", lambda row: row[1].name, is_words=True),
            Column("", "", lambda row: row[0], is_words=True),
            Column("", "mode", lambda row: _mode(row[1]), is_words=True),
            Column("", "optimizer", lambda row: _optimizer(row[1]), 4, is_words=True),
            *(_part_column(part) for part in rows[0][1].report.parts),
            Column(
                "total", "GiB", lambda row: f"{row[1].report.total_bytes / GIB:.3f}"
            ),
        ]
        if (card := self.card_bytes) is not None:
            columns.append(
                Column("fits", "", lambda row: "yes" if row[1].fits(card) else "no")
            )
        return [Table(columns, rows), *(_stages_table(c) for _, c in rows if c.stages)]

    def _remarks(self) -> Iterable[str]:
        return [saved(*cases) for cases in self.encoders if len(cases) > 1]

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"counted_with": counted_with()}
        if (card := self.card_bytes) is not None:
            document |= {"card_bytes": card, "reserve_bytes": reserve_of(card)}
        cases = (case for cases in self.encoders for case in cases)
        document["breakdowns"] = [_plain_case(c, self.card_bytes) for c in cases]
        return document


def _plain_case(case: EncoderBreakdown, card_bytes: int | None) -> dict[str, Any]:
    plain = dataclasses.asdict(case)
    if not case.stages:
        del plain["stages"]
    del plain["speed"]
    if case.speed is not None:
        plain["speed"] = json.loads(case.speed.to_json())
    plain["total_bytes"] = case.report.total_bytes
    if card_bytes is not None:
        plain["fits"] = case.fits(card_bytes)
    return plain


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
        changes.append((after.mode, "activations"))
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


def _part_column(part: str) -> Column[tuple[str, EncoderBreakdown]]:
    title = "opt. states" if part == "optimizer_states" else part
    unit, unit_bytes, digits, importance = ("MiB", MIB, 1, 2)
    if part == "activations":
        unit, unit_bytes, digits, importance = ("GiB", GIB, 3, 5)

    def cell(row: tuple[str, EncoderBreakdown]) -> str:
        report = row[1].report
        size = f"{report.parts[part] / unit_bytes:.{digits}f}"
        return f"{size} {report.share(part):5.1%}"

    return Column(title, unit, cell, importance)


def _mode(case: EncoderBreakdown) -> str:
    if case.mode in MODES:
        return case.mode
    return f"{case.mode} {'/'.join(str(case.blocks[each]) for each in MODES)}"


def _optimizer(case: EncoderBreakdown) -> str:
    return f"{case.optimizer_name} {case.optimizer_bits} bit"


def _stages_table(case: EncoderBreakdown) -> Table[StageMemory]:
    """Show what each stage takes; the last row has the sums, for the peak the largest."""

    def blocks(mode: str, stage: StageMemory) -> str:
        return str(stage.blocks.get(mode) or "")

    def peak(stage: StageMemory) -> str:
        # The classifier has no part in the step, and its row no peak of its own.
        takes_part = stage.held_bytes or stage.working_bytes
        return _size(stage.peak_bytes) if takes_part else "-"

    columns: list[Column[StageMemory]] = [
        Column("", "stage", lambda s: s.name, is_words=True),
        *_for_modes("blocks", blocks, 3),
        Column("activations", "held", lambda s: _size(s.held_bytes), 4),
        Column("activations", "working", lambda s: _size(s.working_bytes), 4),
        Column("activations", "peak", peak),
        Column("parameters", "weights", lambda s: _size(s.weights_bytes), 2),
        Column("parameters", "gradients", lambda s: _size(s.gradients_bytes), 1),
        Column("parameters", "states", lambda s: _size(s.optimizer_states_bytes), 2),
    ]
    title = f"{case.name}, {case.mode}, {_optimizer(case)}:"
    return Table(columns, [*case.stages, case.all_stages()], title)


def _size(size_bytes: int) -> str:
    return size_text(size_bytes) if size_bytes else "-"
