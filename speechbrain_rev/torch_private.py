"""What this package asks of torch beyond its public names, each in one function.

A version of torch may take such a name away. ``tests/unit/test_torch_private.py`` then fails
with the function's name, and no other module has to change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn.modules import batchnorm as _batchnorm
from torch.nn.modules import module as _modules
from torch.nn.modules.utils import _pair
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch, _pytree
from torch.utils.data import dataloader as _dataloader

#: A mode that sees every operation, which a subclass counts or measures.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
#: A mode in which new tensors have shapes and no values.
FakeTensorMode = fake_tensor.FakeTensorMode
#: The class of all batch normalisations.
AnyBatchNorm = _batchnorm._BatchNorm
#: The class of what goes through a data loader's batches.
AnyDataLoaderIterator = _dataloader._BaseDataLoaderIter


def tree_leaves(tree: Any) -> list[Any]:
    """List the leaves of nested tuples, lists, dictionaries and registered containers."""
    return _pytree.tree_leaves(tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """List the leaves of a tree; give its structure, too."""
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: Any, structure: Any) -> Any:
    """Make a tree of leaves and a structure."""
    return _pytree.tree_unflatten(leaves, structure)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Call a function with each leaf; give the tree of results."""
    return _pytree.tree_map(function, tree)


def pair(number: Any) -> tuple[Any, Any]:
    """Give a number twice, as convolutions take it; a pair as it is."""
    both: tuple[Any, Any] = _pair(number)
    return both


def storage_key(x: Tensor | torch.UntypedStorage) -> int:
    """Give a number that tensors share if they share their storage, on meta as well."""
    storage = x.untyped_storage() if isinstance(x, Tensor) else x
    return int(storage._cdata)


def has_storage(x: Tensor) -> bool:
    """Whether a tensor has a storage, as sparse and batched ones have not."""
    return bool(torch._C._has_storage(x))


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has a shape alone, within a fake mode."""
    return isinstance(x, fake_tensor.FakeTensor)


def is_wrapper(x: Tensor) -> bool:
    """Whether a tensor is of a subclass that has others in place of values."""
    return _python_dispatch.is_traceable_wrapper_subclass(x)


def dispatch_mode() -> Any:
    """Give the innermost dispatch mode; None if there is none."""
    return _python_dispatch._get_current_dispatch_mode()


def without_dispatch() -> AbstractContextManager[Any]:
    """Hide operations from dispatch modes and subclasses of tensors for a while."""
    mode: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
    return mode


def set_version(x: Tensor, version: int) -> None:
    """Set how often a tensor was written to."""
    torch._C._autograd._unsafe_set_version_counter((x,), (version,))


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def saved_tensor_hooks() -> (
    tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
):
    """Give the innermost pair of saved-tensor hooks; None if there is none."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else tuple(hooks)


def graph_is_kept() -> bool:
    """Whether the backward pass under way will be allowed a second time."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def at_the_end_of_backward(function: Callable[[], None]) -> None:
    """Have a function called when the backward pass under way has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_transform() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is under way."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._functorch.maybe_current_level() is not None


def is_tracing() -> bool:
    """Whether torch.jit.trace is recording what runs."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def hooks_of_all_modules() -> tuple[bool, bool]:
    """Whether there are forward hooks, and backward hooks, on all modules."""
    return (
        bool(_modules._global_forward_hooks or _modules._global_forward_pre_hooks),
        bool(_modules._global_backward_hooks or _modules._global_backward_pre_hooks),
    )


def lists_of_weights(module: nn.Module) -> dict[str, Any]:
    """Give the lists that a recurrent layer has of its weights, by their attribute."""
    names = "_flat_weights", "_flat_weight_refs"
    return {name: vars(module)[name] for name in names if name in vars(module)}


def pose_as(alias: Tensor, p: Tensor) -> None:
    """Give an alias the attributes of a parameter, and let isinstance take it for one."""
    vars(alias).update(vars(p), _is_param=isinstance(p, nn.Parameter))


def is_sharded(module: nn.Module) -> bool:
    """Whether FullyShardedDataParallel has taken a module's parameters."""
    return bool(vars(module).get("_is_fsdp_managed_module"))


def parametrized_weights_are_kept() -> bool:
    """Whether ``parametrize.cached()`` is in force."""
    return bool(parametrize._cache_enabled)


def function_of(ctx: Any) -> Any:
    """Give the autograd function that a context is of."""
    return getattr(ctx, "_forward_cls", None)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, its call or its forward was given to torch.compile."""
    if module._compiled_call_impl is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile
    if dynamo is None:
        return False
    forward = module.forward
    wrapped = hasattr(forward, "_torchdynamo_orig_callable")
    disabled = getattr(forward, "_torchdynamo_disable", False)
    return isinstance(module, dynamo.OptimizedModule) or (wrapped and not disabled)
