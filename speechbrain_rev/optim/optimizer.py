"""Optimizers with 8-bit or 32-bit states: a class for each row of ``OPTIMIZERS``.

8-bit states are cut into blocks, each block is divided by its largest magnitude and
stored as the nearest of 256 values: ``reference.py`` has the scheme and computes on a CPU,
``kernels/optimizer.py`` on a GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from speechbrain_rev.kernels import optimizer as kernels
from speechbrain_rev.kernels.optimizer import UpdateRule
from speechbrain_rev.optim import reference
from speechbrain_rev.optim.map import map_of
from speechbrain_rev.optim.states import (
    STATE_KEYS,
    Arena,
    Storage,
    make_arena,
    moments_of,
    stored_moments,
)
from speechbrain_rev.optimizers import (
    AT_32_BIT,
    BY_LIBRARY,
    FORMS,
    OPTIMIZERS,
    OptimizerRow,
    form_of,
    one_of,
    read_options,
    switch,
)
from speechbrain_rev.torch_private import storage_key

Params: TypeAlias = (
    Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
)
Kept: TypeAlias = torch.nn.Module | Tensor | Iterable["Kept"]

# The entry of the parameter groups that names the optimizer and the form of its states.
# It lies in the groups because torch saves them whole and leaves unknown entries alone.
_BUILT_AS = "built_as"
# Entries of groups beside options: those of checkpoints, schedulers and the caller.
_GROUP_ENTRIES = ("params", "initial_lr", "name", "param_names", _BUILT_AS)

_read_bits = one_of("optimizer states can have 8 or 32 bits", 8, 32)
_read_block = one_of("blocks have 256 or 2048 values", 256, 2048)
_read_backend = one_of(
    "it must be 'native' or 'bitsandbytes'", "native", "bitsandbytes"
)


class _Named(torch.optim.Optimizer):
    """The common part of the public classes.

    An instance is of a subclass, whose second base computes with such states.
    """

    _row: ClassVar[OptimizerRow]
    _public: ClassVar[type[_Named]]  # the class that the user called
    _form: ClassVar[str]

    def __init__(
        self,
        params: Params,
        *,
        bits: int,
        lr: float,
        keep_32bit: Kept = (),
        block: int = 256,
        pack_small: bool = False,
        backend: str = "native",
        **options: Any,
    ) -> None:
        self._storing = {
            "bits": _read_bits("bits", bits),
            "block": _read_block("block", block),
            "pack_small": switch("pack_small", pack_small),
            "backend": _read_backend("backend", backend),
        }
        form = form_of(bits, backend)
        kept = _tensors_in(keep_32bit)
        if form == BY_LIBRARY and (block != 256 or pack_small or kept):
            raise ValueError(
                "backend 'bitsandbytes' cannot do block=2048, pack_small or keep_32bit. "
                "Leave them out, or take the backend 'native'."
            )
        self._options = read_options(self._row, form, {"lr": lr, **options})
        self._storage = Storage(block, pack_small, frozenset(kept), bits)
        # The base that computes depends on the bits, as paths of pathlib on the system.
        public: Any = getattr(self, "_public", type(self))
        self.__class__ = _computing(public, form)
        start: Callable[..., None] = super().__init__
        start(params, **self._options)
        _check_kept(kept, _parameters_of(self.param_groups))

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = {p: n for n, p in enumerate(_parameters_of(self.param_groups))}
        states = {numbers.get(key, key): state for key, state in self.state.items()}
        # torch's state_dict() raises if a parameter has left its group.
        saved = {
            "state": {n: s for n, s in states.items() if not isinstance(n, Tensor)},
            "param_groups": [
                group | {"params": [numbers[p] for p in group["params"]]}
                for group in self.param_groups
            ],
        }
        groups = [{"params": group["params"]} for group in self.param_groups]
        kept = {"keep_32bit": [*self._storage.kept]}
        arguments = kept | self._storing | self._options
        return _rebuild, (self._public, groups, arguments, saved)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own or those of the others.

        Raises
        ------
        ValueError
            If a parameter is there already, an option is unknown or cannot be honoured,
            or this package's arithmetic updates weights that are not float32. Nothing is
            changed then.
        """
        if unknown := param_group.keys() - {*_GROUP_ENTRIES, *self.defaults}:
            raise ValueError(
                f"A parameter group has {min(unknown)!r}, which {self._row.name} at "
                f"{self._form} does not take. It takes {', '.join(self._options)}."
            )
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        if isinstance(self, _Native):
            _check_weights(params)
        own = {name: param_group[name] for name in self._options.keys() & param_group}
        options = read_options(self._row, self._form, self._options | own)
        super().add_param_group(
            param_group
            | {name: value for name, value in options.items() if name in self.defaults}
            | {"params": params, _BUILT_AS: f"{self._row.name} at {self._form}"}
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint whose states have been given to parameters.

        Raises
        ------
        ValueError
            If it is of another optimizer, other bits, another backend, another form of
            states or other parameters. Nothing is changed then.
        """
        _check_checkpoint(self, state)
        super().__setstate__(state)


def _rebuild(
    public: Any,
    groups: Any,
    arguments: Mapping[str, Any],
    saved: dict[str, Any],
) -> Any:
    # A subclass of the user's may have other arguments, and methods that need attributes;
    # as in torch, a copy does not have these.
    optimizer = CLASSES[public._row.name](groups, **arguments)
    optimizer.load_state_dict(saved)
    optimizer.__class__ = _computing(public, optimizer._form)
    return optimizer


def _check_weights(params: Iterable[Any]) -> None:
    """Refuse weights that this package's arithmetic cannot update."""
    for index, entry in enumerate(params):
        param = entry[1] if isinstance(entry, tuple) else entry  # of named_parameters()
        if hasattr(param, "device_mesh"):
            raise ValueError(
                f"params[{index}] is sharded by FSDP, whose parts have no 8-bit states here. "
                "Use DistributedDataParallel, or sgd, adam or adamw with bits=32."
            )
        if isinstance(param, Tensor) and param.dtype != torch.float32:
            raise ValueError(
                f"params[{index}] is {param.dtype}, but this update is computed in "
                "float32. Keep weights in float32 (autocast lowers the precision of the "
                "network, not of its weights), or take sgd, adam or adamw with bits=32."
            )


def _check_checkpoint(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that torch would load with another meaning.

    torch compares numbers of parameters alone, and training would go on with wrong momenta.
    """
    own, saved = (
        _form_of(each[0]) for each in (optimizer.param_groups, state["param_groups"])
    )
    if own != saved:
        raise ValueError(
            f"The checkpoint's optimizer is {saved}, and this one is {own}. Resume with "
            f"the checkpoint's (in a recipe optimizer_name, optimizer_bits, "
            f"optimizer_block, optimizer_pack_small and optimizer_backend), or start from "
            f"its weights alone."
        )
    for index, param in enumerate(_parameters_of(optimizer.param_groups)):
        moments = stored_moments(state["state"].get(param, {}))
        in_codes = "absmax1" in state["state"].get(param, {})
        if moments and (
            any(moment.shape != param.shape for moment in moments)
            or in_codes != (optimizer._storage.form(param)[0] is not None)
        ):
            raise ValueError(
                f"Parameter {index} has shape {list(param.shape)}, but the checkpoint "
                f"holds {8 if in_codes else 32}-bit states of shape "
                f"{list(moments[0].shape)} for it. Build the network, and give "
                f"keep_32bit, as in the run that wrote it."
            )


def _form_of(group: Mapping[str, Any]) -> str:
    """Put the optimizer of a parameter group and the form of its states into words."""
    if "block_size" not in group:
        return str(group.get(_BUILT_AS, "none of speechbrain_rev.optim"))
    small = "packed" if group["pack_small"] else "at 32 bit"
    blocks = f"blocks of {group['block_size']} values with small tensors {small}"
    return f"{group[_BUILT_AS]} in {blocks}"


def _parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """List the parameters of all groups, or their numbers in a checkpoint."""
    return [param for group in groups for param in group["params"]]


def _tensors_in(keep_32bit: Kept) -> set[Tensor]:
    if isinstance(keep_32bit, Tensor):
        return {keep_32bit}
    if isinstance(keep_32bit, torch.nn.Module):
        return set(keep_32bit.parameters())
    if isinstance(keep_32bit, str | Mapping) or not isinstance(keep_32bit, Iterable):
        raise ValueError(
            f"keep_32bit holds a {type(keep_32bit).__name__}; give modules or parameters, "
            f"or a list of them."
        )
    return {param for item in keep_32bit for param in _tensors_in(item)}


def _check_kept(kept: Iterable[Tensor], params: Iterable[Tensor]) -> None:
    for param in set(kept) - set(params):
        # A frozen one may be missing: many loops leave those out.
        if param.requires_grad:
            raise ValueError(
                f"keep_32bit holds a parameter of shape {list(param.shape)} that is "
                f"not among params. Give modules that this optimizer trains."
            )


class _Native(torch.optim.Optimizer):
    """Arithmetic of this package, with 8-bit and float32 states."""

    _row: ClassVar[OptimizerRow]
    _storage: Storage
    # A loss scaler then hands over whether to step, instead of waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(self, params: Params, **options: Any) -> None:
        self._arenas: list[Arena] = []
        #: Skipped steps that were counted before the buffers were rebuilt.
        self._skipped_before = 0
        storage = self._storage
        form = {"block_size": storage.block, "pack_small": storage.pack_small}
        super().__init__(params, options | (form if storage.bits == 8 else {}))

    @property
    def skipped_steps(self) -> int:
        """How many steps changed nothing, as a gradient's square was not finite.

        Reading it waits for a GPU.
        """
        counts = (arena.tried - float(arena.table.steps[-1]) for arena in self._arenas)
        return self._skipped_before + int(max(counts, default=0))

    def read_moments(self, param: Tensor) -> list[Tensor]:
        """Read the moments of a parameter in float32; none before its first gradient."""
        return moments_of(self.state.get(param, {}), self._storage.block)

    def read_momentum(self, param: Tensor) -> tuple[Tensor, float]:
        """Read a parameter's momentum, as a sum of gradients whose weights tend to 1.

        Returns
        -------
        momentum : Tensor
            The parameter's shape, float32.
        kept : float
            The part of it that each step keeps.
        """
        (group,) = (
            group
            for group in self.param_groups
            if any(param is own for own in group["params"])
        )
        option, place = self._row.momentum
        kept = float(group[option] if place is None else group[option][place])
        moment = self.read_moments(param)[0]
        return moment.mul_(1 - kept) if self._row.sums else moment, kept

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights that have a gradient, unless a gradient's square overflows.

        Raises
        ------
        ValueError
            If a gradient is sparse, or a weight has another device, type or shape since
            its states were made. Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, param in enumerate(_parameters_of(self.param_groups)):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise ValueError(
                    f"The gradient of params[{index}], shape {list(param.shape)}, is "
                    f"{param.grad.layout}, but gradients must be dense here. Build the "
                    f"layer with sparse=False."
                )
            moment = self.state.get(param, {}).get("state1", param)
            if param.dtype != torch.float32 or (
                (param.device, param.shape) != (moment.device, moment.shape)
            ):
                raise ValueError(
                    f"params[{index}], shape {list(param.shape)}, is {param.dtype} on "
                    f"{param.device} now, but its states are of float32, shape "
                    f"{list(moment.shape)}, on {moment.device}. Move or resize the network "
                    f"first, build its optimizer after that, and load a checkpoint last."
                )
        self._follow_groups()
        active = [arena for arena in self._arenas if arena.set_gradients()]
        # A loss scaler sets both.
        overflow, scale = (getattr(self, k, None) for k in ("found_inf", "grad_scale"))
        healthy: dict[torch.device, Tensor] = {}  # whether each device may step
        for arena in active:
            steps, gradients = arena.table.steps, arena.table.gradients
            if scale is not None:
                scaled = [gradient for gradient in gradients if gradient is not None]
                torch._foreach_mul_(scaled, (1 / scale).to(steps))
            if steps.device not in healthy:
                one = torch.ones_like(steps[:1])
                may_step = one if overflow is None else (overflow.reshape(1) == 0)
                healthy[steps.device] = may_step.to(steps)
            _backend(steps).clear_unless_finite(healthy[steps.device], arena.table)
        for arena in active:
            self._update(arena, healthy[arena.table.steps.device])
        return loss

    def _update(self, arena: Arena, healthy: Tensor) -> None:
        group, table = self.param_groups[arena.group], arena.table
        row = self._row
        rule = UpdateRule(
            kind=row.rule,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            betas=group["betas"] if "betas" in group else (group["momentum"], 0.0),
            eps=group.get("eps", 0.0),
            decoupled=row.decoupled or group.get("decoupled_decay", False),
            nesterov=group.get("nesterov", False),
        )
        table.steps.addcmul_(table.active, healthy)
        arena.tried += 1
        corrections = None
        if row.bias_corrected:
            betas = table.sent("betas", rule.betas, torch.float64)
            corrections = 1 - betas[:, None] ** table.steps
        maps = [map_of(i == 0, table.steps.device) for i in range(row.moments)]
        for packed in arena.packs:
            backend = _backend(table.steps)
            backend.update(table, packed, rule, healthy, corrections, maps)

    def _follow_groups(self) -> None:
        """Rebuild the buffers if a parameter's group or state has changed; add new ones."""
        if not self._is_laid_out():
            self._skipped_before = self.skipped_steps
            groups = [group["params"] for group in self.param_groups]
            states = {p: self.state.get(p, {}) for params in groups for p in params}
            for arena in self._arenas:
                for param in arena.states.keys() - states.keys():
                    # A view would keep the old buffers alive.
                    for key, value in self.state.get(param, {}).items():
                        if isinstance(value, Tensor):
                            self.state[param][key] = value.clone()
            self._lay_out(states)
        for number, group in enumerate(self.param_groups):
            new = (p for p in group["params"] if p.grad is not None and p.numel())
            self._add_arenas(
                number, {p: 0 for p in new if "state1" not in self.state.get(p, {})}
            )

    def _is_laid_out(self) -> bool:
        """Whether all states are views of the buffers of their parameters' groups."""
        groups = {
            param: number
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        count = 0
        for arena in self._arenas:
            for param, views in arena.states.items():
                state = self.state.get(param, {})
                if groups.get(param) != arena.group or any(
                    state.get(key) is not view for key, view in views.items()
                ):
                    return False
            count += len(arena.states)
        return count == sum("state1" in self.state.get(param, {}) for param in groups)

    def _add_arenas(self, group: int, numbers: Mapping[Tensor, int]) -> None:
        """Make the states of parameters; those of one number and device lie together."""

        def together(param: Tensor) -> tuple[int, str]:
            return numbers[param], str(param.device)

        for _, params in groupby(sorted(numbers, key=together), together):
            number = sum(other.group == group for other in self._arenas)
            new = make_arena(group, number, [*params], self._storage, self._row.moments)
            for param, views in new.states.items():
                # Entries of the caller's own stay.
                entries = self.state.get(param, {}).items()
                kept = {key: value for key, value in entries if key not in STATE_KEYS}
                self.state[param] = kept | views
            self._arenas.append(new)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._skipped_before = 0
        params = _parameters_of(self.param_groups)
        self._lay_out({param: self.state.get(param, {}) for param in params})

    def _lay_out(self, states: Mapping[Tensor, Any]) -> None:
        """Copy states into new buffers; parameters without states begin anew."""
        self._arenas.clear()
        for number, group in enumerate(self.param_groups):
            stepped = (p for p in group["params"] if "state1" in states[p])
            self._add_arenas(
                number, {p: int(states[p].get("arena", 0)) for p in stepped}
            )
        for arena in self._arenas:
            arena.fill(states)


def _backend(steps: Tensor) -> Any:
    """Choose the module that computes where steps are counted."""
    usable = steps.is_cuda and kernels.usable(steps.device, torch.float32)
    return kernels if usable else reference


@functools.cache
def _computing(public: Any, form: str) -> type[Any]:
    """Return the subclass of a public class that computes with such states."""
    paths = {AT_32_BIT: public._row.at_32_bit, BY_LIBRARY: public._row.by_library}
    path = paths.get(form)
    try:
        computes = resolve_name(path) if path else _Native
    except ImportError as error:
        raise ImportError(
            f"The backend 'bitsandbytes' cannot be imported here ({error}). Install it, "
            "or take the backend 'native' (optimizer_backend: native)."
        ) from error
    members = {"__doc__": public.__doc__, "_public": public, "_form": form}
    name = f"{public.__name__}_at_{form.replace(' ', '_')}"
    return type(name, (public, computes), members)


def _public_class(row: OptimizerRow) -> type[_Named]:
    """Make the class of a row, whose signature and documentation name its options."""

    def start(self: Any, params: Params, **given: Any) -> None:
        super(public, self).__init__(params, **given)

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
        for name, option in row.options.items()
        if option.default is not None
    ]
    common = list(inspect.signature(_Named.__init__).parameters.values())[:-1]
    of_states = [p for p in common if p.default is not inspect.Parameter.empty]
    needed = [p for p in common if p.default is inspect.Parameter.empty]
    parameters = [*needed, *options, *of_states]
    start.__name__, start.__qualname__ = "__init__", f"{row.class_name}.__init__"
    start.__module__ = "speechbrain_rev.optim"
    start.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    lines = []
    for name, option in row.options.items():
        only = (
            "" if option.forms == FORMS else f" Only at {' or at '.join(option.forms)}."
        )
        lines.append(f"{name} : {option.type}\n    {option.meaning}{only}")
    documentation = _DOCUMENTATION.format(
        summary=row.summary,
        name=row.name,
        class_name=row.class_name,
        options="\n".join(lines),
    )
    members = {"__doc__": documentation, "__init__": start, "_row": row}
    # Copies and pickles look classes up where users import them.
    members["__module__"] = "speechbrain_rev.optim"
    public: type[_Named] = type(row.class_name, (_Named,), members)
    return public


_DOCUMENTATION = """{summary}

With 8-bit or 32-bit states.

Parameters
----------
params : iterable of torch.Tensor, or of parameter groups
    What to train, see :func:`build_optimizer`.
bits : {{8, 32}}
    Bits of each value of the states.
{options}
keep_32bit, block, pack_small, backend
    How states are stored and who computes, see :func:`build_optimizer`.

Raises
------
ValueError, ImportError
    As :func:`build_optimizer` does.

Notes
-----
:func:`build_optimizer` makes this class for the name "{name}". Its page says what
computes and which checkpoints fit.

Example
-------
>>> import torch
>>> from hyperpyyaml import load_hyperpyyaml
>>> text = "opt_class: !name:speechbrain_rev.optim.{class_name} {{bits: 8, lr: 0.1}}"
>>> opt_class = load_hyperpyyaml(text)["opt_class"]
>>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
>>> isinstance(optimizer, {class_name}), isinstance(optimizer, torch.optim.Optimizer)
(True, True)
"""
#: The class of each optimizer, by its name.
CLASSES = {name: _public_class(row) for name, row in OPTIMIZERS.items()}


def build_optimizer(
    params: Params,
    *,
    name: str,
    bits: int,
    lr: float,
    keep_32bit: Kept = (),
    block: int = 256,
    pack_small: bool = False,
    backend: str = "native",
    **options: Any,
) -> torch.optim.Optimizer:
    """Build an optimizer by its name: an instance of its class in this package.

    At 32 bits torch's own optimizer computes, where torch has one: it has no Lion. At 8
    bits a step over all tensors takes at most ten launches of a GPU, with the arithmetic of
    torch's. Options that the optimizer would ignore are refused.

    Parameters
    ----------
    params : iterable of torch.Tensor, or of parameter groups
        What to train. Groups may have options of their own. Some versions of SpeechBrain
        clip the gradients of the first group alone: there keep to one.
    name : {"sgd", "adam", "adamw", "lion"}
        SGD with momentum; Adam; Adam with decoupled weight decay; Lion.
    bits : {8, 32}
        Bits of each value of the states.
    lr : float
        Learning rate.
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these
        Whose states stay at 32 bits, for instance a classifier's. Tensors of fewer than
        4096 elements always do, unless ``pack_small`` is set.
    block : {256, 2048}
        Values that share a scale; read at 8 bits. The paper's blocks have 2048.
    pack_small : bool
        Whether tensors of fewer than 4096 elements have 8-bit states in shared blocks.
    backend : {"native", "bitsandbytes"}
        Who computes at 8 bits. "bitsandbytes" takes that library's own optimizer, with its
        own states and checkpoints.
    **options
        Options of the optimizer's class. None stands for the class's default, so that
        one block of YAML serves all.

    Returns
    -------
    torch.optim.Optimizer
        An instance of the class that ``name`` stands for. Weights in any dense memory
        format are updated where they lie. Its checkpoints are refused by an optimizer of
        other bits, another backend, another form of states or another class.

    Raises
    ------
    ValueError
        If a name or value is not among those above, if an option is given that the
        optimizer cannot honour, if this package's arithmetic updates a parameter that is
        not float32, or if one is to be kept at 32 bits but not among ``params``.
    ImportError
        If bitsandbytes is asked for and cannot be imported.

    Notes
    -----
    A CPU computes by the plain reference, a GPU by a Triton kernel with the same bits.
    Checkpoints fit both.

    A second moment that 8 bits would round to zero takes the least value above zero.
    Otherwise Adam would divide by ``eps`` alone.

    Where this package computes, a step is skipped if a gradient or its square is not finite (above 1.8e19).
    Weights, states and counts of steps stay unchanged, and the check does not wait for the
    GPU. ``optimizer.skipped_steps`` counts such steps. Moments of torch's optimizers
    become NaN. ``torch.amp.GradScaler`` hands its own verdict over without waiting, too.

    Example
    -------
    >>> weight = torch.nn.Parameter(torch.ones(4096))
    >>> optimizer = build_optimizer([weight], name="sgd", bits=8, lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight[0].item(), state_bytes(optimizer) < 0.5 * 4 * weight.numel()
    (0.8999999761581421, True)
    """
    if name not in CLASSES:
        raise ValueError(
            f"The optimizer {name!r} does not exist; there are "
            f"{', '.join(map(repr, CLASSES))}."
        )
    build: Callable[..., torch.optim.Optimizer] = CLASSES[name]
    return build(
        params,
        bits=bits,
        lr=lr,
        keep_32bit=keep_32bit,
        block=block,
        pack_small=pack_small,
        backend=backend,
        **{key: value for key, value in options.items() if value is not None},
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes that the states of an optimizer hold.

    States come into being at the first step; before it the count is zero. Memory that
    several parameters share, as the 8-bit code tables, is counted once.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any optimizer whose states are tensors.

    Returns
    -------
    int
        Bytes, the parameters themselves not among them.

    Example
    -------
    >>> weight = torch.nn.Parameter(torch.ones(1000))
    >>> optimizer = build_optimizer([weight], name="sgd", bits=32, lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> state_bytes(optimizer)
    4000
    """
    values = (value for state in optimizer.state.values() for value in state.values())
    storages = [x.untyped_storage() for x in values if isinstance(x, Tensor)]
    return sum({(s.device, storage_key(s)): s.nbytes() for s in storages}.values())
