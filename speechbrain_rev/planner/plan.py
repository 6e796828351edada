"""A plan: what each block keeps, so that a step is as fast as a memory budget allows."""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from speechbrain_rev.devices import ASSUMED
from speechbrain_rev.files import (
    made_of,
    parse_json,
    read_json,
    refusing,
    write_whole,
)
from speechbrain_rev.modes import Mode, is_lossless
from speechbrain_rev.planner.choice import Choice, choose
from speechbrain_rev.planner.compression_probe import checked_limit, without_optimizer
from speechbrain_rev.planner.knapsack import Infeasible
from speechbrain_rev.planner.memory import live_bytes_peak, unless_memory_runs_out
from speechbrain_rev.planner.network import Network, as_network, device_of, give
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.profiling import Profiler, profiler_of
from speechbrain_rev.planner.refusals import refusal
from speechbrain_rev.planner.step import (
    Step,
    Trial,
    a_level_down,
    step_of,
)
from speechbrain_rev.planner.trace import trace_bytes
from speechbrain_rev.sizes import (
    reserve_text,
    size_text,
    whole_bytes,
)

# Counts in ``about``, beside names that end in _bytes.
_COUNTS = {"batch", "blocks", "embedding_dim", "frames", "n_mels", "timed batch"}

#: How often a plan above its budget, or above the limit of its error, is made anew.
_TRIES = 8

# The part of a limit that is allowed once it was exceeded: no plan shall just miss it.
_NEARER = 0.98

# By what part of the budget the next plan takes less if memory ran out.
_LESS = 0.1

# The part of the time of storing every block that is no noise of a clock.
_FASTER = 0.02

#: The budget of a plan, and what of it a step does not have, in its ``about``.
SHARES = "memory_budget_bytes", "staying_bytes", "reserved_bytes"


