"""SGD, Adam and AdamW with 8-bit or 32-bit states, as classes and by name.

8-bit states are cut into blocks, each block is divided by its largest magnitude and
stored as the nearest of 256 values: ``reference.py`` has the scheme, ``strict.py`` its
use. bitsandbytes, which computes on CUDA, takes several requests without honouring
them. They are refused here.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from speechbrain_rev.optim.arguments import (
    OPTIONS,
    Kept,
    Params,
    parameters_of_one_group,
    parameters_to_keep,
    read_options,
    refuse_other_than_float32,
)
from speechbrain_rev.optim.checkpoint import BUILT_AS, refuse_other_checkpoint
from speechbrain_rev.optim.strict import strict_class

if TYPE_CHECKING:
    from typing_extensions import Self


class _Named(torch.optim.Optimizer):
    """The common part of SGD, Adam and AdamW: an instance is of a subclass for its bits."""

    _name: ClassVar[str]  # in OPTIONS
    _at_32bit: ClassVar[type[torch.optim.Optimizer]]
    _at_8bit: ClassVar[str]  # of bitsandbytes
    _named: ClassVar[type[_Named]]  # the public one, of the classes that compute
    _bits: ClassVar[int]  # likewise

    def __new__(cls, *_: object, bits: object = 32, **__: object) -> Self:
        # What it computes with is its base, as of the paths that pathlib.Path makes.
        # Other bits, or none, are refused by __init__.
        made = cls if "_bits" in vars(cls) else _computing(cls, 8 if bits == 8 else 32)
        return object.__new__(made)

    def _init(self, params: Params, bits: int, keep_32bit: Kept, **given: Any) -> None:
        options = read_options(self._name, bits, given)
        if bits != self._bits:
            raise ValueError(
                f"bits is {bits}, but {type(self).__name__} was made. Give bits to "
                f"{self._named.__name__} by its name."
            )
        trained = parameters_of_one_group(params)
        kept = parameters_to_keep(keep_32bit, trained)
        group = {"params": trained, BUILT_AS: f"{self._name} at {bits} bit"}
        start: Callable[..., None] = super().__init__
        if bits == 8:
            refuse_other_than_float32(trained)
            honoured = ("lr", "weight_decay", *OPTIONS[self._name].at_8bit)
            options = {key: options[key] for key in honoured}
            start([group], kept, optim_bits=8, **options)
        else:
            start([group], **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError(
                "An optimizer of speechbrain_rev.optim has one parameter group, as "
                "SpeechBrain clips the gradients of the first alone; add_param_group "
                "cannot add another. Give all parameters when it is made; those without a "
                "gradient are left alone."
            )
        super().add_param_group(param_group)


class _Plain(torch.optim.Optimizer):
    """Checkpoints and copies of torch's optimizers that compute for a class of ours."""

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
    """Return the subclass of a public class that computes with states of such bits."""
    if bits == 32:
        return _plain_class(named)
    return strict_class(named, named._at_8bit)


@functools.cache
def _plain_class(named: Any) -> type[Any]:
    members = {"__doc__": named.__doc__, "_named": named, "_bits": 32}
    bases = (named, _Plain, named._at_32bit)
    return type(f"{named.__name__}32bit", bases, members)


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
    :func:`build_optimizer` makes this class for the name "sgd". Its page says which
    library computes and which checkpoints fit.

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.SGD {bits: 8, lr: 0.1}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, SGD), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    _name, _at_32bit, _at_8bit = "sgd", torch.optim.SGD, "SGD"

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
    :func:`build_optimizer` makes this class for the name "adam". Its page says which
    library computes and which checkpoints fit.

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.Adam {bits: 8, lr: 0.001}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, Adam), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    # bitsandbytes' Adam and AdamW differ in defaults alone: decay is decoupled in both.
    _name, _at_32bit, _at_8bit = "adam", torch.optim.Adam, "AdamW"


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
    keep_32bit : torch.nn.Module, torch.Tensor, or iterable of these
        Whose states stay at 32 bit, see :func:`build_optimizer`.

    Raises
    ------
    ValueError, ImportError
        As :func:`build_optimizer` does.

    Notes
    -----
    :func:`build_optimizer` makes this class for the name "adamw". Its page says which
    library computes and which checkpoints fit.

    Example
    -------
    >>> from hyperpyyaml import load_hyperpyyaml
    >>> text = "opt_class: !name:speechbrain_rev.optim.AdamW {bits: 8, lr: 0.001}"
    >>> opt_class = load_hyperpyyaml(text)["opt_class"]
    >>> optimizer = opt_class([torch.nn.Parameter(torch.ones(4096))])
    >>> isinstance(optimizer, AdamW), isinstance(optimizer, torch.optim.Optimizer)
    (True, True)
    """

    _name, _at_32bit, _at_8bit = "adamw", torch.optim.AdamW, "AdamW"


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
    amsgrad: bool = False,
    keep_32bit: Kept = (),
) -> torch.optim.Optimizer:
    """Build an :class:`SGD`, :class:`Adam` or :class:`AdamW` by its name.

    At 32 bit, torch's own optimizer computes. It is the baseline, knows every option and
    does not need bitsandbytes. At 8 bit, bitsandbytes' optimizer computes, with the
    arithmetic of torch's: SGD with momentum, AdamW with bias correction and with the
    decay before the update. Options that it would ignore are refused.

    Parameters
    ----------
    params : iterable of torch.Tensor, or one parameter group
        What to train. One group only, as SpeechBrain clips the first alone; a group
        may hold nothing but ``params``.
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
        An L2 penalty in SGD and in Adam (there at 32 bit only), decoupled in AdamW.
    betas : (float, float)
        Of Adam and AdamW, each from 0 to below 1. SGD ignores it.
    eps : float
        Of Adam and AdamW, above 0. SGD ignores it.
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
        If bits is 8 and bitsandbytes cannot be imported.

    Notes
    -----
    On a CPU the plain reference computes 8-bit states: the library's own CPU code only
    approximates it. On CUDA the library computes. Checkpoints fit both, and
    :func:`~speechbrain_rev.optim.convert_checkpoint` changes their precision.

    A second moment that 8 bits would round to zero takes the least value above zero.
    Otherwise Adam would divide by ``eps`` alone, as bitsandbytes does.

    A gradient that is not finite stays visible. As at 32 bit, moments become NaN and
    remain NaN; at 8 bit this is the whole block of 256. Weights follow, in AdamW on CUDA
    one step later. A step that a loss scaler skips changes nothing.

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
        "betas": betas,
        "eps": eps,
        "amsgrad": amsgrad,
    }
    options = read_options(name, bits, given)
    own = {key: options[key] for key in ("lr", "weight_decay", *OPTIONS[name].at_32bit)}
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
