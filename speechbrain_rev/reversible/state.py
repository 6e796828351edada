"""State that modules keep in plain attributes, put back for a second run.

Counters, lists and queues, tensors that are no buffers, generators, and what functions and
methods among them hold: what a forward pass changes must be changed once, and the second run
must see what the first one saw.
"""

from __future__ import annotations

import copy
import enum
import functools
import io
import logging
import operator
import pathlib
import random
import re
import sys
import threading
import types
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
#: Classes of these packages keep no state of their own.
_LIBRARIES = ("torch.", "speechbrain_rev.", "builtins.", "abc.", "typing.")
#: Modules of these packages keep no state that a forward pass changes in attributes.
_STATELESS = ("torch.nn.modules.", "speechbrain_rev.")
_LEFT_ALONE = (
    types.NoneType, bool, int, float, complex, str, bytes, range, slice, type, enum.Enum,
    types.ModuleType, types.MappingProxyType, re.Pattern, pathlib.PurePath, weakref.ref,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(threading.Lock()), type(threading.RLock()), type(Ellipsis), threading.Thread,
    logging.Logger, logging.Handler, torch.optim.Optimizer,
)  # fmt: skip
#: Of these an attribute may be that is not a tensor itself.
_NO_TENSORS = frozenset({
    types.NoneType, bool, int, float, str, tuple, list, dict, OrderedDict, set, type,
    types.FunctionType,
})  # fmt: skip
#: A forward pass that has more objects in reach is not copied.
_LIMIT = 20_000

#: Values of a tensor that are compared, or kept where that would be waited for.
_SMALL = 2**16

#: Attributes that a warning has named, by class.
_named: set[tuple[type, str]] = set()
#: Those of them that lead to too many objects.
_too_large: set[tuple[type, str]] = set()


