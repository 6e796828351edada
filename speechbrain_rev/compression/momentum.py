"""How large an optimizer's momentum is, in units of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Of 8-bit states, as bitsandbytes has them.
_BLOCK = 256
#: Optimizers of bitsandbytes whose first state is Adam's first moment.
_MOMENTS = ("adam", "lamb")


def mean_momentum(
    optimizer: torch.optim.Optimizer, parameter: Tensor, steps: int
) -> float | None:
    """Average the magnitude of a parameter's momentum.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        SGD with momentum or one of Adam's kind, of torch or of bitsandbytes, at 32 or at
        8 bit. Others have no momentum on the scale of a gradient: RMSprop's is divided.
    parameter : torch.Tensor
        One of its parameters.
    steps : int
        How many steps the momentum has gathered, where the optimizer does not count them.

    Returns
    -------
    float or None
        On the scale of a gradient: Adam's first moment without its bias, SGD's buffer
        times one minus its momentum, likewise. None if there is no such momentum, or none
        yet.

    Examples
    --------
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    >>> weight.grad = torch.tensor([1.0, -3.0])
    >>> sgd.step()
    >>> round(mean_momentum(sgd, weight, steps=1), 6)
    2.0
    """
    state = optimizer.state.get(parameter)
    if not state:
        return None
    group = next(
        group
        for group in optimizer.param_groups
        if any(parameter is own for own in group["params"])
    )
    # bitsandbytes' word for the arithmetic.
    kind = getattr(optimizer, "optimizer_name", None)
    damped = float(group.get("dampening", 0.0))
    if "exp_avg" in state and state.keys() & {"exp_avg_sq", "exp_inf"}:
        found, kept, scale = _mean(state["exp_avg"]), float(group["betas"][0]), 1.0
    elif "state1" in state and kind in _MOMENTS:
        found, kept, scale = _mean_of_state(state), float(group["betas"][0]), 1.0
    elif "state1" in state and kind == "momentum":
        kept = float(group["betas"][0])
        found, scale = _mean_of_state(state), 1 - kept
    elif (
        state.get("momentum_buffer") is not None and "nesterov" in group and damped < 1
    ):
        kept = float(group["momentum"])
        found, scale = _mean(state["momentum_buffer"]), (1 - kept) / (1 - damped)
    else:
        return None
    steps = int(state.get("step", steps)) or steps
    return found * scale / (1 - kept ** max(1, steps))


def _mean(moment: Tensor) -> float:
    return float(moment.float().abs().mean())


def _mean_of_state(state: Mapping[str, Any]) -> float:
    moment = state["state1"]
    if moment.dtype is not torch.uint8:
        return float(moment.float().abs().mean())
    values = state["qmap1"].abs()[moment.flatten().int()]
    scales = state["absmax1"].repeat_interleave(_BLOCK)[: values.numel()]
    return float((values * scales).mean())
