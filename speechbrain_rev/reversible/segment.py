"""The two ways to do without stored activations, as autograd functions.

``recompute`` keeps a module's inputs and runs it again in the backward pass.
``reconstruct`` keeps the outputs of a run of couplings and walks back from them
(Algorithm 1 of the memory-efficient speaker embedding paper): the graph of the run
that yields F(x2) for the inverse also yields the gradients, so that each residual
function runs exactly twice in a training step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from speechbrain_rev.reversible.coupling import (
    AdditiveCoupling,
    arguments,
    check_residual,
    version_of,
)
from speechbrain_rev.reversible.formats import StreamFormat
from speechbrain_rev.reversible.gradients import (
    Gradients,
    Parameters,
    Root,
    Total,
)
from speechbrain_rev.reversible.monitor import StreamNotes, checksum
from speechbrain_rev.reversible.replay import Recording, first_run, second_run
from speechbrain_rev.reversible.streams import Stream, Streams, tangent_of

_NO_DOUBLE_BACKWARD = (
    "Activations that were not stored cannot be differentiated twice "
    "(create_graph=True was asked for). Use mode='store' for this network."
)


def recompute(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    """Run a module and keep its inputs only; it runs again in the backward pass.

    Parameters
    ----------
    module : nn.Module
        Any module. Random numbers, autocast and batch statistics of the second run
        are those of the first; running statistics are updated once.
    *inputs, **keywords
        Its arguments. Gradients flow to tensors, in tuples, lists and dicts as well.

    Returns
    -------
    outputs
        What the module returns.

    Raises
    ------
    RuntimeError
        If the module wrote into its input, uses tensors with gradients that are
        neither its inputs nor its parameters, cannot run again, or on an attempt to
        differentiate twice.
    """
    return recompute_each([module], [(inputs, keywords)])[0]


def recompute_each(
    modules: Sequence[nn.Module],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
) -> list[Any]:
    """Recompute several modules that share inputs, as ``recompute`` does one.

    In the backward pass they run one after the other, the last one first, and what they
    hand down to a shared input is added up in place.

    Parameters
    ----------
    modules : sequence of nn.Module
        The modules.
    arguments : sequence of tuple
        Positional arguments and keywords of each.

    Returns
    -------
    list
        What each module returns.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return torch.compiler.disable(recompute_each)(modules, arguments)
    for module in modules:
        refuse_what_cannot_run_again(module)
    pairs = zip(modules, arguments, strict=True)
    calls = [_Call(module, *given) for module, given in pairs]
    inputs: dict[int, Tensor] = {id(x): x for call in calls for x in call.tensors}
    order = {key: place for place, key in enumerate(inputs)}
    parameters = Parameters(modules[::-1])
    tensors = [*inputs.values(), *parameters.tensors]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        # Nothing is stored either; a tensor that is neither registered nor given gets
        # its gradient.
        pairs = zip(modules, arguments, strict=True)
        return [module(*given, **keywords) for module, (given, keywords) in pairs]
    for call in calls:
        call.places = [order[id(x)] for x in call.tensors]
        call.tensors = []  # autograd holds them from here on
    del inputs
    outputs = iter(_Recompute.apply(calls, parameters, len(order), *tensors))
    return [call.returned(outputs) for call in calls]


def reconstruct(
    blocks: Sequence[AdditiveCoupling],
    streams: Streams,
    mask: Tensor | None,
    notes: StreamNotes,
    start: int,
    chunk: int | None,
) -> Streams:
    """Run couplings and keep only what the last one returns.

    Parameters
    ----------
    blocks : sequence of AdditiveCoupling
        At least one.
    streams : Streams
        What the first one takes.
    mask : torch.Tensor or None
        Handed on to the residual functions.
    notes : StreamNotes
        Of this pass through the chain.
    start : int
        The first block's place in the chain.
    chunk : int or None
        Hidden channels at a time.

    Returns
    -------
    Streams
        What the last one returns.
    """
    first, second, format, poison, _ = streams
    # F and G in turn, each as its pieces.
    halves = [pieces_of(f, chunk) for block in blocks for f in (block.f, block.g)]
    parameters = Parameters([f for half in reversed(halves) for f in reversed(half)])
    outputs = _Reconstruct.apply(
        halves, parameters, format, notes, start,
        mask,  # saved, it has no gradient
        first.value, second.value, first.tangent, second.tangent,
        *parameters.tensors,
    )  # fmt: skip
    y1, y2, tangent1, tangent2 = outputs
    return Streams(Stream(y1, tangent1), Stream(y2, tangent2), format, poison)


