"""A training step of a network, as a value: planned, profiled and swept wherever it runs.

Three functions make one: :func:`step_of` of any module, ``catalog.encoder_step`` of a row of
the table of encoders, ``catalog.training_step`` of the recipe's settings. All else in this
package takes a step and does not know where it came from.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from speechbrain_rev.bars import LONG_SECONDS, kept_alive, progress_bar
from speechbrain_rev.devices import Speed, random_devices
from speechbrain_rev.planner.memory import live_bytes_peak, make_gradients
from speechbrain_rev.planner.network import (
    Network,
    all_stored,
    as_network,
    call,
    device_of,
    names_blocks,
    own_batch,
    tensors_of,
)
from speechbrain_rev.planner.search import finer_blocks, in_turn, repeated_blocks
from speechbrain_rev.planner.trace import Run
from speechbrain_rev.reversible.monitor import Verify
from speechbrain_rev.reversible.norm import BatchNorm
from speechbrain_rev.reversible.wrapping import chosen_blocks, mode_refusal
from speechbrain_rev.sizes import reserve_of
from speechbrain_rev.torch_private import FakeTensorMode, tree_map, without_dispatch

_Module = TypeVar("_Module", bound=nn.Module)

#: Channels at a time, at each level of an encoder; None is all.
Channels = tuple["int | None", ...]

#: Makes a copy of a module for a trial: on its device, in training, with gradients.
Copy = Callable[[nn.Module], nn.Module]

#: Makes one number of a network's output: the loss.
Loss = Callable[[Any], Tensor]

#: Counts the runs of trials within ``Step.training``.
_bar: ContextVar[tqdm[Any] | None] = ContextVar("bar", default=None)


class NoStep(ValueError):
    """A network, a batch and a loss that make no training step."""


class Trial(NamedTuple):
    """A copy of a network in training, on which modes are tried.

    Attributes
    ----------
    module : nn.Module
        The copy.
    network : Network
        Its blocks.
    run : callable
        Runs forward and backward pass of it. It raises NoStep if its loss is no number to
        be trained by.
    """

    module: nn.Module
    network: Network
    run: Run


@dataclass(frozen=True)
class Alternative:
    """What may fit where a step does not.

    Attributes
    ----------
    words : str
        What to do. ``{fits}`` in them is the largest batch that fits, and they are left
        out where none does; ``{needed}`` is the budget that suffices, and ``{gpu}`` the
        smallest listed GPU that has it, without which they are left out, too.
    of_modes : bool
        Whether it helps only where a budget leaves something for what modes change.
    """

    words: str
    of_modes: bool = False


@dataclass(frozen=True)
class Step:
    """A training step of a network.

    Attributes
    ----------
    module : nn.Module
        What is trained, with its numbers or on meta. It is not changed: copies run.
    inputs : callable
        ``inputs(batch, device)`` makes what the network is called with, of so many
        samples: a tensor, or a tuple, list or dict of such.
    batch : int
        Samples.
    device : torch.device
        Where it will run.
    loss : callable
        ``loss(batch, device, copied)`` makes the loss of the network's output;
        ``copied(module)`` copies what else is trained, a classifier, for the trial.
    samples : str
        What the inputs are, in words.
    blocks : tuple of str
        Names of submodules, or patterns, if the module does not name its blocks itself.
    verify : {"first", "raise", "warn"} or None
        Of these blocks, as for ``recompute_blocks``. Unless it is "warn" or None, a trial
        that finds a difference raises, whatever kernels may do.
    searched : bool
        Whether the blocks were found: a plan may take those a level down.
    precision : {"fp32", "bf16", "fp16"}
        Of the autocast that it runs under; fp32 leaves it as it is.
    fixed_bytes : callable
        ``fixed_bytes(batch)`` counts what modes do not change: weights, gradients,
        optimizer states, classifier, input; 0 where budgets are for a step alone.
    is_card : bool
        Whether budgets are the memory of a GPU, of which a part is reserved for what
        cannot be counted.
    speed : Speed or None
        For which times are estimated; None where they are measured on ``device``.
    timed_batch : int or None
        Samples that suffice to measure times, which are scaled; None for all.
    shallow : callable or None
        Makes, on torch's default device, a network whose blocks are like those of
        ``module`` and fewer; its profile is stretched.
    channels : tuple of tuple of Channels
        What is searched beside modes: the usual ones from the largest on, then those that
        are tried where nothing fits with them. Empty to leave channels as they are.
    about : mapping of str to str
        What a plan for it is for.
    key : mapping of str to str or None
        What its profile depends on; None keeps none on disk.
    is_trusted : bool
        Whether what is counted without contents is known to be right, as tests hold of
        encoders. Else a real step is held against it.
    alternatives : callable
        ``alternatives(step)`` lists what may fit instead.
    """

    module: nn.Module
    inputs: Callable[[int, torch.device], Any]
    batch: int
    device: torch.device
    loss: Callable[[int, torch.device, Copy], Loss] = field(
        default=lambda batch, device, copied: sum_of_squares
    )
    samples: str = "the example batch"
    blocks: tuple[str, ...] = ()
    verify: Verify | None = "first"
    searched: bool = False
    precision: str = "fp32"
    fixed_bytes: Callable[[int], int] = field(default=lambda batch: 0)
    is_card: bool = False
    speed: Speed | None = None
    timed_batch: int | None = None
    shallow: Callable[[], nn.Module] | None = None
    channels: tuple[Sequence[Channels], ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    key: Mapping[str, str] | None = None
    is_trusted: bool = False
    alternatives: Callable[[Step], Sequence[Alternative]] = field(
        default=lambda step: [Alternative("a budget of {needed}")]
    )

    def at(self, batch: int) -> Step:
        """Make the same step of another batch."""

        def named(about: Mapping[str, str]) -> dict[str, str]:
            return {**about, "batch": str(batch)} if "batch" in about else {**about}

        key = None if self.key is None else named(self.key)
        return replace(self, batch=batch, about=named(self.about), key=key)

    def left_bytes(self, budget_bytes: int) -> int:
        """Give what a budget leaves for what modes change; below zero if nothing."""
        reserved = self.reserved_bytes(budget_bytes)
        return budget_bytes - reserved - self.fixed_bytes(self.batch)

    def reserved_bytes(self, budget_bytes: int) -> int:
        """Give what is reserved of a budget: 0 unless it is the memory of a GPU."""
        return reserve_of(budget_bytes) if self.is_card else 0

    @property
    def has_numbers(self) -> bool:
        """Whether it can run where it is, and not on meta tensors alone."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return self.device.type != "meta" and not any(x.is_meta for x in tensors)

    @property
    def copy_bytes(self) -> int:
        """What a copy of the module takes, with gradients."""
        weights = list(self.module.parameters())
        return sum(x.nbytes for x in (*weights, *weights, *self.module.buffers()))

    @property
    def tried_batch(self) -> int:
        """How many samples are run for times and gradient errors, if they fit."""
        return min(self.timed_batch or self.batch, self.batch)

    def stored_bytes(
        self, module: nn.Module | None = None, channels: Channels | None = None
    ) -> int:
        """Count the peak of a step that stores everything, as of :meth:`bare`."""
        with self.without_contents() as device:
            trial = self.bare(device, module, channels)
            trial.network.set_mode(all_stored(trial.network))
            return live_bytes_peak(trial.run, device=device_of(trial.network))

    def few(self, most: int) -> Any:
        """Make inputs of at most so many samples, or of all that there are."""
        try:
            return self.inputs(min(most, self.batch), self.device)
        except NoStep:
            return self.inputs(self.batch, self.device)

    @property
    def counts_on_meta(self) -> bool:
        """Whether meta tensors do as the device's; else fake ones, which are slower.

        Meta tensors know no autocast, and all that they convolve is contiguous.
        """
        weights = (p for p in self.module.parameters() if p.dim() == 4)
        return self.precision == "fp32" and all(p.is_contiguous() for p in weights)

    @contextlib.contextmanager
    def without_contents(self) -> Iterator[torch.device]:
        """Give the device of tensors without contents, and make all new ones such."""
        if self.counts_on_meta:
            yield torch.device("meta")
        else:
            with cpu_fakes():
                yield torch.device("cpu")

    def bare(
        self,
        device: torch.device,
        module: nn.Module | None = None,
        channels: Channels | None = None,
    ) -> Trial:
        """Make a trial without contents, within :meth:`without_contents`.

        Parameters
        ----------
        device : torch.device
            What that gives.
        module : nn.Module or None
            A network to be copied instead of the step's own.
        channels : Channels or None
            Channels at a time; None for those of the module.

        Returns
        -------
        Trial
            Of shapes alone.
        """

        def copied(module: _Module) -> _Module:
            return trainable(without_contents(module, device))

        return self._trial(copied, self.batch, device, module, channels)

    def trial(
        self,
        batch: int | None = None,
        module: nn.Module | None = None,
        channels: Channels | None = None,
    ) -> Trial:
        """Make a trial on the step's device.

        Parameters
        ----------
        batch : int or None
            Samples; None for all.
        module, channels
            As of :meth:`bare`.

        Returns
        -------
        Trial
            It shares no batch statistics with other processes, which may wait for it.
        """

        def copied(module: _Module) -> _Module:
            own = copy.deepcopy(module)
            for norm in own.modules():
                if isinstance(norm, BatchNorm):
                    norm.sync = False
            return trainable(own)

        batch = self.batch if batch is None else batch
        return self._trial(copied, batch, self.device, module, channels)

    def _trial(
        self,
        copied: Copy,
        batch: int,
        device: torch.device,
        module: nn.Module | None,
        channels: Channels | None,
    ) -> Trial:
        own = copied(self.module if module is None else module)
        if channels is not None:
            own.set_channels(channels)  # type: ignore[operator]
        inputs = self.inputs(batch, device)
        loss = self.loss(batch, device, copied)

        def run() -> None:
            with self.autocast(device):
                value = loss(call(own, inputs))
            _check_loss(value)
            value.backward()
            if (bar := _bar.get()) is not None:
                bar.set_postfix_str(f"batch {batch}", refresh=False)
                bar.update()

        verify: Verify | None = "raise" if self.verify == "first" else self.verify
        return Trial(own, as_network(own, self.blocks, verify), run)

    def autocast(
        self, device: torch.device
    ) -> contextlib.AbstractContextManager[object]:
        """Give the autocast that it runs under."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        half = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(device.type, half)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Let trials take gradients, whatever the caller does, and draw numbers unseen.

        If that takes long, a bar counts them.
        """
        # Leaving inference mode is taking gradients, under no_grad too.
        with (
            torch.inference_mode(False),
            torch.random.fork_rng(random_devices(self.device)),
            _counted_trials(self.about.get("encoder", self.about.get("network", ""))),
        ):
            yield


