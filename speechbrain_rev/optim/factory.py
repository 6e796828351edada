"""SGD, Adam and AdamW with states of 8 or 32 bit, as classes and behind one door.

8-bit states are cut into blocks, each block is divided by its largest magnitude and
stored as the nearest of 256 values: ``reference.py`` has the scheme, ``strict.py`` its
use. bitsandbytes, which computes on CUDA, takes several requests without honouring
them. They are refused here.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from speechbrain_rev.optim.arguments import (
    Kept,
    number,
    pair,
    parameters_of_one_group,
    parameters_to_keep,
    refuse_another_group,
    switch,
)
from speechbrain_rev.optim.checkpoint import BUILT_AS, refuse_other_checkpoint
from speechbrain_rev.optim.strict import strict_class

if TYPE_CHECKING:
    from typing_extensions import Self

Params: TypeAlias = (
    Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | Mapping[str, Any]
)


@dataclass(frozen=True)
class _Optimizer:
    """Who computes an optimizer, and which options it honours at 32 and at 8 bit."""

    at_32bit: type[torch.optim.Optimizer]
    at_8bit: str
    options: tuple[str, ...]
    options_at_8bit: tuple[str, ...]
    l2_decay_at_8bit: bool = True


_ADAM_OPTIONS = ("betas", "eps", "amsgrad"), ("betas", "eps")

# The library's Adam and AdamW differ in defaults alone: decay is decoupled in both.
_OPTIMIZERS = {
    "sgd": _Optimizer(
        torch.optim.SGD, "SGD", ("momentum", "dampening", "nesterov"), ("momentum",)
    ),
    "adam": _Optimizer(
        torch.optim.Adam, "AdamW", *_ADAM_OPTIONS, l2_decay_at_8bit=False
    ),
    "adamw": _Optimizer(torch.optim.AdamW, "AdamW", *_ADAM_OPTIONS),
}


_READERS: dict[str, Callable[[Any], Any]] = {
    "lr": functools.partial(number, "lr"),
    "weight_decay": functools.partial(number, "weight_decay"),
    "momentum": functools.partial(number, "momentum", below=1.0),
    "dampening": functools.partial(number, "dampening"),
    "nesterov": functools.partial(switch, "nesterov"),
    "betas": functools.partial(pair, "betas", below=1.0),
    "eps": functools.partial(number, "eps", above_zero=True),
    "amsgrad": functools.partial(switch, "amsgrad"),
}


class _Named(torch.optim.Optimizer):
    """What SGD, Adam and AdamW share. Making one makes a subclass of the asked bits."""

    _name: ClassVar[str]  # in _OPTIMIZERS
    _named: ClassVar[type[_Named]]  # the public one, of the classes that compute
    _bits: ClassVar[int]  # likewise

    def __new__(cls, *_: object, bits: object = 32, **__: object) -> Self:
        # What it computes with is its base, as of the paths that pathlib.Path makes.
        # Other bits, or none, are refused by __init__.
        made = cls if "_bits" in vars(cls) else _computing(cls, 8 if bits == 8 else 32)
        return object.__new__(made)

    def _init(self, params: Params, bits: int, keep_32bit: Kept, **given: Any) -> None:
        _check_bits(bits)
        if bits != self._bits:
            raise ValueError(
                f"bits is {bits}, but {type(self).__name__} was made. Give bits to "
                f"{self._named.__name__} by its name."
            )
        options = {key: _READERS[key](value) for key, value in given.items()}
        refuse_what_is_not_honoured(self._name, bits, options, options["weight_decay"])
        trained = parameters_of_one_group(params)
        kept = parameters_to_keep(keep_32bit, trained)
        group = {"params": trained, BUILT_AS: f"{self._name} at {bits} bit"}
        start: Callable[..., None] = super().__init__
        if bits == 8:
            _refuse_other_than_float32(trained)
            honoured = ("lr", "weight_decay", *_OPTIMIZERS[self._name].options_at_8bit)
            options = {key: options[key] for key in honoured}
            start([group], kept, optim_bits=8, **options)
        else:
            start([group], **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            refuse_another_group(param_group)
        super().add_param_group(param_group)


class _Plain(torch.optim.Optimizer):
    """What optimizers of torch do otherwise where they compute for a class of ours."""

    _named: ClassVar[type[_Named]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self._named,), self.__getstate__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dtypes = (param.dtype for param in self.param_groups[0]["params"])
        refuse_other_checkpoint(self, state_dict, dtypes)
        super().load_state_dict(state_dict)


def _blank(named: type[_Named]) -> Any:
    return object.__new__(_computing(named, 32))


def _computing(named: Any, bits: int) -> type[Any]:
    """Give the subclass of a public class that computes with states of such bits."""
    if bits == 32:
        return _plain_class(named)
    return strict_class(named, _OPTIMIZERS[named._name].at_8bit)


@functools.cache
def _plain_class(named: Any) -> type[Any]:
    members = {"__doc__": named.__doc__, "_named": named, "_bits": 32}
    bases = (named, _Plain, _OPTIMIZERS[named._name].at_32bit)
    return type(f"{named.__name__}32bit", bases, members)


class SGD(_Named):
    """SGD with momentum, whose states have 8 or 32 bits.

    Parameters
    ----------
    params : iterable of torch.Tensor, or one parameter group
        What to train, see :func:`build_optimizer`.
    bits : {8, 32}
        Of each value of the momentum.
    lr : float
        Learning rate.
    momentum : float
        From 0 to below 1; above 0 at 8 bit.
    weight_decay : float
        An L2 penalty.
    nesterov : bool
        At 32 bit only.
    dampening : float
        At 32 bit only.
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these
        Whose states stay at 32 bit, see :func:`build_optimizer`.

    Raises
    ------
    ValueError, ImportError
        As :func:`build_optimizer` does.

    Notes
    -----
    What computes, and what checkpoints fit, is told by :func:`build_optimizer`, which
    makes this class for the name "sgd".

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.SGD {bits: 8, lr: 0.1}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, SGD), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    _name = "sgd"

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
        keep_32bit: Kept = (),
    ) -> None:
        self._init(
            params,
            bits,
            keep_32bit,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            dampening=dampening,
        )


