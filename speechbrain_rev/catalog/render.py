"""Encoders, plans, sweeps and breakdowns as tables and as JSON, each figure marked.

No torch is needed to show the table of encoders. What nobody counted or published is "-",
and null in JSON. How figures are made is in ``docs/choosing_an_encoder.md``.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from speechbrain_rev.catalog.columns import Column, Table, page
from speechbrain_rev.catalog.counts import FRAMES, counted_with
from speechbrain_rev.catalog.table import (
    BASELINE,
    EPOCHS,
    MODES,
    PAPER,
    PLANNED,
    TABLE_SEVEN,
    TOTAL_BATCH,
    UTTERANCES,
    ListedEncoder,
    Training,
    as_published,
)
from speechbrain_rev.heads import HEAD
from speechbrain_rev.modes import Mode
from speechbrain_rev.sizes import (
    GIB,
    MIB,
    card_text,
    reserve_of,
    reserve_text,
    size_text,
)

if TYPE_CHECKING:
    from speechbrain_rev.catalog.breakdown import EncoderBreakdown, StageMemory
    from speechbrain_rev.catalog.plans import PlannedEncoder, SweptEncoder
    from speechbrain_rev.devices import GpuAtHand
    from speechbrain_rev.planner.sweep import BatchPlan

    #: The breakdowns of an encoder: before and after, or one where that is the same.
    Cases = Sequence[EncoderBreakdown]

# Where both reports of encoders have published figures in JSON.
_EER_KEY = "published.vox1_h_eer_percent"
_GB_KEY = "published.gb_per_2_s_utterance"
_BATCH_KEY = "published.largest_batch_on_11_gib"
_DAYS = (
    f"days: {EPOCHS} epochs of the {UTTERANCES:,} utterances of VoxCeleb2 dev (DF encoders "
    "train 165: a tenth more), encoder and optimizer alone"
)
_JOIN = "join: blocks that are recomputed in one go with the block before."


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


def _for_modes(
    group: str,
    value: Callable[[str, Any], object],
    key: str,
    text: str | Callable[[Any], str] = "",
    importance: float = math.inf,
    *,
    modes: Iterable[str] = MODES,
    shown: bool = True,
) -> list[Column[Any]]:
    """Make a column for each mode, whose values need the mode before the row."""
    return [
        Column(
            group,
            Mode(mode).spec.column if shown else None,
            partial(value, mode),
            key.format(mode=mode),
            text,
            importance,
        )
        for mode in modes
    ]


def _in_json(value: str | Callable[[Any], Any], key: str) -> Column[Any]:
    """Make a column that JSON alone has."""
    return Column("", None, value, key)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f}"


def _yes_or_no(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _first(channels: Sequence[int | None]) -> str:
    """Write the channels of the first stage, - for all."""
    first = channels[0] if channels else None
    return "-" if first is None else str(first)


def _shared_out(card_bytes: int) -> str:
    """Name the memory of a GPU, its reserve, and what that leaves."""
    reserved = reserve_of(card_bytes)
    left = card_text(max(0, card_bytes - reserved))
    return f"{card_text(card_bytes)}, {reserve_text(reserved)}, {left} left"


def _beside(training: Training) -> str:
    """Name what a step needs beside the encoder's own."""
    bits = f"{training.optimizer_bits}-bit states"
    head = training.head
    loss = "" if head.loss == HEAD.loss else f" with {head.loss}"
    return f"weights, gradients, {bits} and a classifier of {head.classes}{loss}"


def _taken(thing: object, *names: str, **renamed: str) -> dict[str, Any]:
    """Take attributes by their names, and others under new names."""
    new = {name: getattr(thing, old) for name, old in renamed.items()}
    return {name: getattr(thing, name) for name in names} | new