@contextlib.contextmanager
def _counted_trials(name: str) -> Iterator[None]:
    """Show a bar that counts the runs of all trials."""
    if _bar.get() is not None:
        yield
        return
    words = f"planning {name}".strip()
    with kept_alive(progress_bar(words, unit=" steps", delay=LONG_SECONDS)) as bar:
        token = _bar.set(bar)
        try:
            yield
        finally:
            _bar.reset(token)


def step_of(
    module: nn.Module,
    example_batch: Any,
    *,
    blocks: str | Sequence[str] = (),
    loss: Loss | None = None,
    speed: Speed | None = None,
) -> Step:
    """Make a training step of any module.

    Parameters
    ----------
    module : nn.Module
        A network, which is not changed.
    example_batch : tensor, or tuple, list or dict of such
        What a training step calls it with: a tuple or list are its arguments, a dict its
        keywords. Where all tensors have as many rows, other batches are made of these
        rows. A tensor on meta has no numbers: the step is then planned without computing.
    blocks : str or sequence of str
        Names of submodules, or patterns of them. Empty for an encoder of ours, reversible
        chains, and to find what another network repeats: then a copy runs a step.
    loss : callable or None
        Makes the loss of what the module returns; None for a sum of squares.
    speed : Speed or None
        For which times are estimated from counts of operations; None measures them where
        the module is.

    Returns
    -------
    Step
        Its budgets are for what a step makes, beside weights, gradients and optimizer.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    >>> step = step_of(network, torch.randn(8, 4), blocks="*")
    >>> step.batch, step.at(3).inputs(3, step.device).shape
    (8, torch.Size([3, 4]))
    """
    searched = not blocks and not names_blocks(module)
    if not searched:
        # Names are looked at first: their errors are about them.
        as_network(module, blocks)
    given = tensors_of(example_batch)
    tensors = [*module.parameters(), *given]
    home = tensors[0].device if tensors else torch.device("cpu")
    if any(x.is_meta for x in given):
        home = torch.device("meta")
    rows = {len(x) for x in given if x.dim()}
    has_rows = len(rows) == 1 and 0 not in rows
    batch = max(rows, default=1)

    def inputs(count: int, device: torch.device) -> Any:
        # At home tensors are where they were given, as lengths on the CPU.
        own = own_batch(example_batch, None if device == home else device)
        if count == batch:
            return own
        if not has_rows:
            raise NoStep(
                f"The example batch cannot be made into {count} samples: its tensors are "
                f"{[list(x.shape) for x in given]} and need the same number of rows, one "
                "for each sample. Give such a batch."
            )
        return tree_map(lambda x: _rows(x, count), own)

    def own_loss(batch: int, device: torch.device, copied: Copy) -> Loss:
        return loss or sum_of_squares

    def alternatives(step: Step) -> list[Alternative]:
        options = [
            Alternative("a batch of {fits}", of_modes=True),
            Alternative("shorter or smaller inputs"),
        ]
        if blocks or searched:
            # Braces of a pattern are none of the words.
            named = repr(blocks).replace("{", "{{").replace("}", "}}")
            more = (
                f"more blocks than blocks={named}"
                if blocks
                else "blocks=[...] of yours"
            )
            options.append(Alternative(f"{more}, for what is outside of blocks stores"))
        return [*options, Alternative("a budget of {needed}")]

    about = {
        "network": type(module).__name__,
        "inputs": str([list(x.shape) for x in given]),
    }
    step = Step(
        module,
        inputs,
        batch,
        home,
        own_loss,
        alternatives=alternatives,
        blocks=(blocks,) if isinstance(blocks, str) else tuple(blocks),
        speed=speed,
        about={**about, "batch": str(batch)} if has_rows else about,
    )
    if not searched:
        return step
    step, reasons = with_blocks(step)
    if not step.blocks:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(
            f"{type(module).__name__} repeats no block that can be planned"
            f"{f' ({why})' if why else ''}. Name blocks that run one after the other, as "
            "blocks='layers.*'."
        )
    return step


