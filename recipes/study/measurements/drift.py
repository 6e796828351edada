"""How far two trainings of one seed come apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measurements.rebuilt import Rebuilt, place_of

#: What makes a second run another training, whatever the states of its optimizer.
_SAME_TRAINING = ("seed", "arch", "widths", "blocks", "n_mels", "embedding_dim")


def drift(
    folder: str | Path, other: str | Path, *, device: torch.device | str = "cpu"
) -> list[dict[str, Any]]:
    """Measure how far the weights of two runs of one seed are apart after each epoch.

    Both begin with the same weights and see the same speech. What sets them apart may be
    the bits of the optimizer's states, or the format of streams; two runs that differ in
    the order of a sum tell how much of it is chaos.

    Parameters
    ----------
    folder, other : str or Path
        The runs; the first is the one that the other is compared with.
    device : torch.device or str
        Where it is computed.

    Returns
    -------
    list of dict
        ``epoch``, ``step``, ``relative_distance`` (norm of the difference of all
        parameters over that of the first run's) and ``distance_over_way`` (over how far
        the first run has come from where it began).

    Raises
    ------
    ValueError
        If the runs have no epoch in common, began with other weights or with those of
        another run, or took other steps to an epoch.
    """
    runs = [Rebuilt.of(path, device) for path in (folder, other)]
    if begun := runs[0].hparams["pretrained_run"]:
        raise ValueError(
            f"{folder} began with the weights of {begun}, which it does not hold. Give "
            "runs that were trained from scratch."
        )
    for name in (*_SAME_TRAINING, "pretrained_run", "number_of_epochs", "batch_size"):
        values = [run.hparams[name] for run in runs]
        if values[0] != values[1]:
            raise ValueError(
                f"{folder} was trained with {name}: {values[0]} and {other} with "
                f"{values[1]}. Give two runs that began alike and saw the same speech."
            )
    begin = _parameters(runs[0])
    epochs = [{c.meta["epoch"]: c for c in run.epochs()} for run in runs]
    rows = []
    for epoch in sorted(epochs[0].keys() & epochs[1].keys()):
        pair = [found[epoch] for found in epochs]
        if place_of(pair[0]) != place_of(pair[1]):
            raise ValueError(
                f"Epoch {epoch} ended after {pair[0].meta['steps']} steps in {folder} and "
                f"after {pair[1].meta['steps']} in {other}. Give runs of equal batches."
            )
        for run, checkpoint in zip(runs, pair, strict=True):
            run.restore(checkpoint)
        here, there = map(_parameters, runs)
        distance = float((there - here).norm())
        row = {
            "relative_distance": distance / float(here.norm()),
            "distance_over_way": distance / float((here - begin).norm()),
        }
        rows.append(place_of(pair[0]) | row)
    if not rows:
        raise ValueError(f"{folder} and {other} have kept no epoch in common.")
    return rows


def _parameters(run: Rebuilt) -> Tensor:
    """All parameters of encoder and classifier: [values], float64."""
    return torch.cat([p.detach().double().flatten() for p in run.modules.parameters()])
