"""bitsandbytes' 8-bit optimizers, held to what is asked of them.

The library computes on CUDA. On a CPU its quantiser rounds through a table of 65,536
even steps, which loses what is small and reads zeros back as something else: there the
plain reference takes its place, with the library's states, so that a checkpoint serves
both.

This is the one door to bitsandbytes.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from speechbrain_rev.optim.checkpoint import refuse_other_checkpoint
from speechbrain_rev.optim.reference import block_maxima, dequantise, quantise

if TYPE_CHECKING:
    from types import ModuleType

    from bitsandbytes.optim.optimizer import Optimizer8bit as _Optimizer8bit
else:
    # bitsandbytes is imported when an 8-bit optimizer is built, not before.
    _Optimizer8bit = object

# Smaller tensors, biases and normalisations mostly, would save next to nothing.
MIN_8BIT_ELEMENTS = 4096
# The library's, on every device.
BLOCK_SIZE = 256


def read_moments(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Read what a state of the library stands for.

    Parameters
    ----------
    state : mapping
        Of one parameter, at 8 or at 32 bit.

    Returns
    -------
    list of torch.Tensor, float32, each of the parameter's shape
        The momentum, or the first and the second moment.

    Example
    -------
    >>> read_moments(write_moments([torch.tensor([-1.0, 0.0, 2.0])]))
    [tensor([-1.0016,  0.0000,  2.0000])]
    """
    return [
        dequantise(
            state[f"state{number}"],
            state[f"absmax{number}"],
            block_size=BLOCK_SIZE,
            signed=number == 1,
        )
        if state[f"state{number}"].dtype == torch.uint8
        else state[f"state{number}"]
        for number in (1, 2)
        if f"state{number}" in state
    ]


def write_moments(moments: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantise moments as the library stores them, but no second one as zero.

    Parameters
    ----------
    moments : iterable of torch.Tensor
        The momentum, or the first and the second moment.

    Returns
    -------
    dict of str to torch.Tensor
        ``state1`` and ``absmax1``, and the same with 2 where there are two moments.

    Example
    -------
    >>> state = write_moments(torch.ones(2, 1000))
    >>> {name: list(tensor.shape) for name, tensor in state.items()}
    {'state1': [1000], 'absmax1': [4], 'state2': [1000], 'absmax2': [4]}
    """
    state: dict[str, torch.Tensor] = {}
    for number, moment in enumerate(moments, 1):
        codes, absmax = quantise(moment, block_size=BLOCK_SIZE, signed=number == 1)
        state |= {f"state{number}": codes, f"absmax{number}": absmax}
    _raise_second(state)
    return state


def _raise_second(state: Mapping[str, Any]) -> None:
    """Give second moments that were stored as zero the least value above it.

    Adam divides by their root: where one of them is lost, what is left of the first
    moment is divided by eps alone, and the next step is many times too long.
    """
    second = state.get("state2")
    if second is not None and second.dtype == torch.uint8:
        second.clamp_(min=1)


class _Strict(_Optimizer8bit):
    """What every 8-bit optimizer of ours does otherwise than bitsandbytes'."""

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
                    f"{param.grad.layout}, but with states of 8 bit gradients must be "
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
            stains = _stains(ordered, state)
            super().update_step(group, p, gindex, pindex)
            _raise_second(state)
            for name, stain in stains.items():
                state[name].add_(stain)
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
            _raise_second(state)

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


def _stains(grad: torch.Tensor, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Find what to add to the scales after a step of the library: NaN or zero.

    Its kernels put zeros in place of the moments where a gradient is not finite (Adam),
    and lose a NaN when they look for the largest of a block. All this is arithmetic of
    the device: nothing waits for it.
    """
    stain = 0 * block_maxima(grad, block_size=BLOCK_SIZE)
    scales = (name for name in ("absmax1", "absmax2") if name in state)
    return {name: stain + 0 * state[name] for name in scales}


@functools.cache
def strict_class(named: Any, library_name: str) -> type[Any]:
    """Let an optimizer of the library compute, strictly, what a class of ours promises.

    Parameters
    ----------
    named : type
        The class of ours, whose instances these are.
    library_name : str
        The library's class, as ``bitsandbytes.optim`` has it.

    Returns
    -------
    type
        Whose ``__init__``, after that of ``named``, takes one parameter group, what to
        keep, and the library's options.

    Raises
    ------
    ImportError
        If bitsandbytes cannot be imported.

    Example
    -------
    >>> from speechbrain_rev.optim import Adam
    >>> strict_class(Adam, "AdamW").__name__
    'Adam8bit'
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
            "Optimizer states of 8 bit need bitsandbytes, which cannot be imported "
            f"here ({error}). Reinstall it, or ask for 32 bit (optimizer_bits: 32)."
        ) from error
    finally:
        logger.removeFilter(_is_not_about_inference)
    return bitsandbytes


def _is_not_about_inference(record: logging.LogRecord) -> bool:
    return "gemm_4bit" not in record.getMessage()
