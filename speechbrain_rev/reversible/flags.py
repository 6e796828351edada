"""Flags of torch's backends that decide which kernels compute, and hence which bits.

cuDNN's benchmark mode chooses kernels by timing them, for each thread anew, and the
backward pass has a thread of its own: under it two runs of one function need not agree.
Both runs of a function happen with benchmark mode off and deterministic kernels, unless
``cudnn_flags`` asks for others, and the second one with the float32 precision (TF32 or
not) of the first.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.torch_private import at_the_end_of_backward

_deterministic = ContextVar("deterministic", default=True)


@contextlib.contextmanager
def cudnn_flags(*, deterministic: bool = True) -> Iterator[None]:
    """Choose cuDNN's kernels for what is computed twice, and for chains in every mode.

    The choice holds in both passes of steps whose forward pass is in the context.

    Parameters
    ----------
    deterministic : bool
        True: deterministic kernels, none of them timed. False: cuDNN times all kernels and
        takes the fastest. The backward pass, in another thread, may take other ones: modes
        no longer have equal bits, and ``verify`` reports.

    Raises
    ------
    ValueError
        If it is neither True nor False.

    Examples
    --------
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> coupling = AdditiveCoupling(torch.nn.Identity(), torch.nn.Identity())
    >>> chain, x = ReversibleChain([coupling]), torch.randn(2, 4, 8, 10)
    >>> with cudnn_flags(deterministic=False):
    ...     y1, y2 = chain(x, x)
    >>> y1.shape
    torch.Size([2, 4, 8, 10])
    """
    if not isinstance(deterministic, bool):
        raise ValueError(
            f"deterministic is {deterministic!r}, but takes True or False."
        )
    before = _deterministic.set(deterministic)
    try:
        yield
    finally:
        _deterministic.reset(before)


def _precision_flags() -> list[tuple[Any, str]]:
    """Who holds the float32 precision of matrix products and of convolutions."""
    cudnn: Any = torch.backends.cudnn
    owners = (torch.backends.cuda.matmul, cudnn.conv)
    return [(owner, "fp32_precision") for owner in owners]


def flags_in_words() -> str:
    """Say which kernels a device chooses from, for figures that depend on it.

    Returns
    -------
    str
        The float32 precision of matrix products and of convolutions, cuDNN's benchmark
        mode, whether algorithms must be deterministic, and cuDNN's version.

    Examples
    --------
    >>> flags_in_words().startswith("matmul ")
    True
    """
    matmul, conv = (getattr(owner, name) for owner, name in _precision_flags())
    cudnn = torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled() or cudnn.deterministic
    return (
        f"matmul {matmul}, conv {conv}, benchmark {cudnn.benchmark}, deterministic "
        f"{deterministic}, cuDNN {cudnn.version()}"
    )


@dataclass(frozen=True)
class Flags:
    """Flags under which a first run took place.

    Attributes
    ----------
    in_effect : bool
        Whether a device was involved that these flags speak of.
    precision : tuple
        Of float32 matrix products and convolutions.
    deterministic : bool
        As ``cudnn_flags`` chose.
    """

    in_effect: bool
    precision: tuple[Any, ...] = ()
    deterministic: bool = True

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Flags:
        """Read the flags that are in force."""
        if not any(_decided_by_flags(device) for device in devices):
            return cls(False)
        precision = tuple(getattr(o, n) for o, n in _precision_flags())
        return cls(True, precision, _deterministic.get())

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Compute under these flags, and leave those of the user as they were."""
        if not self.in_effect:
            yield
            return
        entry = _pinned.enter(self)
        try:
            # What a second run runs first is in its thread.
            with cudnn_flags(deterministic=self.deterministic):
                yield
        finally:
            _pinned.leave(entry)

    def wanted(self) -> list[tuple[Any, str, Any]]:
        """List who holds each flag, its name and its value."""
        cudnn = torch.backends.cudnn
        precision = zip(_precision_flags(), self.precision, strict=True)
        return [
            (cudnn, "benchmark", not self.deterministic),
            (cudnn, "deterministic", self.deterministic),
            *((owner, name, value) for (owner, name), value in precision),
        ]

    def hold(self, owner: object) -> Callable[[], Any]:
        """Compute under these flags in the backward pass, until its owner is gone.

        Parameters
        ----------
        owner : object
            What the operations need whose gradients are computed; they release it.

        Returns
        -------
        callable
            Ends it before.
        """
        if not self.in_effect:
            return lambda: None
        end = weakref.finalize(owner, _pinned.leave, _pinned.enter(self))
        end.atexit = False
        return end

    def carry(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """Compute under these flags from the gradients of outputs on, till all are there.

        Parameters
        ----------
        *outputs : torch.Tensor
            What was computed under them.

        Returns
        -------
        tuple of torch.Tensor
            The same values, to be used in their place.
        """
        wanted = [y for y in outputs if self.in_effect and y.requires_grad]
        if not wanted:
            return outputs
        carried = iter(_Carried.apply(self, *wanted))
        return tuple(next(carried) if y.requires_grad else y for y in outputs)


class _Carried(torch.autograd.Function):
    """The identity, whose gradient puts flags in force for the rest of a backward pass."""

    @staticmethod
    def forward(ctx: Any, flags: Flags, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.flags = flags
        return tuple(y.detach() for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        end: Any = _EndOfPass(ctx.flags)
        at_the_end_of_backward(end)
        return None, *grads


class _EndOfPass:
    """Flags in force until the engine calls this, or lets it go after an error."""

    def __init__(self, flags: Flags) -> None:
        self._end = flags.hold(self)

    def __call__(self) -> None:
        self._end()


class _PinnedFlags:
    """Flags that runs and backward passes want, the latest in force, in any order.

    The user's own return when the last is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: list[tuple[object, Flags]] = []
        self._of_the_user: list[tuple[Any, str, Any]] = []

    def enter(self, flags: Flags) -> object:
        """Put flags in force; give what names them."""
        entry = object()
        with self._lock:
            if not self._entries:
                self._of_the_user = [
                    (owner, name, getattr(owner, name))
                    for owner, name, _ in flags.wanted()
                ]
            self._entries.append((entry, flags))
            _write(flags.wanted())
        return entry

    def leave(self, entry: object) -> None:
        """Put those in force that were before, or came later."""
        with self._lock:
            self._entries = [e for e in self._entries if e[0] is not entry]
            last = self._entries[-1][1].wanted() if self._entries else self._of_the_user
            _write(last)


_pinned = _PinnedFlags()


def _write(wanted: Iterable[tuple[Any, str, Any]]) -> None:
    """Set flags that differ: to mix old and new precision flags is an error."""
    for owner, name, value in wanted:
        if getattr(owner, name) != value:
            setattr(owner, name, value)


def _decided_by_flags(device: torch.device) -> bool:
    return device.type == "cuda"
