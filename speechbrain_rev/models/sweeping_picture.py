"""A sweep as a picture, as Figure 4 of Jiang et al.: which block keeps what, by batch."""

from __future__ import annotations

import textwrap
from pathlib import Path

from speechbrain_rev.models.counts import SECONDS
from speechbrain_rev.models.picture import check_png
from speechbrain_rev.models.sweeping import SweptEncoder
from speechbrain_rev.plots import plan_map
from speechbrain_rev.sizes import GIB

_WIDTH = 112


def draw_sweep(swept: SweptEncoder, path: str | Path) -> None:
    """Draw the mode of each block against the batch, and the throughput below.

    Parameters
    ----------
    swept : SweptEncoder
        The encoder with its plans.
    path : str or pathlib.Path
        The PNG file to write.

    Raises
    ------
    ValueError
        If the file's name does not end in .png.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.architectures import architecture
    >>> from speechbrain_rev.models import Training
    >>> from speechbrain_rev.models.sweeping import sweep_encoder
    >>> training = Training(4 * GIB, batch=1, frames=200)
    >>> swept = sweep_encoder(architecture("resnet34"), training, [8, 16])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_sweep(swept, os.path.join(folder, "sweep.png"))
    """
    check_png(path)
    found, training = swept.sweep, swept.training
    assert training.card_bytes is not None
    speeds = {p.batch: p.samples_per_second for p in found.plans if p.modes}
    plan_map(
        {plan.batch: plan.modes for plan in found.plans},
        speeds,
        path,
        title=f"{swept.row.name}: the fastest plan of each batch of "
        f"{SECONDS[training.frames]} s utterances on {training.card_bytes / GIB:.4g} GiB",
        source=textwrap.fill(_source(swept), _WIDTH),
    )


def _source(swept: SweptEncoder) -> str:
    found = swept.sweep
    end = (
        ""
        if found.infeasible_batch is None
        else f" No plan fits batch {found.infeasible_batch}."
    )
    missing = (
        f" White: too little memory to time it, at {_listed(found.out_of_memory)}."
        if found.out_of_memory
        else ""
    )
    return (
        f"Memory predicted on meta tensors, float32; seconds {found.about['seconds']}, "
        f"torch {found.about['torch']}. Plans were not run.{end}{missing}"
    )


def _listed(batches: list[int]) -> str:
    return ", ".join(map(str, batches))
