"""SGD, Adam and AdamW with 8-bit or 32-bit states, as classes and by name.

8-bit states are cut into blocks, each block is divided by its largest magnitude and
stored as the nearest of 256 values: ``reference.py`` has the scheme and computes on a CPU,
``kernels/optimizer.py`` on a GPU.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from speechbrain_rev.kernels import optimizer as kernels
from speechbrain_rev.kernels.optimizer import UpdateRule
from speechbrain_rev.optim import bitsandbytes, reference
from speechbrain_rev.optim.arguments import (
    Kept,
    Params,
    honoured,
    parameter_groups,
    parameters_to_keep,
    read_options,
    read_parameters,
)
from speechbrain_rev.optim.checkpoint import (
    BUILT_AS,
    GROUP_ENTRIES,
    by_parameter,
    parameters_of,
    read_checkpoint,
)
from speechbrain_rev.optim.map import map_of
from speechbrain_rev.optim.states import (
    STATE_KEYS,
    Arena,
    Storage,
    make_arena,
    moments_of,
)


class _Named(torch.optim.Optimizer):
    """The common part of SGD, Adam and AdamW: an instance is of a subclass for its bits."""

    _name: ClassVar[str]  # as in build_optimizer
    _at_32bit: ClassVar[type[torch.optim.Optimizer]]
    _named: ClassVar[type[_Named]]  # the public one, of the classes that compute
    _bits: ClassVar[int]  # likewise

    def _init(self, given: Mapping[str, Any]) -> None:
        """Read the arguments of a public class, by name, and start what computes."""
        options = self._options = read_options(self._name, given)
        named: Any = getattr(self, "_named", type(self))
        # What it computes with is its base, as of the paths that pathlib.Path makes.
        self.__class__ = _computing(named, options["bits"])
        start: Callable[..., None] = super().__init__
        own = {key: options[key] for key in honoured(self._name, self._bits)}
        start(parameter_groups(given["params"]), **own)
        kept = parameters_to_keep(given["keep_32bit"], parameters_of(self.param_groups))
        self._storage = Storage(options["block"], options["pack_small"], kept)

    def __reduce__(self) -> tuple[Any, ...]:
        groups = [{"params": group["params"]} for group in self.param_groups]
        given = {"params": groups, "keep_32bit": [*self._storage.kept], **self._options}
        return _rebuild, (self._named, given, self.state_dict())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own or those of the others.

        Raises
        ------
        ValueError
            If a parameter is there already, an option is unknown or cannot be honoured,
            or weights are not float32 at 8 bits. Nothing is changed then.
        """
        own = honoured(self._name, self._bits)
        for key in param_group:
            if key not in (*own, *GROUP_ENTRIES, *self.defaults):
                raise ValueError(
                    f"A parameter group has {key!r}, which is no option of "
                    f"{self._name}. There are {', '.join(honoured(self._name, 32))}."
                )
        group = self.defaults | param_group
        options = self._options | {key: group[key] for key in own}
        read = read_options(self._name, options)
        group |= {key: read[key] for key in own}
        group["params"] = read_parameters(
            group, parameters_of(self.param_groups), self._bits
        )
        super().add_param_group(group | {BUILT_AS: f"{self._name} at {self._bits} bit"})

    def state_dtype(self, param: Tensor) -> torch.dtype:
        """Return the type in which the moments of a parameter are stored."""
        at_8bit = self._bits == 8 and self._storage.form(param)[0]
        return torch.uint8 if at_8bit else param.dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a checkpoint of an optimizer built like this one, to the bit.

        Parameters
        ----------
        state_dict : dict
            What ``state_dict()`` gave, or :func:`convert_checkpoint`.

        Raises
        ------
        ValueError
            If it is of another optimizer, other bits, another form of states or other
            parameters. Nothing is changed then.
        """
        super().load_state_dict(read_checkpoint(self, state_dict))


def _rebuild(named: Any, given: Mapping[str, Any], saved: dict[str, Any]) -> Any:
    optimizer = object.__new__(named)
    optimizer._init(given)
    optimizer.load_state_dict(saved)
    return optimizer


class _EightBit(torch.optim.Optimizer):
    """Optimizers that compute for a class of ours, with 8-bit states."""

    _name: ClassVar[str]
    _options: dict[str, Any]
    _storage: Storage
    # A loss scaler then hands over whether to step, instead of waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        if self._options["backend"] == "bitsandbytes":
            bitsandbytes.library()
        self._arenas: list[Arena] = []
        #: Skipped steps that were counted before the buffers were rebuilt.
        self._skipped_before = 0
        block, pack_small = self._options["block"], self._options["pack_small"]
        form = {"block_size": block, "pack_small": pack_small}
        super().__init__(groups, options | form)

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
        for index, param in enumerate(parameters_of(self.param_groups)):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise ValueError(
                    f"The gradient of params[{index}], shape {list(param.shape)}, is "
                    f"{param.grad.layout}, but with 8-bit states gradients must be "
                    f"dense. Build the layer with sparse=False."
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
        # What a loss scaler hands over.
        found, scale = (getattr(self, k, None) for k in ("found_inf", "grad_scale"))
        healthy: dict[torch.device, Tensor] = {}  # whether each device may step
        for arena in active:
            steps, gradients = arena.table.steps, arena.table.gradients
            if scale is not None:
                given = [gradient for gradient in gradients if gradient is not None]
                torch._foreach_mul_(given, (1 / scale).to(steps))
            if steps.device not in healthy:
                one = torch.ones_like(steps[:1])
                may_step = one if found is None else (found.reshape(1) == 0)
                healthy[steps.device] = may_step.to(steps)
            computing = _backend(steps, "native")
            computing.clear_unless_finite(healthy[steps.device], arena.table)
        for arena in active:
            self._update(arena, healthy[arena.table.steps.device])
        return loss

    def _update(self, arena: Arena, healthy: Tensor) -> None:
        group, table = self.param_groups[arena.group], arena.table
        adam = self._name != "sgd"
        rule = UpdateRule(
            adam=adam,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            betas=group["betas"] if adam else (group["momentum"], 0.0),
            eps=group.get("eps", 0.0),
            decoupled=self._name == "adamw" or group.get("decoupled_decay", False),
            nesterov=group.get("nesterov", False),
        )
        table.steps.addcmul_(table.active, healthy)
        arena.tried += 1
        corrections = None
        if adam:
            betas = table.sent("betas", rule.betas, torch.float64)
            corrections = 1 - betas[:, None] ** table.steps
        maps = [map_of(i == 0, table.steps.device) for i in range(1 + adam)]
        for packed in arena.packs:
            name = "native" if packed.block is None else self._options["backend"]
            backend = _backend(table.steps, name)
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
                    self.state[param] = {
                        key: value.clone() if isinstance(value, Tensor) else value
                        for key, value in self.state.get(param, {}).items()
                    }
            self._lay_out(states, self._storage.block, requantise=True)
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
            moments = 1 if self._name == "sgd" else 2
            new = make_arena(group, number, [*params], self._storage, moments)
            for param, views in new.states.items():
                # Entries of the caller's own stay.
                entries = self.state.get(param, {}).items()
                kept = {key: value for key, value in entries if key not in STATE_KEYS}
                self.state[param] = kept | views
            self._arenas.append(new)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.take_up(state_dict, self._storage.block)

    def take_up(self, checkpoint: dict[str, Any], block: int) -> None:
        """Load a checkpoint that was read, whose 8-bit states have such blocks."""
        super().load_state_dict({**checkpoint, "state": {}})
        self._skipped_before = 0
        self._lay_out(by_parameter(self, checkpoint), block)

    def _lay_out(
        self, saved: Mapping[Tensor, Any], block: int, *, requantise: bool = False
    ) -> None:
        """Make buffers of the states that parameters have; the others begin anew."""
        self._arenas.clear()
        for number, group in enumerate(self.param_groups):
            stepped = (p for p in group["params"] if saved[p])
            self._add_arenas(
                number, {p: int(saved[p].get("arena", 0)) for p in stepped}
            )
        for arena in self._arenas:
            arena.fill(saved, block, requantise=requantise)


def _backend(steps: Tensor, name: str) -> Any:
    """Choose the module that computes where steps are counted."""
    if name == "bitsandbytes":
        return bitsandbytes
    usable = steps.is_cuda and kernels.usable(steps.device, torch.float32)
    return kernels if usable else reference


@functools.cache
def _computing(named: Any, bits: int) -> type[Any]:
    """Return the subclass of a public class that computes with states of such bits."""
    members = {"__doc__": named.__doc__, "_named": named, "_bits": bits}
    computes = _EightBit if bits == 8 else named._at_32bit
    return type(f"{named.__name__}{bits}bit", (named, computes), members)


class SGD(_Named):
    """SGD with momentum and 8-bit or 32-bit states.

    Parameters
    ----------
    params : iterable of torch.Tensor, or one parameter group
        What to train, see :func:`build_optimizer`.
    bits : {8, 32}
        Bits of each value of the momentum.
    lr : float
        Learning rate.
    momentum : float
        From 0 to below 1; above 0 at 8 bits.
    weight_decay : float
        An L2 penalty.
    nesterov : bool
        Whether the momentum looks one step ahead.
    dampening : float
        At 32 bits only.
    decoupled_decay : bool
        At 8 bits only: weights shrink before the update, as in AdamW.
    keep_32bit, block, pack_small, backend
        How states are stored and who computes, see :func:`build_optimizer`.

    Raises
    ------
    ValueError, ImportError
        As :func:`build_optimizer` does.

    Notes
    -----
    :func:`build_optimizer` makes this class for the name "sgd". Its page says what
    computes and which checkpoints fit.

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.SGD {bits: 8, lr: 0.1}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, SGD), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    _name, _at_32bit = "sgd", torch.optim.SGD

    def __init__(
        self,
        params: Params,
        *,
        bits: int,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        dampening: float = 0.0,
        decoupled_decay: bool = False,
        keep_32bit: Kept = (),
        block: int = 256,
        pack_small: bool = False,
        backend: str = "native",
    ) -> None:
        self._init(locals())


