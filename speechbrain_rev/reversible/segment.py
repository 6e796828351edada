"""The two ways to do without stored activations, as autograd functions.

``recompute`` keeps a module's inputs and runs it again in the backward pass.
``reconstruct`` keeps the outputs of a run of couplings and walks back from them
(Algorithm 1 of the memory-efficient speaker embedding paper): the graph of the run
that yields F(x2) for the inverse also yields the gradients, so that each residual
function runs exactly twice in a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


def recompute(module: nn.Module, *inputs: Any) -> Any:
    """Run a module and keep its inputs only; it runs again in the backward pass.

    Parameters
    ----------
    module : nn.Module
        Any module. Random numbers, autocast and batch statistics of the second run
        are those of the first; running statistics are updated once.
    *inputs
        Its positional arguments. Gradients flow to those that are tensors.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        What the module returns.

    Raises
    ------
    RuntimeError
        If the parameters are sharded, or on an attempt to differentiate twice.
    """
    if not torch.is_grad_enabled():
        return module(*inputs)
    refuse_sharded(module)
    parameters = _Parameters([module])
    outputs = _Recompute.apply(
        module, parameters, len(inputs), *inputs, *parameters.tensors
    )
    return outputs[0] if len(outputs) == 1 else outputs


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
            self.sums[i] = grad if total is None or grad is None else total + grad
        return list(found[: len(inputs)])


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, parameters: _Parameters, n_inputs: int, *rest: Any
    ) -> tuple[Tensor, ...]:
        inputs = rest[:n_inputs]
        ctx.module, ctx.parameters = module, parameters
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.tensor_inputs = [isinstance(x, Tensor) for x in inputs]
        ctx.needs_grad = ctx.needs_input_grad[3 : 3 + n_inputs]
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.n_tensors = len(tensors)
        versions = [x._version for x in tensors]
        ctx.autocast = Autocast.now(tensors[0].device)
        with ctx.autocast():
            outputs, ctx.recording = first_run(module, *inputs)
        if [x._version for x in tensors] != versions:
            raise RuntimeError(
                f"{type(module).__name__} wrote into its input and cannot run again. "
                "Use inplace=False in its first layer, or mode='store'."
            )
        ctx.save_for_backward(*tensors, *rest[n_inputs:])
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # An output that is an input, or a part of one, must not be taken for it.
        return tuple(y.detach() for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        saved = ctx.saved_tensors
        tensors = iter(saved[: ctx.n_tensors])
        gradients = _Gradients(ctx.parameters, saved[ctx.n_tensors :])
        inputs = [
            next(tensors).detach().requires_grad_(needs) if is_tensor else other
            for is_tensor, other, needs in zip(
                ctx.tensor_inputs, ctx.others, ctx.needs_grad, strict=True
            )
        ]
        with ctx.autocast():
            outputs = second_run(
                ctx.module, ctx.recording, gradients.leaves(ctx.module), *inputs
            )
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [i for i, needs in enumerate(ctx.needs_grad) if needs]
        found = gradients.backward(
            ctx.module, outputs, grads, [inputs[i] for i in wanted]
        )
        input_grads: list[Tensor | None] = [None] * len(inputs)
        for i, grad in zip(wanted, found, strict=True):
            input_grads[i] = grad
        return None, None, None, *input_grads, *gradients.sums


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
        # The given gradients may be other nodes' too; sums of later blocks are ours.
        accumulate: Callable[[Tensor, Tensor], Tensor] = torch.add
        recordings = reversed(ctx.recordings)
        with ctx.autocast():
            for block, (f, g) in zip(reversed(ctx.blocks), recordings, strict=True):
                # Undone in reverse order: G sees the y1 that it saw in the forward.
                slope = _undo(ctx, block.g, g, gradients, y1, y2, grad2)
                grad1 = grad1 if slope is None else accumulate(grad1, slope)
                del slope
                slope = _undo(ctx, block.f, f, gradients, y2, y1, grad1)
                grad2 = grad2 if slope is None else accumulate(grad2, slope)
                del slope
                accumulate = Tensor.add_
        return None, None, None, None, None, None, grad1, grad2, *gradients.sums


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
