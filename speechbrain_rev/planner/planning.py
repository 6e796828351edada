"""The plan of a network: whatever it is, what its blocks keep within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from speechbrain_rev.compression.selected import refuse_what_is_compressed
from speechbrain_rev.planner.plan import Plan
from speechbrain_rev.planner.probe import (
    checked_limit,
    probe_compression,
    refuse_without_numbers,
)
from speechbrain_rev.planner.problem import Infeasible
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.profiling import (
    counted,
    in_training,
    refuse_without_room,
    timed,
)
from speechbrain_rev.planner.within import held_to_limit, plan_within
from speechbrain_rev.sizes import whole_bytes


def plan(
    module: nn.Module,
    example_batch: Any,
    budget_bytes: int | str,
    *,
    blocks: str | Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    measure: bool = True,
    max_gradient_error: float | None = None,
) -> Plan:
    """Choose what each block keeps, so that a training step is as fast as memory allows.

    Parameters
    ----------
    module : nn.Module
        A network, which is not changed: ``Plan.apply`` does that.
    example_batch : tensor, or tuple, list or dict of such
        What a training step calls it with: a tuple or list are its arguments, a dict
        its keywords.
    budget_bytes : int or str
        What a step may allocate beside weights, their gradients and the optimizer; or a
        size, as "8MB" (1e6 bytes each) or "2GiB".
    blocks : str or sequence of str
        Names of submodules, or patterns of them, if it is no encoder of ours and has no
        reversible chains alone.
    loss : callable or None
        Makes the loss of what the module returns; None for a sum of squares.
    measure : bool
        Whether a copy runs where the module is: then times are taken by the clock, and
        what is alive is counted there when the plan has been made. False estimates
        times from counts of operations and counts on meta tensors, as for a module on
        meta.
    max_gradient_error : float or None
        By what part of its norm compression may put the gradient of all weights off;
        blocks may then compress. It is measured on a copy where the module is, as are
        sizes: both are those of the example batch and of today's weights, and change
        in training, so leave some room. Bounds are those of the module's attribute
        ``compression``, an ``ActivationCompression``: encoders and chains have one, any
        other module may be given one; without it, bounds are its defaults. None for
        lossless plans only.

    Returns
    -------
    Plan
        Never over the budget when it was run on the example batch.

    Raises
    ------
    Infeasible
        If no plan fits.
    ValueError
        If blocks do not run one after the other, the budget or the limit of the
        error is not valid, nothing is trained, or a step needs numbers that are not to
        be computed: with a limit always.
    MemoryError
        If a step that stores everything does not fit where the module is, and none
        can run without numbers, or there is a limit of the error.

    Warns
    -----
    UserWarning
        If a step that stores everything does not fit where the module is, so that it is
        planned as with ``measure=False``, or what is counted without numbers may be
        off.

    Examples
    --------
    >>> import torch
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> halves = lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    >>> chain = ReversibleChain(AdditiveCoupling(halves(), halves()) for _ in range(6))
    >>> x = torch.randn(64, 32), torch.randn(64, 32)
    >>> plenty = plan(chain, x, budget_bytes=10**9, measure=False)
    >>> set(plenty.modes.values())
    {'store'}
    >>> modest = plan(chain, x, plenty.measured_bytes * 3 // 4, measure=False)
    >>> "store" in modest.modes.values(), modest.seconds > plenty.seconds
    (True, True)
    """
    budget = whole_bytes("budget_bytes", budget_bytes)
    limit = None if max_gradient_error is None else checked_limit(max_gradient_error)
    limited: Profile | None = None
    try:
        with in_training(module, example_batch):
            given = module, example_batch, blocks, loss
            probe = None
            if limit is not None:
                refuse_what_is_compressed(module)
                refuse_without_numbers(module, example_batch)
                refuse_without_room(*given)
                probe = probe_compression(*given)
            found = counted(*given, measure=measure, probe=probe)
            if probe is not None and limit is not None:
                profile = found.profile.with_errors(probe.squared_errors, limit)
                found = replace(found, profile=profile)
                limited = profile

            def solve(profile: Profile) -> Plan:
                return plan_within(profile, found.network, found.step, budget)

            solve(found.profile)  # what no plan fits is told before times are taken
            profile = timed(found, measure=measure)
            if probe is None:
                return solve(profile)
            return held_to_limit(profile, solve, probe.gradient_error)
    except Infeasible as error:
        if limited is not None and limited.is_held_up_by_limit():
            error = error.with_remedy(
                f"{error.remedy[:-1]}; or allow more than max_gradient_error="
                f"{max_gradient_error}."
            )
        if blocks:
            error = error.with_remedy(
                f"{error.remedy[:-1]}; or name more blocks than by blocks={blocks!r}: "
                "what is outside of blocks is always stored."
            )
        raise error from None
