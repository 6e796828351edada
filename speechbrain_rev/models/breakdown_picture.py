"""Breakdowns as a picture, as Figure 1 of the paper has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.models.breakdown_render import Cases
from speechbrain_rev.models.picture import check_png
from speechbrain_rev.models.table_one import GB, reproduced
from speechbrain_rev.plots import PartsBar, memory_parts


def draw_breakdowns(encoders: Sequence[Cases], path: str | Path) -> None:
    """Draw where the memory of a training step goes, before and after.

    Parameters
    ----------
    encoders : sequence of Cases
        For each encoder its breakdowns; at least one, all of the same batch.
    path : str or pathlib.Path
        The PNG file to write.

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
    batch, frames, _ = encoders[0][0].report.input_shape
    memory_parts(
        [
            PartsBar(
                case.name,
                f"{case.mode}, {case.optimizer_name} {case.optimizer_bits} bit",
                case.report.parts,
            )
            for cases in encoders
            for case in cases
        ],
        path,
        title=f"Memory of a training step of {batch} utterances of {frames} frames",
        source="Counted on meta tensors, float32, encoder and classifier. Parts do not "
        "all peak at once. No card was tried.",
    )


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
