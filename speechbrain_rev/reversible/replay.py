"""Run a module twice: once without a graph, and once more, alike, with one.

Memory is saved by throwing a module's activations away in the forward pass and
computing them again in the backward pass. The second run must see what the first one
saw, and must leave no trace: the same random numbers, the same autocast state, the
same batch statistics; running statistics updated once; the global random state
untouched. A ``Recording`` carries these conditions from the first run to the second.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Statistics = tuple[Tensor, ...]


@dataclass
class Recording:
    """The conditions of a first run that a second run has to repeat.

    Attributes
    ----------
    statistics : list of tuple of torch.Tensor
        Batch statistics in the order in which the layers asked for them.
    random_state : tuple of torch.Tensor or None
        State of the generators before the run; None if it drew no random numbers.
    buffers : dict
        Buffers as they were before the run, of layers whose output may depend on them.
    """

    statistics: list[Statistics] = field(default_factory=list)
    random_state: tuple[Tensor, ...] | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    _position: int | None = None

    @property
    def replaying(self) -> bool:
        """Whether this is the second run."""
        return self._position is not None

    def next_statistics(self) -> Statistics:
        """Give the statistics that the first run kept at this place."""
        assert self._position is not None
        if self._position == len(self.statistics):
            raise RuntimeError(
                "A module normalised more often in its second run than in its first: "
                "its control flow must not depend on anything but its input. Use "
                "mode='store' for this block."
            )
        self._position += 1
        return self.statistics[self._position - 1]


class _Active(threading.local):
    """Recordings of the runs under way in this thread, outermost first."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []


_active = _Active()


def batch_statistics(measure: Callable[[], Statistics]) -> Statistics:
    """Give the statistics to normalise with: measured in a first run, else kept ones.

    Parameters
    ----------
    measure : callable
        Measures the statistics and updates the running ones. It is not called in a
        second run.

    Returns
    -------
    tuple of torch.Tensor
        What ``measure`` returns, or returned in the first run.
    """
    statistics = None
    for recording in _active.recordings:
        if recording.replaying:
            statistics = recording.next_statistics()
    if statistics is None:
        statistics = measure()
    for recording in _active.recordings:
        if not recording.replaying:
            recording.statistics.append(statistics)
    return statistics


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a device type at one moment."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """Read the state that is in force for a device."""
        kind = device.type
        return cls(
            kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        )

    def __call__(self) -> torch.autocast:
        """Put the state in force again.

        The cache of weight casts stays off: a cast made without a graph would be
        handed to a later run that needs one, whose weights would get no gradient.
        """
        return torch.autocast(
            self.device_type, self.dtype, self.enabled, cache_enabled=False
        )


def first_run(
    module: nn.Module, *inputs: Any, **keywords: Any
) -> tuple[Any, Recording]:
    """Run a module without a graph and record what a second run must repeat.

    Parameters
    ----------
    module : nn.Module
        The module.
    *inputs, **keywords
        Its arguments.

    Returns
    -------
    outputs
        What the module returns.
    Recording
        The conditions of the run.
    """
    recording = Recording(buffers=_influential_buffers(module))
    device = _device((inputs, keywords))
    before = _random_state(device)
    with torch.no_grad(), _recording(recording):
        outputs = module(*inputs, **keywords)
    if any(map(_differ, before, _random_state(device))):
        recording.random_state = before
    return outputs, recording


def second_run(
    module: nn.Module,
    recording: Recording,
    parameters: Mapping[str, Tensor],
    *inputs: Any,
    **keywords: Any,
) -> Any:
    """Run a module with a graph under the conditions of its first run.

    Parameters
    ----------
    module : nn.Module
        The module of the first run.
    recording : Recording
        What ``first_run`` returned.
    parameters : mapping of str to torch.Tensor
        Detached leaves by parameter name. They stand in for the parameters, whose
        own hooks then fire once only, when the engine hands their gradient on.
    *inputs, **keywords
        The arguments of the first run.

    Returns
    -------
    outputs
        What the module returns, with a graph.
    """
    # Writes into these copies are dropped, so no buffer is updated a second time.
    buffers = {
        name: recording.buffers.get(name, buffer).clone()
        for name, buffer in module.named_buffers(remove_duplicate=False)
    }
    recording._position = 0
    try:
        with (
            torch.enable_grad(),
            _recording(recording),
            _random_state_of(recording, _device((inputs, keywords))),
        ):
            return torch.func.functional_call(
                module, {**parameters, **buffers}, inputs, keywords, tie_weights=False
            )
    finally:
        recording._position = None


@contextlib.contextmanager
def _recording(recording: Recording) -> Iterator[None]:
    _active.recordings.append(recording)
    try:
        yield
    finally:
        _active.recordings.pop()


def _influential_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copy buffers that the output may depend on and that the run may change.

    Batch normalisation in training mode writes its running statistics but does not
    read them, so that they need no copy.
    """
    buffers = {}
    for prefix, owner in module.named_modules():
        if not owner.training or getattr(owner, "writes_buffers_only", False):
            continue
        if isinstance(owner, nn.modules.batchnorm._BatchNorm):
            continue
        for name, buffer in owner.named_buffers(recurse=False):
            buffers[f"{prefix}.{name}" if prefix else name] = buffer.clone()
    return buffers


def _device(arguments: Any) -> torch.device:
    tensors = (x for x in tree_leaves(arguments) if isinstance(x, Tensor))
    return next((x.device for x in tensors), torch.device("cpu"))


def _random_state(device: torch.device) -> tuple[Tensor, ...]:
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


def _differ(before: Tensor, after: Tensor) -> bool:
    return not torch.equal(before, after)


def _set_random_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


@contextlib.contextmanager
def _random_state_of(recording: Recording, device: torch.device) -> Iterator[None]:
    if recording.random_state is None:
        yield
        return
    found = _random_state(device)
    _set_random_state(recording.random_state, device)
    try:
        yield
    finally:
        _set_random_state(found, device)
