"""SGD, Adam and AdamW with 8-bit or 32-bit states, as classes and by name.

8-bit states are cut into blocks, each block is divided by its largest magnitude and
stored as the nearest of 256 values: ``reference.py`` has the scheme and computes on a CPU,
``kernels/optimizer.py`` on a GPU.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from speechbrain_rev.kernels import optimizer as kernels
from speechbrain_rev.kernels.optimizer import UpdateRule
from speechbrain_rev.optim import bitsandbytes, reference
from speechbrain_rev.optim.arguments import (
    Kept,
    Params,
    Storage,
    honoured,
    parameter_groups,
    parameters_to_keep,
    read_options,
    refuse_other_than_float32,
)
from speechbrain_rev.optim.checkpoint import BUILT_AS, fill, read_checkpoint
from speechbrain_rev.optim.map import map_of
from speechbrain_rev.optim.reference import moments_of
from speechbrain_rev.optim.states import Arena, Layout, make_arena

if TYPE_CHECKING:
    from typing_extensions import Self


class _Named(torch.optim.Optimizer):
    """The common part of SGD, Adam and AdamW: an instance is of a subclass for its bits."""

    _name: ClassVar[str]  # as in build_optimizer
    _at_32bit: ClassVar[type[torch.optim.Optimizer]]
    _named: ClassVar[type[_Named]]  # the public one, of the classes that compute
    _bits: ClassVar[int]  # likewise

    def __new__(cls, *_: object, bits: object = 32, **__: object) -> Self:
        # What it computes with is its base, as of the paths that pathlib.Path makes.
        # Other bits, or none, are refused by __init__.
        made = cls if "_bits" in vars(cls) else _computing(cls, 8 if bits == 8 else 32)
        return object.__new__(made)

    def _init(
        self,
        params: Params,
        bits: int,
        keep_32bit: Kept,
        storage: Storage,
        **given: Any,
    ) -> None:
        options = read_options(self._name, bits, given)
        if bits != self._bits:
            raise ValueError(
                f"bits is {bits}, but {type(self).__name__} was made. Give bits to "
                f"{self._named.__name__} by its name."
            )
        groups = parameter_groups(params)
        trained = [param for group in groups for param in group["params"]]
        kept = parameters_to_keep(keep_32bit, trained)
        storage.check(self._name, bits, options)
        if bits == 8 and storage.backend == "bitsandbytes":
            bitsandbytes.library()
        start: Callable[..., None] = super().__init__
        options = {key: options[key] for key in honoured(self._name, bits)}
        if bits == 8:
            start(groups, kept, storage, **options)
        else:
            start(groups, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own or those of the others.

        Raises
        ------
        ValueError
            If a parameter is there already, an option is unknown or cannot be honoured,
            or weights are not float32 at 8 bit.
        """
        group = {**param_group, BUILT_AS: f"{self._name} at {self._bits} bit"}
        known = (*honoured(self._name, self._bits), *_GROUP_ENTRIES, *self.defaults)
        for key in group:
            if key not in known:
                raise ValueError(
                    f"A parameter group has {key!r}, which is no option of "
                    f"{self._name}. There are {', '.join(honoured(self._name, 32))}."
                )
        own = {k: v for k, v in group.items() if k in honoured(self._name, self._bits)}
        usual = {k: self.defaults[k] for k in honoured(self._name, self._bits)}
        group |= read_options(self._name, self._bits, {**usual, **own})
        super().add_param_group(group)
        if self._bits == 8:
            try:
                refuse_other_than_float32(self.param_groups[-1]["params"])
            except ValueError:
                del self.param_groups[-1]
                raise


#: What groups have beside options: those of checkpoints, schedulers and the caller.
_GROUP_ENTRIES = ("params", "initial_lr", "name", "param_names", BUILT_AS)


class _Plain(torch.optim.Optimizer):
    """Checkpoints and copies of torch's optimizers that compute for a class of ours."""

    _named: ClassVar[type[_Named]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self._named,), self.__getstate__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        checked = read_checkpoint(self, state_dict, lambda param: param.dtype)
        super().load_state_dict(checked.as_state_dict())


def _blank(named: type[_Named]) -> Any:
    return object.__new__(_computing(named, 32))


