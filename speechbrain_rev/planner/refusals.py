"""What helps a step that does not fit: smaller batches, and whatever else its maker names."""

from __future__ import annotations

import functools

from speechbrain_rev.devices import smallest_gpu
from speechbrain_rev.planner.choice import Choice, choose
from speechbrain_rev.planner.knapsack import Infeasible
from speechbrain_rev.planner.profiling import Profiler, profiler_of
from speechbrain_rev.planner.step import NoStep, Step
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.sizes import (
    enough_text,
    largest_within,
    size_text,
    whole_bytes,
)

#: The largest batch that is looked for.
LARGEST_BATCH = 10**6


def largest_batch(
    step: Step,
    budget_bytes: int | str,
    *,
    max_gradient_error: float | None = None,
    profiler: Profiler | None = None,
) -> int:
    """Find the largest batch that has a plan.

    Parameters
    ----------
    step : Step
        A step of any batch.
    budget_bytes : int or str
        As of :func:`plan_step`.
    max_gradient_error : float or None
        As of :func:`plan`.
    profiler : Profiler or None
        What counted the step, and has its own limit; None counts it anew.

    Returns
    -------
    int
        Samples, 0 if not even one fits. Counted without contents.

    Raises
    ------
    ValueError
        If steps of this network need numbers to be counted, or no other batch can be made
        of the example batch.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from speechbrain_rev.planner import step_of
    >>> network = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    >>> step = step_of(network, torch.randn(16, 64), blocks="?")
    >>> largest_batch(step, "1MiB") > largest_batch(step, "0.5MiB") > 16
    True
    """
    budget = whole_bytes("budget_bytes", budget_bytes)
    left = budget - step.reserved_bytes(budget)
    with step.training():
        own = profiler or profiler_of(step, max_gradient_error)
        most = _largest_at_the_lightest(own, left)
        # Other modes are the lightest where weights' gradients weigh less than activations.
        while most > own.step.batch:
            own = own.at(own.step.at(most))
            most = max(most, _largest_at_the_lightest(own, left))
        return most


def _largest_at_the_lightest(profiler: Profiler, budget_bytes: int) -> int:
    """Find the largest batch in the lightest modes of the profiler's own."""
    lightest = choose(profiler, -1, is_timed=False)
    if profiler.counted(lightest.channels).needs_numbers:
        raise ValueError(
            "Other batches are counted on meta tensors, and there this step does not run, "
            "or takes other memory than a real one. Put what the loss takes, as labels, "
            "into the batch of a module that returns the loss, or plan for each batch, as "
            "sweep does."
        )
    needed_bytes = functools.partial(_needed_bytes, profiler, lightest)
    return largest_within(needed_bytes, budget_bytes, LARGEST_BATCH)


def remedies(
    step: Step, infeasible: Infeasible, *, profiler: Profiler | None = None
) -> list[str]:
    """List what helps a step that does not fit, each with how far to go.

    Parameters
    ----------
    step : Step
        What does not fit.
    infeasible : Infeasible
        What it needs, and the budget.
    profiler : Profiler or None
        What counted the step; None counts it anew.

    Returns
    -------
    list of str
        What to change.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from speechbrain_rev.planner import step_of
    >>> network = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    >>> step = step_of(network, torch.randn(4096, 64), blocks="?")
    >>> changes = remedies(step, Infeasible(12 * 2**20, 4 * 2**20))
    >>> changes[0][:11], changes[1], changes[-1]
    ('a batch of ', 'shorter or smaller inputs', 'a budget of 12.0 MiB')
    """
    budget, enough = infeasible.budget_bytes, infeasible.enough_bytes
    needed, gpu = enough_text(enough), smallest_gpu(enough)
    left = step.left_bytes(budget)
    changes = []
    for each in step.alternatives(step):
        if each.of_modes and left <= 0:
            continue
        if "{gpu}" in each.words and gpu is None:
            continue
        fits = 0
        if "{fits}" in each.words:
            try:
                fits = largest_batch(step, budget, profiler=profiler)
            except ValueError:  # of other batches nothing is known
                continue
            if not 0 < fits < step.batch:
                continue
        changes.append(each.words.format(fits=fits, needed=needed, gpu=gpu))
    return changes


def _needed_bytes(profiler: Profiler, lightest: Choice, batch: int) -> int:
    """Count all that a step of another batch takes with some modes."""
    step = profiler.step
    try:
        with profiler.at(step.at(batch)).bare(lightest.channels) as trial:
            trial.network.set_mode(lightest.modes)
            if not step.is_trusted:
                trial.run()  # Tensors that a first step makes are not counted.
            peak = trace_bytes(trial.network, trial.run).peak_bytes
    except NoStep:
        raise
    except Exception as error:  # whatever a network does with another batch
        if step.is_trusted:
            raise
        if batch == 1:  # One sample has no batch statistics.
            return _needed_bytes(profiler, lightest, 2)
        raise ValueError(
            f"A step of {batch} samples does not run ({type(error).__name__}: {error}), so "
            "that the largest batch is not known."
        ) from error
    return peak + step.fixed_bytes(batch)


def refusal(profiler: Profiler, budget_bytes: int, peak_bytes: int) -> Infeasible:
    """Make the error of a step whose lightest modes have such a peak: what it lacks."""
    step = profiler.step
    fixed = step.fixed_bytes(step.batch)
    refused = Infeasible(
        peak_bytes + fixed,
        budget_bytes,
        reserved_bytes=step.reserved_bytes(budget_bytes),
    )
    words = [f"It lacks {size_text(refused.lacking_bytes)}."]
    if fixed:
        alone = step.left_bytes(budget_bytes) <= 0
        words.append(
            "Weights, gradients, optimizer states, classifier and input take "
            f"{size_text(fixed)} {'alone' if alone else 'of the peak'}."
        )
    helps = remedies(step, refused, profiler=profiler)
    chosen = choose(profiler, -1, is_timed=False)
    if profiler.probe is not None and chosen.profile.is_heavier_for_limit():
        helps.append(f"more than max_gradient_error={profiler.probe.limit:g}")
    if helps:
        words.append(f"What helps: {'; '.join(helps)}.")
    return refused.with_remedy(" ".join(words))
