"""Whether the second run of a recomputed module is like its first one.

Gradients depend on what the module's operations save and on nothing else of the second run.
So each tensor that is saved is compared with that of the first run, in order, by shape,
dtype and a checksum of its bits. Outputs are not compared: they may differ without a wrong
gradient, and agree with one.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch import Tensor, nn

from speechbrain_rev.reversible.monitor import (
    Checks,
    Verify,
    checksum,
    has_values,
    kernels_may_differ,
    warn_of_difference,
)
from speechbrain_rev.torch_private import dispatch_mode, is_wrapper

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RecomputeWarning(UserWarning):
    """A recomputed block computed something else in its second run than in its first."""


#: The axes of a tensor in the order that was read, and the checksum of its bits.
Fingerprint = tuple[tuple[int, ...], Tensor]


@torch.no_grad()
def fingerprint(x: Tensor, order: tuple[int, ...] | None = None) -> Fingerprint | None:
    """Sum up the bits of a tensor, see ``checksum``.

    Parameters
    ----------
    x : torch.Tensor
        Any.
    order : tuple of int or None
        The axes in the order to be read; None for that in which they lie in memory.

    Returns
    -------
    order : tuple of int
        The axes in the order that was read.
    checksum : torch.Tensor, [], int64
        Of its bits in that order.
    None
        Where values are not compared: of tensors that have none, or one value for all, as
        the tangent of a stream, and of uint8, which workspaces of oneDNN and cuDNN have.
        These differ between runs that are alike.

    Examples
    --------
    >>> x = torch.arange(9.0)
    >>> (_, one), (_, other) = fingerprint(x), fingerprint(x.roll(1))
    >>> bool(one == other)
    False
    """
    if (
        x.layout is not torch.strided
        or is_wrapper(x)
        or x.dtype == torch.uint8
        or not has_values(x)
        or not x.numel()
        or (x.numel() > 1 and not any(x.stride()))
    ):
        return None
    x = x.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    for axis, stride in enumerate(x.stride()):
        if stride == 0:
            x = x.narrow(axis, 0, 1)
    if order is None:
        strides = [s if n > 1 else 0 for s, n in zip(x.stride(), x.shape, strict=True)]
        order = tuple(sorted(range(x.dim()), key=lambda axis: -strides[axis]))
    bits = x.permute(order).contiguous().view(-1)
    return order, checksum([bits.view(_INTEGERS[min(8, x.dtype.itemsize)])])[0]


def in_words(name: str, how: str) -> str:
    """Put into words that a module's second run was another one."""
    return (
        f"{name} computed something else in its second run than in its first: {how}. A "
        "block may depend on inputs, parameters, buffers, attributes and torch's own random "
        "numbers only, and kernels must add in one order "
        "(torch.use_deterministic_algorithms(True) names those that do not). Use "
        "mode='store' for this block, or leave it out of recompute_blocks; verify='warn' "
        "if it adds by atomics on purpose."
    )


#: The checks of each module that was recomputed by itself.
_checks: weakref.WeakKeyDictionary[nn.Module, Checks] = weakref.WeakKeyDictionary()


def checks_of(
    module: nn.Module, verify: Verify | None = "first", every: int = 100
) -> Checks:
    """Give the checks of a module, of which each call is a step."""
    checks = _checks.get(module)
    if checks is None or (checks.verify, checks.every) != (verify, every):
        checks = _checks[module] = Checks(verify, every)
    return checks


def forget_checks(module: nn.Module) -> None:
    """Let the next call of a module be a first one, as after a change of its mode."""
    _checks.pop(module, None)


class Comparison:
    """What the operations of one call save, and what they save again.

    Parameters
    ----------
    checks : Checks
        Whose step it is.
    name : str
        What messages call the module.
    """

    def __init__(self, checks: Checks, name: str) -> None:
        self._checks, self._name = checks, name
        self._is_first = not checks.is_settled
        self._first: list[Fingerprint | None] = []
        self._shapes: list[str] = []
        self._differ: dict[int, Tensor] = {}
        self._may_differ = False

    @property
    def count(self) -> int:
        """How many tensors were saved so far."""
        return len(self._first)

    def note(self, x: Tensor) -> None:
        """Take what an operation of the first run saves."""
        self._first.append(fingerprint(x))
        self._shapes.append(f"{list(x.shape)} {x.dtype}")

    def note_again(self, place: int, x: Tensor) -> None:
        """Compare what an operation of the second run saves."""
        self._may_differ = kernels_may_differ(x.device)
        before = self._first[place]
        now = None if before is None else fingerprint(x, before[0])
        if before is not None and now is not None:
            self._differ[place] = before[1] != now[1]

    def judge(self) -> None:
        """Report a difference: in the first step at once, later when it has arrived.

        Raises
        ------
        RuntimeError
            If the second run differs, by ``verify`` and step.
        """
        if self._differ:
            places, differ = [*self._differ], [*self._differ.values()]
            verdict = torch.stack([each.to(differ[0].device) for each in differ])
            self._differ = {}
            report = functools.partial(self._report, places)
            if self._is_first or not verdict.is_cuda:
                report(verdict.cpu())
            else:
                self._checks.report_later(verdict, report)
        self._checks.settle()

    def _report(self, places: list[int], verdict: Tensor) -> None:
        differing = [p for p, d in zip(places, verdict.tolist(), strict=True) if d]
        if not differing:
            return
        place = differing[0]
        message = in_words(
            self._name,
            f"what operation {place + 1} saves for its gradient, {self._shapes[place]}, "
            "has other values",
        )
        verify = self._checks.verify
        raises_first = verify == "first" and not self._may_differ
        if verify == "raise" or (raises_first and self._is_first):
            self._checks.restart()
            raise RuntimeError(message)
        self._checks.differs = True
        warn_of_difference(message, RecomputeWarning, stacklevel=2)


def begin_comparison(checks: Checks | None, name: str) -> Comparison | None:
    """Open the comparison of a call, if its step is compared."""
    # A dispatch mode counts bytes or operations, of which these are no part.
    if checks is None or not checks.is_due or dispatch_mode() is not None:
        return None
    return Comparison(checks, name)