def _plain_training(training: Training) -> dict[str, Any]:
    """Name in JSON for which GPU and which training figures are."""
    plain: dict[str, Any] = {"frames": training.frames, "precision": "float32"}
    if training.card_bytes is not None:
        plain |= _taken(training, "card_bytes", "reserve_bytes")
        plain["optimizer_state_bits"] = training.optimizer_bits
        plain["classes"] = training.head.classes
    return plain


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
        if training.frames not in FRAMES:
            kinds["counted"] += (
                f" Of {training.frames} frames: at most, by the counts of "
                f"{' and '.join(map(str, FRAMES))}."
            )
        if training.card_bytes is not None:
            kinds["computed"] = (
                f"Computed: what fits {_shared_out(training.card_bytes)}: "
                f"utterances of {training.frames} frames, {_beside(training)}. No such GPU "
                "was tried."
            )
            kinds["estimated"] = (
                f"Estimated: from counts of operations for {self.models[0].known_speed}. "
                f"{_DAYS}, all blocks in the fastest mode that fits. A plan mixes modes and "
                "chooses the chunk, and takes no longer: speechbrain-rev plan."
            )
        return kinds

    def _tables(self) -> Sequence[Table[ListedEncoder]]:
        training, published = self.models[0].training, "published"
        columns: list[Column[ListedEncoder]] = [
            Column("", "encoder", "row.name", "name", is_words=True),
            _in_json("row.family", "family"),
            Column("", "type", "row.type", "type", _type, 1, is_words=True),
            Column("", "layers", "row.layers", "layers", importance=1),
            _in_json("row.counterpart", "counterpart"),
            _in_json("row.default_mode", "default_mode"),
            Column("counted", "M params", "parameters", "counted.parameters",
                   _millions, 6),
            Column(published, "M params", "row.published_params_m",
                   "published.parameters_millions", ".1f", 2),
            Column(published, "EER O", "row.vox1_o_eer",
                   "published.vox1_o_eer_percent", ".2f", 2),
            Column(published, "EER E", "row.vox1_e_eer",
                   "published.vox1_e_eer_percent", ".2f", 2),
            Column(published, "EER H", "row.vox1_h_eer", _EER_KEY, ".2f", 7),
            Column(published, "GB", "row.published_memory_gb", _GB_KEY, "g", 3),
            _in_json("row.published_max_batch_11gb", _BATCH_KEY),
        ]  # fmt: skip
        importances: dict[int, float] = dict(zip(FRAMES, (math.inf, 4), strict=True))
        if training.frames not in FRAMES:
            importances = {training.frames: 5}
        if training.card_bytes is not None:
            importances = {training.frames: 5}
            title = f"largest batch on {card_text(training.card_bytes)}"
            batch = f"batch {training.batch}"
            columns += [
                Column(batch, "fastest mode", "fastest_mode",
                       "estimated.fastest_mode", is_words=True),
                Column(batch, "days", "least_days", "estimated.training_days", ".1f", 8),
            ]  # fmt: skip
            columns += _for_modes(
                "",
                lambda mode, model: model.days(mode),
                "estimated.training_days_by_mode.{mode}",
                shown=False,
            )
            columns += _for_modes(
                title,
                lambda mode, model: model.largest_batch(mode),
                "computed.{mode}.largest_batch",
            )
            columns += _for_modes("", _computed, "computed.{mode}", shown=False)
        for frames in sorted({*FRAMES, training.frames}):
            seconds = f"{frames / 100:g}"
            columns += _for_modes(
                f"MiB per {seconds} s utterance",
                partial(_bytes_per_utterance, frames),
                f"counted.bytes_per_{seconds.replace('.', '_')}_s_utterance.{{mode}}",
                _mib,
                importances.get(frames, math.inf),
                shown=frames in importances,
            )
        columns += _for_modes(
            "",
            lambda mode, model: model.step_peak_bytes(mode),
            "counted.step_peak_bytes.{mode}",
            shown=False,
        )
        return [Table(columns, self.models)]

    def _document(self) -> dict[str, Any]:
        first, training = self.models[0], self.models[0].training
        has_gpu = training.card_bytes is not None
        return {
            "counted_with": counted_with(),
            "speed": asdict(first.known_speed) if has_gpu else None,
            "training": {"batch": training.batch, **_plain_training(training)},
            "encoders": self._tables()[0].plain(),
        }


def _type(kind: str) -> str:
    return "-" if kind == "vanilla" else kind


def _bytes_per_utterance(frames: int, mode: str, model: ListedEncoder) -> int | None:
    return model.bytes_per_utterance(mode, frames)


def _computed(mode: str, model: ListedEncoder) -> dict[str, Any]:
    training = model.training
    needed = training.needed_bytes(model.row, mode, training.batch)
    return {"fits": model.fits(mode), "needed_bytes": needed}


