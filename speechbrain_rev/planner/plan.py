"""A plan: what each block keeps, so that a step is as fast as a memory budget allows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from speechbrain_rev.planner import documents
from speechbrain_rev.planner.network import Network, as_network, give, not_made_for
from speechbrain_rev.planner.problem import Infeasible
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.profiling import counted, in_training, timed
from speechbrain_rev.planner.trace import Step, trace_bytes
from speechbrain_rev.reversible import Mode
from speechbrain_rev.sizes import size_text, whole_bytes
from speechbrain_rev.whole_files import write_whole

#: How often a plan that was over the budget when it ran is made anew.
_TRIES = 8


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
        Peak of live tensors that a step makes: as the profile says, and counted when the
        plan was run.
    seconds : float
        Predicted time of a step.
    about : mapping of str to str
        What was planned, where, and how its times were found.

    Examples
    --------
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
            raise ValueError(not_made_for(module, network, self.modes, self.about))
        give(network, self.modes, self.channels)

    def with_about(self, **more: str) -> Plan:
        """Give the plan with more said about it."""
        return replace(self, about={**self.about, **more})

    def to_json(self) -> str:
        """Write it as a JSON document, which ``from_json`` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote.

        Raises
        ------
        ValueError
            If the text is no plan.
        """
        with documents.reading("plan", "Plan anew."):
            found = cls(**documents.mapping("it", json.loads(text)))
            modes = documents.mapping("modes", found.modes)
            return cls(
                {name: Mode(mode).value for name, mode in modes.items()},
                documents.channels(found.channels),
                documents.whole("budget_bytes", found.budget_bytes),
                documents.whole("predicted_bytes", found.predicted_bytes),
                documents.whole("measured_bytes", found.measured_bytes),
                documents.duration("seconds", found.seconds),
                documents.texts("about", found.about),
            )

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read it from a file.

        Raises
        ------
        ValueError
            If the file is no plan; the message names it.
        OSError
            If it cannot be read.
        """
        try:
            with documents.reading("plan", "Plan anew."):
                text = Path(path).read_text(encoding="utf-8")
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def counts(self) -> str:
        """Say how many blocks have which mode."""
        found = Counter(self.modes.values())
        return ", ".join(f"{count} {mode}" for mode, count in found.items())

    def __str__(self) -> str:
        return (
            f"{self.counts()}: peak {size_text(self.measured_bytes)} counted "
            f"({size_text(self.predicted_bytes)} predicted) of "
            f"{size_text(self.budget_bytes)}"
        )


def plan(
    module: nn.Module,
    example_batch: Any,
    budget_bytes: int | str,
    *,
    blocks: str | Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    measure: bool = True,
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

    Returns
    -------
    Plan
        Never over the budget when it was run.

    Raises
    ------
    Infeasible
        If no plan fits.
    ValueError
        If blocks do not run one after the other, the budget is no size, nothing is
        trained, or a step needs numbers that are not to be computed.
    MemoryError
        If a step that stores everything does not fit where the module is, and none
        can run without numbers.

    Warns
    -----
    UserWarning
        If a step that stores everything does not fit where the module is, so that it is
        planned as with ``measure=False``, or what is counted without numbers may be
        off.

    Examples
    --------
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
    try:
        with in_training(module, example_batch):
            found = counted(module, example_batch, blocks, loss, measure=measure)
            # What no plan fits is told before times are taken.
            plan_within(found.profile, found.network, found.step, budget)
            return plan_within(timed(found), found.network, found.step, budget)
    except Infeasible as error:
        if blocks:
            error = error.with_remedy(
                f"{error.remedy[:-1]}; or name more blocks than by blocks={blocks!r}: "
                "what is outside of blocks is always stored."
            )
        raise error from None


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
