"""Tensors that have shapes and no contents, for counts under autocast.

The meta device counts float32 training. Autocast does not know it: there fake tensors
serve, which say that they are on a CPU.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_Module = TypeVar("_Module", bound=nn.Module)


class CPUFakes(FakeTensorMode):
    """Tensors without contents that autocast takes for tensors of a CPU."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compare random states, which are real tensors, for real."""
        if func is torch.ops.aten.equal.default:
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def cpu_fakes() -> Iterator[None]:
    """Make all new tensors fakes for a while.

    Examples
    --------
    >>> with cpu_fakes(), torch.autocast("cpu", torch.bfloat16):
    ...     y = torch.zeros(10**9, 8) @ torch.zeros(8, 10**9)
    >>> y.dtype, y.device.type
    (torch.bfloat16, 'cpu')
    """
    with CPUFakes(), warnings.catch_warnings():
        # Storages without contents have an address, 0, whose use is frowned upon.
        warnings.filterwarnings("ignore", "Accessing the data pointer")
        yield


def without_contents(module: _Module, device: torch.device) -> _Module:
    """Copy a module, with parameters and buffers that have shapes only.

    Parameters
    ----------
    module : nn.Module
        Any module.
    device : torch.device
        "meta", or the CPU within ``cpu_fakes``.

    Returns
    -------
    nn.Module
        The copy; what was shared in the module is shared in it.

    Examples
    --------
    >>> layer = nn.BatchNorm1d(4)
    >>> without_contents(layer, torch.device("meta")).running_mean.device.type
    'meta'
    """
    empties: dict[int, Tensor] = {}

    def empty(x: Tensor) -> Tensor:
        if id(x) not in empties:
            new = torch.empty_like(x, device=device)
            if isinstance(x, nn.Parameter):
                new = nn.Parameter(new, requires_grad=x.requires_grad)
            empties[id(x)] = new
        return empties[id(x)]

    # Outside of fakes, which are not copied.
    with torch._C._DisableTorchDispatch():
        own = copy.deepcopy(module).to("meta")
    for owner in own.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, x in tensors.items():
                if x is not None:
                    tensors[name] = empty(x)  # type: ignore[assignment]
    return own