@dataclass(frozen=True)
class Plan:
    """What each block keeps, and what that takes.

    Attributes
    ----------
    modes : mapping of str to str
        A mode for each block.
    channels : sequence of int or None, or None
        Channels at a time, at each level of an encoder; None for another network.
    budget_bytes : int
        What a training step was allowed beside weights, gradients and optimizer.
    predicted_bytes, measured_bytes : int
        Peak of live tensors that a step makes: predicted by the profile, and counted when
        the plan was run.
    seconds : float
        Predicted time of a step.
    about : mapping of str to str
        What was planned, where, and where its times are from.
    predicted_gradient_error, measured_gradient_error : float
        Relative error of the gradient, on the example batch and with the weights of that
        moment; 0 for a lossless plan.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from speechbrain_rev.planner import plan
    >>> block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> network = nn.Sequential(*(block() for _ in range(8)))
    >>> tight = plan(network, torch.randn(512, 64), 2_500_000, blocks=["?"])
    >>> tight.measured_bytes <= 2_500_000, Plan.from_json(tight.to_json()) == tight
    (True, True)
    """

    modes: Mapping[str, str]
    channels: Sequence[int | None] | None
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    seconds: float
    about: Mapping[str, str]
    predicted_gradient_error: float = 0.0
    measured_gradient_error: float = 0.0

    def apply(self, module: nn.Module) -> None:
        """Give the blocks of a module the modes of the plan, and channels at a time.

        Parameters
        ----------
        module : nn.Module
            What was planned, or another one with such blocks.

        Raises
        ------
        ValueError
            If it has other blocks, or they cannot have what the plan gives: then the
            module is as it was.
        """
        own = hasattr(module, "named_blocks")
        network = as_network(module, () if own else list(self.modes))
        if network.named_blocks().keys() != self.modes.keys():
            raise ValueError(self._not_made_for(module, network))
        give(network, self.modes, self.channels)

    def _not_made_for(self, module: nn.Module, network: Network) -> str:
        """Name both networks, and a block that only one of them has."""
        about = self.about
        then = about.get("encoder") or about.get("network") or "another network"
        row = getattr(module, "architecture", None)
        now = type(module).__name__ if row is None else row.name
        own = network.named_blocks()
        lacking = [name for name in self.modes if name not in own]
        further = [name for name in own if name not in self.modes]
        which = [f"which has no block {lacking[0]!r}"] if lacking else []
        which += [f"the plan none for {further[0]!r}"] if further else []
        return (
            f"The plan was made for {then} with {len(self.modes)} blocks, and this is "
            f"{now} with {len(own)}, {', and '.join(which)}. Plan anew for this network."
        )

    def with_about(self, **more: str) -> Plan:
        """Make the same plan with more in ``about``."""
        return replace(self, about={**self.about, **more})

    def differences(
        self, made_for: Mapping[str, str]
    ) -> dict[str, tuple[str | None, str]]:
        """Collect entries of ``about`` with another value than is asked for.

        Examples
        --------
        >>> plan = Plan({}, None, 9, 8, 8, 1.0, {"batch": "4", "frames": "200"})
        >>> plan.differences({"batch": "8", "frames": "200"})
        {'batch': ('4', '8')}
        """
        return {
            name: (self.about.get(name), value)
            for name, value in made_for.items()
            if self.about.get(name) != value
        }

    def to_json(self) -> str:
        """Write it as a JSON document, which ``from_json`` reads."""
        return plans_to_json([self])

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote; of several plans the last one.

        Raises
        ------
        ValueError
            If the text is no plan.
        """
        return plans_from_json(text)[-1]

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Plan:
        """Make a plan of the values of its fields, as JSON has them.

        Raises
        ------
        ValueError
            If no plan has these.
        """
        plan = made_of(cls, values)
        plan._check()
        return plan

    def _check(self) -> None:
        """Refuse modes and counts that are none, and numbers that no plan has together."""
        for mode in self.modes.values():
            Mode(mode)
        for name, text in self.about.items():
            is_count = name in _COUNTS or name.endswith("_bytes")
            if is_count and not re.fullmatch(r"\d{1,18}", text, re.ASCII):
                raise ValueError(
                    f"{name} is {text[:60]!r} and takes digits, at most 18"
                )
        sizes = [int(self.about[name]) for name in SHARES if name in self.about]
        if len(sizes) == len(SHARES) and sizes[0] - sum(sizes[1:]) != self.budget_bytes:
            whole, staying, reserved = SHARES
            raise ValueError(
                f"budget_bytes is {self.budget_bytes}, but {whole} less {staying} and "
                f"{reserved} is {sizes[0] - sum(sizes[1:])}"
            )
        if self.measured_bytes > self.budget_bytes:
            raise ValueError(
                f"measured_bytes is {self.measured_bytes}, more than budget_bytes, which "
                f"is {self.budget_bytes}"
            )
        errors = self.predicted_gradient_error, self.measured_gradient_error
        if is_lossless(self.modes.values()) and any(errors):
            raise ValueError(
                f"gradient errors are {errors[0]:g} and {errors[1]:g}, and no block "
                "compresses"
            )

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read it from a file; of several plans, as a run may keep, the newest.

        Raises
        ------
        ValueError
            If the file is no plan; the message names it.
        OSError
            If it cannot be read.
        """
        return load_plans(path)[-1]

    def counts(self) -> str:
        """Count the blocks of each mode, in words."""
        of_mode = Counter(self.modes.values())
        present = (mode for mode in Mode if mode in of_mode)
        return ", ".join(f"{of_mode[mode]} {mode.value}" for mode in present)

    def __str__(self) -> str:
        return (
            f"{self.counts()}: peak {size_text(self.measured_bytes)} counted "
            f"({size_text(self.predicted_bytes)} predicted) of "
            f"{size_text(self.budget_bytes)}{self.time_text()}{self.error_text()}"
        )

    def budget_text(self, staying: str = "optimizer states and the batch") -> str:
        """Put in words how the whole budget is shared out; nothing where no one knows.

        Parameters
        ----------
        staying : str
            What there is beside weights and gradients from one step to the next.
        """
        budget, fixed, reserved = (int(self.about.get(name, 0)) for name in SHARES)
        if not (budget and fixed):
            return ""
        aside = f", {reserve_text(reserved)}" if reserved else ""
        return (
            f"budget {size_text(budget)}, {size_text(fixed)} of it for weights, gradients, "
            f"{staying}{aside}"
        )

    @property
    def slowdown(self) -> float:
        """Predicted time over that of storing every block; NaN where that is not known."""
        stored = float(self.about.get("stored_seconds", 0.0))
        return self.seconds / stored if stored else math.nan

    def time_text(self) -> str:
        """Put in words how long a step takes; nothing where no one knows it stored."""
        if math.isnan(self.slowdown):
            return ""
        return f"; {self.slowdown:.2f} times the time of storing every block"

    def error_text(self) -> str:
        """Put in words by how much gradients differ; nothing of a lossless plan."""
        if is_lossless(self.modes.values()):
            return ""
        errors = self.predicted_gradient_error, self.measured_gradient_error
        predicted, measured = (f"{100 * error:.2g} %" for error in errors)
        return f"; gradient error {predicted} predicted, {measured} measured"


