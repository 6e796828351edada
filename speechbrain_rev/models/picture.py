"""The table as a picture: memory against error rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.models.counts import SECONDS, counted_with
from speechbrain_rev.models.table import Model
from speechbrain_rev.plots import EncoderPoint, encoder_map
from speechbrain_rev.sizes import GIB

#: Cards that have a line whatever was asked: a 2080 Ti's size, and a 3090's.
CARD_BYTES = (11 * GIB, 24 * GIB)


def draw(models: Sequence[Model], path: str | Path) -> None:
    """Draw the counted peak of a training step against the published Vox1-H EER.

    Parameters
    ----------
    models : sequence of Model
        The encoders; at least one, all of the same training.
    path : str or pathlib.Path
        The PNG file to write.

    Raises
    ------
    ValueError
        If the file's name does not end in .png.

    Examples
    --------
    >>> import os, tempfile
    >>> from speechbrain_rev.models import Training, select
    >>> models = select(Training(None, batch=128, frames=200), families=["resnet"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw(models, os.path.join(folder, "models.png"))
    """
    check_png(path)
    training = models[0].training
    asked = () if training.card_bytes is None else (training.card_bytes,)
    cards = {
        size: dataclasses.replace(training, card_bytes=size).reserve_bytes
        for size in sorted({*CARD_BYTES, *asked})
    }
    encoder_map(
        [_point(model) for model in models],
        path,
        title=f"Memory of a training step of {training.batch} utterances of "
        f"{SECONDS[training.frames]} s, against accuracy",
        eer_label="published Vox1-H EER, %",
        memory_label="counted peak of a training step, GiB",
        source="EER as published, not reproduced. Memory counted on meta tensors, "
        f"float32, torch {counted_with()['torch']}. Shaded: kept free for what CUDA "
        "takes. No card was tried.",
        cards=cards,
    )


def check_png(path: str | Path) -> None:
    """Refuse a name of a picture that does not end in .png.

    Parameters
    ----------
    path : str or pathlib.Path
        The name.

    Raises
    ------
    ValueError
        If it ends otherwise.

    Examples
    --------
    >>> check_png("models.png")
    """
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"--plot takes a name that ends in .png, not {path}.")


def _point(model: Model) -> EncoderPoint:
    row = model.row
    return EncoderPoint(
        row.name,
        row.family,
        row.type,
        row.vox1_h_eer,
        model.step_peak_bytes(model.row.default_mode),
        row.counterpart,
        None if row.reversible else model.step_peak_bytes("recompute"),
    )