class Adam(_Named):
    """Adam, whose states have 8 or 32 bits.

    Parameters
    ----------
    params : iterable of torch.Tensor, or one parameter group
        What to train, see :func:`build_optimizer`.
    bits : {8, 32}
        Of each value of both moments.
    lr : float
        Learning rate.
    betas : (float, float)
        Of the first and the second moment, each from 0 to below 1.
    eps : float
        Above 0.
    weight_decay : float
        An L2 penalty, at 32 bit only.
    amsgrad : bool
        At 32 bit only.
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these
        Whose states stay at 32 bit, see :func:`build_optimizer`.

    Raises
    ------
    ValueError, ImportError
        As :func:`build_optimizer` does.

    Notes
    -----
    What computes, and what checkpoints fit, is told by :func:`build_optimizer`, which
    makes this class for the name "adam".

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.Adam {bits: 8, lr: 0.001}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, Adam), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    _name = "adam"

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
    ) -> None:
        self._init(
            params,
            bits,
            keep_32bit,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class AdamW(_Named):
    """Adam with decoupled weight decay, whose states have 8 or 32 bits.

    Parameters
    ----------
    params : iterable of torch.Tensor, or one parameter group
        What to train, see :func:`build_optimizer`.
    bits : {8, 32}
        Of each value of both moments.
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
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these
        Whose states stay at 32 bit, see :func:`build_optimizer`.

    Raises
    ------
    ValueError, ImportError
        As :func:`build_optimizer` does.

    Notes
    -----
    What computes, and what checkpoints fit, is told by :func:`build_optimizer`, which
    makes this class for the name "adamw".

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.AdamW {bits: 8, lr: 0.001}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, AdamW), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    _name = "adamw"

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
    ) -> None:
        self._init(
            params,
            bits,
            keep_32bit,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


_CLASSES: dict[str, type[_Named]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


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
    amsgrad: bool = False,
    keep_32bit: Kept = (),
) -> torch.optim.Optimizer:
    """Build an :class:`SGD`, :class:`Adam` or :class:`AdamW` by its name.

    At 32 bit torch's own optimizer computes: that is the one results are compared with,
    it knows every option, and bitsandbytes need not be installed. At 8 bit bitsandbytes'
    does, held to what it can do, with the arithmetic of torch's: SGD with momentum, AdamW
    with bias correction and with the decay before the update.

    Parameters
    ----------
    params : iterable of torch.Tensor, or one parameter group
        What to train. One group only, as SpeechBrain clips the first alone; a group
        may hold nothing but ``params``.
    name : {"sgd", "adam", "adamw"}
        SGD with momentum; Adam; Adam with decoupled weight decay.
    bits : {8, 32}
        Of each value of momentum and variance.
    lr : float
        Learning rate.
    momentum : float
        Of SGD, from 0 to below 1; above 0 at 8 bit. Adam and AdamW take ``betas``
        instead, so that one block of YAML serves all three.
    weight_decay : float
        An L2 penalty in SGD and in Adam (there at 32 bit only), decoupled in AdamW.
    betas : (float, float)
        Of Adam and AdamW, each from 0 to below 1. SGD does not look at it.
    eps : float
        Of Adam and AdamW, above 0. SGD does not look at it.
    nesterov : bool
        Of SGD, at 32 bit only.
    dampening : float
        Of SGD, at 32 bit only.
    amsgrad : bool
        Of Adam and AdamW, at 32 bit only.
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these
        Whose states stay at 32 bit, for instance a classifier's. Tensors of fewer than
        4096 elements always do.

    Returns
    -------
    SGD, Adam or AdamW
        With one parameter group, for good. Weights in another memory format than the
        contiguous one keep it. At 32 bit it is an instance of torch's class as well. Its
        checkpoints are refused by an optimizer of other bits or another class.

    Raises
    ------
    ValueError
        If a name or value is not among those above, if an option is given that the
        optimizer cannot honour, or if a parameter is given twice, is not float32 at
        8 bit, or is to be kept at 32 bit but not among ``params``.
    ImportError
        If 8 bit is asked for and bitsandbytes cannot be imported.

    Notes
    -----
    On a CPU 8-bit states are computed by the plain reference, of which the library's
    own CPU code is only an approximation; on CUDA by the library. Checkpoints go from
    one to the other, and :func:`~speechbrain_rev.optim.convert_checkpoint` takes them
    from one precision to the other.

    A second moment that 8 bits would hold as zero takes the least value above it, so that
    Adam never divides by ``eps`` alone where it should not; bitsandbytes does.

    A gradient that is not finite is not hidden: as at 32 bit, moments become NaN and
    stay it, here those of the whole block of 256, and weights follow, in AdamW on CUDA
    one step later. A loss scaler that skips the step leaves all as it was.

    Example
    -------
    >>> weight = torch.nn.Parameter(torch.ones(4096))
    >>> optimizer = build_optimizer([weight], name="sgd", bits=8, lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight[0].item(), state_bytes(optimizer) < 0.5 * 4 * weight.numel()
    (0.8999999761581421, True)
    """
    if name not in _OPTIMIZERS:
        nearest = difflib.get_close_matches(
            str(name).lower(), _OPTIMIZERS, n=1, cutoff=0.3
        )
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"The optimizer {name!r} does not exist; there are "
            f"{', '.join(map(repr, _OPTIMIZERS))}.{hint}"
        )
    _check_bits(bits)
    given = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "betas": betas,
        "eps": eps,
        "amsgrad": amsgrad,
    }
    options = {key: _READERS[key](value) for key, value in given.items()}
    refuse_what_is_not_honoured(name, bits, options, options["weight_decay"])
    own = {
        key: options[key] for key in ("lr", "weight_decay", *_OPTIMIZERS[name].options)
    }
    build: Callable[..., torch.optim.Optimizer] = _CLASSES[name]
    return build(params, bits=bits, keep_32bit=keep_32bit, **own)


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