def with_blocks(
    step: Step, patterns: Sequence[str] = ()
) -> tuple[Step, dict[str, str]]:
    """Find the blocks of a step that can be planned.

    Parameters
    ----------
    step : Step
        Of a network that does not name its blocks itself. A copy runs it once, for few
        samples where it can.
    patterns : sequence of str
        Names of submodules or patterns of them; empty to take :func:`repeated_blocks`.

    Returns
    -------
    Step
        The same one with names of blocks.
    dict of str to str
        Why others that were found or named cannot be planned, by name. They store.

    Raises
    ------
    ValueError
        If a pattern matches nothing.
    """
    if patterns:
        names = list(chosen_blocks(step.module, patterns))
    else:
        names = repeated_blocks(step.module)
    reasons = {
        name: refusal
        for name in names
        if (refusal := mode_refusal(name, step.module.get_submodule(name)))
    }
    names = [name for name in names if name not in reasons]
    # Modules that stand in two places run for both.
    places: dict[int, str] = {}
    for name in names:
        first = places.setdefault(id(step.module.get_submodule(name)), name)
        if first != name:
            reasons[name] = f"it is {first}"
    names = list(places.values())
    if names:
        named = replace(step, blocks=tuple(names))
        with step.training():
            try:
                trial = named.trial(min(2, step.batch))
                names, others = in_turn(trial.module, names, trial.run)
            except Exception:  # whatever a loss needs more samples for
                trial = named.trial()
                names, others = in_turn(trial.module, names, trial.run)
        reasons |= others
    return replace(step, blocks=tuple(names), searched=not patterns), reasons