def plans_to_json(plans: Sequence[Plan]) -> str:
    """Write plans as a JSON document, which ``plans_from_json`` reads."""
    return json.dumps({"plans": [asdict(plan) for plan in plans]}, indent=1) + "\n"


def plans_from_json(text: str) -> list[Plan]:
    """Read what ``plans_to_json`` wrote: at least one plan.

    Raises
    ------
    ValueError
        If the text is something else.
    """
    with refusing("The text is no plan", "Plan anew."):
        return _plans_of(parse_json(text))


def load_plans(path: str | Path) -> list[Plan]:
    """Read plans from a file, as ``Plan.load`` does."""
    with refusing(f"{path} is no plan", "Plan anew."):
        return _plans_of(read_json(path))


def _plans_of(document: Mapping[str, Any]) -> list[Plan]:
    plans = [*map(Plan.of_values, {**document}["plans"])]
    if not plans:
        raise ValueError("plans is empty")
    return plans


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
        What a step may allocate beside weights, gradients and optimizer state; or a
        size, as "800MB" (2**20 bytes each) or "2GiB".
    blocks : str or sequence of str
        Names of submodules, or patterns of them. Empty for an encoder of ours, reversible
        chains, and to find what another network repeats (``repeated_blocks``). If blocks
        that were found do not fit, or some recompute, blocks within them are tried too,
        and taken if they fit or are faster.
    loss : callable or None
        Makes the loss of what the module returns; None for a sum of squares.
    measure : bool
        Whether a copy runs where the module is: then times are taken by the clock, and
        what is alive is counted there when the plan has been made. False estimates
        times from counts of operations and counts on meta tensors, as for a module on
        meta.
    max_gradient_error : float or None
        Relative error that compression may make in the gradient of all weights; blocks
        may then compress. It is measured on a copy where the module is, as are
        sizes: both are those of the example batch and of today's weights, and change
        in training, so leave some headroom. Bounds are those of the module's attribute
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
    speed = None if measure else ASSUMED
    step = step_of(module, example_batch, blocks=blocks, loss=loss, speed=speed)
    return plan_step(step, budget_bytes, max_gradient_error=max_gradient_error)


