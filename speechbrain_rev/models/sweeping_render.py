"""A sweep over batch sizes as text and as JSON, each figure marked as what it is."""

from __future__ import annotations

import json
import textwrap

from speechbrain_rev.models.calibration import speed_text
from speechbrain_rev.models.card import CLASSES, RESERVE_BYTES, RESERVE_SHARE
from speechbrain_rev.models.columns import CHUNK_NOTE, Column, aligned, chunk_text
from speechbrain_rev.models.sweeping import SweptEncoder
from speechbrain_rev.planner.sweep import BatchPlan
from speechbrain_rev.planner.timing import Speed
from speechbrain_rev.reversible import Mode
from speechbrain_rev.sizes import GIB, card_text, size_text

_WIDTH = 120


def as_text(swept: SweptEncoder) -> str:
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
    >>> from speechbrain_rev.architectures import architecture
    >>> from speechbrain_rev.models import Training
    >>> from speechbrain_rev.models.sweeping import sweep_encoder
    >>> training = Training(4 * GIB, batch=1, frames=200)
    >>> swept = sweep_encoder(architecture("resnet34"), training, [8, 16])
    >>> as_text(swept).splitlines()[2].split()[0], swept.sweep.best.batch
    ('8', 16)
    """
    notes = [textwrap.fill(note, _WIDTH) for note in sources(swept).values()]
    table = aligned(_columns(swept), swept.sweep.plans)
    return "\n".join([*table, "", str(swept.sweep), "", *notes, ""])


def as_json(swept: SweptEncoder) -> str:
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
    >>> from speechbrain_rev.architectures import architecture
    >>> from speechbrain_rev.models import Training
    >>> from speechbrain_rev.models.sweeping import sweep_encoder
    >>> training = Training(4 * GIB, batch=1, frames=200)
    >>> swept = sweep_encoder(architecture("resnet34"), training, [8, 16])
    >>> json.loads(as_json(swept))["best_batch"]
    16
    """
    found, training = swept.sweep, swept.training
    document = {
        "sources": sources(swept),
        "encoder": swept.row.name,
        "training": {
            "frames": training.frames,
            "precision": "float32",
            "card_bytes": training.card_bytes,
            "reserve_bytes": training.reserve_bytes,
            "optimizer_state_bits": training.optimizer_bits,
            "classes": CLASSES,
        },
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
                "needed_bytes": plan.predicted_bytes,
                "modes": dict(plan.modes),
                "channels": list(swept.channels.get(plan.batch, ())),
                "not_timed_needed_bytes": swept.refused_bytes.get(plan.batch),
            }
            for plan in found.plans
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def sources(swept: SweptEncoder) -> dict[str, str]:
    """Say what each kind of figure is.

    Parameters
    ----------
    swept : SweptEncoder
        The encoder with its plans.

    Returns
    -------
    dict of str to str
        Sentences by what they are about.
    """
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
            f"Times: {swept.sweep.about['seconds']}, of a shallow encoder of the kind at "
            "each batch, and of the optimizer; those of the whole one follow. Plans were "
            "not run."
        )
    return {
        "card": f"A card of {card_text(training.card_bytes)}; "
        f"{training.reserve_bytes / GIB:.2f} GiB stay free: {RESERVE_BYTES / GIB:g} GiB and "
        f"{RESERVE_SHARE:g} of it are assumed for CUDA, workspaces and fragmentation.",
        "plan": "Each batch has its own plan: the fastest modes of all blocks with which "
        f"utterances of {training.frames} frames in float32 fit. GiB: the peak of the "
        "encoder's step, predicted from a shallow encoder on meta tensors, with weights, "
        f"gradients, states of {training.optimizer_bits} bit, a classifier of {CLASSES} and "
        f"the input. store, recompute, reconstruct: blocks of each mode. {CHUNK_NOTE}",
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


def _columns(swept: SweptEncoder) -> list[Column[BatchPlan]]:
    best = swept.sweep.best
    speed, blocks = "utterances / s", "plan"

    def if_planned(text: str, plan: BatchPlan) -> str:
        return text if plan.modes else "-"

    def count(mode: Mode) -> Column[BatchPlan]:
        def cell(plan: BatchPlan) -> str:
            return if_planned(str(list(plan.modes.values()).count(mode.value)), plan)

        return Column(blocks, mode.value, cell)

    return [
        Column("", "batch", lambda p: str(p.batch)),
        Column(speed, "number", lambda p: if_planned(f"{p.samples_per_second:.1f}", p)),
        Column(
            speed,
            "of best",
            lambda p: if_planned(
                f"{p.samples_per_second / best.samples_per_second:.3f}", p
            ),
        ),
        *(count(mode) for mode in Mode if mode.value in swept.sweep.times),
        Column(
            blocks,
            "chunk",
            lambda p: if_planned(chunk_text(swept.channels.get(p.batch, [None])), p),
        ),
        Column(
            "peak", "GiB", lambda p: if_planned(f"{p.predicted_bytes / GIB:.2f}", p)
        ),
        Column(" ", "", lambda p: _remark(p, swept)),
    ]


def _remark(plan: BatchPlan, swept: SweptEncoder) -> str:
    if plan.batch in swept.refused_bytes:
        needed = size_text(swept.refused_bytes[plan.batch])
        return f"not timed: it needs {needed}, which this machine has not got free"
    if not plan.modes:
        return "memory ran out while it was timed"
    return "best" if plan.batch == swept.sweep.best.batch else ""
