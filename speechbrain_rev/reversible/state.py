"""Plain attributes of modules, put back for a second run.

The second run sees what was in ``vars(module)`` before the first one: the attributes, the
contents of lists, dictionaries, sets and queues directly among them, and tensors, which are
treated as buffers. What is nested deeper is changed by both runs. ``comparison`` notices if
it enters a gradient.
"""

from __future__ import annotations

import functools
import operator
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_Answer = TypeVar("_Answer")


def _by_class(ask: Callable[[type], _Answer]) -> Callable[[type], _Answer]:
    """Ask a question about classes once of each."""
    return functools.cache(ask)


#: Where a module holds what hooks its forward pass: first the hooks, then more of them.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_hooks_of = operator.itemgetter(*_HOOKS)
_STANDARD = frozenset(vars(nn.Module()))
#: A module holds these itself; a second run has other ones or none of its own.
_OF_EVERY_MODULE = _STANDARD - {*_HOOKS}
#: Modules of these packages keep no state that a forward pass changes in attributes.
_STATELESS = ("torch.nn.modules.", "speechbrain_rev.")

#: Values of a tensor that are compared, or kept where that would be waited for.
_SMALL = 2**16


class Attributes:
    """Plain attributes of a module and its submodules before a first run.

    ``complete`` ends that run. As a context manager this puts what was before in place
    and, on leaving, what was there.

    Parameters
    ----------
    modules : sequence of nn.Module
        The module and those within it, as ``modules_of`` lists them.

    Examples
    --------
    >>> class Counting(nn.Module):
    ...     calls = 0
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x * self.calls
    >>> module = Counting()
    >>> attributes = Attributes([module])
    >>> module(1), module(1)
    (1, 2)
    >>> with attributes.complete():
    ...     module(1)
    1
    >>> module.calls
    2
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places: list[_Place] = []
        self._tensors: dict[int, KeptTensor] = {}
        self._after: list[Any] = []
        if is_ours(modules):
            return
        empty: list[dict[Any, Any]] = []
        for m in modules:
            # Others may change what torch's own layers do, or hook them.
            fields = _Fields(m)
            self._places.append(fields)
            hooks = _hooks_of(vars(m))
            if any(hooks):
                self._places.extend(map(_Mapping, hooks))
            else:
                empty.extend(hooks)
            if may_have_state(m):
                self._note_values(fields, type(m).__name__)
        self._places.append(_Empty(empty))

    def _note_values(self, fields: _Fields, owner: str) -> None:
        for name, value in fields.before.items():
            if name in _STANDARD:
                continue
            if isinstance(value, Tensor):
                if not (value.requires_grad or value.is_inference()):
                    self._tensors[id(value)] = KeptTensor(value, f"{owner}.{name}")
            elif isinstance(value, (list, deque, set)):
                self._places.append(_Sequence(value))
            elif isinstance(value, dict):
                self._places.append(_Mapping(value))

    def complete(self) -> Attributes | None:
        """Note what the first run wrote to; None if there is nothing to put back."""
        for tensor in self._tensors.values():
            tensor.complete()
        # A second run needs no graph of an earlier forward pass, which would hold that.
        ended = {
            id(x): x.detach().requires_grad_()
            for place in self._places
            for x in place.values()
            if isinstance(x, Tensor) and x.grad_fn is not None
        }
        if ended:
            for place in self._places:
                place.before = place.replaced(ended)
        return self if self._places else None

    def __enter__(self) -> None:
        copies = {
            i: kept.again() for i, kept in self._tensors.items() if kept.is_needed()
        }
        self._after = [place.contents() for place in self._places]
        for place, after in zip(self._places, self._after, strict=True):
            before = place.replaced(copies) if copies else place.before
            if _differ(after, before):
                place.put(before)

    def __exit__(self, *_: Any) -> None:
        for place, after in zip(self._places, self._after, strict=True):
            if _differ(place.contents(), after):
                place.put(after)
        self._after = []


def is_ours(modules: Sequence[nn.Module]) -> bool:
    """Whether a module is of this package, and so is what it consists of, or torch's."""
    ours = type(modules[0]).__module__.startswith("speechbrain_rev.")
    return ours and not any(map(may_have_state, modules))


def modules_of(module: nn.Module) -> list[nn.Module]:
    """List a module and those within it, each once, in the order of ``modules()``.

    That takes twice as long, which each call of a small block would feel.

    Examples
    --------
    >>> shared = nn.Tanh()
    >>> [type(m).__name__ for m in modules_of(nn.Sequential(shared, nn.ReLU(), shared))]
    ['Sequential', 'Tanh', 'ReLU']
    """
    listed: dict[int, nn.Module] = {}
    left: list[nn.Module | None] = [module]
    while left:
        m = left.pop()
        if m is not None and id(m) not in listed:
            listed[id(m)] = m
            if m._modules:
                left.extend(reversed(m._modules.values()))
    return list(listed.values())


def may_have_state(m: nn.Module) -> bool:
    """Whether a call of a module may change or keep what is outside its buffers.

    Parameters
    ----------
    m : nn.Module
        A module; those within it are not looked at.

    Returns
    -------
    bool
        False of torch's layers and this package's without forward hooks.
    """
    return (
        not _is_known(type(m))
        or "forward" in vars(m)
        or bool(m._forward_hooks or m._forward_pre_hooks)
    )