def plan_step(
    step: Step, budget_bytes: int | str, *, max_gradient_error: float | None = None
) -> Plan:
    """Choose what each block of a step keeps, and hold the plan to its budget.

    Parameters
    ----------
    step : Step
        The step. It is not changed.
    budget_bytes : int or str
        What all that the step counts may take.
    max_gradient_error : float or None
        As of :func:`plan`.

    Returns
    -------
    Plan
        Its ``budget_bytes`` are what was left for what modes change; ``about`` has the
        rest, if any: weights, gradients and optimizer state (``staying_bytes``), the
        reserve for CUDA and fragmentation (``reserved_bytes``); and what a step would take
        if all blocks stored (``stored_bytes``, ``stored_seconds``, predicted).

    Raises
    ------
    Infeasible
        If no plan fits. The message has by how much, and what helps.
    ValueError, MemoryError
        As of :func:`plan`.
    """
    budget = whole_bytes("budget_bytes", budget_bytes)
    if max_gradient_error is not None:
        checked_limit(max_gradient_error)
    with step.training():
        left = step.left_bytes(budget)
        profiler = profiler_of(step, max_gradient_error if left > 0 else None)
        try:
            if profiler.probe is None:
                # A budget that no plan fits is refused before times are taken.
                counted = choose(profiler, left, is_timed=False)
                if not counted.fits:
                    _run(profiler, counted, left)
            chosen = choose(profiler, left)
            planned = _run(profiler, chosen, left)
        except Infeasible as error:
            finer = None
            if step.searched and left > 0:
                finer = _planned_a_level_down(step, budget, max_gradient_error)
            if isinstance(finer, Plan):
                return finer
            refused = refusal(profiler, budget, error.needed_bytes)
            if finer is not None and finer.needed_bytes < refused.needed_bytes:
                refused = finer
            raise refused from None
        del profiler  # Its copy of the network takes memory.
    profile, fixed = chosen.profile, step.fixed_bytes(step.batch)
    stored = dict.fromkeys(planned.modes, Mode.STORE)
    more: dict[str, float] = {"stored_bytes": profile.peak_bytes(stored)}
    if not step.channels:  # With fewer channels at a time storing is slower, too.
        more["stored_seconds"] = profile.seconds(stored)
    about = {name: str(value) for name, value in more.items()}
    if fixed or step.is_card:
        about |= shares(budget, fixed, left)
    planned = planned.with_about(**about)
    if step.searched and any(
        Mode(mode).alone is Mode.RECOMPUTE for mode in planned.modes.values()
    ):
        finer = _planned_a_level_down(step, budget, max_gradient_error)
        if isinstance(finer, Plan) and finer.slowdown < planned.slowdown - _FASTER:
            return finer
    return planned


def _planned_a_level_down(
    step: Step, budget_bytes: int, limit: float | None
) -> Plan | Infeasible | None:
    """Plan for the blocks within those that were found; None if they cannot be planned."""
    with warnings.catch_warnings():
        # Nobody named these blocks, and what concerns the step was reported of the others.
        warnings.simplefilter("ignore")
        try:
            if (finer := a_level_down(step)) is not None:
                return plan_step(finer, budget_bytes, max_gradient_error=limit)
        except Infeasible as refused:
            return refused
        except ValueError:  # as of a block that returns no tensor
            pass
    return None


def shares(budget_bytes: int, staying_bytes: int, left_bytes: int) -> dict[str, str]:
    """Record how a budget is shared out, for ``about`` of a plan.

    Parameters
    ----------
    budget_bytes : int
        The whole.
    staying_bytes : int
        Weights, gradients, optimizer state and what else modes do not change.
    left_bytes : int
        What a step may take. The rest is the reserve for CUDA and fragmentation.

    Returns
    -------
    dict
        By the names in ``SHARES``.

    Examples
    --------
    >>> shares(10, 3, 5)
    {'memory_budget_bytes': '10', 'staying_bytes': '3', 'reserved_bytes': '2'}
    """
    sizes = budget_bytes, staying_bytes, budget_bytes - staying_bytes - left_bytes
    return {name: str(size) for name, size in zip(SHARES, sizes, strict=True)}


def plan_within(profile: Profile, trial: Trial, budget_bytes: int) -> Plan:
    """Solve for a budget, run the plan once, and solve again if it was above.

    If that leads nowhere, the lightest plan that is known is run.

    Parameters
    ----------
    profile : Profile
        Of the trial.
    trial : Trial
        On which plans are tried, without contents too.
    budget_bytes : int
        What a step may allocate.

    Returns
    -------
    Plan
        Whose measured peak is within the budget.

    Raises
    ------
    Infeasible
        If none fits; it has what the lightest one took.
    """
    allowed = budget_bytes
    for _ in range(_TRIES):
        try:
            modes = profile.fastest(allowed)
        except Infeasible:
            break
        tried = _tried(profile, trial, modes, budget_bytes)
        if tried.measured_bytes <= budget_bytes:
            return tried
        allowed -= tried.measured_bytes - budget_bytes
    tried = _tried(profile, trial, profile.lightest(), budget_bytes)
    if tried.measured_bytes > budget_bytes:
        raise Infeasible(tried.measured_bytes, budget_bytes)
    return tried


