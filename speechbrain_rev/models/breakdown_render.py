"""Breakdowns as text and as JSON, and what each change saves."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from speechbrain_rev.memory.report import PARTS
from speechbrain_rev.models.breakdown import EncoderBreakdown, how_counted
from speechbrain_rev.models.card import GIB, reserve_of
from speechbrain_rev.models.counts import counted_with

_WIDTH = 120
_HEADS = {"optimizer_states": "opt. states"}
_DOING = {"recompute": "recomputing", "reconstruct": "reconstructing"}

#: The breakdowns of an encoder: before and after, or one where that is the same.
Cases = Sequence[EncoderBreakdown]


def as_text(encoders: Sequence[Cases], card_bytes: int | None = None) -> str:
    """Print breakdowns as a table in GiB, what each change saves, and what figures are.

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
    >>> [line.split()[:5] for line in text.splitlines()[1:3]]
    [['revnet57', 'before', 'store', 'sgd', '32'],
     ['revnet57', 'after', 'reconstruct', 'sgd', '8']]
    """
    heads = ["encoder", "", "mode", "optimizer"]
    heads += [_HEADS.get(part, part) for part in PARTS] + ["total"]
    if card_bytes is not None:
        heads.append("fits")
    rows = [heads]
    for cases in encoders:
        for word, case in zip(("before", "after"), cases, strict=False):
            rows.append(_row(word if len(cases) > 1 else "", case))
            if card_bytes is not None:
                rows[-1].append("yes" if fits(case, card_bytes) else "no")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            # Words begin on the left, figures end on the right.
            cell.ljust(width) if index < 4 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    savings = [
        textwrap.fill(saved(*cases), _WIDTH, subsequent_indent="  ")
        for cases in encoders
        if len(cases) > 1
    ]
    notes = [
        textwrap.fill(note, _WIDTH)
        for note in sources(encoders[0][0], card_bytes).values()
    ]
    return "\n".join([*lines, "", *savings, *([""] if savings else []), *notes, ""])


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
        "sources": sources(encoders[0][0], card_bytes),
        "counted_with": counted_with(),
    }
    if card_bytes is not None:
        document |= {"card_bytes": card_bytes, "reserve_bytes": reserve_of(card_bytes)}
    document["breakdowns"] = []
    for case in (case for cases in encoders for case in cases):
        plain = dataclasses.asdict(case)
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
        changes.append((_DOING[after.mode], "activations"))
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


def sources(case: EncoderBreakdown, card_bytes: int | None) -> dict[str, str]:
    """Say what each part is and how it came about.

    Parameters
    ----------
    case : EncoderBreakdown
        One of those shown; all have its batch.
    card_bytes : int or None
        Memory of a card, if one was named.

    Returns
    -------
    dict of str to str
        Sentences by what they are about.
    """
    batch, frames, _ = case.report.input_shape
    versions = counted_with()
    kinds = {
        "step": f"One training step of {batch} utterances of {frames} frames in float32, "
        "in GiB and percent of the total. No GPU was asked.",
        "activations": "Activations: most bytes alive in the encoder's forward and "
        f"backward pass, {how_counted(batch, frames)}, on meta tensors, which take the "
        f"same as on a CPU (torch {versions['torch']}, {versions['date']}).",
        "parameters": "Optimizer states, weights and gradients: counted, tensor by "
        f"tensor, of the encoder and a classifier of {case.classes}. Small tensors have "
        "states of 32 bit always.",
        "others": "Others: the batch as waveforms and filterbanks, and most bytes alive in "
        "the step of classifier and loss.",
        "total": "Total: an upper bound, as parts do not all peak at once. CUDA's "
        "context, workspaces and fragmentation come on top.",
    }
    if card_bytes is not None:
        kinds["fits"] = (
            f"Fits: whether the total leaves {reserve_of(card_bytes) / GIB:.1f} of "
            f"{card_bytes / GIB:g} GiB free for those. No card was tried."
        )
    return kinds


def _row(word: str, case: EncoderBreakdown) -> list[str]:
    report = case.report
    optimizer = f"{case.optimizer_name} {case.optimizer_bits} bit"
    return [
        *(case.name, word, case.mode, optimizer),
        *(
            f"{size / GIB:.3f} {report.share(part):5.1%}"
            for part, size in report.parts.items()
        ),
        f"{report.total_bytes / GIB:.3f}",
    ]
