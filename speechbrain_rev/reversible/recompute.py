"""To compute activations again instead of storing them, as an autograd function.

A module's inputs are kept and it runs again in the backward pass; of several modules
that share an input, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from speechbrain_rev.kernels.layout import format_of
from speechbrain_rev.reversible.gradients import (
    Gradients,
    Parameters,
    Root,
)
from speechbrain_rev.reversible.replay import (
    first_run,
    repeating,
    running,
    second_run,
)
from speechbrain_rev.reversible.streams import tangent_of

_NO_DOUBLE_BACKWARD = (
    "Activations that were not stored cannot be differentiated twice "
    "(create_graph=True was asked for). Use mode='store' for this network."
)


def refuse_double_backward() -> None:
    """Refuse to differentiate what has no graph of its own."""
    if torch.is_grad_enabled():
        raise RuntimeError(_NO_DOUBLE_BACKWARD)


class Recompute(nn.Module):
    """A module whose activations are computed again instead of being stored.

    Unlike ``torch.utils.checkpoint`` it updates running statistics once.

    Parameters
    ----------
    module : nn.Module
        Any module. Tensors in tuples, lists and dicts are seen.

    Examples
    --------
    >>> block = Recompute(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout()))
    >>> block(torch.randn(2, 4)).shape
    torch.Size([2, 8])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module.

        Parameters
        ----------
        *inputs, **keywords
            The module's arguments.

        Returns
        -------
        outputs
            What the module returns.
        """
        if trains(self):
            return recompute(self.module, *inputs, **keywords)
        return self.module(*inputs, **keywords)


def trains(module: nn.Module) -> bool:
    """Whether a module's call is part of a training step.

    The first run of an outer module is, though it has no graph.
    """
    return module.training and (torch.is_grad_enabled() or running())


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
    return _recompute([module], [(inputs, keywords)], None, ())[0]


def recompute_each(
    modules: Sequence[nn.Module],
    arguments: Sequence[tuple[Any, ...]],
    *,
    channels: int,
    spend: Collection[int] = (),
    last: bool = False,
) -> Tensor:
    """Recompute modules whose outputs are parts of one tensor, as ``recompute`` does.

    In the backward pass they run one after the other, the last one first, and what they
    hand down to a shared input is added up in place.

    Parameters
    ----------
    modules : sequence of nn.Module
        The modules.
    arguments : sequence of tuple
        Arguments of each.
    channels : int
        Of all outputs together.
    spend : collection of int
        Which tensors among the arguments of each are read by this module alone, once: in
        the backward pass their storage takes their gradients.
    last : bool
        Whether an outer module returns the result as it is: in its second run, where
        only the graph is needed, nothing is put together.

    Returns
    -------
    torch.Tensor, [batch, channels, ...]
        What the modules return, one after the other along the channels.
    """
    given: list[tuple[tuple[Any, ...], dict[str, Any]]]
    given = [(inputs, {}) for inputs in arguments]
    joins = _Joins(channels, empty=last and repeating())
    whole: Tensor = _recompute(modules, given, joins, spend)[0]
    return whole


class _Joins(NamedTuple):
    """How outputs become one tensor: of so many channels, or without contents."""

    channels: int
    empty: bool


def _recompute(
    modules: Sequence[nn.Module],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    joins: _Joins | None,
    spend: Collection[int],
) -> list[Any]:
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return torch.compiler.disable(_recompute)(modules, arguments, joins, spend)
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
        outputs = (m(*x, **k) for m, (x, k) in zip(modules, arguments, strict=True))
        if joins is None:
            return list(outputs)
        # Within a network that is recomputed as a whole others read this.
        return [_joined(outputs, joins._replace(empty=False))]
    for call in calls:
        call.places = [order[id(x)] for x in call.tensors]
        call.tensors = []  # autograd holds them from here on
    del inputs
    returned = _Recompute.apply(calls, parameters, joins, spend, len(order), *tensors)
    if joins is not None:
        return list(returned)
    rest = iter(returned)
    return [call.returned(rest) for call in calls]


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
        self.channels = 0
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
        if isinstance(outputs, Tensor) and outputs.dim() > 1:
            self.channels = outputs.shape[1]
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
        joins: _Joins | None,
        spend: Collection[int],
        n_inputs: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.calls, ctx.parameters, ctx.n_inputs = calls, parameters, n_inputs
        ctx.needs_grad, ctx.spend = ctx.needs_input_grad[5 : 5 + n_inputs], spend
        ctx.joins, ctx.recordings = joins is not None, []
        runs = _first_runs(ctx, tensors)
        parts = (y for outputs in runs for y in outputs)
        returned = list(parts) if joins is None else [_joined(parts, joins)]
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(y for y in returned if not _can_have_grad(y)))
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        if ctx.joins:
            grads = grads[0].split([call.channels for call in ctx.calls], dim=1)
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
                if i in ctx.spend and grad is not None:
                    grad = saved[place].detach().copy_(grad)
                total = sums[place]
                if total is None or grad is None:
                    sums[place] = grad if total is None else total
                else:
                    sums[place] = total.add_(grad) if owned[place] else total + grad
                    owned[place] = True
            del found, grad, total  # gradients that were added up
            end = begin
        return None, None, None, None, None, *sums, *gradients.found


def _first_runs(ctx: Any, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Run the modules without a graph and give what each returns."""
    for call in ctx.calls:
        inputs = [tensors[place] for place in call.places]
        versions = [x._version for x in inputs]
        args, keywords = call.arguments(inputs)
        outputs, recording = first_run(call.module, *args, **keywords)
        if [x._version for x in inputs] != versions:
            raise RuntimeError(
                f"{type(call.module).__name__} wrote into its input and cannot run "
                "again. Use inplace=False in its first layer; outside a coupling "
                "mode='store' works, too, and so does leaving it out of "
                "recompute_blocks."
            )
        ctx.recordings.append(recording)
        # An output that is an input, or a part of one, must not be taken for it.
        tensors_returned = [y.detach() for y in call.keep_returned(outputs)]
        del outputs
        yield tensors_returned


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


def _can_have_grad(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