def a_level_down(step: Step) -> Step | None:
    """Make the same step of the blocks within its blocks; None if there are none."""
    names = finer_blocks(step.module, step.blocks)
    return None if names == [*step.blocks] else with_blocks(step, names)[0]


def _rows(x: Any, count: int) -> Any:
    """Take the first rows of a tensor, or all of them as often as is needed."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    whole = (
        x.repeat(-(-count // len(x)), *([1] * (x.dim() - 1))) if count > len(x) else x
    )
    return whole[:count].detach().requires_grad_(x.requires_grad)


def _check_loss(value: object) -> None:
    """Refuse a loss that is no number to be trained by."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value)
        raise NoStep(f"The loss is {shape}; it must be a tensor of one number.")
    if not value.requires_grad:
        raise NoStep(
            "The loss depends on nothing that is trained, so that there is no backward "
            "pass to plan. Let a parameter of the network, or the batch, require a "
            "gradient."
        )


def sum_of_squares(outputs: Any) -> Tensor:
    """Make a loss of whatever a network returns."""
    tensors = tensors_of(outputs)
    wanted = [y for y in tensors if y.requires_grad] or [y.float() for y in tensors]
    if not wanted:
        raise NoStep(
            f"The network returns {type(outputs).__name__}, without a tensor. Give a "
            "loss that makes one of it."
        )
    return torch.stack([y.square().sum() for y in wanted]).sum()


