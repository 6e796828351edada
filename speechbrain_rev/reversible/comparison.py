"""Whether the second run of a recomputed module is like its first one.

Gradients depend on what the module's operations save and on nothing else of the second run.
So each tensor that is saved is compared with that of the first run, in order, by shape,
dtype and a checksum of its bits. Outputs are not compared: they may differ without a wrong
gradient, and agree with one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.reversible.monitor import (
    Verify,
    checksum,
    has_values,
    kernels_may_differ,
    to_host,
    warn_of_difference,
)
from speechbrain_rev.torch_private import dispatch_mode

#: Calls of a module from one comparison to the next, once its first step is over.
EVERY = 100

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RecomputeWarning(UserWarning):
    """A recomputed block computed something else in its second run than in its first."""


@torch.no_grad()
def fingerprint(x: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """Sum up the bits of a tensor, see ``checksum``.

    Parameters
    ----------
    x : torch.Tensor
        Any.

    Returns
    -------
    order : tuple of int
        The axes as they lie in memory.
    checksum : torch.Tensor, [], int64
        Of its bits in that order.
    None
        Where values are not compared: of tensors that have none, or one value for all, and
        of uint8, which workspaces of oneDNN and cuDNN have. These differ between runs that
        are alike.

    Examples
    --------
    >>> x = torch.arange(9.0)
    >>> (_, one), (_, other) = fingerprint(x), fingerprint(x.roll(1))
    >>> bool(one == other)
    False
    """
    if (
        type(x) not in (Tensor, nn.Parameter)
        or x.layout is not torch.strided
        or x.dtype == torch.uint8
        or not has_values(x)
        or not x.numel()
    ):
        return None
    if x.numel() > 1 and not any(x.stride()):
        return None  # one value that stands for all, as of a stream's tangent
    x = x.detach().resolve_conj().resolve_neg()
    for axis, stride in enumerate(x.stride()):
        if stride == 0:
            x = x.narrow(axis, 0, 1)
    strides = [s if n > 1 else 0 for s, n in zip(x.stride(), x.shape, strict=True)]
    order = tuple(sorted(range(x.dim()), key=lambda axis: -strides[axis]))
    in_order = x.permute(order)
    if not in_order.is_contiguous():
        in_order, order = x.contiguous(), tuple(range(x.dim()))
    bits = in_order.view(-1).view(_INTEGERS[min(8, x.dtype.itemsize)])
    return order, checksum([bits])[0]


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


class _Calls:
    """How often a module was called, and a verdict that is under way."""

    def __init__(self) -> None:
        self.count = 0
        #: Whether a backward pass of its first step is over.
        self.is_settled = False
        self.under_way: tuple[Tensor, Any, Comparison] | None = None


#: Of each module that was recomputed.
_calls: weakref.WeakKeyDictionary[nn.Module, _Calls] = weakref.WeakKeyDictionary()


class Comparison:
    """What the operations of one call save, and what they save again.

    Parameters
    ----------
    calls : _Calls
        Of the module.
    verify : {"first", "raise", "warn"}
        What follows.
    name : str
        What messages call the module.
    """

    def __init__(self, calls: _Calls, verify: Verify, name: str) -> None:
        self._calls, self._verify, self._name = calls, verify, name
        self._first: list[tuple[tuple[int, ...], Tensor] | None] = []
        self._shapes: list[str] = []
        self._differ: dict[int, Tensor] = {}
        self._may_differ = False

    def note(self, x: Tensor) -> None:
        """Take what an operation of the first run saves."""
        self._first.append(fingerprint(x))
        self._shapes.append(f"{list(x.shape)} {x.dtype}")

    def note_again(self, place: int, x: Tensor) -> None:
        """Compare what an operation of the second run saves."""
        self._may_differ = kernels_may_differ(x.device)
        before, now = self._first[place], fingerprint(x)
        if before is not None and now is not None and before[0] == now[0]:
            self._differ[place] = before[1] != now[1]

    def judge(self) -> None:
        """Report a difference: in the first step at once, later when it has arrived.

        Raises
        ------
        RuntimeError
            If the second run differs, by ``verify`` and step.
        """
        if self._differ:
            places, self._places = [*self._differ.values()], [*self._differ]
            verdict = torch.stack([each.to(places[0].device) for each in places])
            self._differ = {}
            if self._calls.is_settled and verdict.is_cuda:
                self._calls.under_way = *to_host(verdict), self
            else:
                self._report(verdict.cpu(), self._calls.is_settled)
        self._calls.is_settled = True

    def _report(self, verdict: Tensor, is_later: bool) -> None:
        differing = [
            p for p, d in zip(self._places, verdict.tolist(), strict=True) if d
        ]
        if not differing:
            return
        place = differing[0]
        message = in_words(
            self._name,
            f"what operation {place + 1} saves for its gradient, {self._shapes[place]}, "
            "has other values",
        )
        raises_first = self._verify == "first" and not self._may_differ
        if self._verify == "raise" or (raises_first and not is_later):
            raise RuntimeError(message)
        warn_of_difference(message, RecomputeWarning, stacklevel=2)


def begin_comparison(
    module: nn.Module, verify: Verify | None, name: str
) -> Comparison | None:
    """Open the comparison of a call, if it is its turn; report an earlier verdict.

    All calls are compared up to the end of the module's first backward pass, then every
    hundredth one.
    """
    # A dispatch mode counts bytes or operations, of which these are no part.
    if verify is None or dispatch_mode() is not None:
        return None
    calls = _calls.setdefault(module, _Calls())
    if calls.under_way is not None:
        verdict, arrival, comparison = calls.under_way
        if arrival is None or arrival.query():
            calls.under_way = None
            comparison._report(verdict, True)
    calls.count += 1
    is_due = not calls.is_settled or calls.count % EVERY == 0
    return Comparison(calls, verify, name) if is_due else None
