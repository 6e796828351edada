"""State that modules keep in plain attributes, put back for a second run.

Counters, lists and queues, tensors that are no buffers, generators: what a forward pass
changes of them must be changed once, and the second run must see what the first one saw.
"""

from __future__ import annotations

import copy
import enum
import functools
import io
import pathlib
import random
import re
import sys
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: A module holds these itself; a second run has other ones or none of its own.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
}
#: Modules of these packages keep no state that a forward pass changes in attributes.
_STATELESS = ("torch.nn.modules.", "speechbrain_rev.")
_IMMUTABLE = (
    types.NoneType, bool, int, float, complex, str, bytes, range, slice, type, enum.Enum,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    types.MethodWrapperType, functools.partial, re.Pattern, pathlib.PurePath, weakref.ref,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(threading.Lock()), type(threading.RLock()), type(Ellipsis),
)  # fmt: skip
#: A forward pass that has more objects in reach is not copied.
_LIMIT = 20_000

#: Values of a tensor that are compared, or kept where that would be waited for.
_SMALL = 2**16

#: Attributes that a warning has named, by class.
_named: set[tuple[type, str]] = set()


class Attributes:
    """Plain attributes of a module and its submodules before a first run.

    ``complete`` ends that run. As a context manager this puts what was before in place
    and, on leaving, what it found there.

    Parameters
    ----------
    module : nn.Module
        The module.
    objects : sequence
        What else its forward pass may change: its arguments.

    Examples
    --------
    >>> class Counting(nn.Module):
    ...     calls = 0
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x * self.calls
    >>> module = Counting()
    >>> attributes = Attributes(module)
    >>> module(1), module(1)
    (1, 2)
    >>> with attributes.complete():
    ...     module(1)
    1
    >>> module.calls
    2
    """

    def __init__(self, module: nn.Module, objects: Sequence[Any] = ()) -> None:
        self._places: list[_Place] = []
        self._tensors: dict[int, _Kept] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._found: list[Any] = []
        self._seen: dict[int, Any] = {}
        modules = list(module.modules())
        for x in objects:
            self._visit(x, (type(module), "forward's argument"))
        if not any(map(may_have_state, modules)):
            return
        for m in modules:
            # What is put in place for a second run by itself.
            for x in (m, *m._parameters.values(), *m._buffers.values()):
                self._seen[id(x)] = x
        for m in filter(may_have_state, modules):
            place = _Fields(m, _OF_EVERY_MODULE)
            self._places.append(place)
            for name, value in place.before.items():
                if not isinstance(value, _IMMUTABLE):
                    self._visit(value, (type(m), name))

    def complete(self) -> Attributes | None:
        """Note what the first run wrote to; None if there is nothing to put back."""
        for kept in self._tensors.values():
            kept.complete()
        # A second run needs no graph of an earlier forward pass, which would hold that.
        values = [x for place in self._places for x in place.leads_to()]
        ended = {
            id(x): x.detach().requires_grad_()
            for x in values
            if isinstance(x, Tensor) and x.grad_fn is not None
        }
        if ended:
            for place in self._places:
                place.before = place.replaced(ended)
        self._seen = {}
        return self if self._places else None

    def __enter__(self) -> None:
        copies: dict[int, Any]
        copies = {
            i: kept.again() for i, kept in self._tensors.items() if kept.is_needed()
        }
        copies |= {i: copy.deepcopy(kept) for i, (_, kept) in self._copies.items()}
        self._found = [place.contents() for place in self._places]
        for place, found in zip(self._places, self._found, strict=True):
            before = place.replaced(copies) if copies else place.before
            if _differ(found, before):
                place.put(before)

    def __exit__(self, *_: Any) -> None:
        for place, found in zip(self._places, self._found, strict=True):
            if _differ(place.contents(), found):
                place.put(found)
        self._found = []

    def _visit(self, value: Any, name: tuple[type, str]) -> None:
        """Note the contents of what a forward pass may change, and what it leads to."""
        left = [value]
        while left:
            x = left.pop()
            if isinstance(x, _IMMUTABLE) or id(x) in self._seen:
                continue
            self._seen[id(x)] = x
            if len(self._seen) > _LIMIT:
                _warn(name, f"(more than {_LIMIT:,} objects)")
                return
            if isinstance(x, Tensor):
                if not (x.requires_grad or x.is_inference()):
                    self._tensors[id(x)] = _Kept(x, f"{name[0].__name__}.{name[1]}")
                continue
            if isinstance(x, (tuple, frozenset)):
                left.extend(x)
                continue
            place = _place_of(x)
            if place is not None:
                self._places.append(place)
                left.extend(place.leads_to())
            else:
                self._copy(x, name)

    def _copy(self, x: Any, name: tuple[type, str]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if copy.copy(x) is not x:
                    self._copies[id(x)] = (x, copy.deepcopy(x))
        except Exception:
            _warn(name, f"({type(x).__name__})")


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
        not _is_known(type(m))  # type: ignore[arg-type]
        or "forward" in vars(m)
        or bool(m._forward_hooks or m._forward_pre_hooks)
    )