def _tried(
    profile: Profile, trial: Trial, modes: dict[str, str], budget_bytes: int
) -> Plan:
    """Run modes once and make a plan of them, whether or not they fit."""
    trial.network.set_mode(modes)
    return Plan(
        modes,
        getattr(trial.network, "channels", None),
        budget_bytes,
        profile.peak_bytes(modes),
        trace_bytes(trial.network, trial.run).peak_bytes,
        profile.seconds(modes),
        dict(profile.about),
    )


def _run(profiler: Profiler, chosen: Choice, left_bytes: int) -> Plan:
    """Make a plan that is within its budget, and its limit, when it is run."""

    def solve(profile: Profile, left: int) -> Plan:
        trial = profiler.counted(chosen.channels).trial
        if trial is not None:
            return plan_within(profile, trial, left)
        with profiler.bare(chosen.channels) as bare:
            return plan_within(profile, bare, left)

    if profiler.probe is None:
        return solve(chosen.profile, left=left_bytes)
    profiler.probe.set_channels(chosen.channels)
    with without_optimizer():
        return _held(profiler, chosen, solve, left_bytes)


def _held(
    profiler: Profiler,
    chosen: Choice,
    solve: Callable[..., Plan],
    left_bytes: int,
) -> Plan:
    """Make a plan whose error and whose bytes are within limits when the batch runs."""
    assert profiler.probe is not None
    allowed, least = left_bytes, math.inf
    is_real = profiler.counted(chosen.channels).trial is not None
    for _ in range(_TRIES):
        try:
            planned = held_to_limit(
                chosen.profile,
                functools.partial(solve, left=allowed),
                profiler.probe.gradient_error,
            )
        except Infeasible as error:
            # It may fit the budget, of which less was allowed.
            if error.needed_bytes > left_bytes:
                least = min(least, error.needed_bytes)
            break
        if is_lossless(planned.modes.values()):
            if allowed == left_bytes:
                return planned
            # It was made for less than a lossless plan has.
            break
        peak = (
            planned.measured_bytes if is_real else _peak_bytes(profiler.step, planned)
        )
        if peak is not None and peak <= left_bytes:
            return replace(planned, measured_bytes=peak, budget_bytes=left_bytes)
        least = min(least, math.inf if peak is None else peak)
        allowed -= int(_LESS * left_bytes) if peak is None else peak - left_bytes
    try:
        return solve(replace(chosen.profile, max_gradient_error=0.0), left=left_bytes)
    except Infeasible as error:
        needed = int(min(least, error.needed_bytes))
        raise Infeasible(needed, left_bytes) from None


def _peak_bytes(step: Step, plan: Plan) -> int | None:
    """Run the whole batch; None if memory ran out."""

    def peak() -> int:
        trial = step.trial()
        give(trial.network, plan.modes, plan.channels)
        return live_bytes_peak(trial.run, device=device_of(trial.network))

    return unless_memory_runs_out(peak)


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
        planned = solve(replace(profile, max_gradient_error=allowed))
        if is_lossless(planned.modes.values()):
            return planned
        error = measured(planned.modes)
        predicted = profile.gradient_error(planned.modes)
        if error <= limit:
            return replace(
                planned,
                predicted_gradient_error=predicted,
                measured_gradient_error=error,
            )
        # In proportion to what was predicted, so that the next plan is another one.
        allowed = predicted * _NEARER * limit / error if error < math.inf else 0.0
    return solve(replace(profile, max_gradient_error=0.0))
