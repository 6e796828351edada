"""Encoders, sweeps and breakdowns as pictures: png, pdf or svg, by a file's ending."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechbrain_rev.catalog.counts import counted_with
from speechbrain_rev.catalog.table import ListedEncoder
from speechbrain_rev.plots import (
    EncoderPoint,
    PartsBar,
    encoder_map,
    memory_parts,
    plan_map,
)
from speechbrain_rev.sizes import GIB, card_text, reserve_of

if TYPE_CHECKING:
    from speechbrain_rev.catalog.breakdown import Cases, EncoderBreakdown, StageMemory
    from speechbrain_rev.catalog.plans import SweptEncoder

#: GPUs that have a line whatever was asked: a 2080 Ti's size, and a 3090's.
CARD_BYTES = (11 * GIB, 24 * GIB)

_ENDINGS = (".png", ".pdf", ".svg")


def check_picture(path: str | Path, option: str = "--plot") -> None:
    """Refuse a name of a picture of another format than those that are drawn.

    Parameters
    ----------
    path : str or pathlib.Path
        The name.
    option : str
        What takes it.

    Raises
    ------
    ValueError
        If it ends neither in .png, .pdf nor .svg.

    Examples
    --------
    >>> check_picture("models.png")
    >>> check_picture("models.jpg")
    Traceback (most recent call last):
    ValueError: --plot takes a name that ends in .png, .pdf or .svg, not models.jpg.
    """
    if Path(path).suffix.lower() not in _ENDINGS:
        raise ValueError(
            f"{option} takes a name that ends in {', '.join(_ENDINGS[:-1])} or "
            f"{_ENDINGS[-1]}, not {path}."
        )


def draw_models(models: Sequence[ListedEncoder], path: str | Path) -> None:
    """Draw the counted peak of a training step against the published Vox1-H EER.

    Parameters
    ----------
    models : sequence of ListedEncoder
        The encoders, all of the same training. Those of which nothing was counted or
        published are left out.
    path : str or pathlib.Path
        The file to write.

    Raises
    ------
    ValueError
        If no encoder is left to be drawn, or the file's ending is none of a picture.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.catalog import Training, select
    >>> models = select(Training(None, batch=128, frames=200), families=["resnet"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_models(models, os.path.join(folder, "models.png"))
    """
    training = models[0].training
    asked = () if training.card_bytes is None else (training.card_bytes,)
    points = [point for model in models if (point := _point(model)) is not None]
    encoder_map(
        points,
        path,
        title=f"Memory of a training step of {training.batch} utterances of "
        f"{training.frames / 100:g} s, against accuracy",
        eer_label="published Vox1-H EER, %",
        memory_label="counted peak of a training step, GiB",
        source="EER as published, not reproduced. Memory counted on meta tensors, "
        f"float32, torch {counted_with()['torch']}. Shaded: reserved for CUDA "
        "and fragmentation. No GPU was tried.",
        cards={size: reserve_of(size) for size in sorted({*CARD_BYTES, *asked})},
    )


def _point(model: ListedEncoder) -> EncoderPoint | None:
    row = model.row
    rate, peak = row.vox1_h_eer, model.step_peak_bytes(row.default_mode)
    if rate is None or peak is None:
        return None
    recomputed = None if row.reversible else model.step_peak_bytes("recompute")
    return EncoderPoint(
        row.name, row.family, row.type, rate, peak, row.counterpart, recomputed
    )


def draw_sweep(swept: SweptEncoder, path: str | Path) -> None:
    """Draw the mode of each block against the batch, and the throughput below.

    Parameters
    ----------
    swept : SweptEncoder
        The encoder with its plans.
    path : str or pathlib.Path
        The file to write.

    Raises
    ------
    ValueError
        If the file's ending is none of a picture.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.architectures import architecture
    >>> from speechbrain_rev.catalog import Training
    >>> from speechbrain_rev.catalog.plans import sweep_encoder
    >>> training = Training(4 * GIB, batch=1, frames=200)
    >>> swept = sweep_encoder(architecture("resnet34"), training, [8, 16])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_sweep(swept, os.path.join(folder, "sweep.png"))
    """
    sweep, training = swept.sweep, swept.training
    assert training.card_bytes is not None
    words = [
        f"Memory predicted on meta tensors, float32; seconds {sweep.about['seconds']}, "
        f"torch {sweep.about['torch']}. Plans were not run."
    ]
    if sweep.infeasible_batch is not None:
        words.append(f"No plan fits batch {sweep.infeasible_batch}.")
    if sweep.out_of_memory:
        missing = ", ".join(map(str, sweep.out_of_memory))
        words.append(f"White: too little memory to time it, at {missing}.")
    plan_map(
        {plan.batch: plan.modes for plan in sweep.plans},
        {plan.batch: plan.samples_per_second for plan in sweep.plans if plan.modes},
        path,
        title=f"{swept.row.name}: the fastest plan of each batch of "
        f"{training.frames / 100:g} s utterances on {card_text(training.card_bytes)}",
        source=" ".join(words),
    )


def draw_breakdowns(encoders: Sequence[Cases], path: str | Path) -> None:
    """Draw where the memory of a training step goes, before and after.

    Parameters
    ----------
    encoders : sequence of Cases
        For each encoder its breakdowns; at least one, all of the same batch.
    path : str or pathlib.Path
        The file to write.

    Raises
    ------
    ValueError
        If the file's ending is none of a picture.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.catalog.breakdown import before_and_after
    >>> encoders = [before_and_after("revnet46", batch=64, frames=200)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_breakdowns(encoders, os.path.join(folder, "memory.png"))
    """
    memory_parts(
        [
            PartsBar(case.name, _setting(case), case.report.parts)
            for cases in encoders
            for case in cases
        ],
        path,
        title=f"Memory of a training step of {_step(encoders)}",
        source="Counted on meta tensors, float32, encoder and classifier. Parts "
        "do not all peak at once. No GPU was tried.",
    )


def draw_stages(encoders: Sequence[Cases], path: str | Path) -> None:
    """Draw where in an encoder the memory of a training step is, a bar for each stage.

    Parameters
    ----------
    encoders : sequence of Cases
        For each encoder its breakdowns with stages; at least one, all of the same batch.
    path : str or pathlib.Path
        The file to write.

    Raises
    ------
    ValueError
        If the file's ending is none of a picture.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.catalog.breakdown import before_and_after
    >>> encoders = [before_and_after("resnet34", batch=64, frames=200, stages=True)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_stages(encoders, os.path.join(folder, "stages.png"))
    """
    bars = []
    for case in (case for cases in encoders for case in cases):
        group = f"{case.name}, {_setting(case)}"
        bars += [PartsBar(group, stage.name, _parts(stage)) for stage in case.stages]
    memory_parts(
        [bar for bar in bars if bar.total],
        path,
        title=f"Memory by stages, in a training step of {_step(encoders)}",
        source="Counted on meta tensors, float32. Held: from forward to backward "
        "pass. Working: the most in either, above what the stage and all before it hold; "
        "stages do not work at once. No GPU was tried.",
    )


def _step(encoders: Sequence[Cases]) -> str:
    batch, frames, _ = encoders[0][0].report.input_shape
    return f"{batch} utterances of {frames} frames"


def _setting(case: EncoderBreakdown) -> str:
    return f"{case.mode}, {case.optimizer_name} {case.optimizer_bits} bit"


def _parts(stage: StageMemory) -> dict[str, float]:
    return {
        # A stage that stores nothing may hold less than the one before it.
        "held": max(0, stage.held_bytes),
        "working": stage.working_bytes,
        "optimizer_states": stage.optimizer_states_bytes,
        "weights": stage.weights_bytes,
        "gradients": stage.gradients_bytes,
    }