def pieces_of(f: nn.Module, chunk: int | None) -> Sequence[nn.Module]:
    """List functions that add up to a residual function, itself if it is not split.

    Parameters
    ----------
    f : nn.Module
        A residual function. Only what its own class says about pieces is asked for: a
        class derived from it may compute something else.
    chunk : int or None
        Hidden channels of a piece.

    Returns
    -------
    sequence of nn.Module
        In the order in which they are added.
    """
    if chunk is None or "pieces" not in vars(type(f)):
        return [f]
    return f.pieces(chunk)  # type: ignore[operator]


def has_hooks(module: nn.Module) -> bool:
    """Whether a module's call has hooks that look at what goes in or comes out."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def refuse_what_cannot_run_again(module: nn.Module) -> None:
    """Refuse modules whose parameters cannot be replaced for a second run.

    Raises
    ------
    RuntimeError
        If FSDP shards the parameters, which are gathered around each module's forward
        pass only; if the module is scripted; or inside ``parametrize.cached()``, which
        would hand weights made without a graph to the second run.
    """
    sharded = any(
        getattr(m, "_is_fsdp_managed_module", False) for m in module.modules()
    ) or any(hasattr(p, "device_mesh") for p in module.parameters())
    if sharded:
        raise RuntimeError(
            "Reversible and recomputed blocks cannot run a second time on parameters "
            "sharded by FSDP. Use DistributedDataParallel, or mode='store'."
        )
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise RuntimeError(
            "A scripted module cannot run a second time on other leaves. Use the "
            "module before torch.jit.script, or mode='store'."
        )
    if parametrize._cache_enabled and any(
        map(parametrize.is_parametrized, module.modules())
    ):
        raise RuntimeError(
            "Inside parametrize.cached() the second run would get weights without a "
            "graph. Leave the context, or use mode='store'."
        )


class _Call:
    """A module's arguments and what it returned, with the tensors taken out."""

    def __init__(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self.module = module
        leaves, self._spec = tree_flatten((inputs, keywords))
        self.tensors = [x for x in leaves if isinstance(x, Tensor)]
        self._others = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
        #: Where each tensor is among those of all calls.
        self.places: list[int] = []

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, dict[str, Any]]:
        """Put tensors back in their places among the arguments."""
        return _filled(self._others, tensors, self._spec)

    def keep_returned(self, outputs: Any) -> tuple[Tensor, ...]:
        """Note the structure of what was returned, and give its tensors."""
        leaves, self._returned_spec = tree_flatten(outputs)
        self._returned = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
        self.outputs = sum(x is _TENSOR for x in self._returned)
        return tuple(x for x in leaves if isinstance(x, Tensor))

    def returned(self, tensors: Iterator[Tensor]) -> Any:
        """Put the next tensors in their places in what was returned."""
        return _filled(self._returned, tensors, self._returned_spec)


_TENSOR = object()


def _filled(leaves: Sequence[Any], tensors: Iterable[Tensor], spec: TreeSpec) -> Any:
    rest = iter(tensors)
    return tree_unflatten([next(rest) if x is _TENSOR else x for x in leaves], spec)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        calls: Sequence[_Call],
        parameters: Parameters,
        n_inputs: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.calls, ctx.parameters, ctx.n_inputs = calls, parameters, n_inputs
        ctx.needs_grad = ctx.needs_input_grad[3 : 3 + n_inputs]
        ctx.recordings = []
        returned: list[Tensor] = []
        for call in calls:
            inputs = [tensors[place] for place in call.places]
            versions = [x._version for x in inputs]
            args, keywords = call.arguments(inputs)
            outputs, recording = first_run(call.module, *args, **keywords)
            if [x._version for x in inputs] != versions:
                raise RuntimeError(
                    f"{type(call.module).__name__} wrote into its input and cannot run "
                    "again. Use inplace=False in its first layer; outside a coupling "
                    "mode='store' works, too."
                )
            ctx.recordings.append(recording)
            # An output that is an input, or a part of one, must not be taken for it.
            returned += [y.detach() for y in call.keep_returned(outputs)]
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(y for y in returned if not _can_have_grad(y)))
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        saved = ctx.saved_tensors
        gradients = Gradients(ctx.parameters, saved[ctx.n_inputs :])
        sums: list[Tensor | None] = [None] * ctx.n_inputs
        owned = [len(ctx.calls) > 1] * ctx.n_inputs
        end = len(grads)
        runs = enumerate(
            zip(reversed(ctx.calls), reversed(ctx.recordings), strict=True)
        )
        for run, (call, recording) in runs:
            begin, end = end - call.outputs, end
            leaves = [
                saved[place].detach().requires_grad_(ctx.needs_grad[place])
                for place in call.places
            ]
            args, keywords = call.arguments(leaves)
            outputs = second_run(
                call.module, recording, gradients.leaves(run), *args, **keywords
            )
            ys = [y for y in tree_leaves(outputs) if isinstance(y, Tensor)]
            roots = [Root(y, g) for y, g in zip(ys, grads[begin:end], strict=True)]
            del outputs, ys, args, keywords  # what follows needs their graph only
            wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
            with recording.flags():
                found = gradients.backward(run, roots, [leaves[i] for i in wanted])
            del leaves, roots
            grad = total = None
            for i, grad in zip(wanted, found, strict=True):
                place = call.places[i]
                total = sums[place]
                if total is None or grad is None:
                    sums[place] = grad if total is None else total
                else:
                    sums[place] = total.add_(grad) if owned[place] else total + grad
                    owned[place] = True
            del found, grad, total  # gradients that were added up
            end = begin
        return None, None, None, *sums, *gradients.found


