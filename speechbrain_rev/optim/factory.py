"""One door to SGD, Adam and AdamW with states of 8 or 32 bit.

8-bit states are cut into blocks, each block is divided by its largest magnitude and
stored as the nearest of 256 values: ``reference.py`` has the scheme, ``strict.py`` its
use. bitsandbytes, which computes on CUDA, takes several requests without honouring
them. They are refused here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


def build_optimizer(
    params: Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | Mapping[str, Any],
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
    """Build an optimizer with 8-bit or 32-bit states.

    At 32 bit it is torch's own optimizer: that is the one results are compared with,
    it knows every option, and bitsandbytes need not be installed. At 8 bit it is
    bitsandbytes', held to what it can do, with the arithmetic of torch's: SGD with
    momentum, AdamW with bias correction and with the decay before the update.

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
    torch.optim.Optimizer
        With one parameter group, for good. Weights in another memory format than the
        contiguous one keep it. Its checkpoints are refused by an optimizer built
        otherwise.

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
    if type(bits) is not int or bits not in (8, 32):
        raise ValueError(f"bits is {bits!r}; optimizer states can have 8 or 32 bits.")
    lr = number("lr", lr)
    weight_decay = number("weight_decay", weight_decay)
    options = {
        "momentum": number("momentum", momentum, below=1.0),
        "dampening": number("dampening", dampening),
        "nesterov": switch("nesterov", nesterov),
        "betas": pair("betas", betas, below=1.0),
        "eps": number("eps", eps, above_zero=True),
        "amsgrad": switch("amsgrad", amsgrad),
    }
    row = _OPTIMIZERS[name]
    refuse_what_is_not_honoured(name, bits, options, weight_decay)
    trained = parameters_of_one_group(params)
    kept = parameters_to_keep(keep_32bit, trained)
    group = {"params": trained, BUILT_AS: f"{name} at {bits} bit"}
    common = {"lr": lr, "weight_decay": weight_decay}
    optimizer: torch.optim.Optimizer
    if bits == 8:
        _refuse_other_than_float32(trained)
        honoured = {key: options[key] for key in row.options_at_8bit}
        strict = strict_class(row.at_8bit)
        optimizer = strict([group], kept, optim_bits=8, **common, **honoured)
    else:
        honoured = {key: options[key] for key in row.options}
        build: Callable[..., torch.optim.Optimizer] = row.at_32bit
        optimizer = build([group], **common, **honoured)
        optimizer.register_load_state_dict_pre_hook(_refuse_checkpoint_of_other_32bit)
        optimizer.add_param_group = refuse_another_group  # type: ignore[method-assign]
    return optimizer


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
            "bitsandbytes would decouple it, which is adamw. Set name to 'adamw', "
            "weight_decay to 0, or bits to 32."
        )


def _refuse_other_than_float32(params: list[torch.Tensor]) -> None:
    for index, param in enumerate(params):
        if param.dtype != torch.float32:
            raise ValueError(
                f"params[{index}] is {param.dtype}, but with states of 8 bit the "
                f"update is computed in float32 and stored as that. Keep weights in "
                f"float32 (autocast lowers the precision of the network, not of its "
                f"weights), or set bits to 32."
            )


def _refuse_checkpoint_of_other_32bit(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    dtypes = (param.dtype for param in optimizer.param_groups[0]["params"])
    refuse_other_checkpoint(optimizer, state_dict, dtypes)
