"""Plans held to what they promise: run, measured, and made anew if they are above it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from speechbrain_rev.planner.network import Network
from speechbrain_rev.planner.plan import Plan
from speechbrain_rev.planner.problem import Infeasible
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.trace import Step, trace_bytes
from speechbrain_rev.reversible import Mode

#: How often a plan that was above the budget, or the limit of the error, is made anew.
_TRIES = 8

# What is allowed of a limit that was exceeded: the next plan shall not just miss it.
_NEARER = 0.98


def plan_within(
    profile: Profile, network: Network, step: Step, budget_bytes: int
) -> Plan:
    """Solve for a budget, run the plan once, and solve again if it was above.

    If that leads nowhere, the lightest plan that is known is run.

    Parameters
    ----------
    profile : Profile
        Of the network.
    network : Network
        On which plans are tried.
    step : callable
        Runs forward and backward pass, on meta tensors too.
    budget_bytes : int
        What a step may allocate.

    Returns
    -------
    Plan
        Whose measured peak is within the budget.

    Raises
    ------
    Infeasible
        If none fits; it says what the lightest one took.
    """
    allowed = budget_bytes
    for _ in range(_TRIES):
        try:
            modes = profile.fastest(allowed)
        except Infeasible:
            break
        found = _tried(profile, network, step, modes, budget_bytes)
        if found.measured_bytes <= budget_bytes:
            return found
        allowed -= found.measured_bytes - budget_bytes
    found = _tried(profile, network, step, profile.lightest(), budget_bytes)
    if found.measured_bytes > budget_bytes:
        raise Infeasible(found.measured_bytes, budget_bytes)
    return found


def _tried(
    profile: Profile,
    network: Network,
    step: Step,
    modes: dict[str, str],
    budget_bytes: int,
) -> Plan:
    """Run modes once and make a plan of them, whether or not they fit."""
    network.set_mode(modes)
    return Plan(
        modes,
        getattr(network, "channels", None),
        budget_bytes,
        profile.peak_bytes(modes),
        trace_bytes(network, step).peak_bytes,
        profile.seconds(modes),
        dict(profile.about),
    )


def held_to_limit(
    profile: Profile,
    solve: Callable[[Profile], Plan],
    measured: Callable[[Mapping[str, str]], float],
) -> Plan:
    """Solve, measure the error of the plan, and solve again if it was above the limit.

    Errors of blocks add up as independent ones do, by their squares, which is right but
    for what they have in common. If that leads nowhere, the plan is lossless.

    Parameters
    ----------
    profile : Profile
        With a limit, ``max_gradient_error``.
    solve : callable
        Makes a plan of a profile.
    measured : callable
        Runs modes and gives the error of the gradient.

    Returns
    -------
    Plan
        With both errors, predicted and measured; the measured one is within the limit.

    Raises
    ------
    Infeasible
        If there is none.
    """
    limit = profile.max_gradient_error
    assert limit is not None
    allowed = limit
    for _ in range(_TRIES):
        found = solve(replace(profile, max_gradient_error=allowed))
        if Mode.COMPRESS.value not in found.modes.values():
            return found
        error = measured(found.modes)
        if error <= limit:
            return replace(
                found,
                predicted_gradient_error=profile.gradient_error(found.modes),
                measured_gradient_error=error,
            )
        # In proportion to what was predicted, so that the next plan is another one.
        predicted = profile.gradient_error(found.modes)
        allowed = predicted * _NEARER * limit / error if error < math.inf else 0.0
    return solve(replace(profile, max_gradient_error=0.0))