@_by_class
def _is_known(kind: type) -> bool:
    """Whether a class is one of torch's layers or this package's, not made from one."""
    home = sys.modules.get(kind.__module__)
    ours = kind.__module__.startswith(_STATELESS)
    return ours and getattr(home, kind.__name__, None) is kind


def version_of(x: Tensor) -> int:
    """Count the writes into a tensor; inference tensors do not keep count."""
    return 0 if x.is_inference() else x._version


class KeptTensor:
    """A buffer or a tensor in an attribute, and what was in it before a first run.

    Large ones are copied as long as it is not known that the first run leaves them alone.
    """

    def __init__(self, x: Tensor, name: str, *, written: bool = False) -> None:
        self._x, self._name, self._version = x, name, x._version
        self._written = written  # where it is known
        copied = self._is_small() or _large.get(x, True)
        self._copy: Tensor | None = x.detach().clone() if copied else None

    def complete(self) -> None:
        """Note whether the first run wrote to it; drop the copy of a large one if not."""
        changed = self._x._version != self._version
        self._written = self._written or changed or self._may_differ()
        if self._is_small():
            return
        if self._written and self._copy is None:
            raise RuntimeError(
                f"{self._name}, of shape {list(self._x.shape)}, is written to in a forward "
                "pass, which it was not before; its block cannot run again. "
                "Use mode='store' for this block, or leave it out of recompute_blocks."
            )
        _large[self._x] = self._written
        if not self._written:
            self._copy = None

    def for_second_run(self) -> Tensor:
        """Give what a second run may write to: a copy, if the first wrote."""
        return self.again() if self.is_needed() else self._x

    def is_needed(self) -> bool:
        """Whether a second run has to get the copy."""
        changed = self._x._version != self._version
        return self._written or changed or self._may_differ()

    def again(self) -> Tensor:
        """Give a copy for the second run to write to."""
        if self._copy is None:
            raise RuntimeError(
                f"{self._name}, of shape {list(self._x.shape)}, was changed between a "
                "forward and its backward pass, where its block runs again. Change it "
                "after the backward pass, or use mode='store' for this block."
            )
        return self._copy.clone()

    def _is_small(self) -> bool:
        return self._x.numel() <= _SMALL

    def _may_differ(self) -> bool:
        """Whether a write may have gone without a version, as of running statistics."""
        x = self._x
        if self._copy is None or x.is_meta or not self._is_small():
            return False
        if x.layout is not torch.strided or x.is_nested:
            return False
        return x.device.type != "cpu" or not torch.equal(x, self._copy)


class Untouched(KeptTensor):
    """A buffer that a second run neither reads nor writes to."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def complete(self) -> None:
        """Nothing is to be noted."""

    def for_second_run(self) -> Tensor:
        """Give the buffer."""
        return self._x


#: Large tensors, and whether a first run wrote to them.
_large = WeakTensorKeyDictionary()


class _Place(ABC):
    """An object that holds others, and what it held."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.before = self.contents()

    @abstractmethod
    def contents(self) -> Any:
        """Copy what it holds now: a dict, or a list."""

    @abstractmethod
    def put(self, contents: Any) -> None:
        """Make it hold other contents."""

    def values(self) -> Collection[Any]:
        """Give what it held, and perhaps what is not put back."""
        before = self.before
        return before.values() if isinstance(before, dict) else before

    def replaced(self, copies: Mapping[int, Any]) -> Any:
        """Give what it held, copies in the place of what was copied."""
        if isinstance(self.before, dict):
            return {key: copies.get(id(x), x) for key, x in self.before.items()}
        return [copies.get(id(x), x) for x in self.before]


def _differ(now: Any, before: Any) -> bool:
    """Whether contents are not the same objects."""
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        same = all(map(operator.is_, now.values(), before.values()))
        return not (same and all(map(operator.is_, now, before)))
    return not all(map(operator.is_, now, before))


class _Fields(_Place):
    """Attributes of a module.

    Those of every module are copied, which is quicker than to choose, and never put.
    """

    def contents(self) -> dict[str, Any]:
        return vars(self.owner).copy()

    def put(self, contents: dict[str, Any]) -> None:
        fields = vars(self.owner)
        for name in fields.keys() - contents.keys() - _OF_EVERY_MODULE:
            del fields[name]
        for name in contents.keys() - _OF_EVERY_MODULE:
            fields[name] = contents[name]


class _Sequence(_Place):
    """A list, a queue or a set."""

    def contents(self) -> list[Any]:
        return list(self.owner)

    def put(self, contents: list[Any]) -> None:
        self.owner.clear()
        add = self.owner.update if isinstance(self.owner, set) else self.owner.extend
        add(contents)


class _Mapping(_Place):
    """A dictionary of any kind."""

    def contents(self) -> dict[Any, Any]:
        return dict(self.owner)

    def put(self, contents: dict[Any, Any]) -> None:
        self.owner.clear()
        self.owner.update(contents)


class _Empty(_Place):
    """Dictionaries that held nothing, as those of hooks do."""

    def contents(self) -> list[Any]:
        return [*map(dict, self.owner)] if any(self.owner) else []

    def put(self, contents: list[Any]) -> None:
        for own in self.owner:
            own.clear()
        for own, held in zip(self.owner, contents, strict=False):
            own.update(held)
