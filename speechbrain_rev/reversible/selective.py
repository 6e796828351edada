"""Maps that are made again from what is kept anyway: mode "selective".

The backward pass of a convolution takes its input, which ReLU and normalisation made of
something that their own backward pass takes: both are kept, though one pass over memory
makes the first of the second. Within ``selecting()`` a table has, for each output of such
functions, the call that made it. Where an operation saves the output, the graph holds the
call instead. The call runs again when the backward pass asks for the output, on the same
numbers, so that its result has the same bits. ReLU and convolution share one result.

The table lists only outputs whose sources the graph holds as well. Whatever else is saved
is kept as it is: inputs of blocks, sums, outputs that were written to, other functions'.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from speechbrain_rev.compression.activations import Place
from speechbrain_rev.reversible.hooks import Held
from speechbrain_rev.reversible.norm import normalised
from speechbrain_rev.reversible.replay import Autocast, running
from speechbrain_rev.reversible.state import version_of
from speechbrain_rev.torch_private import (
    has_storage,
    saved_tensor_hooks,
    storage_key,
    tree_flatten,
    tree_unflatten,
)

#: Functions that take about as long as a copy.
_CHEAP = frozenset(
    [
        normalised, F.batch_norm, F.layer_norm, F.relu, torch.relu, torch.relu_,
        Tensor.relu, Tensor.relu_, F.gelu, F.pad, torch.cat, Tensor.contiguous,
    ]
)  # fmt: skip
_BATCH_NORM = inspect.signature(F.batch_norm)
_NAME = "a block in mode 'selective'"


@contextlib.contextmanager
def selecting() -> Iterator[None]:
    """Keep no output in this context that can be made again of what is kept.

    In a block that runs twice it changes nothing: a first run keeps nothing, a second one
    is part of the backward pass. What is compiled keeps what its compiler chooses.

    Examples
    --------
    >>> layers = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    >>> with selecting():
    ...     y = layers(torch.randn(2, 8, 16, 16))
    >>> y.sum().backward()
    >>> layers[0].weight.grad.shape
    torch.Size([8])
    """
    if torch.compiler.is_compiling() or running() or not torch.is_grad_enabled():
        yield
        return
    table = _Table()
    try:
        with saved_tensors_hooks(table.pack, lambda held: held.get()), _Noting(table):
            yield
    finally:
        table.clear()


class _CheapCall:
    """A call of a function, whose tensors are views of maps, or kept."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        leaves: list[Any],
        structure: Any,
        y: Tensor,
    ) -> None:
        self._function, self._leaves, self._structure = function, leaves, structure
        self._autocast = Autocast.now({y.device})

    def use(self) -> None:
        """Count one more who takes, in each backward pass, what it is called with."""
        for leaf in self._leaves:
            if isinstance(leaf, (_CheapCall, _View)):
                leaf.use()

    @torch.no_grad()
    def get(self) -> Tensor:
        """Call the function again."""
        leaves = (x.get() if isinstance(x, _KEPT) else x for x in self._leaves)
        args, keywords = tree_unflatten(leaves, self._structure)
        with self._autocast():
            return self._function(*args, **keywords)


class _Map:
    """A tensor at one version: its value, or the call that makes it again."""

    __slots__ = ("_asked", "_shared", "_users", "place", "source", "version")

    def __init__(self, x: Tensor, source: _Value | _CheapCall) -> None:
        self.place, self.version, self.source = Place(x), version_of(x), source
        self._users = self._asked = 0
        self._shared: Tensor | None = None

    def use(self) -> None:
        """Count one more who takes it in each backward pass."""
        self._users += 1
        if self._users == 1 and isinstance(self.source, _CheapCall):
            self.source.use()

    def make_by(self, call: _CheapCall) -> None:
        """Drop the value."""
        self.source = call
        if self._users:
            call.use()

    def get(self) -> Tensor:
        """Give the value, which is made or unpacked once and lives till all users have it."""
        x = self.source.get() if self._shared is None else self._shared
        self._asked += 1
        self._shared = x if self._asked % self._users else None
        return x


class _View:
    """A place within a map: what the graph holds, and what calls take."""

    __slots__ = ("map", "place")

    def __init__(self, of: _Map, place: Place) -> None:
        self.map, self.place = of, place

    def use(self) -> None:
        """Count one more who takes the map."""
        self.map.use()

    def get(self) -> Tensor:
        """Give what lies there."""
        x, whole = self.map.get(), self.map.place
        if x.stride() != whole.strides and self.place.shape != whole.shape:
            # Hooks around the block may give back a copy in another layout.
            x = x.new_empty_strided(whole.shape, whole.strides).copy_(x)
        return whole.part_in(x, self.place)


