"""bitsandbytes' 8-bit optimizers, made strict.

The library computes on CUDA. On a CPU its quantiser rounds through a table of 65,536
even steps, which loses small values and does not read zeros back as zeros. There the
plain reference computes with the library's states, so that checkpoints fit both.

This is the one door to bitsandbytes.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from speechbrain_rev.optim.checkpoint import refuse_other_checkpoint
from speechbrain_rev.optim.reference import (
    BLOCK_SIZE,
    block_maxima,
    raise_second,
    read_moments,
    write_moments,
)

if TYPE_CHECKING:
    from types import ModuleType

    from bitsandbytes.optim.optimizer import Optimizer8bit as _Optimizer8bit
else:
    # bitsandbytes is imported when an 8-bit optimizer is built, not before.
    _Optimizer8bit = object

# Smaller tensors, biases and normalisations mostly, would save next to nothing.
MIN_8BIT_ELEMENTS = 4096


class _Strict(_Optimizer8bit):
    """The changes that every 8-bit optimizer of ours makes to bitsandbytes'."""

    _named: type[torch.optim.Optimizer]  # the class that users name
    library_name: str  # the library's word for the class
    optimizer_name: str  # the library's word for the arithmetic

    def __init__(
        self, params: list[dict[str, Any]], kept: frozenset[int], **options: Any
    ) -> None:
        super().__init__(params, **options)
        # Identities are safe to keep: the optimizer keeps the parameters alive.
        self._kept = kept
        self._options = options

    def __reduce__(self) -> tuple[Any, ...]:
        # torch's copies and pickles lack what the library adds to an optimizer. Copied
        # parameters have other identities, so what is kept goes by position.
        kept = [id(param) in self._kept for param in self.param_groups[0]["params"]]
        made_by = (self._named, self.library_name)
        rebuilt_from = (*made_by, self.param_groups, kept, self._options)
        return _rebuild, rebuilt_from, {"state": self.state}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, param in enumerate(self.param_groups[0]["params"]):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise ValueError(
                    f"The gradient of params[{index}], shape {list(param.shape)}, is "
                    f"{param.grad.layout}, but with 8-bit states gradients must be "
                    f"dense. Build the layer with sparse=False."
                )
        # torch may have wrapped the library's step to call hooks. They are called around
        # this one already.
        inspect.unwrap(super(_Strict, type(self)).step)(self)
        return loss

    def state_bits(self, param: torch.Tensor) -> int:
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
            "weight_decay": 0.0 if self._decoupled else group["weight_decay"],
            "optim_bits": self.state_bits(self.param_groups[gindex]["params"][pindex]),
            "min_8bit_size": MIN_8BIT_ELEMENTS,
            "max_unorm": 0.0,
            "skip_zeros": False,
        }

    def get_state_buffer(
        self, p: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        # Contiguous whatever the weight is: the CUDA kernels read states in the order
        # of memory and the reference in that of the shape, and checkpoints go from one
        # to the other.
        return torch.zeros(p.shape, dtype=dtype, device=p.device)

    def update_step(
        self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int
    ) -> None:
        weight, grad = p.data, p.grad
        assert grad is not None, "the library passes parameters that have one"
        # The library would leave contiguous copies as weight and gradient, which would
        # end channels_last at the first step and break views of the weight.
        ordered = grad.contiguous()
        p.data, p.grad = weight.contiguous(), ordered
        if self._decoupled and group["weight_decay"]:
            # As torch has it. The library's CUDA kernels shrink the update too.
            p.data.mul_(1 - group["lr"] * group["weight_decay"])
        if self.state_bits(p) == 32:
            super().update_step(group, p, gindex, pindex)
        elif self._by_reference(p):
            self._update_by_reference(group, p.data, ordered, self.state[p])
        else:
            state = self.state[p]
            summands = nan_or_zero(ordered, state)
            super().update_step(group, p, gindex, pindex)
            raise_second(state)
            for name, summand in summands.items():
                state[name].add_(summand)
        if not weight.is_contiguous():
            weight.copy_(p.data)
        p.data, p.grad = weight, grad

    def load_state_dict(
        self, state_dict: dict[str, Any], move_to_device: bool = True
    ) -> None:
        dtypes = (
            torch.uint8 if self.state_bits(param) == 8 else torch.float32
            for param in self.param_groups[0]["params"]
        )
        refuse_other_checkpoint(self, state_dict, dtypes)
        super().load_state_dict(state_dict, move_to_device)
        for state in self.state.values():
            # Of one that the library wrote alone.
            raise_second(state)

    @property
    def _decoupled(self) -> bool:
        return self.optimizer_name == "adam"

    def _by_reference(self, p: torch.Tensor) -> bool:
        return p.device.type == "cpu"

    def _update_by_reference(
        self,
        group: Mapping[str, Any],
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        moments = read_moments(state)
        if self._decoupled:
            first, second = moments
            step = torch.tensor(float(state["step"]))
            adamw(
                [weight], [grad], [first], [second], [], [step],
                amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
                lr=group["lr"], weight_decay=0.0, eps=group["eps"], maximize=False,
            )  # fmt: skip
        else:
            sgd(
                [weight], [grad], [*moments],
                weight_decay=group["weight_decay"], momentum=group["betas"][0],
                lr=group["lr"], dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
        state["step"] += 1
        for name, tensor in write_moments(moments).items():
            state[name].copy_(tensor)


def nan_or_zero(
    grad: torch.Tensor, state: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return what to add to the scales after a step of the library: NaN or zero.

    Its kernels put zeros in place of the moments where a gradient is not finite (Adam),
    and lose a NaN when they look for the largest of a block. All this is arithmetic of
    the device: nothing waits for it.
    """
    of_gradient = 0 * block_maxima(grad, block_size=BLOCK_SIZE)
    scales = (name for name in ("absmax1", "absmax2") if name in state)
    return {name: of_gradient + 0 * state[name] for name in scales}


@functools.cache
def strict_class(named: Any, library_name: str) -> type[Any]:
    """Return a subclass of ``named`` that computes by an optimizer of the library.

    Its ``__init__``, after that of ``named``, takes one parameter group, the identities
    of parameters to keep at 32 bit, and the library's options.
    """
    base = getattr(_bitsandbytes().optim, library_name)
    members = {
        "__doc__": named.__doc__,
        "library_name": library_name,
        "_named": named,
        "_bits": 8,
    }
    return type(f"{named.__name__}8bit", (named, _Strict, base), members)


def _rebuild(
    named: Any,
    library_name: str,
    groups: list[dict[str, Any]],
    kept: list[bool],
    options: Mapping[str, Any],
) -> Any:
    params = groups[0]["params"]
    ids = frozenset(id(p) for p, keep in zip(params, kept, strict=True) if keep)
    optimizer = object.__new__(strict_class(named, library_name))
    _Strict.__init__(optimizer, groups, ids, **options)
    return optimizer


def _bitsandbytes() -> ModuleType:
    # On some CPUs the import warns of a kernel for 4-bit inference that is not there,
    # which has no part in training.
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.addFilter(_is_not_about_inference)
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError(
            "8-bit optimizer states need bitsandbytes, which cannot be imported "
            f"here ({error}). Reinstall it, or ask for 32 bit (optimizer_bits: 32)."
        ) from error
    finally:
        logger.removeFilter(_is_not_about_inference)
    return bitsandbytes


def _is_not_about_inference(record: logging.LogRecord) -> bool:
    return "gemm_4bit" not in record.getMessage()
