"""By how much reconstruction turns gradients, over a training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from measurements.rebuilt import Batch, NotEqual, Rebuilt, place_of
from speechbrain_rev.angles import angle_degrees

Row = dict[str, Any]
FORMATS = ("exact", "float")
PRECISIONS = ("fp32", "bf16")


def gradient_angles(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    batches: int = 3,
    every: int = 1,
) -> list[Row]:
    """Measure how far reconstructed activations turn the encoder's gradient.

    At the weights of each epoch the gradient of some batches of training speech, always
    the same, is computed with stored and with reconstructed activations, with streams in
    both formats and in both precisions, of the loss with the margin of that time. Beside
    it is told by how much bf16 autocast turns the gradient of stored activations, which
    is a rounding that is commonly accepted.

    Parameters
    ----------
    folder : str or Path
        A run of a reversible encoder.
    device : torch.device or str
        Where it is computed.
    batches : int
        How many; the angle of each is told.
    every : int
        Every how many of the kept epochs; the last one is always among them.

    Returns
    -------
    list of dict
        ``epoch``, ``step``, ``compared`` ("reconstructed with stored" or "bf16 with
        fp32"), ``streams``, ``precision``, ``degrees`` of each batch, their
        ``mean_degrees`` and ``largest_degrees``.

    Raises
    ------
    NotEqual
        If exact streams do not give the same gradient to the bit.
    ValueError
        If the encoder has nothing to reconstruct, or the folder holds no run.
    """
    runs = {
        streams: Rebuilt.of(folder, device, streams=streams, verify=None, mode="store")
        for streams in FORMATS
    }
    exact = runs["exact"]
    if not exact.encoder.reversible_blocks():
        raise ValueError(
            f"{folder} is a run of {exact.hparams['arch']}, which has no reversible "
            "blocks: nothing of it is reconstructed. Give a run of a reversible encoder."
        )
    # Of the run's own settings: both formats get the same features.
    probed = exact.batches(batches)
    rows = []
    for place in _places(exact, every):
        for run in runs.values():
            if run is not exact:
                run.modules.load_state_dict(exact.modules.state_dict())
                run.hparams["compute_cost"].margin = exact.hparams[
                    "compute_cost"
                ].margin
        rows += [place | row for row in _angles_at(runs, probed, place)]
    return rows


def _places(run: Rebuilt, every: int) -> Iterator[Row]:
    """Give a run the weights of one epoch after the other, from before the first."""
    if run.hparams["pretrained_run"] is None:
        yield {"epoch": 0, "step": 0}
    epochs = run.epochs()
    for checkpoint in [*epochs[every - 1 : -1 : every], *epochs[-1:]]:
        run.restore(checkpoint)
        yield place_of(checkpoint)


def _angles_at(
    runs: dict[str, Rebuilt], probed: list[Batch], place: Row
) -> Iterator[Row]:
    """Compare the gradients of the batches at the weights that the runs have."""
    for streams, run in runs.items():
        angles: dict[str, list[float]] = defaultdict(list)
        for batch in probed:
            stored = {}
            for precision in PRECISIONS:
                pair = {}
                for mode in ("store", "reconstruct"):
                    run.encoder.set_mode(mode)
                    pair[mode] = run.gradient(batch, precision=precision)
                if streams == "exact" and not torch.equal(*pair.values()):
                    raise NotEqual(
                        f"Gradients of exact streams in {precision} differ between "
                        f"stored and reconstructed activations at {place}, by "
                        f"{angle_degrees(*pair.values())} degrees, in {run.folder}."
                    )
                angles[precision].append(angle_degrees(*pair.values()))
                stored[precision] = pair["store"]
            angles["rounding"].append(angle_degrees(stored["bf16"], stored["fp32"]))
        for precision in PRECISIONS:
            compared = "reconstructed with stored"
            yield _angle_row(compared, streams, precision, angles[precision])
        yield _angle_row("bf16 with fp32", streams, "bf16", angles["rounding"])


def _angle_row(
    compared: str, streams: str, precision: str, degrees: list[float]
) -> Row:
    return {
        "compared": compared,
        "streams": streams,
        "precision": precision,
        "degrees": degrees,
        "mean_degrees": sum(degrees) / len(degrees),
        "largest_degrees": max(degrees),
    }
