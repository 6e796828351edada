"""Pieces of a unit that are recomputed one at a time, the last one first.

The pieces are known: modules without hooks or state of their own, with tensors and masks as
arguments, whose outputs are parts of one tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from speechbrain_rev.kernels.fixed_point import format_of
from speechbrain_rev.reversible.comparison import Comparison, begin_comparison
from speechbrain_rev.reversible.hooks import Held
from speechbrain_rev.reversible.monitor import Checks
from speechbrain_rev.reversible.recompute import (
    Gradients,
    Parameters,
    Root,
    refuse_double_backward,
    refuse_what_cannot_run_again,
)
from speechbrain_rev.reversible.replay import (
    RunRecord,
    first_run,
    recorded,
    repeating,
    second_run,
)
from speechbrain_rev.reversible.state import modules_of
from speechbrain_rev.reversible.streams import tangent_of


def recompute_each(
    modules: Sequence[nn.Module],
    arguments: Sequence[tuple[Tensor | None, ...]],
    *,
    channels: int,
    reuse: Collection[int] = (),
    last: bool = False,
    checks: Checks | None = None,
    name: str = "",
) -> Tensor:
    """Recompute modules whose outputs are parts of one tensor, the last one first.

    Parameters
    ----------
    modules : sequence of nn.Module
        The modules. Each returns a tensor.
    arguments : sequence of tuple
        Arguments of each: tensors, or None.
    channels : int
        Of all outputs together.
    reuse : collection of int
        Which arguments of each are read by this module alone, once: in the backward pass
        their storage takes their gradients.
    last : bool
        Whether an outer module returns the result as it is, and needs its graph alone.
    checks : Checks or None
        Of the step that has begun; None to compare nothing.
    name : str
        What messages call the modules.

    Returns
    -------
    torch.Tensor, [batch, channels, ...]
        What the modules return, one after the other along the channels.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        eager = torch.compiler.disable(recompute_each)
        return cast(
            Tensor,
            eager(
                modules, arguments, channels=channels, reuse=reuse, last=last,
                checks=checks, name=name,
            ),
        )  # fmt: skip
    for module in modules:
        refuse_what_cannot_run_again(modules_of(module))
    calls = [
        _Call(module, given) for module, given in zip(modules, arguments, strict=True)
    ]
    inputs = {id(x): x for call in calls for x in call.given if x is not None}
    order = {key: place for place, key in enumerate(inputs)}
    parameters = Parameters(modules[::-1])
    tensors = [*inputs.values(), *parameters.tensors]
    joins = _Joins(channels, empty=last and repeating())
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        outputs = (call.module(*call.given) for call in calls)
        # Within a network that is recomputed as a whole others read this.
        return _joined(outputs, joins._replace(empty=False))
    for call in calls:
        call.places = [None if x is None else order[id(x)] for x in call.given]
        call.given = ()  # autograd holds them from here on
    del inputs
    comparison = begin_comparison(checks, name)
    whole = _RecomputeEach.apply(
        calls, parameters, joins, reuse, comparison, len(order), *tensors
    )
    return cast(Tensor, whole)


class _Joins(NamedTuple):
    """How outputs become one tensor: of so many channels, or without contents."""

    channels: int
    empty: bool


class _Call:
    """A module and its arguments, or their places among the tensors of all calls."""

    def __init__(self, module: nn.Module, given: tuple[Tensor | None, ...]) -> None:
        self.module, self.given = module, given
        self.places: list[int | None] = []
        self.channels = 0
        #: The place, among all that is compared, of the first tensor that its operations save.
        self.begins = 0