class _AdamLike(_Named):
    def __init__(
        self,
        params: Params,
        *,
        bits: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        keep_32bit: Kept = (),
        block: int = 256,
        pack_small: bool = False,
        backend: str = "native",
    ) -> None:
        self._init(locals())


class Adam(_AdamLike):
    """Adam with 8-bit or 32-bit states.

    Parameters
    ----------
    params : iterable of torch.Tensor, or one parameter group
        What to train, see :func:`build_optimizer`.
    bits : {8, 32}
        Bits of each value of both moments.
    lr : float
        Learning rate.
    betas : (float, float)
        Of the first and the second moment, each from 0 to below 1.
    eps : float
        Above 0.
    weight_decay : float
        An L2 penalty.
    amsgrad : bool
        At 32 bits only.
    keep_32bit, block, pack_small, backend
        How states are stored and who computes, see :func:`build_optimizer`.

    Raises
    ------
    ValueError, ImportError
        As :func:`build_optimizer` does.

    Notes
    -----
    :func:`build_optimizer` makes this class for the name "adam". Its page says what
    computes and which checkpoints fit.

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.Adam {bits: 8, lr: 0.001}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, Adam), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    _name, _at_32bit = "adam", torch.optim.Adam


class AdamW(_AdamLike):
    """Adam with decoupled weight decay and 8-bit or 32-bit states.

    Parameters
    ----------
    params : iterable of torch.Tensor, or one parameter group
        What to train, see :func:`build_optimizer`.
    bits : {8, 32}
        Bits of each value of both moments.
    lr : float
        Learning rate.
    betas : (float, float)
        Of the first and the second moment, each from 0 to below 1.
    eps : float
        Above 0.
    weight_decay : float
        Decoupled: weights shrink by it before the update. The default is 0, that of
        ``torch.optim.AdamW`` 0.01.
    amsgrad : bool
        At 32 bits only.
    keep_32bit, block, pack_small, backend
        How states are stored and who computes, see :func:`build_optimizer`.

    Raises
    ------
    ValueError, ImportError
        As :func:`build_optimizer` does.

    Notes
    -----
    :func:`build_optimizer` makes this class for the name "adamw". Its page says what
    computes and which checkpoints fit.

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.AdamW {bits: 8, lr: 0.001}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, AdamW), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    _name, _at_32bit = "adamw", torch.optim.AdamW


