"""What training steps note on the device, and what the host reports of it.

Nothing here waits for the device: notes are copied to the host while work goes on
there, and read once the copy has arrived.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from speechbrain_rev.torch_private import dispatch_mode, is_fake

#: Consequences of a second run that differs: "first" raises in a first step and warns later.
Verify = Literal["first", "raise", "warn"]

#: Spreads positions over 64 bit: 2**64 / the golden ratio, as a signed number.
_SPREAD = -0x61C8864680B583EB

_REMEDY = (
    "The inputs that were reconstructed are not those of the forward pass: a residual "
    "function does not compute the same twice. Look for operations that are not "
    "deterministic (torch.use_deterministic_algorithms(True) names them), for random "
    "numbers that are not torch's, and for hooks that change weights between forward "
    "and backward. Until then train with mode='store', or with verify='warn'."
)


class StreamWarning(UserWarning):
    """Streams left their range, or were not reconstructed to the bit."""


class StreamError(RuntimeError):
    """Streams were not reconstructed to the bit, in a first step or under "raise"."""


#: Differences that this process warned of, and those of them that were not taken since.
_warned: set[str] = set()
_untold: list[str] = []


def warn_of_difference(text: str, category: type[Warning], stacklevel: int) -> None:
    """Warn that something differed in its second run, and note it for ``take_differences``."""
    if text not in _warned:
        _warned.add(text)
        _untold.append(text)
    warnings.warn(text, category, stacklevel=stacklevel + 1)


def take_differences() -> list[str]:
    """Give the differences that this process warned of since the last call, each once.

    A training run on several processes adds up how many there are, with what it reduces:
    warnings of other processes than the first are easily overlooked.
    """
    taken = [*_untold]
    _untold.clear()
    return taken


def check_verify(verify: object) -> None:
    """Refuse what ``verify`` cannot be."""
    if verify not in ("first", "raise", "warn", None):
        raise ValueError(
            f"verify is {verify!r}; it must be 'first' (raise in the first step, then "
            "warn), 'raise', 'warn', or None to compare nothing."
        )


def kernels_may_differ(device: torch.device) -> bool:
    """Whether the user lets cuDNN take kernels that do not compute the same twice."""
    cudnn = torch.backends.cudnn
    return device.type == "cuda" and (cudnn.benchmark or not cudnn.deterministic)


def checksum(values: Sequence[Tensor]) -> Tensor:
    """Sum up integers by rows and by columns, with a weight for each sum, modulo 2**64.

    Parameters
    ----------
    values : sequence of torch.Tensor, of integers
        Dense tensors, taken in the order of their memory.

    Returns
    -------
    torch.Tensor, [len(values)], int64
        Different for values that differ in one place. What leaves the sum of each row and
        of each column as it was is not seen: as much more in two corners of a rectangle as
        less in the two others. Weights are fixed and as good as random: other errors, such
        as cancel in a plain sum, cancel here by chance only.

    Examples
    --------
    >>> x = torch.tensor([1, 2, 3], dtype=torch.int32)
    >>> bool(checksum([x]) == checksum([x.flip(0)]))
    False
    """
    return torch.stack([_sum_of(value.detach()) for value in values])


def _sum_of(value: Tensor) -> Tensor:
    line = value.as_strided((value.numel(),), (1,))
    columns = 1 << (line.numel().bit_length() // 2)
    rows = line.numel() // columns
    body = line[: rows * columns].view(rows, columns)
    sums = torch.cat(
        [
            body.sum(1, dtype=torch.int64),
            body.sum(0, dtype=torch.int64),
            line[rows * columns :].to(torch.int64),
        ]
    )
    places = torch.arange(1, len(sums) + 1, device=value.device, dtype=torch.int64)
    # Mixed twice: weights in even steps would let 1, -2, 1 cancel.
    weights = places.mul_(_SPREAD)
    weights ^= weights >> 32
    return sums.mul_(weights.mul_(_SPREAD).bitwise_or_(1)).sum()


class Checks:
    """Which steps are compared, and verdicts that have not arrived yet.

    A step is a pass through a chain or an encoder, or a call of another module. Those that
    begin before a backward pass of one are first ones, which are compared; then every so
    many-th is.

    Parameters
    ----------
    verify : {"first", "raise", "warn"} or None
        What follows where a second run differs; None compares nothing.
    every : int
        Steps from one comparison to the next.

    Raises
    ------
    ValueError
        If verify or every is something else.
    """

    def __init__(self, verify: Verify | None = "first", every: int = 100) -> None:
        check_verify(verify)
        if type(every) is not int or every < 1:
            raise ValueError(
                f"verify_every is {every!r}; it must be a whole number of forward "
                "passes, at least 1."
            )
        self.verify, self.every = verify, every
        #: Whether the step that has begun is compared.
        self.is_due = False
        #: Whether the first step is over.
        self.is_settled = False
        #: Whether a second run differed.
        self.differs = False
        self._count = 0
        self._under_way: list[tuple[Tensor, Any, Callable[[Tensor], None]]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Let copies and pickles begin anew."""
        return vars(Checks(self.verify, self.every))

    def restart(self) -> None:
        """Forget all steps: the next one is a first one, as after a change of mode."""
        vars(self).update(self.__getstate__())

    def begin(self) -> Checks:
        """Begin a step, once what has arrived of earlier ones was reported."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            verdict, arrival, report = each
            if arrival is None or arrival.query():
                report(verdict)
            else:
                self._under_way.append(each)
        is_turn = not self.is_settled or self._count % self.every == 0
        self.is_due = self.verify is not None and is_turn
        self._count += 1
        return self

    def report_later(self, verdict: Tensor, report: Callable[[Tensor], None]) -> None:
        """Report a verdict at a later step, when it has arrived on the host."""
        self._under_way.append((*to_host(verdict), report))

    def settle(self) -> None:
        """Let the first step be over: what begins from now on is a later one."""
        self.is_settled = True


@dataclass(frozen=True)
class StreamNotes:
    """What one pass through a chain notes on the device.

    Attributes
    ----------
    largest : torch.Tensor, [1 + residual functions, 2], or None
        The largest magnitude that was added and that resulted: on entry, then of each
        residual function. None where the format has no limit.
    mismatches : torch.Tensor, [1], or None
        Counts checksums that did not agree; None in steps without comparison.
    chain : str
        What messages call the chain.
    differs : callable or None
        In a first step, in which each block is compared: reports one, by its place.
    checks : Checks or None
        Whose first step is over with a backward pass of this one.
    """

    largest: Tensor | None = None
    mismatches: Tensor | None = None
    chain: str = "the chain"
    differs: Callable[[int], None] | None = None
    checks: Checks | None = None

    def place(self, row: int) -> str:
        """Say which residual function a row is of."""
        block, half = divmod(row - 1, 2)
        return f"{'FG'[half]} of block {block} of {self.chain}"

    def row(self, index: int) -> Tensor | None:
        """Give the place of one residual function, counted from 1; 0 is the entry."""
        return None if self.largest is None else self.largest[index]


class Monitor:
    """Collects the notes of a chain's training steps and says what is wrong.

    Parameters
    ----------
    verify : {"first", "raise", "warn"} or None
        What follows when reconstructed streams are not the original ones to the bit.
        "first" raises in the first step, before a gradient leaves the chain, and warns
        later, or always where cuDNN may take kernels that do not compute the same twice.
        None leaves the comparison out.
    every : int
        Forward passes in training from one comparison to the next.

    Raises
    ------
    ValueError
        If verify or every is something else.
    """

    def __init__(self, verify: Verify | None = "first", every: int = 100) -> None:
        #: Checks of the chain's streams, and of its blocks that are recomputed.
        self.checks = Checks(verify, every)
        #: The chain's name in messages.
        self.name = "the chain"
        #: The monitor of the chain before, whose NaN this one need not report again.
        self.before: Monitor | None = None
        self._largest: Tensor | None = None
        self._mismatches: Tensor | None = None
        self._under_way: tuple[Tensor, Any] | None = None
        self._seen = 0.0
        self._reported: set[str] = set()

    @property
    def verify(self) -> Verify | None:
        """What follows where a second run differs."""
        return self.checks.verify

    @property
    def every(self) -> int:
        """Forward passes in training from one comparison to the next."""
        return self.checks.every

    def __getstate__(self) -> dict[str, Any]:
        """Let copies and pickles start without notes, which belong to a device."""
        fresh = Monitor(self.verify, self.every)
        fresh.name, fresh.before = self.name, self.before
        return vars(fresh)

    def restart(self) -> None:
        """Forget all steps: the next one compares, and makes the notes of a first one."""
        vars(self).update(self.__getstate__())

    def begin(self, rows: int, limit: float, device: torch.device) -> StreamNotes:
        """Open the notes of one pass through the chain.

        Parameters
        ----------
        rows : int
            The entry and each residual function.
        limit : float
            Magnitudes from here on are out of range; infinite for formats without.
        device : torch.device
            Where the streams are.

        Returns
        -------
        StreamNotes
            To be filled.

        Raises
        ------
        StreamError
            If an earlier step was not reconstructed, under ``verify="raise"``.
        """
        checks = self.checks.begin()
        if math.isinf(limit):
            return StreamNotes(chain=self.name)
        largest = self._largest
        if largest is None or len(largest) != rows or largest.device != device:
            self._open(rows, limit, device)
        self.report(limit, wait=False)
        magnitudes = torch.zeros(rows, 2, dtype=torch.float32, device=device)
        differs = None
        # A step whose bytes are counted stands for later ones, which compare no block.
        is_counted = dispatch_mode() is not None or not has_values(magnitudes)
        if checks.is_due and not checks.is_settled and not is_counted:
            warns = self.verify == "first" and kernels_may_differ(device)
            differs = partial(self._report_block, self.verify != "warn" and not warns)
        mismatches = self._mismatches if checks.is_due else None
        return StreamNotes(magnitudes, mismatches, self.name, differs, checks)

    def _report_block(self, raises: bool, block: int) -> None:
        self._report_difference(raises, f"In block {block} of {self.name}: {_REMEDY}")

    def _report_difference(self, raises: bool, text: str) -> None:
        self.checks.differs = True
        if raises:
            raise StreamError(text)
        if "mismatch" not in self._reported:
            self._reported.add("mismatch")
            warn_of_difference(text, StreamWarning, stacklevel=5)

    def _open(self, rows: int, limit: float, device: torch.device) -> None:
        """Begin a new table, once what is in an old one was reported."""
        self.report(limit, wait=True)
        self._largest = torch.zeros(rows, 2, dtype=torch.float32, device=device)
        self._mismatches = torch.zeros(1, dtype=torch.float32, device=device)

    def close(self, notes: StreamNotes, limit: float) -> Tensor | None:
        """Take the notes of one pass, and say whether its streams may be used.

        Returns
        -------
        torch.Tensor or None
            0, or NaN if a magnitude was out of range or not a number. To be added to
            what is made of the streams.
        """
        if notes.largest is None:
            return None
        assert self._largest is not None
        torch.maximum(self._largest, notes.largest, out=self._largest)
        fine = (notes.largest < limit).all()
        return torch.where(fine, 0.0, math.nan)

    def report(self, limit: float, *, wait: bool) -> None:
        """Say what is wrong in notes that have arrived, once each; send newer ones.

        Parameters
        ----------
        limit : float
            As for ``begin``.
        wait : bool
            Wait for the device, for all notes up to now.

        Raises
        ------
        StreamError
            As for ``begin``.
        """
        if self._largest is None or self._mismatches is None:
            return
        if not has_values(self._largest):
            return
        self._take(limit, wait)
        if self._under_way is None:
            notes = torch.cat([self._largest.flatten(), self._mismatches])
            self._under_way = to_host(notes)
            self._largest.zero_()
            self._mismatches.zero_()
            self._take(limit, wait)

    def pop_largest(self) -> float:
        """Give the largest magnitude that was reported since the last call."""
        largest, self._seen = self._seen, 0.0
        return largest

    def _take(self, limit: float, wait: bool) -> None:
        """Read the notes under way if they have arrived."""
        if self._under_way is None:
            return
        notes, arrival = self._under_way
        if arrival is not None:
            if wait:
                arrival.synchronize()
            elif not arrival.query():
                return
        self._under_way = None
        *magnitudes, mismatches = notes.tolist()
        rows = list(zip(magnitudes[::2], magnitudes[1::2], strict=True))
        # max() of Python may lose a NaN, the sum of a list does not.
        total = sum(magnitudes)
        largest = total if math.isnan(total) else max(magnitudes)
        self._seen = largest if math.isnan(largest) else max(self._seen, largest)
        beyond = [i for i, row in enumerate(rows) if not all(x < limit for x in row)]
        if beyond and not (beyond[0] == 0 and self._reported_before()):
            row = beyond[0]
            self._warn_once(f"range, {row}", self._beyond(row, rows[row], limit))
        if mismatches:
            self._report_difference(
                self.verify == "raise", f"In {self.name}: {_REMEDY}"
            )

    def _reported_before(self) -> bool:
        """Whether an earlier chain has said what makes this one's input NaN."""
        before = self.before
        return before is not None and (
            any(kind.startswith("range") for kind in before._reported)
            or before._reported_before()
        )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            warnings.warn(text, StreamWarning, stacklevel=5)

    def _beyond(self, row: int, magnitudes: tuple[float, float], limit: float) -> str:
        block, half = divmod(row - 1, 2)
        where = f"{'FG'[half]} of block {block}" if row else "its input"
        added, total = magnitudes
        remedy = (
            "Lower the learning rate, clip gradients, or train with streams='float', "
            "which has no limit."
            if math.isfinite(added)
            else "Look for what is not finite in features, weights and residual "
            "functions; streams='float' does not help."
        )
        return (
            f"The streams of {self.name} left their range of {limit:g} at {where}: the "
            f"largest magnitude added was {added:.4g}, the largest sum {total:.4g}. That "
            f"step's output and gradients were made NaN. {remedy}"
        )


def has_values(x: Tensor) -> bool:
    """Whether a tensor has values, as meta and fake ones have not."""
    return not x.is_meta and not is_fake(x)


def to_host(x: Tensor) -> tuple[Tensor, Any]:
    """Copy to the host without waiting; the second item is an event of its arrival."""
    if x.device.type != "cuda":
        return x.to("cpu", copy=True), None
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record()
    return host, arrival
