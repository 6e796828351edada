"""One door to SGD, Adam and AdamW with states of 8 or 32 bit.

8-bit states are those of Dettmers et al., "8-bit optimizers via block-wise
quantization", ICLR 2022, which the memory-efficient speaker embedding paper uses
(section IV): each block of a state is divided by its largest magnitude and stored as the
nearest of 256 values of a dynamic tree. bitsandbytes computes them; its blocks are of
256 values where the paper's are of 2048.

The library takes several requests without honouring them. They are refused here, and
what it decides by a table for the whole process is decided by the optimizer itself.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from speechbrain_rev.optim.arguments import (
    Kept,
    number,
    pair,
    parameters_of_one_group,
    parameters_to_keep,
)
from speechbrain_rev.optim.checkpoint import BUILT_AS, refuse_other_checkpoint

if TYPE_CHECKING:
    from types import ModuleType

    from bitsandbytes.optim.optimizer import Optimizer8bit as _Optimizer8bit
else:
    # bitsandbytes is imported when an 8-bit optimizer is built, not before.
    _Optimizer8bit = object

# Smaller tensors, biases and normalisations mostly, would save next to nothing.
MIN_8BIT_ELEMENTS = 4096


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
    bitsandbytes', held to what it can do.

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
        With one parameter group. Weights in another memory format than the contiguous
        one keep it. Its checkpoints are refused by an optimizer built otherwise.

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
    On the CPU, bitsandbytes rounds through a table of 65,536 even steps: values below
    3e-5 of their block's largest are lost, and a zero is read back as 2e-5 of it, so
    that a weight without gradient drifts a little. Its CUDA kernels look up the nearest
    value itself.

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
        "nesterov": nesterov,
        "betas": pair("betas", betas, below=1.0),
        "eps": number("eps", eps, above_zero=True),
        "amsgrad": amsgrad,
    }
    row = _OPTIMIZERS[name]
    _refuse_what_is_not_honoured(name, bits, options, weight_decay)
    trained = parameters_of_one_group(params)
    kept = parameters_to_keep(keep_32bit, trained)
    group = {"params": trained, BUILT_AS: f"{name} at {bits} bit"}
    common = {"lr": lr, "weight_decay": weight_decay}
    optimizer: torch.optim.Optimizer
    if bits == 8:
        _refuse_other_than_float32(trained)
        honoured = {key: options[key] for key in row.options_at_8bit}
        strict = _strict_class(row.at_8bit)
        optimizer = strict([group], kept, optim_bits=8, **common, **honoured)
    else:
        honoured = {key: options[key] for key in row.options}
        build: Callable[..., torch.optim.Optimizer] = row.at_32bit
        optimizer = build([group], **common, **honoured)
        optimizer.register_load_state_dict_pre_hook(_refuse_checkpoint_of_other_32bit)
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


class _Strict(_Optimizer8bit):
    """What every 8-bit optimizer of ours does otherwise than bitsandbytes'."""

    def __init__(
        self, params: list[dict[str, Any]], kept: frozenset[int], **options: Any
    ) -> None:
        super().__init__(params, **options)
        # Identities are safe to keep: the optimizer keeps the parameters alive.
        self._kept = kept

    def _state_bits(self, param: torch.Tensor) -> int:
        small = param.numel() < MIN_8BIT_ELEMENTS
        return 32 if small or id(param) in self._kept else 8

    def get_config(
        self, gindex: int, pindex: int, group: dict[str, Any]
    ) -> dict[str, Any]:
        # The library's own looks into a table of the process, keyed by id(), where a
        # parameter can meet the settings of one that is long gone.
        return {
            "lr": group["lr"],
            "betas": group["betas"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "optim_bits": self._state_bits(self.param_groups[gindex]["params"][pindex]),
            "min_8bit_size": MIN_8BIT_ELEMENTS,
            "max_unorm": 0.0,
            "skip_zeros": False,
        }

    def get_state_buffer(
        self, p: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        # Contiguous whatever the weight is: the CUDA kernels read states in the order
        # of memory and the CPU's in that of the shape, and checkpoints go from one to
        # the other.
        return torch.zeros(p.shape, dtype=dtype, device=p.device)

    def update_step(
        self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int
    ) -> None:
        weight, grad = p.data, p.grad
        super().update_step(group, p, gindex, pindex)
        # The library works on a contiguous copy and leaves it as the weight, which
        # would end channels_last at the first step and break views of the weight.
        if not weight.is_contiguous():
            weight.copy_(p.data)
            p.data, p.grad = weight, grad

    def load_state_dict(
        self, state_dict: dict[str, Any], move_to_device: bool = True
    ) -> None:
        dtypes = (
            torch.uint8 if self._state_bits(param) == 8 else torch.float32
            for param in self.param_groups[0]["params"]
        )
        refuse_other_checkpoint(self, state_dict, dtypes)
        super().load_state_dict(state_dict, move_to_device)


@functools.cache
def _strict_class(library_name: str) -> type[Any]:
    base = getattr(_bitsandbytes().optim, library_name)
    return type(f"{library_name}8bit", (_Strict, base), {"__doc__": _Strict.__doc__})


def _bitsandbytes() -> ModuleType:
    # On some CPUs the import warns of a kernel for 4-bit inference that is not there,
    # which has no part in training.
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.addFilter(_is_not_about_inference)
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError(
            "Optimizer states of 8 bit need bitsandbytes, which cannot be imported "
            f"here ({error}). Reinstall it, or ask for 32 bit (optimizer_bits: 32)."
        ) from error
    finally:
        logger.removeFilter(_is_not_about_inference)
    return bitsandbytes


def _is_not_about_inference(record: logging.LogRecord) -> bool:
    return "gemm_4bit" not in record.getMessage()


def _refuse_what_is_not_honoured(
    name: str, bits: int, options: Mapping[str, Any], weight_decay: float
) -> None:
    row = _OPTIMIZERS[name]
    for key in ("nesterov", "dampening", "amsgrad"):
        if not options[key]:
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