@dataclass(frozen=True)
class PlansReport(Report):
    """Planned encoders: what blocks keep, time, and the largest batch.

    Attributes
    ----------
    encoders : sequence of PlannedEncoder
        The rows; at least one, all of the same training.
    at_hand : GpuAtHand or None
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
    at_hand: GpuAtHand | None = None

    @property
    def sources(self) -> dict[str, str]:
        """What is published, predicted or counted, estimated, and computed."""
        encoder, at_hand = self.encoders[0], self.at_hand
        training = encoder.model.training
        assert training.card_bytes is not None
        gpu = f"GPU: {_shared_out(training.card_bytes)}; none was tried."
        if at_hand is not None:
            total = card_text(at_hand.total_bytes)
            gpu = f"Free of {total} on {at_hand.name}: {_shared_out(training.card_bytes)}."
        return {
            "published": "Published, not reproduced here: EER on Vox1-H, batch, GPUs.",
            "card": gpu,
            "plan": f"GiB: utterances of {training.frames} frames, "
            f"{training.optimizer_bits}-bit states, classifier; missing: beyond what is left.",
            "modes": f"{_JOIN} -: not a mode of this encoder.",
            "time": f"Estimated for {encoder.speed}. days: {EPOCHS} epochs of VoxCeleb2.",
            "batch": "Computed batch: fits, and a larger one may. GPUs: for a batch of "
            f"{TOTAL_BATCH}, as computed or if stored.",
        }

    def _tables(self) -> Sequence[Table[PlannedEncoder]]:
        training = self.encoders[0].model.training
        published, computed = "published", "computed"
        plan = f"plan for batch {training.batch}, float32"
        time = "estimated time"
        # Elsewhere published batches and numbers of GPUs compare with nothing.
        compares = as_published(training)

        def blocks(mode: str, encoder: PlannedEncoder) -> int | None:
            own = encoder.model.planned_modes
            return encoder.mode_counts.get(mode, 0) if mode in own else None

        columns: list[Column[PlannedEncoder]] = [
            Column("", "encoder", "model.row.name", "name", is_words=True),
            _in_json("model.row.family", "family"),
            _in_json("model.row.type", "type"),
            Column("", "M params", "model.parameters", "parameters", _millions, 1),
            Column(published, "EER", "model.row.vox1_h_eer", _EER_KEY, ".2f", 7),
            _in_json("model.row.published_memory_gb", _GB_KEY),
            Column(published, "batch" if compares else None,
                   "model.row.published_max_batch_11gb", _BATCH_KEY, importance=2),
            Column(published, "GPUs" if compares else None, _published_cards,
                   f"published.cards_of_11_gib_for_{TOTAL_BATCH}", importance=2),
            _in_json(lambda e: not e.lacking_bytes, "plan.fits"),
            Column(plan, "GiB", "needed_bytes", "computed.needed_bytes", _gib),
            Column(plan, "missing", "lacking_bytes", "computed.lacking_bytes", _size, 9),
            Column(plan, "GiB is", _how, "plan.peak", importance=3, is_words=True),
            *_for_modes(plan, blocks, "plan.blocks.{mode}", modes=PLANNED),
            _in_json("modes", "plan.modes"),
            _in_json("stages", "plan.stages"),
            Column(plan, "channels", "channels", "plan.channels", _first, 4),
            _in_json("chunk_bytes", "plan.chunk_bytes"),
            _in_json("predicted_bytes", "predicted.step_peak_bytes"),
            _in_json("counted_bytes", "counted.step_peak_bytes"),
            _in_json("seconds", "predicted.seconds"),
            Column(time, "/ stored", "times_stored", "predicted.times_stored", ".2f", 5),
            Column(time, f"/ {BASELINE}", "times_baseline",
                   f"predicted.times_{BASELINE}_stored", ".2f", 2),
            Column(time, "utt./s", "utterances_per_second",
                   "predicted.utterances_per_second", ".1f", 8),
            Column(time, "days", "days", "predicted.training_days", ".1f", 8),
            Column(computed, "batch", "largest_batch", "computed.largest_batch",
                   importance=6),
            *_for_modes("", lambda mode, e: e.model.largest_batch(mode),
                        "computed.largest_batch_by_mode.{mode}", shown=False),
            Column(computed, "GPUs", "cards", f"computed.cards_for_{TOTAL_BATCH}",
                   importance=2),
            Column(computed, "if stored", "cards_stored",
                   f"computed.cards_for_{TOTAL_BATCH}_stored", importance=1),
        ]  # fmt: skip
        return [Table(columns, self.encoders)]

    def _remarks(self) -> Iterable[str]:
        """Name, for one encoder, what each of its blocks does."""
        if len(self.encoders) > 1:
            return []
        (encoder,) = self.encoders
        pieces = _pieces(encoder) if encoder.model.row.reversible else []
        return [*encoder.stages, *pieces]

    def _document(self) -> dict[str, Any]:
        training, at_hand = self.encoders[0].model.training, self.at_hand
        return {
            "counted_with": counted_with(),
            "speed": asdict(self.encoders[0].speed),
            "training": {
                "batch": training.batch,
                "card_name": None if at_hand is None else at_hand.name,
                **_plain_training(training),
            },
            "encoders": self._tables()[0].plain(),
        }


def _pieces(encoder: PlannedEncoder) -> list[str]:
    """Name the channels that blocks work on at a time, and the bytes of them."""
    if encoder.chunk_bytes is None:
        return ["blocks work on all channels at once (chunk null)"]
    return [
        f"blocks work on {_first(encoder.channels)} channels at a time in the first stage "
        f"(chunk {encoder.chunk_bytes}: bytes of so many where a step holds most)"
    ]


def _how(encoder: PlannedEncoder) -> str:
    return "predicted" if encoder.counted_bytes is None else "counted"


def _published_cards(encoder: PlannedEncoder) -> int | None:
    row = TABLE_SEVEN.get(encoder.model.row.name)
    return None if row is None else row.cards


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
            "card": f"GPU: {_shared_out(training.card_bytes)}; none was tried.",
            "plan": f"Plan: the fastest with which utterances of {training.frames} frames "
            "in float32 fit. Peak: predicted on meta tensors, "
            f"{training.optimizer_bits}-bit states and classifier included.",
            "modes": _JOIN,
            "time": f"{time} With the optimizer's {1e3 * swept.sweep.other_seconds:.3g} ms, "
            "without classifier and reading.",
        }

    def _tables(self) -> Sequence[Table[BatchPlan]]:
        sweep = self.swept.sweep
        rate, blocks, best = "utterances / s", "plan", sweep.best

        def planned(name: str) -> Callable[[BatchPlan], Any]:
            return lambda plan: getattr(plan, name) if plan.modes else None

        def share(plan: BatchPlan) -> float | None:
            known = plan.samples_per_second / best.samples_per_second
            return known if plan.modes else None

        def count(mode: str, plan: BatchPlan) -> int | None:
            return list(plan.modes.values()).count(mode) if plan.modes else None

        columns: list[Column[BatchPlan]] = [
            Column("", "batch", "batch", "batch"),
            _in_json("timed_batch", "timed_batch"),
            Column(rate, "number", planned("samples_per_second"),
                   "utterances_per_second", ".1f"),
            Column(rate, "of best", share, "share_of_best", ".3f", 3),
            _in_json(planned("seconds"), "step_seconds"),
            Column("peak", "GiB", planned("predicted_bytes"), "needed_bytes", _gib, 5),
            *_for_modes(blocks, count, "blocks.{mode}", importance=4, modes=sweep.times),
            _in_json("modes", "modes"),
            Column(blocks, "channels", lambda p: list(p.channels or ()), "channels",
                   _first, 1),
            Column(" ", "", lambda p: _remark(p, best), "remark", importance=2,
                   is_words=True),
        ]  # fmt: skip
        return [Table(columns, sweep.plans)]

    def _remarks(self) -> Iterable[str]:
        best, *others = str(self.swept.sweep).splitlines()
        if self.swept.sweep.untried:
            others[0] += ": widen --batches"
        return [best, *others]

    def _document(self) -> dict[str, Any]:
        swept, sweep = self.swept, self.swept.sweep
        parts = ("fixed_seconds", "worst_deviation")
        return {
            "encoder": swept.row.name,
            "training": _plain_training(swept.training),
            "times": {
                "device": swept.device,
                "how": sweep.about["seconds"],
                "speed": None if swept.device else asdict(swept.speed),
                "optimizer_seconds": sweep.other_seconds,
                "linear_in_the_batch": {
                    mode: _taken(time, *parts, utterance_seconds="sample_seconds")
                    for mode, time in sweep.times.items()
                },
            },
            "best_batch": sweep.best.batch,
            **_taken(sweep, "infeasible_batch", "out_of_memory"),
            "batches": self._tables()[0].plain(),
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
            kinds["fits"] = f"Fits: whether the total fits {_shared_out(card_bytes)}."
        if cases[-1].speed is not None:
            kinds["plan"] = (
                f"Plan: how many blocks {' / '.join(cases[-1].blocks)}, the fastest that "
                "fit or the lightest. Times: predicted from counts of operations for "
                f"{cases[-1].speed}."
            )
        return kinds

    def _tables(self) -> Sequence[Table[Any]]:
        card = self.card_bytes
        rows = [
            (word if len(cases) > 1 else "", case)
            for cases in self.encoders
            for word, case in zip(("before", "after"), cases, strict=False)
        ]
        stages = [_stages_table(case) for _, case in rows if case.stages]
        columns: list[Column[tuple[str, EncoderBreakdown]]] = [
            Column("", "encoder", lambda row: row[1].name, "name", is_words=True),
            Column("", "", lambda row: row[0], "setting", is_words=True),
            Column("", "mode", lambda row: _taken(row[1], "mode", "blocks"), "",
                   lambda value: _mode(**value), is_words=True),
            Column("", "optimizer",
                   lambda row: _taken(row[1], "optimizer_name", "optimizer_bits"), "",
                   lambda value: "{} {} bit".format(*value.values()), 4, is_words=True),
            _in_json(lambda row: _taken(row[1], "classes", "how"), ""),
            *(_part_column(part) for part in rows[0][1].report.parts),
            _in_json(
                lambda row: _taken(row[1].report, "device", "input_shape", "precision"),
                "report",
            ),
            Column("total", "GiB", lambda row: row[1].report.total_bytes, "total_bytes",
                   lambda size: f"{size / GIB:.3f}"),
            _in_json(lambda row: row[1].speed and asdict(row[1].speed),
                     "speed"),
        ]  # fmt: skip
        if card is not None:
            columns.append(
                Column("fits", "", lambda row: row[1].fits(card), "fits", _yes_or_no)
            )
        if stages:
            # The last row of each table has the sums.
            columns.append(
                _in_json(lambda row: _stages_table(row[1]).plain()[:-1], "stages")
            )
        return [Table(columns, rows), *stages]

    def _remarks(self) -> Iterable[str]:
        return [saved(*cases) for cases in self.encoders if len(cases) > 1]

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"counted_with": counted_with()}
        if (card := self.card_bytes) is not None:
            document |= {"card_bytes": card, "reserve_bytes": reserve_of(card)}
        document["breakdowns"] = self._tables()[0].plain()
        return document


def saved(before: EncoderBreakdown, after: EncoderBreakdown) -> str:
    """Describe what mode and bits save, each on its own and as part of the whole.

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

    def value(row: tuple[str, EncoderBreakdown]) -> dict[str, float]:
        report = row[1].report
        return {
            f"{part}_bytes": report.parts[part],
            f"{part}_share": report.share(part),
        }

    def text(value: dict[str, float]) -> str:
        size, share = value.values()
        return f"{size / unit_bytes:.{digits}f} {share:5.1%}"

    return Column(title, unit, value, "report", text, importance)


