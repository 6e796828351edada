"""The two ways to do without stored activations, as autograd functions.

``recompute`` keeps a module's inputs and runs it again in the backward pass.
``reconstruct`` keeps the outputs of a run of couplings and walks back from them
(Algorithm 1 of the memory-efficient speaker embedding paper): the graph of the run
that yields F(x2) for the inverse also yields the gradients, so that each residual
function runs exactly twice in a training step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from speechbrain_rev.reversible.coupling import (
    AdditiveCoupling,
    arguments,
    check_residual,
)
from speechbrain_rev.reversible.replay import (
    Autocast,
    Recording,
    first_run,
    second_run,
)
from speechbrain_rev.reversible.streams import FloatFormat, Stream, Streams

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
        If the module wrote into its input, if the parameters are sharded, or on an
        attempt to differentiate twice.
    """
    if not torch.is_grad_enabled():
        return module(*inputs, **keywords)
    refuse_sharded(module)
    call = _Call(module, inputs, keywords)
    parameters = _Parameters([module])
    outputs = _Recompute.apply(call, parameters, *call.tensors, *parameters.tensors)
    call.tensors = []  # autograd holds them from here on
    return call.returned(outputs)


def reconstruct(
    blocks: Sequence[AdditiveCoupling], streams: Streams, mask: Tensor | None
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

    Returns
    -------
    Streams
        What the last one returns.
    """
    first, second, format = streams
    parameters = _Parameters([f for block in blocks for f in (block.f, block.g)])
    outputs = _Reconstruct.apply(
        blocks, parameters, format, mask,
        first.value, second.value, first.tangent, second.tangent,
        *parameters.tensors,
    )  # fmt: skip
    y1, y2, tangent1, tangent2 = outputs
    return Streams(Stream(y1, tangent1), Stream(y2, tangent2), format)


def refuse_sharded(module: nn.Module) -> None:
    """Refuse parameters that this process holds a part of only.

    Raises
    ------
    RuntimeError
        If the module is managed by FSDP: its parameters are gathered around each
        module's forward pass and would be missing in a second run.
    """
    sharded = any(
        getattr(m, "_is_fsdp_managed_module", False) for m in module.modules()
    ) or any(hasattr(p, "device_mesh") for p in module.parameters())
    if sharded:
        raise RuntimeError(
            "Reversible and recomputed blocks cannot run a second time on parameters "
            "sharded by FSDP. Use DistributedDataParallel, or mode='store'."
        )


class _Parameters:
    """The parameters of some modules, each once, and their names in each module."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.names: dict[nn.Module, dict[str, int]] = {}
        self.tensors: list[Tensor] = []
        positions: dict[int, int] = {}
        for module in modules:
            names = self.names.setdefault(module, {})
            for name, tensor in module.named_parameters(remove_duplicate=False):
                if id(tensor) not in positions:
                    positions[id(tensor)] = len(self.tensors)
                    self.tensors.append(tensor)
                names[name] = positions[id(tensor)]


class _Gradients:
    """Detached leaves in the parameters' place, and the sums of their gradients."""

    def __init__(self, parameters: _Parameters, tensors: Sequence[Tensor]) -> None:
        self._names = parameters.names
        self._leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self.sums: list[Tensor | None] = [None] * len(tensors)

    def leaves(self, module: nn.Module) -> dict[str, Tensor]:
        """Name the leaves as the module names its parameters."""
        return {name: self._leaves[i] for name, i in self._names[module].items()}

    def backward(
        self,
        module: nn.Module,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Add a module's parameter gradients to the sums; return its inputs'."""
        used = sorted(
            i
            for i in set(self._names[module].values())
            if self._leaves[i].requires_grad
        )
        pairs = [
            (y, grad.to(y.dtype))
            for y, grad in zip(outputs, grads, strict=True)
            if y.requires_grad
        ]
        if not pairs:
            return [None] * len(inputs)
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            [*inputs, *(self._leaves[i] for i in used)],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
        for i, grad in zip(used, found[len(inputs) :], strict=True):
            total = self.sums[i]
            if grad is not None:
                self.sums[i] = grad if total is None else total + grad
        return list(found[: len(inputs)])


class _Call:
    """A module's arguments and what it returned, with the tensors taken out."""

    def __init__(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self.module = module
        leaves, self._spec = tree_flatten((inputs, keywords))
        self.tensors = [x for x in leaves if isinstance(x, Tensor)]
        self._others = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]

    @property
    def device(self) -> torch.device:
        """Where the call runs."""
        tensors = [*self.tensors, *self.module.parameters()]
        return tensors[0].device if tensors else torch.device("cpu")

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, dict[str, Any]]:
        """Put tensors back in their places among the arguments."""
        return _filled(self._others, tensors, self._spec)

    def keep_returned(self, outputs: Any) -> tuple[Tensor, ...]:
        """Note the structure of what was returned, and give its tensors."""
        leaves, self._returned_spec = tree_flatten(outputs)
        self._returned = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
        return tuple(x for x in leaves if isinstance(x, Tensor))

    def returned(self, tensors: Sequence[Tensor]) -> Any:
        """Put tensors back in their places in what was returned."""
        return _filled(self._returned, tensors, self._returned_spec)


_TENSOR = object()


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor], spec: TreeSpec) -> Any:
    rest = iter(tensors)
    return tree_unflatten([next(rest) if x is _TENSOR else x for x in leaves], spec)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, parameters: _Parameters, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.parameters = call, parameters
        ctx.n_inputs = len(call.tensors)
        ctx.needs_grad = ctx.needs_input_grad[2 : 2 + ctx.n_inputs]
        inputs = tensors[: ctx.n_inputs]
        versions = [x._version for x in inputs]
        args, keywords = call.arguments(inputs)
        ctx.autocast = Autocast.now(call.device)
        with ctx.autocast():
            outputs, ctx.recording = first_run(call.module, *args, **keywords)
        if [x._version for x in inputs] != versions:
            raise RuntimeError(
                f"{type(call.module).__name__} wrote into its input and cannot run "
                "again. Use inplace=False in its first layer, or mode='store'."
            )
        ctx.save_for_backward(*tensors)
        # An output that is an input, or a part of one, must not be taken for it.
        returned = tuple(y.detach() for y in call.keep_returned(outputs))
        ctx.mark_non_differentiable(*(y for y in returned if not _can_have_grad(y)))
        return returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        saved = ctx.saved_tensors
        gradients = _Gradients(ctx.parameters, saved[ctx.n_inputs :])
        inputs = [
            x.detach().requires_grad_(needs)
            for x, needs in zip(saved[: ctx.n_inputs], ctx.needs_grad, strict=True)
        ]
        args, keywords = ctx.call.arguments(inputs)
        module = ctx.call.module
        with ctx.autocast():
            leaves = gradients.leaves(module)
            outputs = second_run(module, ctx.recording, leaves, *args, **keywords)
        returned = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        wanted = [i for i, needs in enumerate(ctx.needs_grad) if needs]
        found = gradients.backward(module, returned, grads, [inputs[i] for i in wanted])
        input_grads: list[Tensor | None] = [None] * len(inputs)
        for i, grad in zip(wanted, found, strict=True):
            input_grads[i] = grad
        return None, None, *input_grads, *gradients.sums


