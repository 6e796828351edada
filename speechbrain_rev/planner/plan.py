"""A plan: what each block keeps, so that a step is as fast as a memory budget allows."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.planner.calling import (
    own_batch,
    tensors_of,
    trainable,
    training_step,
)
from speechbrain_rev.planner.knapsack import solve
from speechbrain_rev.planner.network import Network, Unreconstructed, as_network
from speechbrain_rev.planner.problem import GIB, Infeasible
from speechbrain_rev.planner.profile import Profile, profile_bytes
from speechbrain_rev.planner.timing import estimated_seconds, measured_seconds
from speechbrain_rev.planner.trace import Step, trace_bytes
from speechbrain_rev.planner.verify import reproduced
from speechbrain_rev.reversible import Mode, ReversibleChain

#: How often a plan that was over the budget when it ran is made anew.
_TRIES = 8


@dataclass(frozen=True)
class Plan:
    """What each block keeps, and what that takes.

    Attributes
    ----------
    modes : mapping of str to str
        A mode for each block.
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
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    seconds: float
    about: Mapping[str, str]

    def apply(self, module: nn.Module) -> None:
        """Give the blocks of a module the modes of the plan.

        Parameters
        ----------
        module : nn.Module
            What was planned, or another one with such blocks.

        Raises
        ------
        ValueError
            If it has other blocks.
        """
        own = hasattr(module, "named_blocks")
        network = as_network(module, () if own else list(self.modes))
        if network.named_blocks().keys() != self.modes.keys():
            raise ValueError(
                f"The plan is for {', '.join(self.modes)}, but {type(module).__name__} "
                f"has {', '.join(network.named_blocks())}. Plan anew for this network."
            )
        network.set_mode(self.modes)

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
        try:
            found = cls(**json.loads(text))
            modes = {name: Mode(mode).value for name, mode in found.modes.items()}
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"This is no plan ({error}). Plan anew.") from error
        return replace(found, modes=modes)

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read it from a file."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for mode in self.modes.values():
            counts[mode] = counts.get(mode, 0) + 1
        blocks = ", ".join(f"{n} {mode}" for mode, n in counts.items())
        return (
            f"{blocks}: peak {self.measured_bytes / GIB:.3f} GiB (predicted "
            f"{self.predicted_bytes / GIB:.3f}) of {self.budget_bytes / GIB:.3f} GiB"
        )


def plan(
    module: nn.Module,
    example_batch: Any,
    budget_bytes: int,
    *,
    blocks: Sequence[str] = (),
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
    budget_bytes : int
        What a step may allocate beside weights, their gradients and the optimizer.
    blocks : sequence of str
        Names of submodules, or patterns of them, if it is no encoder of ours and has no
        reversible chains alone.
    loss : callable or None
        Makes the loss of what the module returns; None for a sum of squares.
    measure : bool
        Whether times are taken by the clock, on a copy where the module is; False
        estimates them from counts of operations, as for a module on meta.

    Returns
    -------
    Plan
        Never over the budget when it was run on meta tensors.

    Raises
    ------
    Infeasible
        If no plan fits.
    ValueError
        If blocks do not run one after the other.

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
    profile = profile_module(
        module, example_batch, blocks=blocks, loss=loss, measure=measure
    )
    network, step = _on_meta(module, example_batch, blocks, loss)
    return plan_within(profile, network, step, budget_bytes)


def plan_within(
    profile: Profile, network: Network, step: Step, budget_bytes: int
) -> Plan:
    """Solve for a budget, run the plan once, and solve again if it was above.

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
        If no plan fits.
    """
    problem, allowed = profile.problem(), budget_bytes
    names = [block.name for block in profile.blocks]
    for _ in range(_TRIES):
        try:
            found = solve(problem, allowed)
        except Infeasible as error:
            # What plans took above their prediction is needed too.
            needed_bytes = error.needed_bytes + budget_bytes - allowed
            raise Infeasible(needed_bytes, budget_bytes) from None
        # The last mode is that of what follows the blocks.
        modes = dict(zip(names, found[:-1], strict=True))
        network.set_mode(modes)
        measured_bytes = trace_bytes(network, step).peak_bytes
        if measured_bytes <= budget_bytes:
            return Plan(
                modes,
                budget_bytes,
                profile.peak_bytes(modes),
                measured_bytes,
                profile.seconds(modes),
                dict(profile.about),
            )
        allowed -= measured_bytes - budget_bytes
    raise Infeasible(measured_bytes, budget_bytes)


def profile_module(
    module: nn.Module,
    example_batch: Any,
    *,
    blocks: Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    measure: bool = True,
) -> Profile:
    """Find out what each block costs in each mode.

    Parameters
    ----------
    module, example_batch, blocks, loss, measure
        As for ``plan``.

    Returns
    -------
    Profile
        Bytes counted on meta tensors; times measured where the module is, or estimated.

    Raises
    ------
    ValueError
        If blocks do not run one after the other.
    """
    refused, verified = _unreconstructed(module, example_batch, blocks)
    on_meta, step = _on_meta(module, example_batch, blocks, loss)
    network = Unreconstructed(on_meta, refused)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if measure and device.type != "meta":
        # A copy: training steps change gradients and running statistics.
        own = trainable(copy.deepcopy(module))
        run = training_step(own, own_batch(example_batch), loss)
        timed = Unreconstructed(as_network(own, blocks), refused)
        with torch.random.fork_rng(_cuda(device)):
            seconds = measured_seconds(timed, run, device)
        times = f"measured on {described(device)}"
    else:
        seconds = estimated_seconds(network, step)
        times = "estimated from counts of operations"
    about = {
        "network": type(module).__name__,
        "inputs": str([list(x.shape) for x in tensors_of(example_batch)]),
        "seconds": times,
        "bytes": "counted on meta tensors",
        "reconstruction": verified,
        "torch": torch.__version__,
    }
    return profile_bytes(network, step, seconds, about)


def _unreconstructed(
    module: nn.Module, example_batch: Any, blocks: Sequence[str]
) -> tuple[list[str], str]:
    """Name blocks that are not to be reconstructed, and say how that was found."""
    chained = [m for m in module.modules() if isinstance(m, ReversibleChain)]
    if not chained:
        return [], "no block reconstructs"
    numbers = [*module.parameters(), *module.buffers(), *tensors_of(example_batch)]
    if any(x.is_meta for x in numbers):
        return [], "not verified: no numbers on meta"
    found = reproduced(module, example_batch, blocks)
    refused = [name for name, same in found.items() if not same]
    if refused:
        warnings.warn(
            f"Not reconstructed, for their inverse does not give back what went in: "
            f"{', '.join(refused)}. Their residual functions must compute the same twice "
            "in evaluation, and no NaN; plans without it store or recompute them.",
            stacklevel=4,
        )
    return refused, f"verified: {len(found) - len(refused)} of {len(found)} blocks"


def _on_meta(
    module: nn.Module,
    example_batch: Any,
    blocks: Sequence[str],
    loss: Callable[[Any], Tensor] | None,
) -> tuple[Network, Step]:
    """Copy a module without its contents, with a training step of it."""
    own = trainable(copy.deepcopy(module).to("meta"))
    step = training_step(own, own_batch(example_batch, "meta"), loss)
    return as_network(own, blocks), step


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def described(device: torch.device) -> str:
    """Name a card, or the CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} thread(s)"
