"""Watch a training step block by block: what is alive, what is done, how long it takes."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from speechbrain_rev.devices import Work
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.planner.network import Network, compare_next, device_of
from speechbrain_rev.reversible.hooks import Moment, observed
from speechbrain_rev.torch_private import storage_key

#: Runs a forward and a backward pass.
Run = Callable[[], Any]
_Reading = TypeVar("_Reading")

_FORWARD = (Moment.FORWARD_BEGINS, Moment.FORWARD_ENDS)

_aten = torch.ops.aten
#: They allocate, or give what they were given another name.
_NO_KERNEL = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
    _aten.lift_fresh,
    _aten.detach,
    _aten.detach_,
    _aten.resize_,
    _aten.set_,
}
#: They write all of their first argument and do not read it.
_OVERWRITES = {_aten.copy_, _aten.zero_, _aten.fill_}
#: They ask their first argument for its shape alone.
_LIKE = {
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.new_zeros,
    _aten.new_ones,
    _aten.new_full,
}


@dataclass(frozen=True)
class BlockTrace:
    """What was alive around one block.

    Attributes
    ----------
    before_bytes : int
        When its forward pass began.
    held_bytes : int
        Of what is there when its forward pass ends, what the next block finds and does not
        owe to a name that its caller has for it. Such a name keeps what is older than the
        block: no later block reads it, and it is gone when the backward pass begins.
    forward_peak_bytes : int
        The most from the end of the block before to that of its forward pass.
    left_bytes : int
        What such names keep for longer than the last block runs, at the worst moment between
        it and the backward pass too, without what they did for the block before.
    dropped_bytes : int
        Of ``before_bytes``, without what names kept for the block before, what is not
        among ``held_bytes``.
    shares_input : bool
        Whether what the block before made and this one reads is read again after it, and
        is gone when the backward pass begins.
    backward_peak_bytes : int or None
        The most from there where its backward pass begins to where the next one does;
        None if it has none, for nothing in it or before it is trained.
    """

    before_bytes: int
    held_bytes: int
    forward_peak_bytes: int
    left_bytes: int
    dropped_bytes: int
    shares_input: bool
    backward_peak_bytes: int | None


@dataclass(frozen=True)
class Trace:
    """What was alive in a training step.

    Attributes
    ----------
    blocks : mapping of str to BlockTrace
        In the order of execution.
    between_peak_bytes : int
        The most between the last block's forward pass and its backward pass: pooling,
        the loss and their gradients.
    peak_bytes : int
        The most at any time.
    work : mapping of str to Work
        By block, and under "" what is done outside of blocks; empty if it was not asked
        for.
    """

    blocks: Mapping[str, BlockTrace]
    between_peak_bytes: int
    peak_bytes: int
    work: Mapping[str, Work]


def trace_bytes(
    network: Network,
    run: Run,
    *,
    with_work: bool = False,
) -> Trace:
    """Run a training step and count what is alive, block by block.

    Parameters
    ----------
    network : Network
        Whose blocks to watch.
    run : callable
        Runs its forward and backward pass. On meta tensors it computes nothing.
    with_work : bool
        Whether operations are counted too.

    Returns
    -------
    Trace
        Bytes of tensors that the step made on the network's device; what existed before
        it, and what lies on other devices, is not counted. It
        is a step in which chains compare their streams, as not every one does. Work is
        that of the step after it, as most are.

    Raises
    ------
    ValueError
        If the blocks do not run one after the other, forward and backward.

    Examples
    --------
    >>> from speechbrain_rev.planner.network import as_network
    >>> from speechbrain_rev.reversible import AdditiveCoupling, ReversibleChain
    >>> chain = ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())], mode="store")
    >>> x = torch.randn(2, 4, requires_grad=True)
    >>> trace = trace_bytes(as_network(chain), lambda: sum(chain(x, x)).sum().backward())
    >>> list(trace.blocks), trace.peak_bytes >= trace.between_peak_bytes
    (['blocks.0'], True)
    """
    is_first, device = compare_next(network), device_of(network)
    work: Mapping[str, Work] = {}
    with _Lives(device) if is_first or not with_work else _Work(device) as meter:

        def read() -> tuple[int, int, Work | None]:
            seen = meter.live, meter.peak, getattr(meter, "done", None)
            meter.next_moment()
            return seen

        moments = _watch(network, run, read)
    if with_work:
        done: _Moments[Any] = moments
        if is_first:
            done = _watched_work(network, run, device)
        work = _differences(done, _work_between, Work(0, 0, 0))
    #: Bytes alive at a moment, and the most from it to the next.
    live = {(name, moment): now for name, moment, (now, *_) in moments[:-1]}
    following = [most for *_, (_, most, _) in moments[1:]]
    peak = {
        (name, moment): most
        for (name, moment, _), most in zip(moments[:-1], following, strict=True)
    }
    names = _order(moments)
    place = {(name, moment): i for i, (name, moment, _) in enumerate(moments)}
    backward = place[names[-1], Moment.BACKWARD_BEGINS]
    begins = [place[name, Moment.FORWARD_BEGINS] for name in names]
    # The last one has what is there when it ends.
    begins.append(place[names[-1], Moment.FORWARD_ENDS])
    released = meter.released(begins, backward)
    # Operations between two blocks belong to the second of them.
    until = [("", None), *((name, Moment.FORWARD_ENDS) for name in names)]
    return Trace(
        {
            name: BlockTrace(
                live[name, Moment.FORWARD_BEGINS],
                held,
                max(peak[before], peak[name, Moment.FORWARD_BEGINS]),
                left,
                dropped,
                shares,
                peak.get((name, Moment.BACKWARD_BEGINS)),
            )
            for name, before, (held, left, dropped, shares) in zip(
                names, until, released, strict=False
            )
        },
        peak[names[-1], Moment.FORWARD_ENDS],
        max(most for *_, (_, most, _) in moments),
        work,
    )


def _watched_work(
    network: Network, run: Run, device: torch.device | None
) -> _Moments[Any]:
    """Run a step after one that compared streams, and read the work at each moment."""
    with _Work(device) as meter:
        return _watch(network, run, lambda: (meter.done,))


def _work_between(before: Any, after: Any) -> Work:
    pairs = zip(astuple(before[-1]), astuple(after[-1]), strict=True)
    return Work(*(b - a for a, b in pairs))


def trace_seconds(network: Network, run: Run, device: torch.device) -> dict[str, float]:
    """Run a training step and take the time of each block.

    Parameters
    ----------
    network : Network
        Whose blocks to watch.
    run : callable
        Runs its forward and backward pass.
    device : torch.device
        Where it runs.

    Returns
    -------
    dict of str to float
        Seconds of forward and backward pass by block, and under "" of the rest.

    Raises
    ------
    ValueError
        If the blocks do not run one after the other, forward and backward.
    """
    if device.type != "cuda":
        clocks = _watch(network, run, time.perf_counter)
        return _differences(clocks, lambda before, after: after - before)

    def event() -> torch.cuda.Event:
        now = torch.cuda.Event(enable_timing=True)
        now.record(torch.cuda.current_stream(device))
        return now

    events = _watch(network, run, event)
    torch.cuda.synchronize(device)
    return _differences(events, lambda before, after: before.elapsed_time(after) / 1000)


_Moments = list[tuple[str, "Moment | None", _Reading]]


def _watch(
    network: Network, run: Run, read: Callable[[], _Reading]
) -> _Moments[_Reading]:
    """Run a step and read at each moment of each block, and before and after it."""
    moments = _seen(network, run, read)
    _check(network.named_blocks(), [moment[:2] for moment in moments[1:-1]])
    return moments


def moments_of(network: Network, run: Run) -> list[tuple[str, Moment | None]]:
    """Run a step and list what happens to its blocks, in whatever order that is."""
    return [moment[:2] for moment in _seen(network, run, lambda: None)[1:-1]]


def _seen(
    network: Network, run: Run, read: Callable[[], _Reading]
) -> _Moments[_Reading]:
    names = {id(block): name for name, block in network.named_blocks().items()}
    moments: _Moments[_Reading] = [("", None, read())]

    def note(block: nn.Module, moment: Moment) -> None:
        if id(block) in names:
            moments.append((names[id(block)], moment, read()))

    # Couplings report by themselves, other blocks within this.
    watched = getattr(network, "watched", contextlib.nullcontext)
    with watched(), observed(note):
        run()
    moments.append(("", None, read()))
    return moments


def _order(moments: _Moments[Any]) -> list[str]:
    return [name for name, moment, _ in moments if moment is Moment.FORWARD_BEGINS]


def _check(names: Any, seen: list[tuple[str, Moment | None]]) -> None:
    """Hold that all blocks ran, one after the other, and back to the first trained."""
    ran = [name for name, moment in seen if moment is Moment.FORWARD_BEGINS]
    expected: list[tuple[str, Moment | None]] = [
        (name, moment) for name in ran for moment in _FORWARD
    ]
    trains = [(name, Moment.BACKWARD_BEGINS) in seen for name in ran]
    back = ran[trains.index(True) :] if True in trains else ran
    expected += [(name, Moment.BACKWARD_BEGINS) for name in reversed(back)]
    idle = sorted(set(names) - set(ran))
    forward_only = [n for n in back if (n, Moment.BACKWARD_BEGINS) not in seen]
    if not idle and seen == expected and len(set(ran)) == len(ran):
        return
    if idle:
        what = f"{', '.join(idle)} did not run"
    elif len(set(ran)) < len(ran):
        what = f"{max(ran, key=ran.count)} ran more than once"
    elif forward_only:
        what = f"{', '.join(forward_only)} had no backward pass"
    else:
        pairs = zip([*seen, ("the end", None)], [*expected, ("", None)], strict=False)
        name, moment = next(a for a, b in pairs if a != b)
        what = f"{name} came out of order" + (f" ({moment.value})" if moment else "")
    raise ValueError(
        "Blocks that are planned must run once in a training step, one after the other, "
        f"and back in the backward pass, but {what}. Name other blocks; of those that "
        "are named the first ones alone may be without anything that is trained."
    )


def _differences(
    moments: _Moments[_Reading],
    between: Callable[[_Reading, _Reading], Any],
    nothing: Any = 0.0,
) -> dict[str, Any]:
    """Add up what lies between moments, by the block that it belongs to."""
    total: dict[str, Any] = {}
    for (name, moment, before), (_, _, after) in itertools.pairwise(moments):
        owner = "" if moment is Moment.FORWARD_ENDS else name
        total[owner] = total.get(owner, nothing) + between(before, after)
    return total


@dataclass
class _Life:
    """A storage, and before which moments it was made, read and freed.

    ``outlived`` are how many others had been freed by then.
    """

    size: int
    made: int
    reads: set[int]
    freed: float = math.inf
    outlived: float = math.inf


class _Lives(LiveBytes):
    """Notes when storages are made, read and freed, beside what is alive."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__(device)
        #: How many moments there were.
        self.moment = 0
        #: Before each moment, how many storages had been freed at the peak since the last.
        self._freed_at_peaks: list[int] = []
        self._freed = self._freed_at_peak = 0
        self._lives: list[_Life] = []
        self._alive: dict[int, _Life] = {}

    def next_moment(self) -> None:
        """Look for the peak anew, from what is alive now."""
        self._freed_at_peaks.append(self._freed_at_peak)
        self.peak, self._freed_at_peak = self.live, self._freed
        self.moment += 1

    def released(
        self, begins: Sequence[int], backward: int
    ) -> Iterator[tuple[int, int, int, bool]]:
        """Give what each block holds, leaves and drops, and whether it shares its input.

        Blocks begin at these moments, and at the last of them the last one ends.
        """
        end = begins[-1]
        before: list[_Life] = []
        for begin, following in itertools.pairwise(begins):
            # Before every other moment a block runs.
            later = range(following + 1, end + 1, 2)
            older = [x for x in self._lives if x.made <= begin < x.freed]
            left = [
                x
                for x in older
                if following < x.freed <= backward and x.reads.isdisjoint(later)
            ]
            gone = [x for x in older if x.freed <= following]
            were = {*map(id, before)}
            dropped = [x.size for x in (*gone, *left) if id(x) not in were]
            lasting = [
                x.size for x in left
                if id(x) not in were and x.outlived >= self._freed_at_peaks[backward]
            ]  # fmt: skip
            held = [
                x.size
                for x in self._lives
                if x.made <= begin + 1 and x.freed > following
            ]
            after = range(begin + 2, backward + 1)
            shares = any(
                x.made == begin - 1
                and begin + 1 in x.reads
                and x.freed <= backward
                and not x.reads.isdisjoint(after)
                for x in older
            )
            named = sum(x.size for x in left)
            yield sum(held) - named, sum(lasting), sum(dropped), shares
            before = left

    def _run(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        outputs, taken, made = super()._run(func, args, kwargs)
        for x in taken:
            if x.layout is torch.strided:
                life = self._alive.get(storage_key(x))
                if life is not None:
                    life.reads.add(self.moment)
        return outputs, taken, made

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage_key(storage)
        was_known, peak = key in self._known, self.peak
        super()._add(x)
        if self.peak > peak:
            self._freed_at_peak = self._freed
        # While it was added, garbage that was collected may have freed others.
        if key in self._known and not was_known:
            self._alive[key] = life = _Life(storage.nbytes(), self.moment, set())
            self._lives.append(life)

    def _free(self, key: int, size: int) -> None:
        super()._free(key, size)
        life = self._alive.pop(key)
        life.freed, life.outlived = self.moment, self._freed
        self._freed += 1


class _Work(_Lives):
    """Counts what operations compute and move, beside what is alive."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__(device)
        # It would import Triton with this module.
        from torch.utils.flop_counter import flop_registry

        self._flops = self._moved = self._operations = self._host = 0
        # Torch has no entry for a product that is added in place.
        self._flops_of = {_aten.baddbmm_: flop_registry[_aten.baddbmm], **flop_registry}

    @property
    def done(self) -> Work:
        """All work up to now."""
        return Work(self._flops, self._moved, self._operations, self._host)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        outputs, tensors, made = self._run(func, args, kwargs)
        access = accessed(func, args, kwargs, tensors, made)
        if access is None:
            return outputs
        count = self._flops_of.get(func._overloadpacket)
        if func is _aten.convolution_backward.default:
            self._flops += _backward_flops(*args)
        elif count is not None:
            self._flops += count(*args, **kwargs, out_val=outputs)
        self._moved += sum(map(_bytes, itertools.chain(*access)))
        self._operations += 1
        if {x.device for x in tensors if x.dim()} - {x.device for x in made}:
            self._host += sum(map(_bytes, made))
        return outputs


def _backward_flops(y_grad: Tensor, x: Tensor, weight: Tensor, *more: Any) -> int:
    """Count as many for each gradient that is asked for as the convolution itself took.

    Torch's own count takes a depthwise convolution's weight gradient for a full one's.
    """
    x_grad_wanted, weight_grad_wanted, _ = more[-1]
    forward = 2 * y_grad.numel() * weight[0].numel()
    return forward * (int(x_grad_wanted) + int(weight_grad_wanted))


def accessed(
    func: Any, args: Any, kwargs: Any, taken: list[Tensor], made: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Give the tensors that an operation reads and writes; None if it runs no kernel.

    ``out`` is written alone, and what is written as a whole is not read.
    """
    packet = func._overloadpacket
    if func.is_view or packet in _NO_KERNEL:
        return None
    read = taken[1:] if packet in _OVERWRITES or packet in _LIKE else taken
    read = [x for x in read if x is not kwargs.get("out")]
    # In-place operations on lists return nothing.
    if not made and args and isinstance(args[0], list | tuple):
        # In-place operations on lists return nothing.
        made = [*args[0]]
    return read, made


def _bytes(x: Tensor) -> int:
    """Bytes that are read or written once, however often they are looked at."""
    sizes = zip(x.shape, x.stride(), strict=True)
    count = 1
    for size, stride in sizes:
        count *= size if stride else 1
    return count * x.element_size()
