"""What a comparison shows: yes, no, or that the study cannot tell.

A study that could not have found a difference shows nothing by finding none. So a rate
is judged only where the reference does its task: where it is shown that it, made worse by
the margin, would still be better than what needs no training, and it would be below what
chance gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from results.runs import EER
from speechbrain_rev import scoring

YES, NOT_SHOWN, CANNOT_TELL = "yes", "not shown", "cannot tell"
#: A margin beyond this part of the reference's mean rate is called wide.
WIDE = 0.2
#: Why the study cannot tell.
NO_BASELINE, BASELINE, CEILING, SAME_WEIGHTS = (
    "what needs no training was not scored",
    "the reference is not shown to be better than what needs no training by more than the "
    "margin",
    "the reference and the margin reach the highest rate there is",
    "both ended with the same weights: what was to be tested changed nothing",
)


def judged(
    candidate: scoring.SeedRates,
    reference: scoring.SeedRates,
    *,
    rate: str,
    margin: float,
    baselines: Sequence[scoring.SeedRates],
    identical: bool,
    must_be_identical: bool,
) -> dict[str, Any]:
    """Compare two conditions on one list by one rate.

    Parameters
    ----------
    candidate, reference : SeedRates
        Their rates.
    rate : str
        "eer", or the name of a detection cost.
    margin : float
        As it was stated.
    baselines : sequence of SeedRates
        The rates of what needs no training, the same for all seeds; empty where it was not
        scored.
    identical : bool
        Whether both ended with the same weights.
    must_be_identical : bool
        Whether they had to.

    Returns
    -------
    dict
        The fields of RateDifference; ``within`` ("yes", "not shown" or "cannot tell") the
        margin, and the ``reason`` where it cannot be told; whether the rate is ``higher``
        at all; the ``power`` that an equal candidate had; ``margin_share`` of the
        reference's mean rate, and whether that is ``wide``. Weights that are the same, and
        rates that cannot be told, have no ``p_value``.
    """
    found = scoring.rate_difference(candidate, reference, margin=margin)
    mean = float(reference.rates.mean())
    reason = _reason(rate, reference, margin, baselines)
    if identical:
        reason = None if must_be_identical else SAME_WEIGHTS
    shown = YES if identical or found.non_inferior else NOT_SHOWN
    return {
        **asdict(found),
        "p_value": None if identical or reason else found.p_value,
        "p_holm": None,
        "within": CANNOT_TELL if reason else shown,
        "reason": reason,
        "higher": found.higher,
        "power": found.power,
        "margin_share": margin / mean if mean else None,
        "wide": margin > WIDE * mean,
    }


def _reason(
    rate: str,
    reference: scoring.SeedRates,
    margin: float,
    baselines: Sequence[scoring.SeedRates],
) -> str | None:
    """Say why no candidate could fail whose rate is the worst that is within the margin."""
    if reference.rates.mean() + margin >= (0.5 if rate == EER else 1.0):
        return CEILING
    if not baselines:
        return NO_BASELINE
    better = [scoring.rate_difference(reference, one, margin=0) for one in baselines]
    return None if all(found.upper < -margin for found in better) else BASELINE


def correct_for_number(differences: Iterable[dict[str, Any]]) -> None:
    """Write Holm's p-values into differences that are tested together.

    Parameters
    ----------
    differences : iterable of dict
        As ``judged`` gives them; ``p_holm`` is set where there is a ``p_value``.
    """
    tested = [found for found in differences if found["p_value"] is not None]
    corrected = scoring.holm([found["p_value"] for found in tested])
    for found, p_holm in zip(tested, corrected, strict=True):
        found["p_holm"] = p_holm
