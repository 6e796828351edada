"""How far a stored activation may be from the original.

Convolutions and batch normalisations have rules of their own: an error in a
convolution's input reaches the gradient of its weight only, and the sum over a whole map
averages it; one in a batch normalisation's input also goes into the gradient that is
handed down to all layers before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: From a tensor to its absolute error bound; equal ones give equal bounds.
Bound = Callable[[Tensor], "float | Tensor"]


class Rule:
    """How the bounds of layers are chosen: by calling the rule itself for each of them."""

    def __call__(self, x: Tensor) -> float | Tensor:
        """Give the bound of a tensor."""
        raise NotImplementedError(f"{type(self).__name__} gives no bound.")

    def bound_for(self, layer: str) -> Bound:
        """Give the bound of a layer's input as it is now."""
        return self

    def called(self, layer: str, x: Tensor, weight: Tensor | None, y: Tensor) -> None:
        """Look at a layer's call in a training step: input, weight and output."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer, whose momentum a rule may look at."""

    def state_dict(self) -> dict[str, Any]:
        """Give what has to be saved with a run; most rules have nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved.

        Raises
        ------
        ValueError
            If it is that of a rule which has something to keep.
        """
        if state:
            raise ValueError(
                f"{self} keeps nothing, and the state that it is given has "
                f"{sorted(map(str, state))}: it is that of another rule. Give the rule "
                "that the state was saved with."
            )


@dataclass(frozen=True)
class RangeBound(Rule):
    """A fraction of a tensor's range.

    Attributes
    ----------
    fraction : float
        Of the difference between largest and smallest value.

    Raises
    ------
    ValueError
        If the fraction is not positive and finite.

    Examples
    --------
    >>> round(float(RangeBound(1e-3)(torch.tensor([-1.0, 0.5, 3.0]))), 6)
    0.004
    """

    fraction: float

    def __post_init__(self) -> None:
        check_positive("fraction", self.fraction)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the bound, without waiting for the device."""
        least, most = torch.aminmax(x.detach())
        return _usable((most.float() - least.float()) * self.fraction, x)


@dataclass(frozen=True)
class DeviationBound(Rule):
    """A fraction of the deviation within a channel.

    Attributes
    ----------
    fraction : float
        Of the root of the channels' mean variance; channels are the second dimension.

    Raises
    ------
    ValueError
        If the fraction is not positive and finite.

    Examples
    --------
    >>> x = torch.stack([torch.randn(64), 3 + torch.randn(64)], dim=1)
    >>> 0.005 < float(DeviationBound(1e-2)(x)) < 0.02
    True
    """

    fraction: float

    def __post_init__(self) -> None:
        check_positive("fraction", self.fraction)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the bound, without waiting for the device."""
        wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
        axes = [axis for axis in range(x.dim()) if axis != 1]
        variance = torch.var(x.detach().to(wide), axes, correction=0)
        return _usable(variance.mean().sqrt() * self.fraction, x)


@dataclass(frozen=True)
class FixedBound(Rule):
    """An absolute bound.

    Attributes
    ----------
    error_bound : float
        In units of the activation.

    Raises
    ------
    ValueError
        If it is not positive and finite.
    """

    error_bound: float

    def __post_init__(self) -> None:
        check_positive("error_bound", self.error_bound)

    def __call__(self, x: Tensor) -> float:
        """Give the bound."""
        return self.error_bound


def check_positive(name: str, value: float) -> float:
    """Refuse what is no positive and finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise ValueError(
            f"{name} is {value!r}; it must be positive and finite, as 1e-3 is. To keep "
            "activations as they are, do not compress them."
        )
    return float(value)


def _usable(bound: Tensor, x: Tensor) -> Tensor:
    """Keep a bound positive and finite where values are constant, NaN or infinite.

    These are encoded as what they are by any bound.
    """
    tiny = torch.finfo(torch.float32).tiny
    return torch.nan_to_num(bound.float(), nan=1.0, posinf=1.0).clamp_min(tiny)