def refuse_what_is_not_honoured(
    name: str, bits: int, options: Mapping[str, Any], weight_decay: float
) -> None:
    """Raise where an optimizer would ignore an option, or read it as another.

    Parameters
    ----------
    name : {"sgd", "adam", "adamw"}
        The optimizer.
    bits : {8, 32}
        Of its states.
    options : mapping
        ``momentum`` of SGD, and ``nesterov``, ``dampening`` and ``amsgrad`` where given.
    weight_decay : float
        As it was given.

    Raises
    ------
    ValueError
        If there is such an option.

    Example
    -------
    >>> refuse_what_is_not_honoured("sgd", 8, {"momentum": 0.9}, 1e-4)
    """
    row = _OPTIMIZERS[name]
    for key in ("nesterov", "dampening", "amsgrad"):
        if not options.get(key):
            continue
        if key not in row.options:
            owners = [n for n, other in _OPTIMIZERS.items() if key in other.options]
            raise ValueError(
                f"{key} belongs to {' and '.join(owners)}, not to {name}. Leave it out."
            )
        if bits == 8 and key not in row.options_at_8bit:
            raise ValueError(
                f"{name} at 8 bit cannot do {key}={options[key]}; bitsandbytes would "
                "ignore it or fail. Leave it out, or set bits to 32."
            )
    if bits == 8 and "momentum" in row.options_at_8bit and not options["momentum"]:
        raise ValueError(
            f"{name} at 8 bit cannot do momentum=0, which leaves no state to store. "
            "Give a momentum, or set bits to 32."
        )
    if bits == 8 and weight_decay and not row.l2_decay_at_8bit:
        raise ValueError(
            f"{name} at 8 bit cannot do an L2 weight_decay ({weight_decay}): "
            "bitsandbytes would decouple it, which is adamw. Take 'adamw' (the class "
            "AdamW), or set weight_decay to 0 or bits to 32."
        )


def _check_bits(bits: object) -> None:
    if type(bits) is not int or bits not in (8, 32):
        raise ValueError(f"bits is {bits!r}; optimizer states can have 8 or 32 bits.")


def _refuse_other_than_float32(params: list[torch.Tensor]) -> None:
    for index, param in enumerate(params):
        if param.dtype != torch.float32:
            raise ValueError(
                f"params[{index}] is {param.dtype}, but with states of 8 bit the "
                f"update is computed in float32 and stored as that. Keep weights in "
                f"float32 (autocast lowers the precision of the network, not of its "
                f"weights), or set bits to 32."
            )
