"""Run a module twice: once without a graph, and once more, alike, with one.

Memory is saved by throwing a module's activations away in the forward pass and
computing them again in the backward pass. The second run must see what the first one
saw, and must leave no trace: the same random numbers, the same autocast state, the
same batch statistics, the same plain attributes; running statistics updated once; the
global random state untouched. A ``RunRecord`` carries these conditions from the first run to the second.

Pooling, cosines, the loss and sums of gradients stay in float32 whatever it says.

Fixed-point numbers turn NaN and what is out of range into numbers that look like any
other. Running statistics of such a step would take hundreds of steps to recover, though
the step itself is dropped by the loss scaler or the trainer.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from speechbrain_rev.reversible.flags import Flags
from speechbrain_rev.reversible.state import (
    Attributes,
    KeptTensor,
    Untouched,
    is_ours,
    modules_of,
    version_of,
)
from speechbrain_rev.torch_private import (
    in_transform,
    lists_of_weights,
    pose_as,
    tree_leaves,
)


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a device type at one moment."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, devices: Collection[torch.device]) -> Autocast:
        """Read the state that is in force for an accelerator, else for the CPU."""
        kinds = {device.type for device in devices} - {"cpu"} or {"cpu"}
        kind = min(kinds)
        if not is_autocast_available(kind):
            return cls("cpu", False, torch.bfloat16)
        return cls(
            kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        )

    def __call__(self) -> contextlib.AbstractContextManager[object]:
        """Put the state in force again.

        The cache of weight casts stays off: it would hold copies of all weights, and
        a second run has leaves of its own to cast.
        """
        if not (self.enabled or torch.is_autocast_enabled(self.device_type)):
            return contextlib.nullcontext()
        return torch.autocast(
            self.device_type, self.dtype, self.enabled, cache_enabled=False
        )


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off for a device, meta devices included, which have none.

    Parameters
    ----------
    device : torch.device
        Where the arithmetic happens.

    Returns
    -------
    context manager
        To compute in.

    Examples
    --------
    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", dtype=torch.bfloat16), autocast_off(x.device):
    ...     (x @ x).dtype
    torch.float32
    """
    if not is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class KeptBuffers:
    """A copy of a module's floating-point buffers, put back if asked to on the device.

    Buffers that our normalisation updates are left out: see ``norm``.

    Parameters
    ----------
    module : nn.Module
        The module, before its step.
    """

    def __init__(self, module: nn.Module) -> None:
        groups = defaultdict(list)
        others = (m for m in module.modules() if not _only_writes_once(m))
        for buffer in {b: None for m in others for b in m.buffers(recurse=False)}:
            if buffer.is_floating_point() and buffer.numel():
                groups[buffer.device, buffer.dtype].append(buffer)
        self._groups = [(buffers, _joined(buffers)) for buffers in groups.values()]

    @torch.no_grad()
    def restore_where(self, validity: Tensor) -> None:
        """Put the copy back if validity is NaN, without waiting for the device.

        Parameters
        ----------
        validity : torch.Tensor, []
            0 or NaN.
        """
        for buffers, before in self._groups:
            fine = (validity == 0).to(before.device)
            chosen = torch.where(fine, _joined(buffers), before)
            parts = chosen.split([b.numel() for b in buffers])
            # Through data: a graph that saved a buffer need not fear this write.
            torch._foreach_copy_(
                [b.data for b in buffers],
                [part.view_as(b) for b, part in zip(buffers, parts, strict=True)],
            )


def _joined(buffers: list[Tensor]) -> Tensor:
    return torch.cat([b.detach().flatten() for b in buffers])


Statistics = tuple[Tensor, ...]
RandomState = dict[torch.device, Tensor]
#: A parameter's or buffer's owner, as a number among ``modules_of``, and its name.
Place = tuple[int, str]

_OTHER_CONTROL_FLOW = (
    "A module normalised a different number of times in its second run: its control "
    "flow must not depend on anything but its input. Use mode='store' for this block."
)