def trainable(module: _Module) -> _Module:
    """Put a module into training, if it is not, with gradients, which steps add to.

    Parts of it that are in evaluation while the whole trains stay there.

    Parameters
    ----------
    module : nn.Module
        A copy, whose gradients nobody else reads.

    Returns
    -------
    nn.Module
        The module.
    """
    make_gradients(module if module.training else module.train())
    return module


class CPUFakes(FakeTensorMode):
    """Tensors without contents that autocast takes for tensors of a CPU."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compare random states, which are real tensors, for real."""
        if func is torch.ops.aten.equal.default:
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def cpu_fakes() -> Iterator[None]:
    """Make all new tensors fakes for a while.

    Examples
    --------
    >>> with cpu_fakes(), torch.autocast("cpu", torch.bfloat16):
    ...     y = torch.zeros(10**9, 8) @ torch.zeros(8, 10**9)
    >>> y.dtype, y.device.type
    (torch.bfloat16, 'cpu')
    """
    with CPUFakes(), warnings.catch_warnings():
        # Storages without contents have an address, 0, whose use is frowned upon.
        warnings.filterwarnings("ignore", "Accessing the data pointer")
        yield


def without_contents(module: _Module, device: torch.device) -> _Module:
    """Copy a module, with parameters and buffers that have shapes only.

    Parameters
    ----------
    module : nn.Module
        Any module.
    device : torch.device
        "meta", or the CPU within ``cpu_fakes``.

    Returns
    -------
    nn.Module
        The copy; what was shared in the module is shared in it.

    Examples
    --------
    >>> layer = nn.BatchNorm1d(4)
    >>> without_contents(layer, torch.device("meta")).running_mean.device.type
    'meta'
    """
    empties: dict[int, Tensor] = {}

    def empty(x: Tensor) -> Tensor:
        if id(x) not in empties:
            new = torch.empty_like(x, device=device)
            if isinstance(x, nn.Parameter):
                new = nn.Parameter(new, requires_grad=x.requires_grad)
            empties[id(x)] = new
        return empties[id(x)]

    # Outside of fakes, which are not copied.
    with without_dispatch():
        own = copy.deepcopy(module).to("meta")
    for owner in own.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, x in tensors.items():
                if x is not None:
                    tensors[name] = empty(x)  # type: ignore[assignment]
    return own
