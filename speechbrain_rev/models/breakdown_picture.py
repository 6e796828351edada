"""Breakdowns as a picture, as Figure 1 of the paper has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.models.breakdown import PREDICTED, EncoderBreakdown
from speechbrain_rev.models.breakdown_render import Cases
from speechbrain_rev.models.picture import check_png
from speechbrain_rev.models.stages import StageMemory
from speechbrain_rev.models.table_one import reproduced
from speechbrain_rev.plots import PartsBar, memory_parts
from speechbrain_rev.sizes import GB, card_text


def draw_breakdowns(
    encoders: Sequence[Cases], path: str | Path, card_bytes: int | None = None
) -> None:
    """Draw where the memory of a training step goes, before and after.

    Parameters
    ----------
    encoders : sequence of Cases
        For each encoder its breakdowns; at least one, all of the same batch.
    path : str or pathlib.Path
        The PNG file to write.
    card_bytes : int or None
        Memory of the card that blocks were planned for.

    Raises
    ------
    ValueError
        If the file's name does not end in .png.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.models.breakdown import before_and_after
    >>> encoders = [before_and_after("revnet57", batch=64, frames=200)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_breakdowns(encoders, os.path.join(folder, "memory.png"))
    """
    check_png(path)
    memory_parts(
        [
            PartsBar(case.name, _setting(case), case.report.parts)
            for cases in encoders
            for case in cases
        ],
        path,
        title=f"Memory of a training step of {_step(encoders, card_bytes)}",
        source=f"{_how(encoders)} on meta tensors, float32, encoder and classifier. Parts "
        "do not all peak at once. No card was tried.",
    )


def draw_stages(
    encoders: Sequence[Cases], path: str | Path, card_bytes: int | None = None
) -> None:
    """Draw where in an encoder the memory of a training step is, a bar for each stage.

    Parameters
    ----------
    encoders : sequence of Cases
        For each encoder its breakdowns with stages; at least one, all of the same batch.
    path : str or pathlib.Path
        The PNG file to write.
    card_bytes : int or None
        Memory of the card that blocks were planned for.

    Raises
    ------
    ValueError
        If the file's name does not end in .png.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.models.breakdown import before_and_after
    >>> encoders = [before_and_after("resnet34", batch=64, frames=200, stages=True)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_stages(encoders, os.path.join(folder, "stages.png"))
    """
    check_png(path)
    bars = []
    for case in (case for cases in encoders for case in cases):
        group = f"{case.name}, {_setting(case)}"
        bars += [PartsBar(group, stage.name, _parts(stage)) for stage in case.stages]
    memory_parts(
        [bar for bar in bars if bar.total],
        path,
        title=f"Memory by stages, in a training step of {_step(encoders, card_bytes)}",
        source=f"{_how(encoders)} on meta tensors, float32. Held: from forward to backward pass. "
        "Working: the most in either, above what\nthe stage and all before it hold; stages "
        "do not work at once. No card was tried.",
    )


def _step(encoders: Sequence[Cases], card_bytes: int | None) -> str:
    batch, frames, _ = encoders[0][0].report.input_shape
    step = f"{batch} utterances of {frames} frames"
    if card_bytes is not None:
        step += f", planned for {card_text(card_bytes)}"
    return step


def _how(encoders: Sequence[Cases]) -> str:
    hows = {case.how for cases in encoders for case in cases}
    return "Counted, and predicted for plans," if PREDICTED in hows else "Counted"


def _setting(case: EncoderBreakdown) -> str:
    return f"{case.mode}, {case.optimizer_name} {case.optimizer_bits} bit"


def _parts(stage: StageMemory) -> dict[str, float]:
    return {
        # Where nothing more is kept than by the stage before, less can be.
        "held": max(0, stage.held_bytes),
        "working": stage.working_bytes,
        "optimizer_states": stage.optimizer_states_bytes,
        "weights": stage.weights_bytes,
        "gradients": stage.gradients_bytes,
    }


def draw_table_one(path: str | Path) -> None:
    """Draw Table I of the paper beside what is counted here, as its Figure 1 does.

    Parameters
    ----------
    path : str or pathlib.Path
        The PNG file to write.

    Raises
    ------
    ValueError
        If the file's name does not end in .png.

    Examples
    --------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_table_one(os.path.join(folder, "table_one.png"))
    """
    check_png(path)
    bars = []
    for column, ours in reproduced():
        group = f"{column.name}, batch {column.batch}"
        published = {part: size * GB for part, size in column.parts_gb.items()}
        bars.append(PartsBar(group, "published", published))
        bars.append(PartsBar(group, "counted", ours.report.parts))
    memory_parts(
        bars,
        path,
        title="Memory of a training step: Table I of the paper, and counted here",
        unit="GB",
        source="Published: a 2080 Ti, gradients not named, others are the framework's. "
        "Counted: meta tensors, float32, 200 frames, others are the batch.",
    )