@dataclass
class RunRecord:
    """The conditions of a first run that a second run has to repeat.

    Attributes
    ----------
    autocast : Autocast
        The autocast state of the run.
    flags : Flags
        The backend flags of the run.
    statistics : list of tuple of torch.Tensor
        Batch statistics in the order in which the layers asked for them.
    other_random_states : list of RandomStates
        Of Python's and numpy's global generators before the run, if it drew numbers.
    random_state : dict of torch.device to torch.Tensor, or None
        State of torch's generators before the run; None if it drew no numbers.
    buffers : dict of place to KeptTensor or None
        Buffers as they were before the run, None where there was none.
    attributes : Attributes or None
        Plain attributes as they were before the run; None if there are none to put back.
    training : tuple of bool
        Which of the module's modules were in training.
    """

    autocast: Autocast
    flags: Flags
    statistics: list[Statistics] = field(default_factory=list)
    random_state: RandomState | None = None
    buffers: dict[Place, KeptTensor | None] = field(default_factory=dict)
    attributes: Attributes | None = None
    other_random_states: list[RandomStates] = field(default_factory=list)
    training: tuple[bool, ...] = ()
    _position: int | None = None

    @property
    def replaying(self) -> bool:
        """Whether this is the second run."""
        return self._position is not None

    def next_statistics(self) -> Statistics:
        """Give the statistics that the first run kept at this place."""
        assert self._position is not None
        if self._position == len(self.statistics):
            raise RuntimeError(_OTHER_CONTROL_FLOW)
        self._position += 1
        return self.statistics[self._position - 1]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Hand the statistics out again, all of them."""
        self._position = 0
        try:
            yield
            if self._position != len(self.statistics):
                raise RuntimeError(_OTHER_CONTROL_FLOW)
        finally:
            self._position = None


class _Active(threading.local):
    """Recordings of the runs under way in this thread, outermost first."""

    def __init__(self) -> None:
        self.recordings: list[RunRecord] = []


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


def refuse_transforms() -> None:
    """Refuse transforms of ``torch.func``, and forward-mode derivatives, in training.

    Raises
    ------
    RuntimeError
        If one is under way: it runs functions of tensors alone, and a training step
        updates running statistics and keeps what a second run needs.
    """
    if in_transform():
        raise RuntimeError(
            "Transforms of torch.func (grad, vmap, jvp, ...) and torch.autograd.forward_ad "
            "work in evaluation only: call eval() on the network first, or use "
            "torch.autograd.grad."
        )


@contextlib.contextmanager
def naming_transforms(name: str) -> Iterator[None]:
    """Say which module calls a transform of ``torch.func`` in a run that stores nothing."""
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            f"{name} calls a transform of torch.func in its forward pass, which works only "
            "where activations are stored. Use torch.autograd.grad in it, or mode='store' "
            "for this block."
        ) from error


def running() -> bool:
    """Whether a first or second run is under way in this thread."""
    return bool(_active.recordings)


def repeating() -> bool:
    """Whether the innermost run under way in this thread is a second one."""
    return running() and _active.recordings[-1].replaying


def first_run(
    module: nn.Module, *inputs: Any, **keywords: Any
) -> tuple[Any, RunRecord]:
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
    RunRecord
        The conditions of the run.
    """
    modules = modules_of(module)
    with torch.no_grad(), recorded(modules, (inputs, keywords)) as recording:
        outputs = module(*inputs, **keywords)
    return outputs, recording