@functools.cache
def _is_known(kind: type) -> bool:
    """Whether a class is one of torch's layers or this package's, not made from one."""
    home = sys.modules.get(kind.__module__)
    ours = kind.__module__.startswith(_STATELESS)
    return ours and getattr(home, kind.__name__, None) is kind


def tensors_within(objects: Sequence[Any]) -> list[Tensor]:
    """List the tensors that objects lead to.

    Parameters
    ----------
    objects : sequence
        Anything; what modules hold is not listed.

    Returns
    -------
    list of torch.Tensor
        Each once.

    Examples
    --------
    >>> import types
    >>> [x.shape for x in tensors_within([types.SimpleNamespace(x=[torch.ones(2)])])]
    [torch.Size([2])]
    """
    left, seen = list(objects), dict[int, Any]()
    while left and len(seen) < _LIMIT:
        x = left.pop()
        if isinstance(x, (*_IMMUTABLE, nn.Module)) or id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, (tuple, frozenset)):
            left.extend(x)
        elif not isinstance(x, Tensor) and (place := _place_of(x)) is not None:
            left.extend(place.leads_to())
    return [x for x in seen.values() if isinstance(x, Tensor)]


class _Kept:
    """A tensor in an attribute, and what was in it before the first run."""

    def __init__(self, x: Tensor, name: str) -> None:
        self._x, self._name, self._version = x, name, x._version
        self._copy: Tensor | None = x.detach().clone()
        self._written = False

    def complete(self) -> None:
        """Drop the copy of a large tensor that the first run did not write to."""
        self._written = self._x._version != self._version
        if not self._written and self._x.numel() > _SMALL:
            self._copy = None

    def is_needed(self) -> bool:
        """Whether a second run has to get the copy.

        Torch's batch normalisation writes running statistics and counts no version.
        """
        if self._written or self._x._version != self._version:
            return True
        if self._copy is None or self._x.is_meta:
            return False
        return self._x.device.type != "cpu" or not torch.equal(self._x, self._copy)

    def again(self) -> Tensor:
        """Give a copy for the second run to write to."""
        if self._copy is None:
            raise RuntimeError(
                f"{self._name}, of shape {list(self._x.shape)}, was changed between a "
                "forward and its backward pass, where its block runs again. Change it "
                "after the backward pass, make it a buffer, or use mode='store' for this "
                "block."
            )
        return self._copy.clone()


def _warn(name: tuple[type, str], why: str) -> None:
    if name not in _named:
        _named.add(name)
        warnings.warn(
            f"{name[0].__name__}.{name[1]} {why} cannot be copied. If the forward pass "
            "changes it, a block that runs a second time sees the change. Use mode='store' "
            "for such a block, or leave it out of recompute_blocks.",
            stacklevel=2,
        )


