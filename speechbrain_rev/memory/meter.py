"""Live-tensor memory, counted byte by byte on any device.

An allocator's figures mix in its own rounding and caching and exist on CUDA only. Here
every storage that an operation returns is counted from its birth to its death, so that
a claim about memory can be tested on a machine without a GPU. What an operation
allocates and frees within itself (workspaces) is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the storages made inside this context.

    Attributes
    ----------
    live : int
        Bytes of storages made inside the context and still alive.
    peak : int
        The largest ``live`` so far.

    Examples
    --------
    >>> with LiveBytes() as meter:
    ...     x = torch.zeros(256)
    ...     y = x + 1
    ...     del x, y
    >>> meter.peak, meter.live
    (2048, 0)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count the storages that it returns."""
        kwargs = kwargs or {}
        given = {_storage_key(x) for x in tree_leaves((args, kwargs)) if _counts(x)}
        outputs = func(*args, **kwargs)
        for x in tree_leaves(outputs):
            if _counts(x) and _storage_key(x) not in given:
                self._add(x.untyped_storage())
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any, key: int = key, size: int = size) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def live_bytes_peak(step: Callable[[], Any]) -> int:
    """Measure the largest number of bytes alive at once that a step allocates.

    Parameters
    ----------
    step : callable
        Runs what is to be measured, for instance forward and backward pass. Tensors
        that existed before it are not counted; gradients that it creates are.

    Returns
    -------
    int
        Bytes of live tensors at the peak.

    Examples
    --------
    >>> live_bytes_peak(lambda: torch.zeros(1000) + 1)
    8000
    """
    gc.collect()
    meter = LiveBytes()
    with meter:
        step()
    return meter.peak


def _counts(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def _storage_key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
