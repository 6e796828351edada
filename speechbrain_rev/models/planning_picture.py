"""Planned encoders as a picture, as Figures 5 and 6 of the paper have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.models.counts import SECONDS
from speechbrain_rev.models.picture import check_png
from speechbrain_rev.models.planning import PlannedEncoder
from speechbrain_rev.models.published import FRAMES, TOTAL_BATCH, as_published
from speechbrain_rev.plots import SizedEncoder, by_parameters
from speechbrain_rev.sizes import card_text


def draw_plans(encoders: Sequence[PlannedEncoder], path: str | Path) -> None:
    """Draw memory for an utterance, and the largest batch, against parameters.

    Parameters
    ----------
    encoders : sequence of PlannedEncoder
        At least one, all of the same training.
    path : str or pathlib.Path
        The PNG file to write.

    Raises
    ------
    ValueError
        If the file's name does not end in .png.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.models import Training
    >>> from speechbrain_rev.models.planning import plan_encoders
    >>> training = Training(11 * 2**30, batch=128, frames=200)
    >>> encoders = plan_encoders(training, names=["resnet34"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_plans(encoders, os.path.join(folder, "plan.png"))
    """
    check_png(path)
    training = encoders[0].model.training
    assert training.card_bytes is not None
    by_parameters(
        [_sized(encoder) for encoder in encoders],
        path,
        title=f"Training steps of {training.batch} utterances of "
        f"{SECONDS[training.frames]} s as planned for "
        f"{card_text(training.card_bytes)}, "
        "and the batch that fits there at least",
        source=f"Memory on meta tensors, float32: bars counted, marks "
        f"{_how(encoders)}; where there is none, no plan fits. Batch computed, for the "
        f"lightest mode at the default chunk; line: {TOTAL_BATCH} on one card. Crosses: "
        "published, batches for 11 GiB. No card was tried.",
        total_batch=TOTAL_BATCH,
    )


def _how(encoders: Sequence[PlannedEncoder]) -> str:
    counted = all(encoder.counted_bytes is not None for encoder in encoders)
    return "counted" if counted else "predicted"


def _sized(encoder: PlannedEncoder) -> SizedEncoder:
    model = encoder.model
    row, training = model.row, model.training
    sizes = {mode: model.step_peak_bytes(mode) for mode in model.modes}
    same_length = training.frames == FRAMES
    return SizedEncoder(
        row.name,
        row.family,
        row.type,
        row.parameters,
        lightest_bytes=min(sizes.values()) / training.batch,
        stored_bytes=sizes["store"] / training.batch,
        planned_bytes=None
        if encoder.lacking_bytes
        else encoder.step_bytes / training.batch,
        largest_batch=encoder.largest_batch or None,
        published_bytes=row.published_memory_gb * 1e9 if same_length else None,
        published_batch=row.published_max_batch_11gb
        if as_published(training)
        else None,
    )