@contextlib.contextmanager
def recorded(
    modules: Sequence[nn.Module],
    given: Any,
    *,
    shares_casts: bool = False,
) -> Iterator[RunRecord]:
    """Record what a second run of a module must repeat, while the first one goes on.

    Parameters
    ----------
    modules : sequence of nn.Module
        The module and those within it.
    given : tensor, or tuple, list or dict of such
        Its arguments.
    shares_casts : bool
        Whether it takes casts of weights that autocast keeps, and leaves its own there.
        They belong to a graph, which a run without one must not meet.

    Yields
    ------
    RunRecord
        Complete once the context is left.
    """
    module, ours, devices = modules[0], is_ours(modules), _devices_of(modules, given)
    _refuse_other_thread(modules)
    recording = RunRecord(
        Autocast.now(devices),
        Flags.now(devices),
        buffers=_buffers_before(modules, ours),
        training=tuple(m.training for m in modules),
    )
    recording.attributes = attributes = Attributes(modules)
    weights = [] if ours else _whereabouts(modules)
    recording.random_state = before = _random_state(devices)
    recording.other_random_states = [] if ours else [RandomStates()]
    autocast = contextlib.nullcontext() if shares_casts else recording.autocast()
    with autocast, recording.flags(), _recording(recording):
        yield recording
    # What a run that is not over needed, if it was asked for what it dropped.
    after = _random_state(before)
    if all(torch.equal(before[device], after[device]) for device in before):
        recording.random_state = None
    if not any(others.differ() for others in recording.other_random_states):
        recording.other_random_states = []
    recording.attributes = attributes.complete()
    for kept in recording.buffers.values():
        if kept is not None:
            kept.complete()
    after_it = [] if ours else _whereabouts(modules_of(module))
    for (p, place), (_, now) in zip(weights, after_it, strict=False):
        if place != now:
            names = [n for n, other in module.named_parameters() if other is p]
            raise RuntimeError(
                f"{type(module).__name__} wrote into its parameter {' '.join(names[:1])} in "
                "its forward pass and cannot run again. Make it a buffer, write to it "
                "after the backward pass, or use mode='store' for this block."
            )


def _whereabouts(
    modules: Sequence[nn.Module],
) -> list[tuple[Tensor, tuple[int, int]]]:
    """List parameters with how often they were written to, and where they are."""
    return [
        (p, (version_of(p), _address_of(p)))
        for m in modules
        for p in m._parameters.values()
        if p is not None
    ]


def _address_of(p: Tensor) -> int:
    plain = type(p) is nn.Parameter or type(p) is Tensor
    return p.data_ptr() if plain and not p.is_meta else 0


class RandomStates:
    """The states of Python's and numpy's global generators."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random
        self._states = self._now()

    def differ(self) -> bool:
        """Whether they are others by now."""
        return not _equal(self._now(), self._states)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Put them back for a while."""
        now = self._now()
        try:
            self._put(self._states)
            yield
        finally:
            self._put(now)

    def _now(self) -> tuple[Any, Any]:
        of_numpy = None if self._numpy is None else self._numpy.get_state(legacy=False)
        return random.getstate(), of_numpy

    def _put(self, states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        if self._numpy is not None:
            self._numpy.set_state(states[1])


def _equal(one: Any, other: Any) -> bool:
    """Compare random states: numbers and arrays, in tuples and dictionaries."""
    if isinstance(one, dict):
        return all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple) and any(isinstance(x, dict) for x in one):
        return all(map(_equal, one, other))
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)


def second_run(
    module: nn.Module,
    recording: RunRecord,
    leaves: Mapping[Place, Tensor],
    *inputs: Any,
    **keywords: Any,
) -> Any:
    """Run a module with a graph under the conditions of its first run.

    Parameters
    ----------
    module : nn.Module
        The module of the first run.
    recording : RunRecord
        What ``first_run`` returned.
    leaves : mapping of place to torch.Tensor
        Detached leaves by the places of their parameters. They stand in for these,
        whose own hooks then fire once only, when the engine hands the gradient on.
    *inputs, **keywords
        The arguments of the first run.

    Returns
    -------
    outputs
        What the module returns, with a graph.
    """
    with repeated(module, recording, leaves):
        return module(*inputs, **keywords)


def without_graph(
    module: nn.Module,
    recording: RunRecord,
    leaves: Mapping[Place, Tensor],
    *inputs: Any,
) -> Any:
    """Run a module a second time for its output alone, as ``second_run`` does."""
    with repeated(module, recording, leaves), torch.no_grad():
        return module(*inputs)