class Attributes:
    """Plain attributes of a module and its submodules before a first run.

    ``complete`` ends that run. As a context manager this puts what was before in place
    and, on leaving, what was there.

    Parameters
    ----------
    modules : sequence of nn.Module
        The module and those within it, as ``modules_of`` lists them.
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
    >>> attributes = Attributes([module])
    >>> module(1), module(1)
    (1, 2)
    >>> with attributes.complete():
    ...     module(1)
    1
    >>> module.calls
    2
    """

    def __init__(
        self, modules: Sequence[nn.Module], objects: Sequence[Any] = ()
    ) -> None:
        self._places: list[_Place] = []
        self._tensors: dict[int, KeptTensor] = {}
        self._copies: dict[int, _Copied] = {}
        self._after: list[Any] = []
        self._seen: dict[int, Any] = {}
        for x in objects:
            self._visit(x, (type(modules[0]), "forward's argument"))
        if is_ours(modules):
            return
        self._empty: list[dict[Any, Any]] = []
        # What is put in place for a second run by itself.
        for m in modules:
            self._seen[id(m)] = m
            for tensors in (m._parameters, m._buffers):
                if tensors:
                    self._seen |= {id(x): x for x in tensors.values()}
        for m in modules:
            # Others may change what torch's own layers do, or hook them.
            fields = _Fields(m, _OF_EVERY_MODULE)
            self._places.append(fields)
            hooks = _hooks_of(vars(m))
            if any(hooks):
                self._places.extend(map(_Mapping, hooks))
                for name, own in zip(_HOOKS, hooks, strict=True):
                    # Functions that hook may lead to the whole training: they fire twice.
                    for x in own.values():
                        if not isinstance(x, _FUNCTIONS):
                            self._visit(x, (type(m), name))
            else:
                self._empty.extend(hooks)
            if may_have_state(m):
                self._visit_fields(fields, type(m))
                self._visit_classes(type(m))
        self._places.append(_Empty(self._empty))

    def complete(self) -> Attributes | None:
        """Note what the first run wrote to; None if there is nothing to put back."""
        for tensor in self._tensors.values():
            tensor.complete()
        for other in self._copies.values():
            other.complete()
        # A second run needs no graph of an earlier forward pass, which would hold that.
        ended = {
            id(x): x.detach().requires_grad_()
            for place in self._places
            if not _NO_TENSORS.issuperset(map(type, place.values()))
            for x in place.values()
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
        copies |= {
            i: kept.again() for i, kept in self._copies.items() if kept.is_needed()
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

    def _visit_fields(self, place: _Fields, owner: type) -> None:
        for name, value in place.before.items():
            if name in _STANDARD or _is_left_alone(type(value)):
                continue
            if place.is_own(name, value) and (owner, name) not in _too_large:
                self._visit(value, (owner, name))

    def _visit_classes(self, kind: type) -> None:
        for cls in _classes_with_state(kind):
            if id(cls) in self._seen:
                continue
            self._seen[id(cls)] = cls
            fields = _ClassFields(cls)
            self._places.append(fields)
            self._visit_fields(fields, cls)
            for name, f in fields.before.items():
                if type(f) is not types.FunctionType:
                    continue
                if f.__closure__ or f.__defaults__ or f.__kwdefaults__ or f.__dict__:
                    self._visit(f, (cls, name))
                else:
                    self._empty.append(f.__dict__)

    def _visit(self, value: Any, name: tuple[type, str]) -> None:
        """Note the contents of what a forward pass may change, and what it leads to."""
        left, count = [value], 0
        while left:
            x = left.pop()
            if _is_left_alone(type(x)) or id(x) in self._seen:
                continue
            self._seen[id(x)] = x
            count += 1
            if count > _LIMIT:
                _too_large.add(name)
                _warn(name, f"(more than {_LIMIT:,} objects)")
                return
            if isinstance(x, Tensor):
                if not (x.requires_grad or x.is_inference()):
                    own = f"{name[0].__name__}.{name[1]}"
                    self._tensors[id(x)] = KeptTensor(x, own)
                continue
            if isinstance(x, _UNCHANGEABLE):
                left.extend(_members(x))
                continue
            places = _places_of(x)
            self._places.extend(places)
            for place in places:
                left.extend(place.leads_to())
            if not places:
                self._copy(x, name)

    def _copy(self, x: Any, name: tuple[type, str]) -> None:
        if _is_array(x) and x.size > _SMALL:
            _warn(name, f"(an array of shape {list(x.shape)})")
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if copy.copy(x) is not x:
                    self._copies[id(x)] = _Copied(x)
        except Exception:
            _warn(name, f"({type(x).__name__})")


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
        if _is_left_alone(type(x)) or isinstance(x, nn.Module) or id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, _UNCHANGEABLE):
            left.extend(_members(x))
        elif not isinstance(x, Tensor):
            for place in _places_of(x):
                left.extend(place.leads_to())
    return [x for x in seen.values() if isinstance(x, Tensor)]


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


class _Copied:
    """An object that is copied as a whole, and its copy from before the first run."""

    def __init__(self, x: Any) -> None:
        self._x, self._copy = x, copy.deepcopy(x)
        self._written = True

    def complete(self) -> None:
        """Note whether the first run wrote to it, as far as that can be seen."""
        self._written = not self._is_same()

    def is_needed(self) -> bool:
        """Whether a second run has to get a copy."""
        return self._written or not self._is_same()

    def again(self) -> Any:
        """Give a copy for the second run to write to."""
        return copy.deepcopy(self._copy)

    def _is_same(self) -> bool:
        if not _is_array(self._x):
            return False
        return bool(self._x.tobytes() == self._copy.tobytes())


@_by_class
def _is_left_alone(kind: type) -> bool:
    """Whether nothing is noted of instances of a class."""
    return issubclass(kind, _LEFT_ALONE)


@_by_class
def _classes_with_state(kind: type) -> tuple[type, ...]:
    """Give a class and those that it is made from, without those of libraries."""
    return tuple(cls for cls in kind.__mro__ if not _is_of_library(cls))


def _is_of_library(x: Any) -> bool:
    """Whether a class or a function is of a package that keeps no state."""
    return f"{x.__module__}.".startswith(_LIBRARIES)


def _is_array(x: Any) -> bool:
    return type(x).__module__ == "numpy" and hasattr(x, "tobytes")


def _warn(name: tuple[type, str], why: str) -> None:
    if name not in _named:
        _named.add(name)
        warnings.warn(
            f"{name[0].__name__}.{name[1]} {why} cannot be copied. If the forward pass "
            "changes it, a block that runs a second time sees the change. Use mode='store' "
            "for such a block, or leave it out of recompute_blocks.",
            stacklevel=2,
        )


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

    def leads_to(self) -> Iterable[Any]:
        """Give what it held that may lead to more."""
        return self.values()

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
        same = all(map(operator.is_, now.values(), before.values()))
        return not (same and all(map(operator.is_, now, before)))
    return not all(map(operator.is_, now, before))


#: What is made anew if something that it holds is.
_METHODS = types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType
_FUNCTIONS = types.FunctionType, functools.partial, *_METHODS
_UNCHANGEABLE = tuple, frozenset, functools.partial, *_METHODS


def _members(x: Any) -> tuple[Any, ...]:
    """Give what an object holds that is not changed itself."""
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if isinstance(x, _METHODS):
        return (x.__self__,)
    return tuple(x)


def _reaches(x: Any, copies: Mapping[int, Any]) -> bool:
    if isinstance(x, _UNCHANGEABLE):
        return any(_reaches(each, copies) for each in _members(x))
    return id(x) in copies


def _replaced(x: Any, copies: Mapping[int, Any]) -> Any:
    if not (isinstance(x, _UNCHANGEABLE) and _reaches(x, copies)):
        return copies.get(id(x), x)
    parts = [_replaced(each, copies) for each in _members(x)]
    if isinstance(x, functools.partial):
        return type(x)(parts[0], *parts[1], **parts[2])
    if isinstance(x, types.MethodType):
        return types.MethodType(x.__func__, parts[0])
    if isinstance(x, _METHODS):
        return getattr(parts[0], x.__name__)
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)


