"""Gradients of second runs: leaves in the parameters' place, and who gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from speechbrain_rev.reversible.replay import Place, places_of, stand_in


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
        self._leaves = [*map(stand_in, saved)]
        self.found: list[Tensor | None] = [None] * len(saved)

    def leaves(self, run: int) -> dict[Place, Tensor]:
        """Give the leaves of one run's parameters by place."""
        places = self._parameters.places[run]
        return {place: self._leaves[i] for place, i in places.items()}

    def keep(self, run: int, place: Place, grad: Tensor | None) -> None:
        """Keep a gradient of a run's parameter that was computed without a graph."""
        self.found[self._parameters.places[run][place]] = grad

    def backward(
        self, run: int, roots: Sequence[Root], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Keep the gradients of a run's parameters; return those of its inputs."""
        own = sorted(set(self._parameters.places[run].values()))
        used = [i for i in own if self._leaves[i].requires_grad]
        given = [root for root in roots if root.edge is not None]
        if not given:
            return [None] * len(inputs)
        leaves = [*inputs, *(self._leaves[i] for i in used)]
        _refuse_other_leaves(self._parameters.modules[run], given, leaves)
        found: Sequence[Tensor | None] = torch.autograd.grad(
            [root.edge for root in given],  # type: ignore[arg-type]
            leaves,
            [root.grad for root in given],
            allow_unused=True,
        )
        storages = {root.grad.untyped_storage()._cdata for root in given}
        for i, grad in zip(used, found[len(inputs) :], strict=True):
            if grad is None:
                continue
            if grad.untyped_storage()._cdata in storages:
                # What was handed in is added to later; this must not change with it.
                grad = grad.clone()
            self.found[i] = grad
        return list(found[: len(inputs)])


class Root:
    """Where a backward pass begins: a tensor's place in the graph, not the tensor.

    Parameters
    ----------
    y : torch.Tensor
        The tensor; without a graph it begins nothing.
    grad : torch.Tensor or None
        Its gradient, in any dtype; None to give it later by ``receive``.
    """

    def __init__(self, y: Tensor, grad: Tensor | None = None) -> None:
        self.edge = get_gradient_edge(y) if y.requires_grad else None
        self._owner = _owner_of_graph(y) if y.requires_grad else None
        self._dtype = y.dtype
        if grad is not None:
            self.receive(grad)

    def receive(self, grad: Tensor) -> None:
        """Take the gradient."""
        self.grad = grad.to(self._dtype)


def _owner_of_graph(y: Tensor) -> Node | None:
    """Keep a graph alive that ends in an autograd.Function, as edges do of themselves.

    Those of torch 2.7 do not: the node in an edge is then a Python object that the
    graph owns, not the other way round.
    """
    if "ownership_token" in GradientEdge._fields:
        return None
    with torch.enable_grad():
        return y.view_as(y).grad_fn


def _refuse_other_leaves(
    module: nn.Module, roots: Sequence[Root], leaves: Sequence[Tensor]
) -> None:
    """Refuse a graph that reaches tensors whose gradient would be lost."""
    known = {id(leaf) for leaf in leaves}
    nodes = [root.edge.node for root in roots if root.edge is not None]
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
    """A stream's gradient, to which what residual functions hand down is added.

    Every node of a stream gives the one before it a gradient of its own, so it is added
    to in place.
    """

    def __init__(self, given: Tensor | None, in_place: bool) -> None:
        #: None as long as nobody handed anything down.
        self.value, self._in_place = given, in_place

    def filled(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Give the value, zeros at first, to who adds to it in its place."""
        if self.value is None:
            self.value = torch.zeros_like(like, dtype=dtype)
        return self.value

    def add(self, slope: Tensor | None) -> None:
        """Add what a residual function hands down, if it hands down anything."""
        if slope is None:
            return
        if self.value is None:
            wide = torch.promote_types(slope.dtype, torch.float32)
            self.value = slope.to(wide, copy=True)
            return
        self.value = self.value.add_(slope) if self._in_place else self.value + slope
