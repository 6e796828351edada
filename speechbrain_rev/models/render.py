"""The table as aligned text and as JSON, each figure marked as what it is."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from speechbrain_rev.models.card import (
    CLASSES,
    RESERVE_BYTES,
    RESERVE_SHARE,
    Training,
)
from speechbrain_rev.models.columns import Column, aligned
from speechbrain_rev.models.counts import FRAMES, SECONDS, counted_with
from speechbrain_rev.models.table import MODES, Model
from speechbrain_rev.sizes import GIB, card_text

PAPER = (
    "Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker "
    "Verification"
)
_WIDTH = 120
_HEADS = {"store": "store", "recompute": "recomp.", "reconstruct": "reconstr."}


def as_text(models: Sequence[Model]) -> str:
    """Print encoders as a table of at most 130 columns, and what its figures are.

    Parameters
    ----------
    models : sequence of Model
        The rows; at least one, all of the same training.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> from speechbrain_rev.models import select
    >>> models = select(Training(None, batch=128, frames=200), names=["resnet34"])
    >>> as_text(models).splitlines()[2].split()[:4]
    ['resnet34', '-', '34', '6.63']
    """
    training = models[0].training
    columns = _columns(training)
    lines = aligned(columns, models)
    notes = [textwrap.fill(note, _WIDTH) for note in sources(training).values()]
    if training.card_bytes is not None:
        notes.append("fits: whether the batch does in the encoder's default mode.")
    return "\n".join([*lines, "", *notes, ""])


def as_json(models: Sequence[Model]) -> str:
    """Print encoders as JSON: each figure under what it is, units in the names.

    Parameters
    ----------
    models : sequence of Model
        The rows; at least one, all of the same training.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> from speechbrain_rev.models import select
    >>> models = select(Training(None, batch=128, frames=200), names=["resnet34"])
    >>> json.loads(as_json(models))["encoders"][0]["published"]["vox1_h_eer_percent"]
    1.86
    """
    training = models[0].training
    asked: dict[str, Any] = {
        "batch": training.batch,
        "frames": training.frames,
        "precision": "float32",
    }
    if training.card_bytes is not None:
        asked |= {
            "card_bytes": training.card_bytes,
            "reserve_bytes": training.reserve_bytes,
            "optimizer_state_bits": training.optimizer_bits,
            "classes": CLASSES,
        }
    document = {
        "sources": sources(training),
        "counted_with": counted_with(),
        "training": asked,
        "encoders": [_plain(model) for model in models],
    }
    return json.dumps(document, indent=1) + "\n"


def sources(training: Training) -> dict[str, str]:
    """Say what each kind of figure is.

    Parameters
    ----------
    training : Training
        What was asked; without a card there is nothing computed.

    Returns
    -------
    dict of str to str
        Sentences by kind: published, counted and, with a card, computed.
    """
    versions = counted_with()
    kinds = {
        "published": f'Published: Tables V and VI of "{PAPER}". EER, in percent on '
        "Vox1-O, E and H, were not reproduced here.",
        "counted": "Counted: parameters; bytes alive in a training step of the encoder, "
        "in float32, on meta tensors, which take the same as on a CPU (torch "
        f"{versions['torch']}, {versions['date']}). GB (1e9 bytes) per utterance is what "
        "one more adds to a large batch; reconstruct is the default of reversible "
        "encoders, store that of the others, recompute is checkpointing of each block.",
    }
    if training.card_bytes is not None:
        kinds["computed"] = (
            f"Computed: what fits {card_text(training.card_bytes)} with "
            f"{training.frames} frames: the encoder's counted step, weights, gradients "
            f"and {training.optimizer_bits}-bit optimizer of the encoder and of a classifier "
            f"of {CLASSES} (VoxCeleb2 at three speeds), the classifier's step and the input, "
            f"as if all peaked at once; {training.reserve_bytes / GIB:.1f} GiB stay free "
            "for CUDA, workspaces and fragmentation, by assumption: "
            f"{RESERVE_BYTES / GIB:g} GiB and {100 * RESERVE_SHARE:g} % of the card. With "
            "it, batches published for stored vanilla encoders on 11 GiB are met within a "
            "fifth with the states of 32 bit that they had, within a tenth with 8. No card "
            "was tried."
        )
    return kinds


def _columns(training: Training) -> list[Column[Model]]:
    columns: list[Column[Model]] = [
        Column("", "encoder", lambda m: m.row.name),
        Column("", "type", lambda m: m.row.type if m.row.reversible else "-"),
        Column("", "layers", lambda m: str(m.row.layers)),
        Column("parameters, M", "here", lambda m: f"{m.row.parameters / 1e6:.2f}"),
        Column("parameters, M", "publ.", lambda m: f"{m.row.published_params_m:.1f}"),
        Column("parameters, M", "diff.", _parameter_difference),
        Column("published EER", "O", lambda m: f"{m.row.vox1_o_eer:.2f}"),
        Column("published EER", "E", lambda m: f"{m.row.vox1_e_eer:.2f}"),
        Column("published EER", "H", lambda m: f"{m.row.vox1_h_eer:.2f}"),
    ]
    lengths = FRAMES if training.card_bytes is None else (training.frames,)
    for frames in lengths:
        title = f"GB per {SECONDS[frames]} s utterance"
        columns += [Column(title, _HEADS[mode], _gb(mode, frames)) for mode in MODES]
        if frames == 200:
            columns.append(
                Column(title, "publ.", lambda m: f"{m.row.published_memory_gb:g}")
            )
    if training.card_bytes is not None:
        columns.append(
            Column(
                f"batch {training.batch}",
                "fits",
                lambda m: "yes" if m.fits(m.row.default_mode) else "no",
            )
        )
        title = f"largest batch on {training.card_bytes / GIB:g} GiB"
        columns += [Column(title, _HEADS[mode], _largest(mode)) for mode in MODES]
    return columns


def _parameter_difference(model: Model) -> str:
    difference = model.row.parameters / 1e6 - model.row.published_params_m
    return f"{round(difference, 2) + 0.0:+.2f}"  # no minus before a zero


def _gb(mode: str, frames: int) -> Callable[[Model], str]:
    def cell(model: Model) -> str:
        size = model.bytes_per_utterance(mode, frames)
        return "-" if size is None else f"{size / 1e9:.4f}"

    return cell


def _largest(mode: str) -> Callable[[Model], str]:
    def cell(model: Model) -> str:
        batch = model.largest_batch(mode)
        return "-" if batch is None else str(batch)

    return cell


def _plain(model: Model) -> dict[str, Any]:
    row, training = model.row, model.training
    plain: dict[str, Any] = {
        "name": row.name,
        "family": row.family,
        "type": row.type,
        "layers": row.layers,
        "counterpart": row.counterpart,
        "default_mode": model.row.default_mode,
        "published": {
            "parameters_millions": row.published_params_m,
            "vox1_o_eer_percent": row.vox1_o_eer,
            "vox1_e_eer_percent": row.vox1_e_eer,
            "vox1_h_eer_percent": row.vox1_h_eer,
            "gb_per_2_s_utterance": row.published_memory_gb,
            "largest_batch_on_11_gib": row.published_max_batch_11gb,
        },
        "counted": {
            "parameters": row.parameters,
            **{
                f"bytes_per_{SECONDS[frames]}_s_utterance": {
                    mode: model.bytes_per_utterance(mode, frames)
                    for mode in model.modes
                }
                for frames in FRAMES
            },
            "step_peak_bytes": {m: model.step_peak_bytes(m) for m in model.modes},
        },
    }
    if training.card_bytes is not None:
        plain["computed"] = {
            mode: {
                "fits": model.fits(mode),
                "largest_batch": model.largest_batch(mode),
                "needed_bytes": training.needed_bytes(row, mode, training.batch),
            }
            for mode in model.modes
        }
    return plain
