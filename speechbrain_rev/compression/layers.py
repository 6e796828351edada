"""Which layers' inputs are compressed, and how their calls are noticed.

Convolutions and batch normalisations are noticed where torch's functions are called, by
whatever module, so that no hook is put on anybody's layer. Functions of our own that
stand for a layer are marked by ``layer_function``.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function,
)

from speechbrain_rev.torch_private import storage_key

_Function = TypeVar("_Function", bound=Callable[..., Tensor])


class Kind(str, enum.Enum):
    """What a layer does with its input.

    An error in a convolution's input goes into the gradient of its weight alone; one in
    the input of a batch normalisation goes into the gradient handed down as well.
    """

    CONVOLUTION = "convolution"
    NORMALISATION = "normalisation"


def layer_function(kind: Kind) -> Callable[[_Function], _Function]:
    """Mark a function that stands for a layer, with input and weight first.

    Parameters
    ----------
    kind : Kind
        Of which kind.

    Returns
    -------
    callable
        A decorator: the function can then be noticed as torch's own are.
    """

    def decorated(function: _Function) -> _Function:
        @functools.wraps(function)
        def called(x: Tensor, weight: Tensor, *more: Any, **options: Any) -> Tensor:
            if has_torch_function((x, weight)):
                noticed: Tensor = handle_torch_function(
                    called, (x, weight), x, weight, *more, **options
                )
                return noticed
            return function(x, weight, *more, **options)

        called.layer_kind = kind  # type: ignore[attr-defined]
        return cast(_Function, called)

    return decorated


class Watching(TorchFunctionMode):
    """Notice calls of convolutions and batch normalisations that autograd records."""

    def before(self, kind: Kind, x: Tensor, weight: Tensor | None) -> None:
        """Take the input and weight of a layer that is about to run."""

    def after(self, kind: Kind, x: Tensor, weight: Tensor | None, y: Tensor) -> None:
        """Take what the layer returned as well."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function, with a call before and after it if it is a layer's."""
        kwargs = kwargs or {}
        kind = _TORCHS.get(func) or getattr(func, "layer_kind", None)
        if kind is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        x, *rest = args or (kwargs.pop("input"),)
        weight = _weight_of(func, rest, kwargs)
        if not (x.requires_grad or (weight is not None and weight.requires_grad)):
            return func(x, *rest, **kwargs)
        if kind is Kind.CONVOLUTION:
            x = _as_convolved(x)
        self.before(kind, x, weight)
        y = func(x, *rest, **kwargs)
        self.after(kind, x, weight, y)
        return y


_TORCHS: Mapping[Any, Kind] = {
    torch.conv1d: Kind.CONVOLUTION,
    torch.conv2d: Kind.CONVOLUTION,
    torch.conv3d: Kind.CONVOLUTION,
    F.batch_norm: Kind.NORMALISATION,
}


def _weight_of(func: Any, rest: list[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Find the tensor that identifies a layer: its weight or its running mean."""
    if func is not F.batch_norm:
        weight = kwargs["weight"] if "weight" in kwargs else rest[0]
        return cast(Tensor, weight)
    names = ("running_mean", "running_var", "weight")
    given = dict(zip(names, rest, strict=False)) | dict(kwargs)
    weight = given.get("weight")
    return cast("Tensor | None", given["running_mean"] if weight is None else weight)


def _as_convolved(x: Tensor) -> Tensor:
    """Cast to what autocast makes of a convolution's input, which is what is saved."""
    kind = x.device.type
    # Torch knows no autocast of meta tensors, not even whether it is on.
    if x.is_meta or x.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def names_of_layers(network: nn.Module) -> dict[int, str]:
    """Name the layers by the storages of their weights.

    Parameters
    ----------
    network : nn.Module
        The network.

    Returns
    -------
    dict of int to str
        By the weight's storage, or the running mean's. Of slices of a weight it is that
        of the whole. A weight that is made anew in each call, as by a parametrisation,
        has no name.
    """
    names: dict[int, str] = {}
    for name, module in network.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            weight = module._buffers.get("running_mean")
        if weight is None or is_lazy(weight):
            continue
        if weight.layout is torch.strided:
            names.setdefault(storage_key(weight), name)
    return names


def name_of(
    names: Mapping[int, str], kind: Kind, x: Tensor, weight: Tensor | None
) -> str:
    """Name a layer that is called: as its network does, or by what it is."""
    name = None if weight is None else names.get(storage_key(weight))
    if name is not None:
        return name
    size = list((x if weight is None else weight).shape)
    return f"unnamed {kind.value} {size}"
