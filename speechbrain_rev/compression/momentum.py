"""How large an optimizer's momentum is, in units of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Of 8-bit states, as bitsandbytes has them.
_BLOCK = 256


def mean_momentum(
    optimizer: torch.optim.Optimizer, parameter: Tensor, steps: int
) -> float | None:
    """Average the magnitude of a parameter's momentum.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        SGD with momentum or one of Adam's kind, of torch or of bitsandbytes, at 32 or at
        8 bit.
    parameter : torch.Tensor
        One of its parameters.
    steps : int
        How many steps the momentum has gathered, where the optimizer does not count them.

    Returns
    -------
    float or None
        On the scale of a gradient: Adam's first moment without its bias, SGD's buffer
        times one minus its momentum, likewise. None if there is no momentum yet.

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
    found = _magnitude(state)
    if found is None:
        return None
    if group.get("momentum"):
        kept, sums = float(group["momentum"]), True
    elif "betas" in group:
        # One state of the library is SGD's momentum, two are Adam's moments.
        kept, sums = float(group["betas"][0]), "exp_avg" not in state
        sums = sums and "state2" not in state
    else:
        return None
    steps = int(state.get("step", steps)) or steps
    scale = (1 - kept) if sums else 1.0
    return found * scale / (1 - kept ** max(1, steps))


def _magnitude(state: Mapping[str, Any]) -> float | None:
    for name in ("exp_avg", "momentum_buffer"):
        if isinstance(state.get(name), Tensor):
            return float(state[name].float().abs().mean())
    moment = state.get("state1")
    if not isinstance(moment, Tensor):
        return None
    if moment.dtype is not torch.uint8:
        return float(moment.float().abs().mean())
    values = state["qmap1"].abs()[moment.flatten().int()]
    scales = state["absmax1"].repeat_interleave(_BLOCK)[: values.numel()]
    return float((values * scales).mean())