class _Packed:
    """A tensor as hooks around the block hold it: compressed, or on the host."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def get(self) -> Tensor:
        """Give the value."""
        return self._unpack(self._packed)


_Value = Held | _Packed
#: What a call has in the place of tensors.
_KEPT = (_CheapCall, _View, Held, _Packed)


class _Table:
    """The maps of a forward pass, by their storages."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[weakref.ref[Any], list[_Map]]] = {}
        self._hooks = saved_tensor_hooks()

    def clear(self) -> None:
        """Leave the maps to the graph."""
        self._maps.clear()

    def find(self, x: Tensor) -> _View | None:
        """Find a tensor, as it is now, in a map."""
        if not _has_place(x) or (known := self._maps.get(storage_key(x))) is None:
            return None
        place, version = Place(x), version_of(x)
        for each in known[1]:
            if each.version == version and each.place.covers(place):
                return _View(each, place)
        return None

    def pack(self, x: Tensor) -> _View | _Value:
        """Take what autograd wants to keep."""
        if x.dim() < 2 or isinstance(x, nn.Parameter) or not _has_place(x):
            return self._keep(x)  # no map
        view = self.find(x) or self._add(x, self._keep(x))
        view.use()
        return view

    def note(
        self, y: Tensor, function: Callable[..., Tensor], args: Any, keywords: Any
    ) -> None:
        """Note how a tensor was made, if the graph holds what it was made of."""
        leaves, structure = tree_flatten((args, keywords))
        new_bytes = 0
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                leaves[i] = view = self.find(x)
                if view is None:
                    leaves[i] = self._keep(x)
                    new_bytes += x.nbytes
        # Weights and statistics are small, another map is not.
        if 2 * new_bytes < y.nbytes:
            self._note(y, _CheapCall(function, leaves, structure, y))

    def note_write(
        self, y: Tensor, before: _View, function: Callable[..., Tensor], keywords: Any
    ) -> None:
        """Note what was written over an output that can be made again itself."""
        source = before.map.source
        if isinstance(source, _CheapCall) and before.place.covers(before.map.place):
            given = tree_flatten(((source,), keywords))
            self._note(y, _CheapCall(function, *given, y))

    def _note(self, y: Tensor, call: _CheapCall) -> None:
        # ReLU has saved its output by now, those that read it will.
        if (view := self.find(y)) is None:
            self._add(y, call)
        else:
            view.map.make_by(call)

    def _keep(self, x: Tensor) -> _Value:
        if self._hooks is None:
            return Held(_NAME, x.detach())
        pack, unpack = self._hooks
        return _Packed(pack(x), unpack)

    def _add(self, x: Tensor, source: _Value | _CheapCall) -> _View:
        storage, known = x.untyped_storage(), self._maps
        key = storage_key(storage)
        if key not in known:
            # The next storage may have the number of one that was freed.
            known[key] = weakref.ref(storage, lambda _: known.pop(key, None)), []
        new = _Map(x, source)
        known[key][1].append(new)
        return _View(new, new.place)


def _has_place(x: Tensor) -> bool:
    return x.layout is torch.strided and has_storage(x)


class _Noting(TorchFunctionMode):
    """Notes calls of cheap functions."""

    def __init__(self, table: _Table) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function."""
        kwargs = kwargs or {}
        if func not in _CHEAP:
            return func(*args, **kwargs)
        table = self._table
        given = (
            x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, list, tuple))
        )
        first = next(given)
        x: Tensor = first if isinstance(first, Tensor) else first[0]
        before, version = table.find(x), version_of(x)
        y: Tensor = func(*args, **kwargs)
        if not _has_place(y):
            return y
        if storage_key(y) != storage_key(x):
            table.note(y, func, *_without_running_statistics(func, args, kwargs))
        elif version_of(y) != version and before is not None:
            table.note_write(y, before, func, kwargs)
        return y


def _without_running_statistics(func: Any, args: Any, keywords: Any) -> tuple[Any, Any]:
    """Leave running statistics out of a call that updates them and does not read them."""
    if func is not F.batch_norm:
        return args, keywords
    call = _BATCH_NORM.bind(*args, **keywords)
    if call.arguments.get("training"):
        call.arguments.update(running_mean=None, running_var=None)
    return call.args, call.kwargs