def _can_have_grad(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _Total:
    """A stream's gradient: the given one may be other nodes' too, later sums are ours."""

    def __init__(self, given: Tensor) -> None:
        self.value, self._owned = given, False

    def add(self, slope: Tensor | None) -> None:
        """Add what a residual function hands down, if it hands down anything."""
        if slope is None:
            return
        self.value = self.value.add_(slope) if self._owned else self.value + slope
        self._owned = True


class _Reconstruct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[AdditiveCoupling],
        parameters: _Parameters,
        format: FloatFormat,
        mask: Tensor | None,
        x1: Tensor,
        x2: Tensor,
        tangent1: Tensor,
        tangent2: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.blocks, ctx.parameters = blocks, parameters
        ctx.format, ctx.mask = format, mask
        ctx.autocast = Autocast.now(x1.device)
        ctx.recordings = []
        y1, y2 = x1, x2
        # The given streams stay intact; later ones are this function's own.
        add = format.add
        with ctx.autocast():
            for block in blocks:
                f, f_recording = _first_run(block.f, format.decode(y2), mask)
                y1 = add(y1, f)
                del f
                g, g_recording = _first_run(block.g, format.decode(y1), mask)
                y2 = add(y2, g)
                del g
                add = format.add_
                ctx.recordings.append((f_recording, g_recording))
        ctx.mark_non_differentiable(y1, y2)
        ctx.save_for_backward(y1, y2, *tensors)
        return y1, y2, format.tangent(y1), format.tangent(y2)

    @staticmethod
    def backward(
        ctx: Any, _1: Any, _2: Any, grad1: Tensor, grad2: Tensor
    ) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        y1, y2, *tensors = ctx.saved_tensors
        if _graph_is_kept():
            y1, y2 = y1.clone(), y2.clone()
        gradients = _Gradients(ctx.parameters, tensors)
        total1, total2 = _Total(grad1), _Total(grad2)
        recordings = reversed(ctx.recordings)
        with ctx.autocast():
            for block, (f, g) in zip(reversed(ctx.blocks), recordings, strict=True):
                # Undone in reverse order: G sees the y1 that it saw in the forward.
                total1.add(_undo(ctx, block.g, g, gradients, y1, y2, total2.value))
                total2.add(_undo(ctx, block.f, f, gradients, y2, y1, total1.value))
        return (None,) * 6 + (total1.value, total2.value, *gradients.sums)


def _first_run(
    f: nn.Module, x: Tensor, mask: Tensor | None
) -> tuple[Tensor, Recording]:
    version = x._version
    y, recording = first_run(f, *arguments(x, mask))
    check_residual(f, x, y, version)
    return y, recording


def _undo(
    ctx: Any,
    f: nn.Module,
    recording: Recording,
    gradients: _Gradients,
    kept: Tensor,
    changed: Tensor,
    grad: Tensor,
) -> Tensor | None:
    """Take f(kept) out of the other stream; return the gradient that f hands down."""
    x = ctx.format.decode(kept).detach().requires_grad_()
    y = second_run(f, recording, gradients.leaves(f), *arguments(x, ctx.mask))
    ctx.format.subtract_(changed, y.detach())
    return gradients.backward(f, [y], [grad], [x])[0]


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _graph_is_kept() -> bool:
    """Whether the backward pass under way will be allowed a second time."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
