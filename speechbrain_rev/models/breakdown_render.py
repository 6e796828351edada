"""Breakdowns as text and as JSON, and what each change saves.

Activations and the total are shown in GiB. The other parts are small and shown in MiB, so
that none of them is a zero.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from speechbrain_rev.memory.report import PARTS
from speechbrain_rev.models.breakdown import PLAN, EncoderBreakdown
from speechbrain_rev.models.calibration import speed_text
from speechbrain_rev.models.card import reserve_of
from speechbrain_rev.models.counts import counted_with
from speechbrain_rev.models.stages_render import blocks_text, stages_note, stages_text
from speechbrain_rev.models.table import MODES
from speechbrain_rev.sizes import GIB, MIB, card_text

_WIDTH = 120
#: Columns of words, which begin on the left; figures end on the right.
_WORDS = 4
_HEADS = {"optimizer_states": "opt. states"}
_DOING = {
    "recompute": "recomputing",
    "reconstruct": "reconstructing",
    PLAN: "planning",
}

#: The breakdowns of an encoder: before and after, or one where that is the same.
Cases = Sequence[EncoderBreakdown]


def as_text(encoders: Sequence[Cases], card_bytes: int | None = None) -> str:
    """Print breakdowns as a table, what each change saves, and what figures are.

    Parameters
    ----------
    encoders : sequence of Cases
        For each encoder one breakdown, or two: before and after. At least one encoder,
        all of the same batch.
    card_bytes : int or None
        Memory of a card that the step must fit.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> from speechbrain_rev.models.breakdown import before_and_after
    >>> text = as_text([before_and_after("revnet57", batch=64, frames=200)])
    >>> [line.split()[:5] for line in text.splitlines()[2:4]]
    [['revnet57', 'before', 'store', 'sgd', '32'],
     ['revnet57', 'after', 'reconstruct', 'sgd', '8']]
    """
    heads = ["encoder", "", "mode", "optimizer"]
    heads += [_HEADS.get(part, part) for part in PARTS] + ["total"]
    units = ["", "", "", ""]
    units += [_unit(part)[0] for part in PARTS] + ["GiB"]
    if card_bytes is not None:
        heads.append("fits")
        units.append("")
    rows = [heads, units]
    for cases in encoders:
        for word, case in zip(("before", "after"), cases, strict=False):
            rows.append(_row(word if len(cases) > 1 else "", case))
            if card_bytes is not None:
                rows[-1].append("yes" if fits(case, card_bytes) else "no")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < _WORDS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    savings = [
        textwrap.fill(saved(*cases), _WIDTH, subsequent_indent="  ")
        for cases in encoders
        if len(cases) > 1
    ]
    stages = [stages_text(case) for cases in encoders for case in cases if case.stages]
    notes = [
        textwrap.fill(note, _WIDTH)
        for note in sources(encoders[0], card_bytes).values()
    ]
    groups = [lines, savings, *stages, notes]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def as_json(encoders: Sequence[Cases], card_bytes: int | None = None) -> str:
    """Print breakdowns as JSON, sizes in bytes.

    Parameters
    ----------
    encoders : sequence of Cases
        As :func:`as_text` takes them.
    card_bytes : int or None
        Memory of a card that the step must fit.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> from speechbrain_rev.models.breakdown import before_and_after
    >>> document = json.loads(as_json([before_and_after("resnet34", batch=64, frames=200)]))
    >>> document["breakdowns"][0]["report"]["activations_bytes"]
    4036560136
    """
    document: dict[str, Any] = {
        "sources": sources(encoders[0], card_bytes),
        "counted_with": counted_with(),
    }
    if card_bytes is not None:
        document |= {"card_bytes": card_bytes, "reserve_bytes": reserve_of(card_bytes)}
    document["breakdowns"] = []
    for case in (case for cases in encoders for case in cases):
        plain = dataclasses.asdict(case)
        if not case.stages:
            del plain["stages"]
        del plain["speed"]
        if case.speed is not None:
            plain["speed"] = json.loads(case.speed.to_json())
        plain["total_bytes"] = case.report.total_bytes
        if card_bytes is not None:
            plain["fits"] = fits(case, card_bytes)
        document["breakdowns"].append(plain)
    return json.dumps(document, indent=1) + "\n"


def fits(case: EncoderBreakdown, card_bytes: int) -> bool:
    """Whether a step leaves free on a card what is not counted.

    Parameters
    ----------
    case : EncoderBreakdown
        The step.
    card_bytes : int
        Memory of the card.

    Returns
    -------
    bool
        The answer.

    Examples
    --------
    >>> from speechbrain_rev.models.breakdown import encoder_breakdown
    >>> fits(encoder_breakdown("resnet34", batch=64, frames=200), 11 * GIB)
    True
    """
    return case.report.total_bytes <= card_bytes - reserve_of(card_bytes)


def saved(before: EncoderBreakdown, after: EncoderBreakdown) -> str:
    """Say what mode and bits save, each on its own and as part of the whole.

    Parameters
    ----------
    before, after : EncoderBreakdown
        Of one encoder.

    Returns
    -------
    str
        A sentence.

    Examples
    --------
    >>> from speechbrain_rev.models.breakdown import before_and_after
    >>> print(saved(*before_and_after("resnet34", batch=64, frames=200)))
    resnet34: 8 bit saves 75 % of the optimizer states, 0.8 % of the total.
    """
    changes = []
    if before.mode != after.mode:
        doing = _DOING[after.mode]
        if after.mode == PLAN:
            doing += f" ({blocks_text(after.blocks)})"
        changes.append((doing, "activations"))
    if before.optimizer_bits != after.optimizer_bits:
        changes.append((f"{after.optimizer_bits} bit", "optimizer_states"))
    words = []
    for change, part in changes:
        size = before.report.parts[part]
        less = size - after.report.parts[part]
        of_part, of_all = less / size, less / before.report.total_bytes
        words.append(
            f"{change} saves {100 * of_part:.0f} % of the {part.replace('_', ' ')}, "
            f"{100 * of_all:.1f} % of the total"
        )
    return f"{before.name}: {'; '.join(words)}."


def sources(cases: Cases, card_bytes: int | None) -> dict[str, str]:
    """Say what each part is and how it came about.

    Parameters
    ----------
    cases : Cases
        Those of one encoder; all that are shown have their batch and modes.
    card_bytes : int or None
        Memory of a card, if one was named.

    Returns
    -------
    dict of str to str
        Sentences by what they are about.
    """
    batch, frames, _ = cases[0].report.input_shape
    versions = counted_with()
    hows = {case.how: case for case in cases}
    how = "; ".join(
        f"{words} ({case.mode})" if len(hows) > 1 else words
        for words, case in hows.items()
    )
    kinds = {
        "step": f"One training step of {batch} utterances of {frames} frames in float32, "
        "with percent of the total. No GPU was asked.",
        "activations": "Activations: most bytes alive in the encoder's forward and "
        f"backward pass, {how}, on meta tensors, which take the same as on a CPU "
        f"(committed counts: torch {versions['torch']}, {versions['date']}).",
        "parameters": "Optimizer states, weights and gradients: counted, tensor by "
        f"tensor, of the encoder and a classifier of {cases[0].classes}. Small tensors have "
        "states of 32 bit always.",
        "others": "Others: the batch as waveforms and filterbanks, and most bytes alive in "
        "the step of classifier and loss.",
        "total": "Total: an upper bound, as parts do not all peak at once. CUDA's "
        "context, workspaces and fragmentation come on top.",
    }
    if cases[-1].stages:
        kinds["stages"] = stages_note()
    if card_bytes is not None:
        kinds["fits"] = (
            f"Fits: whether the total leaves {reserve_of(card_bytes) / GIB:.1f} GiB of "
            f"{card_text(card_bytes)} free for those. No card was tried."
        )
    if cases[-1].speed is not None:
        kinds["plan"] = (
            "Plan: how many blocks store / recompute / reconstruct, with the modes with "
            "which the step fits and is the fastest, or the lightest where none fit. Times "
            "are predicted from counts of operations for "
            f"{speed_text(cases[-1].speed)}."
        )
    return kinds


def _row(word: str, case: EncoderBreakdown) -> list[str]:
    report = case.report
    optimizer = f"{case.optimizer_name} {case.optimizer_bits} bit"
    mode = case.mode
    if mode == PLAN:
        mode += " " + "/".join(str(case.blocks[each]) for each in MODES)
    return [
        *(case.name, word, mode, optimizer),
        *(_cell(part, size, report.share(part)) for part, size in report.parts.items()),
        f"{report.total_bytes / GIB:.3f}",
    ]


def _cell(part: str, size_bytes: int, share: float) -> str:
    unit, unit_bytes = _unit(part)
    digits = 3 if unit == "GiB" else 1
    return f"{size_bytes / unit_bytes:.{digits}f} {share:5.1%}"


def _unit(part: str) -> tuple[str, int]:
    return ("GiB", GIB) if part == "activations" else ("MiB", MIB)