class _Place:
    """An object that holds others, and what it held."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.before = self.contents()

    def contents(self) -> Any:
        """Copy what it holds now: a dict, or a list."""
        raise NotImplementedError

    def put(self, contents: Any) -> None:
        """Make it hold other contents."""
        raise NotImplementedError

    def leads_to(self) -> Iterator[Any]:
        """Give what it held."""
        values = self.before.values() if isinstance(self.before, dict) else self.before
        yield from values

    def replaced(self, copies: Mapping[int, Any]) -> Any:
        """Give what it held, copies in the place of what was copied."""
        if isinstance(self.before, dict):
            return {key: _replaced(x, copies) for key, x in self.before.items()}
        return [_replaced(x, copies) for x in self.before]


def _differ(now: Any, before: Any) -> bool:
    """Whether contents are not the same objects."""
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        pairs = zip(now.items(), before.items(), strict=True)
        return any(k != n or x is not y for (k, x), (n, y) in pairs)
    return any(x is not y for x, y in zip(now, before, strict=True))


def _reaches(x: Any, copied: Mapping[int, Any]) -> bool:
    if isinstance(x, (tuple, frozenset)):
        return any(_reaches(each, copied) for each in x)
    return id(x) in copied


def _replaced(x: Any, copies: Mapping[int, Any]) -> Any:
    if isinstance(x, (tuple, frozenset)) and _reaches(x, copies):
        parts = [_replaced(each, copies) for each in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return copies.get(id(x), x)


class _Fields(_Place):
    """Attributes of an object, in its dictionary and its slots."""

    def __init__(self, owner: Any, left_out: frozenset[str] = frozenset()) -> None:
        self._left_out = left_out
        self._slots = [
            name
            for cls in type(owner).__mro__
            for name in _as_names(vars(cls).get("__slots__", ()))
            if name not in ("__dict__", "__weakref__")
        ]
        super().__init__(owner)

    def contents(self) -> dict[str, Any]:
        fields = getattr(self.owner, "__dict__", {})
        own = {key: x for key, x in fields.items() if key not in self._left_out}
        for name in self._slots:
            if hasattr(self.owner, name):
                own[name] = getattr(self.owner, name)
        return own

    def put(self, contents: dict[str, Any]) -> None:
        fields = getattr(self.owner, "__dict__", {})
        for name in self.contents().keys() - contents.keys():
            if name in fields:
                del fields[name]
            else:
                object.__delattr__(self.owner, name)
        for name, value in contents.items():
            if name in self._slots:
                object.__setattr__(self.owner, name, value)
            else:
                fields[name] = value


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


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


class _Generator(_Place):
    """A generator of random numbers of torch."""

    def contents(self) -> list[Any]:
        return [self.owner.get_state()]

    def put(self, contents: list[Any]) -> None:
        self.owner.set_state(contents[0])


def _place_of(x: Any) -> _Place | None:
    """Tell how to note what an object holds; None if it must be copied as a whole."""
    if isinstance(x, (list, deque, set, bytearray)):
        return _Sequence(x)
    if isinstance(x, dict):
        return _Mapping(x)
    if isinstance(x, torch.Generator):
        return _Generator(x)
    if isinstance(x, (random.Random, io.IOBase)):
        return None
    if isinstance(x, nn.Module):
        return _Fields(x, _OF_EVERY_MODULE - {"_buffers", "_modules"})
    own = hasattr(x, "__dict__") or any("__slots__" in vars(c) for c in type(x).__mro__)
    return _Fields(x) if own and _is_of_python(type(x)) else None


def _is_of_python(kind: type) -> bool:
    """Whether all that instances hold is in dictionaries and slots, and none in C."""
    made_by_class_statement = 1 << 9  # Py_TPFLAGS_HEAPTYPE
    if kind is types.SimpleNamespace:
        return True
    return all(c.__flags__ & made_by_class_statement for c in kind.__mro__[:-1])