class _RecomputeEach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        calls: Sequence[_Call],
        parameters: Parameters,
        joins: _Joins,
        reuse: Collection[int],
        comparison: Comparison | None,
        n_inputs: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.calls, ctx.parameters, ctx.n_inputs = calls, parameters, n_inputs
        ctx.needs_grad, ctx.reuse = ctx.needs_input_grad[6 : 6 + n_inputs], reuse
        ctx.comparison = comparison
        ctx.recordings = []
        whole = _joined(_first_runs(ctx, tensors), joins)
        ctx.save_for_backward(*tensors)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward(grad)
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        grads = grad.split([call.channels for call in ctx.calls], dim=1)
        del grad
        saved = ctx.saved_tensors
        gradients = Gradients(ctx.parameters, saved[ctx.n_inputs :])
        sums: list[Tensor | None] = [None] * ctx.n_inputs
        owned = [len(ctx.calls) > 1] * ctx.n_inputs
        runs = zip(ctx.calls, ctx.recordings, grads, strict=True)
        for run, (call, recording, of_y) in enumerate(reversed([*runs])):
            leaves = [
                None if place is None
                else saved[place].detach().requires_grad_(ctx.needs_grad[place])
                for place in call.places
            ]  # fmt: skip
            with _compared_again(ctx.comparison, call):
                y = second_run(call.module, recording, gradients.leaves(run), *leaves)
            root = Root(y, of_y)
            del y, of_y  # what follows needs its graph only
            wanted = {
                i: x for i, x in enumerate(leaves) if x is not None and x.requires_grad
            }
            with recording.flags():
                slopes = gradients.backward(run, [root], [*wanted.values()])
            given = list(wanted)
            del leaves, root, wanted
            own = total = None
            for i, own in zip(given, slopes, strict=True):
                place = call.places[i]
                if i in ctx.reuse and own is not None:
                    own = saved[place].detach().copy_(own)
                total = sums[place]
                if total is None or own is None:
                    sums[place] = own if total is None else total
                else:
                    sums[place] = total.add_(own) if owned[place] else total + own
                    owned[place] = True
            del slopes, own, total  # gradients that were added up
        if ctx.comparison is not None:
            ctx.comparison.judge()
        return None, None, None, None, None, None, *sums, *gradients.values


def _first_runs(ctx: Any, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Run the modules without a graph and give what each returns."""
    for call in ctx.calls:
        given = [None if place is None else tensors[place] for place in call.places]
        if ctx.comparison is None:
            y, recording = first_run(call.module, *given)
        else:
            y, recording = _noted_run(ctx, call, given)
        ctx.recordings.append(recording)
        call.channels = y.shape[1]
        yield y.detach()


def _noted_run(
    ctx: Any, call: _Call, given: Sequence[Tensor | None]
) -> tuple[Tensor, RunRecord]:
    """Run a module with a graph, to note what its operations save, and drop the graph."""
    comparison: Comparison = ctx.comparison
    leaves = [
        None if x is None or place is None
        else x.detach().requires_grad_(ctx.needs_grad[place])
        for x, place in zip(given, call.places, strict=True)
    ]  # fmt: skip
    call.begins = comparison.count
    modules = modules_of(call.module)
    with (
        recorded(modules, leaves) as recording,
        torch.enable_grad(),
        saved_tensors_hooks(comparison.note, _not_needed),
    ):
        y = call.module(*leaves)
    return y.detach(), recording


def _not_needed(_: object) -> Tensor:
    raise RuntimeError("A graph that was built to be compared has no backward pass.")


@contextlib.contextmanager
def _compared_again(comparison: Comparison | None, call: _Call) -> Iterator[None]:
    """Compare what operations save for a while with what they saved in a first run."""
    if comparison is None:
        yield
        return
    place = call.begins

    def save(x: Tensor) -> Held:
        nonlocal place
        comparison.note_again(place, x)
        place += 1
        return Held(type(call.module).__name__, x.detach())

    with saved_tensors_hooks(save, lambda held: held.get()):
        yield


def _joined(parts: Iterable[Tensor], joins: _Joins) -> Tensor:
    """Put parts into one tensor as they come, along the channels."""
    whole: Tensor | None = None
    start = 0
    for part in parts:
        shape = (part.shape[0], joins.channels, *part.shape[2:])
        if joins.empty:
            whole = tangent_of(part, part.dtype, shape)
            continue
        if part.shape[1] == joins.channels:
            return part
        if whole is None:
            layout = format_of(part)
            whole = torch.empty(
                shape, dtype=part.dtype, device=part.device, memory_format=layout
            )
        end = start + part.shape[1]
        whole[:, start:end] = part
        start = end
    assert whole is not None
    return whole