def _mode(mode: str, blocks: Mapping[str, int]) -> str:
    if mode in MODES:
        return mode
    return f"{mode} {'/'.join(map(str, blocks.values()))}"


def _stages_table(case: EncoderBreakdown) -> Table[StageMemory]:
    """Show what each stage takes; the last row has the sums, for the peak the largest."""

    def peak(stage: StageMemory) -> dict[str, Any]:
        # The classifier has no part in the step, and its row no peak of its own.
        takes_part = bool(stage.held_bytes or stage.working_bytes)
        return {"peak_bytes": stage.peak_bytes, "takes_part": takes_part}

    def peak_text(value: dict[str, Any]) -> str:
        return _size(value["peak_bytes"]) if value["takes_part"] else "-"

    def size(
        group: str, head: str, name: str, importance: float
    ) -> Column[StageMemory]:
        return Column(group, head, name, name, _size, importance)

    columns: list[Column[StageMemory]] = [
        Column("", "stage", "name", "name", is_words=True),
        *_for_modes("blocks", lambda mode, stage: stage.blocks.get(mode, 0),
                    "blocks.{mode}", lambda count: str(count or ""), 3),
        size("activations", "held", "held_bytes", 4),
        size("activations", "working", "working_bytes", 4),
        Column("activations", "peak", peak, "", peak_text),
        size("parameters", "weights", "weights_bytes", 2),
        size("parameters", "gradients", "gradients_bytes", 1),
        size("parameters", "states", "optimizer_states_bytes", 2),
    ]  # fmt: skip
    optimizer = f"{case.optimizer_name} {case.optimizer_bits} bit"
    title = f"{case.name}, {case.mode}, {optimizer}:"
    return Table(columns, [*case.stages, case.all_stages()], title)


def _size(size_bytes: int) -> str:
    return size_text(size_bytes) if size_bytes else "-"
