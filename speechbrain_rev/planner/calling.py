"""How a network is called with an example batch, and what a training step of it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from speechbrain_rev.memory.report import make_gradients
from speechbrain_rev.memory.shapes import without_contents
from speechbrain_rev.planner.network import Network, as_network
from speechbrain_rev.planner.trace import Step

Module = TypeVar("Module", bound=nn.Module)


class NoStep(ValueError):
    """A network, a batch and a loss that make no training step."""


def tensors_of(tree: Any) -> list[Tensor]:
    """List the tensors in nested tuples, lists and dicts."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def have_numbers(module: nn.Module, batch: Any) -> bool:
    """Whether nothing of a module or a batch is on the meta device."""
    tensors = [*module.parameters(), *module.buffers(), *tensors_of(batch)]
    return not any(x.is_meta for x in tensors)


def own_batch(batch: Any, device: torch.device | str | None = None) -> Any:
    """Detach a batch, so that no gradient reaches what it was made of.

    Parameters
    ----------
    batch : tensor, or tuple, list or dict of such
        The batch.
    device : torch.device or str or None
        Where its tensors shall be; None leaves them where they are.

    Returns
    -------
    tensor, or tuple, list or dict of such
        The same numbers, which need gradients where the batch's do.
    """

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # What was made in inference mode cannot be trained on.
        numbers = x.clone() if x.is_inference() else x.detach()
        return numbers.to(device or x.device).requires_grad_(x.requires_grad)

    return tree_map(own, batch)


def call(module: nn.Module, batch: Any) -> Any:
    """Call a module: a tuple or list are its arguments, a dict its keywords."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def trainable(module: Module) -> Module:
    """Put a module into training, if it is not, with gradients, which steps add to.

    Parts of it that are in evaluation while the whole trains stay there.

    Parameters
    ----------
    module : nn.Module
        A copy, whose gradients nobody else reads.

    Returns
    -------
    nn.Module
        The module.
    """
    make_gradients(module if module.training else module.train())
    return module


def step_of(
    module: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None
) -> Step:
    """Make a training step: forward and backward pass.

    Parameters
    ----------
    module : nn.Module
        The network.
    batch : tensor, or tuple, list or dict of such
        What it is called with.
    loss : callable or None
        Makes the loss of what it returns; None for a sum of squares.

    Returns
    -------
    callable
        Runs the step. It raises NoStep if its loss is no number to be trained by.
    """
    loss = loss or _sum_of_squares

    def step() -> None:
        value = loss(call(module, batch))
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value)
            raise NoStep(f"The loss is {shape}; it must be a tensor of one number.")
        if not value.requires_grad:
            raise NoStep(
                "The loss depends on nothing that is trained, so that there is no "
                "backward pass to plan. Let a parameter of the network, or the batch, "
                "require a gradient."
            )
        value.backward()

    return step


def _sum_of_squares(outputs: Any) -> Tensor:
    found = tensors_of(outputs)
    wanted = [y for y in found if y.requires_grad] or [y.float() for y in found]
    if not wanted:
        raise NoStep(
            f"The network returns {type(outputs).__name__}, without a tensor. Give a "
            "loss that makes one of it."
        )
    return torch.stack([y.square().sum() for y in wanted]).sum()


def copied_to_meta(
    module: nn.Module,
    example_batch: Any,
    blocks: str | Sequence[str],
    loss: Callable[[Any], Tensor] | None,
) -> tuple[nn.Module, Network, Step]:
    """Copy a module without its contents, with a training step of it.

    Parameters
    ----------
    module, example_batch, blocks, loss
        As for ``plan``.

    Returns
    -------
    nn.Module
        The copy.
    Network
        Its blocks.
    callable
        Runs the step.
    """
    own = trainable(without_contents(module, torch.device("meta")))
    step = step_of(own, own_batch(example_batch, "meta"), loss)
    return own, as_network(own, blocks), step