class _EightBit(torch.optim.Optimizer):
    """Optimizers that compute for a class of ours, with states of 8 bits."""

    _named: ClassVar[type[_Named]]
    _name: ClassVar[str]
    # A loss scaler then hands over whether to step, instead of waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        kept: frozenset[int],
        storage: Storage,
        **options: Any,
    ) -> None:
        # Identities are safe to keep: the optimizer keeps the parameters alive.
        self._kept, self._storage = kept, storage
        self._arenas: list[tuple[int, Arena]] = []  # beside the number of the group
        form = {"block_size": storage.block, "pack_small": storage.pack_small}
        super().__init__(groups, {**options, **form})

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied parameters have other identities: what is kept goes by position.
        kept = [id(p) in self._kept for g in self.param_groups for p in g["params"]]
        states = self.state_dict()["state"]
        return _rebuild, (
            self._named, self.param_groups, kept, self._storage, self.defaults, states,
        )  # fmt: skip

    @property
    def skipped_steps(self) -> int:
        """How many steps changed nothing, as a gradient was not finite; waits for a GPU."""
        counts = (
            arena.tried - float(arena.table.steps[-1]) for _, arena in self._arenas
        )
        return int(max(counts, default=0))

    def state_bits(self, param: Tensor) -> int:
        """Return the bits of the states of a parameter: 8 or 32."""
        return 32 if self._layout.kind(param, self._kept) == 2 else 8

    def read_moments(self, param: Tensor) -> list[Tensor]:
        """Read the moments of a parameter in float32; none before its first gradient."""
        return moments_of(self.state.get(param, {}), self._storage.block)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights that have a gradient, unless a gradient is not finite.

        Raises
        ------
        ValueError
            If a gradient is sparse. Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse_gradients()
        self._make_states()
        flags = self._flags()
        active = [pair for pair in self._arenas if pair[1].set_gradients()]
        for device, healthy in flags.items():
            for _, arena in active:
                steps = arena.table.steps
                if steps.device == device:
                    _backend(steps, "native").clear_unless_finite(healthy, arena.table)
        for number, arena in active:
            healthy = flags[arena.table.steps.device]
            self._update(self.param_groups[number], arena, healthy)
        return loss

    def _refuse_sparse_gradients(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise ValueError(
                    f"The gradient of params[{index}], shape {list(param.shape)}, is "
                    f"{param.grad.layout}, but with 8-bit states gradients must be "
                    f"dense. Build the layer with sparse=False."
                )

    def _make_states(self) -> None:
        """Make the states of parameters that have a gradient for the first time."""
        for number, group in enumerate(self.param_groups):
            new: dict[torch.device, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None and param not in self.state:
                    new.setdefault(param.device, []).append(param)
            for params in new.values():
                self._add_arena(number, params)

    def _add_arena(self, group: int, params: list[Tensor]) -> Arena:
        arena = make_arena(params, self._layout, self._kept)
        before = sum(number == group for number, _ in self._arenas)
        self._arenas.append((group, arena))
        self.state.update(arena.states(before))
        return arena

    @property
    def _layout(self) -> Layout:
        moments = 1 if self._name == "sgd" else 2
        return Layout(moments, self._storage.block, self._storage.pack_small)

    def _flags(self) -> dict[torch.device, Tensor]:
        """Give each device a flag that lets it step, one by default; a scaler may clear it."""
        devices = {arena.table.steps.device for _, arena in self._arenas}
        found, scale = (
            getattr(self, "found_inf", None),
            getattr(self, "grad_scale", None),
        )
        if scale is not None:
            for group in self.param_groups:
                gradients = [p.grad for p in group["params"] if p.grad is not None]
                if gradients:
                    torch._foreach_mul_(gradients, (1 / scale).to(gradients[0]))
        if found is None:
            return {device: torch.ones(1, device=device) for device in devices}
        return {d: (found.reshape(1) == 0).to(d, torch.float32) for d in devices}

    def _update(self, group: Mapping[str, Any], arena: Arena, healthy: Tensor) -> None:
        table, adam = arena.table, self._name != "sgd"
        device = table.steps.device
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
            betas = table.kept(
                "betas",
                rule.betas,
                lambda: torch.tensor(rule.betas, dtype=torch.float64, device=device),
            )
            corrections = 1 - betas[:, None] ** table.steps
        maps = [map_of(signed, device) for signed in (True, False)[: 1 + adam]]
        for packed in arena.packs:
            name = "native" if packed.block is None else self._storage.backend
            _backend(table.steps, name).update(
                table, packed, rule, healthy, corrections, maps
            )

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
        checked = read_checkpoint(
            self,
            state_dict,
            lambda p: torch.uint8 if self.state_bits(p) == 8 else torch.float32,
        )
        empty = {**checked.as_state_dict(), "state": {}}
        super().load_state_dict(empty)
        self._arenas.clear()
        for number, states in enumerate(checked.states):
            arenas: dict[tuple[int, torch.device], dict[Tensor, dict[str, Any]]] = {}
            for param, state in states.items():
                if state:
                    key = int(state.get("arena", 0)), param.device
                    arenas.setdefault(key, {})[param] = state
            for _, own in sorted(arenas.items(), key=lambda item: item[0][0]):
                arena = self._add_arena(number, list(own))
                fill(
                    arena,
                    [self.state[p] for p in arena.params],
                    own,
                    self._storage.block,
                )


def _rebuild(
    named: Any,
    groups: list[dict[str, Any]],
    kept: list[bool],
    storage: Storage,
    defaults: dict[str, Any],
    states: dict[int, Any],
) -> Any:
    params = [param for group in groups for param in group["params"]]
    ids = frozenset(id(p) for p, keep in zip(params, kept, strict=True) if keep)
    optimizer = object.__new__(_computing(named, 8))
    options = {key: defaults[key] for key in honoured(named._name, 8)}
    _EightBit.__init__(
        optimizer, [dict(group) for group in groups], ids, storage, **options
    )
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": states})
    return optimizer


def _backend(steps: Tensor, name: str) -> Any:
    """Choose the module that computes where steps are counted."""
    if name == "bitsandbytes":
        return bitsandbytes
    if steps.is_cuda and kernels.usable(steps.device, torch.float32):
        return kernels
    return _Nothing if steps.is_meta else reference


class _Nothing:
    """What has no contents is not computed: states alone are made."""

    @staticmethod
    def clear_unless_finite(*_: object) -> None:
        """Do nothing."""

    update = clear_unless_finite


def _computing(named: Any, bits: int) -> type[Any]:
    """Return the subclass of a public class that computes with states of such bits."""
    return _class_of(named, bits)


@functools.cache
def _class_of(named: Any, bits: int) -> type[Any]:
    members = {"__doc__": named.__doc__, "_named": named, "_bits": bits}
    bases = (named, _EightBit) if bits == 8 else (named, _Plain, named._at_32bit)
    return type(f"{named.__name__}{bits}bit", bases, members)


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
        From 0 to below 1; above 0 at 8 bit.
    weight_decay : float
        An L2 penalty.
    nesterov : bool
        Whether the momentum looks one step ahead.
    dampening : float
        At 32 bit only.
    decoupled_decay : bool
        At 8 bit only: weights shrink before the update, as in AdamW.
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
        self._init(
            params,
            bits,
            keep_32bit,
            Storage(block, pack_small, backend),
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            dampening=dampening,
            decoupled_decay=decoupled_decay,
        )


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
        self._init(
            params,
            bits,
            keep_32bit,
            Storage(block, pack_small, backend),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


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
        At 32 bit only.
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
        At 32 bit only.
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

    At 32 bit, torch's own optimizer computes; it is the baseline. At 8 bit, a step over
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
        Of SGD, from 0 to below 1; above 0 at 8 bit. Adam and AdamW take ``betas``
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
        Of SGD, at 32 bit only.
    decoupled_decay : bool
        Of SGD, at 8 bit only: weights shrink before the update, as in AdamW.
    amsgrad : bool
        Of Adam and AdamW, at 32 bit only.
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these
        Whose states stay at 32 bit, for instance a classifier's. Tensors of fewer than
        4096 elements always do, unless ``pack_small`` is set.
    block : {256, 2048}
        Values that share a scale at 8 bit. The paper's blocks have 2048.
    pack_small : bool
        Whether tensors of fewer than 4096 elements have 8-bit states in shared blocks.
    backend : {"native", "bitsandbytes"}
        Who computes at 8 bit. bitsandbytes takes several launches for each tensor, waits
        for the device once a step, and on a CPU loses values under 3e-5 of their
        block's largest. States and checkpoints are the same.

    Returns
    -------
    SGD, Adam or AdamW
        Weights in any dense memory format are updated where they lie. At 32 bit it is an
        instance of torch's class as well. Its checkpoints are refused by an optimizer of
        other bits, another form of states or another class.

    Raises
    ------
    ValueError
        If a name or value is not among those above, if an option is given that the
        optimizer cannot honour, or if a parameter is given twice, is not float32 at
        8 bit, or is to be kept at 32 bit but not among ``params``.
    ImportError
        If bitsandbytes is asked for and cannot be imported.

    Notes
    -----
    A CPU computes by the plain reference, a GPU by a Triton kernel with the same bits.
    Checkpoints fit both, and :func:`~speechbrain_rev.optim.convert_checkpoint` changes
    their form.

    A second moment that 8 bits would round to zero takes the least value above zero.
    Otherwise Adam would divide by ``eps`` alone.

    At 8 bit a step with a gradient that is not finite changes nothing, neither weights
    nor states nor the count of steps, and waits for nothing;
    ``optimizer.skipped_steps`` counts such steps. At 32 bit moments become NaN, as torch's do.
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
    if name not in _CLASSES:
        nearest = difflib.get_close_matches(
            str(name).lower(), _CLASSES, n=1, cutoff=0.3
        )
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"The optimizer {name!r} does not exist; there are "
            f"{', '.join(map(repr, _CLASSES))}.{hint}"
        )
    given = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "decoupled_decay": decoupled_decay,
        "betas": betas,
        "eps": eps,
        "amsgrad": amsgrad,
    }
    options = read_options(name, bits, given)
    stored = {"block": block, "pack_small": pack_small, "backend": backend}
    own = {*honoured(name, 8), *honoured(name, 32)}
    build: Callable[..., torch.optim.Optimizer] = _CLASSES[name]
    return build(
        params,
        bits=bits,
        keep_32bit=keep_32bit,
        **{key: options[key] for key in own},
        **stored,
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
    storages = {
        (storage.device, storage._cdata): storage.nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
        for storage in (value.untyped_storage(),)
    }
    return sum(storages.values())
