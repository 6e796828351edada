"""A plan: what each block keeps, so that a step is as fast as a memory budget allows."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from speechbrain_rev.devices import described, random_devices
from speechbrain_rev.planner.calling import (
    copied_to_meta,
    own_batch,
    step_of,
    tensors_of,
    trainable,
)
from speechbrain_rev.planner.counting import profile_bytes
from speechbrain_rev.planner.network import (
    Unreconstructed,
    as_network,
    not_made_for,
)
from speechbrain_rev.planner.problem import Infeasible
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.planner.room import unless_memory_runs_out
from speechbrain_rev.planner.timing import estimated_seconds, measured_seconds
from speechbrain_rev.planner.trial import (
    CompressionTrial,
    checked_limit,
    try_compression,
)
from speechbrain_rev.planner.verify import reproduced, warn_refused
from speechbrain_rev.planner.within import held_to_limit, plan_within
from speechbrain_rev.reversible import Mode, ReversibleChain
from speechbrain_rev.sizes import size_text, whole_bytes
from speechbrain_rev.whole_files import write_whole


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
    predicted_gradient_error, measured_gradient_error : float
        By what part of its norm a plan that compresses puts the gradient off, of the
        example batch and with the weights of then; 0 for a lossless plan.

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
            If it has other blocks.
        """
        own = hasattr(module, "named_blocks")
        network = as_network(module, () if own else list(self.modes))
        if network.named_blocks().keys() != self.modes.keys():
            raise ValueError(not_made_for(module, network, self.modes, self.about))
        if self.channels is not None:
            cast(Any, network).set_channels(self.channels)
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
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: This is no plan ({error}). Plan anew."
            ) from error
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
            f"{size_text(self.budget_bytes)}{self.error_text()}"
        )

    def error_text(self) -> str:
        """Say by how much gradients differ; nothing of a lossless plan."""
        if Mode.COMPRESS.value not in self.modes.values():
            return ""
        errors = self.predicted_gradient_error, self.measured_gradient_error
        predicted, measured = (f"{100 * error:.2g} %" for error in errors)
        return f"; gradient error {predicted} predicted, {measured} measured"


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
        Whether times are taken by the clock, on a copy where the module is; False
        estimates them from counts of operations, as for a module on meta.
    max_gradient_error : float or None
        By what part of its norm compression may put the gradient of all weights off;
        blocks may then compress. It is measured on a copy where the module is, as are
        sizes: both are those of the example batch and of today's weights, and change
        in training, so leave some room. Bounds are an encoder's or a chain's own, else
        those of ``compress_activations``. None for lossless plans only.

    Returns
    -------
    Plan
        Never over the budget when it was run on meta tensors, or, with
        ``max_gradient_error``, on the example batch.

    Raises
    ------
    Infeasible
        If no plan fits.
    ValueError
        If blocks do not run one after the other, or the budget is no size, or the limit
        of the error no number above 0, or it is given for a module on meta.
    MemoryError
        If memory runs out while times are taken.

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
    trial = None
    if max_gradient_error is not None:
        limit = checked_limit(max_gradient_error)
        trial = try_compression(module, example_batch, blocks, loss)
    profile = profile_module(
        module, example_batch, blocks=blocks, loss=loss, measure=measure, trial=trial
    )
    try:
        if trial is not None:
            profile = profile.with_errors(trial.squared_errors, limit)
            network, step = trial.network, trial.step
            solve = partial(
                plan_within, network=network, step=step, budget_bytes=budget
            )
            return held_to_limit(profile, solve, trial.gradient_error)
        network, step = copied_to_meta(module, example_batch, blocks, loss)
        return plan_within(profile, network, step, budget)
    except Infeasible as error:
        if trial is not None:
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


def profile_module(
    module: nn.Module,
    example_batch: Any,
    *,
    blocks: str | Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    measure: bool = True,
    trial: CompressionTrial | None = None,
) -> Profile:
    """Find out what each block costs in each mode.

    Parameters
    ----------
    module, example_batch, blocks, loss, measure
        As for ``plan``.
    trial : CompressionTrial or None
        Of the module, if blocks may compress: its steps are counted and timed.

    Returns
    -------
    Profile
        Bytes counted on meta tensors; times measured where the module is, or estimated.

    Raises
    ------
    ValueError
        If blocks do not run one after the other.
    MemoryError
        If memory runs out while times are taken.
    """
    refused, verified = _unreconstructed(module, example_batch, blocks)
    if trial is None:
        own, step = copied_to_meta(module, example_batch, blocks, loss)
    else:
        own, step = trial.network, trial.step
    network = Unreconstructed(own, refused)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if measure and device.type != "meta":
        times = f"measured on {described(device)}"
        timed = unless_memory_runs_out(
            lambda: (
                _timed(module, example_batch, blocks, loss, refused, device)
                if trial is None
                else measured_seconds(network, step, device)
            )
        )
        if timed is None:
            raise MemoryError(
                f"Memory ran out on {device} while times were taken, for which every "
                "block stores for once. Give measure=False, which estimates times from "
                "counts of operations, or a smaller example batch."
            )
        seconds = timed
    else:
        seconds = estimated_seconds(network, step)
        times = "estimated from counts of operations"
    about = {
        "network": type(module).__name__,
        "inputs": str([list(x.shape) for x in tensors_of(example_batch)]),
        "seconds": times,
        "bytes": "counted on meta tensors" if trial is None else f"counted on {device}",
        "reconstruction": verified,
        "torch": torch.__version__,
    }
    return profile_bytes(network, step, seconds, about)


def _timed(
    module: nn.Module,
    example_batch: Any,
    blocks: str | Sequence[str],
    loss: Callable[[Any], Tensor] | None,
    refused: Sequence[str],
    device: torch.device,
) -> dict[tuple[str, str], float]:
    """Take the times of a copy: training steps change gradients and statistics."""
    own = trainable(copy.deepcopy(module))
    run = step_of(own, own_batch(example_batch), loss)
    network = Unreconstructed(as_network(own, blocks), refused)
    with torch.random.fork_rng(random_devices(device)):
        return measured_seconds(network, run, device)


def _unreconstructed(
    module: nn.Module, example_batch: Any, blocks: str | Sequence[str]
) -> tuple[list[str], str]:
    """Name blocks that are not to be reconstructed, and say how that was found."""
    chained = [m for m in module.modules() if isinstance(m, ReversibleChain)]
    if not chained:
        return [], "no block reconstructs"
    numbers = [*module.parameters(), *module.buffers(), *tensors_of(example_batch)]
    if any(x.is_meta for x in numbers):
        return [], "not verified: no numbers on meta"
    found = reproduced(module, example_batch, blocks)
    refused = warn_refused(found, stacklevel=4)
    return refused, f"verified: {len(found) - len(refused)} of {len(found)} blocks"