_CLASSES: dict[str, type[_Named]] = {row._name: row for row in (SGD, Adam, AdamW)}


def build_optimizer(
    params: Params,
    *,
    name: str,
    bits: int,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    nesterov: bool = False,
    dampening: float = 0.0,
    decoupled_decay: bool = False,
    amsgrad: bool = False,
    keep_32bit: Kept = (),
    block: int = 256,
    pack_small: bool = False,
    backend: str = "native",
) -> torch.optim.Optimizer:
    """Build an :class:`SGD`, :class:`Adam` or :class:`AdamW` by its name.

    At 32 bits, torch's own optimizer computes; it is the baseline. At 8 bits, a step over
    all tensors takes at most ten launches of a GPU, with the arithmetic of torch's.
    Options that would be ignored are refused.

    Parameters
    ----------
    params : iterable of torch.Tensor, or of parameter groups
        What to train. Groups may have options of their own. Some versions of SpeechBrain
        clip the gradients of the first group alone: there keep to one.
    name : {"sgd", "adam", "adamw"}
        SGD with momentum; Adam; Adam with decoupled weight decay.
    bits : {8, 32}
        Bits of each value of momentum and variance.
    lr : float
        Learning rate.
    momentum : float
        Of SGD, from 0 to below 1; above 0 at 8 bits. Adam and AdamW take ``betas``
        instead, so that one block of YAML serves all three.
    weight_decay : float
        An L2 penalty in SGD and in Adam, decoupled in AdamW.
    betas : (float, float)
        Of Adam and AdamW, each from 0 to below 1. SGD ignores it.
    eps : float
        Of Adam and AdamW, above 0. SGD ignores it.
    nesterov : bool
        Of SGD.
    dampening : float
        Of SGD, at 32 bits only.
    decoupled_decay : bool
        Of SGD, at 8 bits only: weights shrink before the update, as in AdamW.
    amsgrad : bool
        Of Adam and AdamW, at 32 bits only.
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these
        Whose states stay at 32 bits, for instance a classifier's. Tensors of fewer than
        4096 elements always do, unless ``pack_small`` is set.
    block : {256, 2048}
        Values that share a scale at 8 bits. The paper's blocks have 2048.
    pack_small : bool
        Whether tensors of fewer than 4096 elements have 8-bit states in shared blocks.
    backend : {"native", "bitsandbytes"}
        Who computes at 8 bits. bitsandbytes takes several launches for each tensor, waits
        for the device once a step, and on a CPU loses values under 3e-5 of their
        block's largest. States and checkpoints are the same.

    Returns
    -------
    SGD, Adam or AdamW
        Weights in any dense memory format are updated where they lie. At 32 bits it is an
        instance of torch's class as well. Its checkpoints are refused by an optimizer of
        other bits, another form of states or another class.

    Raises
    ------
    ValueError
        If a name or value is not among those above, if an option is given that the
        optimizer cannot honour, or if a parameter is given twice, is not float32 at
        8 bits, or is to be kept at 32 bits but not among ``params``.
    ImportError
        If bitsandbytes is asked for and cannot be imported.

    Notes
    -----
    A CPU computes by the plain reference, a GPU by a Triton kernel with the same bits.
    Checkpoints fit both, and :func:`~speechbrain_rev.optim.convert_checkpoint` changes
    their form.

    A second moment that 8 bits would round to zero takes the least value above zero.
    Otherwise Adam would divide by ``eps`` alone.

    At 8 bits a step is skipped if a gradient or its square is not finite (above 1.8e19).
    Weights, states and counts of steps stay unchanged, and the check does not wait for the
    GPU. ``optimizer.skipped_steps`` counts such steps. At 32 bits moments become NaN, as torch's do.
    ``torch.amp.GradScaler`` hands its own verdict over without waiting, too.

    Example
    -------
    >>> weight = torch.nn.Parameter(torch.ones(4096))
    >>> optimizer = build_optimizer([weight], name="sgd", bits=8, lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight[0].item(), state_bytes(optimizer) < 0.5 * 4 * weight.numel()
    (0.8999999761581421, True)
    """
    given = locals()
    if name not in _CLASSES:
        close = difflib.get_close_matches(str(name).lower(), _CLASSES, n=1, cutoff=0.3)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"The optimizer {name!r} does not exist; there are "
            f"{', '.join(map(repr, _CLASSES))}.{hint}"
        )
    read_options(name, given)  # those of other optimizers, too
    build: Callable[..., torch.optim.Optimizer] = _CLASSES[name]
    return build(**{key: given[key] for key in inspect.signature(build).parameters})


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
    return sum({(s.device, s._cdata): s.nbytes() for s in storages}.values())