@contextlib.contextmanager
def repeated(
    module: nn.Module, recording: RunRecord, leaves: Mapping[Place, Tensor]
) -> Iterator[None]:
    """Put the conditions of a module's first run in force, for ``second_run``."""
    with (
        torch.enable_grad(),
        recording.autocast(),
        recording.flags(),
        _recording(recording),
        recording.replayed(),
        _random_state_of(recording),
        _others_of(recording),
        _standing_in(module, recording, leaves),
        recording.attributes or contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def apart(recording: RunRecord) -> Iterator[RunRecord]:
    """Give what a first run recorded so far, and record nothing for a while."""
    recordings, _active.recordings = _active.recordings, []
    try:
        yield replace(recording, statistics=[*recording.statistics])
    finally:
        _active.recordings = recordings


@contextlib.contextmanager
def _recording(recording: RunRecord) -> Iterator[None]:
    _active.recordings.append(recording)
    try:
        yield
    finally:
        _active.recordings.pop()


class Look(NamedTuple):
    """What a tensor may have lost when its backward pass begins.

    Attributes
    ----------
    is_parameter : bool
        Whether it is an ``nn.Parameter``.
    attributes : dict
        Its attributes.
    requires_grad : bool
        As in the first run: a later freeze has no effect on this step, as in torch.
    """

    is_parameter: bool
    attributes: dict[str, Any]
    requires_grad: bool


def looks_of(parameters: Iterable[Tensor]) -> list[Look]:
    """Note the looks of parameters in a first run."""
    return [
        Look(isinstance(p, nn.Parameter), vars(p), p.requires_grad) for p in parameters
    ]


def stand_in(p: Tensor, look: Look) -> Tensor:
    """Make a leaf that stands for a parameter, with its attributes."""
    is_parameter, attributes, requires_grad = look
    leaf = p.detach()
    if is_parameter:
        leaf = nn.Parameter(leaf, requires_grad)
    elif requires_grad:
        leaf.requires_grad_()
    if attributes:
        vars(leaf).update(attributes)
    return leaf


def places_of(module: nn.Module) -> list[tuple[Place, Tensor]]:
    """List each place of a parameter in a module and what is in it.

    A module that is used twice is one place, a parameter of two modules is in two.
    """
    return [
        ((i, name), parameter)
        for i, owner in enumerate(modules_of(module))
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


def shared_by(modules: Iterable[nn.Module]) -> set[int]:
    """Give the parameters that modules use more than once, by their ids.

    A module that has two names in another one is used twice.
    """
    counts = Counter(
        id(p)
        for module in modules
        for _, m in module.named_modules(remove_duplicate=False)
        for p in m._parameters.values()
        if p is not None
    )
    return {parameter for parameter, count in counts.items() if count > 1}


@contextlib.contextmanager
def own_lists_of_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back what recurrent layers list as their weights, who look at each run."""
    weights = [(m, lists_of_weights(m)) for m in modules if isinstance(m, nn.RNNBase)]
    try:
        yield
    finally:
        for m, lists in weights:
            vars(m).update(lists)


@contextlib.contextmanager
def stored_run(module: nn.Module, x: Tensor, shared: set[int]) -> Iterator[None]:
    """Run a module once, with its activations stored, to the bits of two runs.

    Parameters
    ----------
    module : nn.Module
        The module.
    x : torch.Tensor
        Its input.
    shared : set of int
        Ids of parameters that have other places, too. Their gradients within the module
        are added up first, as those of a second run are.
    """
    aliases: dict[int, Tensor] = {}
    places = [
        (owner, name, p)
        for owner in (module.modules() if shared else ())
        for name, p in owner._parameters.items()
        if p is not None and id(p) in shared
    ]
    devices = {x.device}
    try:
        for owner, name, p in places:
            if id(p) not in aliases:
                aliases[id(p)] = alias = p.view_as(p)
                pose_as(alias, p)
            owner._parameters[name] = aliases[id(p)]  # type: ignore[assignment]
        lists = own_lists_of_weights([owner for owner, _, _ in places])
        with Autocast.now(devices)(), Flags.now(devices)(), lists:
            yield
    finally:
        for owner, name, p in places:
            owner._parameters[name] = p


_OTHER_MODULES = (
    "{} had other modules or parameters in its first run than it has now. If its forward "
    "pass makes them, use it once in evaluation before it trains. If somebody exchanged "
    "them, do that after the backward pass."
)


def _refuse_other_thread(modules: Sequence[nn.Module]) -> None:
    if not _second_runs:
        return
    thread = threading.get_ident()
    if any(_second_runs.get(id(m), thread) != thread for m in modules):
        raise RuntimeError(
            "Two threads train one module at once, which has one place only for what "
            "stands in for its parameters. Give each thread a copy, or use "
            "mode='store'."
        )


#: The thread that runs a module a second time, by the module's id, which it keeps.
_second_runs: dict[int, int] = {}


@contextlib.contextmanager
def _standing_in(
    module: nn.Module, recording: RunRecord, leaves: Mapping[Place, Tensor]
) -> Iterator[None]:
    """Put leaves and copies into the places of parameters and buffers for a while.

    Writes into the copies are dropped, so no buffer is updated a second time. Every
    place is visited once: ``torch.func.functional_call`` visits those of a module that
    is used twice under both of its names, and then leaves the leaves in place.
    """
    modules = modules_of(module)
    thread = threading.get_ident()
    _refuse_other_thread(modules)
    if len(modules) != len(recording.training):
        raise RuntimeError(_OTHER_MODULES.format(type(module).__name__))
    begun = {id(m) for m in modules} - _second_runs.keys()
    states = [(m.training, m._parameters.copy(), m._buffers.copy()) for m in modules]
    copies: dict[int, Tensor] = {}
    try:
        _second_runs.update(dict.fromkeys(begun, thread))
        for i, m in enumerate(modules):
            if m.training is not recording.training[i]:
                m.training = recording.training[i]
            for name, p in states[i][1].items():
                if p is not None:
                    leaf = leaves.get((i, name))
                    if leaf is None:
                        raise RuntimeError(_OTHER_MODULES.format(type(module).__name__))
                    m._parameters[name] = leaf  # type: ignore[assignment]
            for name, b in states[i][2].items():
                kept = recording.buffers.get((i, name))
                if (i, name) not in recording.buffers:
                    del m._buffers[name]  # the first run registered it
                elif kept is None or b is None:
                    m._buffers[name] = None if kept is None else kept.for_second_run()
                elif id(b) not in copies:
                    m._buffers[name] = copies[id(b)] = kept.for_second_run()
                else:
                    m._buffers[name] = copies[id(b)]
        with own_lists_of_weights(modules):
            yield
    finally:
        for m, (training, parameters, buffers) in zip(modules, states, strict=True):
            if m.training is not training:
                m.training = training
            m._parameters.update(parameters)
            if m._buffers:
                m._buffers.clear()
            m._buffers.update(buffers)
        for i in begun:
            _second_runs.pop(i, None)


#: In training these write to their buffers, whatever their versions are.
_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def _buffers_before(
    modules: Sequence[nn.Module], ours: bool
) -> dict[Place, KeptTensor | None]:
    """Keep buffers that the output may depend on or that the run may change.

    Our normalisation writes to its buffers in a first run only; others may read them.
    """
    buffers: dict[Place, KeptTensor | None] = {}
    for i, owner in enumerate(modules):
        untouched = ours and owner.training and _only_writes_once(owner)
        for name, buffer in owner._buffers.items():
            if buffer is None:
                buffers[i, name] = None
            else:
                kept = f"{type(owner).__name__}.{name}"
                written = owner.training and type(owner) in _NORMS
                buffers[i, name] = (
                    Untouched(buffer)
                    if untouched
                    else KeptTensor(buffer, kept, written=written)
                )
    return buffers


def _only_writes_once(module: nn.Module) -> bool:
    return "only_writes_once" in vars(type(module))


def _devices_of(modules: Sequence[nn.Module], given: Any) -> set[torch.device]:
    """Find the devices of modules and arguments, or the CPU."""
    weights = [p for m in modules for p in m._parameters.values()]
    tensors = (x for x in (*tree_leaves(given), *weights) if isinstance(x, Tensor))
    return {x.device for x in tensors} or {torch.device("cpu")}


def _random_state(devices: Iterable[torch.device]) -> RandomState:
    state = {torch.device("cpu"): torch.get_rng_state()}
    for device in devices:
        if device.type == "cuda":
            state[device] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: RandomState) -> None:
    for device, values in state.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(values, device)
        else:
            torch.set_rng_state(values)


@contextlib.contextmanager
def _others_of(recording: RunRecord) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for states in recording.other_random_states:
            stack.enter_context(states.again())
        yield


@contextlib.contextmanager
def _random_state_of(recording: RunRecord) -> Iterator[None]:
    if recording.random_state is None:
        yield
        return
    state = _random_state(recording.random_state)
    _set_random_state(recording.random_state)
    try:
        yield
    finally:
        _set_random_state(state)
