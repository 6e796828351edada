"""Gradients of second runs: leaves in the parameters' place, and who gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speechbrain_rev.reversible.replay import Place, places_of


class Parameters:
    """The parameters of modules that run one after the other in the backward pass.

    A parameter of several runs is listed for each: autograd then adds its gradients up
    one by one in the order of the runs, as it does where activations are stored.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.tensors: list[Tensor] = []
        self.places: list[dict[Place, int]] = []
        for module in modules:
            positions: dict[int, int] = {}
            places: dict[Place, int] = {}
            for place, tensor in places_of(module):
                if id(tensor) not in positions:
                    positions[id(tensor)] = len(self.tensors)
                    self.tensors.append(tensor)
                places[place] = positions[id(tensor)]
            self.places.append(places)


class Gradients:
    """Detached leaves in the parameters' place, and their gradients, by run."""

    def __init__(self, parameters: Parameters, saved: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._leaves = [t.detach().requires_grad_(t.requires_grad) for t in saved]
        self.found: list[Tensor | None] = [None] * len(saved)

    def leaves(self, run: int) -> dict[Place, Tensor]:
        """Give the leaves of one run's parameters by place."""
        places = self._parameters.places[run]
        return {place: self._leaves[i] for place, i in places.items()}

    def backward(
        self,
        run: int,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Keep the gradients of a run's parameters; return those of its inputs."""
        own = sorted(set(self._parameters.places[run].values()))
        used = [i for i in own if self._leaves[i].requires_grad]
        pairs = [
            (y, grad.to(y.dtype))
            for y, grad in zip(outputs, grads, strict=True)
            if y.requires_grad
        ]
        if not pairs:
            return [None] * len(inputs)
        leaves = [*inputs, *(self._leaves[i] for i in used)]
        module = self._parameters.modules[run]
        _refuse_other_leaves(module, [y for y, _ in pairs], leaves)
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            leaves,
            [grad for _, grad in pairs],
            allow_unused=True,
        )
        given = {grad.untyped_storage()._cdata for _, grad in pairs}
        for i, grad in zip(used, found[len(inputs) :], strict=True):
            if grad is not None and grad.untyped_storage()._cdata in given:
                # What was handed in is added to later; this must not change with it.
                grad = grad.clone()
            self.found[i] = grad
        return list(found[: len(inputs)])


def _refuse_other_leaves(
    module: nn.Module, outputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> None:
    """Refuse a graph that reaches tensors whose gradient would be lost."""
    known = {id(leaf) for leaf in leaves}
    nodes = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise RuntimeError(
                f"{type(module).__name__} uses a tensor of shape "
                f"{list(variable.shape)} that needs a gradient and is neither its "
                "input nor its registered parameter. Register it, pass it in, or use "
                "mode='store'. (Replicas of DataParallel have none registered: use "
                "DistributedDataParallel.)"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


class Total:
    """A stream's gradient: the given one may be other nodes' too, later sums are ours."""

    def __init__(self, given: Tensor, in_place: bool) -> None:
        self.value, self._owned, self._in_place = given, False, in_place

    def add(self, slope: Tensor | None) -> None:
        """Add what a residual function hands down, if it hands down anything."""
        if slope is None:
            return
        self.value = self.value.add_(slope) if self._owned else self.value + slope
        self._owned = self._in_place