def _can_have_grad(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _Reconstruct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        halves: Sequence[Sequence[nn.Module]],
        parameters: Parameters,
        format: StreamFormat,
        notes: StreamNotes,
        start: int,
        mask: Tensor | None,
        x1: Tensor,
        x2: Tensor,
        tangent1: Tensor,
        tangent2: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.halves, ctx.parameters, ctx.format = halves, parameters, format
        ctx.recordings, ctx.dtype = [], tangent1.dtype
        # Hooks may keep what they saw, which must not change in their hands.
        ctx.in_place = not any(map(_is_watched, parameters.modules))
        ctx.notes, ctx.expected = notes, None
        if notes.mismatches is not None:
            ctx.expected = checksum([x1, x2])
        changed, kept = x1, x2
        # The given streams stay intact; later ones are this function's own.
        adds = itertools.chain([format.add, format.add], itertools.repeat(format.add_))
        for i, half in enumerate(halves, 1 + 2 * start):
            add = next(adds) if ctx.in_place else format.add
            x = format.decode(kept, ctx.dtype)
            for f in half:
                y, recording = _first_run(f, x, mask)
                changed = add(changed, y, notes.row(i), spend=_is_spent(f, half))
                del y
                add = format.add_ if ctx.in_place else format.add
                ctx.recordings.append(recording)
            del x
            changed, kept = kept, changed
        y1, y2 = changed, kept
        ctx.mark_non_differentiable(y1, y2)
        ctx.save_for_backward(y1, y2, mask, *tensors)
        return y1, y2, tangent_of(y1, ctx.dtype), tangent_of(y2, ctx.dtype)

    @staticmethod
    def backward(
        ctx: Any, _1: Any, _2: Any, grad1: Tensor | None, grad2: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        y1, y2, mask, *tensors = ctx.saved_tensors
        if grad1 is None:
            grad1 = torch.zeros_like(y1, dtype=ctx.dtype)
        if grad2 is None:
            grad2 = torch.zeros_like(y2, dtype=ctx.dtype)
        if _graph_is_kept():
            y1, y2 = y1.clone(), y2.clone()
        gradients = Gradients(ctx.parameters, tensors)
        kept, changed = y1, y2
        of_kept, of_changed = Total(grad1, ctx.in_place), Total(grad2, ctx.in_place)
        subtract = ctx.format.subtract_ if ctx.in_place else ctx.format.subtract
        runs = enumerate(reversed(ctx.recordings))
        # Undone in reverse order: G sees the y1 that it saw in the forward.
        for half in reversed(ctx.halves):
            x = ctx.format.decode(kept, ctx.dtype)
            for f in reversed(half):
                run, recording = next(runs)
                leaf = x.detach().requires_grad_()
                leaves = gradients.leaves(run)
                y = second_run(f, recording, leaves, *arguments(leaf, mask))
                changed = subtract(changed, y.detach(), spend=_is_spent(f, half))
                root = Root(y, of_changed.value)
                del y  # what follows needs its graph only
                with recording.flags():
                    of_kept.add(gradients.backward(run, [root], [leaf])[0])
                del leaf, leaves, root
            del x
            kept, changed, of_kept, of_changed = changed, kept, of_changed, of_kept
        if ctx.expected is not None:
            differs = checksum([kept, changed]) != ctx.expected
            ctx.notes.mismatches.add_(differs.any())
        return (None,) * 8 + (of_kept.value, of_changed.value, *gradients.found)


def _first_run(
    f: nn.Module, x: Tensor, mask: Tensor | None
) -> tuple[Tensor, Recording]:
    version = version_of(x)
    y, recording = first_run(f, *arguments(x, mask))
    check_residual(f, x, y, version)
    return y, recording


def _is_spent(f: nn.Module, half: Sequence[nn.Module]) -> bool:
    """Whether nothing needs what f returned: pieces end in a sum that no graph keeps."""
    return len(half) > 1


def _is_watched(module: nn.Module) -> bool:
    return any(map(has_hooks, module.modules()))


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _graph_is_kept() -> bool:
    """Whether the backward pass under way will be allowed a second time."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