class _Fields(_Place):
    """Attributes of an object, in its dictionary and its slots.

    What is left out is copied, which is quicker than to choose, and never put.
    """

    def __init__(self, owner: Any, left_out: frozenset[str] = frozenset()) -> None:
        self._left_out = left_out
        self._slots = _slots_of(type(owner))
        super().__init__(owner)

    def is_own(self, name: str, value: Any) -> bool:
        """Whether a second run gets back what it was."""
        return name not in self._left_out

    def leads_to(self) -> Iterable[Any]:
        return [x for name, x in self.before.items() if self.is_own(name, x)]

    def contents(self) -> dict[str, Any]:
        own: dict[str, Any] = getattr(self.owner, "__dict__", {}).copy()
        for name in self._slots:
            if hasattr(self.owner, name):
                own[name] = getattr(self.owner, name)
        return own

    def put(self, contents: dict[str, Any]) -> None:
        fields = getattr(self.owner, "__dict__", {})
        for name, value in self.contents().items():
            if name not in contents and self.is_own(name, value):
                if name in fields:
                    del fields[name]
                else:
                    object.__delattr__(self.owner, name)
        for name, value in contents.items():
            if name in self._slots:
                object.__setattr__(self.owner, name, value)
            elif self.is_own(name, value):
                fields[name] = value


@_by_class
def _slots_of(kind: type) -> tuple[str, ...]:
    return tuple(
        _mangled(name, cls)
        for cls in kind.__mro__
        for name in _as_names(vars(cls).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    )


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _mangled(name: str, cls: type) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name


class _ClassFields(_Fields):
    """Attributes of a class, which its instances may count in; not its methods."""

    def is_own(self, name: str, value: Any) -> bool:
        special = name.startswith("__") and name.endswith("__")
        return not (special or isinstance(value, _OF_A_CLASS))

    def put(self, contents: dict[str, Any]) -> None:
        for name, value in self.contents().items():
            if name not in contents and self.is_own(name, value):
                delattr(self.owner, name)
        for name, value in contents.items():
            is_other = vars(self.owner).get(name) is not value
            if is_other and self.is_own(name, value):
                setattr(self.owner, name, value)


_OF_A_CLASS = (
    types.FunctionType, property, classmethod, staticmethod, types.MemberDescriptorType,
    types.GetSetDescriptorType, functools.cached_property,
)  # fmt: skip


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
    """Dictionaries that held nothing, as those of hooks and of functions do."""

    def contents(self) -> list[Any]:
        return [*map(dict, self.owner)] if any(self.owner) else []

    def put(self, contents: list[Any]) -> None:
        for own in self.owner:
            own.clear()
        for own, held in zip(self.owner, contents, strict=False):
            own.update(held)


class _Cell(_Place):
    """A variable that a function shares with the one around it."""

    def contents(self) -> list[Any]:
        try:
            return [self.owner.cell_contents]
        except ValueError:  # not assigned yet
            return []

    def put(self, contents: list[Any]) -> None:
        if contents:
            self.owner.cell_contents = contents[0]
        else:
            del self.owner.cell_contents


class _Defaults(_Place):
    """What a function takes where it is not given an argument."""

    def contents(self) -> list[Any]:
        return [self.owner.__defaults__, self.owner.__kwdefaults__]

    def put(self, contents: list[Any]) -> None:
        self.owner.__defaults__, self.owner.__kwdefaults__ = contents


class _Generator(_Place):
    """A generator of random numbers of torch."""

    def contents(self) -> list[Any]:
        return [self.owner.get_state()]

    def put(self, contents: list[Any]) -> None:
        self.owner.set_state(contents[0])


def _places_of(x: Any) -> list[_Place]:
    """Note what an object holds; nothing of one that must be copied as a whole."""
    if isinstance(x, types.FunctionType):
        return _places_of_function(x)
    if isinstance(x, (random.Random, io.IOBase)):
        return []
    if isinstance(x, torch.Generator):
        return [_Generator(x)]
    if isinstance(x, nn.Module):
        return [_Fields(x, _OF_EVERY_MODULE - {"_buffers", "_modules"})]
    places: list[_Place] = []
    if isinstance(x, (list, deque, set, bytearray)):
        places.append(_Sequence(x))
    elif isinstance(x, dict):
        places.append(_Mapping(x))
    elif not _is_of_python(type(x)):
        return []
    if hasattr(x, "__dict__") or any("__slots__" in vars(c) for c in type(x).__mro__):
        places.append(_Fields(x))
    return places


def _places_of_function(f: types.FunctionType) -> list[_Place]:
    """Note the variables around a function, its attributes and defaults."""
    if _is_of_library(f):
        return []
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    # What super() reads is the class.
    variables = [_Cell(cell) for name, cell in cells if name != "__class__"]
    defaults = f.__defaults__, f.__kwdefaults__
    return [*variables, _Mapping(vars(f)), *([_Defaults(f)] if any(defaults) else [])]


def _is_of_python(kind: type) -> bool:
    """Whether all that instances hold is in dictionaries and slots, and none in C."""
    made_by_class_statement = 1 << 9  # Py_TPFLAGS_HEAPTYPE
    if kind is types.SimpleNamespace:
        return True
    return all(c.__flags__ & made_by_class_statement for c in kind.__mro__[:-1])
