"""The memory budget of half of what storing all activations takes."""

from __future__ import annotations

from dataclasses import dataclass

from speechbrain_rev.catalog.steps import TrainingStep
from speechbrain_rev.planner import Infeasible, Step, plan_step
from speechbrain_rev.planner.profiling import stored_bytes
from speechbrain_rev.sizes import card_for


@dataclass(frozen=True)
class Half:
    """A memory budget of half of what storing takes.

    Attributes
    ----------
    memory_budget : str
        As the recipe's setting takes it.
    stored_bytes : int
        What a step takes that stores all activations, counted as plans are.
    staying_bytes : int
        What of it no mode changes: weights, gradients, optimizer states, speech.
    counted_bytes : int
        What a plan may take, counted likewise; on a card the budget is larger by what is
        reserved for what cannot be counted.
    halved : str
        "memory", or "activations" where no plan takes half of the memory.
    """

    memory_budget: str
    stored_bytes: int
    staying_bytes: int
    counted_bytes: int
    halved: str


def half_of_the_memory(training: TrainingStep) -> Half:
    """Say which budget is half of the memory of a training that stores all activations.

    Parameters
    ----------
    training : TrainingStep
        A step of the training; the modes of its encoder do not matter.

    Returns
    -------
    Half

    Raises
    ------
    Infeasible
        If no plan takes half of the activations either.
    """
    step = training.step()
    staying, stored = step.fixed_bytes(step.batch), stored_bytes(step)
    whole = staying + stored
    try:
        return _planned(step, whole, staying, whole // 2, "memory")
    except Infeasible:
        counted = staying + stored // 2
    try:
        return _planned(step, whole, staying, counted, "activations")
    except Infeasible as error:
        raise error.with_remedy(
            "No modes of the blocks take half of the activations of this batch: too much "
            "of it belongs to no block. Give the size more blocks or channels, or leave "
            "out the conditions of half the memory."
        ) from error


def _planned(step: Step, whole: int, staying: int, counted: int, halved: str) -> Half:
    """Name a budget, if there is a plan for it."""
    budget = card_for(counted) if step.is_card else counted
    plan_step(step, budget)
    return Half(f"{budget}B", whole, staying, counted, halved)
