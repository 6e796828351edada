"""Stages of an encoder as text: what each holds and works with."""

from __future__ import annotations

from collections.abc import Mapping

from speechbrain_rev.models.breakdown import EncoderBreakdown
from speechbrain_rev.models.columns import Column, aligned
from speechbrain_rev.models.stages import StageMemory
from speechbrain_rev.models.table import MODES
from speechbrain_rev.sizes import size_text


def stages_text(case: EncoderBreakdown) -> list[str]:
    """Print what each stage takes as a table, with a line of their sums.

    Parameters
    ----------
    case : EncoderBreakdown
        A breakdown with stages.

    Returns
    -------
    list of str
        Lines: whose stages they are, heads, a line for each, and the sums, which for
        the peak is the largest.

    Examples
    --------
    >>> from speechbrain_rev.models.breakdown import encoder_breakdown
    >>> case = encoder_breakdown("resnet34", batch=64, frames=200, stages=True)
    >>> print(stages_text(case)[0])
    resnet34, store, sgd 8 bit:
    >>> stages_text(case)[-1].split()[:5]
    ['all', '17', 'store', '3.712', 'GiB']
    """
    title = (
        f"{case.name}, {case.mode}, {case.optimizer_name} {case.optimizer_bits} bit:"
    )
    return [title, *aligned(_COLUMNS, [*case.stages, _together(case)])[1:]]


def stages_note() -> str:
    """Say what the figures of stages are."""
    return (
        "Stages, each with the transition into it: held is what a stage's forward pass "
        "leaves for the backward pass, beside what was held before; together that is what "
        "is alive when the last block's forward pass ends. Working is the most in a "
        "stage's forward or backward pass above what it and all before it hold, peak the "
        "same with what they hold; the largest peak is that of the activations. The "
        "classifier's own step is among the others."
    )


def blocks_text(blocks: Mapping[str, int]) -> str:
    """Say how many blocks have each mode.

    Parameters
    ----------
    blocks : mapping of str to int
        Blocks by mode.

    Returns
    -------
    str
        Words, none for modes that no block has.

    Examples
    --------
    >>> blocks_text({"reconstruct": 2, "store": 1, "recompute": 0})
    '1 store, 2 reconstruct'
    """
    counts = [(blocks.get(mode, 0), mode) for mode in MODES]
    return ", ".join(f"{count} {mode}" for count, mode in counts if count)


def _together(case: EncoderBreakdown) -> StageMemory:
    stages = case.stages
    peak = max(stages, key=lambda stage: stage.peak_bytes)
    return StageMemory(
        "all",
        case.blocks,
        held_bytes=sum(stage.held_bytes for stage in stages),
        working_bytes=0,
        peak_bytes=peak.peak_bytes,
        weights_bytes=sum(stage.weights_bytes for stage in stages),
        gradients_bytes=sum(stage.gradients_bytes for stage in stages),
        optimizer_states_bytes=sum(stage.optimizer_states_bytes for stage in stages),
    )


def _peak(stage: StageMemory) -> str:
    # The classifier has no part in the step, and its row no peak of its own.
    takes_part = stage.held_bytes or stage.working_bytes
    return _size(stage.peak_bytes) if takes_part else "-"


def _size(size_bytes: int) -> str:
    return size_text(size_bytes) if size_bytes else "-"


_COLUMNS: list[Column[StageMemory]] = [
    Column("", "stage", lambda s: s.name),
    Column("", "blocks", lambda s: blocks_text(s.blocks)),
    Column("", "held", lambda s: _size(s.held_bytes)),
    Column("", "working", lambda s: _size(s.working_bytes)),
    Column("", "peak", _peak),
    Column("", "weights", lambda s: _size(s.weights_bytes)),
    Column("", "gradients", lambda s: _size(s.gradients_bytes)),
    Column("", "opt. states", lambda s: _size(s.optimizer_states_bytes)),
]
